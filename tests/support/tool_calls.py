"""Chat completions with tools, as a client sees them: whole, and put together from a stream."""

import json
from typing import Any

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
MESSAGES = [{"role": "user", "content": "Weather?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 400}


def tool(name: str = "get_weather", parameters: Any = CITY, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **fields}}


async def ask(served, **fields: Any) -> dict[str, Any]:
    response = await served.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def ask_streamed(served, **fields: Any) -> list[dict[str, Any]]:
    """The choices, as a client puts them together."""
    n = fields.get("n", 1)
    made: list[dict[str, Any]] = [{"content": "", "reasoning_content": "", "calls": []} for _ in range(n)]
    body = {"messages": MESSAGES, **GREEDY, **fields, "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            one, delta = made[choice["index"]], choice["delta"]
            for key in ("content", "reasoning_content"):
                one[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(one["calls"])
                    assert call["type"] == "function"
                    assert call["id"].startswith("call_")
                    one["calls"].append([call["function"]["name"], ""])
                one["calls"][call["index"]][1] += call["function"]["arguments"]
            one["finish_reason"] = choice["finish_reason"]
    return made


def seen(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole response as `ask_streamed` gives it."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "finish_reason": choice["finish_reason"],
    }
