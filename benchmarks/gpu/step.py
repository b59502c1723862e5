"""Stage `step`: decode and prompt steps of OPT-13B by the executor that serves, against reading weights and cache once.

  decode 64 kv                             64 rows of 469 cached tokens, keys and values
  decode 64 absorb, decode 64 reproject    the same with layer inputs, by how they attend
  prompt 512 kv                            a prompt that fills a bucket of the engine's, keys and values
  prompt 512 hidden                        the same with layer inputs, no prefix: what is the twin of the row above
  prompt 512 over 1 hidden, 8 hidden, 8 kv chunks over so many prefixes of 469 tokens
  mixed 512 kv, mixed 512 hidden           a prompt of the bucket and decode rows in all other slots

`alone_ms` is a step with all of its host time, `pipelined_ms` one of many that were dispatched ahead, `idle_host_ms` the
host's time to dispatch one while the device has nothing to do. Rows `trace ...` count what a step launches, as JAX's
profiler sees it: `graph_launches` are CUDA graphs, `other_launches` kernels and copies beside them; where the profiler
sees none, rows `listing ...` count them in XLA's own listing of the program.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.executor import calibrate
from apt_jax.executor.compiling.buckets import GREEDY, PromptSize, bucket_for, padded_prefix
from apt_jax.executor.jax_executor import JaxExecutor
from benchmarks.gpu import whole_model
from benchmarks.gpu.harness import Stage, Table, ceilings

_PREFIXES = 8
_FIRST_PROMPTS = 14
"""Cases of the two buckets that come first: programs of the others are compiled after these were timed."""
_TRACED = 5
"""Steps in a trace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """A step that is timed."""

    name: str
    kinds: list[int]
    starts: list[int]
    lens: list[int]
    twin: str = ""
    """A case with the same tokens whose time this one should not exceed."""

    @property
    def is_decode(self) -> bool:
        return max(self.lens) == 1

    def prompt_size(self, executor: JaxExecutor) -> PromptSize:
        """The size of the program that runs its chunks."""
        chunks = [i for i, n in enumerate(self.lens) if n > 1]
        prefix = sum(padded_prefix(self.starts[i]) for i in chunks if self.kinds[i] == HIDDEN)
        return executor.buckets.prompt_size(sum(self.lens[i] for i in chunks), prefix)

    def batch(self, executor: JaxExecutor) -> StepBatch:
        """The step, over arbitrary contents of the pool."""
        return calibrate.synthetic_batch(executor, self.kinds, self.starts, self.lens)


def _decodes(executor: JaxExecutor, attention: str, context: int) -> Iterator[_Case]:
    most = executor.max_num_seqs
    for rows in dict.fromkeys((most, 1, min(16, most))):
        rng = np.random.default_rng(rows)
        starts = (rng.integers(max(1, context // 2), context + context // 2, rows, endpoint=True) - 1).tolist()
        yield _Case(
            name=f"decode {rows} {attention}",
            kinds=[KV if attention == "kv" else HIDDEN] * rows,
            starts=starts,
            lens=[1] * rows,
        )


def _prompts(executor: JaxExecutor, context: int) -> Iterator[_Case]:
    """The largest bucket first, then a short prompt, then the others; each by kind, then over prefixes."""
    buckets = executor.buckets.prefill
    short = bucket_for(buckets, min(64, buckets[-1]))
    for tokens in dict.fromkeys((buckets[-1], short, *reversed(buckets))):
        kv = f"prompt {tokens} kv"
        yield _Case(name=kv, kinds=[KV], starts=[0], lens=[tokens])
        yield _Case(name=f"prompt {tokens} hidden", kinds=[HIDDEN], starts=[0], lens=[tokens], twin=kv)
        beside = max(1, executor.max_num_seqs - 1)
        chunk = max(2, min(tokens, executor.max_num_batched_tokens - beside))
        for kind, name, twin in ((KV, "kv", ""), (HIDDEN, "hidden", f"mixed {tokens} kv")):
            yield _Case(
                name=f"mixed {tokens} {name}", kinds=[kind] * (1 + beside), starts=[context] * beside + [0],
                lens=[1] * beside + [chunk], twin=twin,
            )  # fmt: skip
        if tokens in (buckets[-1], short):
            for rows, kind, name in ((1, HIDDEN, "hidden"), (_PREFIXES, HIDDEN, "hidden"), (_PREFIXES, KV, "kv")):
                rows = min(rows, executor.max_num_seqs)
                lens = [tokens // rows] * rows
                yield _Case(
                    name=f"prompt {tokens} over {rows} {name}",
                    kinds=[kind] * rows,
                    starts=[context] * rows,
                    lens=lens,
                    twin=kv,
                )


def step(stage: Stage) -> None:
    """Time all steps that there is time for: decode, prompts, what they launch, and reprojected rows at last."""
    table = stage.table()
    context = 20 if stage.tiny else whole_model.CONTEXT
    config = whole_model.engine_config(whole_model.model_of(stage), stage.settings, tiny=stage.tiny)
    config = whole_model.with_known_pool(config, stage)
    begin = time.perf_counter()
    params = whole_model.random_params(config)
    print(f"  weights made in {time.perf_counter() - begin:.0f} s", flush=True)
    for attention in ("absorb", "reproject"):
        if attention == "reproject" and stage.left_s < (0 if stage.tiny else 20):
            break
        changed = whole_model.cache_with(config, hidden_attention="auto" if attention == "absorb" else attention)
        executor: Any = whole_model.build_engine(changed, params=params, warm_up=False, calibrate=False).executor
        decodes = list(_decodes(executor, attention, context))
        if attention == "reproject":
            _time(stage, table, executor, decodes)
        else:
            decodes, prompts = [*_decodes(executor, "kv", context), *decodes], list(_prompts(executor, context))
            first = [decodes, prompts[:_FIRST_PROMPTS]]
            for cases in first:
                _time(stage, table, executor, cases)
            for cases in first:
                _count(stage, table, executor, cases)
            _time(stage, table, executor, prompts[_FIRST_PROMPTS:])
        del executor  # its pool must go before there is another, and engines hold themselves in cycles
        jax.clear_caches()
        gc.collect()
    print(f"  {stage.num_skipped} not reached", flush=True)


def _time(stage: Stage, table: Table, executor: JaxExecutor, cases: list[_Case]) -> None:
    cases = [case for case in cases if stage.wanted(table, case.name)]
    if not cases:
        return
    began = time.perf_counter()
    _prepare(executor, cases, stage.left_s)
    print(f"  programs ready after {time.perf_counter() - began:.0f} s", flush=True)
    floor = whole_model.StepFloor.of(executor, ceilings(stage.out))
    for case in cases:
        if stage.wanted(table, case.name):
            stage.run(table, case.name, functools.partial(_measure, executor, case, floor, stage.tiny))


def _prepare(executor: JaxExecutor, cases: list[_Case], left_s: float) -> None:
    """Compile the programs of steps side by side, for most of the time at most; a step compiles what is missing."""
    decodes = {bucket_for(executor.buckets.decode, len(case.lens)) for case in cases if case.is_decode}
    prompts = {case.prompt_size(executor) for case in cases if not case.is_decode}

    def wanted(name: Any) -> bool:
        if name.kind in ("fused", "sample"):
            return name.size in decodes and name.variant == GREEDY
        if name.kind in ("prefill", "mixed"):
            return PromptSize(name.size, name.prefix_room) in prompts
        return name.kind == "decode" and executor.programs.branches

    programs = [program for program in executor._all_programs() if wanted(program.name)]
    threads = ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1)))
    wait([threads.submit(program.compile) for program in programs], timeout=0.6 * max(1.0, left_s))
    threads.shutdown(wait=True, cancel_futures=True)


def _measure(executor: JaxExecutor, case: _Case, floor: whole_model.StepFloor, tiny: bool) -> dict[str, Any]:
    batch = case.batch(executor)
    executor.execute(batch).result()
    alone, dispatched = [], []
    for _ in range(2 if tiny else 8):
        begin = time.perf_counter()
        handle = executor.execute(batch)
        dispatched.append(time.perf_counter() - begin)
        handle.result()
        alone.append(time.perf_counter() - begin)
    count = 2 if tiny else int(min(50, max(4, 0.7 / min(alone))))
    begin = time.perf_counter()
    for _ in range(count):
        handle = executor.execute(batch)
    handle.result()
    pipelined = (time.perf_counter() - begin) / count
    floor_s = floor.seconds(case.lens, case.starts, case.kinds)
    return {
        "rows": len(case.lens), "tokens": sum(case.lens), "cached_tokens": sum(case.starts), "alone_ms": 1e3 * float(np.median(alone)),
        "pipelined_ms": 1e3 * pipelined, "idle_host_ms": 1e3 * float(np.median(dispatched)), "floor_ms": 1e3 * floor_s,
        "of_floor": floor_s / pipelined, "twin": case.twin,
    }  # fmt: skip


# --- launches ----------------------------------------------------------------------------------------------------


def _count(stage: Stage, table: Table, executor: JaxExecutor, cases: list[_Case]) -> None:
    """Count the launches of the first steps of each sort."""
    for case in cases[:5]:
        name = f"trace {case.name}"
        if not stage.wanted(table, name, needs_s=2.0):
            continue
        stage.run(table, name, functools.partial(_traced, executor, case))
    seen = [row for row in table.rows() if row["case"].startswith("trace ") and row.get("graph_launches")]
    for case in () if seen else cases[:3]:
        name = f"listing {case.name}"
        if stage.wanted(table, name, needs_s=5.0):
            stage.run(table, name, functools.partial(_listed, executor, case))


def _traced(executor: JaxExecutor, case: _Case) -> dict[str, Any]:
    """Count what one step launches, by the profiler; on a CPU nothing."""
    batch = case.batch(executor)
    executor.execute(batch).result()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(_TRACED):
                executor.execute(batch).result()
        paths = list(Path(directory).rglob("*.xplane.pb"))
        if not paths:
            raise RuntimeError("the profiler wrote nothing")
        data = jax.profiler.ProfileData.from_file(str(paths[0]))
        graphs, others, kernels, device_ns = 0, 0, 0, 0.0
        for plane in data.planes:
            for line in plane.lines:
                on_device = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
                for event in line.events:
                    if on_device:
                        kernels += 1
                        device_ns += event.duration_ns
                    elif event.name.startswith("cuGraphLaunch"):
                        graphs += 1
                    elif event.name.startswith(("cuLaunchKernel", "cuMemcpy", "cuMemset")):
                        others += 1
    return {
        "graph_launches": graphs / _TRACED, "other_launches": others / _TRACED, "kernels": kernels / _TRACED,
        "device_ms": 1e-6 * device_ns / _TRACED,
    }  # fmt: skip


@contextlib.contextmanager
def _captured(found: list[Any]) -> Iterator[None]:
    """Keep the programs, lowered, that steps within run."""
    from apt_jax.executor.programs.runner import ProgramCall

    run = ProgramCall.run

    def kept(self: ProgramCall) -> Any:
        found.append((self.program, self.lower()))
        return run(self)

    ProgramCall.run = kept
    try:
        yield
    finally:
        ProgramCall.run = run


def _listed(executor: JaxExecutor, case: _Case) -> dict[str, Any]:
    """Count what one step launches, by XLA's listing of its largest program."""
    programs: list[Any] = []
    with _captured(programs):
        executor.execute(case.batch(executor)).result()
    forward = [lowered for name, lowered in programs if name in ("forward", "decode")]
    with tempfile.TemporaryDirectory() as directory:
        forward[-1].compile(compiler_options={"xla_dump_to": directory})
        listings = list(Path(directory).glob("*thunk_sequence_after_thunk_passes.txt"))
        if not listings:
            return {"status": "skipped: this compiler lists no launches"}
        kinds = re.findall(r"^(\s*)\d+: k(\w+)", listings[-1].read_text(), re.MULTILINE)
    graphs = sum(not inside and kind == "CommandBuffer" for inside, kind in kinds)
    return {
        "graph_launches": graphs, "other_launches": sum(not inside for inside, _ in kinds) - graphs,
        "kernels": sum(kind != "CommandBuffer" for _, kind in kinds),
    }  # fmt: skip
