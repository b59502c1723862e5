"""Host-side records of a live request and of a step in flight."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import NO_KIND
from apt_jax.core.step import PoolSpan, PromptTargets
from apt_jax.engine.events import Iteration
from apt_jax.engine.pooled_prompt import PooledPrompt
from apt_jax.engine.prompt_scores import PromptScores
from apt_jax.executor import StepHandle
from apt_jax.request import (
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    RequestMetrics,
    SamplingParams,
    TokenConstraint,
)


class OutputProcessor(Protocol):
    """Hook of the front end, called for every token; it detokenizes and looks for stop strings."""

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Process one token; called at commit, in order, for each token except a stop token that ends the request.

        Returns:
            The stop string that this token completed, else None; it is ignored before `min_tokens`. If the hook raises,
            only this request ends, with `finish_reason="error"`.
        """
        ...


@dataclasses.dataclass(kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token."""

    logprob: float
    """Log probability of the sampled token."""
    top_ids: NDArray[np.int32]
    """(k,) most likely tokens, best first; k is the request's `logprobs`."""
    top_logprobs: NDArray[np.float32]
    """(k,) log probabilities of `top_ids`."""


@dataclasses.dataclass(kw_only=True, slots=True)
class StepOutput:
    """Incremental output of one request. Only the last output of a request has a `finish_reason`."""

    request: EngineRequest
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token; None: the request did not ask for log probabilities."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of all prompt tokens but the first, in the output of the first token, if requested."""
    pooled: NDArray[np.float32] | None = None
    """(D,) pooled states of the prompt, in the output of the first token, if requested."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the request; EOS counts as a stop token."""
    error: str | None = None
    """Error message, if the finish reason is "error"."""
    num_outputs: int = 0
    """Number of tokens delivered so far, including the new tokens."""
    metrics: RequestMetrics
    """Metrics of the whole request; the object is updated until the request ends."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class RequestState:
    """A live request. Once `ended` is True, it stays True; the commit of a step in flight checks it."""

    request: EngineRequest
    row: int
    rank: int
    """Arrival order; also the owner id of its blocks."""
    tokens: NDArray[np.int32]
    """(prompt_len + max_tokens,) prompt, followed by the output tokens known to the host."""
    num_known: int
    """Number of known tokens in `tokens`."""
    prompt_len: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    metrics: RequestMetrics
    constraint: TokenConstraint | None = None
    root: bytes
    """Root digest of its prefixes."""
    digests: tuple[list[bytes], ...]
    """For each cache kind, the digests of the full groups of its known tokens, extended on demand. Kinds with groups of
    equal length share a list."""
    expected_ttft_s: float | None = None
    """TTFT estimated at admission, seconds; None: no estimate (`Admission.check`), or the first token has been
    delivered."""
    num_found: int = 0
    """Number of groups found in the prefix cache when it last started to run."""
    is_proven: bool = False
    """True: a valid token has confirmed the groups that it found, or it found 0 groups."""
    found_kind: int = NO_KIND
    """Cache kind with which it last started to run; the groups found then are of this kind."""
    last_kind: int = NO_KIND
    """Cache kind that it holds, or held last."""
    prompt_scores: PromptScores | None = None
    """Log probabilities of its prompt so far; None: not requested, or already delivered."""
    pooled: PooledPrompt | None = None
    """Pooled states of its prompt so far; None: not requested, or already delivered."""
    ended: bool = False

    @property
    def needs_all_states(self) -> bool:
        """True while requested log probabilities or pooled states of its prompt are missing. Meanwhile it uses no
        cached prefix, because the model is not run for cached positions."""
        if self.pooled is not None and self.pooled.needs_all_states:
            return True
        return self.prompt_scores is not None and not self.prompt_scores.is_complete


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class FilledBlocks:
    """Groups that a step in flight fills; `firsts` and `generations` are arguments of `HybridCache.register`."""

    index: int
    """Row of the request in the step."""
    kind: int
    begin: int
    firsts: NDArray[np.int32]
    generations: NDArray[np.int64]


@dataclasses.dataclass(kw_only=True, slots=True)
class InFlightStep:
    """A dispatched step; it refers to `RequestState` objects, because a row may hold another request by the time of its
    commit."""

    handle: StepHandle
    requests: list[RequestState]
    rows: NDArray[np.int32]
    """(n,) rows of the request table; the row of an ended request may be in use again."""
    samples: NDArray[np.bool_]
    position: NDArray[np.int32]
    num_tokens: int
    masked: NDArray[np.int64] | None = None
    """Indexes of the rows that need token masks, for which the sampler waits; None: no row needs a mask."""
    kind: NDArray[np.int8]
    filled: list[FilledBlocks]
    dispatched_s: float
    predicted_s: float | None
    """Duration predicted by the cost model, seconds; None: no prediction was made for this step."""
    has_chunks: bool
    prompt_targets: Mapping[int, PromptTargets] = dataclasses.field(default_factory=dict)
    """Same as `StepBatch.prompt_targets`."""
    pool_spans: Mapping[int, PoolSpan] = dataclasses.field(default_factory=dict)
    """Same as `StepBatch.pool_spans`."""
    iteration: Iteration | None
    """Decision to report when the step has ended; None: no listener is attached, or the decision has been reported."""
