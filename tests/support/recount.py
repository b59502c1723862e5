"""A second set of books: counters and columns of the engine, counted again from what it dispatches."""

import collections
from typing import Any

import numpy as np

from apt_jax.engine import Engine
from apt_jax.engine.request_states import RUNNING, WAITING
from apt_jax.request import EngineRequest


class Recount:
    """Counts what an engine dispatches, preempts and loses; `check` compares.

    Args:
        engine: fresh; some of its methods are wrapped.

    Attributes:
        scheduled: requests that have taken part in a step, and in how many.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduled: collections.Counter[EngineRequest] = collections.Counter()
        self._computed: dict[EngineRequest, int] = {}
        """Positions that have been computed, or found, at some time."""
        self._since_loss: collections.Counter[EngineRequest] = collections.Counter()
        """Tokens sampled since the cache was last lost."""
        self._recomputed: collections.Counter[EngineRequest] = collections.Counter()
        self.num_recomputed = 0
        states: Any = engine.states
        self._execute = engine._steps.execute
        self._preempt, self._lose_cache = states.preempt, states.lose_cache
        engine._steps.execute = self._note_step
        states.preempt, states.lose_cache = self._note_preemption, self._note_loss

    def _note_step(self, plan, batch, rows, requests, costs):
        dispatched = self._execute(plan, batch, rows, requests, costs)
        spans = zip(requests, batch.start.tolist(), batch.num_tokens.tolist(), batch.samples.tolist(), strict=True)
        for state, start, num_tokens, samples in spans:
            request = state.request
            self.scheduled[request] += 1
            before = self._computed.get(request, 0)
            if dispatched is None:
                self._computed[request] = max(before, start)  # found cached, and nothing computed
                continue
            again = max(min(start + num_tokens, before) - start, 0)
            self._recomputed[request] += again
            self.num_recomputed += again
            self._computed[request] = max(before, start + num_tokens)
            self._since_loss[request] += samples
        return dispatched

    def _note_preemption(self, row: int, *cause: Any) -> None:
        self._preempt(row, *cause)
        self._since_loss[self._engine.states.state(row).request] = 0

    def _note_loss(self) -> None:
        self._lose_cache()
        self._since_loss.clear()

    def check(self, *, gauges: bool = True) -> list[str]:
        """Return what differs, as lines.

        Args:
            gauges: `Engine.stats` too, which takes longer.
        """
        engine, states, table = self._engine, self._engine.states, self._engine.table
        wrong: list[str] = []

        def compare(name: str, value: object, recounted: object) -> None:
            if value != recounted:
                wrong.append(f"{name} is {value}, counted again {recounted}")

        for state in states.by_id.values():
            request = state.request
            name = request.request_id
            compare(
                f"{name}: tokens_since_preemption",
                int(table.tokens_since_preemption[state.row]),
                self._since_loss[request],
            )
            compare(f"{name}: recomputed_tokens", state.metrics.recomputed_tokens, self._recomputed[request])
        compare("recomputed_tokens", engine._counters.recomputed_tokens, self.num_recomputed)
        if not gauges:
            return wrong
        stats = engine.stats()
        by_status = collections.Counter(int(states.status[state.row]) for state in states.by_id.values())
        waiting = [s for s in states.by_id.values() if states.status[s.row] == WAITING]
        compare("recomputed_by_cause", sum(stats.recomputed_by_cause.values()), self.num_recomputed)
        compare("num_waiting", stats.num_waiting, by_status[WAITING])
        compare("num_running", stats.num_running, by_status[RUNNING])
        compare("waiting_prompt_tokens", stats.waiting_prompt_tokens, sum(s.prompt_len for s in waiting))
        compare("requests_by_kind", sum(stats.requests_by_kind.values()), by_status[RUNNING])
        # A shared block counts once for the pool and once a holder for the table.
        windows = engine.cache.windows
        tables = [engine.cache.tables, *([] if windows is None else [windows.tables])]
        held = {int(block) for table in tables for block in np.unique(table[engine.cache.owner >= 0])} - {0}
        compare("used_blocks", stats.used_blocks, len(held))
        if not states.by_id:
            self._forget()
        return wrong

    def _forget(self) -> None:
        """Nothing lives: the requests of the past need not be kept."""
        for counts in (self._computed, self._since_loss, self._recomputed):
            counts.clear()
