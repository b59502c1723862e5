"""Grammars of calls: what they allow, decided by llguidance itself over a tokenizer with special tokens."""

import json
import random

import jsonschema
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from apt_jax.errors import InvalidRequestError
from apt_jax.request import StructuredOutputsParams
from apt_jax.structured.constraint import LIMITS
from apt_jax.text.tokenizer import Tokenizer
from serve.http_api.tool_calls.constrained import ConstrainedCalls
from serve.http_api.tool_calls.definitions import Function
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText
from serve.http_api.tool_calls.forms import PARSERS, form_of
from serve.http_api.tool_calls.grammar import answer_grammar, answer_rules, calls_grammar, harmony_grammar, literals_of
from tests.support.cases import num_cases
from tests.support.random_schemas import random_schema

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    Function(name="f", parameters=CITY, strict=True),
    Function(name="g", parameters={"type": "object"}, strict=False),
]


def tokenizer_of(*special: str) -> Tokenizer:
    """One token a byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["</s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", *special)])
    return Tokenizer(backend)


BYTES = tokenizer_of()
SPECIAL = tokenizer_of("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHANNELS = tokenizer_of("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>")


class Allows:
    """Asks llguidance whether a grammar allows a text, and whether it may end there."""

    def __init__(self, tokenizer: Tokenizer, lark: str) -> None:
        self._tokenizer = tokenizer
        self.their = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=0)
        limits = llguidance.LLParserLimits(**LIMITS)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        self.root = llguidance.LLMatcher(self.their, grammar, log_level=0, limits=limits)
        assert not self.root.is_error(), (self.root.get_error(), lark)

    def __call__(self, text: str) -> bool | None:
        """None: not allowed; else whether it may end there."""
        backend = tokenizers.Tokenizer.from_str(self._tokenizer.backend.to_str())
        ids = backend.encode(text, add_special_tokens=False).ids
        matcher = self.root.deep_copy()
        if matcher.validate_tokens(ids) < len(ids):
            return None
        matcher.consume_tokens(ids)
        return matcher.is_accepting()


def grammar(name: str, tokenizer: Tokenizer = BYTES, template: str = "", **options) -> Allows:
    form = form_of(name, template)
    assert form is not None
    given = {"max_calls": 2, "free_text": False, "reasoning": None, **options}
    return Allows(tokenizer, calls_grammar(form, FUNCTIONS, literals_of(tokenizer), **given))


HERMES = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_required_calls_are_bounded():
    allows = grammar("hermes")
    assert allows(HERMES) is True
    assert allows(f"{HERMES}\n{HERMES}") is True
    assert allows(f"{HERMES}\n{HERMES}\n") is None
    assert allows("Hello") is None
    assert allows(HERMES.replace("city", "town")) is None
    assert allows(HERMES.replace('"f"', '"h"')) is None
    assert allows('<tool_call>\n{"name": "g", "arguments": {"any": [1, {}]}}\n</tool_call>') is True
    assert allows(HERMES.replace('"}}', '", "more": 1}}')) is None
    assert grammar("hermes", max_calls=1)(HERMES + "\n") is None


def test_free_text_and_calls():
    allows = grammar("hermes", free_text=True)
    assert allows("Hello <tool") is True
    assert allows(f"I look.\n{HERMES}") is True
    assert allows(f"I look.\n{HERMES}\nand {HERMES}") is True
    assert allows("I look. <tool_call>x") is None
    assert allows('<tool_call>\n{"name": "f", "arguments": {"city": 3') is None
    one = grammar("hermes", free_text=True, max_calls=1)
    assert one(f"Look {HERMES}") is True
    assert one(f"Look {HERMES} ") is None


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_calls_that_begin_the_output(name):
    form = form_of(name, "")
    assert form is not None
    call = f'{form.opening}f{form.middle}{{"city": "x"}}{form.closing}'
    allows = grammar(name, free_text=True)
    for text in (form.prefix + call + form.suffix, form.prefix + call + form.separator + call + form.suffix):
        assert allows(text) is True
        assert grammar(name)(text) is True
    assert allows(f"So {call}") is True
    assert allows('{"answer": 3}') is True
    assert allows("[1]") is True
    assert allows(form.prefix + call.replace('"x"', "3") + form.suffix) is None
    assert allows(' { "name": ') is None


def test_marks_that_are_special_tokens():
    for template, text in (
        ("[ARGS]", '[TOOL_CALLS]f[ARGS]{"city": "x"}[TOOL_CALLS]g[ARGS]{}'),
        ("", '[TOOL_CALLS][{"name": "f", "arguments": {"city": "x"}}, {"name": "g", "arguments": {}}]'),
    ):
        assert grammar("mistral", SPECIAL, template)(text) is True
        assert grammar("mistral", BYTES, template)(text) is True
    allows = grammar("mistral", SPECIAL, "[ARGS]", free_text=True)
    assert allows('Hm. [TOOL_CALLS]f[ARGS]{"city": "x"}') is True
    assert allows("Hm. [TOOL_CALLS]x") is None
    assert allows("Hm.") is True
    assert grammar("hermes", SPECIAL, free_text=True)(f"Look {HERMES} ok") is True


@pytest.mark.parametrize("tokenizer", [BYTES, SPECIAL], ids=["text", "special"])
def test_constraints_begin_after_reasoning(tokenizer):
    inside = grammar("hermes", tokenizer, reasoning="inside")
    assert inside(f"Hm {{}}.</think>\n\n{HERMES}") is True
    assert inside(HERMES) is not True
    optional = grammar("hermes", tokenizer, reasoning="optional")
    assert optional(f"<think>\nHm.\n</think>\n\n{HERMES}") is True
    assert optional(HERMES) is True
    free = grammar("hermes", tokenizer, reasoning="optional", free_text=True)
    assert free("Hello") is True
    assert free(f"<think>I may write <tool></think>Look {HERMES}") is True
    assert free("<think>Hm.</think>Hi") is True
    assert free("<think>Hm.</think><tool_call>x") is None
    if tokenizer is BYTES:
        assert free("<think>I may write <tool_call>x</think>Look") is True


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (StructuredOutputsParams(json='{"type": "integer"}'), "12", "x"),
        (StructuredOutputsParams(json_object=True), '{"a": 1}', "1"),
        (StructuredOutputsParams(json="true"), "[1]", "x"),
        (StructuredOutputsParams(regex="a/b\\/|\n"), "a/b/", "b"),
        (StructuredOutputsParams(choice=("yes", 'n"o')), 'n"o', "z"),
    ],
)
def test_other_constraints_begin_after_reasoning_or_stand_beside_calls(constraint, good, bad):
    rules = answer_rules(constraint)
    assert rules is not None
    allows = Allows(BYTES, answer_grammar(rules, literals_of(BYTES), "inside"))
    assert allows(f"Hm.</think>\n{good}") is True
    assert allows(f"Hm.</think>\n{bad}") is None
    beside = grammar("hermes", free_text=True, answer=rules)
    assert beside(good) is True
    assert beside(HERMES) is True
    assert beside(bad) is None


@pytest.mark.parametrize("tokenizer", [BYTES, CHANNELS], ids=["text", "special"])
def test_channels(tokenizer):
    thought = "<|channel|>analysis<|message|>Hm: {.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}'
    final = "<|channel|>final<|message|>"

    def allows(functions, constraint=None, **options):
        answer = None if constraint is None else answer_rules(StructuredOutputsParams(**constraint))
        given = {"answer": answer, "only_calls": False, **options}
        return Allows(tokenizer, harmony_grammar(functions, literals_of(tokenizer), **given))

    required = allows(FUNCTIONS, only_calls=True)
    for before in ("", thought):
        assert required(before + call) is True
        assert required(before + final) is None
        assert required(before + call.replace("city", "town")) is None
        assert required(before + call.replace("functions.f", "functions.h")) is None
        free = allows(FUNCTIONS)
        assert free(before + call) is free(f"{before}{final}It is sunny.") is True
        either, only = (allows(functions, {"choice": ["yes"]}) for functions in (FUNCTIONS, []))
        assert either(before + call) is either(f"{before}{final}yes") is only(f"{before}{final}yes") is True
        assert only(before + call) is either(f"{before}{final}no") is None
    assert required("Plain") is None


def test_a_grammar_of_ones_own_has_rules_that_are_not_combined():
    assert answer_rules(StructuredOutputsParams(grammar='start: "x"')) is None


@pytest.mark.seeds
@pytest.mark.parametrize("name", PARSERS)
def test_every_call_of_random_schemas_parses_and_validates(name):
    """A model that chooses at random among the tokens that are allowed."""
    for seed in range(num_cases(4, 100)):
        random_ = random.Random(seed)
        functions = [
            Function(name=f"f-{number}", parameters=random_schema(random_), strict=True)
            for number in range(random_.randint(1, 3))
        ]
        tokenizer = SPECIAL if seed % 2 else BYTES
        form = form_of(name, "[ARGS]" if seed % 4 < 2 else "")
        assert form is not None
        max_calls = random_.choice((1, 3))
        lark = calls_grammar(
            form, functions, literals_of(tokenizer), max_calls=max_calls, free_text=False, reasoning=None
        )
        matcher = Allows(tokenizer, lark).root.deep_copy()
        ids: list[int] = []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(1, tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
            if matcher.is_accepting() and (not allowed or random_.random() < 0.5):
                break
            token = random_.choice(allowed)
            assert matcher.consume_token(token)
            ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        parser = ConstrainedCalls(form, frozenset(f.name for f in functions), single=max_calls == 1, free_text=False)
        events = parser.push(text, True)
        assert not any(isinstance(event, ContentText) for event in events), text
        starts = [event for event in events if isinstance(event, CallStart)]
        assert 1 <= len(starts) <= max_calls
        schemas = {f.name: f.parameters for f in functions}
        for start in starts:
            (arguments,) = [e.text for e in events if isinstance(e, CallArguments) and e.index == start.index]
            jsonschema.validate(json.loads(arguments), schemas[start.name])


ODD = {
    "type": "object",
    "properties": {"p": {"type": "string", "format": "path"}, "q": {"oneOf": [{"type": "integer"}, {"not": {}}, {}]}},
    "required": ["p", "q"],
}


def grammar_of(function: Function) -> str:
    form = form_of("hermes", "")
    assert form is not None
    return calls_grammar(form, [function], literals_of(BYTES), max_calls=1, free_text=False, reasoning=None)


def test_functions_that_are_not_strict_are_not_refused_for_what_cannot_be_enforced():
    call = '<tool_call>\n{"name": "f", "arguments": {"p": "/tmp", "q": 1}}\n</tool_call>'
    assert Allows(BYTES, grammar_of(Function(name="f", parameters=ODD, strict=False)))(call) is True
    with pytest.raises(
        InvalidRequestError,
        match=r"tools: parameters of 'f': properties.[a-z]+.oneOf: its branches 0 and 1 may overlap",
    ):
        grammar_of(Function(name="f", parameters=ODD, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_formats_of_arguments(strict):
    parameters = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}, "d": {"format": "date"}}}
    allows = Allows(BYTES, grammar_of(Function(name="f", parameters=parameters, strict=strict)))
    assert allows('<tool_call>\n{"name": "f", "arguments": {"p": "/tmp", "d": "2024-02-29') is False
    assert allows('<tool_call>\n{"name": "f", "arguments": {"p": "/tmp", "d": "2023-02-29') is None
