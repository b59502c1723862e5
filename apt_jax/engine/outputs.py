"""What the engine delivers: tokens, log probabilities and the ends of requests."""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.request import EngineRequest, FinishReason, RequestMetrics


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
    """Incremental output of one request. A request has any number of these, and exactly one, the last, with a `finish_reason`."""

    request: EngineRequest
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token where the request asked for it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it. Validation merges EOS into the stop tokens: it is named here too."""
    error: str | None = None
    """Why it ended with "error"."""
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
