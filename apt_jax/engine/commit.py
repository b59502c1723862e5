"""Commits a step: delivers its tokens, ends finished requests, and registers the prefixes that it has filled."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.core.kinds import WINDOWED
from apt_jax.core.step import NO_TOKEN, StepResult
from apt_jax.engine.admission import Admission
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.request_state import InFlightStep, OutputProcessor, RequestState, StepOutput, TokenLogprobs
from apt_jax.engine.request_states import WAITING, RequestStates
from apt_jax.errors import EXCLUDED
from apt_jax.request import EngineRequest, FinishReason, PromptLogprobs, SamplingParams, TokenConstraint
from apt_jax.structured.constraint import GrammarError, NoTokenLeftError
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

_NOT_FINITE = "numeric: the model's output for this request is not finite"
_OUT_OF_VOCABULARY = "numeric: a token outside the vocabulary was sampled"


def finish_reason(
    token: int,
    count: int,
    params: SamplingParams,
    stop_token_ids: frozenset[int],
    stop_string: str | None,
    constraint_ended: bool,
) -> tuple[FinishReason | None, int | str | None]:
    """Return the finish reason of a request after a new token, if this is its last token.

    Args:
        token: the new token.
        count: number of output tokens of the request, including the new token.
        params: sampling parameters; before `min_tokens`, stop tokens and stop strings do not end a request.
        stop_token_ids: stop tokens of the request.
        stop_string: stop string that the token has completed; None: no stop string.
        constraint_ended: True: the output is complete according to its constraint.

    Returns:
        The reason (None: the request continues), and the stop token or stop string if that is the cause. If several
        reasons apply, the first in this order is returned: stop token, stop string, constraint, length.
    """
    if count >= params.min_tokens:
        if token in stop_token_ids:
            return "stop", token
        if stop_string is not None:
            return "stop", stop_string
    if constraint_ended:
        return "stop", None
    return ("length" if count >= params.max_tokens else None), None


class TokenCommitter:
    """Delivers the tokens of steps.

    Args:
        states: the requests; receives the outputs and ends requests.
        cache: registers the prefixes.
        clock: the current time.
        counters: counts the tokens.
        admission: receives the measured TTFT of requests.
        output_processor: the front end's hook for every token.
        vocab_size: V; a sampled token outside [0, V) ends its request.
        lengths_only: deliver only the last output of each request.
    """

    def __init__(
        self,
        states: RequestStates,
        cache: HybridCache,
        clock: Clock,
        counters: EngineCounters,
        admission: Admission,
        output_processor: OutputProcessor | None,
        vocab_size: int,
        *,
        lengths_only: bool,
    ) -> None:
        self._states = states
        self._cache = cache
        self._clock = clock
        self._counters = counters
        self._admission = admission
        self._output_processor = output_processor
        self._vocab_size = vocab_size
        self._lengths_only = lengths_only

    def commit(self, step: InFlightStep, result: StepResult) -> None:
        """Deliver the tokens of a step and end finished requests."""
        states, requests = self._states, step.requests
        if step.prompt_targets:
            self._keep_prompt_logprobs(step, result)
        if step.pool_spans:
            self._keep_pooled(step, result)
        has_prefixes = self._cache.prefixes is not None
        if has_prefixes:
            self._commit_prefixes(step, result)
        sampling = np.flatnonzero(step.samples)
        picks = [i for i in sampling.tolist() if not requests[i].ended]
        self._counters.num_discarded_tokens += sampling.size - len(picks)
        if not picks:
            return
        now_s = self._clock.now_s()
        rows, sampled = step.rows, result.token_ids
        if len(picks) < rows.size:
            rows, sampled = rows[picks], sampled[picks]
        states.in_flight[rows] -= 1
        states.last_token[rows] = sampled
        states.table.record_tokens(rows, now_s)
        token_ids, finite, position = result.token_ids.tolist(), result.finite.tolist(), step.position.tolist()
        for i in picks:
            state, token = requests[i], token_ids[i]
            if state.ended:  # by the output processor of an earlier row
                self._counters.num_discarded_tokens += 1
            elif not finite[i]:
                states.finish(state, "error", error=_NOT_FINITE)
            elif token == NO_TOKEN and state.constraint is not None:
                states.finish(state, "error", error=_nothing_left(state.request))
            elif not 0 <= token < self._vocab_size:
                states.finish(state, "error", error=_OUT_OF_VOCABULARY)
            else:
                if position[i] != state.num_known - state.prompt_len:
                    raise CacheIntegrityError(
                        f"output token {position[i]} arrived, expected {state.num_known - state.prompt_len}"
                    )
                k = state.params.logprobs
                self._deliver(state, token, now_s, None if k is None else _logprobs(k, result, i))
                if has_prefixes and not state.ended and states.status[state.row] == WAITING:
                    states.await_hits(state)  # it was preempted; now all its tokens are known

    def _keep_prompt_logprobs(self, step: InFlightStep, result: StepResult) -> None:
        """Store log probabilities of prompts, and end requests whose log probabilities are not finite."""
        for row, targets in step.prompt_targets.items():
            state = step.requests[row]
            if state.ended or state.prompt_scores is None:
                continue
            try:
                finite = state.prompt_scores.add(targets, result.prompt_logprobs[row])
            except (KeyError, ValueError) as error:
                raise CacheIntegrityError(f"log probabilities of a prompt are missing: {error}") from error
            if not finite:
                self._states.finish(state, "error", error=_NOT_FINITE)
            elif state.prompt_scores.is_complete and self._states.status[state.row] == WAITING:
                self._states.await_hits(state)  # it was preempted; from now on it may use cached prefixes

    def _keep_pooled(self, step: InFlightStep, result: StepResult) -> None:
        """Add a step's sums of hidden states to the pooled states of prompts, and end requests whose sums are not
        finite."""
        for row, span in step.pool_spans.items():
            state = step.requests[row]
            if state.ended or state.pooled is None:
                continue
            try:
                finite = state.pooled.add(span, result.pooled[row])
            except (KeyError, ValueError) as error:
                raise CacheIntegrityError(f"pooled states of a prompt are missing: {error}") from error
            if not finite:
                self._states.finish(state, "error", error=_NOT_FINITE)
            elif state.pooled.is_complete and self._states.status[state.row] == WAITING:
                self._states.await_hits(state)

    def _deliver(self, state: RequestState, token: int, now_s: float, logprobs: list[TokenLogprobs] | None) -> None:
        """Deliver one token, and end the request if this is its last token."""
        params, known, counters = state.params, state.num_known, self._counters
        count = known - state.prompt_len + 1
        stop_string: str | None = None
        constraint_ended = False
        error: str | None = None
        if (self._output_processor is not None or state.constraint is not None) and not (
            token in state.stop_token_ids and count >= params.min_tokens
        ):
            stop_string, constraint_ended, error = self._process(state, token)
            if state.ended:  # the processor aborted this request; its last output is already queued
                counters.num_discarded_tokens += 1
                return
        if error is None:
            reason, stop = finish_reason(token, count, params, state.stop_token_ids, stop_string, constraint_ended)
        else:
            reason, stop = "error", None
        state.tokens[known] = token
        state.num_known = known + 1
        state.metrics.token_times_s.append(now_s)
        if state.expected_ttft_s is not None:
            self._admission.learn(state.expected_ttft_s, now_s - state.metrics.arrival_s, now_s)
            state.expected_ttft_s = None
        counters.generation_tokens += 1
        tenant = state.request.tenant
        if tenant is not None:
            counters.tenant_generation_tokens[tenant] += 1
        prompt_logprobs: PromptLogprobs | None = None
        pooled: NDArray[np.float32] | None = None
        if count == 1:
            if state.pooled is not None and not self._lengths_only:
                if not state.pooled.is_complete:
                    raise CacheIntegrityError("a first token arrived before the pooled states of its prompt")
                pooled, state.pooled = state.pooled.result(), None
            counters.prompt_tokens += state.prompt_len
            if tenant is not None:
                counters.tenant_prompt_tokens[tenant] += state.prompt_len
            if state.request.slo_class == "be":
                counters.best_effort_prompt_tokens += state.prompt_len
            if state.prompt_scores is not None and not self._lengths_only:
                if not state.prompt_scores.is_complete:
                    raise CacheIntegrityError("a first token arrived before the log probabilities of its prompt")
                prompt_logprobs, state.prompt_scores = state.prompt_scores.joined(), None
        if reason is not None:
            self._states.finish(
                state,
                reason,
                stop_reason=stop,
                error=error,
                new_token_ids=[token],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                pooled=pooled,
            )
        elif not self._lengths_only:
            self._states.outputs.append(
                StepOutput(
                    request=state.request,
                    new_token_ids=[token],
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    pooled=pooled,
                    num_outputs=count,
                    metrics=state.metrics,
                )
            )

    def _process(self, state: RequestState, token: int) -> tuple[str | None, bool, str | None]:
        """Pass a token to the output processor and the constraint.

        Returns:
            The stop string that the token completed (or None), True if the output is complete according to the
            constraint, and an error message (or None).
        """
        stop_string: str | None = None
        if self._output_processor is not None:
            try:
                stop_string = self._output_processor.on_token(state.request, token)
            except Exception as caught:
                name = type(caught).__name__
                logger.error("the output processor failed for one request: %s", name)
                return None, False, f"output processing failed: {name}"
            if state.ended:
                return None, False, None
        if state.constraint is None:
            return stop_string, False, None
        try:
            state.constraint.accept(token)
            return stop_string, state.constraint.ended, None
        except Exception as caught:
            return None, False, grammar_error(caught)

    def _commit_prefixes(self, step: InFlightStep, result: StepResult) -> None:
        """Register the groups that a step has filled, except groups of ended requests.

        If a request's token is invalid, discard the groups filled for it and drop the groups that it has registered.
        Also drop the cached prefix that it reused, unless an earlier valid token of the request confirmed the prefix.
        """
        cache = self._cache
        good = result.finite & (result.token_ids >= 0) & (result.token_ids < self._vocab_size)
        for filled in step.filled:
            state = step.requests[filled.index]
            if state.ended or not good[filled.index]:
                cache.discard(filled.firsts, filled.generations)
                continue
            digests = self._states.prefixes.digests(state, filled.kind, filled.begin + filled.firsts.size)
            cache.register(state.rank, filled.kind, digests, filled.begin, filled.firsts, filled.generations)
        # If a mask allows no token, the cache may still be valid.
        bad = step.samples & ~good & ~(result.finite & (result.token_ids == NO_TOKEN))
        for i in np.flatnonzero(step.samples).tolist() if bad.any() else ():
            state = step.requests[i]
            if bad[i] and not state.ended:
                # Only a valid token shows that the cached prefix it found is valid.
                begin = state.num_found if state.is_proven else 0
                kind, found_kind = int(step.kind[i]), state.found_kind
                cache.drop_prefix(found_kind, state.digests[found_kind], begin)
                if cache.windows is not None:
                    positions = begin * cache.block_sizes[found_kind]
                    cache.drop_prefix(WINDOWED, state.digests[WINDOWED], positions // cache.windows.spec.block_size)
                if kind != found_kind:  # it was converted, so it computed all groups of this kind
                    cache.drop_prefix(kind, state.digests[kind], 0)
        for i in np.flatnonzero(step.samples & good).tolist():
            step.requests[i].is_proven = True
        if cache.ownership_changed:
            self._states.sync_charges()


def _logprobs(k: int, result: StepResult, i: int) -> list[TokenLogprobs] | None:
    """Return the log probabilities of row `i`: of its token and of the `k` most likely tokens; None: the executor
    returned none."""
    if result.logprob is None:
        return None
    top_ids = np.zeros(0, np.int32) if result.top_ids is None else result.top_ids[i, :k]
    top_logprobs = np.zeros(0, np.float32) if result.top_logprobs is None else result.top_logprobs[i, :k]
    return [TokenLogprobs(logprob=float(result.logprob[i]), top_ids=top_ids, top_logprobs=top_logprobs)]


FillMasks = Callable[[Sequence[TokenConstraint], NDArray[np.int32], Sequence[int]], list[bool | Exception]]
"""Function that fills ``masks[rows[i]]`` for ``constraints[i]``; see
`apt_jax.structured.constraint.fill_one_by_one`."""


class StepMasks:
    """Fills the token masks that a dispatched step waits for.

    Args:
        states: the requests; a request ends if its mask allows no token or cannot be filled.
        counters: records the time spent.
        fill_masks: fills the masks of a step.
        vocab_size: V; None: no request may have a constraint.
    """

    def __init__(
        self,
        states: RequestStates,
        counters: EngineCounters,
        fill_masks: FillMasks,
        vocab_size: int | None,
    ) -> None:
        self._states = states
        self._counters = counters
        self.fill_masks = fill_masks
        self.num_words = None if vocab_size is None else -(-vocab_size // 32)

    def fill(self, step: InFlightStep) -> NDArray[np.int32]:
        """Fill the masks of a step, and end requests whose constraint allows no token. All earlier tokens must be
        known.

        Rows of ended requests may sample any token: it is discarded at commit.
        """
        assert step.masked is not None
        assert self.num_words is not None
        started = time.perf_counter()
        states = [step.requests[i] for i in step.masked.tolist()]
        masks = np.full((len(states), self.num_words), -1, np.int32)
        rows = [j for j, state in enumerate(states) if not state.ended]
        constraints = [c for j in rows if (c := states[j].constraint) is not None]
        try:
            outcomes = self.fill_masks(constraints, masks, rows)
        except Exception as error:  # only requests with masks fail
            outcomes = [error] * len(rows)
        for j, outcome in zip(rows, outcomes, strict=True):
            if outcome is True:
                continue
            masks[j] = -1
            if outcome is False:
                self._states.finish(states[j], "stop")
            else:
                self._states.finish(states[j], "error", error=grammar_error(outcome))
        self._counters.mask_s.add(time.perf_counter() - started)
        step.masked = None
        return masks


def _nothing_left(request: EngineRequest) -> str:
    field = "bad_words" if request.params.allowed_token_ids is None else "allowed_token_ids"
    if request.grammar is not None:
        field = "structured_outputs"
    return f"{EXCLUDED}{field}: allows no token here, given min_tokens, stop tokens and logit_bias"


def grammar_error(error: Exception) -> str:
    """Return the reason shown to users: the message of our own exceptions, otherwise only the exception type."""
    if isinstance(error, NoTokenLeftError):
        return f"{EXCLUDED}{error}"
    text = str(error) if isinstance(error, GrammarError) else type(error).__name__
    logger.error("the grammar of one request failed: %s", type(error).__name__)
    return f"grammar: {text}"
