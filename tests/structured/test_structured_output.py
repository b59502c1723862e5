"""Structured output with a real model: `tiny-opt`, which would never write JSON by itself."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

from apt_jax import LLM, SamplingParams, StructuredOutputsParams
from apt_jax.errors import InvalidRequestError
from benchmarks.engine.random_schemas import SchemaMaker
from tests.support.cases import num_cases
from tests.support.paged_driver import few_programs

pytest.importorskip("llguidance")

PROMPTS = ["Once upon a time", "The answer in JSON:", "KING.", "My lord, the "]


@pytest.fixture(scope="module", autouse=True)
def optimised() -> Iterator[None]:
    """Programs run so often here that what optimising them takes is won back."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(
        "tiny-opt", max_num_seqs=16, max_num_batched_tokens=128, num_blocks_override=600, warm_up=False, use_tqdm=False
    )
    few_programs(made.parts.executor)
    yield made
    assert made.parts.grammars is not None
    made.parts.grammars.close()


def structured(max_tokens: int = 400, temperature: float = 0.0, seed: int = 0, **constraint: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**constraint),
    )


def texts(llm: LLM, params: list[SamplingParams]) -> list[tuple[str, str | None]]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(o.error is None for o in outputs), [o.error for o in outputs]
    assert llm.engine.stats().step_failures == 0
    return [(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


@pytest.mark.seeds
def test_outputs_of_random_schemas_are_valid(llm: LLM, record_property: Any) -> None:
    """Half greedy, half drawn, in one batch with others, whose tokens are the same as without."""
    count = num_cases(10, 100)
    schemas = []
    for seed in range(count):
        schema = SchemaMaker(np.random.default_rng(seed)).make()
        jsonschema.Draft202012Validator.check_schema(schema)
        schemas.append(schema)
    params = [
        structured(900, 0.9 * (i % 2), i, json=schema, disable_any_whitespace=i % 3 == 0)
        for i, schema in enumerate(schemas)
    ]
    plain = [SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i) for i in range(count // 5)]
    mixed = [p for i in range(count // 5) for p in (plain[i], *params[5 * i : 5 * i + 5])]
    answers = llm.generate(["Once upon a time"] * len(mixed), mixed, use_tqdm=False)
    alone = llm.generate(["Once upon a time"] * len(plain), plain, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in answers[::6]] == [o.outputs[0].token_ids for o in alone]
    outputs = [o for i, o in enumerate(answers) if i % 6]
    num_tokens = 0
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", (schema, completion.text, output.error)
        jsonschema.validate(json.loads(completion.text), schema, jsonschema.Draft202012Validator)
        num_tokens += len(completion.token_ids)
    assert len({o.outputs[0].text for o in outputs}) > count // 2
    stats = llm.engine.stats()
    record_property("structured_tokens", num_tokens)
    record_property("mask_p50_ms", stats.mask_p50_ms)
    record_property("mask_p99_ms", stats.mask_p99_ms)
    assert stats.mask_p99_ms < 100.0


@pytest.mark.seeds
def test_every_constraint(llm: LLM) -> None:
    constraints: list[dict[str, Any]] = [
        {"regex": r"\d{3}-\d{4}"},
        {"choice": ["yes", "no", "it depends"]},
        {"grammar": 'start: NAME " is " /[0-9]{1,3}/\nNAME: /[A-Z][a-z]{2,8}/'},
        {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
        {"json_object": True},
    ]
    # Of any object there is no end.
    params = [
        structured(num_cases(60, 400) if "json_object" in c else 400, 0.7 * (i % 2), i, **c)
        for c in constraints
        for i in range(4)
    ]
    answers = texts(llm, params)
    for answer, _ in answers[:4]:
        assert re.fullmatch(r"\d{3}-\d{4}", answer)
    assert {answer for answer, _ in answers[4:8]} <= {"yes", "no", "it depends"}
    for answer, _ in answers[8:12]:
        assert re.fullmatch(r"[A-Z][a-z]{2,8} is [0-9]{1,3}", answer)
    for answer, _ in answers[12:16]:
        assert 2 <= len(json.loads(answer)) <= 4
    for answer, reason in answers[16:]:
        assert answer.startswith("{")
        assert reason == "length" or isinstance(json.loads(answer), dict)


def test_an_output_that_is_cut_off_is_a_beginning(llm: LLM) -> None:
    constraint = {"json": {"const": {"key": "a long text that takes many tokens"}}, "disable_any_whitespace": True}
    ((whole, reason),) = texts(llm, [structured(**constraint)])
    assert (whole, reason) == ('{"key":"a long text that takes many tokens"}', "stop")
    for length in (1, 4, 9):
        ((text, reason),) = texts(llm, [structured(length, **constraint)])
        assert reason == "length"
        assert whole.startswith(text)


COMBINED: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 12},
    "ignore_eos": {"ignore_eos": True},
    "logit_bias": {"logit_bias": {10: 5.0, 300: -100.0}},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "top": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["zzz"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": (1,)},
    "seed": {"seed": 5},
    "greedy": {"temperature": 0.0},
}
PAIRS = [(a, b) for a in COMBINED for b in COMBINED if a < b]


def test_R25_all_pairs_of_settings_go_with_a_constraint(llm: LLM) -> None:
    constraint = StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
    params = [
        SamplingParams(
            **{
                "max_tokens": 100,
                "seed": i,
                **COMBINED[a],
                **COMBINED[b],
                "structured_outputs": constraint,
            }
        )
        for i, (a, b) in enumerate(PAIRS)
    ]
    for (text, reason), pair in zip(texts(llm, params), PAIRS, strict=True):
        assert reason == "stop", pair
        assert json.loads(text)["b"] in ("x", "y"), pair


def test_refused_constraints_run_nothing(llm: LLM) -> None:
    before = sum(llm.engine.stats().iterations.values())
    impossible = {"type": "string", "minLength": 2, "maxLength": 1}
    constraints: list[dict[str, Any]] = [{"json": impossible}, {"regex": "("}]
    for constraint in constraints:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(["a", "b"], [SamplingParams(), structured(**constraint)], use_tqdm=False)
        assert caught.value.field == f"structured_outputs.{next(iter(constraint))}"
        assert "prompts[1]" in str(caught.value)
    assert sum(llm.engine.stats().iterations.values()) == before


def test_the_example_of_the_documentation_runs(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(model: str, **options: Any) -> LLM:
        assert (model, options) == ("tiny-opt", {"warm_up": False})  # as `llm` was made, but for sizes
        return llm

    monkeypatch.setattr("apt_jax.LLM", given)
    text = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    exec(compile(example, "structured_output.md", "exec"), {})
    answer = ast.literal_eval(capsys.readouterr().out)
    assert set(answer) == {"name", "age"}
