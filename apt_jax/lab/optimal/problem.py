"""The offline problem: find the best batches for a few requests of known lengths; and the schedules that solve it."""

import dataclasses
import math
from typing import Literal

from apt_jax.core.kinds import HIDDEN, CacheKindSpec
from apt_jax.costs.model import StepCosts

Objective = Literal["latency", "completion", "ttft", "slo"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "completion", "ttft", "slo")
"""Objectives: end of the last batch ("latency"); sum over requests of the time from arrival to the last token
("completion") or to the first token ("ttft"); number of first tokens on time ("slo")."""
_KV_ONLY = (CacheKindSpec(name="kv", blocks_per_group=1),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalRequest:
    """A request of known length."""

    prompt_tokens: int
    """Number of prompt tokens (I)."""
    output_tokens: int
    """Number of output tokens (O), including the last, which is generated but never cached."""
    arrival_s: float = 0.0
    """Arrival time in seconds (T); no batch with this request starts earlier."""
    slo_ttft_s: float = math.inf
    """TTFT objective in seconds, used by the objective "slo"."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.prompt_tokens=} and {self.output_tokens=} must be at least 1")
        if not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"{self.arrival_s=} must be at least 0 and finite")
        if not self.slo_ttft_s > 0:
            raise ValueError(f"{self.slo_ttft_s=} must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalProblem:
    """The problem that `solve_optimal` solves."""

    requests: tuple[OptimalRequest, ...]
    capacity_blocks: int
    """Number of blocks in the pool (M). With the defaults of `kinds` and `block_size` a block holds one KV token."""
    max_num_batched_tokens: int
    """Maximum number of tokens per batch, decodes included (C)."""
    chunk: int | None = None
    """Maximum number of prefill tokens per batch (P), with prompts computed in chunks; None: prompts are computed
    whole."""
    chunk_step: int = 1
    """Chunks end at multiples of this number or at the end of the prompt; above 1, only schedules with such chunks are
    considered."""
    hybrid_batching: bool = True
    """True if prefills and decodes may share a batch."""
    eviction: bool = True
    """True if requests may be evicted; False: a request keeps its cache until it ends."""
    kinds: tuple[CacheKindSpec, ...] = _KV_ONLY
    """Cache kinds, in the order `KV`, `HIDDEN`; a request without cache takes one of them when it runs. Batch times
    come from `costs`, not from the extra times in the kinds."""
    block_size: int = 1
    """Token positions per group of the KV kind."""
    hidden_block_size: int | None = None
    """Token positions per group of the hidden kind; None: `block_size`."""
    costs: StepCosts = dataclasses.field(default_factory=StepCosts)
    objective: Objective = "latency"

    def __post_init__(self) -> None:
        names = ("capacity_blocks", "max_num_batched_tokens", "block_size", "hidden_block_size", "chunk_step")
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.requests:
            raise ValueError("requests is empty")
        if self.chunk is not None and not 1 <= self.chunk <= self.max_num_batched_tokens:
            raise ValueError(f"{self.chunk=} must be in [1, {self.max_num_batched_tokens=}]")
        if self.chunk is not None and self.chunk < self.chunk_step:
            raise ValueError(f"{self.chunk=} must be at least {self.chunk_step=}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"{self.objective=} must be one of {', '.join(OBJECTIVES)}")
        if not 1 <= len(self.kinds) <= 2 or not any(k.offered for k in self.kinds):
            raise ValueError(f"{self.kinds=} must be one or two kinds, at least one of them offered")
        for field in dataclasses.fields(self.costs):
            if not 0 <= getattr(self.costs, field.name) < math.inf:
                raise ValueError(f"costs.{field.name}={getattr(self.costs, field.name)} must be at least 0")

    @property
    def direction(self) -> int:
        """1 if the objective is minimized, -1 if it is maximized."""
        return -1 if self.objective == "slo" else 1

    def blocks(self, tokens: int, kind: int) -> int:
        """Return the number of blocks that `tokens` cached positions take."""
        size = self.block_size
        if kind == HIDDEN and self.hidden_block_size is not None:
            size = self.hidden_block_size
        return self.kinds[kind].blocks_per_group * -(-tokens // size)

    def misfit(self) -> tuple[int, str] | None:
        """Return the index of the first request that can never run, and the reason; None if every request can run."""
        for i, request in enumerate(self.requests):
            tokens = request.prompt_tokens + request.output_tokens - 1
            least = min(self.blocks(tokens, k) for k, s in enumerate(self.kinds) if s.offered)
            if least > self.capacity_blocks:
                return i, f"needs {least} blocks at its end, but the pool has {self.capacity_blocks}"
            if self.chunk is None and request.prompt_tokens > self.max_num_batched_tokens:
                return (
                    i,
                    f"has {request.prompt_tokens} prompt tokens, but a batch holds "
                    f"{self.max_num_batched_tokens} and chunks are off",
                )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalBatch:
    """One batch; rows are indices into `OptimalProblem.requests`, times are in seconds."""

    start_s: float
    end_s: float
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """Number of tokens computed for each row (c)."""
    start: tuple[int, ...]
    """Number of positions of each row cached before the batch (m)."""
    kind: tuple[int, ...]
    preempt: tuple[int, ...] = ()
    """Requests evicted when this batch starts (e = 1); their memory is free in this batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalSchedule:
    """A schedule with its cost and bound."""

    batches: tuple[OptimalBatch, ...]
    latency_s: float
    """End of the last batch, seconds."""
    objective: float
    """Value of the problem's objective: seconds, or for "slo" a number of requests."""
    bound: float
    """Bound on the objective of any schedule: a lower bound, for "slo" an upper bound."""
    status: Literal["optimal", "feasible"]
    """"optimal", or "feasible" if optimality is not proven."""

    @property
    def num_evictions(self) -> int:
        return sum(len(batch.preempt) for batch in self.batches)


BatchRow = tuple[int, int, int, int]  # request, c, m, kind
