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
    """The front end's hook for every token: it detokenizes and looks for stop strings."""

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Called in commit, in order, for each token that is not itself a stop token.

        Returns:
            The stop string that this token completed, else None. Ignored before `min_tokens`. An exception ends this
            request alone, with `finish_reason="error"`.
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
    """(k,)"""


@dataclasses.dataclass(kw_only=True, slots=True)
class StepOutput:
    """Incremental output of one request. A request has any number of these, and exactly one, the last, with a
    `finish_reason`."""

    request: EngineRequest
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token where the request asked for it."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, where the request asked for it: of all prompt tokens but the first."""
    pooled: NDArray[np.float32] | None = None
    """(D,) pooled states of the prompt, with the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it. Validation merges EOS into the stop tokens: it is named here too."""
    error: str | None = None
    """Reason for which it ended with "error"."""
    num_outputs: int = 0
    """Tokens delivered so far, the new ones included."""
    metrics: RequestMetrics
    """Metrics of the whole request; the object goes on changing until the request has ended."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class RequestState:
    """A live request. `ended` is never undone: a step in flight checks it at commit."""

    request: EngineRequest
    row: int
    rank: int
    """Arrival order; also the owner id of its blocks."""
    tokens: NDArray[np.int32]
    """(prompt_len + max_tokens,) prompt, then the outputs that the host knows."""
    num_known: int
    """Filled length of `tokens`."""
    prompt_len: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    metrics: RequestMetrics
    constraint: TokenConstraint | None = None
    root: bytes
    """Start of the digests of its prefixes."""
    digests: tuple[list[bytes], ...]
    """By kind, digests of the full groups of its known tokens, as far as they were needed; kinds whose groups are
    equally long share a list."""
    expected_ttft_s: float | None = None
    """Estimate of admission; None: it had nothing to wait for, or no objective."""
    num_found: int = 0
    """Groups found in the prefix cache when it was last scheduled."""
    is_proven: bool = False
    """A token has been good since then: so are the groups that it found."""
    found_kind: int = NO_KIND
    """Kind of the groups that it found: the one that it was last scheduled with."""
    last_kind: int = NO_KIND
    """The kind held last."""
    prompt_scores: PromptScores | None = None
    """Log probabilities of its prompt so far; None: it asked for none, or they have been delivered."""
    pooled: PooledPrompt | None = None
    """Pooled states of its prompt so far; None: it asked for none, or they have been delivered."""
    ended: bool = False

    @property
    def needs_all_states(self) -> bool:
        """True while requested outputs of its prompt are missing: cached positions have neither states nor logits."""
        if self.pooled is not None and self.pooled.needs_all_states:
            return True
        return self.prompt_scores is not None and not self.prompt_scores.is_complete


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class FilledBlocks:
    """Groups that are full once a step in flight has ended; `firsts` and `generations` as for
    `HybridCache.register`."""

    index: int
    """Row of the request in the step."""
    kind: int
    begin: int
    firsts: NDArray[np.int32]
    generations: NDArray[np.int64]


@dataclasses.dataclass(kw_only=True, slots=True)
class InFlightStep:
    """A dispatched step. It holds the requests themselves: a row of the table may have a new request by its commit."""

    handle: StepHandle
    requests: list[RequestState]
    rows: NDArray[np.int32]
    """Rows of the table; those of requests that have not ended are still their own."""
    samples: NDArray[np.bool_]
    position: NDArray[np.int32]
    num_tokens: int
    masked: NDArray[np.int64] | None = None
    """Rows that wait for masks before anything of the step is sampled."""
    kind: NDArray[np.int8]
    filled: list[FilledBlocks]
    dispatched_s: float
    predicted_s: float | None
    """Its time by the cost model; None: this step is not measured."""
    has_chunks: bool
    prompt_targets: Mapping[int, PromptTargets] = dataclasses.field(default_factory=dict)
    """As in the batch."""
    pool_spans: Mapping[int, PoolSpan] = dataclasses.field(default_factory=dict)
    """As in the batch."""
    iteration: Iteration | None
    """Reported when the step has ended; None: there is no listener."""
