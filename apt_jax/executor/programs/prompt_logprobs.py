"""Programs that compute log probabilities of prompt tokens, or sums of hidden states for embeddings; compiled when the
first request asks for them.

A step with `StepBatch.prompt_targets` runs as one program that returns the hidden states of all its tokens
(`Programs.forward_all`). `Programs.score_prompts` then computes logits of a few rows at a time, and from these the log
probabilities of the targets and of the most likely tokens. The logits of a whole prompt are never in memory.

Most servers never need these programs, so the warm-up leaves them out. `PromptPrograms.prepare` compiles them ahead of
time in the caller's thread, while steps run.
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
"""Number of tokens whose logits are in memory at once."""


@dataclasses.dataclass(kw_only=True)
class DispatchedPromptLogprobs:
    """Log probabilities of a dispatched step's prompt tokens.

    Args:
        rows: number of targets by row of the batch, in the order of the device arrays.
        chunks: results of `Programs.score_prompts`; only the last may be padded.
    """

    rows: Mapping[int, int]
    chunks: list[tuple[Array, ...]]

    def result(self) -> dict[int, PromptLogprobs]:
        """Wait for the log probabilities and return them by row."""
        columns = [np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*self.chunks, strict=True)]
        found, at = {}, 0
        for row, count in self.rows.items():
            logprob, rank, ids, values = (column[at : at + count] for column in columns)
            found[row] = PromptLogprobs(logprob=logprob, rank=rank, top_ids=ids, top_logprobs=values)
            at += count
        return found


class PromptPrograms:
    """The programs of steps that return log probabilities of prompts or sums of hidden states.

    Args:
        runner: program runner of the executor.
        buckets: padded numbers of tokens of steps, ascending.
    """

    def __init__(self, runner: ProgramRunner, buckets: list[int]) -> None:
        self._runner, self.buckets = runner, buckets
        self._lock = threading.Lock()
        self._is_ready = False

    def prepare(self) -> None:
        """Compile the programs if they are not compiled yet. May be called from any thread."""
        with self._lock:
            if self._is_ready:
                return
            _logger.info(
                "compiling %s for log probabilities of prompts and for embeddings; the first request for them waits",
                counted(3 * len(self.buckets), "program"),
            )
            for bucket in self.buckets:
                self._runner.empty_forward_all_call(bucket).compile()
                self._runner.empty_score_call(bucket, _ROWS).compile()
                self._runner.empty_pool_call(bucket).compile()
            self._is_ready = True

    def run(self, call: ProgramCall) -> Any:
        """Dispatch one of the programs, compiling it first if needed."""
        if call.key not in self._runner.programs.executables:
            with self._lock:
                call.compile()
        return call.run()

    def score(self, batch: StepBatch, places: NDArray[np.int64], states: Array) -> DispatchedPromptLogprobs:
        """Dispatch the computation of log probabilities of a step's targets.

        Args:
            batch: the step.
            places: (n,) index of each row's first token in `states`.
            states: hidden states of all tokens of the step.
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
        """Dispatch the sums over a step's `pool_spans`; return (max_num_seqs, D) float32, rows as in the batch.
        Arguments: see `score`."""
        segments: Ints = np.full(states.shape[0], self._runner.step_format.max_num_seqs, np.int32)
        for row, span in batch.pool_spans.items():
            first = int(places[row]) + span.position - int(batch.start[row])
            segments[first : first + span.num_tokens] = row
        return self.run(self._runner.pool_call(states, segments))
