"""Responses of OpenAI's completions and chat completions, streamed as chunks or sent as one body."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.prompt_entries import prompt_entries
from apt_jax.metrics import RequestRecord
from apt_jax.request import Logprob, RequestMetrics
from apt_jax.text.detokenizer import IncrementalDetokenizer
from serve.compact_json import json_bytes
from serve.http_api.errors import HttpError
from serve.http_api.openai_request import CompletionCall
from serve.http_api.tool_calls.openai_message import OpenAIMessage

_LEAST_LOGPROB = -9999.0
"""Value that replaces minus infinity, which JSON cannot express; the same as in vLLM."""


class CompletionResponseBuilder:
    """Builds the response to one call, as chunks or as one object.

    Args:
        parts: the engine's components.
        call: the call from `serve.http_api.openai_request.read_call`.
    """

    def __init__(self, parts: EngineComponents, call: CompletionCall) -> None:
        self._parts, self._call = parts, call
        self._is_chat = call.kind == "chat"
        count = len(call.requests)
        self._begun = [False] * count
        self._text_len = [len(self._echo(i)) for i in range(count)]
        """For each choice, the number of characters before its next token, for `text_offset`."""
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        """Detokenizer of each choice with log probabilities."""
        self._num_tokens = [0] * count
        self._num_cached = [0] * count
        self._messages = [
            OpenAIMessage(
                call.output.parser(),
                call.output.custom_tools,
                only_calls=call.output.only_calls,
                old_form=call.functions,
            )
            for _ in range(count if self._is_chat else 0)
        ]
        """Message of each choice; empty for completions."""
        self._around: list[tuple[bytes, bytes] | None] = [None] * count
        """Encoded JSON before and after the text of a chunk, per choice; reused by chunks that differ only in text."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all choices so far."""
        return sum(self._num_tokens)

    def event(self, index: int, delta: OutputDelta) -> bytes:
        """Return the next chunk of choice `index` as JSON. Chunks between the first and the last usually differ only in
        their text, so the rest is encoded only once."""
        call, begun = self._call, self._begun[index]
        varies = call.token_ids or call.continuous_usage or delta.logprobs is not None or not call.output.is_plain
        if varies or delta.finished or not begun:
            return json_bytes(self.chunk(index, delta))
        around, text = self._around[index], json_bytes(delta.text)
        if around is not None:
            self._count(index, delta)
            return text.join(around)
        whole = json_bytes(self.chunk(index, delta))
        # No string in the JSON can contain this key, because its quotes would be escaped.
        before, key, rest = whole.partition(b'"content":' if self._is_chat else b'"text":')
        self._around[index] = before + key, rest[len(text) :]
        return whole

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """Return the next chunk of choice `index`."""
        delta = self._shown(delta)
        self._count(index, delta)
        choice: dict[str, Any] = {"index": index}
        text = delta.text
        first, self._begun[index] = not self._begun[index], True
        finish_reason: str | None = delta.finish_reason
        if self._is_chat:
            message = self._messages[index]
            changes = message.push(text, delta.finished)
            if self._call.output.is_plain:
                changes = {"content": text}
            choice["delta"] = (
                {"role": "assistant", "content": None if self._call.output.only_calls else "", **changes}
                if first
                else changes
            )
            finish_reason = message.finish_reason(finish_reason)
        else:
            choice["text"] = self._echo(index) + text if first else text
        choice["logprobs"] = self._logprobs(index, delta)
        choice["finish_reason"] = finish_reason
        if delta.finished:
            choice["stop_reason"] = delta.stop_reason
        if self._call.token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = delta.request.prompt_token_ids.tolist()
        if delta.finished and self._call.timings:
            choice["aptjax"] = timings_payload(delta)
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        chunk["choices"] = [choice]
        if self._call.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk with the token usage that ends a stream; None if the call does not ask for it."""
        if not self._call.include_usage:
            return None
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        return {**chunk, "choices": [], "usage": self._usage()}

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        """Return a response that is not streamed.

        Args:
            deltas: complete output of each choice.
        """
        answer = self._head("chat.completion" if self._is_chat else "text_completion")
        answer["choices"] = [self._choice(i, self._shown(delta)) for i, delta in enumerate(deltas)]
        answer["usage"] = self._usage()
        if self._is_chat and self._call.prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(deltas[0])
        return answer

    def _choice(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        self._count(index, delta)
        choice: dict[str, Any] = {"index": index}
        finish_reason: str | None = delta.finish_reason
        if self._is_chat:
            message = self._messages[index]
            message.push(delta.text, True)
            choice["message"] = message.whole()
            finish_reason = message.finish_reason(finish_reason)
        else:
            choice["text"] = self._echo(index) + delta.text
        choice["logprobs"] = self._logprobs(index, delta)
        choice["finish_reason"] = finish_reason
        choice["stop_reason"] = delta.stop_reason
        if not self._is_chat and self._call.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta)
        if self._call.token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = delta.request.prompt_token_ids.tolist()
        if self._call.timings:
            choice["aptjax"] = timings_payload(delta)
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.call_id,
            "object": kind,
            "created": call.created_s,
            "model": call.model,
            "service_tier": call.service_tier,
            "system_fingerprint": None,
        }

    def _shown(self, delta: OutputDelta) -> OutputDelta:
        """Return the output to show to the client: without text and tokens if it asked for none, else unchanged."""
        if not self._call.without_output:
            return delta
        return dataclasses.replace(
            delta,
            text="",
            token_ids=[],
            logprobs=None if delta.logprobs is None else [],
            finish_reason="length" if delta.finished else None,
            stop_reason=None,
        )

    def _count(self, index: int, delta: OutputDelta) -> None:
        self._num_tokens[index] += len(delta.token_ids)
        self._num_cached[index] = delta.metrics.num_cached_tokens

    def _echo(self, index: int) -> str:
        echoes = self._call.echoes
        return "" if echoes is None else echoes[index // self._call.n]

    def _usage(self) -> dict[str, Any]:
        """Return the token usage; each prompt counts once, regardless of its number of choices."""
        call = self._call
        firsts = range(0, len(call.requests), call.n)
        prompt = sum(int(call.requests[i].prompt_token_ids.size) for i in firsts)
        output = self.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached[i] for i in firsts)},
        }

    # --- log probabilities

    def _logprobs(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """Return the log probabilities of new tokens in OpenAI's format, after the log probabilities of an echoed
        prompt, if any. None if the call does not ask for log probabilities."""
        if delta.logprobs is None:
            return None
        if self._is_chat:
            return {"content": self.chat_logprobs(index, delta.token_ids, delta.logprobs)}
        offsets = self._offsets(index, delta)
        tokens = [self._token(t, entry[t]) for t, entry in zip(delta.token_ids, delta.logprobs, strict=True)]
        token_ids: list[int] = delta.token_ids
        entries: list[dict[int, Logprob] | None] = [*delta.logprobs]
        if self._call.echo_logprobs and delta.prompt_logprobs is not None:
            prompt = delta.request.prompt_token_ids.tolist()
            of_prompt = prompt_entries(prompt, delta.prompt_logprobs, self._parts.tokenizer)
            texts, starts = self._echoed(index, prompt, of_prompt)
            tokens, offsets = [*texts, *tokens], [*starts, *offsets]
            token_ids, entries = prompt + token_ids, [*of_prompt, *entries]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else _finite(entry[t].logprob)
                for t, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [None if entry is None else self._by_text(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _offsets(self, index: int, delta: OutputDelta) -> list[int]:
        """Return the offset of each new token in the text of its choice, in characters: the number of complete characters
        before it."""
        tokenizer, params = self._parts.tokenizer, delta.request.params
        detokenizer = self._detokenizers.get(index)
        if detokenizer is None and tokenizer is not None:
            detokenizer = self._detokenizers[index] = IncrementalDetokenizer(
                tokenizer,
                delta.request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                own_bytes_only=delta.request.grammar is not None,
            )
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self._text_len[index])
            self._text_len[index] += 0 if detokenizer is None else len(detokenizer.push(token_id))
        return offsets

    def _echoed(
        self, index: int, prompt: Sequence[int], entries: list[dict[int, Logprob] | None]
    ) -> tuple[list[str], list[int]]:
        """Return the text of each token of an echoed prompt, and its offset in the prompt in characters.

        If the first token that has text begins with a space that the prompt does not have, the space is removed from
        its text and, in place, from the texts in `entries` at its position.
        """
        tokenizer, echo = self._parts.tokenizer, self._echo(index)
        if tokenizer is None:
            return [self._text(t, None) for t in prompt], [0] * len(prompt)
        texts = [tokenizer.token_text(prompt[0])]
        texts += [None if entry is None else entry[t].decoded_token for t, entry in zip(prompt, entries, strict=True)][
            1:
        ]
        # The echo of token ids includes special tokens; the echo of a text is the text that the client sent.
        shows_special = self._call.requests[index].prompt is None
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=not shows_special)
        pieces = [detokenizer.push(token_id) for token_id in prompt]
        first = next((i for i, piece in enumerate(pieces) if piece), None)
        if first is not None and not echo.startswith(pieces[first]):
            texts[first] = (texts[first] or "").removeprefix(" ")
            entry = entries[first] or {}
            for token_id, one in entry.items():
                text = (one.decoded_token or "").removeprefix(" ")
                entry[token_id] = dataclasses.replace(one, decoded_token=text)
        # A tokenizer may change the text; offsets are aligned with the end of the echo, where the output follows.
        ends = list(itertools.accumulate(map(len, pieces)))
        missing = ends[-1] - len(echo)
        starts = [min(max(end - len(piece) - missing, 0), len(echo)) for end, piece in zip(ends, pieces, strict=True)]
        return [self._text(t, text) for t, text in zip(prompt, texts, strict=True)], starts

    def chat_logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]]
    ) -> list[dict[str, Any]]:
        """Return the log probabilities of tokens of choice `index`, in the format of chat completions."""
        params = self._call.requests[index].params
        most, skip = params.logprobs or 0, params.skip_special_tokens
        return [self._chat_logprob(t, entry, most, skip) for t, entry in zip(token_ids, entries, strict=True)]

    def _prompt_logprobs(self, delta: OutputDelta) -> list[dict[str, Any] | None] | None:
        """Return the prompt's log probabilities in vLLM's format: for each token a map keyed by token id, or None for
        the first token. None: the output has no log probabilities of the prompt."""
        if delta.prompt_logprobs is None:
            return None
        prompt = delta.request.prompt_token_ids.tolist()
        return [
            None
            if entry is None
            else {
                str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
                for token_id, one in entry.items()
            }
            for entry in prompt_entries(prompt, delta.prompt_logprobs, self._parts.tokenizer)
        ]

    def _by_text(self, entry: dict[int, Logprob]) -> dict[str, float]:
        """Return log probabilities keyed by token text. If several tokens have the same text, the first in `entry` is
        used: the sampled token, or else the most likely token."""
        named: dict[str, float] = {}
        for token_id, one in entry.items():
            named.setdefault(self._token(token_id, one), _finite(one.logprob))
        return named

    def _chat_logprob(self, token_id: int, entry: dict[int, Logprob], most: int, skip: bool) -> dict[str, Any]:
        ranked = sorted((one.rank, t) for t, one in entry.items() if one.rank is not None and one.rank <= most)
        return {
            **self._named(token_id, entry[token_id], skip),
            "top_logprobs": [self._named(t, entry[t], skip) for _, t in ranked],
        }

    def _named(self, token_id: int, one: Logprob, skip: bool) -> dict[str, Any]:
        return {
            "token": self._token(token_id, one),
            "logprob": _finite(one.logprob),
            "bytes": self._bytes(token_id, one, skip),
        }

    def _token(self, token_id: int, one: Logprob) -> str:
        return self._text(token_id, one.decoded_token)

    def _text(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self._call.tokens_as_ids or text is None else text

    def _bytes(self, token_id: int, one: Logprob, skip: bool) -> list[int]:
        """Return the bytes that a token adds to the text; empty for special tokens if the text leaves them out."""
        tokenizer, text = self._parts.tokenizer, one.decoded_token
        if tokenizer is None or text is None or (skip and token_id in tokenizer.special_ids):
            return []
        return list(tokenizer.continuations.piece(token_id) if "\ufffd" in text else text.encode())


class CompletionResponse:
    """Encodes the response to one call; implements `serve.http_api.endpoints.ResponseBuilder`. Chunks are sent as
    events, and `[DONE]` is the last event."""

    def __init__(self, parts: EngineComponents, call: CompletionCall) -> None:
        self._builder = CompletionResponseBuilder(parts, call)

    def events(self, index: int, delta: OutputDelta) -> bytes:
        return _event(self._builder.event(index, delta))

    def end(self) -> bytes:
        last = self._builder.last_chunk()
        return (b"" if last is None else _event(json_bytes(last))) + _event(b"[DONE]")

    def failure(self, error: HttpError) -> bytes:
        return _event(json_bytes(error.body()))

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        return json_bytes(self._builder.whole(deltas))


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def timings_payload(delta: OutputDelta) -> dict[str, Any]:
    """Return the timings, SLO attainment and cache use of a request; unknown values are None."""
    metrics, request = delta.metrics, delta.request
    record = RequestRecord.from_metrics(metrics, ok=delta.finish_reason in ("stop", "length"))
    return {
        "request_id": request.label,
        "timings": {
            "queue_ms": _since(metrics, metrics.first_scheduled_s),
            "ttft_ms": _ms(record.ttft_s),
            "p99_tbt_ms": _ms(record.tbt_s),
            "p99_tbt_drop_first_ms": _ms(record.tbt_drop_first_s),
            "total_ms": _since(metrics, metrics.finished_s),
        },
        "slo": {
            "ttft_ms": _ms(metrics.slo.ttft_s),
            "tbt_ms": _ms(metrics.slo.tbt_s),
            "e2e_ms": _ms(metrics.slo.e2e_s),
            "class": request.slo_class,
            "ttft_attained": record.ttft_attained,
            "tbt_attained": record.tbt_attained,
            "e2e_attained": record.e2e_attained,
            "attained": record.slo_attained,
        },
        "cache_kind": metrics.cache_kind,
        "cached_prompt_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "num_kind_switches": metrics.num_kind_switches,
        "num_conversions": metrics.num_conversions,
        "recomputed_tokens": metrics.recomputed_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == float("inf") else seconds * 1e3


def _since(metrics: RequestMetrics, at_s: float | None) -> float | None:
    return None if at_s is None else _ms(at_s - metrics.arrival_s)


def adapter_cards(parts: EngineComponents, created_s: int) -> list[dict[str, Any]]:
    """Return the entries of ``/v1/models`` for LoRA adapters."""
    card = model_card(parts, created_s, parts.model_name)
    adapters = (parts.config.lora_modules or {}).items()
    return [card | {"id": name, "root": path, "parent": card["id"]} for name, path in adapters]


def model_card(parts: EngineComponents, created_s: int, name: str) -> dict[str, Any]:
    """Return the entry of ``/v1/models`` for a name of the model."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "apt-jax",
        "root": parts.config.model,
        "parent": None,
        "max_model_len": parts.limits.max_model_len,
    }
