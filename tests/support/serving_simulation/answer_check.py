"""Checks of what a client got: against the reference, what the scenario allows and what was run for it."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from apt_jax.request import EngineRequest
from apt_jax.text.detokenizer import OutputText
from tests.support.fake_executor import reference_tokens
from tests.support.fake_grammars import FakeGrammar
from tests.support.serving_simulation.calls import Answer, Call, call_id_of
from tests.support.serving_simulation.connection import Connection
from tests.support.serving_simulation.replica import Replica
from tests.support.serving_simulation.world import World, tokenizer
from tests.support.simulation_harness import expect
from tests.support.toy_serving import VOCAB_SIZE


class AnswerCheck:
    """The check of one attempt.

    Args:
        world: with the other calls, and what the scenario allows.
        connection: of the attempt.
        answer: as read; what is in its body is added.
    """

    def __init__(self, world: World, connection: Connection, answer: Answer) -> None:
        self._world, self._connection, self._answer = world, connection, answer
        self._call, self._replica = connection.call, connection.replica

    def outcome(self) -> str:
        """Return the outcome of the attempt.

        Raises:
            SimulationError: the answer breaks a promise.
        """
        call, answer, replica = self._call, self._answer, self._replica
        name, is_cut = call.request_id, self._connection.cut_s is not None or replica.is_dead
        if answer.status == 200:
            for event in _events(answer.data, stream=call.stream):
                self._read_event(event)
            self._check_tokens()
        elif answer.status:
            expect(answer.ended or is_cut, f"{name}: an error without its end")
            if answer.ended:
                answer.code = json.loads(answer.data)["error"]["code"]
        if not answer.status or (not answer.ended and answer.error is None):
            expect(is_cut, f"{name}: the connection ended, and nobody has cut it")
            return "indeterminate"
        return self._outcome_of_whole()

    def _outcome_of_whole(self) -> str:
        world, call, answer, replica = self._world, self._call, self._answer, self._replica
        name, status, code = call.request_id, answer.status, answer.error or answer.code
        duplicate = any(other is not call and other.engine_id == call.engine_id for other in world.calls)
        if status == 200 and answer.error is None:
            expect(answer.done, f"{name}: a response without its end")
            expect(not call.invalid, f"{name}: served although it is invalid")
            if any(reason == "abort" for reason in answer.reasons):
                expect(any(a.partition("#")[0] == call.engine_id for a in world.aborted), f"{name}: aborted by nobody")
                return "aborted"
            expect(not (call.grammar or "").startswith(("bad", "busy")), f"{name}: served without its grammar")
            return "ok"
        match code:
            case "deadline_exceeded":
                expect(call.deadline_s is not None, f"{name}: no deadline was asked for")
                late = world.loop.time() - self._connection.arrival_s >= (call.deadline_s or 0.0) - 1e-6
                expect(late or world.jumped, f"{name}: its deadline has not passed")
                return "deadline"
            case "queue_full":
                return "rejected"
            case "unavailable":
                expect(
                    replica.is_stopping or replica.engine.dead_reason is not None,
                    f"{name}: unavailable, and the server neither stops nor has its engine died",
                )
                return "unavailable"
            case "request_failed":
                allowed = replica.faults.row_faults or (call.grammar or "").startswith("break")
                expect(allowed or replica.engine.dead_reason, f"{name}: failed for no reason")
                return "error"
            case "duplicate_id":
                expect(duplicate, f"{name}: no other call has this id")
                return "invalid"
        expect(status == 400, f"{name}: status {status}, code {code}")
        never_fits = code == "context_length_exceeded"
        slo = world.scenario.slo_admission == "on" and "slo" in call.body
        bad = (call.grammar or "").startswith("bad")
        expect(
            call.invalid or never_fits or slo or bad or duplicate or self._is_too_large(),
            f"{name}: {code} for no reason",
        )
        return "invalid"

    def _is_too_large(self) -> bool:
        """Prompt and output can fit no kind of cache on offer."""
        scenario, body = self._world.scenario, self._call.body
        prompt = body["prompt"]
        total = len(prompt) + isinstance(prompt, str) + body["max_tokens"]
        groups = -(-total // scenario.block_size)
        return all(
            groups * per > scenario.num_blocks
            for per, is_offered in zip((2, 1), scenario.offered, strict=True)
            if is_offered
        )

    def _read_event(self, event: dict[str, Any] | None) -> None:
        answer, name = self._answer, self._call.request_id
        expect(not answer.done and answer.error is None, f"{name}: something comes after the end")
        if event is None:
            answer.done = True
            return
        if "error" in event:
            answer.error = event["error"]["code"] or "unknown"
            return
        if not self._call.stream:
            answer.done = True
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            index = choice["index"]
            expect(answer.reasons[index] is None, f"{name}: choice {index} goes on after its end")
            answer.tokens[index] += choice["token_ids"]
            answer.texts[index] += choice["text"]
            answer.reasons[index] = choice["finish_reason"]

    def _check_tokens(self) -> None:
        """Compare the tokens that came with the reference: a beginning of it, and all of it at the end."""
        call, answer, body = self._call, self._answer, self._call.body
        for index in range(call.n):
            fields = {k: body[k] for k in ("max_tokens", "temperature", "ignore_eos", "stop") if k in body}
            fields["seed"] = body["seed"] + index
            prompt = (
                {"prompt": body["prompt"]} if isinstance(body["prompt"], str) else {"prompt_token_ids": body["prompt"]}
            )
            request = self._replica.parts.build_request(params=fields, **prompt)
            grammar = None if call.grammar is None else FakeGrammar(call.grammar, VOCAB_SIZE, breaks=False)
            tokens, text, reason = _reference(request, grammar)
            got, name = answer.tokens[index], f"{call.request_id} choice {index}"
            expect(got == tokens[: len(got)], f"{name}: tokens differ: {got[-6:]}, not {tokens[: len(got)][-6:]}")
            finish = answer.reasons[index]
            if finish in ("stop", "length"):
                expect(
                    got == tokens and finish == reason, f"{name}: {finish} after {len(got)} of {len(tokens)}, {reason}"
                )
                expect(answer.texts[index] == text, f"{name}: another text")
            else:
                expect(finish in (None, "abort"), f"{name}: {finish}")
        if answer.done:
            expect(all(answer.reasons), f"{call.request_id}: whole, and a choice has no end")
            total = sum(map(len, answer.tokens))
            expect(
                answer.usage is not None and answer.usage["completion_tokens"] == total,
                f"{call.request_id}: usage {answer.usage}, {total} tokens came",
            )


def check_attempts(world: World, call: Call, attempts: Sequence[tuple[Replica, Answer]]) -> None:
    """The ledger: a call that was answered ran to its end once; one that was rejected did not run."""
    for i, (replica, answer) in enumerate(attempts):
        last = i == len(attempts) - 1
        runs = [r for r in replica.checks.recount.scheduled if call_id_of(r) == call.engine_id]
        if not last:
            began = any(answer.tokens)
            expect(not began, f"{call.request_id}: retried after its first token")
        shared = any(other is not call and other.engine_id == call.engine_id for other in world.calls)
        refused = answer.code in ("queue_full", "context_length_exceeded") or (
            answer.status == 400 and answer.code != "duplicate_id"
        )
        if refused and not shared and call.n == 1:
            expect(not runs, f"{call.request_id}: rejected with {answer.status}, and it was run")


def _events(data: bytes, *, stream: bool) -> Iterator[dict[str, Any] | None]:
    """The events of a body, server-sent ones or one JSON object; None: `[DONE]`."""
    if not stream:
        with contextlib.suppress(json.JSONDecodeError):  # cut off
            yield json.loads(data)
        return
    for piece in data.split(b"\n\n"):
        text = piece.removeprefix(b"data: ")
        if text == b"[DONE]":
            yield None
        elif text:
            yield json.loads(text)


def _reference(request: EngineRequest, grammar: FakeGrammar | None) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a request, computed without engine, cache or streams."""
    params = request.params
    tokens = reference_tokens(
        request.prompt_token_ids, params.max_tokens, vocab_size=VOCAB_SIZE, params=params, grammar=grammar
    )
    text = OutputText(
        tokenizer(),
        request.prompt_token_ids,
        stop=params.stop,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        own_bytes_only=grammar is not None,
    )
    for count, token in enumerate(tokens, 1):
        if token in params.stop_token_ids and count >= params.min_tokens:
            return tokens[:count], text.take(final=True), "stop"
        if text.push(token) is not None:
            return tokens[:count], text.take(final=True), "stop"
    short = len(tokens) < params.max_tokens
    ended = grammar is not None and len(tokens) >= grammar.start().length
    return tokens, text.take(final=True), "stop" if short or ended else "length"
