"""Requests, batches and schedules of the offline problem: which batches serve a few known requests best."""

import dataclasses
import math
from typing import Literal

from apt_jax.core.kinds import HIDDEN, CacheKindSpec
from apt_jax.costs.model import StepCosts

Objective = Literal["latency", "completion", "ttft", "slo"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "completion", "ttft", "slo")
"""End of the last batch; sum over requests of last token, or of first token, less arrival; first tokens in time."""
_KV_ONLY = (CacheKindSpec(name="kv", blocks_per_group=1),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalRequest:
    """A request with everything known about it."""

    prompt_tokens: int
    """I."""
    output_tokens: int
    """O, the last token included; it is generated but never cached."""
    arrival_s: float = 0.0
    """T: no batch with this request starts earlier."""
    slo_ttft_s: float = math.inf
    """Limit of first token less arrival; read by the objective "slo"."""

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
    """M: blocks of the pool. With the defaults of `kinds` and `block_size` a block is a KV token."""
    max_num_batched_tokens: int
    """C: most tokens a batch, decodes included."""
    chunk: int | None = None
    """P: most prefill tokens a batch, prompts in pieces; None: prompts are computed whole."""
    chunk_step: int = 1
    """Pieces end at multiples of this or with the prompt. Above 1 the optimum is one over such pieces only."""
    hybrid_batching: bool = True
    """Prefill and decode in one batch."""
    eviction: bool = True
    """False: a request keeps its cache until it ends."""
    kinds: tuple[CacheKindSpec, ...] = _KV_ONLY
    """Cache kinds, in the order `KV`, `HIDDEN`; one is chosen whenever a request starts from nothing. Their extra times
    are not read: `costs` has them."""
    block_size: int = 1
    """Token positions of a group with the KV kind."""
    hidden_block_size: int | None = None
    """The same for the hidden kind; None: `block_size`."""
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
            raise ValueError(f"{self.kinds=} must be one or two kinds, one of them offered")
        for field in dataclasses.fields(self.costs):
            if not 0 <= getattr(self.costs, field.name) < math.inf:
                raise ValueError(f"costs.{field.name}={getattr(self.costs, field.name)} must be at least 0")

    @property
    def direction(self) -> int:
        """1 where less of the objective is better, -1 where more is."""
        return -1 if self.objective == "slo" else 1

    def blocks(self, tokens: int, kind: int) -> int:
        """Blocks of `tokens` cached positions."""
        size = self.block_size
        if kind == HIDDEN and self.hidden_block_size is not None:
            size = self.hidden_block_size
        return self.kinds[kind].blocks_per_group * -(-tokens // size)

    def misfit(self) -> tuple[int, str] | None:
        """The first request that can never run, and why; None: each can run alone, so some schedule exists."""
        for i, request in enumerate(self.requests):
            tokens = request.prompt_tokens + request.output_tokens - 1
            least = min(self.blocks(tokens, k) for k, s in enumerate(self.kinds) if s.offered)
            if least > self.capacity_blocks:
                return i, f"needs {least} blocks at its end, the pool has {self.capacity_blocks}"
            if self.chunk is None and request.prompt_tokens > self.max_num_batched_tokens:
                return (
                    i,
                    f"has {request.prompt_tokens} prompt tokens, a batch holds "
                    f"{self.max_num_batched_tokens} and chunks are off",
                )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalBatch:
    """One batch. Rows are positions in `OptimalProblem.requests`; times in seconds."""

    start_s: float
    end_s: float
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """c of each row."""
    start: tuple[int, ...]
    """Positions cached before, m of each row."""
    kind: tuple[int, ...]
    preempt: tuple[int, ...] = ()
    """Requests evicted when this batch starts (e = 1); their memory counts as free in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalSchedule:
    """A schedule with its cost and bound."""

    batches: tuple[OptimalBatch, ...]
    latency_s: float
    """End of the last batch."""
    objective: float
    """Value of the problem's objective; seconds, or requests for "slo"."""
    bound: float
    """Lower bound of the objective over all schedules."""
    status: Literal["optimal", "feasible"]
    """"feasible": the time ran out before the proof."""

    @property
    def num_evictions(self) -> int:
        return sum(len(batch.preempt) for batch in self.batches)


BatchRow = tuple[int, int, int, int]  # request, c, m, kind
