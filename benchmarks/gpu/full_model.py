"""Stages `step` and `serve`: a whole model with random weights, one step at a time and under a stream of requests."""

import csv
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.backends import attention_ops
from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.errors import QueueFullError
from apt_jax.executor import StepBatch, StepHandle, calibrate
from apt_jax.executor.buckets import GREEDY, KindSet, PromptSize
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import use_compile_cache
from apt_jax.frontend.components import EngineComponents, build_components, with_policy
from apt_jax.metrics import RequestRecord, Summary, summarize
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.resolve import read_model_config, resolve_model
from apt_jax.models.params import ModelParams, abstract_params, is_norm_scale, param_names
from apt_jax.ops.backend import KernelBackend
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched.request_table import HIDDEN, KV
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import save_hardware
from apt_jax.sim.recording import run_recorded
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import draw_arrivals, load_trace
from apt_jax.sim.workload import Workload
from benchmarks.gpu.harness import Stage, ceilings, floor_s, read_rows
from benchmarks.gpu.kernels import kernel_ops, num_workers

BLOCK_SIZE = 16
CONTEXT = 469
"""Cached tokens of a decoding request: the mean over the life of a ShareGPT request."""
POOL_BYTES = 56 << 30
"""Maximum size of the pool; a batch with more cached tokens reads some blocks again."""
SERVED_POOL_BYTES = 12e9
"""Part of the pool that serving uses: the memory that OPT-13B's weights leave on an A100 40 GB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """Model and shapes of a run."""

    model: str
    dtype: str
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    context: int
    layers: int | None = None
    """None: all of the model's."""

    @property
    def max_seqs(self) -> int:
        return self.decode_buckets[-1]


def _size(tiny: bool) -> _Size:
    if tiny:
        return _Size(
            model="tiny-opt", dtype="float32", decode_buckets=(2, 4), prefill_buckets=(32,), context=20, layers=1
        )
    return _Size(
        model="opt-13b", dtype="bfloat16", decode_buckets=(1, 32, 128, 256), prefill_buckets=(512, 2048), context=CONTEXT,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _leaf(key: Any, mean: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return (mean + 0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random_params(config: ModelConfig, dtype: str, seed: int = 0) -> ModelParams:
    """As `dummy_params`, made on the device: 13 billion numbers take the host minutes."""
    count = iter(range(1 << 20))
    key = jax.random.key(seed)

    def leaf(name: str, shape: jax.ShapeDtypeStruct) -> Any:
        mean = jnp.float32(1.0 if is_norm_scale(name) else 0.0)
        return _leaf(jax.random.fold_in(key, next(count)), mean, shape.shape, shape.dtype)

    return jax.tree.map(leaf, param_names(config), abstract_params(config, dtype))


@functools.lru_cache(maxsize=1)  # the parameters of one size at a time
def _model(size: _Size) -> tuple[ModelConfig, ModelParams]:
    fields = resolve_model(size.model, allow_preset=True).fields
    _, config = read_model_config(fields)
    if size.layers is not None:
        config = dataclasses.replace(config, num_layers=size.layers)
    params = random_params(config, size.dtype)
    jax.block_until_ready(params)
    return config, params


def _attention(tiny: bool) -> KernelBackend:
    """Interpreted kernels are too slow for a whole model: `tiny` takes XLA's, in the programs that a GPU runs."""
    if tiny:
        return dataclasses.replace(attention_ops("cpu", "xla"), branches=False)
    return kernel_ops()


def build(size: _Size, config: ModelConfig, params: ModelParams, *, hidden_attention: Any, tiny: bool) -> JaxExecutor:
    """An executor for both kinds with few buckets: each compiled program of 40 layers costs seconds."""
    block_bytes = config.num_layers * BLOCK_SIZE * config.lane * jnp.dtype(size.dtype).itemsize
    budget = 1 << 24 if tiny else POOL_BYTES
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
        budget = min(budget, int(0.85 * free) - (2 << 30))
    executor = JaxExecutor(
        params, config,
        cache=CacheConfig(num_blocks_override=max(64, budget // block_bytes), mode="hybrid", hidden_attention=hidden_attention),
        max_num_seqs=size.max_seqs, max_num_batched_tokens=size.prefill_buckets[-1],
        max_model_len=min(config.max_position, 2048), attention=_attention(tiny),
    )  # fmt: skip
    executor.buckets.decode = list(size.decode_buckets)
    executor.buckets.prefill = list(size.prefill_buckets)
    executor.buckets.prefixed = [s for s in executor.buckets.prefixed if s.tokens in size.prefill_buckets]
    return executor


Program = tuple[int, PromptSize | None, KindSet]
"""Decode rows, size of prompts, kinds."""


def _lower(executor: JaxExecutor, program: Program) -> Any:
    """Lower the program that `JaxExecutor.execute` calls; sampling programs are small and compiled at their first
    call."""
    rows, prompts, kinds = program
    runner = executor.runner
    try:
        if prompts or executor.programs.branches:
            tokens, prefix_room = prompts or (0, None)
            return runner.empty_forward_call(rows, tokens, kinds, None, prefix_room).lower()
        return runner.empty_decode_call(rows, kinds, GREEDY).lower()
    except Exception as error:
        return error


def programs_of(executor: JaxExecutor) -> list[Program]:
    """All that greedy serving uses, for every mixture of kinds."""
    return [
        (rows, prompts, kinds)
        for rows, prompts in reversed(executor.buckets.forward_shapes(mixed=executor.mixed))
        for kinds in executor.programs.kind_sets(rows, *(prompts or (0, None)))
    ]


def warm(executor: JaxExecutor, program: Program) -> None:
    """Run a program once on rows that touch few blocks, sampling included; one for hidden prefixes on padding."""
    rows, prompts, (kv, hidden) = program
    tokens, prefix_room = prompts or (0, None)
    if prompts in executor.buckets.prefixed:
        executor.allocate()
        executor.runner.empty_forward_call(rows, tokens, program[2], None, prefix_room).run()
        return
    chunks = (2 if kv and hidden and not rows else 1) if tokens else 0
    beside = min(rows, executor.max_num_seqs - chunks)
    lens = [1] * beside + [tokens // max(1, chunks)] * chunks
    kinds = [KV if kv else HIDDEN] * len(lens)
    if kv and hidden and len(lens) > 1:
        kinds[-1] = HIDDEN
    starts = [1] * beside + [0] * chunks
    executor.execute(calibrate.synthetic_batch(executor, kinds, starts, lens)).result()


# --- step --------------------------------------------------------------------------------------------------------


def _steps(size: _Size) -> Iterator[tuple[str, str, list[int], list[int], list[int]]]:
    """(name, attention, kinds, starts, lens) of each step that is timed."""
    for attention, kind in (("kv", KV), ("absorb", HIDDEN), ("reproject", HIDDEN)):
        for batch in size.decode_buckets:
            rng = np.random.default_rng(batch)
            low, high = max(1, size.context // 2), size.context + size.context // 2
            starts = (rng.integers(low, high, batch, endpoint=True) - 1).tolist()
            yield f"decode {batch}", attention, [kind] * batch, starts, [1] * batch
        if attention == "kv":
            for tokens in size.prefill_buckets:
                yield f"prefill {tokens}", attention, [kind], [0], [tokens]
    for tokens in size.prefill_buckets:
        yield f"prefill {tokens}", "absorb", [HIDDEN], [0], [tokens]


def step(stage: Stage) -> list[str]:
    """Decode and prefill steps of the engine's executor, against reading weights and cache once."""
    table = stage.table([
        "attention", "batch", "tokens", "cached_tokens", "alone_ms", "pipelined_ms", "host_ms", "floor_ms", "of_floor",
        "cache_gb", "build_s",
    ])  # fmt: skip
    use_compile_cache()
    size, rates = _size(stage.tiny), ceilings(stage.out)
    begin = time.perf_counter()
    config, params = _model(size)
    print(f"  weights made in {time.perf_counter() - begin:.0f} s", flush=True)
    itemsize = jnp.dtype(size.dtype).itemsize
    weights = itemsize * sum(a.size for a in jax.tree.leaves(params)) - params.position.nbytes
    dense = sum(a.size for a in jax.tree.leaves(params.layers))
    executor: JaxExecutor | None = None

    def measure(case: Any, program: Any, started: float) -> dict[str, Any]:
        _, attention, kinds, starts, lens = case
        assert executor is not None
        if isinstance(program, Exception):
            raise program
        batch = calibrate.synthetic_batch(executor, kinds, starts, lens)
        executor.execute(batch).result()
        build_s = time.perf_counter() - started
        alone = []
        for _ in range(2 if stage.tiny else 7):
            begin = time.perf_counter()
            executor.execute(batch).result()
            alone.append(time.perf_counter() - begin)
        count = 2 if stage.tiny else int(min(50, max(4, 1.0 / min(alone))))
        host = []
        begin = time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            handle = executor.execute(batch)
            host.append(time.perf_counter() - before)
        handle.result()
        pipelined = (time.perf_counter() - begin) / count
        tokens, cached = sum(lens), sum(starts) + len(starts)
        hidden = kinds[0] == HIDDEN
        is_decode = max(lens) == 1
        halves = 1 if hidden else 2
        cache = config.num_layers * halves * config.lane * itemsize * (cached if is_decode else tokens)
        flop = 2 * tokens * dense
        if is_decode and attention == "reproject":
            flop += 4 * config.num_layers * config.hidden_size * config.lane * cached
        if not is_decode:
            flop += 2 * config.num_layers * config.hidden_size * tokens**2
        floor = floor_s(weights + cache, flop, rates)
        return {
            "attention": attention, "batch": len(kinds), "tokens": tokens, "cached_tokens": cached if is_decode else 0,
            "alone_ms": 1e3 * float(np.median(alone)), "pipelined_ms": 1e3 * pipelined, "host_ms": 1e3 * float(np.median(host)),
            "floor_ms": 1e3 * floor, "of_floor": floor / pipelined, "cache_gb": cache / 1e9, "build_s": build_s,
        }  # fmt: skip

    for hidden_attention in ("absorb", "reproject"):
        wanted = [
            case for case in _steps(size)
            if (case[1] == "reproject") == (hidden_attention == "reproject")
            and stage.wanted(table, f"{case[1]} {case[0]}")
        ]  # fmt: skip
        if not wanted:
            continue
        executor = None  # the pool of the one before must go first
        executor = build(size, config, params, hidden_attention=hidden_attention, tiny=stage.tiny)

        def lowered(built: JaxExecutor, cases: list[Any]) -> Iterator[tuple[Any, Any]]:
            for case in cases:
                name, _, kinds, _, lens = case
                rows, tokens = (0, sum(lens)) if name.startswith("prefill") else (len(kinds), 0)
                mixture = built.programs.kind_set_of(np.asarray(kinds, np.int8), rows, tokens, 0)
                yield case, _lower(built, (rows, built.buckets.prompt_size(tokens, 0) if tokens else None, mixture))

        started = time.perf_counter()
        pairs = stage.compiled(
            lowered(executor, wanted), lambda c: f"{c[1]} {c[0]}", workers=min(8, num_workers()), together=len(wanted) + 1,
        )  # fmt: skip
        for case, program in pairs:
            name = f"{case[1]} {case[0]}"
            if stage.wanted(table, name):
                stage.run(table, name, functools.partial(measure, case, program, started))
            started = time.perf_counter()
    lines = [f"{'step':24s}{'cached':>9s}{'alone ms':>10s}{'in a row':>10s}{'host':>8s}{'floor':>8s}{'of floor':>9s}"]
    for row in read_rows(table.path):
        if row["status"] == "ok":
            numbers = (float(row[c]) for c in ("alone_ms", "pipelined_ms", "host_ms", "floor_ms", "of_floor"))
            lines.append(
                "{:24s}{:>9s}{:10.2f}{:10.2f}{:8.2f}{:8.2f}{:9.2f}".format(row["case"], row["cached_tokens"], *numbers)
            )
        else:
            lines.append(f"{row['case']:24s} {row['status'][:90]}")
    return [*lines, f"{stage.num_skipped} not reached"]


# --- serve -------------------------------------------------------------------------------------------------------


class Limited:
    """An executor of whose pool only the first blocks are used; it keeps what was in each step."""

    def __init__(self, inner: JaxExecutor, num_blocks: int) -> None:
        self.inner = inner
        self.num_blocks = min(num_blocks, inner.num_blocks)
        self.block_size, self.max_num_seqs = inner.block_size, inner.max_num_seqs
        self.hidden_block_size, self.can_convert = inner.hidden_block_size, inner.can_convert
        self.steps: list[tuple[Any, Any, Any]] = []

    def execute(self, batch: StepBatch) -> StepHandle:
        self.steps.append((batch.num_tokens.copy(), batch.start.copy(), batch.kind.copy()))
        return self.inner.execute(batch)

    def reset(self) -> None:
        self.inner.reset()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def prepare_prompt_logprobs(self) -> None:
        self.inner.prepare_prompt_logprobs()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.inner.warm_up(progress)

    @property
    def compilations(self) -> int:
        return self.inner.compilations


def _workload(size: _Size, num_requests: int, rate: float, longest: int, tiny: bool) -> Workload:
    """Lengths of ShareGPT at random, and Poisson arrivals."""
    rng = np.random.default_rng(0)
    trace = load_trace("sharegpt")
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if tiny:
        prompts, outputs = prompts // 16 + 2, np.minimum(outputs // 32 + 2, 8)
    fits = np.flatnonzero((prompts + outputs <= longest) & (prompts <= size.prefill_buckets[-1]))
    chosen = rng.choice(fits, num_requests)
    return Workload(
        prompt_tokens=prompts[chosen].astype(np.int32),
        output_tokens=outputs[chosen].astype(np.int32),
        arrival_s=draw_arrivals(num_requests, rate, 1.0, rng),
        best_effort=np.zeros(num_requests, np.bool_),
    )


def _serve(parts: EngineComponents, config: SimulationConfig, workload: Workload, most_s: float) -> tuple[Summary, int]:
    """Serve in real time, next step dispatched while one runs; requests that are not done after `most_s` count as
    failed."""
    parts = with_policy(parts, config.policy, config.cache)
    engine, clock = parts.engine, parts.clock
    begin_s, n = clock.now_s() + 0.05, workload.arrival_s.size
    records: list[RequestRecord] = []
    sent, unfinished, open_requests = 0, 0, {}
    while len(records) < n:
        while sent < n and begin_s + workload.arrival_s[sent] <= clock.now_s():
            request = EngineRequest(
                request_id=str(sent), prompt=None,
                prompt_token_ids=np.full(int(workload.prompt_tokens[sent]), 3, np.int32),
                params=SamplingParams(max_tokens=int(workload.output_tokens[sent]), temperature=0.0, ignore_eos=True),
                slo=config.slo, arrival_s=float(begin_s + workload.arrival_s[sent]),
            )  # fmt: skip
            try:
                engine.add_request(request)
                open_requests[request.request_id] = request
            except QueueFullError:
                records.append(RequestRecord(arrival_s=request.arrival_s, ok=False, slo=config.slo))
            sent += 1
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        for output in engine.step():
            if output.finish_reason is not None:
                del open_requests[output.request.request_id]
                records.append(RequestRecord.from_metrics(output.metrics, ok=True))
        if clock.now_s() - begin_s > most_s:
            unfinished = n - len(records)
            records += [RequestRecord(arrival_s=r.arrival_s, ok=False, slo=config.slo) for r in open_requests.values()]
            break
    return summarize(records), unfinished


def _of(summary: Summary) -> dict[str, Any]:
    return {
        "attainment": summary.slo_attainment, "ttft_attainment": summary.ttft_attainment, "tbt_attainment": summary.tbt_attainment,
        "tokens_s": summary.tokens_per_s, "duration_s": summary.duration_s, "completed": summary.num_completed,
    } | {
        f"{what}_{q}_ms": 1e3 * (getattr(values, q) or 0.0)
        for what, values in (("ttft", summary.ttft_s), ("tbt", summary.tbt_s)) for q in ("p50", "p90", "p99")
    }  # fmt: skip


POLICIES = (("fcfs", "kv"), ("apt", "kv"), ("apt", "hybrid"))


def serve(stage: Stage, *, describe: Path | None = None, rate: float | None = None, seconds: float = 12.0) -> list[str]:
    """Serve ShareGPT lengths from a small pool in real time, and simulate the same with costs measured here.

    Args:
        describe: file for a hardware description made from the calibration.
        rate: requests/s; None: where the simulator lets `apt` over KV alone miss a third of its objectives.
        seconds: of arrivals, a policy.
    """
    columns = ["side", "policy", "cache", "rate", "requests", "attainment", "ttft_attainment", "tbt_attainment", "tokens_s",
               "duration_s", "completed", "unfinished", "iterations", "compilations", "step_error_mean", "step_error_p50", "step_error_p99",
               *(f"{w}_{q}_ms" for w in ("ttft", "tbt") for q in ("p50", "p90", "p99"))]  # fmt: skip
    table = stage.table(columns)
    use_compile_cache()
    size = _size(stage.tiny)
    config, params = _model(size)
    executor = build(size, config, params, hidden_attention="absorb", tiny=stage.tiny)
    begin = time.perf_counter()

    def lowered() -> Iterator[tuple[Any, Any]]:
        for program in programs_of(executor):
            yield program, _lower(executor, program)

    pairs = stage.compiled(lowered(), str, workers=min(8, num_workers()))
    for program, compiled in pairs:
        if isinstance(compiled, Exception):
            raise compiled
        warm(executor, program)
    for call in (executor.runner.empty_tables_call, executor.runner.empty_counts_call):
        call().run()
    for rows in executor.buckets.decode:  # sampling after a prefill of so many rows
        tokens = [max(2, min(8, size.prefill_buckets[-1] // rows))] * rows
        executor.execute(calibrate.synthetic_batch(executor, [KV] * rows, [0] * rows, tokens)).result()
    executor._compiled_at_warm_up = executor.programs.num_compiled()
    print(f"  compiled and warm after {time.perf_counter() - begin:.0f} s", flush=True)

    model = calibrate.calibrate(executor, 1.0 if stage.tiny else min(30.0, 0.15 * stage.budget_s))
    hardware = calibrate.describe(model, executor, size.model)
    if describe is not None:
        name = executor.device.device_kind.lower().removeprefix("nvidia ").replace(" ", "-")
        save_hardware(dataclasses.replace(hardware, name=name), describe)
    quality = (
        f"calibration, held back: prefill R2 {model.prefill_quality.r2:.3f}, mean error "
        f"{100 * model.prefill_quality.mean_relative_error:.0f} %; decode R2 {model.decode_quality.r2:.3f}, "
        f"{100 * model.decode_quality.mean_relative_error:.0f} %"
    )
    print(f"  {quality}", flush=True)

    limited = Limited(executor, 64 if stage.tiny else int(SERVED_POOL_BYTES // executor.block_bytes))
    slo = SLO(ttft_s=1.0, tbt_s=1.0 if stage.tiny else 0.1)
    longest = min(executor.max_model_len, limited.num_blocks // 2 * BLOCK_SIZE)

    def configured(policy: str, cache: Any, requests: int) -> SimulationConfig:
        return SimulationConfig(
            model=size.model, policy=policy, cache=cache, slo=slo, num_requests=requests,
            max_num_seqs=size.max_seqs, max_num_batched_tokens=size.prefill_buckets[-1], num_blocks=limited.num_blocks,
        )  # fmt: skip

    if rate is None:
        rate = _find_rate(size, hardware, configured, longest, seconds, stage.tiny)
    count = 8 if stage.tiny else max(32, int(rate * seconds))
    workload = _workload(size, count, rate, longest, stage.tiny)
    engine_config = EngineConfig(
        model=size.model, load_format="dummy", dtype=size.dtype,  # pyright: ignore[reportArgumentType]
        scheduler=SchedulerConfig(max_num_seqs=size.max_seqs, max_num_batched_tokens=size.prefill_buckets[-1]),
        cache=CacheConfig(enable_prefix_caching=False),  # prompts are synthetic and all alike
    )  # fmt: skip
    parts = build_components(
        engine_config, limited,
        kinds=model.kinds(executor.kinds_offered, absorbs=executor.absorbs), vocab_size=config.vocab_size, max_model_len=executor.max_model_len,
        costs=model.step_costs(), model_config=config, cost_model=model,
    )  # fmt: skip

    def served(policy: str, cache: str) -> dict[str, Any]:
        executor.reset()
        limited.steps.clear()
        summary, unfinished = _serve(parts, configured(policy, cache, count), workload, 2.5 * seconds)
        return _of(summary) | {
            "unfinished": unfinished,
            "iterations": len(limited.steps),
            "compilations": executor.compilations,
        }

    def simulated(policy: str, cache: str) -> dict[str, Any]:
        result = simulate(configured(policy, cache, count), hardware=hardware, workload=workload)
        return _of(result.summary) | {"iterations": result.iterations}

    def replayed(policy: str, cache: str) -> dict[str, Any]:
        executor.reset()
        limited.steps.clear()
        recorded = run_recorded(configured(policy, cache, count), hardware, workload, limited)
        measured = np.array(recorded.durations_s)
        predicted = np.array([model.programs.step_s(*s) for s in limited.steps])
        error = np.abs(predicted - measured) / measured
        _write_predictions(stage.out / "predictions.csv", limited.steps, measured, predicted)
        quantiles = np.percentile(error, [50, 99])
        return _of(recorded.result.summary) | {
            "iterations": len(measured), "step_error_mean": float(error.mean()),
            "step_error_p50": float(quantiles[0]), "step_error_p99": float(quantiles[1]),
        }  # fmt: skip

    for side, run, cases in (
        ("served", served, POLICIES),
        ("simulated", simulated, POLICIES),
        ("step by step", replayed, POLICIES[-1:]),
    ):
        for policy, cache in cases:
            case = f"{side} {policy} {cache}"
            if stage.wanted(table, case):
                stage.run(
                    table,
                    case,
                    lambda side=side, run=run, policy=policy, cache=cache: (
                        {"side": side, "policy": policy, "cache": cache, "rate": rate, "requests": count}
                        | run(policy, cache)
                    ),
                    120.0,
                )
    return [quality, *_serve_lines(table.path), f"{stage.num_skipped} not reached"]


def _find_rate(
    size: _Size, hardware: Any, configured: Callable[..., SimulationConfig], longest: int, seconds: float, tiny: bool
) -> float:
    """The lowest of some rates at which the simulator sees `apt` over KV alone attain less than two thirds."""
    rates = (20.0,) if tiny else (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0)
    for rate in rates:
        count = 8 if tiny else min(240, max(32, int(rate * seconds)))
        workload = _workload(size, count, rate, longest, tiny)
        result = simulate(configured("apt", "kv", count), hardware=hardware, workload=workload)
        if result.summary.slo_attainment < 2 / 3:
            return rate
    return rates[-1]


def _write_predictions(path: Path, steps: Sequence[Any], measured: Any, predicted: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rows", "tokens", "context", "hidden_rows", "measured_ms", "predicted_ms"])
        for (tokens, start, kind), took, guess in zip(steps, measured, predicted, strict=True):
            sizes = (kind.size, tokens.sum(), (start + tokens).sum(), (kind == HIDDEN).sum())
            writer.writerow([*sizes, f"{1e3 * took:.4g}", f"{1e3 * guess:.4g}"])


def _serve_lines(path: Path) -> list[str]:
    lines = [
        f"{'':28s}{'req/s':>6s}{'n':>5s}{'attain':>8s}{'tok/s':>8s}{'TTFT p50':>9s}{'p99':>8s}{'TBT p50':>9s}{'p99':>8s}{'step err':>9s}"
    ]
    for row in read_rows(path):
        if row["status"] != "ok":
            lines.append(f"{row['case']:28s} {row['status'][:90]}")
            continue
        number = {k: float(v) for k, v in row.items() if v and k.endswith(("_ms", "_s", "attainment", "rate", "mean"))}
        lines.append(
            f"{row['case']:28s}{number['rate']:6.1f}{row['requests']:>5s}{number['attainment']:8.2f}{number['tokens_s']:8.0f}"
            f"{number['ttft_p50_ms']:9.0f}{number['ttft_p99_ms']:8.0f}{number['tbt_p50_ms']:9.1f}{number['tbt_p99_ms']:8.1f}"
            + (f"{100 * number['step_error_mean']:8.0f}%" if "step_error_mean" in number else "")
        )
    return lines


__all__ = ["build", "random_params", "serve", "step"]
