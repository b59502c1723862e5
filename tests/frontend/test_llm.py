"""The offline interface, and building an engine."""

import dataclasses
import importlib.resources
import inspect
import itertools
import json
import os
import re
import shutil
import struct
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from apt_jax import LLM, SLO, SamplingParams
from apt_jax.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from apt_jax.frontend.builder import build_engine, use_compile_cache
from apt_jax.frontend.components import build_components, with_policy
from apt_jax.frontend.llm import configure
from apt_jax.frontend.outputs import OutputAssembler, RequestState
from apt_jax.frontend.progress import ProgressBars
from apt_jax.lab.reference_model import forward
from apt_jax.models import LoadedModel, load_model
from apt_jax.request import WAYS_OUT, CompletionOutput, RequestOutput, StructuredOutputsParams
from apt_jax.text.chat import ChatTemplate
from apt_jax.utils.activity import activity
from tests.support.caches import calibrations_apart
from tests.support.cases import ALL
from tests.support.fake_executor import Fault, FaultKind, reference_tokens
from tests.support.opt_checkpoint import TINY
from tests.support.paged_driver import draw_greedily, few_programs
from tests.support.toy_serving import (
    EOS,
    VOCAB_SIZE,
    GatedExecutor,
    assert_clean,
    byte_tokenizer,
    executor_of,
    expected_tokens,
    toy_parts,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def toy(**kwargs) -> LLM:
    return LLM.from_parts(toy_parts(**kwargs))


def generate(llm: LLM, *args, **kwargs) -> list[RequestOutput]:
    outputs = llm.generate(*args, use_tqdm=False, **kwargs)
    assert_clean(llm.parts)
    return outputs


def test_the_policy_knows_every_objective_of_a_request():
    llm = toy(policy="edf", max_num_seqs=1)
    slos = [SLO(e2e_s=e2e_s) for e2e_s in (300.0, 100.0, 200.0)] + [SLO(ttft_s=150.0), SLO()]
    outputs = generate(llm, ["a"] * 5, GREEDY, slo=slos)
    served = sorted(range(5), key=lambda i: outputs[i].metrics.token_times_s[0])
    assert served == [1, 3, 2, 0, 4]


def hints(llm: LLM) -> dict[str, float]:
    """Seconds for which the client asks to keep each named session."""
    sessions = llm.engine.states.sessions
    assert sessions is not None
    return {name: float(sessions.table.hint_s[rows[0]]) for (_, name), rows in sessions._named.items()}


def text_of(ids) -> str:
    return byte_tokenizer().decode(ids)


def only(output: RequestOutput) -> CompletionOutput:
    assert output.finished
    (completion,) = output.outputs
    return completion


# --- generate ------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_and_equal_their_reference():
    llm = toy(policy="apt")
    prompts = ["x" * n for n in range(40, 0, -1)]
    params = [SamplingParams(max_tokens=1 + n % 13, seed=n) for n in range(40)]
    outputs = generate(llm, prompts, params)
    assert [o.prompt for o in outputs] == prompts
    for output, p in zip(outputs, params, strict=True):
        completion = only(output)
        want = reference_tokens(
            output.prompt_token_ids,
            p.max_tokens,
            vocab_size=VOCAB_SIZE,
            params=SamplingParams(max_tokens=p.max_tokens, seed=p.seed, stop_token_ids=(EOS,)),
        )
        assert completion.token_ids == want
        assert completion.text == text_of(want)
        assert completion.finish_reason == ("stop" if want[-1] == EOS else "length")
        assert completion.stop_reason is None


@pytest.mark.parametrize(
    ("prompts", "num"),
    [
        *[
            ("text", 1),
            (["a", "b"], 2),
            ([5, 6], 1),
            ([[5, 6], [7]], 2),
            (["a", [5]], 2),
            ((), 0),
            (np.array([5, 6]), 1),
        ],
        ({"prompt": "a"}, 1),
        ([{"prompt": "a"}, {"prompt_token_ids": [5, 6], "cache_salt": "x"}, "b", [7]], 4),
        ({"prompt_token_ids": np.array([5]), "prompt": None, "multi_modal_data": None}, 1),
    ],
)
def test_the_forms_of_prompts(prompts, num):
    outputs = generate(toy(), prompts, GREEDY)
    assert len(outputs) == num
    assert all(len(only(o).token_ids) == 8 for o in outputs)


@pytest.mark.parametrize(
    ("asked", "kept_s"), [(None, 0.0), (0, 0.0), (90, 90.0), (np.float32(0.5), 0.5), (1e30, 3600.0)]
)
def test_a_prompt_asks_how_long_its_session_is_kept(asked, kept_s):
    llm = toy(retention="knapsack")
    generate(llm, {"prompt": "a", "session_id": "s", "retain_s": asked}, GREEDY)
    assert hints(llm) == {"s": kept_s}


def test_conversations_name_sessions_and_ask_how_long_to_keep_them():
    llm = toy(retention="knapsack", chat_template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    one = [{"role": "user", "content": "hi"}]
    llm.chat(one, GREEDY, session_id="a", retain_s=60, use_tqdm=False)
    llm.chat([one, one], GREEDY, session_id=["b", "c"], retain_s=[7200, None], use_tqdm=False)
    assert hints(llm) == {"a": 60.0, "b": 3600.0, "c": 0.0}
    with pytest.raises(InvalidRequestError, match=r"^retain_s: -1.0 must not be negative \(prompts\[1\]\)"):
        llm.chat([one, one], GREEDY, retain_s=[1, -1], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^session_id: 1 entry for 2 prompts"):
        llm.chat([one, one], GREEDY, session_id=["b"], use_tqdm=False)


def test_more_prompts_than_the_queue_takes():
    llm = toy(max_num_seqs=2, max_num_queued_reqs=3, max_num_queued_tokens=20)
    outputs = generate(llm, ["x" * 9] * 30, GREEDY)
    assert len({tuple(only(o).token_ids) for o in outputs}) == 1


def test_the_defaults_are_those_of_sampling_params_and_seeds_differ_by_request():
    llm = toy()
    first, second = generate(llm, ["same", "same"])
    assert max(len(only(first).token_ids), len(only(second).token_ids)) <= 16
    assert only(first).token_ids != only(second).token_ids
    again = generate(toy(), ["same", "same"])  # a new engine of the same seed
    assert [only(o).token_ids for o in again] == [only(first).token_ids, only(second).token_ids]


def test_several_outputs_of_a_prompt():
    params = [SamplingParams(n=3, seed=5), SamplingParams(seed=6), {"n": 2, "seed": 7}]
    results = generate(toy(), ["same", "same", "same"], params)
    assert [[o.index for o in result.outputs] for result in results] == [[0, 1, 2], [0], [0, 1]]
    assert all(result.finished and all(o.finish_reason for o in result.outputs) for result in results)
    singles = generate(toy(), ["same"] * 4, [SamplingParams(seed=seed) for seed in (5, 6, 7, 8)])
    texts = [only(single).text for single in singles]
    assert [[o.text for o in result.outputs] for result in results] == [texts[:3], texts[1:2], texts[2:]]
    with pytest.raises(InvalidRequestError, match=r"^n: 2 outputs are 2 requests"):
        toy().parts.build_request(prompt="same", params=SamplingParams(n=2))


def test_metrics_and_objectives():
    llm = toy(step_s=0.002)
    fast, slow = generate(llm, ["a", "b"], GREEDY, slo=[SLO(ttft_s=30, tbt_s=30), SLO(tbt_s=1e-5)])
    assert fast.metrics.slo_attained
    assert not slow.metrics.slo_attained
    assert slow.metrics.ttft_attained
    whole, late = generate(llm, ["a", "b"], GREEDY, slo=[SLO(e2e_s=30), SLO(ttft_s=30, e2e_s=1e-3)])
    assert whole.metrics.slo_attained
    assert (whole.metrics.e2e_s or 0) > (whole.metrics.ttft_s or 0)
    assert (late.metrics.ttft_attained, late.metrics.e2e_attained, late.metrics.slo_attained) == (True, False, False)
    assert len(late.metrics.token_times_s) == 8
    assert (fast.metrics.ttft_s or 0) > 0
    assert (fast.metrics.tbt_s or 0) >= 0.002
    assert len(fast.metrics.token_times_s) == 8
    assert fast.metrics.cache_kind in ("kv", "hidden")


def test_classes_are_those_of_each_prompt():
    llm, seen = toy(), []
    add = llm.engine.add_request

    def noting(request):
        seen.append(request.slo_class)
        add(request)

    llm.engine.add_request = noting
    generate(llm, ["a", "b"], GREEDY)
    generate(llm, ["a", "b"], GREEDY, slo_class="be")
    generate(llm, ["a", "b"], GREEDY, slo_class=["be", None])
    llm.embed(["a"], slo_class="be", use_tqdm=False)
    assert seen == ["rt", "rt", "be", "be", "be", "rt", "be"]
    with pytest.raises(InvalidRequestError, match=r"slo_class: 'flex' must be 'rt' .* or 'be'"):
        generate(llm, ["a"], GREEDY, slo_class="flex")
    with pytest.raises(InvalidRequestError, match="slo_class: 1 entry for 2 prompts"):
        generate(llm, ["a", "b"], GREEDY, slo_class=["be"])


def test_log_probabilities():
    (output,) = generate(toy(), "a", SamplingParams(max_tokens=3, temperature=0.0, logprobs=2))
    completion = only(output)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) == 2
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == -0.5
        assert isinstance(entry[token_id].decoded_token, str)
    assert completion.cumulative_logprob == -0.5 * len(completion.token_ids)
    (plain,) = generate(toy(), "a", GREEDY)
    assert only(plain).logprobs is None
    assert only(plain).cumulative_logprob is None


def test_stop_tokens_and_stop_strings():
    llm = toy()
    (whole,) = generate(llm, "hello", SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    ids, text = only(whole).token_ids, only(whole).text
    stop_id = ids[5]

    def run(**params) -> CompletionOutput:
        merged = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **params}
        return only(generate(llm, "hello", SamplingParams(**merged))[0])

    by_token = run(stop_token_ids=(stop_id,))
    end = ids.index(stop_id)
    assert by_token.token_ids == ids[: end + 1]
    assert by_token.text == text_of(ids[:end])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", stop_id)
    kept = run(stop_token_ids=(stop_id,), include_stop_str_in_output=True)
    assert kept.text == text_of(ids[: end + 1])
    stop = next(c for c in text if c.isascii() and c.isprintable())
    by_text = run(stop=(stop,))
    assert by_text.text == text[: text.index(stop)]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert run(stop=(stop,), include_stop_str_in_output=True).text == text[: text.index(stop) + 1]


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    llm = toy(tokenizer=None)
    (output,) = generate(llm, [5, 6, 7], GREEDY)
    assert only(output).text == ""
    assert len(only(output).token_ids) == 8
    with pytest.raises(InvalidRequestError, match="start with one \\(tokenizer DIR"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        llm.generate([5], SamplingParams(stop=("x",)), use_tqdm=False)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "kwargs", "field"),
    [
        ("", {}, "prompt"),
        (["good", ""], {}, "prompt"),
        (["good", None], {}, "prompt"),
        ([[]], {}, "prompt_token_ids"),
        ([[VOCAB_SIZE]], {}, "prompt_token_ids"),
        ([[1, "2"]], {}, "prompt_token_ids"),
        ("a\udc80", {}, "prompt"),
        ("x" * 300, {}, "prompt"),
        ("x" * 250, {}, "max_tokens"),
        (5, {}, "prompts"),
        (b"bytes", {}, "prompts"),
        ("x", {"sampling_params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ("x", {"sampling_params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ("x", {"sampling_params": [SamplingParams()] * 2}, "sampling_params"),
        ("x", {"sampling_params": "greedy"}, "params"),
        ("x", {"sampling_params": {"temprature": 0.0}}, "temprature"),
        ({}, {}, "prompt"),
        ({"prompt": 5}, {}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [5]}, {}, "prompt"),
        (["a", {"prompt": "a", "multi_modal_data": {"image": 1}}], {}, "prompt"),
        ({"prompt_token_ids": "a"}, {}, "prompt_token_ids"),
        ({"prompt": "a", "cache_salt": 5}, {}, "cache_salt"),
        ({"prompt": "a", "retain_s": "60"}, {}, "retain_s"),
        ({"prompt": "a", "retain_s": -1}, {}, "retain_s"),
        ({"prompt": "a", "retain_s": float("inf")}, {}, "retain_s"),
        ("x", {"slo": {"ttft_s": 1}}, "slo"),
        (["x", "y"], {"slo": [SLO()]}, "slo"),
        ("x", {"slo": (0.5, 0.5)}, "slo"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(prompts, kwargs, field):
    llm = toy()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, use_tqdm=False, **kwargs)
    assert caught.value.field.split("[")[0] == field
    assert "\n" not in str(caught.value)
    assert executor_of(llm.parts).num_steps == 0
    assert_clean(llm.parts)
    assert only(generate(llm, "after", GREEDY)[0]).finish_reason == "length"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda llm: llm.generate("x", slo={"ttft_s": 1}), r"^slo: an object is not an SLO; use SLO\(ttft_s=1\)$"),
        (lambda llm: llm.generate(prompt_token_ids=[1]), r"^LLM.generate has no parameter 'prompt_token_ids'; give token ids as"),
        (lambda llm: llm.generate("x", temperature=0), r"'temperature'; use sampling_params=SamplingParams\(...\)$"),
        (lambda llm: llm.generate("x", slo_ttft_ms=5), r"'slo_ttft_ms'; use slo=SLO\("),
        (lambda llm: llm.generate("x", retain_s=5), r"'retain_s'; give it with the prompt"),
        (lambda llm: llm.chat([], chat_template="x"), r"'chat_template'; give a file to LLM\(chat_template=FILE\)$"),
        (lambda llm: llm.embed("x", normalise=True), r"^LLM.embed has no parameter 'normalise'; did you mean normalize\?$"),
        (lambda llm: configure("m", None, {"default_slo_ttft_ms": 5}), r"use default_slo=SLO\(ttft_s=...\), in seconds$"),
    ],
)  # fmt: skip
def test_arguments_of_other_engines_are_told_what_to_use(call, told):
    with pytest.raises((InvalidRequestError, TypeError), match=told):
        call(toy())


def test_a_type_error_of_other_origin_is_kept():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompts'"):
        toy().generate()  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [*WAYS_OUT, "temprature", "max_token", "presence_penality"])
def test_an_unknown_sampling_parameter_is_told_what_to_use(name):
    told = f"; {WAYS_OUT[name]}" if name in WAYS_OUT else "; did you mean "
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"SamplingParams has no parameter '{name}'{told}")
    with pytest.raises(InvalidRequestError) as refused:
        toy().generate("x", {name: 1})
    assert str(refused.value).startswith(f"{name}: no sampling parameter has this name{told}")


def test_names_for_other_parameters_are_not_parameters():
    assert not {*WAYS_OUT} & {field.name for field in dataclasses.fields(SamplingParams)}
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["max_tokens", "temperature"]
    assert list(inspect.signature(LLM.generate).parameters)[:3] == ["self", "prompts", "sampling_params"]


def test_methods_of_vllm():
    llm = toy()
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_default_sampling_params() == SamplingParams()


def test_the_message_says_which_prompt():
    with pytest.raises(InvalidRequestError, match=r"prompt: must not be empty \(prompts\[2\]\)"):
        toy().generate(["a", "b", ""], use_tqdm=False)


def test_R3_a_prompt_that_can_never_fit_the_pool():
    llm = toy(num_blocks=20)
    with pytest.raises(InvalidRequestError, match=r"never fit.*\(num_blocks_override\)"):
        llm.generate("x" * 70, use_tqdm=False)
    assert executor_of(llm.parts).num_steps == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": "hybird"},
        {"scheduling_policy": "atp"},
        {"tensor_parallel_size": 2},
        {"max_num_seqs": 0},
        {"dtype": "int8"},
        {"num_blocks_override": 1},
        {"block_size": 0},
        {"load_format": "zip"},
        {"seed": -1},
        {"max_model_len": 1},
    ],
)
def test_wrong_configurations_name_their_keyword_and_no_flag(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields)).removeprefix('scheduling_')}") as caught:
        LLM("tiny-opt", **fields)
    assert not re.search(r"(?<![\w-])--?[a-z]", str(caught.value))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LLM("facebook/opt-125m"), r"or run it with random weights \(load_format='dummy'\)"),
        (lambda: LLM("tiny-opt", swap_space=1, enable_prefix_caching=False), "leave out enable_prefix_caching=False or swap_space$"),
        (lambda: LLM("tiny-opt", max_loras=0), r"^max_loras=0 must lie in \[1, 256\]$"),
        (lambda: toy().chat([{"role": "user", "content": "hi"}]), r"start with one \(chat_template FILE\)"),
        (lambda: LLM("tiny-opt", config=5), r"^config=5 must be of the type EngineConfig"),  # type: ignore[arg-type]
        (lambda: LLM("tiny-opt", warm_up="no"), "^warm_up='no' must be True or False$"),  # type: ignore[arg-type]
        (lambda: LLM(5), "^model=5 must be a string$"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_errors_of_the_python_interface_name_its_keywords(make, told):
    with pytest.raises((ConfigError, ModelLoadError, InvalidRequestError), match=told):
        make()


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM("tiny-opt", max_num_seq=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("max_num_seq", "max_num_seqs"), ("mode", "cache")],
)
def test_an_unknown_option_names_the_nearest_one(wrong, right):
    with pytest.raises(TypeError, match=f"LLM has no option '{wrong}'; did you mean {right}\\?$"):
        configure("tiny-opt", None, {wrong: 1})


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("enforce_eager", "programs are compiled at the start; leave it out"),
        ("gpu_memory_utilization", "it is device_memory_utilization here, the share of .*"),
        ("pipeline_parallel_size", r"only tensor parallelism is supported \(tensor_parallel_size\)"),
        ("tp", "it is tensor_parallel_size here"),
        ("policy", "it is scheduling_policy here"),
    ],
)
def test_an_option_of_vllm_is_told_what_to_write(option, told):
    with pytest.raises(TypeError, match=f"^LLM has no option '{option}'; {told}$"):
        configure("tiny-opt", None, {option: 1})


def test_no_other_option_is_named():
    with pytest.raises(TypeError, match=r"^LLM has no option 'lora_dtype'$"):
        configure("tiny-opt", None, {"lora_dtype": "auto"})


def test_options_are_the_fields_of_the_configuration():
    assert configure("m", None, {}) == EngineConfig(model="m")
    options = {
        "cache": "kv",
        "scheduling_policy": "fcfs",
        "dtype": "bfloat16",
        "max_num_seqs": 9,
        "tensor_parallel_size": 2,
    }
    assert configure("m", None, options) == EngineConfig(
        model="m",
        dtype="bfloat16",
        cache=CacheConfig(mode="kv"),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=9),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    assert set(options) < set(inspect.signature(LLM).parameters)


def test_options_replace_those_of_a_configuration():
    config = EngineConfig(model="other", max_model_len=99, scheduler=SchedulerConfig(default_slo=SLO(ttft_s=1.0)))
    changed = configure("m", config, {"max_model_len": None, "default_slo": None, "seed": 5})
    assert changed == dataclasses.replace(config, model="m", max_model_len=None, seed=5)


def test_more_requests_than_tokens_in_a_step_raise_the_tokens():
    assert configure("m", None, {"max_num_seqs": 700}).scheduler.max_num_batched_tokens == 700
    assert configure("m", None, {"max_num_batched_tokens": None}).scheduler.max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        configure("m", None, {"max_num_seqs": 700, "max_num_batched_tokens": 699})


def test_an_unknown_model_is_one_line():
    with pytest.raises(ModelLoadError, match="no-such-model") as caught:
        LLM("no-such-model")
    assert "\n" not in str(caught.value)


# --- failures ------------------------------------------------------------------------------------------------------


def test_one_broken_request_says_why_and_the_others_are_whole():
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps == 3 else None

    fault.steps = 0
    outputs = generate(toy(fault=fault, debug=False), ["a", "b", "c"], GREEDY)
    reasons = sorted(str(only(o).finish_reason) for o in outputs)
    assert reasons == ["error", "length", "length"]
    (message,) = [o.error for o in outputs if o.error]
    assert message.startswith("numeric:")


def test_engine_death_is_an_error():
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 2 else None

    fault.steps = 0
    llm = toy(fault=fault, debug=False)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)


def test_an_interruption_leaves_a_clean_engine():
    def fault(batch):
        fault.steps += 1
        if fault.steps == 4:
            raise KeyboardInterrupt
        return None

    fault.steps = 0
    llm = toy(fault=fault, overlap=False)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert_clean(llm.parts)
    request = llm.parts.build_request(prompt="a", params=GREEDY)
    assert only(generate(llm, "a", GREEDY)[0]).token_ids == expected_tokens(request)


# --- pieces --------------------------------------------------------------------------------------------------------


def test_a_reused_id_does_not_mix_texts():
    parts = toy_parts()
    assembler = OutputAssembler(byte_tokenizer())
    first, second = (parts.build_request(prompt=p, request_id="same", params=GREEDY) for p in ("a", "b"))
    assembler.on_token(first, 3 + ord("h") - ord("!"))
    assembler.on_token(second, 3 + ord("w") - ord("!"))
    assert assembler.num_open == 2
    assert RequestState(first).output().outputs[0].text == ""


def test_another_policy_keeps_the_padded_vocabulary():
    padded = VOCAB_SIZE + 400  # of the model; most sampled tokens are none of the tokenizer's
    executor = GatedExecutor(num_blocks=64, block_size=4, max_num_seqs=4, vocab_size=padded)
    parts = build_components(
        EngineConfig(model="toy", scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4)),
        executor,
        kinds=(
            CacheKindSpec(name="kv", blocks_per_group=2),
            CacheKindSpec(name="hidden", blocks_per_group=1),
        ),
        vocab_size=padded,
        max_model_len=64,
        tokenizer=byte_tokenizer(),
    )
    first = only(generate(LLM.from_parts(parts), "hello", GREEDY)[0])
    executor.reset()
    second = only(generate(LLM.from_parts(with_policy(parts, "apt", "hybrid")), "hello", GREEDY)[0])
    assert max(first.token_ids) >= VOCAB_SIZE
    assert (second.token_ids, second.finish_reason) == (first.token_ids, "length")


def test_an_output_is_a_snapshot():
    parts = toy_parts()
    request = parts.build_request(prompt="a", params=GREEDY)
    parts.engine.add_request(request)
    state, snapshots = RequestState(request), [RequestState(request).output()]
    while parts.engine.has_work:
        for output in parts.engine.step():
            state.add(parts.assembler.delta(output))
            snapshots.append(state.output())
    assert [len(s.outputs[0].token_ids) for s in snapshots] == list(range(9))
    assert [len(s.metrics.token_times_s) for s in snapshots] == list(range(9))
    assert [s.finished for s in snapshots] == [False] * 8 + [True]


# --- with a model --------------------------------------------------------------------------------------------------

SMALL = {**TINY, "vocab_size": 280, "hidden_size": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64}


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """A directory with a random model of two layers and a tokenizer of bytes."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(tmp_path / "cache"))
    monkeypatch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL))
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def small_llm(path, **kwargs) -> LLM:
    defaults = {
        "load_format": "dummy",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks_override": 40,
        "warm_up": False,
        "use_tqdm": False,
    }
    llm = LLM(str(path), **{**defaults, **kwargs})
    few_programs(llm.parts.executor)
    return llm


plain_pass = jax.jit(forward, static_argnums=2)


def most_likely(loaded: LoadedModel, prompt: list[int], said: list[int]) -> list[int]:
    """The most likely token after `prompt`, and after each token of `said` but the last, by a plain forward pass."""
    tokens = np.zeros(64, np.int32)  # padded at the end, where causal attention does not look
    tokens[: len(prompt) + len(said)] = [*prompt, *said]
    scores = np.asarray(plain_pass(loaded.params, tokens, loaded.config))
    return scores.argmax(axis=1)[len(prompt) - 1 :][: len(said)].tolist()


@pytest.mark.parametrize("cache", ["kv", "hidden", "hybrid"])
def test_a_model_generates_what_its_plain_forward_pass_does(small_model, cache):
    llm = small_llm(small_model, cache=cache)
    prompts = ["hi", "a longer prompt", "x"]
    outputs = generate(llm, prompts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    loaded = load_model(llm.parts.config)
    for output in outputs:
        said = only(output).token_ids
        assert len(said) == 6
        assert said == most_likely(loaded, output.prompt_token_ids, said)
        assert output.metrics.cache_kind == (cache if cache != "hybrid" else output.metrics.cache_kind)
    assert llm.parts.tokenizer is not None
    # Of the tokenizer, the smaller one: a Llama's has an unknown token, named in no file.
    assert llm.parts.limits.vocab_size == llm.parts.tokenizer.vocab_size == VOCAB_SIZE + 1 < llm.parts.vocab_size
    assert llm.parts.limits.max_model_len == 64


def test_a_tokenizer_of_another_model_is_refused(small_model):
    config = {**SMALL, "vocab_size": 100}
    (small_model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="do not belong together"):
        small_llm(small_model)


@pytest.fixture
def short_of_rows(small_model):
    """The same, with three tokens for which the model has no rows: `<image>`, the end of a turn, and a plain one."""
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<image>", "<end_of_turn>"])
    backend.add_tokens(["plain"])
    backend.save(str(small_model / "tokenizer.json"))
    template = "{% for m in messages %}{{ '<image>' if m.role == 'system' }}{{ m.content }}{% endfor %}"
    fields = {"eos_token": "<end_of_turn>", "chat_template": template}
    (small_model / "tokenizer_config.json").write_text(json.dumps(fields))
    (small_model / "config.json").write_text(json.dumps({**SMALL, "vocab_size": VOCAB_SIZE}))
    return small_llm(small_model)


def test_ids_without_a_row_are_refused_in_requests_and_never_come_out(short_of_rows):
    llm, image, plain = short_of_rows, VOCAB_SIZE, VOCAB_SIZE + 2
    assert llm.parts.limits.vocab_size == VOCAB_SIZE
    assert llm.parts.limits.eos_token_ids == (2,)
    refused = {
        "prompt_token_ids": {"prompt_token_ids": [3, image]},
        "prompt": {"prompt": "a plain text"},
        "bad_words": {"params": {"bad_words": ["plain"]}},
        "stop_token_ids": {"params": {"stop_token_ids": [image]}},
        "allowed_token_ids": {"params": {"allowed_token_ids": [3, plain]}},
        "logit_bias": {"params": {"logit_bias": {image: 1.0}}},
    }
    for field, given in refused.items():
        request = {"params": {}, **({} if field.startswith("prompt") else {"prompt": "a"}), **given}
        with pytest.raises(InvalidRequestError, match=rf"^{field}.*vocabulary") as caught:
            llm.parts.build_request(**request)
        assert "\n" not in str(caught.value)
    assert llm.parts.chat_prompt([{"role": "user", "content": "<image>"}])  # text stays text
    with pytest.raises(InvalidRequestError, match=f"messages: the text contains the token id {image}"):
        llm.parts.chat_prompt([{"role": "system", "content": "a"}])
    ids = list(range(VOCAB_SIZE))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, allowed_token_ids=tuple(ids[3:]))
    for output in generate(llm, ["a", "<image>"], params):
        assert all(token < VOCAB_SIZE for token in only(output).token_ids)


def test_constraints_leave_out_ids_without_a_row(short_of_rows):
    pytest.importorskip("llguidance")
    regex = StructuredOutputsParams(regex="(plain){2}")
    params = SamplingParams(max_tokens=10, temperature=0.0, structured_outputs=regex)
    (output,) = generate(short_of_rows, ["a"], params)
    assert only(output).text == "plainplain"
    assert all(token < VOCAB_SIZE for token in only(output).token_ids)


def test_a_damaged_tokenizer_is_refused(small_model):
    (small_model / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: damaged"):
        small_llm(small_model)


@pytest.mark.seeds
def test_stored_costs_are_used_and_progress_is_told(small_model, monkeypatch):
    draw_greedily(monkeypatch)
    config = EngineConfig(
        model=str(small_model),
        load_format="dummy",
        cache=CacheConfig(num_blocks_override=40, mode="hybrid" if ALL else "kv"),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32),
    )
    stages: dict[str, tuple[int, int]] = {}
    parts = build_engine(
        config, calibration_s=0.1, progress=lambda stage, done, total: stages.update({stage: (done, total)})
    )  # fmt: skip
    assert set(stages) - {"kernels"} == {"loading", "layout", "preparing", "calibrating"}
    assert all(done == total for done, total in stages.values())
    assert parts.cost_model is not None
    assert parts.engine.costs == parts.cost_model.step_costs()
    assert parts.warm_up_s > 0
    again = build_engine(config, warm_up=False, calibrate=False)
    assert again.cost_model == parts.cost_model
    assert again.calibration_s < 1.0


# --- the bundled model ---------------------------------------------------------------------------------------------

BUNDLED = Path(str(importlib.resources.files("apt_jax") / "assets" / "tiny-opt"))
FEW_PROGRAMS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_blocks_override": 64,
    "warm_up": False,
    "use_tqdm": False,
}
LINES = ["Once upon a time", "The king said: «où?» — 你好 🙂", "a"]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled model with few shapes to compile; tests leave it as they found it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(tmp_path_factory.mktemp("cache")))
        patch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)
        llm = LLM("tiny-opt", **FEW_PROGRAMS)
    few_programs(llm.parts.executor)
    return llm


def test_the_bundled_model_writes_what_its_plain_forward_pass_does(bundled):
    outputs = generate(bundled, LINES, SamplingParams(max_tokens=4, temperature=0.0))
    loaded = load_model(bundled.parts.config)
    for output, line in zip(outputs, LINES, strict=True):
        completion = only(output)
        n = len(completion.token_ids)
        assert completion.token_ids == most_likely(loaded, output.prompt_token_ids, completion.token_ids)
        assert output.prompt == line
        assert output.prompt_token_ids == bundled.tokenizer.encode(line)
        assert output.prompt_token_ids[0] == 2
        assert completion.text == bundled.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason in ("length", "stop")
        assert len(output.metrics.token_times_s) == n
        assert output.metrics.slo_attained


def test_the_bundled_model_stops_at_a_string_of_its_own_text(bundled):
    params = SamplingParams(max_tokens=12, temperature=0.0)
    (plain,) = generate(bundled, LINES[0], params)
    text = only(plain).text
    stop = text[3:6]
    cut = text.index(stop)
    for include in (False, True):
        (output,) = generate(
            bundled,
            LINES[0],
            dataclasses.replace(params, stop=(stop,), include_stop_str_in_output=include),
        )
        assert only(output).text == text[: cut + (len(stop) if include else 0)]
        assert (only(output).finish_reason, only(output).stop_reason) == ("stop", stop)


def test_sampled_text_of_the_bundled_model_depends_on_the_seed_alone(bundled):
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (1, 2, 1)]
    first = [only(o).token_ids for o in generate(bundled, [LINES[0]] * 3, params)]
    assert first[0] == first[2] != first[1]
    assert [only(o).token_ids for o in generate(bundled, [LINES[0]] * 3, params)] == first


def test_log_probabilities_of_the_bundled_model_are_ordered_and_sum_up(bundled):
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True)
    completion = only(generate(bundled, LINES[0], params)[0])
    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 3
        values = [e.logprob for e in entry.values()]
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0.0
        assert entry[token_id].rank == 1
    chosen = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


CONTEXT = FEW_PROGRAMS["max_model_len"]
BAD_FOR_A_MODEL = {
    "R1_empty_prompt": ("", {}, "prompt"),
    "R1_empty_ids": ([[]], {}, "prompt_token_ids"),
    "R2_prompt_longer_than_the_context": ("word " * 4000, {}, "prompt"),
    "R2_ids_longer_than_the_context": ([[5] * CONTEXT], {}, "prompt_token_ids"),
    "R2_max_tokens_past_the_context": ("a", {"max_tokens": CONTEXT}, "max_tokens"),
    "R4_id_past_the_vocabulary": ([[4096]], {}, "prompt_token_ids"),
    "R4_negative_id": ([[-1]], {}, "prompt_token_ids"),
    "R8_nan_temperature": ("a", {"temperature": float("nan")}, "temperature"),
    "R8_negative_temperature": ("a", {"temperature": -1.0}, "temperature"),
    "R8_infinite_penalty": ("a", {"presence_penalty": float("inf")}, "presence_penalty"),
    "R8_negative_top_p": ("a", {"top_p": -0.1}, "top_p"),
    "R9_max_tokens_0": ("a", {"max_tokens": 0}, "max_tokens"),
    "R9_min_above_max": ("a", {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    "R10_empty_stop_string": ("a", {"stop": [""]}, "stop"),
    "R14_text_for_a_number": ("a", {"top_k": "2"}, "top_k"),
    "R14_unknown_parameter": ("a", {"top_q": 1}, "top_q"),
    "R15_invalid_utf8": (b"\xff\xfe".decode("utf-8", "surrogateescape"), {}, "prompt"),
}


@pytest.mark.parametrize("case", BAD_FOR_A_MODEL)
def test_bad_input_of_the_bundled_model(bundled, case):
    prompts, params, field = BAD_FOR_A_MODEL[case]
    before = bundled.engine.stats()
    with pytest.raises(InvalidRequestError) as caught:
        bundled.generate(prompts, params, use_tqdm=False)
    message = str(caught.value)
    assert caught.value.field.split("[")[0] == field
    assert "\n" not in message
    assert len(message) < 250
    assert bundled.engine.stats() == before
    assert_clean(bundled.parts)


# --- models that cannot be used ------------------------------------------------------------------------------------


def _config(path: Path, **changes: object) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **changes}))


def _cut(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def _absurd_header(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 2**62))


DAMAGES = {
    "truncated_weights": _cut,
    "absurd_header": _absurd_header,
    "no_weights": lambda path: (path / "model.safetensors").unlink(),
    "no_config": lambda path: (path / "config.json").unlink(),
    "config_is_not_json": lambda path: (path / "config.json").write_text("{"),
    "other_width": lambda path: _config(path, hidden_size=512),
    "more_layers": lambda path: _config(path, num_hidden_layers=99),
    "other_vocabulary": lambda path: _config(path, vocab_size=5000),
    "another_architecture": lambda path: _config(path, model_type="bert", architectures=["BertModel"]),
    "no_tokenizer": lambda path: (path / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_mismatching_checkpoint_is_one_line(damage, tmp_path, monkeypatch):
    monkeypatch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)
    path = tmp_path / "model"
    shutil.copytree(BUNDLED, path)
    DAMAGES[damage](path)
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(path), **FEW_PROGRAMS)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_the_compile_cache_must_be_ours_alone(tmp_path, monkeypatch, caplog):
    import jax

    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        directory = tmp_path / "compiled"
        directory.mkdir()
        os.chmod(directory, 0o777)
        assert not use_compile_cache()
        assert "nobody else" in caplog.text
        os.chmod(directory, 0o700)
        os.chmod(tmp_path, 0o777)  # anybody could put another directory in its place
        assert not use_compile_cache()
        os.chmod(tmp_path, 0o1777)
        assert use_compile_cache()
        assert jax.config.jax_compilation_cache_dir == str(directory)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def test_no_part_of_a_start_is_silent_for_five_seconds(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr("apt_jax.frontend.progress.time.monotonic", lambda: now[0])
    bars = ProgressBars(say=lambda line: said.append((now[0], line)))

    def wait(seconds: float) -> None:
        for _ in range(round(2 * seconds)):  # as the thread of `keep_reporting` does
            now[0] += 0.5
            bars.tick()

    wait(9)
    with activity("compiling the CPU kernels"):
        wait(12)
    for stage in ("preparing", "calibrating"):
        for done in range(4):
            bars(stage, done, 3)
            wait((1.5, 30, 0.5, 6)[done])
    bars.close()
    times = [0.0, *(at for at, _ in said), now[0]]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 5
    lines = [line for _, line in said]
    assert lines[:3] == [
        "starting: 4 s since the start",
        "starting: 8 s since the start",
        "compiling the CPU kernels: 12 s since the start",
    ]
    assert "preparing 3 programs" in lines
    assert "preparing: 1 of 3 programs, 4 s" in lines
    assert "prepared 3 programs in 32.0 s" in lines
    assert "calibrating: 1 of 3 steps, 8 s" in lines
    assert all(len(lines) < 80 for lines in lines)


def test_a_thread_reports_while_nobody_calls(monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(ProgressBars, "_REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(ProgressBars, "_TICK_S", 0.005)
    quiet = ProgressBars(disable=True, say=lambda line: pytest.fail(line)).keep_reporting()
    bars = ProgressBars(say=lambda line: said.set()).keep_reporting()
    assert said.wait(10)
    before = threading.active_count()
    bars.close()
    quiet.close()
    assert threading.active_count() == before - 1


def test_progress_is_drawn_on_a_terminal_that_has_no_size(monkeypatch):
    """As those of containers: tqdm by itself would draw nothing."""
    import pty
    import select

    reader, writer = pty.openpty()
    with open(writer, "w") as terminal, open(reader, "rb") as screen:
        monkeypatch.setattr("sys.stderr", terminal)
        bars = ProgressBars()
        for done in range(4):
            bars("preparing", done, 3)
        terminal.flush()
        seen = b""
        while b"3/3" not in seen and select.select([screen], [], [], 5)[0]:
            seen += os.read(screen.fileno(), 10_000)
        assert b"3/3" in seen
