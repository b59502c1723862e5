"""The requests of a simulation: drawn from a trace, with arrival times, classes and tenants."""

import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.costs.hardware import Hardware
from apt_jax.errors import ConfigError
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sim.catalog import OBJECTIVES
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.sessions import BLOCK_TOKENS, Calls, SessionPrompts
from apt_jax.sim.trace import Trace, draw_arrivals, known_traces, load_trace, prompts_of, scale_arrivals


def _read_only_zeros(length: int) -> NDArray[np.int32]:
    zeros = np.zeros(length, np.int32)
    zeros.flags.writeable = False
    return zeros


_OF_SESSIONS = "and the first trace must be traces of sessions, with blocks of one size (--beside, --trace)"
_STOP_TOKEN = 1
"""Stop token that is never sampled; it marks requests that may end before `max_tokens`."""
_NO_TEXT = _read_only_zeros(1 << 20)
NUM_SESSIONS = 20
"""Default of `SimulationConfig.num_sessions`."""
_FIRST_BEGIN_WITHIN_S = 60.0
"""The first `SimulationConfig.concurrent_sessions` begin at random within this time."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The requests of one run; all arrays have one entry per request."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    """Arrival times in seconds; nan: known once another request has ended (`calls`)."""
    best_effort: NDArray[np.bool_]
    slos: Sequence[SLO] | None = None
    """Objectives of each request; None: `SimulationConfig.slo` for all."""
    tenant: NDArray[np.int32] | None = None
    """Number of the tenant that each request comes from; None: one tenant."""
    prompts: Sequence[NDArray[np.int32]] | None = None
    """Token ids of each prompt, `prompt_tokens` in length; None: only lengths are known, so prefix caching is not
    possible."""
    calls: Calls | None = None
    """Sessions of the requests; None: requests do not wait for each other."""
    block_tokens: int = BLOCK_TOKENS
    """Prompt tokens per block that `calls` share, before scaling."""

    def slo(self, index: int, default: SLO) -> SLO:
        """Return the objectives of one request."""
        return default if self.slos is None else self.slos[index]

    def shared_tokens(self, config: SimulationConfig) -> NDArray[np.int64]:
        """Return the number of tokens at the beginning of each call's prompt that its parent's prompt begins with too,
        or without a parent the prompts of other sessions.

        Only for a workload of sessions.
        """
        assert self.calls is not None
        common = self.calls.common_tokens // self.block_tokens
        blocks = np.where(self.calls.parent >= 0, self.calls.shared_blocks, common)
        shared = np.ceil(blocks * self.block_tokens * config.scale_tokens).astype(np.int64)
        return np.minimum(shared, self.prompt_tokens - 1)

    def share_with_gaps(self, more_than: int = 100) -> float:
        """Return the share of the requests with more than `more_than` gaps between output tokens.

        The P99 of more than 100 gaps ignores the longest gap, so such a request can meet its TBT objective despite one
        preemption.
        """
        return float(np.mean(self.output_tokens - 1 > more_than))


def drop_oversized(trace: Trace, hardware: Hardware, config: SimulationConfig) -> Trace:
    """Scale the lengths of a trace, and leave out the requests that the hardware can never serve; sessions end before
    such a call.

    Raises:
        ConfigError: a request of a trace file can never fit and `drop_too_long` is false, or no request fits.
    """
    trace.check_shared(config.hash_block_tokens)
    trace = trace.scale_outputs(config.output_scale).scale_tokens(config.scale_tokens)
    limit = longest_request(hardware, config)
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    fits = total <= limit
    if fits.all():
        return trace
    if not (config.drop_too_long or trace.lines is None or config.trace in known_traces()):
        i = int(np.flatnonzero(~fits)[0])
        raise ConfigError(
            f"{trace.name} line {trace.lines[i]}: {trace.prompt_tokens[i]} prompt and {trace.output_tokens[i]} output "
            f"tokens can never fit {config.model} on {hardware.name} ({limit} tokens per request); "
            "--drop-too-long leaves such requests out"
        )
    kept = trace.without(~fits)
    if not kept.num_requests:
        raise ConfigError(
            f"{trace.name}: no request fits {config.model} on {hardware.name} ({limit} tokens per request)"
        )
    return kept


def longest_request(hardware: Hardware, config: SimulationConfig) -> int:
    """Return the maximum number of prompt and output tokens of a request: the smaller of the model's maximum length and
    the tokens that the pool can hold."""
    kinds = hardware.kinds(config.cache, config.hidden_attention)
    num_blocks = config.num_blocks or hardware.num_blocks
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    pairs = zip(kinds, sizes, strict=True)
    most = max(kind.longest(num_blocks, size) for kind, size in pairs if kind.offered)
    return min(config.max_model_len or hardware.max_model_len, most)


def sample_workload(trace: Trace, config: SimulationConfig) -> Workload:
    """Draw the requests and arrivals of a run from a trace, with the run's seed."""
    if trace.calls is not None:
        return _sample_sessions(trace, trace.calls, config)
    for name in ("num_sessions", "concurrent_sessions", "max_think_s"):
        if getattr(config, name) is not None:
            raise ConfigError(f"trace {trace.name} has no sessions; leave {name} out (--{name.replace('_', '-')})")
    rng = np.random.default_rng([config.seed, 0xA97])
    n = config.num_requests
    recorded = trace.arrival_s is not None and config.cv is None
    if recorded:
        n = min(n, trace.num_requests)
        picked = trace.take(np.arange(n))
        assert picked.arrival_s is not None
        arrival_s = scale_arrivals(picked.arrival_s, config.rate)
    else:
        if config.rate is None:
            raise ConfigError(f"trace {trace.name} has no arrivals; give the number of requests per second (--rate)")
        # Drawn without replacement as long as the trace has enough requests.
        index = rng.permutation(trace.num_requests)[:n]
        if n > index.size:
            index = np.concatenate([index, rng.integers(0, trace.num_requests, n - index.size)])
        picked = trace.take(index)
        cv = 1.0 if config.cv is None else config.cv
        arrival_s = draw_arrivals(n, config.rate, cv, np.random.default_rng([config.seed, 0x7A1]))
    best_effort = picked.best_effort
    return Workload(
        prompt_tokens=picked.prompt_tokens,
        output_tokens=picked.output_tokens,
        arrival_s=arrival_s,
        best_effort=np.zeros(n, np.bool_) if best_effort is None else best_effort,
        tenant=_draw_tenants(n, config) if config.tenants > 1 else None,
        prompts=None
        if picked.hash_ids is None or config.enable_prefix_caching is False
        else prompts_of(picked, config.hash_block_tokens or picked.block_tokens, config.scale_tokens),
    )


def _sample_sessions(trace: Trace, calls: Calls, config: SimulationConfig) -> Workload:
    """Draw whole sessions, without replacement as long as the trace has enough; a session that is drawn again has other
    contents."""
    block_tokens, n = config.hash_block_tokens or trace.block_tokens, config.num_sessions or NUM_SESSIONS
    rng = np.random.default_rng([config.seed, 0xA97])
    chosen = [rng.permutation(calls.num_sessions) for _ in range(-(-n // calls.num_sessions))]
    drawn, index = calls.take(np.concatenate(chosen)[:n].tolist())
    if config.max_think_s is not None:
        drawn = dataclasses.replace(drawn, think_s=np.minimum(drawn.think_s, config.max_think_s))
    starts = np.random.default_rng([config.seed, 0x7A1])
    begin_s = np.full(n, np.nan)
    if config.concurrent_sessions is not None:
        if config.rate is not None or config.cv is not None:
            raise ConfigError(
                f"concurrent_sessions={config.concurrent_sessions}: sessions then begin when others end; leave out the rate and cv (--concurrent-sessions)"
            )
        first = min(config.concurrent_sessions, n)
        begin_s[:first] = np.sort(starts.uniform(0.0, _FIRST_BEGIN_WITHIN_S, first))
    elif config.rate is not None:
        begin_s = draw_arrivals(n, config.rate, 1.0 if config.cv is None else config.cv, starts)
    else:
        raise ConfigError(
            f"trace {trace.name} has sessions; give the number of sessions per second (--rate) or at once (--concurrent-sessions)"
        )
    picked = trace.take(index, drawn)
    arrival_s = np.full(index.size, np.nan)
    arrival_s[drawn.begins()[:-1]] = begin_s
    return Workload(
        prompt_tokens=picked.prompt_tokens,
        output_tokens=picked.output_tokens,
        arrival_s=arrival_s,
        best_effort=np.zeros(index.size, np.bool_) if picked.best_effort is None else picked.best_effort,
        tenant=None if config.tenants == 1 else _draw_tenants(n, config)[drawn.session],
        prompts=None
        if config.enable_prefix_caching is False
        else SessionPrompts(drawn, picked.prompt_tokens, block_tokens=block_tokens, scale=config.scale_tokens),
        calls=drawn,
        block_tokens=block_tokens,
    )


def with_beside(workload: Workload, hardware: Hardware, config: SimulationConfig) -> Workload:
    """Return the workload, all best-effort, followed by the requests of the trace of `SimulationConfig.beside`.

    Raises:
        ConfigError: one of both traces has no sessions, or the second one is refused.
    """
    first, second = workload.calls, draw_beside(workload, hardware, config)
    assert first is not None
    assert second.calls is not None
    if workload.block_tokens != second.block_tokens:
        raise ConfigError(f"beside={config.beside!r:.80} {_OF_SESSIONS}")
    calls = first.beside(second.calls, workload.block_tokens)
    num = workload.arrival_s.size
    prompt_tokens = np.concatenate([workload.prompt_tokens, second.prompt_tokens])
    return Workload(
        prompt_tokens=prompt_tokens,
        output_tokens=np.concatenate([workload.output_tokens, second.output_tokens]),
        arrival_s=np.concatenate([workload.arrival_s, second.arrival_s]),
        best_effort=np.arange(prompt_tokens.size) < num,
        slos=[*[config.slo] * num, *(second.slos or [config.slo] * second.arrival_s.size)],
        prompts=None
        if workload.prompts is None
        else SessionPrompts(calls, prompt_tokens, block_tokens=workload.block_tokens, scale=config.scale_tokens),
        calls=calls,
        block_tokens=workload.block_tokens,
    )


def draw_beside(workload: Workload, hardware: Hardware, config: SimulationConfig) -> Workload:
    """Return sessions of the trace of `SimulationConfig.beside`, without the workload's; the last begins before the
    workload's last session does, on average."""
    assert config.beside is not None
    name, _, text = config.beside.rpartition(":")
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (name and 0 < rate <= 1e9):
        raise ConfigError(
            f"beside={config.beside!r:.80} must be a trace and sessions per second, as in interactive-chat:0.5 (--beside)"
        )
    num = max(int(rate * np.nanmax(workload.arrival_s)), 1)
    alone = dataclasses.replace(
        config, trace=name, rate=rate, num_sessions=num, concurrent_sessions=None, beside=None, slo=OBJECTIVES.get(name, config.slo)
    )  # fmt: skip
    trace = load_trace(name)
    if trace.calls is None or workload.calls is None:
        raise ConfigError(f"beside={config.beside!r:.80} {_OF_SESSIONS}")
    drawn = sample_workload(drop_oversized(trace, hardware, alone), alone)
    return dataclasses.replace(drawn, slos=[alone.slo] * drawn.arrival_s.size)


def _draw_tenants(num_requests: int, config: SimulationConfig) -> NDArray[np.int32]:
    shares = 1.0 / np.arange(1, config.tenants + 1)
    rng = np.random.default_rng([config.seed, 0x7E4])
    return rng.choice(config.tenants, num_requests, p=shares / shares.sum()).astype(np.int32)


def with_distinct_prompts(workload: Workload, seed: int) -> Workload:
    """Return the workload with random prompts: a preempted request then finds only its own blocks in the cache."""
    rng = np.random.default_rng([seed, 0x50A])
    prompts = [rng.integers(0, 1 << 30, length, dtype=np.int32) for length in workload.prompt_tokens.tolist()]
    return dataclasses.replace(workload, prompts=prompts)


class Arrivals:
    """The requests of a workload in order of arrival. Calls of sessions arrive once the answers that they wait for have
    come.

    Args:
        workload: the requests.
        config: configuration of the run; if its `max_tokens` is set, `TraceEnds` must end the outputs.
        longest: maximum number of prompt and output tokens of a request (`longest_request`).

    Attributes:
        arrival_s: (requests,) arrival times in seconds; nan: not known yet.
    """

    def __init__(self, workload: Workload, config: SimulationConfig, longest: int = 2**31) -> None:
        self.arrival_s = workload.arrival_s.copy()
        self._workload, self._config, self._longest = workload, config, longest
        known = ~np.isnan(self.arrival_s)
        self._due = [(self.arrival_s[i], i) for i in np.flatnonzero(known).tolist()]
        heapq.heapify(self._due)
        self._params: dict[int, SamplingParams] = {}
        self._after: dict[int, list[int]] = {}
        self._to_begin = collections.deque[int]()
        self._left: list[int] = []
        calls = workload.calls
        knows = calls is not None and config.retention.startswith("clairvoyant")
        self._gap_s = calls.gaps_s().tolist() if knows and calls is not None else []
        if calls is not None:
            for i, before in enumerate(calls.follows.tolist()):
                if before >= 0:
                    self._after.setdefault(before, []).append(i)
            begins = calls.begins()
            self._to_begin.extend(i for i in begins[:-1].tolist() if not known[i])
            self._left = np.diff(begins).tolist()

    @property
    def num_requests(self) -> int:
        return self.arrival_s.size

    @property
    def next_s(self) -> float:
        """Time of the next arrival in seconds; infinite if none is known."""
        return self._due[0][0] if self._due else math.inf

    def slo(self, index: int) -> SLO:
        """Return the objectives of a request."""
        return self._workload.slo(index, self._config.slo)

    def take(self) -> EngineRequest:
        """Return the next request; its index in the workload is its id."""
        arrival_s, i = heapq.heappop(self._due)
        workload, config = self._workload, self._config
        prompt_len, length = int(workload.prompt_tokens[i]), int(workload.output_tokens[i])
        if config.max_tokens is not None:
            length = min(config.max_tokens, max(self._longest - prompt_len, 1))
        params = self._params.get(length)
        if params is None:
            stops = () if config.max_tokens is None else (_STOP_TOKEN,)
            params = self._params[length] = SamplingParams(max_tokens=length, temperature=0.0, stop_token_ids=stops)
        return EngineRequest(
            request_id=str(i),
            prompt=None,
            prompt_token_ids=_prompt(prompt_len) if workload.prompts is None else workload.prompts[i],
            params=params,
            slo=self.slo(i),
            arrival_s=float(arrival_s),
            slo_class="be" if workload.best_effort[i] else "rt",
            tenant=None if workload.tenant is None else str(workload.tenant[i]),
            session_id=None if workload.calls is None else workload.calls.chain_id(i),
            work="" if workload.calls is None else workload.calls.works[i],
            retain_s=self._gap_s[i] if self._gap_s else None,
        )

    def ended(self, index: int, at_s: float) -> None:
        """Record that a request has ended or was rejected: calls that wait for it arrive after their think times."""
        calls = self._workload.calls
        if calls is None:
            return
        for i in self._after.pop(index, ()):
            self._arrives(i, at_s + float(calls.think_s[i]))
        session = int(calls.session[index])
        self._left[session] -= 1
        if not self._left[session] and self._to_begin:
            self._arrives(self._to_begin.popleft(), at_s)

    def _arrives(self, index: int, at_s: float) -> None:
        self.arrival_s[index] = at_s
        heapq.heappush(self._due, (at_s, index))


class TraceEnds:
    """The engine's output processor in a run with `SimulationConfig.max_tokens`: ends outputs at their trace lengths.

    Args:
        lengths: (requests,) number of output tokens, indexed by request id.
    """

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self._left = lengths.tolist()

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Count a token; return an empty stop string, which ends the output, at the last token, else None."""
        number = int(request.request_id)
        self._left[number] -= 1
        return None if self._left[number] else ""


def _prompt(length: int) -> NDArray[np.int32]:
    if length <= _NO_TEXT.size:
        return _NO_TEXT[:length]
    return np.zeros(length, np.int32)
