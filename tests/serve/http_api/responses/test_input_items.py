"""Input items become messages: calls join the assistant's message, results name their call."""

from serve.http_api.responses.input_items import messages_of


def call(number: int) -> dict:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", "status": "completed"}


def called(number: int) -> dict:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_calls_of_one_turn_stand_in_one_message():
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "well"},
        call(1),
        call(2),
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "reasoning", "id": "s", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call(3),
        {"type": "reasoning", "id": "t", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "done"},
    ]
    assert messages_of(None, items) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "well", "tool_calls": [called(1), called(2)]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [called(3)]},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
    ]


def test_instructions_come_first():
    assert messages_of("Rhyme.", "hi") == [
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "hi"},
    ]
