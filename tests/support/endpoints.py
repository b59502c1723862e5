"""Send one request to each endpoint: HTTP, the two gRPC services and Python.

A request is a mapping: `prompt` (text or token ids), `params` (fields of `SamplingParams`), and maybe `n`,
`request_id`, `slo_ttft_ms`, `slo_tbt_ms`, `slo_e2e_ms`, `slo_class` and `deadline_ms`.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
from smg_grpc_proto import vllm_engine_pb2

from apt_jax import LLM
from apt_jax.errors import InvalidRequestError
from apt_jax.validation import check_deadline_ms
from serve.client import make_request
from serve.grpc_api.vllm_service import SERVICE as VLLM_SERVICE
from serve.protos.aptjax.v1 import apt_serve_pb2 as apt_pb
from serve.slo_headers import DECIMAL_PATTERN
from tests.support.http_serving import HttpServed

Request = Mapping[str, Any]
Verdict = tuple[str, Any]
"""("refused", message), or ("served", [(token ids, text) of each output]); text is None where an endpoint returns
none."""

pb: Any = vllm_engine_pb2
_OBJECTIVES = ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms", "slo_class")
_TIERS = {"rt": "priority", "be": "flex"}


_NAMES = {
    "prompt_token_ids": "prompt",
    "slo.ttft_ms": "slo_ttft_ms",
    "slo.tbt_ms": "slo_tbt_ms",
    "slo.e2e_ms": "slo_e2e_ms",
    "x-slo-ttft-ms": "slo_ttft_ms",
    "x-slo-tpot-ms": "slo_tbt_ms",
    "x-slo-e2e-ms": "slo_e2e_ms",
}
"""Names of the same field as it was sent: HTTP has one for a prompt of either kind, and an objective may be a field of a
message or metadata."""


def _named(message: str) -> str:
    field, _, rest = message.partition(":")
    name, bracket, place = field.partition("[")
    return f"{_NAMES.get(name, name)}{bracket}{place}:{rest}"


def ask_python(llm: LLM, case: Request) -> Verdict:
    """Return the verdict of the package itself."""
    prompt, params, n = case["prompt"], dict(case["params"]), case.get("n", 1)
    given = {key: case[key] for key in ("request_id", *_OBJECTIVES) if key in case}
    kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    try:
        requests = llm.parts.build_requests(n=n, params=params, **{kind: prompt}, **given)
        if "deadline_ms" in case:
            check_deadline_ms(case["deadline_ms"])
    except InvalidRequestError as error:
        return "refused", _named(str(error))
    seeded = [params | {"seed": request.params.seed} for request in requests]
    outputs = llm.generate([prompt] * n, seeded, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return "served", [(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]


async def ask_http(served: HttpServed, case: Request) -> Verdict | None:
    """Return the verdict of HTTP; None: JSON cannot express the request."""
    body = {key: value for key, value in case.items() if key != "params"} | dict(case["params"])
    if "logit_bias" in body:
        body["logit_bias"] = {str(key): value for key, value in body["logit_bias"].items()}
    body["return_token_ids"] = True
    response = await served.http.post(
        "/v1/completions",
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    if response.status_code == 200:
        choices = response.json()["choices"]
        return "served", [(choice["token_ids"], choice["text"]) for choice in choices]
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"
    if _has_what_json_lacks(body):
        assert error["message"].startswith("body: ")
        return None
    assert error["message"].startswith(error["param"])
    return "refused", error["message"]


def _has_what_json_lacks(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_what_json_lacks, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


async def ask_aptserve(served: HttpServed, case: Request) -> Verdict | None:
    """None: the message cannot hold it."""
    if case.get("n", 1) != 1 or case.get("request_id") == "":
        return None
    fields = {key: value for key, value in case.items() if key not in ("prompt", "params", "n")}
    try:
        request = make_request(case["prompt"], **fields, **case["params"])
    except (TypeError, ValueError, KeyError):
        return None
    method = served.grpc.channel.unary_stream(
        "/aptjax.v1.AptServe/Generate",
        request_serializer=apt_pb.GenerateRequest.SerializeToString,
        response_deserializer=apt_pb.GenerateResponse.FromString,
    )
    try:
        messages = [message async for message in method(request)]
    except grpc.aio.AioRpcError as error:
        return _refusal(error)
    token_ids = [token for message in messages for token in message.token_ids]
    return "served", [(token_ids, "".join(message.text for message in messages))]


async def ask_vllm(served: HttpServed, case: Request) -> Verdict | None:
    """None: the message cannot hold it, or it means something else there."""
    params, n = case["params"], case.get("n", 1)
    if "deadline_ms" in case or case.get("request_id") == "" or n == 0:
        return None
    if any(params.get(name) == 0.0 for name in ("top_p", "repetition_penalty")):
        return None  # unset
    numbers = [*params.values(), *params.get("logit_bias", {}).values()]
    if not all(_fits_32_bits(number) for number in numbers if isinstance(number, float)):
        return None
    metadata = []
    for key in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"):
        name = _NAMES[key]
        if name in case:
            if not re.fullmatch(DECIMAL_PATTERN, repr(case[name])):
                return None
            metadata.append((key, repr(case[name])))
    if "slo_class" in case:
        if case["slo_class"] not in _TIERS:
            return None
        metadata.append(("service_tier", _TIERS[case["slo_class"]]))
    try:
        request = vllm_request(case["prompt"], n=n, request_id=case.get("request_id", ""), stream=False, **params)
    except (TypeError, ValueError):
        return None
    method = served.grpc.channel.unary_stream(
        f"/{VLLM_SERVICE}/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    try:
        messages = [message.complete async for message in method(request, metadata=metadata)]
    except grpc.aio.AioRpcError as error:
        return _refusal(error)
    ordered = sorted(messages, key=lambda complete: complete.index)
    return "served", [(list(complete.output_ids), None) for complete in ordered]


def _fits_32_bits(number: float) -> bool:
    """Return whether a 32-bit float has the same decimal value."""
    with np.errstate(over="ignore"):
        return not math.isfinite(number) or float(str(np.float32(number))) == number


def _refusal(error: grpc.aio.AioRpcError) -> Verdict:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "-1"
    assert "content-type" not in dict(error.initial_metadata() or ())  # trailers only
    return "refused", _named(error.details() or "")


def vllm_request(prompt: Any = "hello", *, stream: bool = True, request_id: str = "", **sampling: Any) -> Any:
    """A message of VllmEngine; `sampling` are the fields of `apt_jax.SamplingParams` with its defaults, and `n`.

    Raises:
        TypeError, ValueError: the message cannot hold them.
    """
    sampling = {"max_tokens": 16, "skip_special_tokens": True} | sampling
    constraint = sampling.pop("structured_outputs", None)
    if sampling["max_tokens"] is None:
        del sampling["max_tokens"]
    if constraint is not None:
        if len(constraint) != 1:
            raise ValueError("one constraint alone")
        ((name, value),) = constraint.items()
        if name == "choice":
            sampling["choice"] = pb.ChoiceConstraint(choices=value)
        else:
            sampling["json_schema" if name == "json" else name] = value
    request = pb.GenerateRequest(request_id=request_id, stream=stream, sampling_params=pb.SamplingParams(**sampling))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
        request.tokenized.SetInParent()
    return request
