"""A client's call as it is drawn, and the answer as far as it has been read."""

import dataclasses
import functools
from typing import Any

import numpy as np

from apt_jax.request import EngineRequest, engine_id
from serve.security.api_keys import ApiKeys
from tests.support.serving_simulation.scenario import ServingScenario
from tests.support.toy_serving import VOCAB_SIZE


@dataclasses.dataclass(kw_only=True)
class Call:
    """A client's call, and how the client behaves."""

    number: int
    request_id: str
    tenant: int | None
    body: dict[str, Any]
    stream: bool
    n: int
    invalid: bool
    """It must be rejected as wrong."""
    grammar: str | None
    deadline_s: float | None
    """After its arrival."""
    leaves: str | None
    """Where the client leaves: "body", "building", "early", "token", "blocked"; None: it stays."""
    leaves_after_s: float
    read_s: float
    """Time for each piece of the response; infinite: the client reads nothing more after the first."""
    duplicate_of: "Call | None" = None
    """Another call with the same id, of the same tenant or another."""

    @property
    def engine_id(self) -> str:
        """Id of its first request to the engine."""
        return engine_id(tenant_name(self.tenant), self.request_id)

    outcome: str | None = None
    """The client's: "ok", "rejected", "unavailable", "deadline", "error", "left", "indeterminate"."""


@dataclasses.dataclass
class Answer:
    """Response of one attempt, as far as its client has read it."""

    status: int = 0
    code: str | None = None
    data: bytes = b""
    """Body."""
    ended: bool = False
    """The response is whole."""
    done: bool = False
    """`[DONE]` was received, or the whole JSON."""
    error: str | None = None
    """Code of an error event."""
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] | None = None


def key_of(tenant: int) -> str:
    return f"key-of-tenant-number-{tenant:04}"


@functools.cache
def tenant_name(tenant: int | None) -> str | None:
    """Return the server's name of a tenant."""
    if tenant is None:
        return None
    caller = ApiKeys([key_of(tenant)]).caller_of(b"Bearer " + key_of(tenant).encode())
    return None if caller is None else caller.tenant


def call_id_of(request: EngineRequest) -> str:
    """`Call.engine_id` of the call that a request is of."""
    return request.request_id.partition("#")[0]


def draw_call(rng: np.random.Generator, scenario: ServingScenario, number: int) -> Call:
    """Draw a call, and how its client behaves."""
    tenant = None
    if scenario.num_tenants:
        tenant = 0 if scenario.flood and rng.random() < 0.8 else int(rng.integers(scenario.num_tenants))
    prompt_len = int(rng.integers(1, 40))
    shared = [3 + (i * 7) % 200 for i in range(40)]
    prompt = (shared if rng.random() < 0.4 else rng.integers(3, VOCAB_SIZE, 40).tolist())[:prompt_len]
    body: dict[str, Any] = {
        "model": "toy",
        "prompt": prompt,
        "max_tokens": int(rng.integers(1, 32)),
        "temperature": float(rng.choice([0.0, 1.0])),
        "seed": int(rng.integers(2**31)),
        "return_token_ids": True,
        "request_id": f"c{number}",
    }
    if rng.random() < 0.2:
        body["prompt"] = "".join(chr(97 + int(c)) for c in rng.integers(0, 26, prompt_len))
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.3:
        body["stop"] = [chr(97 + int(rng.integers(26)))]
    n = 1
    if rng.random() < 0.15:
        n = body["n"] = int(rng.integers(2, 4))
    stream = bool(rng.random() < 0.7)
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        body["slo"] = {"ttft_ms": float(rng.choice([50.0, 500.0])), "class": "rt"}
    elif rng.random() < 0.2:
        body["slo"] = {"class": "be"}
    grammar = None
    if rng.random() < scenario.p_grammar:
        what = str(rng.choice(["ok", "ok", "ok", "ok", "bad", "busy", "break"]))
        grammar = f"{what}{int(rng.integers(8))}"
        body["structured_outputs"] = {"regex": grammar}
        body.pop("ignore_eos", None)
    deadline_s = None
    if rng.random() < scenario.p_deadline:
        deadline_s = float(rng.choice([0.001, 0.05, 0.3, 2.0]))
        body.setdefault("slo", {})["deadline_ms"] = 1e3 * deadline_s
    invalid = bool(rng.random() < scenario.p_invalid)
    if invalid:
        name, value = [("temperature", -1.0), ("max_tokens", 10_000), ("stop", [""]), ("seed", "x"), ("n", 999)][
            int(rng.integers(5))
        ]
        body[name] = value
    leaves = None
    if rng.random() < scenario.p_leave:
        leaves = str(rng.choice(["body", "building", "early", "early", "token", "blocked"]))
    read_s = 0.0
    if rng.random() < scenario.p_slow_reader:
        read_s = float(rng.choice([0.01, 0.1, 0.4]))
    if rng.random() < scenario.p_stalled_reader or leaves == "blocked":
        read_s = float("inf")
    return Call(
        number=number,
        request_id=f"c{number}",
        tenant=tenant,
        body=body,
        stream=stream,
        n=n,
        invalid=invalid,
        grammar=grammar,
        deadline_s=deadline_s,
        leaves=leaves,
        leaves_after_s=float(rng.exponential(0.15)),
        read_s=read_s,
    )
