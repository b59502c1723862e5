"""Measures step costs on this machine: the coefficients that scheduling uses (an affine form of Apt-Serve §4.2's ρ).

The serving executor is timed on synthetic batches of random sizes, lengths and kinds (`calibration_steps`). The fit is
stored as JSON in the cache directory, under a hash of everything it depends on, and loaded at the next start.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import jax
import numpy as np

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import NULL_BLOCK, Conversions, StepBatch, WindowBlocks
from apt_jax.costs.fit import CostModel, FitQuality, StepPoint, fit_cost_model
from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.executor.calibration_steps import CalibrationSteps, Episode
from apt_jax.executor.compiling.buckets import PREFIX_STEP
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.transfers.host_memory import HostPool
from apt_jax.ops.xla_decode import TOKENS_PER_TILE
from apt_jax.ops.xla_prefill import PREFILL_KEY_TILE, PREFILL_QUERY_TILE
from apt_jax.request import SamplingParams
from apt_jax.utils.cache_dir import cache_dir, log_not_kept, read_verified, write_verified

logger = logging.getLogger(__name__)

DEFAULT_BUDGET_S = 30.0
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_MIN_POINTS = 8
"""Minimum number of points of each phase, measured regardless of the budget."""
_GRID_RUN = 3
"""Number of episodes of a round after which an episode as served is added."""
_REPEATS = 3
"""Number of measurements of a step with chunks; the median is used."""
_DECODE_RUN = 5
"""On a CPU, the median of this many decode steps is used, and as many steps before them are ignored. If steps take
longer than `_LONG_S` seconds, the median of `_REPEATS` steps is used, and 1 step before them is ignored."""
_LONG_S = 0.02
_SLOW_SHARE, _TOO_SLOW_SHARE = 1 / 200, 1 / 4
"""Shares of the budget. A step that takes more than the first (and `_FAST_S` / 10) is measured once, unless it is held
out; a step that is expected to take more than the second (and `_FAST_S`) is not measured."""
_FAST_S = 0.5
"""Seconds below which a step is measured regardless of the budget."""


def synthetic_batch(executor: JaxExecutor, kinds: list[int], starts: list[int], lens: list[int]) -> StepBatch:
    """Return a valid batch over arbitrary cache contents, given each row's kind, number of cached tokens and number of
    tokens to compute. Rows share blocks if the pool is too small."""
    n, sizes = len(kinds), (executor.block_size, executor.hidden_block_size)
    need = [-(-(s + t) // sizes[k]) for s, t, k in zip(starts, lens, kinds, strict=True)]
    tables = np.zeros((n, 2, max(need)), np.int32)
    cursor = 0
    for row, blocks in enumerate(need):
        for half in range(2 if kinds[row] == KV else 1):
            tables[row, half, :blocks] = 1 + (cursor + np.arange(blocks)) % executor.num_blocks
            cursor += blocks
    windows = None
    if executor.plan.windows is not None:
        spec, begin, end = executor.plan.windows, np.array(starts, np.int32), np.array(starts) + lens
        first = spec.first_group(begin)
        held = np.arange(int((-(-end // spec.block_size) - first).max()))[None, None]
        at = cursor + held + np.arange(n * spec.blocks_per_group).reshape(n, -1, 1) * held.size
        inside = held < (-(-end // spec.block_size) - first)[:, None, None]
        blocks = np.where(inside, 1 + at % executor.num_blocks, NULL_BLOCK)
        windows = WindowBlocks(first=first.astype(np.int32), blocks=blocks.astype(np.int32))
    return StepBatch(
        slots=np.arange(n, dtype=np.int32),
        num_tokens=np.array(lens, np.int32),
        start=np.array(starts, np.int32),
        kind=np.array(kinds, np.int8),
        token_ids=np.full(sum(lens), 3, np.int32),
        block_tables=tables,
        windows=windows,
        samples=np.ones(n, bool),
        position=np.zeros(n, np.int32),
        params=[_GREEDY] * n,
        history=[np.zeros(0, np.int32)] * n,
        prompt_len=np.zeros(n, np.int32),
        # If there are adapters, every row has one, so that the fit has the maximum cost of a step.
        adapters=np.arange(n, dtype=np.int32) % len(executor.adapters) + 1 if executor.adapters else None,
    )


def step_time_s(executor: JaxExecutor, batch: StepBatch) -> float:
    """Return the seconds that a step takes, with its block tables sent before the timing starts. In serving a table
    only grows from step to step, whereas calibration batches use the same slots for different tables."""
    executor.send_tables(batch)
    start = time.perf_counter()
    executor.execute(batch).result()
    return time.perf_counter() - start


def _steps_in_a_row_s(executor: JaxExecutor, batch: StepBatch, count: int) -> list[float]:
    """Return (count,) seconds between the ends of equal steps. As in an engine that overlaps host and device, each step
    is dispatched before the tokens of the previous step are fetched."""
    executor.send_tables(batch)
    ends, step = list[float](), executor.execute(batch)
    for _ in range(count):
        following = executor.execute(batch)
        step.result()
        ends.append(time.perf_counter())
        step = following
    step.result()
    ends.append(time.perf_counter())
    return np.diff(ends).tolist()


def program_shapes(executor: JaxExecutor) -> ProgramShapes:
    """Return the sizes that `executor` pads steps to, given its ready programs."""
    sizes = executor.ready.sizes
    by_kind = not executor.programs.branches and executor.kinds_offered[HIDDEN]
    return ProgramShapes(
        decode_buckets=tuple(sizes.decode),
        prefill_buckets=tuple(sizes.prefill),
        max_num_seqs=executor.max_num_seqs,
        mixed=executor.mixed,
        rows_per_tile=executor.rows_per_tile,
        tokens_per_tile=max(1, TOKENS_PER_TILE // executor.block_size) * executor.block_size,
        query_tile=PREFILL_QUERY_TILE,
        key_tile=PREFILL_KEY_TILE,
        by_kind=by_kind,
        prefix_sizes=tuple((size.tokens, size.prefix_room) for size in sizes.prefixed),
        prefix_step=PREFIX_STEP,
    )


_CONVERSIONS = 12
"""Number of conversions measured, each compared with the same step without a conversion."""


def _conversion_s(executor: JaxExecutor, rng: np.random.Generator) -> Generator[float, None, float]:
    """Measure the extra seconds per cached token of a decode step that converts a row's layer inputs to keys and
    values.

    The result is a least-squares fit through the origin over contexts of every scale, at least 0. Yields after each
    measurement.
    """
    per_block = executor.hidden_block_size
    room = executor.num_blocks // 4 * executor.block_size
    most = max(1, min(executor.max_model_len - 2, room))
    tokens, extra_s = np.zeros(_CONVERSIONS), np.zeros(_CONVERSIONS)
    for i in range(_CONVERSIONS):
        length = int(np.exp(rng.uniform(np.log(min(16, most)), np.log(most))))
        plain = synthetic_batch(executor, [KV], [length], [1])
        blocks = 1 + (int(plain.block_tables.max()) + np.arange(-(-length // per_block)))
        inputs = (1 + (blocks - 1) % executor.num_blocks).astype(np.int32)[None]
        converting = dataclasses.replace(plain, conversions=Conversions(rows=np.zeros(1, np.int64), inputs=inputs))
        times = [[step_time_s(executor, batch) for batch in (plain, converting)] for _ in range(_REPEATS + 1)]
        tokens[i], extra_s[i] = length, np.median(np.diff(times[1:], axis=1))
        yield 0.99
    return max(0.0, float(tokens @ extra_s / (tokens @ tokens)))


_TRANSFERS = 8
"""Number of transfers measured in each direction."""


def _transfers_s(
    executor: JaxExecutor, host: HostPool, rng: np.random.Generator
) -> Generator[float, None, list[float]]:
    """Measure the transfer times of `StepCosts`, and return them in seconds: load_base_s, load_per_block_s,
    save_per_block_s.

    A load is timed with the check of its blocks and the step that follows, minus the same step without a load. A save
    is timed from its dispatch until its blocks are in host memory. The results are non-negative least-squares fits.
    Yields after each measurement.
    """
    from scipy.optimize import nnls  # heavy to import

    plain = synthetic_batch(executor, [int(not executor.kinds_offered[KV])], [1], [1])
    most = min(executor.num_blocks // 2, host.num_blocks, host.sizes[-1])
    nums, load_s, save_s = np.zeros(_TRANSFERS), np.zeros(_TRANSFERS), np.zeros(_TRANSFERS)
    for i in range(_TRANSFERS):
        num = max(1, int(np.exp(rng.uniform(0, np.log(most)))))
        device, ids = np.arange(num, dtype=np.int32) + 1, np.arange(num, dtype=np.int32) + 1
        saves, loads = np.stack([device, ids], axis=1), np.stack([ids, device], axis=1)
        times: list[tuple[float, float]] = []
        for _ in range(_REPEATS + 1):
            step_s = step_time_s(executor, plain)
            started = time.perf_counter()
            host.announce(saves)
            host.save(saves)
            host.ready_to_load(ids)  # waits for the saves
            saved = time.perf_counter()
            host.ready_to_load(ids)
            step_time_s(executor, dataclasses.replace(plain, loads=loads))
            ended = time.perf_counter()
            times.append((saved - started, ended - saved - step_s))
        nums[i] = num
        save_s[i], load_s[i] = np.median(times[1:], axis=0)
        yield 0.99
    base_s, per_block_s = nnls(np.stack([np.ones(_TRANSFERS), nums], axis=1), np.maximum(load_s, 0.0))[0].tolist()
    return [base_s, per_block_s, max(0.0, float(nums @ save_s / (nums @ nums)))]


class _Meter:
    """Measures the step times of episodes.

    On a CPU, steps are timed in the order of serving: a step with chunks between decode steps, then runs of decode
    steps. Decode steps within 20 ms after a large prefill were up to a third slower than later decode steps, which are
    most of a server's steps. On other platforms the host works on a step while the device runs the previous step, and
    the time between the ends of two steps is used.

    Attributes:
        spent_s: total time of all steps so far, seconds.
        points: measured points.
        seen_s: step time of each program with chunks, seconds: of its first run, later the median of the measured
            steps.
    """

    def __init__(self, executor: JaxExecutor, budget_s: float) -> None:
        self._executor, self._budget_s = executor, budget_s
        self.spent_s = 0.0
        self.points = list[StepPoint]()
        self.seen_s: dict[tuple[int, int], float] = {}

    def is_too_slow(self, program: tuple[int, int]) -> bool:
        """Return True if a step of this program is expected to take too much of the budget. The expected time is its
        `seen_s`; if it has not run, the smallest `seen_s` of other programs, scaled up by tokens."""
        guesses = [of_s * max(1.0, program[1] / max(1, tokens)) for (_, tokens), of_s in self.seen_s.items()]
        expected_s = self.seen_s.get(program, min(guesses, default=0.0))
        return expected_s > max(_FAST_S, _TOO_SLOW_SHARE * self._budget_s)

    def measure(self, episode: Episode) -> Iterator[None]:
        """Measure an episode and add its points. Yields after each step, or after each run of steps that must not be
        interrupted."""
        executor, program = self._executor, episode.program
        batches = [synthetic_batch(executor, *step) for step in (episode.prefill, episode.decode) if step is not None]
        if program not in self.seen_s:  # the first run of a program is left out of the fit
            self.seen_s[program] = self._spend([step_time_s(executor, batches[0])])
            yield
        is_slow = self.seen_s[program] > max(_FAST_S / 10, _SLOW_SHARE * self._budget_s)
        repeats = [1 if is_slow and not episode.held_back else _REPEATS, _DECODE_RUN][: len(batches)]
        times: list[list[float]] = [[] for _ in batches]
        if executor.platform == "cpu":
            order = [which for _ in range(repeats[0]) for which in reversed(range(len(batches)))]
            if len(batches) == 2:
                order += [1] * 2 * _DECODE_RUN
            while order:
                which = order.pop(0)
                times[which].append(step_time_s(executor, batches[which]))
                self._spend(times[which][-1:])
                yield
                if len(order) == 2 * _DECODE_RUN and times[1][-1] > _LONG_S:
                    order, repeats[1] = order[: 1 + _REPEATS], _REPEATS
        else:
            for which, batch in enumerate(batches):
                started_s, repeats[which] = time.perf_counter(), min(repeats[which], _REPEATS)
                times[which] = _steps_in_a_row_s(executor, batch, repeats[which])
                self._spend([time.perf_counter() - started_s])
                yield
        self.seen_s[program] = float(np.median(times[0]))
        for step, of_step, count in zip((episode.prefill, episode.decode), times, repeats, strict=False):
            assert step is not None
            self.points.append(
                StepPoint(
                    num_tokens=step.lens,
                    start=step.starts,
                    kind=step.kinds,
                    time_s=float(np.median(of_step[-count:])),
                    held_back=episode.held_back,
                )
            )

    def _spend(self, times: list[float]) -> float:
        self.spent_s += sum(times)
        return times[-1]


def _num_lacking(points: list[StepPoint], *, has_chunks: bool) -> int:
    """Return the number of missing points that must be measured regardless of the budget."""
    num_prefill = sum(p.is_prefill for p in points)
    counts = (num_prefill, len(points) - num_prefill) if has_chunks else (len(points),)
    return sum(max(0, _MIN_POINTS - count) for count in counts)


def calibration(executor: JaxExecutor, budget_s: float) -> Generator[float, None, CostModel]:
    """Time prefill and decode steps of a warmed-up executor for about `budget_s` seconds, and return a fitted
    `CostModel`.

    Every program is measured at least once, except programs whose steps would take too much of the budget. Their costs
    are estimated from other sizes, and the log names them. Conversions and transfers, if the executor has them, are
    measured after that, outside the budget. The pool's contents are overwritten.

    Yields:
        Share of the work done, in [0, 1), after each step or short run of equal steps. Other steps may run before the
        generator is resumed; that time does not count.
    """
    rng = np.random.default_rng(0)
    shapes = program_shapes(executor)
    steps, meter = CalibrationSteps(executor, shapes, rng), _Meter(executor, budget_s)
    has_chunks = shapes.prefill_buckets[-1] > 1
    left_out, round_ = set[tuple[int, int]](), steps.round(ends_first=True)
    num_done, num_first = 0, len(round_)
    while num_done < num_first or meter.spent_s < budget_s or _num_lacking(meter.points, has_chunks=has_chunks):
        if not round_:
            round_ = steps.round()
        episodes = [round_.pop(0)]
        if num_done % _GRID_RUN == _GRID_RUN - 1:
            episodes.append(steps.as_served())
        num_done += 1
        for episode in episodes:
            if meter.is_too_slow(episode.program):
                left_out.add(episode.program)
                continue
            for _ in meter.measure(episode):
                yield min(0.99, meter.spent_s / max(budget_s, 1e-9), num_done / num_first)
    points = meter.points
    names = ", ".join(str(tokens) for _, tokens in sorted(left_out - set(meter.seen_s)))
    logger.info(
        "step costs: %d steps measured in %.1f s%s",
        len(points),
        meter.spent_s,
        f"; too slow for the budget, estimated from other sizes: prompts of {names} tokens" if names else "",
    )
    model = fit_cost_model(points, shapes)
    if executor.can_convert:
        conversion_s = yield from _conversion_s(executor, rng)
        costs = dataclasses.replace(model.costs, convert_per_hidden_token_s=conversion_s)
        model = dataclasses.replace(model, costs=costs)
    if executor.host is not None:
        load_base_s, load_s, save_s = yield from _transfers_s(executor, executor.host, rng)
        costs = dataclasses.replace(
            model.costs, load_base_s=load_base_s, load_per_block_s=load_s, save_per_block_s=save_s
        )
        model = dataclasses.replace(model, costs=costs)
    return model


def calibrate(
    executor: JaxExecutor,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Callable[[int, int], None] | None = None,
) -> CostModel:
    """Run a whole `calibration` and return its fit; must be called before serving."""
    measuring = calibration(executor, budget_s)
    while True:
        try:
            share = next(measuring)
        except StopIteration as end:
            if progress:
                progress(100, 100)
            return end.value
        if progress:
            progress(int(100 * share), 100)


def _key(executor: JaxExecutor) -> str:
    facts = {
        "version": 6,
        "model": dataclasses.asdict(executor.config),
        "dtype": str(executor.params.dtype),
        "quantization": executor.quantization,
        "mode": executor.cache_config.mode,
        **({"converts": True} if executor.can_convert else {}),
        **({"transfers": True} if executor.host is not None else {}),
        **({"adapters": executor.adapter_shapes} if executor.adapters else {}),
        **({"windows": dataclasses.asdict(executor.plan.windows)} if executor.plan.windows is not None else {}),
        "absorb": executor.absorbs,
        "attention": executor.attention_name,
        "block_size": [executor.block_size, executor.hidden_block_size]
        if executor.hidden_block_size != executor.block_size
        else executor.block_size,
        "num_blocks": executor.num_blocks,
        "bounds": [
            executor.max_num_seqs,
            executor.max_num_batched_tokens,
            executor.max_model_len,
            executor.mixed,
        ],
        "buckets": dataclasses.asdict(executor.buckets),
        "platform": executor.platform,
        "device": jax.devices()[0].device_kind,
        "devices": [executor.num_devices, jax.process_count()] if jax.process_count() > 1 else executor.num_devices,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def calibration_path(executor: JaxExecutor, directory: Path | None = None) -> Path:
    """Return the path of this executor's calibration file, which may not exist."""
    return (directory or cache_dir()) / "calibration" / f"{_key(executor)}.json"


def load_calibration(path: Path) -> CostModel | None:
    """Return a stored fit; None if the file is missing or cannot be read. A damaged file is removed."""
    stored = read_verified(path)
    if stored is None:
        return None
    try:
        data = json.loads(stored)
        shapes = data["programs"]["shapes"]
        for name in ("decode_buckets", "prefill_buckets"):
            shapes[name] = tuple(shapes[name])
        shapes["prefix_sizes"] = tuple((tokens, room) for tokens, room in shapes["prefix_sizes"])
        return CostModel(
            costs=StepCosts(**data["costs"]),
            programs=ProgramCosts(
                shapes=ProgramShapes(**shapes),
                coefficients=tuple(data["programs"]["coefficients"]),
            ),
            **{name: FitQuality(**data[name]) for name in data if name.endswith("_quality")},
        )
    except (ValueError, KeyError, TypeError):
        return None


def store_calibration(model: CostModel, path: Path) -> None:
    """Write a fit that `load_calibration` can read, replacing the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_verified(path, json.dumps(dataclasses.asdict(model), indent=1).encode())


def keep_calibration(model: CostModel, path: Path) -> None:
    """Call `store_calibration` and log an error if the disk cannot be written."""
    try:
        store_calibration(model, path)
    except OSError as error:  # the server can run with a read-only or full disk
        log_not_kept(error)


def load_or_calibrate(
    executor: JaxExecutor,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Callable[[int, int], None] | None = None,
    directory: Path | None = None,
) -> CostModel:
    """Return the stored calibration of this executor on this machine; if there is none, calibrate and try to store the
    result."""
    path = calibration_path(executor, directory)
    model = load_calibration(path)
    if model is None:
        model = calibrate(executor, budget_s, progress)
        keep_calibration(model, path)
    return model


def describe(model: CostModel, executor: JaxExecutor, model_name: str) -> Hardware:
    """Return a description of this machine for the simulator: a calibration, and the pool it was measured with.

    Args:
        model: the calibration of `executor`.
        executor: calibrated executor, which must offer the KV kind.
        model_name: value of the simulator's ``--model``.

    Raises:
        ValueError: `executor` does not offer the KV kind, so its costs are unknown.
    """
    kv, hidden = executor.kinds_offered
    if not kv:
        raise ValueError("the costs of the KV kind were not measured; use --cache kv or hybrid")
    device = jax.devices()[0].device_kind
    dtype = executor.params.dtype
    mode = ("absorb" if executor.absorbs else "reproject") if hidden else "kv"
    basis = {
        "prefill, decode": "fitted to steps timed on this machine, host time included; `fit`: on held-out points",
        "num_blocks": "the pool of the calibrated engine",
        mode: "fitted to steps timed on this machine",
    }
    for name in ("reproject", "absorb") if hidden else ("hidden", "reproject", "absorb"):
        basis.setdefault(name, "not measured by this calibration")
    return Hardware(
        name=device.lower().replace(" ", "-"),
        model=model_name,
        num_devices=executor.num_devices,
        max_model_len=executor.max_model_len,
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        hidden_blocks_per_group=1 if hidden else None,
        hidden_block_size=executor.hidden_block_size if executor.hidden_block_size != executor.block_size else None,
        kv_blocks_per_group=2 if executor.plan.layer_groups is None else executor.plan.layer_groups.blocks_per_group,
        windows=executor.plan.windows,
        costs={mode: model.step_costs()},
        programs=model.programs,
        basis=basis,
        source=f"apt-jax calibrate on {device} ({executor.platform}), {dtype}, jax {jax.__version__}",
        fit={
            "prefill": dataclasses.asdict(model.prefill_quality),
            "decode": dataclasses.asdict(model.decode_quality),
            "linear prefill": dataclasses.asdict(model.linear_prefill_quality),
            "linear decode": dataclasses.asdict(model.linear_decode_quality),
        },
    )
