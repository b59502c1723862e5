"""The gate for TPU code on machines without one: kernels and the engine's steps are compiled for v5e, v5p and v6e.

Kernels: those of `apt_jax.pallas.tpu_decode` at the shapes of published models. Mosaic takes them, and nothing but the
result is allocated.

Steps (`engine_step.py`): the engine's programs with the attention backend that it chooses on TPUs, on one TPU and cut
over four. No copy of the pool, pools updated in place, temporaries below 5 % of the pool, all in the chip's memory,
kernels and collectives in the numbers that the design has, and for decode rows of whole models at most 1.3 times the
traffic that weights, new cache and activations cannot do without.

What limits it: nothing runs, so it says that code compiles well, not that it is right or fast.

    python -m benchmarks.tpu.gate                 # check; exit status 1 and the reasons where something fails
    python -m benchmarks.tpu.gate --quick         # what takes a minute on two cores
    python -m benchmarks.tpu.gate --all-layers    # whole models
    python -m benchmarks.tpu.gate --write         # and refresh the tables in docs/lab/tpu.md and benchmarks/results/tpu-gate/
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apt_jax.ops.calls import DecodeCall, LogitModifiers
from benchmarks.tpu.environment import ENVIRONMENT

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)  # spawned workers inherit it

import jax
import jax.numpy as jnp

from apt_jax.models.sharding import own_config, with_repeated_heads
from apt_jax.ops.backend import KernelBackend
from apt_jax.pallas import tpu_decode
from benchmarks.gpu import shapes
from benchmarks.gpu.gate import as_markdown, as_text, replace_between, summarize
from benchmarks.tpu import engine_step
from benchmarks.tpu.compile_only import CHIPS, MAX_TEMPORARY_SHARE, MAX_TRAFFIC_RATIO, TpuReport, compile_kernel
from benchmarks.tpu.engine_step import BLOCK_SIZE, TpuCase

_ROOT = Path(__file__).parents[2]
DOCUMENT = _ROOT / "docs" / "lab" / "tpu.md"
RESULTS = _ROOT / "benchmarks" / "results" / "tpu-gate"

KERNEL_SHAPES = ("opt-125m", "opt-13b", "opt-66b", "llama-3-8b", "gpt-neox-20b")
_FEW_LAYERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuKernelCase:
    """One op at one shape."""

    op: str
    shape: str
    dtype: str
    variant: str = ""
    """`shared blocks`: rows own ranges of slots; `rules`: window, soft cap, ALiBi slopes and sinks."""

    @property
    def name(self) -> str:
        return f"{self.op} ({self.variant})" if self.variant else self.op


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuOutcome:
    """Result of compiling one kernel or one step for one chip."""

    case: TpuKernelCase | TpuCase
    chip: str
    failures: tuple[str, ...]
    seconds: float
    report: TpuReport | None = None
    """Report of a step that compiled."""
    floor_bytes: int = 0
    """Traffic that a step cannot do without, beside reading its cache."""
    temporary_bytes: int | None = None
    """Temporaries of a kernel that compiled."""

    @property
    def place(self) -> str:
        case = self.case
        if isinstance(case, TpuKernelCase):
            return f"{case.name}, {case.shape} {case.dtype} on {self.chip}"
        devices = f" x {case.num_devices}" if case.num_devices > 1 else ""
        return f"{case.name} of {_model(case)} by {case.backend or 'default'} on {self.chip}{devices}"


Item = tuple[TpuKernelCase | TpuCase, str]


def kernel_cases() -> list[TpuKernelCase]:
    """Kernels of the family at every shape that they serve."""
    cases = []
    for name in KERNEL_SHAPES:
        shape = shapes.PUBLISHED[name]
        ops = ["decode_kv", *(["decode_absorbed"] if shape.has_hidden and not shape.rotary_dim else [])]
        cases += [TpuKernelCase(op=op, shape=name, dtype="bfloat16") for op in ops]
    for op in ("decode_kv", "decode_absorbed"):
        cases.append(TpuKernelCase(op=op, shape="opt-66b", dtype="float32"))
        cases += [
            TpuKernelCase(op=op, shape="opt-13b", dtype="bfloat16", variant=variant)
            for variant in ("shared blocks", "rules")
        ]
    return cases


def step_cases(num_layers: int | None) -> list[TpuCase]:
    """Steps; OPT-125M has all of its layers, the others `num_layers` (None: all)."""
    opt: dict[str, Any] = {"model": "opt-13b", "num_layers": num_layers}
    # A layer's pool on one device must be larger than VMEM, as in service: XLA would work there on a smaller one.
    grouped: dict[str, Any] = {"model": "llama-3-8b", "num_layers": num_layers, "cache": "kv", "num_blocks": 24576}
    rotary: dict[str, Any] = {"model": "llama-2-7b", "num_layers": num_layers}
    # Prompts compile for minutes: one layer shows what there is to see.
    prompt: dict[str, Any] = {"num_layers": num_layers and 1, "prefill_tokens": 1024}
    return [
        TpuCase(**opt | prompt),
        TpuCase(**opt | prompt, num_devices=4),
        TpuCase(**grouped | prompt),
        TpuCase(**grouped | prompt, num_devices=4),
        TpuCase(**rotary | prompt),
        TpuCase(model="opt-125m", num_layers=None, cache="kv"),
        TpuCase(model="opt-125m", num_layers=None),
        TpuCase(model="opt-125m", num_layers=None, cache="kv", backend="xla"),
        TpuCase(**opt),
        TpuCase(**opt, cache="hidden"),
        TpuCase(**opt, num_devices=4),
        TpuCase(**grouped),
        TpuCase(**grouped, num_devices=4),
        TpuCase(**rotary),
    ]


def all_items(num_layers: int | None) -> list[Item]:
    """Every kernel and decode step for every chip. Prompts compile for minutes and have no kernel: each for one chip."""
    steps, names = step_cases(num_layers), list(CHIPS)
    prompts = [case for case in steps if case.prefill_tokens]
    turns = [(case, names[i % len(names)]) for i, case in enumerate(prompts)]
    others = [case for case in (*steps, *kernel_cases()) if case not in prompts]
    return [*turns, *((case, chip) for case in others for chip in CHIPS)]


def quick_items() -> list[Item]:
    """Items for about a minute on two cores: decode steps on one TPU and four, a prompt, kernels; chips in turn."""
    names = list(CHIPS)
    steps = [
        TpuCase(model="opt-125m", num_layers=None, cache="kv"),
        TpuCase(model="opt-125m", num_layers=1),
        TpuCase(model="llama-3-8b", num_layers=1, cache="kv", num_devices=4, num_blocks=24576),
        TpuCase(model="opt-125m", num_layers=1, cache="kv", prefill_tokens=128),
    ]
    kernels = [case for case in kernel_cases() if case.shape != "gpt-neox-20b" and case.dtype == "bfloat16"]
    return [(case, names[i % len(names)]) for group in (steps, kernels) for i, case in enumerate(group)]


def _model(case: TpuCase) -> str:
    return case.model if case.num_layers is None else f"{case.model}, {case.num_layers} layers"


# ---- judgement


def num_layers_of(case: TpuCase) -> int:
    """Layers that are compiled."""
    return engine_step.config_of(case).num_layers


def expected_kernels(case: TpuCase) -> int:
    """Pallas kernels of a step: decode rows of one kind in one layer are one; hidden rows over several devices, rotary
    hidden rows and prompts have none."""
    if case.prefill_tokens or case.backend == "xla":
        return 0
    config = engine_step.config_of(case)
    absorbed = config.hidden_mode == "absorb" and case.num_devices == 1
    return config.num_layers * ((case.cache != "hidden") + (case.cache != "kv" and absorbed))


def expected_collectives(case: TpuCase) -> str:
    """Collectives of a step in the form of `TpuReport.collectives`."""
    if case.num_devices == 1:
        return "none"
    layers, hidden = num_layers_of(case), case.cache != "kv"
    absorbed = hidden and engine_step.config_of(case).hidden_mode == "absorb"
    # After attention and after the feed-forward part, and of the embeddings. Prompts with a prefix of layer inputs: a tile
    # of those; or, where W_k and W_v are cut by feature, keys and values of a tile and of the prompt, which are summed by
    # a reduce-scatter that the compiler splits up. Decode rows of layer inputs: queries of all heads, a tile's scores,
    # results by head; new keys and values.
    if case.prefill_tokens:
        more = f", {layers} all-gather" if hidden and not absorbed else ""
        return f"{(4 if absorbed else 2) * layers + 1} all-reduce{more}"
    scattered = layers * (1 + (case.cache == "hybrid"))
    more = f", {layers} all-gather, {scattered} reduce-scatter" if hidden else ""
    return f"{(2 + hidden) * layers + 1} all-reduce{more}; 1 all-gather"


def step_failures(case: TpuCase, report: TpuReport, floor_bytes: int) -> list[str]:
    """Return the faults of a compiled step, one line each; empty: it passes."""
    wrong = []
    if report.pool_copies:
        wrong.append(f"{report.pool_copies} copies of a layer's pool (must be 0)")
    if report.aliased_bytes < report.pool_bytes:
        wrong.append(f"only {report.aliased_bytes} of the pools' {report.pool_bytes} bytes are updated in place")
    share = _temporary_share(case, report)
    if share >= MAX_TEMPORARY_SHARE:
        wrong.append(f"temporaries take {share:.1%} of the pool (must be less than {MAX_TEMPORARY_SHARE:.0%})")
    if (kernels := expected_kernels(case)) != report.kernels:
        wrong.append(f"{report.kernels} kernels (must be {kernels})")
    if (collectives := expected_collectives(case)) != report.collectives:
        wrong.append(f"collectives: {report.collectives} (must be {collectives})")
    ratio = report.moved_bytes / floor_bytes
    is_whole = num_layers_of(case) == num_layers_of(dataclasses.replace(case, num_layers=None))
    if is_whole and not case.prefill_tokens and not report.loops and ratio > MAX_TRAFFIC_RATIO:
        wrong.append(f"moves {ratio:.2f} times the bytes of weights and results (at most {MAX_TRAFFIC_RATIO})")
    return wrong


def _temporary_share(case: TpuCase, report: TpuReport) -> float:
    """Temporaries over the pool of all layers: they are those of one layer or two, however many are compiled."""
    all_layers = num_layers_of(dataclasses.replace(case, num_layers=None))
    return report.temporary_bytes / (report.pool_bytes * all_layers / num_layers_of(case))


def check_step(case: TpuCase, chip: str, ops: KernelBackend | None = None) -> TpuOutcome:
    """Compile one step and judge it."""
    start = time.perf_counter()
    report, floor = None, 0
    try:
        report, floor = engine_step.compile_step(case, CHIPS[chip], ops)
        failures = step_failures(case, report, floor)
    except Exception as error:
        failures = [compile_error(error)]
    seconds = time.perf_counter() - start
    return TpuOutcome(
        case=case, chip=chip, failures=tuple(failures), seconds=seconds, report=report, floor_bytes=floor
    )  # fmt: skip


def check_kernel(case: TpuKernelCase, chip: str, function: Callable[..., Any] | None = None) -> TpuOutcome:
    """Compile one kernel, or `function` in its place, and judge it."""
    start = time.perf_counter()
    temporary = None
    try:
        temporary = compile_kernel(function or op_of(case, chip), kernel_arguments(case), CHIPS[chip])
        failures = []
        pool = kernel_arguments(case)[1]
        limit = int(MAX_TEMPORARY_SHARE * pool.size * pool.dtype.itemsize)
        if temporary >= limit:
            failures = [f"allocates {temporary:,} bytes beside its result (must be less than {limit:,})"]
    except Exception as error:
        failures = [compile_error(error)]
    seconds = time.perf_counter() - start
    return TpuOutcome(case=case, chip=chip, failures=tuple(failures), seconds=seconds, temporary_bytes=temporary)


def op_of(case: TpuKernelCase, chip: str) -> Callable[..., Any]:
    """The op of a case, as a function of `kernel_arguments`."""

    def call(q: Any, pool: Any, tables: Any, lens: Any, first: Any, last: Any, *more: Any) -> Any:
        reads = DecodeCall(pool=pool, tables=tables, lens=lens, block_size=BLOCK_SIZE, rows=(first, last))
        if case.variant == "shared blocks":
            reads = dataclasses.replace(reads, slot_ranges=more[0])
        if case.variant == "rules":
            rules = LogitModifiers(softcap=50.0, slopes=more[0], window=1024, sinks=more[0])
            reads = dataclasses.replace(reads, rules=rules)
        return getattr(tpu_decode, case.op)(q, reads, cores=CHIPS[chip].cores)

    return call


def kernel_arguments(case: TpuKernelCase, rows: int = 64, entries: int = 128, blocks: int = 6144) -> tuple[Any, ...]:
    """Shapes and dtypes that an op is compiled for."""
    shape = shapes.PUBLISHED[case.shape]
    kv, dtype = case.op == "decode_kv", jnp.dtype(case.dtype)
    width = shape.head_dim if kv else shape.hidden_size
    number = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (
        jax.ShapeDtypeStruct((rows, shape.num_heads, width), dtype),
        jax.ShapeDtypeStruct((blocks, BLOCK_SIZE, shape.lane), dtype),
        jax.ShapeDtypeStruct((rows, 2, entries) if kv else (rows, entries), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        number,
        number,
    )
    if case.variant == "shared blocks":
        return (*arguments, jax.ShapeDtypeStruct((rows, entries, 2), jnp.int32))
    if case.variant == "rules":
        return (*arguments, jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32))
    return arguments


def compile_error(error: Exception) -> str:
    """Return a compiler's complaint as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if "hbm" in first.lower() and "RESOURCE_EXHAUSTED" in first:
        return f"does not fit the TPU's memory: {first.split('RESOURCE_EXHAUSTED:')[-1].strip()}"[:300]
    return f"does not compile: {type(error).__name__}: {first}"[:300]


# ---- run and report


def _work(item: Item) -> TpuOutcome:
    case, chip = item
    return check_kernel(case, chip) if isinstance(case, TpuKernelCase) else check_step(case, chip)


def run(items: Sequence[Item], jobs: int) -> list[TpuOutcome]:
    """Check all items, each in one of `jobs` processes; results in the order of the items."""
    context = multiprocessing.get_context("spawn")
    outcomes = []
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for outcome in pool.map(_work, items):
            outcomes.append(outcome)
            state = "FAILED" if outcome.failures else "ok"
            print(f"{state:6} {outcome.seconds:5.1f} s  {outcome.place}", flush=True)
    return outcomes


def step_table(outcomes: Sequence[TpuOutcome]) -> list[list[str]]:
    """A header and one row for every step and chip."""
    rows = [
        ["step", "model", "backend", "chip", "TPUs", "pool copies", "temporaries MB", "of the pool", "moved MB", "floor MB", "moved / floor", "memory GB", "kernels", "loops", "collectives"]
    ]  # fmt: skip
    for outcome in outcomes:
        case, report = outcome.case, outcome.report
        if isinstance(case, TpuKernelCase):
            continue
        row = [case.name, _model(case), case.backend or "default", outcome.chip, str(case.num_devices)]
        if report is None:
            row += ["failed", *[""] * 9]
        else:
            row += [
                str(report.pool_copies),
                f"{report.temporary_bytes / 1e6:.1f}",
                f"{_temporary_share(case, report):.2%}",
                f"{report.moved_bytes / 1e6:.0f}",
                f"{outcome.floor_bytes / 1e6:.0f}",
                f"{report.moved_bytes / outcome.floor_bytes:.2f}",
                f"{report.total_bytes / 1e9:.1f}",
                str(report.kernels),
                str(report.loops),
                report.collectives,
            ]
        rows.append(row)
    return rows


def kernel_table(outcomes: Sequence[TpuOutcome]) -> list[list[str]]:
    """A header and one row for every kernel; its temporaries by chip."""
    rows = [["kernel", "model", "dtype", *(f"{chip}, bytes of temporaries" for chip in CHIPS)]]
    found: dict[TpuKernelCase, dict[str, str]] = {}
    for outcome in outcomes:
        if isinstance(outcome.case, TpuKernelCase):
            cell = "failed" if outcome.temporary_bytes is None else f"{outcome.temporary_bytes:,}"
            found.setdefault(outcome.case, {})[outcome.chip] = cell
    rows += [[c.name, c.shape, c.dtype, *(cells.get(chip, "") for chip in CHIPS)] for c, cells in found.items()]
    return rows


def versions() -> dict[str, str]:
    """Return the versions of the compilers."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def write(outcomes: Sequence[TpuOutcome], document: Path, results: Path) -> None:
    """Put the tables into the document, and into CSV files."""
    tables = {"steps": step_table(outcomes), "kernels": kernel_table(outcomes)}
    built = ", ".join(f"{name} {version}" for name, version in versions().items())
    text = replace_between(document.read_text(), "versions", f"Compiled with {built}.")
    results.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        text = replace_between(text, name, as_markdown(table))
        with (results / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
    document.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="refresh docs/lab/tpu.md and the CSV files")
    parser.add_argument("--quick", action="store_true", help="a few steps and kernels: a minute on two cores")
    parser.add_argument("--all-layers", action="store_true", help="whole models where they fit the chip")
    parser.add_argument("--match", default="", help="only items whose description contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    if options.write and (options.match or options.quick or options.all_layers):
        parser.error("--write needs the whole gate, with its own number of layers")
    if importlib.util.find_spec("libtpu") is None:
        print("the gate needs libtpu: run it by `make gate-tpu`", file=sys.stderr)
        return 2
    start = time.perf_counter()
    items = quick_items() if options.quick else all_items(None if options.all_layers else _FEW_LAYERS)
    if options.all_layers:
        items, left_out = that_fit(items)
        for case, chip, why in left_out:
            print(f"left out: {_model(case)} on {case.num_devices} {chip}: {why}")
    items = [item for item in items if options.match in str(item)]
    outcomes = run(items, options.jobs)
    for table in (kernel_table(outcomes), step_table(outcomes)):
        if len(table) > 1:
            print("\n" + as_text(table))
    if options.write:
        write(outcomes, DOCUMENT, RESULTS)
    return summarize(outcomes, versions(), start)


_LEAST_BLOCKS = 512


def that_fit(items: Sequence[Item]) -> tuple[list[Item], list[tuple[TpuCase, str, str]]]:
    """Steps with pools that leave a tenth of the memory free, and those whose weights leave no room for one."""
    kept: list[Item] = []
    left_out = []
    for case, chip in items:
        if isinstance(case, TpuKernelCase):
            kept.append((case, chip))
            continue
        config = own_config(with_repeated_heads(engine_step.config_of(case), case.num_devices), case.num_devices)
        weights = engine_step.weight_bytes(case)
        block = BLOCK_SIZE * config.lane * jnp.dtype(case.dtype).itemsize * config.num_layers
        blocks = int(0.9 * CHIPS[chip].memory_bytes - weights) // block
        if blocks < _LEAST_BLOCKS:
            memory = CHIPS[chip].memory_bytes
            left_out.append((case, chip, f"{weights / 1e9:.1f} GB of weights, {memory / 1e9:.1f} GB of memory each"))
        else:
            kept.append((dataclasses.replace(case, num_blocks=min(case.num_blocks, blocks)), chip))
    return kept, left_out


if __name__ == "__main__":
    sys.exit(main())
