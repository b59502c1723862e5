"""Log probabilities of prompt tokens: the programs that compute them, compiled when the first request asks for them.

A step with `StepBatch.prompt_targets` runs as one program that gives the hidden states of all its tokens
(`Programs.forward_all`). Then `Programs.score_prompts` turns them into logits, a few rows at a time, and these into the
log probabilities of the targets and of the most likely tokens: the logits of a whole prompt are never in memory.

Most servers never need them, so they are no part of the warm-up: `PromptPrograms.prepare` compiles them in the thread of
its caller, ahead of time and beside the steps that run.
"""

import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray

from apt_jax.core.step import StepBatch
from apt_jax.errors import counted
from apt_jax.executor.programs.packing import Ints
from apt_jax.executor.programs.runner import ProgramCall, ProgramRunner
from apt_jax.request import PromptLogprobs

_logger = logging.getLogger(__name__)

_ROWS = 128
"""Tokens whose logits are in memory at once."""


@dataclasses.dataclass(kw_only=True)
class DispatchedPromptLogprobs:
    """Log probabilities of a dispatched step's prompt tokens.

    Args:
        rows: number of targets by row of the batch, in the order of the device arrays.
        chunks: results of `Programs.score_prompts`; all full but the last.
    """

    rows: Mapping[int, int]
    chunks: list[tuple[Array, ...]]

    def result(self) -> dict[int, PromptLogprobs]:
        """Wait for them and fetch them."""
        columns = [np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*self.chunks, strict=True)]
        found, at = {}, 0
        for row, count in self.rows.items():
            logprob, rank, ids, values = (column[at : at + count] for column in columns)
            found[row] = PromptLogprobs(logprob=logprob, rank=rank, top_ids=ids, top_logprobs=values)
            at += count
        return found


class PromptPrograms:
    """The programs of steps with prompt targets, compiled ahead of time.

    Args:
        runner: of the executor.
        buckets: padded numbers of tokens that steps have, ascending.
    """

    def __init__(self, runner: ProgramRunner, buckets: list[int]) -> None:
        self._runner, self.buckets = runner, buckets
        self._lock = threading.Lock()
        self._is_ready = False

    def prepare(self) -> None:
        """Compile them, unless that has been done; from any thread."""
        with self._lock:
            if self._is_ready:
                return
            _logger.info(
                "compiling %s for log probabilities of prompts and for embeddings, which the first request for them waits for",
                counted(3 * len(self.buckets), "program"),
            )
            for bucket in self.buckets:
                self._runner.empty_forward_all_call(bucket).compile()
                self._runner.empty_score_call(bucket, _ROWS).compile()
                self._runner.empty_pool_call(bucket).compile()
            self._is_ready = True

    def run(self, call: ProgramCall) -> Any:
        """Dispatch one of them, compiled here if it is not yet."""
        if call.key not in self._runner.programs.executables:
            with self._lock:
                call.compile()
        return call.run()

    def score(self, batch: StepBatch, places: NDArray[np.int64], states: Array) -> DispatchedPromptLogprobs:
        """Dispatch the log probabilities of a step's targets.

        Args:
            batch: the step.
            places: (n,) of the first token of each row among `states`.
            states: of all its tokens.
        """
        tokens = [targets.token_ids for targets in batch.prompt_targets.values()]
        first = [places[row] + t.position - batch.start[row] for row, t in batch.prompt_targets.items()]
        rows = np.concatenate([at + np.arange(ids.size) for at, ids in zip(first, tokens, strict=True)])
        pairs = np.stack([rows, np.concatenate(tokens)]).astype(np.int32)
        chunks = []
        for begin in range(0, pairs.shape[1], _ROWS):
            ints: Ints = np.zeros((2, _ROWS), np.int32)
            part = pairs[:, begin : begin + _ROWS]
            ints[:, : part.shape[1]] = part
            chunks.append(self.run(self._runner.score_call(states, ints, _ROWS)))
        return DispatchedPromptLogprobs(
            rows={row: t.token_ids.size for row, t in batch.prompt_targets.items()}, chunks=chunks
        )

    def pool(self, batch: StepBatch, places: NDArray[np.int64], states: Array) -> Array:
        """Dispatch the sums of a step's spans; arguments as of `score`. Gives (max_num_seqs, D) float32, rows as in
        the batch."""
        segments: Ints = np.full(states.shape[0], self._runner.step_format.max_num_seqs, np.int32)
        for row, span in batch.pool_spans.items():
            first = int(places[row]) + span.position - int(batch.start[row])
            segments[first : first + span.num_tokens] = row
        return self.run(self._runner.pool_call(states, segments))
