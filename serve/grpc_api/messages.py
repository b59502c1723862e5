"""Conversions between protobuf messages and the types of `apt_jax`. All checks are in `apt_jax.validation`."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from apt_jax.engine import EngineStats
from apt_jax.engine.events import Iteration, IterationBatch
from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.prompt_entries import prompt_entries
from apt_jax.metrics import RequestRecord
from apt_jax.request import Logprob, RequestMetrics
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.validation import MAX_LOGPROBS
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.protos.words import cache_kind, finish_reason
from serve.slo_headers import OBJECTIVE_KEYS, TIER_KEY, class_of_tier, milliseconds, session_id

Metadata = Sequence[tuple[str, str | bytes]]


_SAMPLING_SCALARS = tuple(
    field.name for field in pb.SamplingParams.DESCRIPTOR.fields if not field.is_repeated and field.message_type is None
)
_PROMPT_ENTRIES = 1024
"""Maximum number of prompt tokens with log probabilities per message; by default, clients accept at most 4 MiB."""
_SLO_CLASSES = {"rt": pb.SLO_CLASS_RT, "be": pb.SLO_CLASS_BE}


def request_fields(request: pb.GenerateRequest, metadata: Metadata) -> dict[str, Any]:
    """Return the arguments for `EngineComponents.build_requests` from a request and its metadata.

    Raises:
        InvalidRequestError: see `slo_fields`.
    """
    fields: dict[str, Any] = {"params": _sampling_fields(request.sampling)}
    if request.request_id:
        fields["request_id"] = request.request_id
    match request.WhichOneof("prompt"):
        case "text":
            fields["prompt"] = request.text
        case "token_ids":
            fields["prompt_token_ids"] = list(request.token_ids.ids)
    if request.HasField("retain_s"):
        fields["retain_s"] = request.retain_s
    fields |= slo_fields(metadata, request.slo, request.slo_class)
    return fields


def slo_fields(
    metadata: Metadata, slo: pb.Slo | None = None, slo_class: int = pb.SLO_CLASS_UNSPECIFIED
) -> dict[str, Any]:
    """Return the latency objectives, SLO class and session of a request: each from its message if set there, else from
    its metadata.

    Raises:
        InvalidRequestError: an objective in the metadata is not a number, or the SLO class or service tier is unknown.
    """
    slo = pb.Slo() if slo is None else slo
    headers = {key: value for key, value in reversed(metadata)}
    fields: dict[str, Any] = {
        f"slo_{part}": getattr(slo, part) if slo.HasField(part) else milliseconds(headers, keys)
        for part, keys in OBJECTIVE_KEYS.items()
    }
    return fields | {"slo_class": _slo_class(slo_class, headers), "session_id": session_id(headers)}


def objective_names(metadata: Metadata, slo: pb.Slo | None = None) -> dict[str, str]:
    """Return a map from each latency objective's name in errors of `apt_jax.validation` to the client's name."""
    sent = {key for key, _ in metadata}
    names = {}
    for part, keys in OBJECTIVE_KEYS.items():
        header = next((key for key in keys if key in sent), None)
        if slo is not None and slo.HasField(part):
            names[f"slo_{part}"] = f"slo.{part}"
        elif header is not None:
            names[f"slo_{part}"] = header
    return names


def _sampling_fields(params: pb.SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING_SCALARS if params.HasField(name)}
    if params.logit_bias:
        fields["logit_bias"] = dict(params.logit_bias)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured_output_fields(params.structured_outputs)
    return fields


def _structured_output_fields(message: pb.StructuredOutputs) -> dict[str, Any]:
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    constraint = message.WhichOneof("form")
    if constraint is not None:  # even if it is empty or false
        fields[constraint] = getattr(message, constraint)
    if constraint == "choice":
        fields["choice"] = list(message.choice.texts)
    return fields


def structured_outputs(fields: Mapping[str, Any]) -> pb.StructuredOutputs:
    """Return a message with the given fields of `StructuredOutputsParams`. Used by clients.

    Raises:
        ValueError, TypeError: the message cannot hold a field or value, or has more than one constraint.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    constraints = [f.name for f in pb.StructuredOutputs.DESCRIPTOR.oneofs_by_name["form"].fields if f.name in given]
    if len(constraints) > 1 and given.get("json_object") is False:
        constraints.remove("json_object")
        del given["json_object"]
    if len(constraints) > 1:
        raise ValueError(f"{' and '.join(constraints)} given; the message can hold only one")
    if not isinstance(given.get("json", ""), str):
        given["json"] = json.dumps(given["json"])
    if "choice" in given:
        given["choice"] = pb.Choices(texts=given["choice"])
    return pb.StructuredOutputs(**given)


def _slo_class(value: int, headers: Mapping[str, str | bytes]) -> str | None:
    if value == pb.SLO_CLASS_RT:
        return "rt"
    if value == pb.SLO_CLASS_BE:
        return "be"
    if value != pb.SLO_CLASS_UNSPECIFIED:
        raise InvalidRequestError("slo_class", f"{value} must be SLO_CLASS_RT (1) or SLO_CLASS_BE (2)")
    return class_of_tier(headers.get(TIER_KEY))


def response(delta: OutputDelta, sequence: int, num_tokens: int) -> pb.GenerateResponse:
    """Encode new output of a request.

    Args:
        delta: the new output.
        sequence: number of the message in its stream, from 0.
        num_tokens: number of output tokens so far, including the new ones.
    """
    message = pb.GenerateResponse(
        request_id=delta.request.label,
        sequence=sequence,
        text=delta.text,
        token_ids=delta.token_ids,
    )
    for token_id, entries in zip(delta.token_ids, delta.logprobs or (), strict=False):
        message.logprobs.append(_token_logprobs(token_id, entries))
    if delta.finished:
        message.finish.CopyFrom(_finish(delta, num_tokens))
    return message


def prompt_responses(delta: OutputDelta, sequence: int, tokenizer: Tokenizer | None) -> Iterator[pb.GenerateResponse]:
    """Encode the log probabilities of a prompt, if `delta` has them, as messages of bounded size.

    Args:
        delta: output with the log probabilities.
        sequence: number of the first message in its stream.
        tokenizer: decodes the tokens; None: the messages contain no text of the tokens.
    """
    if delta.prompt_logprobs is None:
        return
    prompt, most = delta.request.prompt_token_ids.tolist(), delta.request.params.prompt_logprobs or 0
    pairs = zip(prompt, prompt_entries(prompt, delta.prompt_logprobs, tokenizer), strict=True)
    entries = [(token_id, entry) for token_id, entry in pairs if entry is not None]
    for number, start in enumerate(range(0, len(entries), _PROMPT_ENTRIES)):
        part = entries[start : start + _PROMPT_ENTRIES]
        yield pb.GenerateResponse(
            request_id=delta.request.label,
            sequence=sequence + number,
            prompt_logprobs=[_token_logprobs(token_id, entry, most) for token_id, entry in part],
        )


def _logprob(token_id: int, entry: Logprob) -> pb.Logprob:
    return pb.Logprob(
        token_id=token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        token_text=entry.decoded_token or "",
    )


def _token_logprobs(token_id: int, entries: Mapping[int, Logprob], most: int = MAX_LOGPROBS) -> pb.TokenLogprobs:
    """Encode the log probability of a token, and of the `most` most likely tokens at its position."""
    ranked = sorted(((e.rank, t, e) for t, e in entries.items() if e.rank is not None), key=lambda x: x[:2])[:most]
    return pb.TokenLogprobs(
        sampled=_logprob(token_id, entries[token_id]),
        top=[_logprob(t, e) for _, t, e in ranked],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else seconds * 1e3


def _finish(delta: OutputDelta, num_tokens: int) -> pb.Finish:
    metrics = delta.metrics
    finish = pb.Finish(
        reason=finish_reason(delta.finish_reason),
        usage=pb.Usage(
            prompt_tokens=int(delta.request.prompt_token_ids.size),
            completion_tokens=num_tokens,
            cached_prompt_tokens=metrics.num_cached_tokens,
        ),
        timings=timings(metrics),
        slo=_slo_result(metrics, ok=delta.finish_reason in ("stop", "length")),
        cache_kind=cache_kind(metrics.cache_kind),
        num_preemptions=metrics.num_preemptions,
        num_kind_switches=metrics.num_kind_switches,
        recomputed_tokens=metrics.recomputed_tokens,
        num_conversions=metrics.num_conversions,
        slo_class=_SLO_CLASSES[delta.request.slo_class],
    )
    if isinstance(delta.stop_reason, str):
        finish.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        finish.stop_token_id = delta.stop_reason
    return finish


def timings(metrics: RequestMetrics) -> pb.Timings:
    """Return the latencies of a request in milliseconds; latencies that are not known yet stay unset."""
    record = RequestRecord.from_metrics(metrics)

    def since_arrival(at_s: float | None) -> float | None:
        return None if at_s is None else _ms(at_s - metrics.arrival_s)

    return pb.Timings(
        queue_ms=since_arrival(metrics.first_scheduled_s),
        ttft_ms=_ms(record.ttft_s),
        p99_tbt_ms=_ms(record.tbt_s),
        p99_tbt_drop_first_ms=_ms(record.tbt_drop_first_s),
        total_ms=since_arrival(metrics.finished_s),
    )


def _slo_result(metrics: RequestMetrics, *, ok: bool) -> pb.SloResult:
    record = RequestRecord.from_metrics(metrics, ok=ok)
    return pb.SloResult(
        ttft_ms=_ms(metrics.slo.ttft_s),
        tbt_ms=_ms(metrics.slo.tbt_s),
        e2e_ms=_ms(metrics.slo.e2e_s),
        ttft_attained=record.ttft_attained,
        tbt_attained=record.tbt_attained,
        e2e_attained=record.e2e_attained,
        attained=record.slo_attained,
    )


def stats_response(stats: EngineStats, **facts: Any) -> pb.GetStatsResponse:
    """Return a message with the engine's counters and gauges.

    Args:
        stats: the engine's counters and gauges.
        facts: further fields of the message, set by the server.
    """
    copied = {
        name: getattr(stats, name)
        for name in pb.GetStatsResponse.DESCRIPTOR.fields_by_name
        if hasattr(stats, name) and name != "kind_switches"
    }
    switches = {f"{old}>{new}": count for (old, new), count in stats.kind_switches.items()}
    old_names = {"num_refused": stats.num_rejected, "num_doubtful": stats.num_slo_at_risk_admitted}
    return pb.GetStatsResponse(kind_switches=switches, **old_names, **copied, **facts)


def watch_response(
    batch: IterationBatch, served_since_s: float, shown_id: Callable[[str], str | None]
) -> pb.WatchSchedulerResponse:
    """Encode the scheduler's unread iterations.

    Args:
        batch: the iterations.
        served_since_s: time on the engine's clock when the server started.
        shown_id: converts an engine's request id to the id that the client may see; None is sent as "".
    """

    def shown(request_id: str) -> str:
        return shown_id(request_id) or ""

    return pb.WatchSchedulerResponse(
        num_dropped=batch.num_dropped,
        iterations=[_iteration(iteration, served_since_s, shown) for iteration in batch.iterations],
    )


def own_iterations(batch: IterationBatch, shown_id: Callable[[str], str | None], first: int) -> IterationBatch:
    """Return the iterations reduced to the requests of one client, which may see only its own.

    Args:
        batch: the iterations; iterations without a request of the client are left out.
        shown_id: converts an engine's request id to the id that the client may see; None for requests of other clients.
        first: number of the first returned iteration.
    """
    found = []
    for iteration in batch.iterations:
        scheduled = tuple(row for row in iteration.scheduled if shown_id(row.request_id) is not None)
        preempted = [row for row in iteration.preempted if shown_id(row.request_id) is not None]
        if scheduled or preempted:
            phases = {"decode" if row.decodes else "prefill" for row in scheduled}
            found.append(
                dataclasses.replace(
                    iteration,
                    number=first + len(found),
                    type="mixed" if len(phases) == 2 else next(iter(phases), "idle"),
                    scheduled=scheduled,
                    preempted=preempted,
                    switched=[row for row in iteration.switched if shown_id(row.request_id) is not None],
                    converted=[label for label in iteration.converted if shown_id(label) is not None],
                    deferred=tuple(label for label in iteration.deferred if shown_id(label) is not None),
                    num_waiting=0,
                    num_running=0,
                    free_blocks=0,
                    schedule_s=0.0,
                )
            )
    return IterationBatch(num_dropped=min(batch.num_dropped, 1), iterations=found)


def _iteration(iteration: Iteration, served_since_s: float, shown: Callable[[str], str]) -> pb.Iteration:
    return pb.Iteration(
        number=iteration.number,
        uptime_s=iteration.at_s - served_since_s,
        type=iteration.type,
        scheduled=[
            pb.ScheduledRow(
                request_id=shown(row.request_id),
                num_tokens=row.num_tokens,
                start=row.start,
                kind=cache_kind(row.kind),
            )
            for row in iteration.scheduled
        ],
        preempted=[
            pb.PreemptedRow(request_id=shown(row.request_id), num_tokens=row.num_tokens, kind=cache_kind(row.kind))
            for row in iteration.preempted
        ],
        switched=[
            pb.KindSwitch(
                request_id=shown(switch.request_id),
                old=cache_kind(switch.old),
                new=cache_kind(switch.new),
            )
            for switch in iteration.switched
        ],
        converted=map(shown, iteration.converted),
        deferred=map(shown, iteration.deferred),
        prefill_tokens=iteration.prefill_tokens,
        decode_tokens=iteration.decode_tokens,
        num_waiting=iteration.num_waiting,
        num_running=iteration.num_running,
        free_blocks=iteration.free_blocks,
        schedule_ms=iteration.schedule_s * 1e3,
        step_ms=_ms(iteration.step_s),
        failed=iteration.failed,
    )
