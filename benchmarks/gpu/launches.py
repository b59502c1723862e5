"""Launches of a step, compiled for a GPU that is not there: of keys and values, of the hybrid cache without hidden prefixes,
and with some.

A step of a model is compiled with one layer and with two, so launches of the whole model are exact: layers repeat. The
program is the one that the engine picks for the step. A step of prompts without hidden prefixes may launch one kernel a
layer more than its twin over keys and values alone, which writes layer inputs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from apt_jax.executor.compiling.buckets import PromptSize, padded_prefix
from apt_jax.models import PRESETS
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu import device_free, engine_step
from benchmarks.gpu.compile_only import CHIPS
from benchmarks.gpu.engine_step import StepCase

_Outcome = TypeVar("_Outcome", bound=Any)

PROMPT_TOKENS, DECODE_ROWS = (64, 1024), (1, 64)
PREFIX_TOKENS = 1500
"""Length of each hidden prefix."""
WRITES = 1
"""Launches a layer that layer inputs may cost a step without hidden prefixes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchCase:
    """A step whose launches are counted."""

    model: str
    hybrid: bool
    prompt_tokens: int = 0
    """0: the step decodes."""
    num_rows: int = 64
    """Rows that decode; of a step of prompts `--max-num-seqs`."""
    num_prefixes: int = 0
    """Hidden prefixes of the prompts."""
    arch: str = "sm_90"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        if not self.prompt_tokens:
            kinds = "kv + hidden" if self.hybrid else "kv"
            return f"{kinds}, decode of {self.num_rows}"
        before = f", {self.num_prefixes} prefixes" if self.num_prefixes else ", no prefix"
        cache = f"hybrid{before}" if self.hybrid else "kv"
        return f"{cache}, {self.prompt_tokens} prompt tokens"

    @property
    def twin(self) -> "LaunchCase | None":
        """The step over keys and values alone that this one may not launch more than; None: there is none."""
        if not self.hybrid or not self.prompt_tokens or self.num_prefixes:
            return None
        return dataclasses.replace(self, hybrid=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """Launches of a step with n layers: `fixed` + n * `per_layer`."""

    fixed: int
    per_layer: int
    total: int
    """Sum for the whole model."""
    command_buffers: int
    outside: int
    """Launches outside command buffers, with two layers."""


def cases() -> list[LaunchCase]:
    """The steps of docs/lab/kernels.md."""
    found = []
    for model, prefixes in (("opt-13b", (0, 1, 8)), ("llama-2-7b", (0, 1, 8)), ("llama-3-8b", ())):
        found += [LaunchCase(model=model, hybrid=False, prompt_tokens=tokens) for tokens in PROMPT_TOKENS]
        for num_prefixes in prefixes:
            found += [
                LaunchCase(model=model, hybrid=True, prompt_tokens=tokens, num_prefixes=num_prefixes)
                for tokens in PROMPT_TOKENS
            ]
        for hybrid in (False, True) if prefixes else (False,):
            found += [LaunchCase(model=model, hybrid=hybrid, num_rows=rows) for rows in DECODE_ROWS]
    return found


def quick_cases(day: int) -> list[LaunchCase]:
    """One pair of twins a day: few tokens or many."""
    case = LaunchCase(model="opt-13b", hybrid=True, prompt_tokens=PROMPT_TOKENS[day % 2])
    return [dataclasses.replace(case, hybrid=False), case]


def step_of(case: LaunchCase, num_layers: int) -> StepCase:
    """The step as the gate compiles it, with the program that the engine picks."""
    common: dict[str, Any] = {
        "model": case.model,
        "dtype": case.dtype,
        "kinds": (True, case.hybrid),
        "num_layers": num_layers,
        "num_rows": case.num_rows,
    }
    if not case.prompt_tokens:
        return StepCase(**common)
    size = _program(case, common)
    return StepCase(**common, prefill_tokens=size.tokens, prefix_room=size.prefix_room)


def _program(case: LaunchCase, common: dict[str, Any]) -> PromptSize:
    """The engine's, of those of a server that computes as many tokens a step as any case has."""
    largest = StepCase(**common, prefill_tokens=max(PROMPT_TOKENS))
    buckets = engine_step.plan_of(largest, CHIPS[case.arch], None).buckets
    size = buckets.prompt_size(case.prompt_tokens, case.num_prefixes * padded_prefix(PREFIX_TOKENS))
    return size if case.hybrid else size._replace(prefix_room=0)


def count(case: LaunchCase, ops: KernelBackend) -> tuple[LaunchReport, list[str]]:
    """The launches of a step, and what is wrong with it: more than one graph, copies of the pool, temporaries."""
    steps = [step_of(case, num_layers) for num_layers in (1, 2)]
    one, two = (engine_step.compile_step(step, CHIPS[case.arch], ops) for step in steps)
    wrong = [fault for step, report in zip(steps, (one, two), strict=True) for fault in device_free.failures(report)]
    per_layer = two.kernels - one.kernels
    fixed = one.kernels - per_layer
    _, config = read_model_config(PRESETS[case.model])
    report = LaunchReport(
        fixed=fixed,
        per_layer=per_layer,
        total=fixed + config.num_layers * per_layer,
        command_buffers=two.command_buffers,
        outside=two.outside,
    )
    return report, list(dict.fromkeys(wrong))


def twin_failures(found: Mapping[LaunchCase, LaunchReport]) -> dict[LaunchCase, str]:
    """Cases that launch more than their twins may, and what is wrong with them."""
    wrong = {}
    for case, report in found.items():
        twin = None if case.twin is None else found.get(case.twin)
        if twin is not None and (report.fixed > twin.fixed or report.per_layer > twin.per_layer + WRITES):
            wrong[case] = (
                f"{report.fixed} launches and {report.per_layer} a layer without hidden prefixes, over keys and values alone"
                f" {twin.fixed} and {twin.per_layer} (may be {WRITES} a layer more)"
            )
    return wrong


def with_twins(outcomes: Sequence[_Outcome]) -> list[_Outcome]:
    """The gate's outcomes, where steps that launch more than their twins fail."""
    wrong = twin_failures({o.case: o.report for o in outcomes if isinstance(o.report, LaunchReport)})
    return [dataclasses.replace(o, failures=(*o.failures, wrong[o.case])) if o.case in wrong else o for o in outcomes]


def table(outcomes: Sequence[Any]) -> list[list[str]]:
    """A header and a row for every case among the gate's outcomes."""
    rows = [["step", "model", "chip", "launches a layer", "beside layers", "whole model", "graphs", "outside"]]
    for outcome in outcomes:
        if outcome.case is None:
            continue
        numbers = ["failed", *[""] * 4]
        report = outcome.report
        if isinstance(report, LaunchReport):
            counts = (report.per_layer, report.fixed, report.total, report.command_buffers, report.outside)
            numbers = [str(count) for count in counts]
        rows.append([outcome.case.name, outcome.case.model, outcome.case.arch, *numbers])
    return rows
