"""Measure what steps cost on this machine: the coefficients that scheduling weighs (Apt-Serve §4.2's ρ, made affine).

The executor that serves is timed on synthetic batches over a grid of sizes, lengths and kinds; the fit is stored as
JSON in the cache directory, under a name made of everything that it depends on, and loaded at the next start.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from apt_jax.executor import StepBatch
from apt_jax.jax_executor import JaxExecutor
from apt_jax.request import SamplingParams
from apt_jax.sched.cost_model import (
    CostModel,
    DecodePoint,
    FitQuality,
    PrefillPoint,
    fit_cost_model,
)
from apt_jax.sched.view import HIDDEN, KV
from apt_jax.sim.hardware import Hardware

DEFAULT_BUDGET_S = 30.0
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def cache_dir() -> Path:
    """Where calibrations and compiled programs are kept: $APT_JAX_CACHE_DIR, else ~/.cache/apt-jax."""
    return Path(os.environ.get("APT_JAX_CACHE_DIR") or Path.home() / ".cache" / "apt-jax")


def _batch(
    executor: JaxExecutor, kinds: list[int], starts: list[int], lens: list[int]
) -> StepBatch:
    """A legal batch over made-up cache contents. Rows share blocks where the pool is too small to keep them apart."""
    n, c = len(kinds), executor.block_size
    need = [-(-(s + t) // c) for s, t in zip(starts, lens, strict=True)]
    tables = np.zeros((n, 2, max(need)), np.int32)
    cursor = 0
    for row, blocks in enumerate(need):
        for half in range(2 if kinds[row] == KV else 1):
            tables[row, half, :blocks] = 1 + (cursor + np.arange(blocks)) % executor.num_blocks
            cursor += blocks
    return StepBatch(
        seats=np.arange(n, dtype=np.int32),
        num_tokens=np.array(lens, np.int32),
        start=np.array(starts, np.int32),
        kind=np.array(kinds, np.int8),
        token_ids=np.full(sum(lens), 3, np.int32),
        block_tables=tables,
        samples=np.ones(n, bool),
        position=np.zeros(n, np.int32),
        params=[_GREEDY] * n,
        history=[np.zeros(0, np.int32)] * n,
        prompt_len=np.zeros(n, np.int32),
    )


def _time_s(executor: JaxExecutor, batch: StepBatch, budget_s: float) -> float:
    """Median over a few runs of one step, fetched; at least two runs after one that is not counted."""
    executor.execute(batch).result()
    times: list[float] = []
    end = time.monotonic() + budget_s
    while len(times) < 2 or (time.monotonic() < end and len(times) < 9):
        start = time.monotonic()
        executor.execute(batch).result()
        times.append(time.monotonic() - start)
    return float(np.median(times))


def calibrate(
    executor: JaxExecutor,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Callable[[int, int], None] | None = None,
) -> CostModel:
    """Time prefill and decode steps of a warmed-up executor, about `budget_s` seconds, and fit a `CostModel`.

    The pool's contents are overwritten; call it before serving.
    """
    offered = [kind for kind in (KV, HIDDEN) if executor.kinds_offered[kind]]
    max_len = executor.max_model_len
    rows = sorted(
        {b for b in executor.decode_buckets if b in (1, 2, 4, 8, 16, 32, 64)}
        | {executor.decode_buckets[-1]}
    )
    rows = [min(b, executor.max_num_seqs) for b in rows]
    lengths = sorted({min(max_len - 2, n) for n in (16, 128, 384, max_len // 2, max_len - 2)})
    # As many cached tokens as fit the pool: beyond that the timing would read the same blocks again and again.
    room = executor.num_blocks * executor.block_size
    decode_grid = [(b, n) for b in rows for n in lengths if b * n <= max(room, 2 * max_len)]
    decode_cases: list[tuple[list[int], list[int]]] = []
    for b, n in decode_grid:
        decode_cases += [([k] * b, [n] * b) for k in offered]
        if len(offered) == 2 and b >= 4:
            decode_cases.append(([KV] * (b // 2) + [HIDDEN] * (b - b // 2), [n] * b))
    prefill_cases: list[tuple[list[int], list[int], list[int]]] = []
    budget = executor.max_num_batched_tokens
    for kind in offered:
        for tokens in sorted({min(budget, t) for t in (16, *executor.prefill_buckets)}):
            chunks = [t for t in _split(tokens, min(max_len, 128))][: executor.max_num_seqs]
            prefill_cases.append(([kind] * len(chunks), [0] * len(chunks), chunks))
            if tokens <= max_len:
                prefill_cases.append(([kind], [0], [tokens]))
            if 2 * tokens <= max_len:
                prefill_cases.append(([kind], [max_len - tokens], [tokens]))
    total = len(decode_cases) + len(prefill_cases)
    share_s = budget_s / total
    done = 0

    def measured(kinds: list[int], starts: list[int], lens: list[int]) -> float:
        nonlocal done
        seconds = _time_s(executor, _batch(executor, kinds, starts, lens), share_s)
        done += 1
        if progress:
            progress(done, total)
        return seconds

    prefill_points = [
        PrefillPoint(chunk_lens=lens, prefix_lens=starts, time_s=measured(kinds, starts, lens))
        for kinds, starts, lens in prefill_cases
        if max(lens) > 1
    ]
    decode_points = []
    for kinds, starts in decode_cases:
        seconds = measured(kinds, starts, [1] * len(kinds))
        by_kind = {
            k: [s for kind, s in zip(kinds, starts, strict=True) if kind == k] for k in (KV, HIDDEN)
        }
        decode_points.append(
            DecodePoint(kv_lens=by_kind[KV], hidden_lens=by_kind[HIDDEN], time_s=seconds)
        )
    executor.reset()
    return fit_cost_model(prefill_points, decode_points)


def _split(tokens: int, chunk: int) -> list[int]:
    return [chunk] * (tokens // chunk) + ([tokens % chunk] if tokens % chunk else [])


def _key(executor: JaxExecutor) -> str:
    facts = {
        "version": 1,
        "model": dataclasses.asdict(executor.config),
        "dtype": str(executor.params.embed.dtype),
        "mode": executor.cache_config.mode,
        "absorb": executor.absorbs,
        "attention": executor.attention_name,
        "block_size": executor.block_size,
        "num_blocks": executor.num_blocks,
        "bounds": [
            executor.max_num_seqs,
            executor.max_num_batched_tokens,
            executor.max_model_len,
            executor.mixed,
        ],
        "platform": executor.platform,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def calibration_path(executor: JaxExecutor, directory: Path | None = None) -> Path:
    """The file that holds this executor's calibration, there or not."""
    return (directory or cache_dir()) / "calibration" / f"{_key(executor)}.json"


def load_calibration(path: Path) -> CostModel | None:
    """A stored fit; None where there is none or it cannot be read."""
    try:
        data = json.loads(path.read_text())
        return CostModel(
            prefill=tuple(data["prefill"]),
            decode=tuple(data["decode"]),
            prefill_quality=FitQuality(**data["prefill_quality"]),
            decode_quality=FitQuality(**data["decode_quality"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_calibration(model: CostModel, path: Path) -> None:
    """Write a fit where `load_calibration` finds it; replaces the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(model), indent=1))
    temporary.replace(path)


def load_or_calibrate(
    executor: JaxExecutor,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Callable[[int, int], None] | None = None,
    directory: Path | None = None,
) -> CostModel:
    """The stored calibration of this executor on this machine, or a new one, which is stored if the disk lets it."""
    path = calibration_path(executor, directory)
    model = load_calibration(path)
    if model is None:
        model = calibrate(executor, budget_s, progress)
        with contextlib.suppress(OSError):  # a read-only home is no reason not to serve
            store_calibration(model, path)
    return model


def describe(model: CostModel, executor: JaxExecutor, model_name: str) -> Hardware:
    """What this machine is to the simulator: a calibration with the pool that it was made with.

    Args:
        model: the calibration of `executor`.
        executor: offers the KV kind, alone or with the hidden one.
        model_name: what the simulator's ``--model`` will take.

    Raises:
        ValueError: `executor` does not offer KV, so that its costs are not known.
    """
    kv, hidden = executor.kinds_offered
    if not kv:
        raise ValueError("the costs of the KV kind were not measured; use --cache kv or hybrid")
    device = jax.devices()[0].device_kind
    dtype = executor.params.embed.dtype
    mode = ("absorb" if executor.absorbs else "reproject") if hidden else "kv"
    basis = {
        "prefill, decode": "fitted to steps timed on this machine, host time included; `fit`: on points held back",
        "num_blocks": "the pool of the calibrated engine",
        mode: "fitted to steps timed on this machine",
    }
    for name in ("reproject", "absorb") if hidden else ("hidden", "reproject", "absorb"):
        basis.setdefault(name, "not measured by this calibration")
    return Hardware(
        name=device.lower().replace(" ", "-"),
        model=model_name,
        num_devices=1,
        max_model_len=executor.max_model_len,
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        hidden_blocks_per_group=1 if hidden else None,
        costs={mode: model.step_costs()},
        basis=basis,
        source=f"apt-jax calibrate on {device} ({executor.platform}), {dtype}, jax {jax.__version__}",
        fit={
            "prefill": dataclasses.asdict(model.prefill_quality),
            "decode": dataclasses.asdict(model.decode_quality),
        },
    )
