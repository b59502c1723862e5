"""Log probabilities of one request's prompt, collected step by step.

Committed log probabilities are kept when the request is preempted. Until all of them are known, the request uses no
cached prefix, because cached positions have no logits; the positions that it computes are cached for others as usual.
"""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import PromptTargets
from apt_jax.request import PromptLogprobs


class PromptScores:
    """Log probabilities of a prompt so far; takes 2 `num_top` + 2 numbers per token in host memory.

    Args:
        token_ids: (prompt_len,) the prompt.
        num_top: number of most likely tokens to keep per prompt token.
    """

    def __init__(self, token_ids: NDArray[np.int32], num_top: int) -> None:
        self._targets = token_ids[1:]
        self._num_top = num_top
        self._parts: list[PromptLogprobs] = []
        self.num_done = 0
        """Number of tokens with committed log probabilities; tokens are committed in order."""

    @property
    def is_complete(self) -> bool:
        return self.num_done == self._targets.size

    def targets(self, start: int, num_tokens: int) -> PromptTargets | None:
        """Return the tokens whose log probabilities a step that computes `[start, start + num_tokens)` must return;
        None: it need not return any."""
        begin, end = max(start, self.num_done), min(start + num_tokens, self._targets.size)
        return PromptTargets(position=begin, token_ids=self._targets[begin:end]) if begin < end else None

    def add(self, targets: PromptTargets, found: PromptLogprobs) -> bool:
        """Store the log probabilities that a step has returned, except for tokens that already have them.

        Returns:
            False: a log probability is NaN, and none was stored.

        Raises:
            ValueError: log probabilities of earlier tokens are missing.
        """
        if targets.position > self.num_done:
            raise ValueError(f"log probabilities start at position {targets.position}, expected {self.num_done}")
        known = self.num_done - targets.position
        if known >= targets.token_ids.size:
            return True
        part = PromptLogprobs(
            logprob=found.logprob[known:],
            rank=found.rank[known:],
            top_ids=found.top_ids[known:, : self._num_top].copy(),
            top_logprobs=found.top_logprobs[known:, : self._num_top].copy(),
        )
        if np.isnan(part.logprob).any():
            return False
        self._parts.append(part)
        self.num_done += part.logprob.size
        return True

    def joined(self) -> PromptLogprobs:
        """Return the log probabilities of the whole prompt."""
        empty = PromptLogprobs(
            logprob=np.zeros(0, np.float32),
            rank=np.zeros(0, np.int32),
            top_ids=np.zeros((0, self._num_top), np.int32),
            top_logprobs=np.zeros((0, self._num_top), np.float32),
        )
        parts = self._parts or [empty]
        return PromptLogprobs(
            logprob=np.concatenate([p.logprob for p in parts]),
            rank=np.concatenate([p.rank for p in parts]),
            top_ids=np.concatenate([p.top_ids for p in parts]),
            top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        )
