"""Dispatched steps, whose results are fetched later."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray

from apt_jax.core.step import NO_TOKEN, StepResult
from apt_jax.executor.base import StepHandle
from apt_jax.executor.programs.prompt_logprobs import DispatchedPromptLogprobs


@dataclasses.dataclass(kw_only=True)
class DeviceStepHandle:
    """A dispatched step. `rows` are the batch rows that sample, in the order of the device arrays."""

    num_rows: int
    rows: NDArray[np.int64]
    tokens: Array | None
    logprobs: tuple[Array, Array, Array] | None
    states: Array | None = None
    """Hidden states of a step without sampling rows; the step has finished when they are ready."""
    prompts: DispatchedPromptLogprobs | None = None
    pooled: tuple[list[int], Array] | None = None
    """Rows that ask for pooled states, and the sums of hidden states by row of the batch."""

    def result(self) -> StepResult:
        result = self._sampled()
        if self.prompts is not None:
            result = dataclasses.replace(result, prompt_logprobs=self.prompts.result())
        if self.pooled is not None:
            rows, sums = self.pooled[0], np.asarray(self.pooled[1])
            result = dataclasses.replace(result, pooled={row: sums[row].copy() for row in rows})
        return result

    def _sampled(self) -> StepResult:
        token_ids = np.full(self.num_rows, NO_TOKEN, np.int32)
        finite = np.ones(self.num_rows, bool)
        if self.tokens is None:
            if self.states is not None:
                self.states.block_until_ready()
            return StepResult(token_ids=token_ids, finite=finite)
        host = np.asarray(self.tokens)
        n = len(self.rows)
        token_ids[self.rows] = host[0, :n]
        finite[self.rows] = host[1, :n] > 0
        if self.logprobs is None:
            return StepResult(token_ids=token_ids, finite=finite)
        chosen, ids, values = (np.asarray(a)[:n] for a in self.logprobs)
        logprob = np.zeros(self.num_rows, np.float32)
        top_ids = np.zeros((self.num_rows, ids.shape[1]), np.int32)
        top_logprobs = np.zeros((self.num_rows, ids.shape[1]), np.float32)
        logprob[self.rows], top_ids[self.rows], top_logprobs[self.rows] = chosen, ids, values
        return StepResult(
            token_ids=token_ids, finite=finite, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedStepHandle:
    """A step dispatched in several parts, each with its rows of the batch."""

    num_rows: int
    parts: Sequence[tuple[NDArray[np.int64], StepHandle]]

    def result(self) -> StepResult:
        results = [(rows, handle.result()) for rows, handle in self.parts]

        def joined(name: str) -> Any:
            given = [(rows, getattr(r, name)) for rows, r in results if getattr(r, name) is not None]
            if not given:
                return None
            first = given[0][1]
            out = np.zeros((self.num_rows, *first.shape[1:]), first.dtype)
            for rows, values in given:
                out[rows] = values
            return out

        arrays = [f.name for f in dataclasses.fields(StepResult) if f.name not in ("prompt_logprobs", "pooled")]
        prompts = {int(rows[place]): given for rows, r in results for place, given in r.prompt_logprobs.items()}
        pooled = {int(rows[place]): given for rows, r in results for place, given in r.pooled.items()}
        return StepResult(**{name: joined(name) for name in arrays}, prompt_logprobs=prompts, pooled=pooled)


@dataclasses.dataclass(kw_only=True)
class PendingMaskHandle:
    """A step whose forward program is dispatched, and whose sampling waits until `sample` provides the masks."""

    dispatch: Callable[[NDArray[np.int32]], DeviceStepHandle]
    sampled: DeviceStepHandle | None = None

    def sample(self, masks: NDArray[np.int32]) -> None:
        self.sampled = self.dispatch(masks)

    def result(self) -> StepResult:
        if self.sampled is None:
            raise RuntimeError("a step with masked rows was not sampled")
        return self.sampled.result()
