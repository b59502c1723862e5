"""Pooled hidden states of one request's prompt, summed step by step.

The device sums the states of a step's tokens; this module adds these sums. A sum cannot be split, so each position is
requested from only one step: positions that a preempted request computes again are not summed again.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import PoolSpan


class PooledPrompt:
    """Sum of the hidden states of a prompt so far.

    Args:
        prompt_len: number of tokens in the prompt.
        pooling: "mean" for the mean over all tokens, or "last" for the state of the last token.
    """

    def __init__(self, prompt_len: int, pooling: Literal["mean", "last"]) -> None:
        self._first = 0 if pooling == "mean" else prompt_len - 1
        self._end = prompt_len
        self._num_asked = self._num_done = self._first
        self._sum: NDArray[np.float32] | None = None

    @property
    def needs_all_states(self) -> bool:
        """True while states of tokens before the last token are missing. Meanwhile no cached prefix can be used,
        because cached positions have no such states."""
        return self._num_done < self._end - 1

    @property
    def is_complete(self) -> bool:
        return self._num_done == self._end

    def take_span(self, start: int, num_tokens: int) -> PoolSpan | None:
        """Return the positions to sum in a step that computes `[start, start + num_tokens)`, and mark them as
        requested. None: all of them have already been requested, or need not be summed."""
        begin, end = max(start, self._num_asked), min(start + num_tokens, self._end)
        if begin >= end:
            return None
        self._num_asked = end
        return PoolSpan(position=begin, num_tokens=end - begin)

    def forget_asked(self) -> None:
        """Mark sums that have not arrived as not requested, after their steps have failed."""
        self._num_asked = self._num_done

    def add(self, span: PoolSpan, summed: NDArray[np.float32]) -> bool:
        """Add the (D,) sum that a step has returned.

        Returns:
            False: the sum is not finite, and was not added.

        Raises:
            ValueError: `span` does not follow the positions summed so far.
        """
        if span.position != self._num_done:
            raise ValueError(f"states start at position {span.position}, expected {self._num_done}")
        if not np.isfinite(summed).all():
            return False
        self._sum = summed if self._sum is None else self._sum + summed
        self._num_done += span.num_tokens
        return True

    def result(self) -> NDArray[np.float32]:
        """Return the (D,) pooled states; `is_complete` must be True."""
        assert self._sum is not None
        return self._sum / np.float32(self._end - self._first)
