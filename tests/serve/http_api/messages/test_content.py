"""Content blocks become messages: results of tools their own, consecutive messages of a role one turn."""

import time
from typing import Any

import pytest

from apt_jax.errors import InvalidRequestError
from serve.http_api.messages.content import BETWEEN_TURNS, messages_of


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


def use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"n": number}}


def result(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", **fields}


def test_a_conversation_with_tools():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, text("well"), use(1), use(2)]},
        {"role": "user", "content": [result(1, content="one"), result(2, content=[text("t"), text("wo")]), text("go"), text(" on")]},
        {"role": "assistant", "content": [use(3)]},
        {"role": "user", "content": [result(3)]},
    ]  # fmt: skip
    calls = [{"id": f"t{n}", "type": "function", "function": {"name": "f", "arguments": {"n": n}}} for n in range(1, 4)]
    assert messages_of([text("Be"), text(" brief.")], messages) == [
        {"role": "system", "content": [text("Be"), text(" brief.")]},
        {"role": "user", "content": [text("hi")]},
        {"role": "assistant", "content": [text("well")], "reasoning_content": "hm", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": [text("t"), text("wo")]},
        {"role": "user", "content": [text("go"), text(" on")]},
        {"role": "assistant", "content": [], "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    ]


def test_thoughts_of_a_turn_are_one_reasoning():
    def thought(given: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": given}

    turn = [{"role": "assistant", "content": [thought("a"), thought(""), text("x"), thought("b")]}]
    made = {"role": "assistant", "content": [text("x")]}
    assert messages_of(None, turn) == [{**made, "reasoning_content": "a\n\nb"}]
    assert messages_of(None, [*turn, *turn])[0]["reasoning_content"] == "a\n\nb\n\na\n\nb"
    silent = [{"role": "assistant", "content": [thought(""), text("x")]}]
    assert messages_of(None, silent) == [{**made, "reasoning_content": ""}]


def seconds(num: int) -> float:
    """CPU time of a long thought and many short ones behind it."""
    content = [
        {"type": "thinking", "thinking": "x" * 40 * num},
        *({"type": "thinking", "thinking": "y"} for _ in range(num)),
    ]
    begun = time.thread_time()
    messages_of(None, [{"role": "assistant", "content": content}, {"role": "user", "content": "a"}])
    return time.thread_time() - begun


def test_many_thoughts_take_linear_time():
    quick = min(seconds(5000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(2)) < 24 * quick + 0.05  # 8 times the size


def test_consecutive_messages_of_a_role_are_one_turn():
    users = [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), text("c")]}]
    assert messages_of(None, users) == [
        {"role": "user", "content": [text("a"), text(BETWEEN_TURNS), text("b"), text("c")]}
    ]
    late = [{"role": "user", "content": "a"}, {"role": "user", "content": [result(1, content="one")]}]
    assert messages_of(None, late) == [
        {"role": "user", "content": [text("a")]},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
    ]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"type": "image", "source": {}}, "images are not supported"),
        ({"type": "document", "source": {}}, "documents are not supported"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, "'tool_use' is not supported in messages of this role"),
        ({"type": "server_tool_use"}, "'server_tool_use' is not supported"),
        (result(1, content=[{"type": "image"}]), "images are not supported"),
        ("text", "a string is not a block"),
        ({"type": "text"}, "null is not text"),
    ],
)  # fmt: skip
def test_blocks_that_are_not_supported_are_refused_by_name(block, problem):
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        messages_of(None, [{"role": "user", "content": [text("a"), block]}])
    assert caught.value.field.startswith("messages[0].content[1]")
