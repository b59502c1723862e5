"""Fills the token masks of steps with structured output."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.request_state import InFlightStep
from apt_jax.engine.request_states import RequestStates
from apt_jax.request import TokenConstraint
from apt_jax.structured.compiler import GrammarError

logger = logging.getLogger("apt_jax.engine")

FillMasks = Callable[[Sequence[TokenConstraint], NDArray[np.int32], Sequence[int]], list[bool | Exception]]
"""Fills ``masks[rows[i]]`` for ``constraints[i]``; see `apt_jax.structured.compiler.fill_one_by_one`."""


class MaskFiller:
    """Makes the masks that a dispatched step waits for.

    Args:
        states: requests whose mask cannot be filled end there.
        counters: the time is counted there.
        fill_masks: fills the masks of a step.
        vocab_size: V; None: no request may have a constraint.
        timer: seconds.
    """

    def __init__(
        self,
        states: RequestStates,
        counters: EngineCounters,
        fill_masks: FillMasks,
        vocab_size: int | None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._states = states
        self._counters = counters
        self.fill_masks = fill_masks
        self.num_words = None if vocab_size is None else -(-vocab_size // 32)
        self._timer = timer

    def fill(self, step: InFlightStep) -> NDArray[np.int32]:
        """Fill the masks of a step all of whose earlier tokens are known; ends requests whose constraint leaves nothing.

        Rows whose request has ended, now or before, may sample anything: it is discarded at commit.
        """
        assert step.masked is not None
        assert self.num_words is not None
        started = self._timer()
        states = [step.requests[i] for i in step.masked.tolist()]
        masks = np.full((len(states), self.num_words), -1, np.int32)
        rows = [j for j, state in enumerate(states) if not state.ended]
        constraints = [c for j in rows if (c := states[j].constraint) is not None]
        try:
            outcomes = self.fill_masks(constraints, masks, rows)
        except Exception as error:  # of these requests: the others go on
            outcomes = [error] * len(rows)
        for j, outcome in zip(rows, outcomes, strict=True):
            if outcome is True:
                continue
            masks[j] = -1
            if outcome is False:
                self._states.finish(states[j], "stop")
            else:
                self._states.finish(states[j], "error", error=grammar_error(outcome))
        self._counters.mask_s.add(self._timer() - started)
        step.masked = None
        return masks


def grammar_error(error: Exception) -> str:
    """Return the reason that users see: our own words, or the type of the exception alone."""
    text = str(error) if isinstance(error, GrammarError) else type(error).__name__
    logger.error("the grammar of one request failed: %s", type(error).__name__)
    return f"grammar: {text}"
