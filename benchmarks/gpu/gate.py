"""The gate for GPU code on machines without one: every kernel and the engine's steps are compiled for A100 and H200.

Kernels (`compile_only.py`): all of the family at the shapes `shapes.GATE`, in float16 and bfloat16. No spills, no
stack, at least one CTA fits an SM, products run on the tensor cores, and loops fetch their tiles by asynchronous
copies.

Steps (`device_free.py`, `engine_step.py`): the engine's programs at OPT-13B, sampling included, on one GPU and with the
heads over four; those that matter most with all 40 layers, the rest with 8. No copy of the pool, temporaries below 5 %
of it, everything in one command buffer (one CUDA graph), and no more bytes from the host than rows and tokens need.

Launches (`launches.py`): of steps of prompts and decode rows of three models. Prompts without hidden prefixes may cost
one launch a layer more than where there are keys and values alone.

What limits it: nothing runs, so it says that code compiles well, not that it is right or fast.

    python -m benchmarks.gpu.gate             # check; exit status 1 and the reasons where something fails
    python -m benchmarks.gpu.gate --quick     # a tenth of the work, another one tomorrow (see `quick`)
    python -m benchmarks.gpu.gate --write     # and refresh the tables in docs/lab/kernels.md and benchmarks/results/kernel-gate/
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # XLA's CUDA plugin compiles; nothing here may look for a GPU. JAX reads these when imported, spawned workers
    # inherit them.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp

from apt_jax.backends import attention_ops
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.calls import DecodeCall, HiddenPrefixes, KeyNorm, LogitModifiers, PrefillCall, Projection
from benchmarks.gpu import compile_only, device_free, engine_step, launches, shapes
from benchmarks.gpu.compile_only import CHIPS, Chip, KernelCode, KernelReport
from benchmarks.gpu.device_free import ProgramReport
from benchmarks.gpu.engine_step import StepCase
from benchmarks.gpu.launches import LaunchCase, LaunchReport
from benchmarks.gpu.shapes import AttentionShape
from benchmarks.gpu.tables import as_markdown, as_text, replace_between

_ROOT = Path(__file__).parents[2]
DOCUMENT = _ROOT / "docs" / "lab" / "kernels.md"
RESULTS = _ROOT / "benchmarks" / "results" / "kernel-gate"

DTYPES = ("bfloat16", "float16")
ARCHS = ("sm_80", "sm_90")
"""A100 and H200: everything is compiled for them."""
SMALL_ARCHS = ("sm_89", "sm_120")
"""Cards with 99 KiB of shared memory a block: each op is compiled once, without groups and rotary lanes and with them."""
_BLOCK_SIZE = 16
_CONTEXT = 2048
_NUM_BLOCKS = 4096
_PREFILL_TOKENS = 1024
_FEW_TOKENS = 64
_FEW = f"hidden prefix, {_FEW_TOKENS} tokens"
_LONG_TOKENS, _LONG_CONTEXT = 8192, 131_072
_LONG = f"{_LONG_TOKENS} tokens of {_LONG_CONTEXT}"
_CONTEXTS = {_LONG: _LONG_CONTEXT, "context of 131,072": 131_072, "context of 262,144, 256 rows": 262_144}
_SHARDS = {"2 GPUs": 2, "4 GPUs": 4}
_NORMED = "shared key heads, key norm"
_ONE_PASS = "one pass"
_STEP, _LAUNCHES = "step", "launches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One op at one shape, for one chip."""

    op: str
    shape: str
    dtype: str
    arch: str
    num_rows: int = 64
    variant: str = ""
    """`shared blocks`: rows own ranges of slots; `hidden prefix`: of `prefill`; `jax-triton`: the kernels in Triton;
    `one pass`: of the backend `triton-onepass`; a context (`_CONTEXTS`), or a number of GPUs (`_SHARDS`)."""

    @property
    def name(self) -> str:
        return f"{self.op} ({self.variant})" if self.variant else self.op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of compiling one kernel or one step."""

    kernel: str
    """Name of the kernel; of a step, the kinds of its rows."""
    op: str
    shape: str
    dtype: str
    arch: str
    report: KernelReport | ProgramReport | LaunchReport | None
    """None: it did not compile."""
    failures: tuple[str, ...]
    seconds: float
    num_devices: int = 1
    case: LaunchCase | None = None
    """Step whose launches were counted."""

    @property
    def place(self) -> str:
        devices = f", {self.num_devices} GPUs" if self.num_devices > 1 else ""
        return f"{self.kernel} [{self.op}] on {self.arch}{devices}, {self.shape} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class _Devices:
    """Stands for GPUs that layer inputs are spread over, where one of them is compiled for."""

    size: int

    def sum(self, x: Any) -> Any:
        return x

    scatter_sum = gather = lambda self, x, axis: x


def gpu_ops(chip: Chip, name: str = "triton") -> KernelBackend:
    """The registry's kernels for NVIDIA GPUs with the tiles of `chip`.

    Args:
        name: of the backend.
    """
    return attention_ops("gpu", name, chip.tiles)


def kernel_cases() -> list[KernelCase]:
    """All that the gate compiles, by op, then shape."""
    cases = []
    for name in shapes.GATE:
        shape = shapes.PUBLISHED[name]
        hidden = "decode_v_absorbed" if shape.rotary_dim else "decode_absorbed"
        ops = [("decode_kv", ""), (hidden, ""), ("decode_reprojected", "")]
        ops += [("prefill", ""), ("prefill", "hidden prefix")]
        if not shape.rotary_dim:
            ops.append(("decode_absorbed", "jax-triton"))
        for (op, variant), dtype, arch in itertools.product(ops, DTYPES, ARCHS):
            cases.append(KernelCase(op=op, shape=name, dtype=dtype, arch=arch, variant=variant))
        if not shape.rotary_dim:
            for dtype in DTYPES:
                cases.append(KernelCase(op="decode_absorbed", shape=name, dtype=dtype, arch="sm_90", variant=_ONE_PASS))
        if name in _SMALL_SHAPES:
            for (op, variant), arch in itertools.product(ops, SMALL_ARCHS):
                if variant != "jax-triton":
                    cases.append(KernelCase(op=op, shape=name, dtype="bfloat16", arch=arch, variant=variant))
    for name, arch in itertools.product(_MORE_SHAPES, (*ARCHS, *SMALL_ARCHS)):
        common: dict[str, Any] = {"shape": name, "dtype": "bfloat16", "arch": arch}
        cases += [KernelCase(**common, op="prefill"), KernelCase(**common, op="decode_kv")]
        if shapes.PUBLISHED[name].has_hidden:
            cases.append(KernelCase(**common, op="prefill", variant="hidden prefix"))
            cases.append(KernelCase(**common, op="decode_v_absorbed"))
    for arch in ARCHS:
        common = {"shape": "llama-3-8b", "dtype": "bfloat16", "arch": arch}
        for context in ("context of 131,072", "context of 262,144, 256 rows"):
            rows = 256 if "256 rows" in context else 64
            cases.append(KernelCase(**common, op="decode_kv", variant=context, num_rows=rows))
        cases.append(KernelCase(**common, op="decode_v_absorbed", variant=_NORMED))
        common["shape"] = "llama-2-7b"
        cases.append(KernelCase(**common, op="decode_v_absorbed", variant="context of 131,072"))
        cases.append(KernelCase(op="prefill", shape="llama-3-8b", dtype="bfloat16", arch=arch, variant=_LONG))
    # One shape is enough for what other shapes do not change: rows that share blocks, contexts cut into pieces, and few
    # prompt tokens, which absorb the projection of their prefix.
    for (shape, shards), dtype, arch in itertools.product(_SHARDED_SHAPES, DTYPES, ARCHS):
        cases.append(KernelCase(op="decode_absorbed", shape=shape, dtype=dtype, arch=arch, variant=shards))
    for op, arch in itertools.product(("decode_kv", "decode_absorbed", "decode_reprojected"), ARCHS):
        common = {"op": op, "shape": "opt-13b", "dtype": "bfloat16", "arch": arch}
        cases.append(KernelCase(**common, variant="shared blocks"))
        cases.append(KernelCase(**common, variant="one row", num_rows=1))
    for arch in ARCHS:
        common = {"op": "prefill", "shape": "opt-13b", "dtype": "bfloat16", "arch": arch}
        cases.append(KernelCase(**common, variant=_FEW))
        cases.append(KernelCase(**common, variant="shared blocks"))
    order = (*shapes.GATE, *_MORE_SHAPES)
    return sorted(cases, key=lambda case: (_OPS.index(case.op), order.index(case.shape)))


_SMALL_SHAPES = ("opt-13b", "llama-2-7b")
_MORE_SHAPES = ("llama-3-8b", "yi-6b", "mistral-7b", "phi-3", "gemma-2b", "gemma-2-9b", "gpt-oss")
"""Shapes that `prefill`, `decode_kv` and, where keys are not shared, `decode_v_absorbed` are compiled at beside those of
all kernels: groups, a window, heads of 96 and 256, a soft cap, sinks."""


_SHARDED_SHAPES = (("opt-30b", "2 GPUs"), ("opt-66b", "4 GPUs"))


_OPS = (
    "decode_kv",
    "decode_absorbed",
    "decode_reprojected",
    "decode_v_absorbed",
    "prefill",
)


def step_cases() -> list[tuple[StepCase, str]]:
    """Steps and the architectures that they are compiled for."""
    kv, hidden, both = (True, False), (False, True), (True, True)
    common: dict[str, Any] = {"model": "opt-13b", "dtype": "bfloat16"}
    short: dict[str, Any] = common | {"num_layers": 8}
    cases = [
        StepCase(**common, kinds=kv),
        StepCase(**common, kinds=hidden),
        StepCase(**common, kinds=hidden, backend="triton-onepass"),
        StepCase(**common | {"model": "opt-66b", "num_layers": 16}, kinds=kv, num_devices=4),
        StepCase(**common | {"model": "opt-66b", "num_layers": 16}, kinds=both, num_devices=4),
        StepCase(**common | {"model": "opt-66b", "num_layers": 16}, kinds=hidden, num_devices=4),
        StepCase(**common | {"model": "opt-66b", "num_layers": 2}, kinds=hidden, num_devices=4, quarter=True),
        StepCase(**common | {"model": "opt-30b", "num_layers": 8}, kinds=both, num_devices=2),
        StepCase(
            **common | {"model": "opt-66b", "num_layers": 2},
            kinds=both,
            num_devices=4,
            prefill_tokens=1024,
            prefix_room=None,
        ),
        StepCase(
            **common | {"model": "llama-3-70b", "num_layers": 16, "num_blocks": 16384},
            kinds=kv,
            num_devices=4,
        ),
        StepCase(**short, kinds=both),
        StepCase(**short, kinds=hidden, absorb=False),
        StepCase(**short, kinds=kv, sampling="sample"),
        StepCase(**short, kinds=both, prefill_tokens=1024, prefix_room=32_768),
        StepCase(
            **dict(short, num_layers=2, num_blocks=32_768),
            kinds=both,
            prefill_tokens=1024,
            prefix_room=None,
            num_rows=192,
        ),
        StepCase(**dict(short, num_blocks=32_768), kinds=both, prefill_tokens=8192, prefix_room=8192),
        *_model_cases(),
    ]
    return [
        (case, arch)
        for case in cases
        for arch in ARCHS
        if (case.model, arch) not in _XLA_SPILLS and (arch == "sm_90" or case.backend != "triton-onepass")
    ]


_XLA_SPILLS = {("qwen3-0.6b", "sm_90")}
"""Steps that are left out: one of XLA's own kernels, the first norm and the angles of 64 rows, spills 8 bytes there."""


def _model_cases() -> list[StepCase]:
    """A decode step of each family that differs in what attention has to do, two layers each (of Gemma 3 six: the sixth has no
    window); long contexts and many rows,
    too."""
    kv, both = (True, False), (True, True)
    models: list[tuple[str, tuple[bool, bool], dict[str, Any]]] = [
        ("opt-30b", both, {}),
        ("llama-2-7b", both, {}),
        ("llama-3-8b", kv, {"context": 8192}),
        ("llama-3-8b", kv, {"context": 8192, "num_rows": 256}),
        ("llama-3.1-8b", kv, {"context": 131_072}),
        ("llama-3.1-8b", kv, {"context": 131_072, "prefill_tokens": 8192}),
        ("llama-3-8b-262k", kv, {"context": 262_144}),
        ("llama-3-8b-262k", kv, {"context": 262_144, "num_rows": 256}),
        ("yi-6b-200k", kv, {"context": 200_000}),
        ("qwen3-8b", kv, {"context": 8192}),
        ("qwen3-0.6b", both, {"context": 8192}),
        ("gemma-2b", kv, {"context": 8192}),
        ("gemma-7b", both, {"context": 8192}),
        ("gemma-2-9b", kv, {"context": 8192}),
        ("gemma-3-1b", kv, {"context": 32_768, "num_layers": 6}),
        ("mistral-7b-v0.1", kv, {"context": 32_768}),
        ("phi-3-mini", both, {"context": 4096}),
        ("bloom-7b", both, {}),
    ]
    common: dict[str, Any] = {"dtype": "bfloat16", "num_layers": 2, "num_blocks": 65_536}
    return [StepCase(model=model, kinds=kinds, **common | more) for model, kinds, more in models]


Item = KernelCase | tuple[StepCase, str] | LaunchCase
"""A check of a worker."""


def quick(
    kernels: Sequence[KernelCase], steps: Sequence[tuple[StepCase, str]], day: int
) -> list[KernelCase | tuple[StepCase, str]]:
    """Return cases for a tenth of the time.

    On two days: all kernels at all shapes, chips and dtypes in turn, and every op on every chip; all steps, with few
    layers, for the chips in turn. Each day has every other of these.

    Args:
        day: even or odd.
    """
    by_kernel: dict[tuple[str, str], list[KernelCase]] = {}
    for kernel in kernels:
        by_kernel.setdefault((kernel.name, kernel.shape), []).append(kernel)
    large = list(itertools.product(ARCHS, DTYPES))
    chosen: list[KernelCase] = []
    for i, of_kernel in enumerate(by_kernel.values()):
        # The one whose turn it is, or any where that does not exist.
        arch, dtype = large[(i + i // len(large)) % len(large)]
        on_chip = [c for c in of_kernel if c.arch == arch] or of_kernel
        chosen.append(next((c for c in on_chip if c.dtype == dtype), on_chip[0]))
    seen = {(c.op, c.arch) for c in chosen}
    for kernel in kernels:
        if (kernel.op, kernel.arch) not in seen:
            seen.add((kernel.op, kernel.arch))
            chosen.append(kernel)
    archs: dict[StepCase, list[str]] = {}
    for case, arch in steps:
        archs.setdefault(case, []).append(arch)
    short = [(case, of_case[i % len(of_case)]) for i, (case, of_case) in enumerate(archs.items())]
    today = [(with_few_layers(case), arch) for i, (case, arch) in enumerate(short) if _has_turn(i, day)]
    return [*today, *(case for i, case in enumerate(chosen) if _has_turn(i, day))]


def _has_turn(i: int, day: int) -> bool:
    """True for half of the cases, whose chips alternate: pairs of two chips take turns."""
    return (i // len(ARCHS) + day) % 2 == 0


def with_few_layers(case: StepCase) -> StepCase:
    """The step with two layers, or as many as it has where they are chosen for what they are. Layers repeat."""
    few = case.num_layers is not None and case.num_layers < 8
    return case if few else dataclasses.replace(case, num_layers=2)


def arguments_of(case: KernelCase, ops: KernelBackend) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The op, and its arguments with abstract arrays as the decoder passes them."""
    shape: AttentionShape = shapes.PUBLISHED[case.shape]
    dtype, rows = jnp.dtype(case.dtype), case.num_rows
    context = _CONTEXTS.get(case.variant, _CONTEXT)
    table = context // _BLOCK_SIZE
    n, k, h, d = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size

    def floats(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    def ints(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def flags(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.bool_)

    lane, shards = shape.lane, _SHARDS.get(case.variant, 1)
    if shards > 1:
        d, lane = d // shards, lane // shards
    pool = floats(_NUM_BLOCKS, _BLOCK_SIZE, lane)
    turned: Any = jax.ShapeDtypeStruct((context, shape.rotary_dim // 2), jnp.float32) if shape.rotary_dim else None
    bias = floats(k, h) if turned is None else None
    norm = KeyNorm(scale=floats(h), eps=1e-6) if case.variant == _NORMED else None
    projection = Projection(wk=floats(k, h, d), bk=bias, wv=floats(k, h, d), bv=bias, angles=turned, key_norm=norm)
    rules = None
    if shape.window or shape.softcap or shape.sinks:
        sinks = floats(n) if shape.sinks else None
        rules = LogitModifiers(window=shape.window, softcap=shape.softcap, sinks=sinks)
    ranges = ints(rows, table, 2) if case.variant == "shared blocks" else None
    devices = _Devices(shards) if shards > 1 else None
    op = getattr(ops, case.op)
    if op is None:
        raise NotImplementedError(f"{ops.name} has no {case.op}")
    if case.op == "prefill":
        tokens = {_FEW: _FEW_TOKENS, _LONG: _LONG_TOKENS}.get(case.variant, _PREFILL_TOKENS)
        prefixes = None
        if case.variant.startswith("hidden prefix"):
            prefixes = HiddenPrefixes(projection=projection, block_size=_BLOCK_SIZE, tensor=devices)
        prompts = PrefillCall(
            pool=pool, tables=ints(rows, 2, table), offsets=ints(rows), chunk_lens=ints(rows), prefix_lens=ints(rows),
            hidden=flags(rows), num_rows=ints(), block_size=_BLOCK_SIZE, slot_ranges=ranges, rules=rules,
            hidden_prefixes=prefixes,
        )  # fmt: skip
        return op, (floats(tokens, n, h), floats(tokens, k, h), floats(tokens, k, h), prompts)
    halves = (2,) if case.op == "decode_kv" else ()
    call = DecodeCall(
        pool=pool, tables=ints(rows, *halves, table), lens=ints(rows), block_size=_BLOCK_SIZE, rows=(ints(), ints()),
        slot_ranges=ranges, rules=rules, tensor=devices,
    )  # fmt: skip
    match case.op:
        case "decode_kv":
            return op, (floats(rows, n, h), call)
        case "decode_absorbed":
            return op, (floats(rows, n, d), call)
        case "decode_reprojected":
            return op, (floats(rows, n, h), dataclasses.replace(call, projection=projection))
        case "decode_v_absorbed":
            rotary = shape.rotary_dim
            rest = floats(rows, n, d) if rotary < h else None
            of_keys = Projection(wk=floats(k, rotary, d), angles=turned, key_norm=norm)
            call = dataclasses.replace(call, projection=of_keys, block_size=_BLOCK_SIZE * shape.lane // d)
            return op, (floats(rows, n, rotary), rest, call)
    raise ValueError(f"unknown op {case.op!r}")


def check_kernels(case: KernelCase, ops: KernelBackend) -> list[Outcome]:
    """Compile the kernels of one op and judge each."""
    chip = CHIPS[case.arch]
    start = time.perf_counter()
    common: dict[str, Any] = {
        "op": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "arch": case.arch,
    }

    def outcome(kernel: str, report: KernelReport | None, failures: Sequence[str]) -> Outcome:
        seconds = time.perf_counter() - start
        return Outcome(**common, kernel=kernel, report=report, failures=tuple(failures), seconds=seconds)

    if case.variant == "jax-triton":
        return [outcome(name, *_compiled(compile_code)) for name, compile_code in _triton_kernels(case)]
    try:
        function, arguments = arguments_of(case, ops)
        codes = compile_only.pallas_kernels(function, arguments, chip)
    except Exception as error:
        return [outcome(case.op, None, [f"cannot be lowered: {_line(error)}"])]
    if not codes:
        return [outcome(case.op, None, ["has no Triton kernel"])]
    outcomes = []
    for code in dict.fromkeys(codes):  # one that is launched again is the same
        start = time.perf_counter()
        compiled = _compiled(lambda code=code: (code, compile_only.compile_kernel(code, chip)))
        outcomes.append(outcome(code.name, *compiled))
    return outcomes


_Compile = Callable[[], tuple[KernelCode, KernelReport]]


def _compiled(compile_code: _Compile) -> tuple[KernelReport | None, Sequence[str]]:
    try:
        code, report = compile_code()
    except Exception as error:
        return None, [f"does not compile: {_line(error)}"]
    return report, compile_only.failures(code, report)


def _triton_kernels(case: KernelCase) -> list[tuple[str, _Compile]]:
    """The absorbed pair as jax-triton launches it."""
    from apt_jax.lab.kernels import jax_triton_absorbed as twin
    from apt_jax.lab.kernels import jax_triton_kernels as triton_kernels

    shape, pointer = shapes.PUBLISHED[case.shape], {"bfloat16": "*bf16", "float16": "*fp16"}
    tiles = twin.default_tiles(shape.num_heads)
    constants = twin.constants(
        shape.num_heads,
        shape.hidden_size,
        _CONTEXT // _BLOCK_SIZE,
        _BLOCK_SIZE,
        ranged=False,
        tiles=tiles,
    )
    cached = dict.fromkeys(("q", "pool", "p_out", "p_in"), pointer[case.dtype])
    numbers = dict.fromkeys(("tables", "lens", "ranges"), "*i32")
    types = cached | numbers | dict.fromkeys(("m_out", "l_out", "m_in", "l_in", "out"), "*fp32")
    found = []
    for kernel, lanes, num_warps, num_stages in (
        (triton_kernels.absorbed_scores, tiles.score_lanes, tiles.score_warps, tiles.score_stages),
        (triton_kernels.absorbed_output, tiles.output_lanes, tiles.output_warps, tiles.output_stages),
    ):
        compile_code = functools.partial(
            compile_only.compile_triton,
            kernel,
            {name: types[name] for name in kernel.arg_names if name in types},
            constants | {"LANES": lanes},
            CHIPS[case.arch],
            num_warps=num_warps,
            num_stages=num_stages,
        )
        found.append((kernel.__name__, compile_code))
    return found


def check_step(case: StepCase, arch: str, ops: KernelBackend) -> Outcome:
    """Compile one step and judge it."""
    start = time.perf_counter()
    report: ProgramReport | None = None
    try:
        report = engine_step.compile_step(case, CHIPS[arch], ops)
        failures = device_free.failures(report, case.num_loops)
        failures += engine_step.input_failures(case.num_rows, case.prefill_tokens, report.input_bytes)
    except Exception as error:
        failures = [f"does not compile: {_line(error)}"]
    return Outcome(
        kernel=case.name,
        op=_STEP,
        shape=case.model if case.num_layers is None else f"{case.model}, {case.num_layers} layers",
        dtype=case.dtype,
        arch=arch,
        report=report,
        failures=tuple(failures),
        seconds=time.perf_counter() - start,
        num_devices=case.num_devices,
    )


def check_launches(case: LaunchCase, ops: KernelBackend) -> Outcome:
    """Count the launches of a step and judge it by itself."""
    start = time.perf_counter()
    report: LaunchReport | None = None
    try:
        report, failures = launches.count(case, ops)
    except Exception as error:
        failures = [f"does not compile: {_line(error)}"]
    return Outcome(
        kernel=case.name,
        op=_LAUNCHES,
        shape=case.model,
        dtype=case.dtype,
        arch=case.arch,
        report=report,
        failures=tuple(failures),
        seconds=time.perf_counter() - start,
        case=case,
    )


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _work(item: Item) -> list[Outcome]:
    if isinstance(item, LaunchCase):
        return [check_launches(item, gpu_ops(CHIPS[item.arch]))]
    if isinstance(item, KernelCase):
        backend = "triton-onepass" if item.variant == _ONE_PASS else "triton"
        return check_kernels(item, gpu_ops(CHIPS[item.arch], backend))
    return [check_step(*item, gpu_ops(CHIPS[item[1]], item[0].backend))]


def run(items: Sequence[Item], jobs: int) -> list[Outcome]:
    """Check all items, each in one of `jobs` processes; results in the order of the items."""
    context = multiprocessing.get_context("spawn")
    done: list[Outcome] = []
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for outcomes in pool.map(_work, items):
            done += outcomes
            for outcome in outcomes:
                _progress(outcome)
    return done


def _progress(outcome: Outcome) -> None:
    state = "FAILED" if outcome.failures else "ok"
    print(f"{state:6} {outcome.seconds:5.1f} s  {outcome.place}", flush=True)


def kernel_table(outcomes: Sequence[Outcome], archs: Sequence[str] = ARCHS) -> list[list[str]]:
    """A header and one row for every kernel and shape; chips side by side, equal dtypes in one row."""
    cells = ("registers", "shared KiB", "CTAs", "MMA", "copies")
    rows = [["kernel", "op", "model", "dtype", *(f"{arch} {cell}" for arch in archs for cell in cells)]]
    found: dict[tuple[str, str, str, str], dict[str, list[list[str]]]] = {}
    for outcome in outcomes:
        if outcome.op in (_STEP, _LAUNCHES) or outcome.arch not in archs:
            continue
        key = (outcome.kernel, outcome.op, outcome.shape, outcome.dtype)
        found.setdefault(key, {}).setdefault(outcome.arch, []).append(_cells(outcome))
    merged: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for (kernel, op, shape, dtype), by_arch in found.items():
        values = [cell for arch in archs for cell in by_arch.get(arch, [["", "", "", "", ""]])[0]]
        merged.setdefault((kernel, op, shape), {})[dtype] = values
    for key, by_dtype in merged.items():
        if len(by_dtype) > 1 and len({tuple(values) for values in by_dtype.values()}) == 1:
            by_dtype = {"both": next(iter(by_dtype.values()))}
        rows += [[*key, dtype, *values] for dtype, values in by_dtype.items()]
    return rows


def _cells(outcome: Outcome) -> list[str]:
    report = outcome.report
    if not isinstance(report, KernelReport):
        return ["failed", "", "", "", ""]
    mma = [f"{count} {name}" for count, name in ((report.hmma, "HMMA"), (report.hgmma, "HGMMA")) if count]
    spills = f" ({report.spill_ops} spills)" if report.spill_ops else ""
    return [
        f"{report.registers}{spills}",
        f"{report.shared_bytes / 1024:.1f}",
        str(report.ctas_per_sm),
        " + ".join(mma) or "none",
        str(report.async_copies),
    ]


def step_table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A header and one row for every step."""
    rows = [
        ["step", "model", "dtype", "GPUs", "chip", "pool copies", "temporaries MB", "of the pool", "input KiB", "command buffers", "launches", "collectives"]
    ]  # fmt: skip
    for outcome in outcomes:
        report = outcome.report
        if outcome.op != _STEP:
            continue
        row = [outcome.kernel, outcome.shape, outcome.dtype, str(outcome.num_devices), outcome.arch]
        if isinstance(report, ProgramReport):
            row += [
                str(report.pool_copies),
                f"{report.temporary_bytes / 1e6:.1f}",
                f"{device_free.temporary_share(report):.2%}",
                f"{report.input_bytes / 1024:.0f}",
                str(report.command_buffers),
                str(report.kernels + report.collectives),
                str(report.collectives),
            ]
        else:
            row += ["failed", *[""] * 6]
        rows.append(row)
    return rows


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def versions() -> dict[str, str]:
    """Return the versions of the compilers."""
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "triton")
    return {name: importlib.metadata.version(name) for name in names}


def write(outcomes: Sequence[Outcome], document: Path, results: Path) -> None:
    """Put the tables into the document, and everything into CSV files."""
    text = document.read_text()
    text = replace_between(text, "kernels", as_markdown(kernel_table(outcomes)))
    text = replace_between(text, "small", as_markdown(kernel_table(outcomes, SMALL_ARCHS)))
    text = replace_between(text, "steps", as_markdown(step_table(outcomes)))
    text = replace_between(text, "launches", as_markdown(launches.table(outcomes)))
    built = ", ".join(f"{name} {version}" for name, version in versions().items())
    document.write_text(replace_between(text, "versions", f"Compiled with {built}."))
    results.mkdir(parents=True, exist_ok=True)
    for name, kind in (("kernels", KernelReport), ("steps", ProgramReport), ("launches", LaunchReport)):
        fields = [field.name for field in dataclasses.fields(kind)]
        with (results / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["kernel", "op", "model", "dtype", "gpus", "chip", *fields])
            for outcome in outcomes:
                if isinstance(outcome.report, kind):
                    o, values = outcome, dataclasses.asdict(outcome.report)
                    writer.writerow([o.kernel, o.op, o.shape, o.dtype, o.num_devices, o.arch, *values.values()])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="refresh docs/lab/kernels.md and the CSV files")
    parser.add_argument("--only", choices=("kernels", "steps", "launches"), help="a part of the gate")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: not every case on every chip")
    parser.add_argument(
        "--day",
        type=int,
        default=datetime.datetime.now(datetime.UTC).toordinal(),
        help="of --quick: an even and an odd one have different cases (default: today)",
    )
    parser.add_argument("--match", default="", help="only items whose description contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.match or options.quick):
        parser.error("--write needs the whole gate")
    missing = [name for name in ("triton", "jax_plugins.xla_cuda12") if not _installed(name)]
    if missing:
        print(f"the gate needs {' and '.join(missing)}: run it by `make gate`", file=sys.stderr)
        return 2
    start = time.perf_counter()
    steps = step_cases() if options.only in (None, "steps") else []
    kernels = kernel_cases() if options.only in (None, "kernels") else []
    items: list[Item] = list(quick(kernels, steps, options.day)) if options.quick else [*steps, *kernels]
    if options.only in (None, "launches"):
        items += launches.quick_cases(options.day) if options.quick else launches.cases()
    items = [item for item in items if options.match in str(item)]
    outcomes = launches.with_twins(run(items, options.jobs))
    tables = (
        kernel_table(outcomes),
        kernel_table(outcomes, SMALL_ARCHS),
        step_table(outcomes),
        launches.table(outcomes),
    )
    for table in tables:
        if len(table) > 1:
            print("\n" + as_text(table))
    if options.write:
        write(outcomes, DOCUMENT, RESULTS)
    return summarize(outcomes, versions(), start)


def summarize(outcomes: Sequence[Any], built: dict[str, str], start: float) -> int:
    """Print what failed, and a line of JSON; returns the exit status.

    Args:
        outcomes: with `place` and `failures`.
        start: of the gate, by `time.perf_counter`.
    """
    if not outcomes:
        print("nothing was checked: no item's description contains what --match says", file=sys.stderr)
    failed = [outcome for outcome in outcomes if outcome.failures]
    print()
    for outcome in failed:
        print(f"FAILED {outcome.place}: {'; '.join(outcome.failures)}")
    summary = {
        "command": " ".join(sys.argv),
        "versions": built,
        "checked": len(outcomes),
        "failed": len(failed),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(summary))
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
