"""Pooled hidden states of one request's prompt, summed step by step.

The device sums the states of a step's tokens; these sums are added up here. A sum cannot be taken apart, so each
position is asked of one step only: what a preempted request computes again is not summed again.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import PoolSpan


class PooledPrompt:
    """The pooled states of a prompt so far.

    Args:
        prompt_len: tokens of the prompt.
        pooling: "mean" over all tokens, or the "last" token's state.
    """

    def __init__(self, prompt_len: int, pooling: Literal["mean", "last"]) -> None:
        self._first = 0 if pooling == "mean" else prompt_len - 1
        self._end = prompt_len
        self._num_asked = self._num_done = self._first
        self._sum: NDArray[np.float32] | None = None

    @property
    def needs_all_states(self) -> bool:
        """True while states before the last token's are missing: cached positions have none."""
        return self._num_done < self._end - 1

    @property
    def is_complete(self) -> bool:
        return self._num_done == self._end

    def take_span(self, start: int, num_tokens: int) -> PoolSpan | None:
        """The positions that a step is to sum which computes `[start, start + num_tokens)`; no later step is asked for
        them. None: nothing is missing there."""
        begin, end = max(start, self._num_asked), min(start + num_tokens, self._end)
        if begin >= end:
            return None
        self._num_asked = end
        return PoolSpan(position=begin, num_tokens=end - begin)

    def forget_asked(self) -> None:
        """The steps that were asked will never answer: ask again."""
        self._num_asked = self._num_done

    def add(self, span: PoolSpan, summed: NDArray[np.float32]) -> bool:
        """Add the (D,) sum that a step has returned.

        Returns:
            False: the model's output is not finite.

        Raises:
            ValueError: it does not follow what is there.
        """
        if span.position != self._num_done:
            raise ValueError(f"states from position {span.position} arrive after {self._num_done}")
        if not np.isfinite(summed).all():
            return False
        self._sum = summed if self._sum is None else self._sum + summed
        self._num_done += span.num_tokens
        return True

    def result(self) -> NDArray[np.float32]:
        """(D,) the pooled states, when they are complete."""
        assert self._sum is not None
        return self._sum / np.float32(self._end - self._first)
