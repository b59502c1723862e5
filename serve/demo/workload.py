"""A bursty workload derived from a machine's calibration, its open-loop replay, and a plot of the results.

The demo and the quickstart notebook share this module: the demo sends over gRPC, the notebook through the Python API.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO
from apt_jax.costs.fit import CostModel
from apt_jax.metrics import RequestRecord, Summary, summarize

ARRIVAL_CV = 2.0
"""Coefficient of variation of the gaps between arrivals; a Poisson process has 1."""

LOAD = 0.72
"""Mean arrival rate, divided by the geometric mean of the sustained rates of the KV cache and of the hidden cache."""
TTFT_IN_STEPS = 25.0
"""TTFT SLO, as a multiple of (decode step + full prefill step)."""
TBT_IN_STEPS = 5.0
"""TBT SLO, as a multiple of (decode step + full prefill step)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a workload."""

    at_s: float
    """Arrival time in seconds after the start of the replay."""
    prompt: str
    max_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The same arrivals and SLOs for every policy."""

    arrivals: tuple[Arrival, ...]
    slo: SLO
    rate: float
    """Mean number of requests per second."""
    kv_capacity: float
    """Requests per second that the pool sustains with keys and values only, according to the cost model."""
    hybrid_capacity: float
    """Requests per second that the pool sustains with the smaller hidden cache, but at least `kv_capacity`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Response to one arrival."""

    arrival: Arrival
    record: RequestRecord
    text: str
    cache_kind: str | None
    num_preemptions: int
    error: str | None = None


def sustained_rate(
    model: CostModel,
    *,
    kind_hidden: bool,
    num_blocks: int,
    block_size: int,
    hidden_block_size: int,
    max_num_seqs: int,
    prompt_len: float,
    output_len: float,
) -> float:
    """Return the requests per second at which, according to the cost model, the device and the pool are fully used.

    A request holds about `prompt_len + output_len / 2` tokens while it decodes. As many requests run at once as fit in
    the pool, at most `max_num_seqs`.
    """
    held = prompt_len + output_len / 2
    blocks = np.ceil(held / hidden_block_size) if kind_hidden else 2 * np.ceil(held / block_size)
    running = int(max(1, min(max_num_seqs, num_blocks // blocks)))
    lens = [int(held)] * running
    step_s = model.decode_s([], lens) if kind_hidden else model.decode_s(lens, [])
    prefill_s = _prompt_s(model, int(prompt_len))
    return 1.0 / (prefill_s + output_len * step_s / running)


def _prompt_s(model: CostModel, length: int) -> float:
    """Return the predicted time in seconds to prefill one prompt without other requests, over all its steps."""
    most = model.programs.max_num_batched_tokens
    return sum(model.prefill_s([min(most, length - done)], [done]) for done in range(0, length, most))


def derive_workload(
    model: CostModel,
    prompts: Sequence[str],
    prompt_lens: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    hidden_block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    duration_s: float,
    seed: int = 0,
    min_requests: int = 40,
    max_requests: int = 400,
) -> Workload:
    """Return arrivals at `LOAD` times the geometric mean of the sustained rates of the KV cache and the hidden cache,
    with matching SLOs.

    The rate and the SLOs follow from the calibrated step times, so a slower machine gives the same picture with fewer
    requests, or over a longer time if that would be fewer than `min_requests`.

    Args:
        prompts: prompts to sample from; `prompt_lens` has their lengths in tokens.
        duration_s: approximate duration of the arrivals, in seconds.
    """
    rng = np.random.default_rng(seed)
    shortest, longest = 48, 96
    output_len, prompt_len = (shortest + longest) / 2, float(np.mean(prompt_lens))
    facts: dict[str, Any] = {
        "num_blocks": num_blocks, "block_size": block_size, "hidden_block_size": hidden_block_size, "max_num_seqs": max_num_seqs,
        "prompt_len": prompt_len, "output_len": output_len,
    }  # fmt: skip
    kv = sustained_rate(model, kind_hidden=False, **facts)
    hybrid = max(kv, sustained_rate(model, kind_hidden=True, **facts))
    rate = LOAD * float(np.sqrt(kv * hybrid))
    count = int(np.clip(rate * duration_s, min_requests, max_requests))
    shape = 1.0 / ARRIVAL_CV**2
    gaps = rng.gamma(shape, 1.0 / (shape * rate), count)
    gaps *= count / rate / gaps.sum()  # makes the mean rate exact
    at = np.cumsum(gaps) - gaps[0]
    order = rng.integers(0, len(prompts), count)
    arrivals = tuple(
        Arrival(
            at_s=float(at[i]),
            prompt=str(prompts[order[i]]),
            max_tokens=int(rng.integers(shortest, longest + 1)),
            seed=i,
        )
        for i in range(count)
    )
    held = int(prompt_len + output_len / 2)
    busy = min(max_num_seqs, num_blocks // int(2 * np.ceil(held / block_size)))
    step_s = model.decode_s([held] * busy, [])
    chunk = min(int(prompt_len), max_num_batched_tokens)
    chunks = min(int(max_num_batched_tokens / prompt_len) or 1, max_num_seqs)
    chunk_s = model.prefill_s([chunk] * chunks, [0] * chunks)
    slo = SLO(ttft_s=TTFT_IN_STEPS * (step_s + chunk_s), tbt_s=TBT_IN_STEPS * (step_s + chunk_s))
    return Workload(arrivals=arrivals, slo=slo, rate=rate, kv_capacity=kv, hybrid_capacity=hybrid)


Send = Callable[[Arrival, SLO], AsyncIterator[tuple[int, str, dict[str, Any]]]]
"""Sends one request; yields (number of new tokens, new text, facts); the facts of the last item are kept."""


async def replay(
    workload: Workload, send: Send, on_event: Callable[[str, Answer | None], None] | None = None
) -> list[Answer]:
    """Send every arrival at its time, even if earlier requests are unanswered (open loop).

    Args:
        on_event: called with ("sent", None), ("first", None) and ("done", answer).
    """
    start_s = time.monotonic()
    tell = on_event or (lambda _what, _answer: None)

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
        sent_s = time.monotonic()
        tell("sent", None)
        times: list[float] = []
        pieces: list[str] = []
        facts: dict[str, Any] = {}
        error = None
        try:
            async for num_tokens, text, new_facts in send(arrival, workload.slo):
                if num_tokens and not times:
                    tell("first", None)
                times += [time.monotonic()] * num_tokens
                pieces.append(text)
                facts = new_facts or facts
        except Exception as problem:  # counted as not attained, and shown
            error = str(problem)
        record = RequestRecord(
            arrival_s=sent_s,
            token_times_s=times,
            finished_s=time.monotonic(),
            ok=error is None,
            slo=workload.slo,
        )
        answer = Answer(
            arrival=arrival, record=record, text="".join(pieces), cache_kind=facts.get("cache_kind"),
            num_preemptions=int(facts.get("num_preemptions", 0)), error=error,
        )  # fmt: skip
        tell("done", answer)
        return answer

    return list(await asyncio.gather(*(one(a) for a in workload.arrivals)))


def summary_of(answers: Sequence[Answer]) -> Summary:
    """Return attainment and latencies over all sent requests."""
    return summarize([a.record for a in answers])


def plot_runs(runs: dict[str, list[Answer]], workload: Workload, path: Path | None = None) -> Any:
    """Plot one row per policy: TTFT of every request against its arrival time, and SLO attainment.

    Returns:
        The matplotlib figure, also written to `path` if given.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(runs),
        2,
        figsize=(11, 2.3 * len(runs) + 0.6),
        width_ratios=(3, 1),
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    slowest = max((a.record.ttft_s or 0.0) for answers in runs.values() for a in answers)
    for (name, answers), (left, right) in zip(runs.items(), axes, strict=True):
        for met, colour, label in (
            (True, "#2a7f62", "objectives met"),
            (False, "#c8553d", "missed"),
        ):
            chosen = [a for a in answers if a.record.slo_attained is met and a.record.ttft_s is not None]
            left.scatter(
                [a.arrival.at_s for a in chosen],
                [a.record.ttft_s for a in chosen],
                s=14,
                color=colour,
                label=label,
            )
        left.axhline(workload.slo.ttft_s, color="#555555", linewidth=1, linestyle="--")
        left.set_ylim(0, 1.05 * max(slowest, workload.slo.ttft_s))
        left.set_ylabel("TTFT (s)")
        left.set_title(name, loc="left", fontsize=10)
        s = summary_of(answers)
        bars = {"both": s.slo_attainment, "TBT": s.tbt_attainment, "TTFT": s.ttft_attainment}
        drawn = right.barh(list(bars), [100 * v for v in bars.values()], color=["#2a7f62", "#9fc5b4", "#9fc5b4"])
        right.bar_label(drawn, fmt="%.0f %%", padding=3, fontsize=8)
        right.set_xlim(0, 118)
    axes[0][0].legend(loc="upper left", fontsize=8)
    axes[-1][0].set_xlabel("arrival (s); the dashed line is the TTFT objective")
    axes[-1][1].set_xlabel("attainment (% of all requests)")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    return figure
