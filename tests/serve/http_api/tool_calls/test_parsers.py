"""Parsers of tool calls and of reasoning: what they find, and that it does not depend on how the text is divided."""

import itertools
import json
import random
import time

import pytest

from serve.http_api.tool_calls.constrained import ConstrainedCalls
from serve.http_api.tool_calls.distinct import DistinctCalls
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, PlainText, ReasoningText
from serve.http_api.tool_calls.forms import PARSERS, form_of
from serve.http_api.tool_calls.free_text import MAX_CALL_CHARS, MAX_FAILED
from serve.http_api.tool_calls.harmony import HarmonyOutput
from serve.http_api.tool_calls.openai_message import OpenAIMessage
from serve.http_api.tool_calls.reasoning import ReasoningFirst
from tests.support.cases import num_cases

NAMES = frozenset({"f", "get_weather"})
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def parser_of(name: str, max_calls: int = 16):
    form = form_of(name, "[ARGS]")
    assert form is not None
    return form.parser(NAMES, max_calls)


def read(parser, pieces):
    """(content, reasoning, [(name, arguments)]) of a text in pieces."""
    content, reasoning, calls = "", "", []
    for number, piece in enumerate(pieces):
        for event in parser.push(piece, number + 1 == len(pieces)):
            match event:
                case ContentText(text):
                    content += text
                case ReasoningText(text):
                    reasoning += text
                case CallStart(index, _, name):
                    assert index == len(calls)
                    calls.append([name, ""])
                case CallArguments(index, text):
                    assert index == len(calls) - 1
                    calls[-1][1] += text
    return content, reasoning, [tuple(call) for call in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Hello.", "Hello.", []),
        ("hermes", f"<tool_call>\n{PARIS}\n</tool_call>", "", [("get_weather", '{"city": "Paris"}')]),
        ("hermes", f"I look.\n<tool_call>{PARIS}", "I look.", [("get_weather", '{"city": "Paris"}')]),
        (
            "hermes",
            f"<tool_call>{PARIS}</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>\nDone. ",
            "Done. ",
            [("get_weather", '{"city": "Paris"}')] * 2,
        ),
        ("hermes", "<tool_call>{broken}</tool_call> x", "<tool_call>{broken}</tool_call> x", []),
        ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("hermes", "a <tool_call> b <", "a <tool_call> b <", []),
        ("hermes", '<tool_call>{"name": "new one", "arguments": {}}', '<tool_call>{"name": "new one", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}', "", [("f", '{"a": "</tool_call>"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("json", '{"name": "get_weather", "arguments": null}', "", [("get_weather", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (
            "llama3_json",
            ' {"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}',
            "",
            [("f", "{}"), ("f", '{"b": 2}')],
        ),
        ("llama3_json", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
        ("llama3_json", 'So {"name": "f", "parameters": {}}', 'So {"name": "f", "parameters": {}}', []),
        ("llama3_json", '{"name": "f", "parameters": {}} and', "and", [("f", "{}")]),
        ("json", f"[{PARIS}, {PARIS}]", "", [("get_weather", '{"city": "Paris"}')] * 2),
        ("json", PARIS, "", [("get_weather", '{"city": "Paris"}')]),
        ("json", '{"answer": 3}', '{"answer": 3}', []),
        ("json", "[1, 2] is a list", "[1, 2] is a list", []),
        ("mistral", f"[TOOL_CALLS] [{PARIS}]", "", [("get_weather", '{"city": "Paris"}')]),
        (
            "mistral",
            'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}',
            "Hm.",
            [("f", '{"a": 1}'), ("f", "{}")],
        ),
        ("mistral", 'f[TOOL_CALLS]f{"a": 1}', "f", [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS]f of x", "[TOOL_CALLS]f of x", []),
    ],
)  # fmt: skip
def test_calls_are_found_and_nothing_else_is_lost(name, text, content, calls):
    assert read(parser_of(name), [text]) == (content, "", calls)
    assert read(parser_of(name), list(text)) == (content, "", calls)


PIECES = [
    "<|channel|>", "analysis", "commentary to=functions.f", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "{}",
    "<|channel|>final<|message|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", PARIS,
    '{"name": "f", "parameters": {"a": [1, "}\\""]}}', "{", "}", "[", "]", '"', "\\", "\n", " ", " " * 70, ";", ",", "f", "é",
    '{"name": ', "null", "<tool", "[TOOL", "</",
]  # fmt: skip


@pytest.mark.parametrize("name", [*PARSERS, "reasoning", "constrained", "harmony", "constrained harmony"])
@pytest.mark.seeds
def test_events_do_not_depend_on_pieces(name):
    for seed in range(num_cases(150, 4000)):
        random_ = random.Random(seed)
        text = "".join(random_.choice(PIECES) for _ in range(random_.randrange(1, 14)))

        inside = random_.random() < 0.5

        def make(inside=inside):
            form = form_of("hermes", "")
            assert form is not None
            if name == "constrained":
                return ConstrainedCalls(form, NAMES, single=False, free_text=True)
            if name.endswith("harmony"):
                return HarmonyOutput(2, constrained=name.startswith("constrained"), in_content=inside)
            return ReasoningFirst(inside, PlainText()) if name == "reasoning" else parser_of(name, 2)

        whole = read(make(), [text])
        cuts = sorted(random_.randrange(len(text) + 1) for _ in range(random_.randrange(6)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert read(make(), pieces) == whole, text
        assert read(make(), [*text, ""]) == whole, text
        kept = "".join([whole[0], whole[1], *itertools.chain(*whole[2])])
        if not whole[2] and name != "reasoning" and not name.endswith("harmony"):
            cut_off = text.removeprefix(kept).strip() if name == "constrained" else ""
            assert kept == text or cut_off == "<tool_call>", text


def test_a_call_is_bounded():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * MAX_CALL_CHARS + '"}}</tool_call>'
    assert read(parser_of("hermes"), [text]) == (text, "", [])
    assert read(parser_of("hermes"), [text[i : i + 999] for i in range(0, len(text), 999)]) == (text, "", [])
    after = "<tool_call>" * (MAX_FAILED + 1) + f"<tool_call>{PARIS}</tool_call>"
    assert read(parser_of("hermes"), [after]) == (after, "", [])
    many = f"<tool_call>{PARIS}</tool_call>" * 3
    content, _, calls = read(parser_of("hermes", 2), [many])
    assert (content, len(calls)) == (f"<tool_call>{PARIS}</tool_call>", 2)


@pytest.mark.parametrize(
    ("inside", "text", "content", "reasoning"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        (True, "Hm. </think>Yes.\n", "Yes.\n", "Hm."),
        (True, "<think>Hm.", "", "Hm."),
        (True, "Hm. <", "", "Hm. <"),
        (False, "No <think> here</think>", "No <think> here</think>", ""),
        (False, "<thin", "<thin", ""),
        (False, "<think></think>", "", ""),
    ],
)
def test_reasoning_is_told_apart(inside, text, content, reasoning):
    for pieces in ([text], list(text)):
        assert read(ReasoningFirst(inside, PlainText()), pieces) == (content, reasoning, [])


ANALYSIS = "<|channel|>analysis<|message|>User asks for the weather. Call get_weather.<|end|><|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
WEATHER = ("get_weather", '{"city": "Paris"}')
HARMONY = {
    # text: (content, reasoning, calls); outputs end before <|call|> and <|return|>, which end them
    "<|channel|>final<|message|>It is sunny.": ("It is sunny.", "", []),
    f"{ANALYSIS}<|channel|>final<|message|>Sunny.\n": ("Sunny.\n", "User asks for the weather. Call get_weather.", []),
    f'{ANALYSIS}{TO_WEATHER}{{"city": "Paris"}}': ("", "User asks for the weather. Call get_weather.", [WEATHER]),
    f'{ANALYSIS}{TO_WEATHER}{{"city": "Paris"}}<|call|>': ("", "User asks for the weather. Call get_weather.", [WEATHER]),
    # the recipient as part of the role, and without the type of the arguments
    '<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>{"city": "Paris"}': ("", "", [WEATHER]),
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>': ("", "", [WEATHER]),
    # a preamble, and calls one after another
    f'<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_WEATHER}{{"city": "Paris"}}<|call|><|start|>assistant'
    '<|channel|>commentary to=functions.f<|message|>{}<|call|>': ("I look.", "", [WEATHER, ("f", "{}")]),
    "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.": ("One.\nTwo.", "", []),
    # without the mark that ends the analysis
    "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.<|return|>": ("Yes.", "Hm.", []),
    # no calls: not JSON, of a built-in tool, beyond the limit
    f"{TO_WEATHER}{{broken": ("{broken", "", []),
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>": ("", "print(1)", []),
    "<|channel|>commentary to=functions.f<|message|>{}<|call|>" * 3: ("{}", "", [("f", "{}")] * 2),
    # cut off, and without any header
    "<|channel|>analysis<|message|>Hm": ("", "Hm", []),
    "<|channel|>analy": ("", "", []),
    f"{ANALYSIS}<|channel|>comm": ("", "User asks for the weather. Call get_weather.", []),
    "Plain < text.": ("Plain < text.", "", []),
    "": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("text", HARMONY)
def test_harmony_cut_at_every_character(text):
    want = HARMONY[text]
    assert read(HarmonyOutput(2), [text]) == want
    assert read(HarmonyOutput(2), [*text, ""]) == want
    for at in range(len(text)):
        assert read(HarmonyOutput(2), [text[:at], text[at:]]) == want, at
    if "broken" not in text:
        assert read(HarmonyOutput(2, constrained=True), [*text, ""]) == want


def test_a_continued_answer_begins_within_its_text():
    assert read(HarmonyOutput(2, in_content=True), [" sunny.<|end|>"]) == (" sunny.", "", [])


def test_text_of_harmony_is_bounded():
    head = "<|channel|>" + "x" * 300 + "<|message|>y"
    assert read(HarmonyOutput(2), [head]) == read(HarmonyOutput(2), [*head, ""]) == (head, "", [])
    long = '{"a": "' + "x" * MAX_CALL_CHARS + '"}'
    text = f"{TO_WEATHER}{long}<|call|>"
    assert read(HarmonyOutput(2), [text]) == (long, "", [])
    assert read(HarmonyOutput(2), [text[i : i + 999] for i in range(0, len(text), 999)]) == (long, "", [])


def test_constrained_arguments_come_as_they_are_written():
    form = form_of("json", "")
    assert form is not None
    parser = ConstrainedCalls(form, NAMES, single=False, free_text=False)
    text = '[{"name": "f", "arguments": {"a": "b"}}, {"name": "get_weather", "arguments": {}}]'
    events = [parser.push(character, False) for character in text]
    assert [len(e) for e in events[:30]].count(1) == 3  # the name, then a character each
    assert isinstance(events[text.index("{", 2) - 1][0], CallStart)
    assert parser.push("", True) == []
    parser = ConstrainedCalls(form, NAMES, single=False, free_text=False)
    assert read(parser, [text]) == ("", "", [("f", '{"a": "b"}'), ("get_weather", "{}")])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "f", "argum', '[{"name": "f", "argum', []),
        ('[{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        ('[{"name": "f", "arguments": {}', "", [("f", "{}")]),
        ('[{"name": "f", "arguments": {}}, {"na', "", [("f", "{}")]),
    ],
)
def test_what_is_cut_off_is_not_lost(text, content, calls):
    form = form_of("json", "")
    assert form is not None
    for pieces in ([text], list(text)):
        parser = ConstrainedCalls(form, NAMES, single=False, free_text=False)
        assert read(parser, pieces) == (content, "", calls)


def test_the_deltas_of_a_message_add_up_to_it():
    text = f"<think>a</think>b<tool_call>{PARIS}</tool_call>"
    made = {"content": "", "reasoning_content": "", "arguments": ""}
    message = OpenAIMessage(ReasoningFirst(False, parser_of("hermes")))
    for number, character in enumerate(text):
        delta = message.push(character, number + 1 == len(text))
        for key in ("content", "reasoning_content"):
            made[key] += delta.get(key, "")
        for call in delta.get("tool_calls", []):
            made["arguments"] += call["function"]["arguments"]
    whole = message.whole()
    (call,) = whole["tool_calls"]
    assert made == {"content": "b", "reasoning_content": "a", "arguments": call["function"]["arguments"]}
    assert (whole["content"], whole["reasoning_content"]) == ("b", "a")
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert message.finish_reason("stop") == "tool_calls"
    assert message.finish_reason("length") == "length"


@pytest.mark.parametrize(
    ("template", "mark"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "<tool_call>"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "[TOOL_CALLS]"),
        ("{% if tools %}<|python_tag|>{% endif %}", ""),
        ("{{ messages }}", ""),
    ],
)
def test_the_form_is_the_templates(template, mark):
    form = form_of("auto", template)
    assert form is not None
    assert form.mark == mark
    assert form_of("none", template) is None


def test_long_arguments_of_a_constrained_call_take_linear_time():
    def seconds(num: int) -> float:
        form = form_of("hermes", "")
        assert form is not None
        parser = ConstrainedCalls(form, NAMES, single=True, free_text=False)
        parser.push(f'{form.opening}f{form.middle}{{"a": "', False)
        piece, begun = "\\\\ word" * 8, time.thread_time()
        for _ in range(num):
            parser.push(piece, False)
        return time.thread_time() - begun

    quick = min(seconds(1000) for _ in range(3))
    assert min(seconds(30_000) for _ in range(2)) < 60 * quick + 0.02  # 30 times the size


def test_a_message_of_many_pieces_is_joined_once():
    message = OpenAIMessage(parser_of("hermes"))
    text = "word " * 2000
    assert message.push(text, True) == {"content": text}
    call = f"<tool_call>{PARIS}</tool_call>"
    delta = OpenAIMessage(parser_of("hermes")).push(f"{text}{call}{call}", True)
    assert delta["content"] == text.rstrip() or delta["content"] == text
    assert [one["function"]["arguments"] for one in delta["tool_calls"]] == ['{"city": "Paris"}'] * 2


_CALLS = [
    ("f", '{"a": 1}'),
    ("get_weather", '{"city": "Paris"}'),
    ("f", '{"a": 1}'),
    ("f", '{"a": 12}'),
    ("f", '{"a": 1}'),
]


def _written(form, calls) -> str:
    texts = [f"{form.opening}{name}{form.middle}{arguments}{form.closing}" for name, arguments in calls]
    return form.prefix + form.separator.join(texts) + form.suffix


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_equals_an_earlier_one_is_left_out_however_the_text_is_divided(name):
    form = form_of(name, "[ARGS]")
    assert form is not None
    text = _written(form, _CALLS)
    for size in (1, 2, 3, 7, len(text)):
        parser = DistinctCalls(ConstrainedCalls(form, NAMES, single=False, free_text=False, only_calls=True))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(parser, pieces) == ("", "", [_CALLS[0], _CALLS[1], _CALLS[3]])


def test_arguments_come_as_soon_as_they_differ_from_those_of_earlier_calls():
    form = form_of("json", "")
    assert form is not None
    parser = DistinctCalls(ConstrainedCalls(form, NAMES, single=False, free_text=False, only_calls=True))
    parser.push(_written(form, _CALLS[:1]).removesuffix(form.suffix) + form.separator, False)
    assert parser.push(f'{form.opening}f{form.middle}{{"a": ', False) == []
    start, arguments = parser.push("2", False)
    assert isinstance(start, CallStart)
    assert (start.index, arguments) == (1, CallArguments(1, '{"a": 2'))
    assert parser.push("5", False) == [CallArguments(1, "5")]


@pytest.mark.parametrize("name", PARSERS)
def test_a_required_call_that_is_cut_off_anywhere_leaves_no_content(name):
    form = form_of(name, "[ARGS]")
    assert form is not None
    text = _written(form, _CALLS[:2])
    for end in range(len(text)):
        parser = DistinctCalls(ConstrainedCalls(form, NAMES, single=False, free_text=False, only_calls=True))
        message = OpenAIMessage(parser, only_calls=True)
        delta = message.push(text[:end], True)
        whole = message.whole()
        assert whole["content"] is None
        assert "content" not in delta
        for call, (name_of, arguments) in zip(whole.get("tool_calls", ()), _CALLS, strict=False):
            assert call["function"]["name"] == name_of
            assert arguments.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_constrained_call_that_is_cut_off_behind_its_mark_is_no_content(name):
    form = form_of(name, "[ARGS]")
    assert form is not None
    head = f"{form.opening}get_weather{form.middle}"
    for end in range(len(form.mark), len(head)):
        parser = ConstrainedCalls(form, NAMES, single=False, free_text=True)
        assert read(parser, ["I look.", head[:end]]) == ("I look.", "", [])
