"""Tool definitions, calls and results as text, for chat templates without support for tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = (
    "You can call functions. To call one, answer with a JSON object alone that has its name and its arguments: "
    '{"name": "FUNCTION", "arguments": {...}}. To call several, answer with an array of such objects. '
    "The functions, one a line:"
)


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the conversation with text messages only.

    Tool definitions go to the end of the system message, which is added if missing; calls go into the content of
    assistant messages, and tool results into user messages.

    Args:
        messages: checked messages.
        tools: checked tools; None or empty: no tools.
    """
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
        if message["role"] == "tool":
            text = _result(message, names)
            if made and "results" in made[-1]:  # templates expect alternating turns
                made[-1]["results"].append(text)
            else:
                made.append({"role": "user", "results": [text]})
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            written = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
            text = json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)
            plain["content"] = "\n".join(filter(None, (plain["content"], text)))
        made.append(plain)
    for message in made:
        if "results" in message:
            message["content"] = "\n\n".join(message.pop("results"))
    if tools:
        definitions = "\n".join([_INSTRUCTIONS, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)])
        if made[0]["role"] in ("system", "developer"):
            made[0]["content"] = f"{made[0]['content']}\n\n{definitions}"
        else:
            made.insert(0, {"role": "system", "content": definitions})
    return made


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id", ""))
    return f"{f'Tool {name}' if name else 'The tool'} answered: {message['content']}"
