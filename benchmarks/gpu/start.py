"""Stage `start`: an engine from nothing with default flags, and again with what the first start has left on disk.

Each start has a process of its own, as an operator's has, and says what it has as soon as it has it: each program with the
seconds of its lowering and compiling, the first answer, the moment when all programs are ready. Seconds count from the
start of the process. Weights are random and made on the device.

Programs are prepared as `apt-jax serve` does: the fewest that serve every request first, where the engine can start so, and
the others beside serving.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.harness import Stage, Table, end_with_parent, environment_of, spawn

MODELS = ("opt-13b", "opt-1.3b")
_ANSWER = 16
"""Tokens of the first answer."""


def start(stage: Stage) -> None:
    """First and second start of each model."""
    table = stage.table()
    for label in MODELS[:1] if stage.tiny else MODELS:
        model = _model_of(stage, label)
        for turn in ("first", "second"):
            name = f"{label} {turn}"
            if f"{name}: all programs" in table.done or not stage.wanted(table, name):
                continue
            if turn == "first" and label == MODELS[0]:
                shutil.rmtree(environment_of("start", stage.work or stage.out)["APT_JAX_CACHE_DIR"], ignore_errors=True)
            if not _in_a_process(stage, table, model, name):
                break


def _model_of(stage: Stage, label: str) -> str:
    if not stage.tiny:
        return label  # this process needs no JAX
    from benchmarks.gpu import whole_model

    return whole_model.model_of(stage, label)


def _in_a_process(stage: Stage, table: Table, model: str, name: str) -> bool:
    """Run one start and add its rows as they come; returns False where it did not get to its end."""
    command = [sys.executable, "-m", "benchmarks.gpu.start", model, f"{time.time()}", json.dumps(dict(stage.settings))]
    environment = environment_of("start", stage.work or stage.out)
    process = spawn(
        [*command, *(["--tiny"] if stage.tiny else [])], environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    with process:
        for line in process.stdout:
            if line.startswith("{"):
                row = json.loads(line)
                what = row.pop("what")
                table.add(f"{name}: {what}", **row)
                if "program" not in row:
                    print(f"  {name}: {what} after {row['at_s']:.1f} s", flush=True)
        status = process.wait()
        reader.join(2.0)
    if status:
        last = next((line.strip() for line in reversed(errors) if line.strip()), "")
        table.add(name, status=f"exit {status}: {last}"[:300])
    return status == 0


# --- in the process of a start -----------------------------------------------------------------------------------


class _Report:
    """Prints what there is as lines of JSON, with the seconds since the process was started."""

    def __init__(self, started_s: float) -> None:
        self._started_s, self._lock = started_s, threading.Lock()

    def __call__(self, what: str, **values: Any) -> None:
        plain = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"what": what, "at_s": round(time.time() - self._started_s, 2), **plain})
        with self._lock:  # programs are compiled side by side
            print(line, flush=True)


@contextlib.contextmanager
def reported_programs(report: Callable[..., None]) -> Iterator[None]:
    """Report every program that is compiled or loaded within: seconds of its lowering, of the thread and by the clock,
    and of the rest, which is compiling or loading. Programs that are prepared side by side share the processors."""
    from apt_jax.executor.programs.runner import ProgramCall

    compile_, lower = ProgramCall.compile, ProgramCall.lower
    lowering = threading.local()

    def reported_lower(self: ProgramCall) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return lower(self)
        finally:
            lowering.seconds = time.perf_counter() - began
            lowering.cpu_s = time.thread_time() - cpu

    def reported_compile(self: ProgramCall) -> Any:
        known = self.key in self.runner.programs.executables
        lowering.seconds = lowering.cpu_s = 0.0
        began = time.perf_counter()
        compiled = compile_(self)
        if not known:
            seconds = time.perf_counter() - began
            report(
                _name(self), program=self.program, lower_s=lowering.seconds, lower_cpu_s=lowering.cpu_s,
                compile_s=seconds - lowering.seconds, lowered=lowering.seconds > 0,
            )  # fmt: skip
        return compiled

    ProgramCall.compile, ProgramCall.lower = reported_compile, reported_lower
    try:
        yield
    finally:
        ProgramCall.compile, ProgramCall.lower = compile_, lower


def _name(call: Any) -> str:
    program, size, *_ = call.key
    absent = {("num_decode", 0), ("num_prefill", 0)}
    given = [(name, value) for name, value in call.static.items() if value is not None and (name, value) not in absent]
    static = [f"{name} {_text(value)}" for name, value in given]
    return ", ".join([program if size is None else f"{program} {size}", *static])


def _text(value: Any) -> str:
    fields = getattr(value, "_asdict", lambda: getattr(value, "__dict__", None))()
    if not isinstance(fields, dict):
        return str(value)
    return "+".join(name for name, given in fields.items() if given) or "plain"


def measure(model: str, started_s: float, settings: dict[str, Any], *, tiny: bool) -> None:
    """One start in this process; prints what there is."""
    report = _Report(started_s)
    from apt_jax.frontend.builder import build_engine
    from benchmarks.gpu.whole_model import engine_config, random_params

    config = engine_config(model, settings, tiny=tiny)
    report("imported")
    params = random_params(config)
    report("weights made")
    with reported_programs(report):
        parts = build_engine(config, params=params, calibrate=False, early=True)
        report(
            "first programs", load_s=parts.load_s, warm_up_s=parts.warm_up_s,
            left=0 if parts.unprepared is None else len(parts.unprepared.programs), num_blocks=parts.executor.num_blocks,
        )  # fmt: skip
        asyncio.run(_answer_and_prepare(parts, report))


async def _answer_and_prepare(parts: Any, report: Callable[..., None]) -> None:
    """Answer one request while the other programs are prepared, then wait for these, and answer again."""
    from apt_jax.frontend.async_engine import AsyncEngine
    from apt_jax.frontend.early_start import BackgroundPreparation

    engine = AsyncEngine(parts)
    preparation = BackgroundPreparation(engine)
    preparation.start()
    try:
        report("first answer", **await _answer(engine))
        executor: Any = parts.executor
        while not executor.ready.is_complete:
            if engine.dead_reason is not None:
                raise RuntimeError(engine.dead_reason)
            await asyncio.sleep(0.02)
        stats = executor.device.memory_stats() or {}
        report(
            "all programs", programs=len(executor.programs.executables), num_blocks=executor.num_blocks,
            pool_gib=executor.num_blocks * executor.block_bytes / 2**30,
            peak_gib=stats.get("peak_bytes_in_use", 0) / 2**30, limit_gib=stats.get("bytes_limit", 0) / 2**30,
        )  # fmt: skip
        report("answer after that", **await _answer(engine), compilations=executor.compilations)
    finally:
        preparation.stop()
        await engine.shutdown()


async def _answer(engine: Any) -> dict[str, Any]:
    from apt_jax.request import SamplingParams

    request = engine.parts.build_request(
        prompt_token_ids=[5, 6, 7, 8], params=SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
    )
    begin, first_s, count = time.perf_counter(), 0.0, 0
    async for delta in engine.submit(request):
        first_s = first_s or time.perf_counter() - begin
        count += len(delta.token_ids)
    return {"answered": count == _ANSWER, "ttft_s": first_s, "answer_s": time.perf_counter() - begin}


if __name__ == "__main__":
    end_with_parent()
    measure(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]), tiny="--tiny" in sys.argv)
