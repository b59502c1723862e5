"""Conversion of the engine's outputs to text: incremental outputs, and the complete outputs of the public API."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.engine import StepOutput, TokenLogprobs
from apt_jax.frontend.prompt_entries import prompt_entries
from apt_jax.request import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from apt_jax.text.detokenizer import OutputText
from apt_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(kw_only=True, slots=True)
class OutputDelta:
    """Incremental output of one request, as text. Consecutive deltas can be merged."""

    request: EngineRequest
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry per token if the request asked for log probabilities: the sampled token first, then the most likely
    tokens."""
    cumulative_logprob: float = 0.0
    """Sum of the log probabilities of `token_ids`; 0 without `logprobs`."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of all prompt tokens but the first; only with the first output token, if the request asked for
    them."""
    pooled: NDArray[np.float32] | None = None
    """(D,) pooled states of the prompt; only with the first output token, if the request asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics
    """Metrics of the request; the engine updates them until the request has ended."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def merge(self, later: "OutputDelta") -> None:
        """Append the next delta, which arrived before this delta was read."""
        text, self.text = self.text, ""  # a string grows without a copy only if nothing else refers to it
        text += later.text
        self.text = text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += later.logprobs
        self.cumulative_logprob += later.cumulative_logprob
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.pooled = later.pooled if self.pooled is None else self.pooled
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.metrics = later.error, later.metrics


class OutputAssembler:
    """The engine's `OutputProcessor`: detokenises, looks for stop strings, and makes `OutputDelta`s.

    Requests are keyed by object, not by id, because an id may be reused while the last output of its previous request
    is in flight.

    Args:
        tokenizer: tokenizer of the model; None: outputs have token ids only.
        eos_token_ids: ids that are not reported as a stop reason.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._texts: dict[EngineRequest, OutputText] = {}
        self._logged: dict[EngineRequest, int] = {}
        """Each request's last token that has text; the tokens in its next entry of `logprobs` are decoded as if they
        followed that token."""

    @property
    def num_open(self) -> int:
        """Number of requests whose text is not complete."""
        return len(self._texts)

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Detokenise one token; returns the stop string that it completes, if any."""
        text = self._text(request)
        return None if text is None else text.push(token_id)

    def delta(self, output: StepOutput) -> OutputDelta:
        """Convert an output of the engine to text; call it once per output, in order."""
        request, params = output.request, output.request.params
        text, piece = self._text(request), ""
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if text is not None:
            by_token = finish_reason == "stop" and isinstance(stop_reason, int)
            if by_token and params.include_stop_str_in_output:
                text.push(output.new_token_ids[-1])
            found = text.stop
            piece = text.take(final=output.finished)
            if finish_reason in ("stop", "length") and text.stop != found:  # completed by U+FFFD at the end
                finish_reason, stop_reason = "stop", text.stop
        if isinstance(stop_reason, int) and stop_reason in self._eos_token_ids:
            stop_reason = None
        logprobs, total = None, 0.0
        if output.logprobs is not None:
            pairs = list(zip(output.new_token_ids, output.logprobs, strict=True))
            logprobs = [self._logprobs(request, token_id, entry) for token_id, entry in pairs]
            total = sum(entry.logprob for _, entry in pairs)
        if output.finished:
            self._texts.pop(request, None)
            self._logged.pop(request, None)
        return OutputDelta(
            request=request,
            text=piece,
            token_ids=list(output.new_token_ids),
            logprobs=logprobs,
            cumulative_logprob=total,
            prompt_logprobs=output.prompt_logprobs,
            pooled=output.pooled,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=output.error,
            metrics=output.metrics,
        )

    def _text(self, request: EngineRequest) -> OutputText | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(request)
        if text is None:
            params = request.params
            text = self._texts[request] = OutputText(
                self._tokenizer,
                request.prompt_token_ids,
                stop=params.stop,
                min_tokens=params.min_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                own_bytes_only=request.grammar is not None,  # a grammar describes the output's own bytes only
            )
        return text

    def _logprobs(self, request: EngineRequest, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        top = dict(zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True))
        ranks = {top_id: rank for rank, top_id in enumerate(top, 1)}
        values = {token_id: entry.logprob, **{t: v for t, v in top.items() if t != token_id}}
        tokenizer = self._tokenizer
        if tokenizer is None:
            return {t: Logprob(logprob=v, rank=ranks.get(t), decoded_token=None) for t, v in values.items()}
        after = self._logged.get(request)
        if after is None:
            after = tokenizer.last_text_id(request.prompt_token_ids)
        if token_id not in tokenizer.special_ids or not request.params.skip_special_tokens:
            self._logged[request] = token_id
        return {
            t: Logprob(logprob=v, rank=ranks.get(t), decoded_token=tokenizer.token_text(t, after))
            for t, v in values.items()
        }


class RequestState:
    """Accumulates the deltas of one request into its output so far.

    Args:
        request: request that the output belongs to.
        tokenizer: decodes the tokens in prompt log probabilities; None: they get no text.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None = None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob = 0.0
        self._pooled: NDArray[np.float32] | None = None
        self._last: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        self._parts.append(delta.text)
        self._token_ids += delta.token_ids
        self._cumulative_logprob += delta.cumulative_logprob
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            token_ids = self.request.prompt_token_ids.tolist()
            self._prompt_logprobs = prompt_entries(token_ids, delta.prompt_logprobs, self._tokenizer)
        if delta.pooled is not None:
            self._pooled = delta.pooled
        self._last = delta

    def output(self) -> RequestOutput:
        """Return a snapshot of the output; later deltas do not change it."""
        request, last = self.request, self._last
        self._parts = ["".join(self._parts)]
        metrics = (
            RequestMetrics(arrival_s=request.arrival_s, slo=request.slo)
            if last is None
            else dataclasses.replace(last.metrics, token_times_s=last.metrics.token_times_s[: len(self._token_ids)])
        )
        return RequestOutput(
            request_id=request.label,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[
                CompletionOutput(
                    index=0,
                    text=self._parts[0],
                    token_ids=list(self._token_ids),
                    cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
                    logprobs=None if self._logprobs is None else list(self._logprobs),
                    finish_reason=last.finish_reason if last else None,
                    stop_reason=last.stop_reason if last else None,
                )
            ],
            finished=last is not None and last.finished,
            metrics=metrics,
            error=last.error if last else None,
            prompt_logprobs=self._prompt_logprobs,
            pooled=self._pooled,
        )
