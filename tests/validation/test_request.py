"""Every bad value of every field is one clear line that names the field; nothing is coerced."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax import validation
from apt_jax.config import SLO
from apt_jax.errors import ConfigError, InvalidRequestError
from apt_jax.request import Grammar, SamplingParams, StructuredOutputsParams
from apt_jax.validation import RequestLimits, build_request, build_requests, sampling, unsupported
from apt_jax.validation.prompt import checked_prompt

LIMITS = RequestLimits(
    vocab_size=300,
    max_model_len=64,
    max_pool_tokens=48,
    eos_token_ids=(2,),
    default_slo=SLO(ttft_s=1.0, tbt_s=0.5),
)
HUGE = 10**5000
TINY = 1e-40  # a denormal as a 32-bit number


class ByteEncoder:
    """One token per byte, after a special one."""

    vocab_size = 300

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return [*([2] if add_special_tokens else []), *(3 + b for b in text.encode())]

    def min_tokens(self, text: str) -> int:
        return len(text.encode())


def build(prompt: object = "hello", *, limits=LIMITS, tokenizer=None, **fields):
    tokenizer = ByteEncoder() if tokenizer is None else tokenizer
    return build_request(limits, tokenizer, prompt=prompt, arrival_s=1.5, **fields)


def refused(field: str, **fields) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        build(**fields)
    message = str(caught.value)
    assert caught.value.field.split("[")[0] == field
    assert message.startswith(field)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_max_tokens_of_none_asks_for_what_is_left():
    limits = dataclasses.replace(LIMITS, max_pool_tokens=None)
    room = limits.max_model_len - 6
    assert build("hello", limits=limits, params={"max_tokens": None}).params.max_tokens == room
    assert build("hello", limits=limits, params=SamplingParams(max_tokens=None)).params.max_tokens == room  # type: ignore[arg-type]
    small = dataclasses.replace(LIMITS, max_pool_tokens=20)
    assert build("hello", limits=small, params={"max_tokens": None}).params.max_tokens == 14
    refused("min_tokens", limits=small, params={"max_tokens": None, "min_tokens": 15})
    assert build("hello", limits=small, params={"max_tokens": None, "min_tokens": 14})
    long = "x" * (limits.max_model_len - 1)
    refused("prompt", prompt=long, params={"max_tokens": None})
    refused("max_tokens", prompt="x" * 19, limits=small, params={"max_tokens": None})


def test_what_is_too_long_has_a_code():
    for fields in (
        {"prompt": "x" * 400},
        {"prompt": None, "prompt_token_ids": [1] * 64},
        {"prompt": "x" * 60, "params": {"max_tokens": 30}},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            build(**fields)  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError) as caught:
        build(params={"top_p": 2.0})
    assert caught.value.code is None


def test_deadlines_are_positive_and_a_day_at_most():
    assert validation.check_deadline_ms(250) == 0.25
    for value in (0, -1, math.nan, math.inf, 1e18, "5", True, None):
        with pytest.raises(InvalidRequestError, match="deadline_ms"):
            validation.check_deadline_ms(value)


def test_the_answers_of_one_call_are_limited():
    few = dataclasses.replace(LIMITS, max_sequences=16)
    assert validation.check_sequences(LIMITS, 1, 128) == 128
    assert validation.check_sequences(few, 1, 16) == 16
    assert validation.check_sequences(few, 4, 4) == 4
    for num_prompts, n, field in (
        (1, 17, "n"),
        (1, 0, "n"),
        (9, 2, "n"),
        (17, 1, "prompt"),
        (1, 1.0, "n"),
        (1, True, "n"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            validation.check_sequences(few, num_prompts, n)
        assert caught.value.field == field


def test_a_request_is_complete_and_frozen():
    request = build("hé", params=SamplingParams(max_tokens=3), fallback_seed=7)
    assert request.prompt == "hé"
    assert request.prompt_token_ids.tolist() == [2, 3 + 0x68, 3 + 0xC3, 3 + 0xA9]
    assert request.prompt_token_ids.dtype == np.int32
    assert request.params == SamplingParams(max_tokens=3, seed=7, stop_token_ids=(2,))
    assert request.slo == SLO(ttft_s=1.0, tbt_s=0.5)
    assert (request.slo_class, request.arrival_s) == ("rt", 1.5)
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.prompt = "other"  # type: ignore[misc]


def test_the_seed_given_stays_and_eos_can_be_ignored():
    params = build(params=SamplingParams(seed=5, ignore_eos=True, stop_token_ids=(9, 9))).params
    assert (params.seed, params.stop_token_ids) == (5, (9,))
    assert build(params=SamplingParams(stop_token_ids=(9, 2))).params.stop_token_ids == (9, 2)


# --- request id ----------------------------------------------------------------------------------------------------


def test_request_ids_are_generated_when_absent():
    ids = {build().request_id for _ in range(3)}
    assert len(ids) == 3
    assert all(i.startswith("req-") for i in ids)


@pytest.mark.parametrize(
    "value",
    ["", "a" * 129, "a b", "a\n", "a\x1b[0m", "../x", "é", "x" * 10**6, 5, True, b"a", HUGE],
    ids=lambda _: "value",
)
def test_R20_request_ids(value):
    refused("request_id", request_id=value)


def test_a_good_request_id_stays():
    assert build(request_id="A.b_c-9").request_id == "A.b_c-9"


# --- prompt --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids"])
def test_R1_empty_prompts(field):
    refused(field, **{"prompt": None, field: "" if field == "prompt" else []})


def test_a_prompt_must_be_given_once():
    assert "missing" in refused("prompt", prompt=None)
    assert "not both" in refused("prompt", prompt="a", prompt_token_ids=[1])


@pytest.mark.parametrize("value", [5, b"text", ["text"], True, {"text": 1}])
def test_R14_prompts_of_another_type(value):
    refused("prompt", prompt=value)


def test_R15_a_lone_surrogate_is_refused_and_nul_is_text():
    assert "character 1" in refused("prompt", prompt="a\ud800b")
    assert build("a\0b").prompt_token_ids.tolist() == [2, 100, 3, 101]


def test_R2_a_long_text_is_refused_before_it_is_tokenised():
    tokenizer = ByteEncoder()
    message = refused("prompt", prompt="secret " * 100_000, tokenizer=tokenizer)
    assert "at least 700000 tokens" in message
    assert "max_model_len=64" in message
    assert "secret" not in message
    assert tokenizer.num_encoded == 0


def test_R2_prompt_and_output_together_are_bounded_and_the_message_says_by_how_much():
    limits = dataclasses.replace(LIMITS, max_pool_tokens=None)
    message = refused("max_tokens", prompt="x" * 50, limits=limits, params=SamplingParams(max_tokens=16))
    assert "by 3" in message
    assert "can be at most 13" in message
    assert build("x" * 50, limits=limits, params=SamplingParams(max_tokens=13))
    refused("prompt", prompt="x" * 63, limits=limits, params=SamplingParams(max_tokens=1))
    assert "64 prompt tokens" in refused("prompt_token_ids", prompt=None, prompt_token_ids=[1] * 64, limits=limits)


def test_R3_what_can_never_fit_the_pool_is_refused():
    message = refused("max_tokens", prompt="x" * 33, params=SamplingParams(max_tokens=16))
    assert "48 tokens in total: 2 too many" in message
    assert build("x" * 31, params=SamplingParams(max_tokens=16))


def test_text_of_special_tokens_alone_is_a_prompt():
    class Nothing(ByteEncoder):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [2]

    assert build(" ", tokenizer=Nothing()).prompt_token_ids.tolist() == [2]


def test_text_without_any_token_and_models_without_tokenizer():
    class Nothing(ByteEncoder):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    refused("prompt", prompt="x", tokenizer=Nothing())
    with pytest.raises(InvalidRequestError, match="--tokenizer"):
        build_request(LIMITS, None, prompt="text", arrival_s=0.0)
    assert build_request(LIMITS, None, prompt_token_ids=[1], arrival_s=0.0)


@pytest.mark.parametrize(
    "ids",
    [[-1], [0, 300], [2**31], [2**70], [HUGE], [1.0], ["1"], [True], [None], [[1]], [math.nan], "12", b"12", 5, {1: 2}],
    ids=lambda _: "value",
)
def test_R4_token_ids(ids):
    refused("prompt_token_ids", prompt=None, prompt_token_ids=ids)


def test_R4_the_message_names_the_place():
    with pytest.raises(InvalidRequestError, match=r"prompt_token_ids\[2\]: 300 must be"):
        build(None, prompt_token_ids=[1, 2, 300])


@pytest.mark.parametrize("ids", [np.array([1.0]), np.array([[1]]), np.array([300]), np.array([-1]), np.array([True])])
def test_R4_arrays(ids):
    refused("prompt_token_ids", prompt=None, prompt_token_ids=ids)


@pytest.mark.parametrize("ids", [[0, 299], (0, 299), np.array([0, 299]), np.array([0, 299], "u2")])
def test_token_ids_are_taken_as_they_are(ids):
    source = ids.copy() if isinstance(ids, np.ndarray) else ids
    request = build(None, prompt_token_ids=ids)
    assert request.prompt_token_ids.tolist() == [0, 299]
    if isinstance(ids, np.ndarray):  # a copy: the caller may write to its own
        ids[0] = 7
        assert source[0] == request.prompt_token_ids[0]


# --- sampling parameters -------------------------------------------------------------------------------------------

NOT_NUMBERS = ["2", True, None, [1.0], b"1", np.bool_(True), 1j]
NOT_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan"), TINY, -TINY, 5e-324, HUGE]
NOT_INTEGERS = ["2", True, [1], 1.5, 1.0, math.nan, np.float64(2.0)]
BAD = {
    "max_tokens": [0, -1, 2**31, 2**63, HUGE, *NOT_INTEGERS],
    "temperature": [-0.1, -0.0, 2.1, *NOT_NUMBERS, *NOT_FINITE],
    "top_k": [-2, 2**31, HUGE, None, *NOT_INTEGERS],
    "top_p": [-0.0, -0.5, 1.1, *NOT_NUMBERS, *NOT_FINITE],
    "min_p": [-0.0, -0.5, 1.1, *NOT_NUMBERS, *NOT_FINITE],
    "seed": [-(2**63) - 1, 2**63, HUGE, *NOT_INTEGERS],
    "repetition_penalty": [0.0, -0.0, -1.0, 2.1, 1e-9, *NOT_NUMBERS, *NOT_FINITE],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS, *NOT_FINITE],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS, *NOT_FINITE],
    "logit_bias": [
        {300: 1.0}, {-1: 1.0}, {2**40: 1.0}, {"2": 1.0}, {True: 1.0}, {1.0: 1.0}, {1: "1"}, {1: True}, {1: math.nan},
        {1: math.inf}, {1: 100.5}, {1: -101}, {1: TINY}, [(1, 1.0)], "x", 5, dict.fromkeys(range(301), 1.0),
    ],
    "min_tokens": [-1, 17, None, 2**63, HUGE, *NOT_INTEGERS],
    "stop": ["", [""], ["a"] * 17, ["a" * 257], ["a" * 10**6], [1], [None], [b"a"], b"a", 5, True, ["\ud800"], {"a"}],
    "stop_token_ids": [[300], [-1], [2**40], ["2"], [True], [1.0], "12", 5, list(range(17)), {2}],
    "ignore_eos": [0, 1, "true", None],
    "include_stop_str_in_output": [0, "yes", None],
    "skip_special_tokens": [1, "no", None],
    "logprobs": [-1, 21, HUGE, *NOT_INTEGERS],
    "prompt_logprobs": [-1, 21, HUGE, *NOT_INTEGERS],
    "structured_outputs": [
        5, "{}", True, [], {}, {"json": None}, {"json_object": False}, {"jsn": "{}"}, {1: 2}, {"json": "{}", "regex": "a"},
        {"json_object": True, "choice": ["a"]}, StructuredOutputsParams(), StructuredOutputsParams(json={}, grammar="a"),
    ],
    "bad_words": ["a", [""], ["a"] * 129, ["a" * 257], [1], [None], b"a", 5, True, ["\ud800"], {"a"}],
    "allowed_token_ids": [[], [300], [-1], ["2"], [True], [1.0], "12", 5, {2}],
    "truncate_prompt_tokens": [0, -2, 2**31, HUGE, *NOT_INTEGERS],
    "pooling": ["max", "", 1, True],
    "n": [0, -1, 129, None, HUGE, *NOT_INTEGERS],
}  # fmt: skip


def test_every_sampling_field_has_bad_values():
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("field", "index"), [(field, i) for field, values in BAD.items() for i in range(len(values))])
@pytest.mark.parametrize("mapping", [False, True])
def test_R5_R7_R8_R9_R10_R14_sampling_fields(field, index, mapping):
    fields = {field: BAD[field][index]}
    refused(field, params=fields if mapping else SamplingParams(**fields))


GOOD = [
    {"max_tokens": np.int64(3)},
    {"temperature": 0},
    {"temperature": 0.01},
    {"temperature": np.float32(0.5)},
    {"temperature": 2},
    {"top_k": 1},
    {"top_p": 1},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2},
    {"frequency_penalty": 2.0},
    {"logit_bias": {0: -100, 299: 100.0}},
    {"min_tokens": 16},
    {"stop": ("a" * 256, "b", *(f"{i}" for i in range(14)))},
    {"bad_words": ("a" * 256, "b")},
    {"allowed_token_ids": (0, 299)},
    {"truncate_prompt_tokens": 1},
    {"stop_token_ids": tuple(range(16))},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_on_the_border_are_taken(fields):
    checked = build(params=fields).params
    for name, value in fields.items():
        got = getattr(checked, name)
        assert set(value) <= set(got) if name == "stop_token_ids" else got == value
        assert not isinstance(got, np.generic)


def test_a_temperature_that_is_too_small_is_raised_and_said_so_once(caplog, monkeypatch):
    monkeypatch.setattr(sampling, "_raised_temperatures", sampling._RaisedTemperatures())
    with caplog.at_level("WARNING", logger="apt_jax.validation"):
        assert [build(params={"temperature": t}).params.temperature for t in (1e-8, 0.001, 0.00999)] == [0.01] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "temperature 1e-08 is raised to 0.01, below which results may overflow (1 time since the last such message)"
    ]
    assert build(params={"temperature": 0.0}).params.is_greedy


def test_a_seed_of_minus_one_is_none():
    assert build(params={"seed": -1}, fallback_seed=7).params == build(fallback_seed=7).params


def test_only_the_last_tokens_of_a_prompt_are_kept():
    ids = list(range(30))
    kept = build(None, prompt_token_ids=ids, params={"truncate_prompt_tokens": 4})
    assert kept.prompt_token_ids.tolist() == [26, 27, 28, 29]
    assert build(None, prompt_token_ids=ids, params={"truncate_prompt_tokens": 31}).prompt_token_ids.tolist() == ids
    long = [5] * (10 * LIMITS.max_model_len)
    room = build(None, prompt_token_ids=long, params={"truncate_prompt_tokens": -1, "max_tokens": 10})
    assert room.prompt_token_ids.size + 10 == min(LIMITS.max_model_len, LIMITS.max_pool_tokens or 10**9)
    text = build("hello " * 2000, params={"truncate_prompt_tokens": 3})
    assert text.prompt_token_ids.tolist() == [2, 3 + ord("o"), 3 + ord(" ")]
    assert text.prompt is None  # it is not what was read
    with pytest.raises(InvalidRequestError, match="characters"):
        build("hello " * 10**6, params={"truncate_prompt_tokens": 3})


def test_the_first_special_token_of_a_text_is_kept():
    class Tokenizer:
        vocab_size = 300

        def encode(self, text, *, add_special_tokens=True):
            return [*([1] if add_special_tokens else []), *(ord(letter) for letter in text)]

        def min_tokens(self, text):
            return len(text)

    def kept(count: int) -> list[int]:
        return build("abcd", tokenizer=Tokenizer(), params={"truncate_prompt_tokens": count}).prompt_token_ids.tolist()

    assert kept(5) == [1, 97, 98, 99, 100]
    assert kept(3) == [1, 99, 100]
    assert kept(1) == [100]


def test_bad_words_are_tokens_with_and_without_a_space():
    class Tokenizer:
        vocab_size = 300
        ids = {"cat": [4], " cat": [5], "a b": [6, 7], " a b": [8, 7], "dog": [9, 1], " dog": [10], "big": [400]}  # noqa: RUF012

        def encode(self, text, *, add_special_tokens=True):
            return [*([1] if add_special_tokens else []), *self.ids.get(text, [3])]

        def min_tokens(self, text):
            return 1

    request = build("x", tokenizer=Tokenizer(), params={"bad_words": ["cat", " a b", "dog"]})
    assert request.bad_words_token_ids == ((4,), (5,), (6, 7), (8, 7), (9, 1))
    with pytest.raises(InvalidRequestError, match="bad_words: 'big' contains a token outside the model's vocabulary"):
        build("x", tokenizer=Tokenizer(), params={"bad_words": ["big"]})


def test_values_that_mean_off_are_made_one():
    params = build(params={"top_k": -1, "presence_penalty": -0.0, "logit_bias": {}, "stop": "x"}).params
    assert params.top_k == 0
    assert math.copysign(1.0, params.presence_penalty) == 1.0
    assert params.logit_bias is None
    assert params.stop == ("x",)
    assert build(params={"top_k": 300}).params.top_k == 0


def test_R9_cross_field_checks_come_after_defaults():
    refused("min_tokens", params={"min_tokens": 17})
    assert build(params={"min_tokens": 17, "max_tokens": 17})
    refused("min_tokens", params={"min_tokens": 43, "max_tokens": None})


def test_R9_no_limit_means_what_fits_context_and_pool():
    def most(prompt: str, **limits) -> int:
        limits = dataclasses.replace(LIMITS, **limits)
        return build(prompt, limits=limits, params={"max_tokens": None}).params.max_tokens

    assert most("hello") == 48 - 6
    assert most("hello", max_pool_tokens=None) == most("hello", max_pool_tokens=1000) == 64 - 6
    assert build(params={"max_tokens": None, "min_tokens": 42}).params.min_tokens == 42
    with pytest.raises(InvalidRequestError, match="can never fit in the cache"):
        most("x" * 50)


def test_R6_n_outputs_are_n_requests():
    def many(**fields):
        return build_requests(LIMITS, ByteEncoder(), prompt="hello", arrival_s=1.5, **fields)

    first, second, third = many(n=3, request_id="a", params={"seed": 2**63 - 2})
    assert [r.request_id for r in (first, second, third)] == ["a", "a#1", "a#2"]
    assert [r.params.seed for r in (first, second, third)] == [2**63 - 2, 2**63 - 1, 0]
    assert second.prompt_token_ids is first.prompt_token_ids
    assert [r.params.seed for r in many(n=2, fallback_seed=7)] == [7, 8]
    for params in ({"n": 2, "seed": 7}, SamplingParams(n=2, seed=7)):
        assert [(r.params.seed, r.num_outputs) for r in many(params=params)] == [(7, 2), (8, 2)]
    for bad in (0, 129, -1, True, "2", 1.0, HUGE):
        with pytest.raises(InvalidRequestError, match=r"^n: "):
            many(n=bad)
    refused("request_id", request_id="a#1")  # no client can name one of them


def test_what_other_engines_take_is_refused_with_the_reason():
    refused("structural_tag", params={"structured_outputs": {"structural_tag": "{}"}})
    assert str(unsupported("mm_inputs")).startswith("mm_inputs: the model accepts only text")


def test_R14_an_unknown_parameter_names_the_nearest():
    assert "'temperature'" in refused("temprature", params={"temprature": 1.0})
    refused("params", params=3)
    refused("params", params=[("top_k", 1)])


@given(
    st.dictionaries(
        st.sampled_from(sorted(BAD)),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=3),
            st.lists(st.integers(), max_size=3),
        ),
    )
)
def test_whatever_comes_the_answer_is_a_request_or_one_line(fields):
    try:
        params = build(params=fields).params
    except InvalidRequestError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert build(params=params).params == params  # checking again changes nothing


# --- structured outputs --------------------------------------------------------------------------------------------


class Source:
    """Takes every constraint."""

    def __init__(self) -> None:
        self.wanted: list[tuple[StructuredOutputsParams, bool]] = []

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Grammar:
        self.wanted.append((wanted, ends_at_eos))
        return self  # type: ignore[return-value]  # any object does


DEEP: dict[str, object] = {"items": {}}
for _ in range(10_000):
    DEEP = {"items": DEEP}
CIRCLE: dict[str, object] = {}
CIRCLE["a"] = CIRCLE
BAD_CONSTRAINTS = {
    "json": [
        "", "{", "[1]", "5", "null", "{}x", 5, [1], b"{}", "{" * 100_000, "[" * 100_000, '{"a":NaN}', '{"a":1,"a":2}',
        '{"a":' + "1" * 5000 + "}", '{"a":1e999}', "\ud800", '{"items":' * 65 + "{}" + "}" * 65, {1: 2}, {"a": math.nan}, {"a": {3}},
        {"a": b"x"}, DEEP, CIRCLE, {"enum": ["x" * 70_000]}, "x" * 10**7, {"x-guidance": {"lenient": True}}, '{"a":Infinity}',
    ],
    "regex": ["", 5, b"a", "a" * 65_537, "é" * 40_000, "\ud800", ["a"]],
    "choice": [[], "ab", 5, [1], [""], ["a"] * 1025, ["x" * 70_000], ["x" * 60_000, "y" * 10_000], ["\ud800"], {"a"}, [None], b"a"],
    "grammar": ["", 5, "s" * 65_537, "\ud800"],
    "json_object": [1, "true", [True]],
    "disable_any_whitespace": [1, "yes", None],
    "whitespace_pattern": [5, "", " " * 257],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "index"), [(f, i) for f, values in BAD_CONSTRAINTS.items() for i in range(len(values))]
)
@pytest.mark.parametrize("mapping", [False, True])
def test_R11_R15_constraints_that_are_refused_before_anything_is_compiled(field, index, mapping):
    constraint = {field: BAD_CONSTRAINTS[field][index]}
    if field in ("disable_any_whitespace", "whitespace_pattern"):
        constraint["json_object"] = True
    source = Source()
    wanted = constraint if mapping else StructuredOutputsParams(**constraint)
    refused(f"structured_outputs.{field}", params={"structured_outputs": wanted}, grammars=source)
    assert not source.wanted


@pytest.mark.parametrize("option", [{"disable_any_whitespace": True}, {"whitespace_pattern": " "}])
def test_whitespace_is_a_matter_of_json(option):
    (name,) = option
    for constraint in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: A"}):
        refused(f"structured_outputs.{name}", params={"structured_outputs": {**constraint, **option}})
    both = {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}
    refused("structured_outputs.whitespace_pattern", params={"structured_outputs": both})


def test_constraints_reach_the_compiler_checked_and_last():
    source = Source()
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
    for wanted in (
        StructuredOutputsParams(json=schema),
        {"json": '{"type": "object", "properties": {"b": {}, "a": {"const": "\u00e9"}}}'},
        {"choice": ["b", "a", "b"], "json_object": False},
        {"json": False, "whitespace_pattern": " "},
        {"json_object": True, "disable_any_whitespace": True},
    ):
        params = SamplingParams(structured_outputs=wanted, ignore_eos=wanted is not None)  # type: ignore[arg-type]
        request = build(params=params, grammars=source)
        assert request.grammar is source
        assert source.wanted[-1] == (request.params.structured_outputs, False)
        assert build(params=request.params, grammars=source).params == request.params
    build(params={"structured_outputs": {"regex": "a"}}, grammars=source)
    constraints = [wanted for wanted, _ in source.wanted[::2]]
    assert constraints[0] == constraints[1]
    assert constraints[0].json == r'{"type":"object","properties":{"b":{},"a":{"const":"\u00e9"}}}'
    assert constraints[2] == StructuredOutputsParams(choice=("b", "a"))
    assert constraints[3].json == "false"
    assert source.wanted[-1] == (StructuredOutputsParams(regex="a"), True)
    before = len(source.wanted)
    refused(
        "max_tokens", prompt="x" * 60, params={"max_tokens": 9, "structured_outputs": {"regex": "a"}}, grammars=source
    )
    assert len(source.wanted) == before


def test_without_a_compiler_constraints_are_refused():
    assert "--tokenizer" in refused("structured_outputs", params={"structured_outputs": {"regex": "a"}})


# --- objectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms"])
@pytest.mark.parametrize(
    "value",
    [0, 0.0, -0.0, -1, math.nan, math.inf, 1e18, 1e-9, TINY, "100", True, [1], HUGE],
    ids=lambda _: "value",
)
def test_R24_objectives_in_milliseconds(field, value):
    refused(field, **{field: value})


@pytest.mark.parametrize("bad", [1e18, 1e-9])
def test_R24_objectives_of_python(bad):
    refused("slo.ttft_s", slo=SLO(ttft_s=bad))
    refused("slo.tbt_s", slo=SLO(tbt_s=bad))
    refused("slo.e2e_s", slo=SLO(e2e_s=bad))
    refused("slo", slo=(1.0, 1.0))


def test_objectives_replace_the_default_part_by_part():
    assert build(slo_ttft_ms=250).slo == SLO(ttft_s=0.25, tbt_s=0.5)
    assert build(slo=SLO(tbt_s=2.0), slo_ttft_ms=100).slo == SLO(ttft_s=0.1, tbt_s=2.0)
    assert build(slo_e2e_ms=9000).slo == SLO(ttft_s=1.0, tbt_s=0.5, e2e_s=9.0)
    assert build(slo=SLO(0.2, 2.0, e2e_s=8.0), slo_tbt_ms=100).slo == SLO(ttft_s=0.2, tbt_s=0.1, e2e_s=8.0)
    assert build(slo=SLO()).slo == SLO()


@pytest.mark.parametrize("value", ["RT", "", "batch", 1, True])
def test_classes(value):
    refused("slo_class", slo_class=value)


def test_the_two_classes_are_taken():
    assert build(slo_class="be").slo_class == "be"
    assert build(slo_class="rt").slo_class == "rt"


def test_default_objectives_are_those_of_real_time_requests():
    assert build(slo_class="be").slo == SLO()
    assert build(slo_class="be", slo_ttft_ms=250).slo == SLO(ttft_s=0.25)
    assert build(slo_class="rt").slo == LIMITS.default_slo
    low = dataclasses.replace(LIMITS, default_slo_class="be")
    assert build(limits=low).slo_class == "be"
    assert build(limits=low, slo_class="rt").slo == LIMITS.default_slo


@pytest.mark.parametrize("field", ["ttft_s", "tbt_s", "e2e_s"])
def test_an_objective_that_is_no_time_is_named(field: str) -> None:
    for value in (math.nan, 0):
        with pytest.raises(ConfigError, match=f"^slo {field}={value} must be a positive number"):
            SLO(**{field: value})
    for value in (10**400, HUGE):
        with pytest.raises(ConfigError, match=f"^slo {field} is too large a number of seconds$"):
            SLO(**{field: value})


class BetweenMarks:
    """An encoder of characters, between 1 and 2."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [10 + ord(char) % 50 for char in text]
        return [1, *ids, 2] if add_special_tokens else ids

    def min_tokens(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 11, 12])
def test_the_end_of_a_text_is_kept_between_its_special_tokens(keep):
    encoder: Any = BetweenMarks()
    limits = RequestLimits(max_model_len=100, vocab_size=100)
    found = checked_prompt(limits, encoder, "abcdefghij", None, keep).tolist()
    whole = encoder.encode("abcdefghij")
    assert found == (whole[-keep:] if keep < 3 else [1, *whole[:-1][-(keep - 2) :], 2] if keep < 12 else whole)


def test_log_probabilities_of_a_prompt_count_once_for_each_output():
    limits = RequestLimits(max_model_len=100, vocab_size=100, max_prompt_logprobs=100)
    fields: dict[str, Any] = {
        "prompt_token_ids": [1] * 10,
        "params": SamplingParams(prompt_logprobs=4),
        "arrival_s": 0.0,
    }
    assert len(build_requests(limits, None, n=2, **fields)) == 2
    with pytest.raises(InvalidRequestError, match="ask for 150"):
        build_requests(limits, None, n=3, **fields)


PUBLISHED: dict[str, list[object]] = {  # in the descriptions of OpenAI's, Anthropic's and vLLM's APIs
    "temperature": [0, 0.5, 1, 2], "top_p": [0, 0.5, 1], "seed": [None, 0, -1, -2, -(2**63), 2**63 - 1], "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2], "stop": [None, [], "a", ["a", "b", "c", "d"]], "logit_bias": [None, {}, {5: -100, 6: 100}],
    "max_tokens": [1, None], "top_k": [-1, 0, 1, 1000], "min_p": [0, 0.5, 1], "repetition_penalty": [0.1, 1, 2], "min_tokens": [0, 1],
    "stop_token_ids": [[], [5]], "logprobs": [None, *range(21)], "prompt_logprobs": [None, 0, 5, 20], "bad_words": [[], ["a"], None],
    "allowed_token_ids": [[5, 6], None], "truncate_prompt_tokens": [-1, 1, None],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_value_within_published_bounds_is_taken(name):
    for value in PUBLISHED[name]:
        assert build(params={name: value})


def test_negative_seeds_differ():
    seeds = {build(params={"seed": seed}).params.seed for seed in (0, 1, -2, -3, -(2**63))}
    assert len(seeds) == 4  # -2^63 is 0 in the 63 bits that seeds have
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
