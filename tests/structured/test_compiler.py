"""Constraints on outputs: what is compiled, what is refused and how quickly, what is kept, and what the masks say."""

import contextlib
import importlib.resources
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apt_jax.errors import InvalidRequestError, QueueFullError
from apt_jax.request import StructuredOutputsParams
from apt_jax.structured import compile_process
from apt_jax.structured import compiler as grammar_module
from apt_jax.structured import constraint as constraint_module
from apt_jax.structured.compiler import GrammarCompiler, PendingGrammar
from apt_jax.structured.constraint import GrammarError, LLConstraint, MaskFiller, fill_one_by_one
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer
from apt_jax.validation import RequestLimits, build_request
from tests.support.toy_serving import byte_tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(importlib.resources.files("apt_jax") / "assets" / "tiny-opt"))


def compiler_of(tokenizer: Tokenizer, **options: Any) -> GrammarCompiler:
    options.setdefault("vocab_size", tokenizer.vocab_size)
    options.setdefault("eos_token_ids", (2,))
    return GrammarCompiler(tokenizer, **options)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = compiler_of(tokenizer)
    yield made
    made.close()


def checked(**given: Any) -> StructuredOutputsParams:
    """Return the grammar in the shape that validation returns."""

    class Source:
        wanted: Any = None

        def compile(self, wanted, *, ends_at_eos):
            self.wanted = wanted

    source = Source()
    limits = RequestLimits(vocab_size=300, max_model_len=64)
    params = {"structured_outputs": given}
    build_request(limits, None, prompt_token_ids=[1], params=params, arrival_s=0.0, grammars=source)  # type: ignore[arg-type]
    return source.wanted


def allowed(constraint: LLConstraint, vocab_size: int = 4096) -> set[int] | None:
    """Tokens that may come next; None: the output is over."""
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    if not constraint.fill_mask(row):
        return None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def follows(constraint: LLConstraint, ids: list[int], vocab_size: int = 4096) -> bool:
    """Return True if each id is allowed when it comes."""
    for token in ids:
        tokens = allowed(constraint, vocab_size)
        if tokens is None or token not in tokens:
            return False
        constraint.accept(token)
    return True


def over(constraint: LLConstraint, eos: int = 2) -> bool:
    """Return True if the output may end here."""
    if constraint.ended:
        return True
    tokens = allowed(constraint)
    return tokens is None or eos in tokens


# --- grammars --------------------------------------------------------------------------------------------------------

OUTPUTS = [
    ({"json": SCHEMA}, ['{"name":"Ann","age":7}', '{ "name": "Ö\\n😀",\n  "age": -12}'], ['{"age":7', "[", '{"name":"a","age":100', ' {']),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, ['{"name":"Ann","age":7}'], ['{ ', '{"name": ']),
    ({"json": SCHEMA, "whitespace_pattern": "_"}, ['{_"name":_"A","age"_:_7_}'], ['{ ', '{__']),
    ({"json": True}, ["[1, {}, null]", '"x"', "-1.5e3", "true"], ["x", "nul1"]),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": false}]}'], ["[", "1", "{}{"]),
    ({"regex": r"\d{3}-\d{4}|no"}, ["123-4567", "no"], ["12-", "no!", "123-45678"]),
    ({"choice": ['a"b', "new\nline", "\\", "Ünï 😀", "a+", "^$", " ", "\x01"]}, ['a"b', "new\nline", "\\", "Ünï 😀", "a+", "^$", " ", "\x01"], ["aa", "b"]),
    ({"grammar": 'start: "say " WORD ("," WORD)*\nWORD: /[a-z]+/'}, ["say yes", "say a,b,c"], ["say A", "say a,,"]),
    ({"grammar": '# GBNF\nroot ::= "say " word ("," word)*\n  word  ::= [a-z]+'}, ["say yes", "say a,b,c"], ["say A", "say a,,"]),
    ({"grammar": 'start: "x ::= " /[0-9]/'}, ["x ::= 1"], ["y"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "good", "bad"), OUTPUTS, ids=lambda x: str(x)[:30])
def test_a_constraint_allows_its_outputs_and_no_others(compiler, tokenizer, given, good, bad):
    grammar = compiler.compile(checked(**given))
    for text in good:
        constraint = grammar.start()
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert follows(constraint, ids), text
        assert over(constraint), text
    for text in bad:
        ids = tokenizer.encode(text, add_special_tokens=False)
        constraint = grammar.start()
        assert not (follows(constraint, ids) and text not in good), text


def digits_after(compiler: GrammarCompiler, tokenizer: Tokenizer, prefix: str, most: int, **given: Any) -> int:
    """Number of digits that can follow a text under a constraint, up to `most`; then the output can go on otherwise."""
    constraint = compiler.compile(checked(**given)).start()
    assert follows(constraint, tokenizer.encode(prefix, add_special_tokens=False))
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    for count in range(most):
        tokens = allowed(constraint)
        assert tokens  # it can always go on, or end
        if digit not in tokens:
            return count
        constraint.accept(digit)
    return most


@pytest.mark.parametrize(
    ("prefix", "given"),
    [
        ("", {"json": True}),
        ("", {"json": {"type": "number"}}),
        ("-", {"json": {"type": "integer"}}),
        ("2.", {"json": {"type": "number", "minimum": 0}}),
        ("1e-", {"json": {}}),
        ('["12345678901234567890123456789", ', {"json": {}}),
        ('{"a": ', {"json_object": True}),
        ('say {"a":0.', {"grammar": 'start: "say " %json {"type": "object"}'}),
    ],
)
def test_numbers_of_json_end(compiler, tokenizer, prefix, given):
    assert digits_after(compiler, tokenizer, prefix, 60, **given) == constraint_module.MAX_DIGITS


@pytest.mark.parametrize(
    ("prefix", "given"),
    [
        ('"', {"json": {}}),
        ('{"', {"json_object": True}),
        ('"', {"json": {"type": "string", "pattern": "^[0-9]{60}$"}}),
        ('"', {"json": {"type": "string", "pattern": "^[0-9]+$"}}),
        ("", {"regex": "[0-9]+"}),
        ("", {"grammar": "start: /[0-9]+/"}),
    ],
)
def test_other_digits_are_not_bounded(compiler, tokenizer, prefix, given):
    assert digits_after(compiler, tokenizer, prefix, 60, **given) == 60


def test_the_digits_of_a_number_are_counted_anew_after_a_point_and_in_the_next_number(compiler, tokenizer):
    for text in ("1" * 20 + "." + "2" * 20 + "e" + "3" * 20, "[" + ", ".join(["1" * 20] * 4) + "]"):
        constraint = compiler.compile(checked(json={})).start()
        assert follows(constraint, tokenizer.encode(text, add_special_tokens=False))
        assert over(constraint)


def test_requests_do_not_share_their_state(compiler, tokenizer):
    grammar = compiler.compile(checked(choice=["yes", "no"]))
    first, second = grammar.start(), grammar.start()
    assert follows(first, tokenizer.encode("yes", add_special_tokens=False))
    assert first.ended
    assert not second.ended
    assert follows(second, tokenizer.encode("no", add_special_tokens=False))


def test_a_token_that_was_not_allowed_is_an_error(compiler, tokenizer):
    constraint = compiler.compile(checked(choice=["yes"])).start()
    (wrong,) = tokenizer.encode("x", add_special_tokens=False)
    with pytest.raises(GrammarError) as caught:
        constraint.accept(wrong)
    assert "\n" not in str(caught.value)
    with pytest.raises(GrammarError):
        allowed(constraint)


def test_whitespace_ends(compiler, tokenizer):
    """However a model likes spaces: by default they cannot go on for ever."""
    constraint = compiler.compile(checked(json=SCHEMA)).start()
    text = "{\n" + " " * 20
    assert follows(constraint, [t for c in text for t in tokenizer.encode(c, add_special_tokens=False)])
    tokens = allowed(constraint)
    assert tokens
    assert not any(not (tokenizer.token_text(t) or "x").strip() for t in tokens)


# --- the end of an output ------------------------------------------------------------------------------------------


def test_eos_comes_where_an_output_may_end(compiler, tokenizer):
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for ends_at_eos in (True, False):
        constraint = compiler.compile(checked(regex="a{1,3}"), ends_at_eos=ends_at_eos).start()
        assert 2 not in (allowed(constraint) or ())
        constraint.accept(a)
        tokens = allowed(constraint)
        assert tokens
        assert (2 in tokens) == ends_at_eos
        assert len(tokens) >= 1 + ends_at_eos
        constraint.accept(a)
        constraint.accept(a)
        assert constraint.ended


@pytest.mark.parametrize("eos", [(), (4150,), (2, 4150), (2, 1)])
def test_ids_beyond_the_tokenizer_and_other_ends(tokenizer, eos):
    made = compiler_of(tokenizer, vocab_size=4200, eos_token_ids=eos)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for given in ({"regex": "(.|\n)+"}, {"regex": "a+b?"}):
        constraint = made.compile(checked(**given)).start()
        for ends in (False, True):
            tokens = allowed(constraint, 4200)
            assert tokens
            assert a in tokens
            assert {t for t in tokens if t >= 4096} == {t for t in eos if t >= 4096 and ends}
            assert {t for t in tokens if t < 3} == {t for t in eos if t < 3 and ends}
            constraint.accept(a)
    made.close()


def test_other_tokenizers():
    """Without merges: one token a byte."""
    tokenizer = byte_tokenizer()
    made = compiler_of(tokenizer)
    constraint = made.compile(checked(json={"enum": ["é😀"]})).start()
    ids = tokenizer.encode('"é😀"', add_special_tokens=False)
    assert follows(constraint, ids, tokenizer.vocab_size)
    assert constraint.ended
    made.close()


# --- what is refused -------------------------------------------------------------------------------------------


def refused(compiler: GrammarCompiler, **given: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(checked(**given))
    (name,) = set(given) - {"whitespace_pattern"}
    message = str(caught.value)
    assert caught.value.field == f"structured_outputs.{name}"
    assert "\n" not in message
    assert len(message) < 320
    return message


UNSATISFIABLE = [
    {"json": False}, {"json": {"enum": []}}, {"json": {"type": "string", "minLength": 5, "maxLength": 3}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 3}}, {"json": {"allOf": [{"type": "string"}, {"type": "null"}]}},
    {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, {"json": {"type": "string", "pattern": "^a$", "minLength": 3}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, {"regex": "[a&&b]"}, {"regex": "()"}, {"grammar": 'start: ""'},
]  # fmt: skip


@pytest.mark.parametrize("given", UNSATISFIABLE, ids=str)
def test_R11_constraints_that_no_output_has(compiler, given):
    assert "nsatisfiable" in refused(compiler, **given)


WRONG = [
    {"json": {"type": "thing"}}, {"json": {"type": 5}}, {"json": {"pattern": "("}}, {"json": {"$ref": "#/$defs/a"}},
    {"json": {"$ref": "https://example.com/schema.json"}}, {"json": {"$ref": "file:///etc/passwd"}}, {"json": {"not": {}}},
    {"json": {"type": "array", "uniqueItems": True}}, {"json": {"type": "string", "format": 5}}, {"json": {"properties": []}},
    {"regex": "("}, {"regex": "(?=a)b"}, {"regex": r"(a)\1"}, {"regex": "a{2,1}"}, {"regex": "[z-a]"}, {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"grammar": "start:"}, {"grammar": 'root ::= "a'}, {"grammar": "root ::= b"}, {"grammar": 'a ::= "b"'}, {"grammar": "root ::= " + "(" * 20_000},
    {"grammar": "start: A"}, {"grammar": 'a: "b"'}, {"grammar": "{}"}, {"grammar": "start: " + "(" * 20_000},
    {"json_object": True, "whitespace_pattern": "("},
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG, ids=lambda given: str(given)[:60])
def test_R11_constraints_that_are_wrong(compiler, given):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(checked(**given))
    assert caught.value.field.startswith("structured_outputs.")
    assert "\n" not in str(caught.value)


CHAIN = {
    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} if i < 9000 else {} for i in range(9001)},
    "$ref": "#/$defs/d0",
}
PRODUCT = {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}
WIDE = {"properties": {f"p{i}": {} for i in range(5000)}}
SAME = {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(30)}}
HEAVY = {
    "crashes the compiler": ({"json": CHAIN}, "nests too deeply"),
    "takes for ever": ({"json": PRODUCT}, "more than 0.5 s"),
    "takes long": ({"json": WIDE}, "more than 0.5 s"),
    "is ambiguous": ({"json": {"anyOf": [SAME] * 70}}, "smaller"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_R11_heavy_constraints_cost_one_child(tokenizer, name):
    """Here without the bound on size, which makes them rarer and not impossible."""
    given, says = HEAVY[name]
    made = compiler_of(tokenizer, limit_s=0.5)
    made.compile(checked(choice=["yes"]))
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=says):
        made.compile(StructuredOutputsParams(json=json.dumps(given["json"])))
    assert time.monotonic() - started < 5.0
    made.compile(checked(choice=["still there"]))
    made.close()


def test_R11_memory_of_a_trial_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_module, "CHILD_MEMORY_BYTES", 24 << 20)
    made = compiler_of(tokenizer, limit_s=10.0)
    with pytest.raises(InvalidRequestError, match="too much memory"):
        made.compile(StructuredOutputsParams(json=json.dumps({"anyOf": [SAME] * 300})))
    made.compile(checked(choice=["still there"]))
    made.close()


def test_a_constraint_is_not_compiled_where_memory_is_short(tokenizer, monkeypatch):
    made = compiler_of(tokenizer)
    monkeypatch.setattr(grammar_module, "spare_memory_bytes", lambda: 100 << 20)
    with pytest.raises(MemoryError):
        made.compile(checked(choice=["yes"]))
    monkeypatch.undo()
    assert made.compile(checked(choice=["yes"]))  # nothing was remembered
    made.close()


def test_spare_memory_ends_at_the_limit_of_the_process():
    code = (
        "import resource; from apt_jax.utils.memory import spare_memory_bytes\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (50 << 20),) * 2)\n"
        "print(spare_memory_bytes())"
    )
    spare = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert 30 << 20 < spare <= 50 << 20


def test_deep_constraints_that_the_child_survives_do_not_end_this_process(compiler):
    """The child's stack is the smaller one: whatever it took, a thread here takes."""
    for length in (50, 400, 1000):
        chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
        chain[f"d{length}"] = {"type": "null"}
        with contextlib.suppress(InvalidRequestError):
            compiler.compile(checked(json={"$defs": chain, "$ref": "#/$defs/d0"}))


def test_nothing_is_left_of_a_child_whose_parent_is_gone(tokenizer):
    made = compiler_of(tokenizer, limit_s=0.5)
    made.compile(checked(choice=["yes"]))
    worker = made._worker
    assert worker is not None
    process = worker._child._process
    made._limit_s = 60.0  # this parent will not kill it
    started = time.monotonic()
    refused(made, json=PRODUCT)  # its alarm does
    assert time.monotonic() - started < 20.0
    assert process.wait(5) != 0
    made.close()


def test_a_child_that_died_is_replaced(tokenizer):
    made = compiler_of(tokenizer)
    made.compile(checked(choice=["yes"]))
    assert made._worker is not None
    made._worker._child._process.kill()
    made._worker._child._process.wait()
    assert made.compile(checked(choice=["no"]))
    made.close()
    assert made.compile(checked(choice=["maybe"]))
    made.close()


def test_a_child_that_does_not_read_costs_the_time_limit(tokenizer):
    """A pipe holds 64 KiB: a longer grammar is written only as fast as it is read."""
    made = compiler_of(tokenizer, limit_s=0.5)
    made.compile(checked(choice=["yes"]))
    assert made._worker is not None
    os.kill(made._worker._child._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"0\.5 s"):
        made.compile(StructuredOutputsParams(choice=[f"{i} {'x' * 90}" for i in range(2000)]))
    assert time.monotonic() - started < 5.0
    assert made.compile(checked(choice=["no"]))
    made.close()


# --- the cache ---------------------------------------------------------------------------------------------------


def test_a_constraint_is_compiled_once(tokenizer):
    made = compiler_of(tokenizer)
    for _ in range(3):
        made.compile(checked(json=SCHEMA))
        made.compile(checked(json=json.dumps(SCHEMA, indent=2)), ends_at_eos=False)
        refused(made, json=False)
    assert made.num_trials == 2
    made.close()


def test_R11_the_cache_is_bounded_in_entries_and_bytes(tokenizer, monkeypatch):
    made = compiler_of(tokenizer, max_entries=5)
    kept = made.compile(checked(choice=["0"]))
    for i in range(12):
        made.compile(checked(choice=[str(i)]))
        made.compile(checked(choice=["0"]))  # in use: stays
        assert made.num_cached <= 5
    assert made.num_trials == 12
    assert made.cached_bytes == sum(e.num_bytes for e in made._entries.values())
    assert kept.start()
    made.close()
    measured = compile_process.TrialWorker.attempt  # by the growth of the process, which a busy machine changes

    def attempt(self: compile_process.TrialWorker, grammar: str, limit_s: float) -> tuple[str | None, int]:
        error, num_bytes = measured(self, grammar, limit_s)
        return error, min(num_bytes, 20 << 10)

    monkeypatch.setattr(compile_process.TrialWorker, "attempt", attempt)
    small = compiler_of(tokenizer, max_bytes=120 << 10)
    for i in range(12):
        small.compile(checked(choice=[str(i)]))
        assert small.cached_bytes <= 120 << 10
    assert 6 <= small.num_cached <= 7  # of 16 to 20 KiB
    assert small.compile(checked(choice=["x" * 20_000])).start()  # larger than the cache: used, not kept
    small.close()


MANY_STATES = r"[ab]*a[ab]{14}c"
"""Its lexer has two states for each token that is drawn, and 2^15 in all."""


def draw(constraint: LLConstraint, tokenizer: Tokenizer, rng: np.random.Generator, num: int) -> int:
    """Tokens of a random output that could be followed."""
    ab = [tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab"]
    for i in range(num):
        try:
            assert set(ab) <= (allowed(constraint) or set())
            constraint.accept(int(rng.choice(ab)))
        except GrammarError:
            return i
    return num


@pytest.fixture
def few_states(monkeypatch) -> None:
    limits = {**constraint_module.LIMITS, "max_lexer_states": 600}
    for module in (grammar_module, constraint_module):  # the child's and this process's
        monkeypatch.setattr(module, "LIMITS", limits)


def test_outputs_of_one_constraint_do_not_use_up_its_lexer(tokenizer, few_states):
    """All outputs share its states: whether they come one after another or at once, none ends for another's."""
    made = compiler_of(tokenizer)
    grammar = made.compile(checked(regex=MANY_STATES))
    rng = np.random.default_rng(0)
    for _ in range(30):
        assert draw(grammar.start(), tokenizer, rng, 60) == 60
    together = [grammar.start() for _ in range(30)]
    for _ in range(6):
        for constraint in together:
            assert draw(constraint, tokenizer, rng, 10) == 10
    assert made.num_trials == 1
    made.close()


def test_an_output_that_goes_on_with_another_lexer_is_where_it_was(tokenizer, few_states):
    made = compiler_of(tokenizer)
    grammar = made.compile(checked(regex=MANY_STATES + "|abab!"))
    rng = np.random.default_rng(1)
    kept = grammar.start()
    assert follows(kept, [t for c in "abab" for t in tokenizer.encode(c, add_special_tokens=False)])
    while not kept.matcher.is_error():
        draw(grammar.start(), tokenizer, rng, 60)
        kept.matcher.compute_bitmask()
    assert follows(kept, tokenizer.encode("!", add_special_tokens=False))
    assert kept.ended
    made.close()


@pytest.mark.parametrize("limit_s", [0.0, 1.0])
def test_R11_an_output_that_needs_too_much_alone_is_an_error(tokenizer, few_states, monkeypatch, limit_s):
    monkeypatch.setattr(constraint_module, "_OWN_LEXER_LIMIT_S", limit_s)
    made = compiler_of(tokenizer)
    grammar = made.compile(checked(regex=MANY_STATES))
    rng = np.random.default_rng(2)
    assert 100 < draw(grammar.start(), tokenizer, rng, 3000) < 600
    assert draw(grammar.start(), tokenizer, rng, 60) == (60 if limit_s else 0)
    # The next request has nothing to do with it.
    assert draw(made.compile(checked(regex=MANY_STATES)).start(), tokenizer, rng, 60) == 60
    assert made.num_trials == 1
    made.close()


def test_R11_lexer_states_of_a_constraint_are_dropped_at_times(tokenizer, monkeypatch):
    monkeypatch.setattr(constraint_module, "_WORN_MASKS", 100)
    made = compiler_of(tokenizer)
    rng, roots = np.random.default_rng(3), []
    for _ in range(20):
        constraint = made.compile(checked(regex=MANY_STATES)).start()
        assert draw(constraint, tokenizer, rng, 20) == 20
        assert constraint._source.num_masks <= 120
        if not any(root is constraint._source._root for root in roots):
            roots.append(constraint._source._root)
    assert 3 <= len(roots) <= 5
    assert made.num_trials == 1
    made.close()


def test_R11_a_constraint_counts_with_the_memory_it_takes(tokenizer):
    """Not with what the child still had to ask for, after it had tried a larger one."""
    made = compiler_of(tokenizer, limit_s=10.0)
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is not measured here")
    sizes = []
    for i in range(3):
        names = {
            f"k{i}_{j}": {"type": "string", "pattern": f"^[a-z]{{1,{200 + j}}}(x|y){{3,{50 + i}}}$"} for j in range(120)
        }
        made.compile(checked(json={"type": "object", "properties": names}))
        sizes.append(list(made._entries.values())[-1].num_bytes)
    assert min(sizes) > 300_000
    made.close()


def test_R11_a_constraint_that_was_too_slow_is_remembered_for_a_while(tokenizer):
    """Not for ever: a busy machine is no property of the grammar."""
    made = compiler_of(tokenizer, limit_s=0.3, keep_lost_s=1.0)
    for _ in range(3):
        refused(made, json=PRODUCT)
    assert made.num_trials == 1
    time.sleep(1.1)
    refused(made, json=PRODUCT)
    assert made.num_trials == 2
    made.close()


def test_R11_what_is_known_needs_no_trial(tokenizer):
    """`begin` never waits, and compiles nothing."""
    made = compiler_of(tokenizer, limit_s=0.3)
    wanted = checked(choice=["yes", "no"])
    pending = made.begin(wanted)
    assert isinstance(pending, PendingGrammar)
    assert not pending.was_tried
    assert pending.known() is None
    assert made.num_trials == 0
    with pytest.raises(RuntimeError):
        pending.start()
    assert follows(pending.compile().start(), tokenizer.encode("yes", add_special_tokens=False))
    assert pending.known() is not None
    known = made.begin(wanted)
    assert not isinstance(known, PendingGrammar)
    assert made.num_trials == 1
    known._source.is_full = True  # its lexer is used up: it is compiled again, which may take a while
    again = made.begin(wanted)
    assert isinstance(again, PendingGrammar)
    assert again.was_tried
    assert again.compile()
    assert made.num_trials == 1
    refused(made, json=PRODUCT)
    with pytest.raises(InvalidRequestError):  # the verdict is known, too
        made.begin(checked(json=PRODUCT))
    made.close()


def test_many_threads(tokenizer):
    made = compiler_of(tokenizer)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                grammar = made.compile(checked(choice=[f"{(number + i) % 7}x"]))
                assert follows(grammar.start(), tokenizer.encode(f"{(number + i) % 7}", add_special_tokens=False))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert made.num_trials == 7
    made.close()


def test_R11_the_next_constraint_does_not_wait_for_the_child_that_a_slow_one_has_ended(tokenizer, monkeypatch):
    here, started_in = threading.current_thread().name, []
    begun = threading.Event()

    class Recorded(grammar_module.TrialWorker):
        def __init__(self, setup) -> None:
            started_in.append(threading.current_thread().name)
            if started_in[-1] != here:
                begun.set()
            super().__init__(setup)

        def attempt(self, grammar, limit_s):
            if "slow" not in grammar:
                return super().attempt(grammar, 60)
            assert begun.wait(20)  # as long as this trial takes
            while made._standby is None:  # its thread may have begun before it is kept
                time.sleep(0.001)
            begun.clear()
            raise grammar_module.TrialLostError("slow")

    for module in (grammar_module, compile_process):
        monkeypatch.setattr(module, "TrialWorker", Recorded)
    made = compiler_of(tokenizer, limit_s=0.2)
    for number in range(2):
        refused(made, choice=[f"slow {number}"])
        monkeypatch.setattr(grammar_module, "_SLOW_SHARE", 1e6)
        assert made.compile(checked(choice=[f"yes {number}"]))
        monkeypatch.setattr(grammar_module, "_SLOW_SHARE", 0.25)
    assert started_in == [here, "apt-jax-standby", "apt-jax-standby"]
    made.close()
    assert made._standby is None


def test_R11_a_queue_of_slow_constraints_does_not_grow(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_module, "_WAIT_LIMIT_S", 0.1)
    made = compiler_of(tokenizer, limit_s=1.0)
    made.compile(checked(choice=["yes"]))

    def slow() -> None:
        with pytest.raises(InvalidRequestError):
            made.compile(checked(json=PRODUCT))

    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.3)
    with pytest.raises(QueueFullError, match="grammars"):
        made.compile(checked(choice=["no"]))
    assert made.compile(checked(choice=["yes"]))  # known: waits for nobody
    thread.join()
    made.close()


# --- many masks at once --------------------------------------------------------------------------------------------


def test_masks_filled_side_by_side_are_the_same(compiler, tokenizer):
    given = [{"json": SCHEMA}, {"regex": "a+"}, {"choice": ["yes", "no"]}, {"json_object": True}]
    grammars = [compiler.compile(checked(**given[i % 4])) for i in range(9)]
    rows = [0, 2, 3, 4, 5, 6, 8, 9, 10]
    width = -(-tokenizer.vocab_size // 32)
    both = []
    for fill in (fill_one_by_one, MaskFiller(4)):
        masks = np.full((11, width), -1, np.int32)
        constraints = [g.start() for g in grammars]
        assert fill(constraints, masks, rows) == [True] * 9
        constraints[1].matcher.consume_token(3)  # wrong: an error from here on
        assert follows(constraints[2], tokenizer.encode("no", add_special_tokens=False))
        outcomes = fill(constraints, masks, rows)
        assert isinstance(outcomes[1], GrammarError)
        assert outcomes[2] is False
        assert outcomes[3:] == [True] * 6
        assert (masks[[1, 7]] == -1).all()
        both.append(np.delete(masks, [2, 3], axis=0))
    np.testing.assert_array_equal(both[0], both[1])


def test_the_child_imports_nothing_of_ours(compiler):
    compiler.compile(checked(choice=["yes"]))
    assert compiler._worker is not None
    pid = compiler._worker._child._process.pid
    path = Path(f"/proc/{pid}/maps")
    maps = path.read_text() if path.exists() else ""
    assert "jaxlib" not in maps
    assert "numpy" not in maps
