"""The requests of a simulation: drawn from a trace, with arrival times, classes and tenants."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.costs.hardware import Hardware
from apt_jax.errors import ConfigError
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.trace import Trace, draw_arrivals, prompts_of, scale_arrivals


def _read_only_zeros(length: int) -> NDArray[np.int32]:
    zeros = np.zeros(length, np.int32)
    zeros.flags.writeable = False
    return zeros


_STOP_TOKEN = 1
"""Never sampled: what has it may end before `max_tokens`."""
_NO_TEXT = _read_only_zeros(1 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The requests of one run: lengths, arrivals, classes."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    best_effort: NDArray[np.bool_]
    slos: Sequence[SLO] | None = None
    """Objectives of each request; None: `SimulationConfig.slo` of all."""
    tenant: NDArray[np.int32] | None = None
    """Number of the sender of each request; None: one sender."""
    prompts: Sequence[NDArray[np.int32]] | None = None
    """Token ids of each prompt, of `prompt_tokens` length; None: only lengths are known, and nothing is found
    cached."""

    def slo(self, index: int, default: SLO) -> SLO:
        """The objectives of one request."""
        return default if self.slos is None else self.slos[index]

    def share_with_gaps(self, more_than: int = 100) -> float:
        """Share of the requests with more than this number of gaps between output tokens.

        The P99 of more than 100 gaps forgives the longest one, so that such a request may be preempted once and still
        attain.
        """
        return float(np.mean(self.output_tokens - 1 > more_than))


def drop_oversized(trace: Trace, hardware: Hardware, config: SimulationConfig) -> Trace:
    """The trace with scaled outputs, without (or refused for) requests that the hardware can never serve.

    Raises:
        ConfigError: a request that can never fit, unless `drop_too_long` or the trace is a bundled one.
    """
    trace = trace.scale_outputs(config.output_scale)
    limit = longest_request(hardware, config)
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    fits = total <= limit
    if fits.all():
        return trace
    if not (config.drop_too_long or trace.lines is None or not config.trace.endswith((".csv", ".gz"))):
        i = int(np.flatnonzero(~fits)[0])
        raise ConfigError(
            f"{trace.name} line {trace.lines[i]}: {trace.prompt_tokens[i]} prompt and {trace.output_tokens[i]} output "
            f"tokens can never fit {config.model} on {hardware.name} ({limit} tokens per request); "
            "--drop-too-long leaves such requests out"
        )
    kept = trace.take(np.flatnonzero(fits))
    if not kept.num_requests:
        raise ConfigError(
            f"{trace.name}: no request fits {config.model} on {hardware.name} ({limit} tokens per request)"
        )
    return kept


def longest_request(hardware: Hardware, config: SimulationConfig) -> int:
    """Tokens of prompt and output that a request can have: the model's positions, or what the pool holds."""
    kinds = hardware.kinds(config.cache, config.hidden_attention)
    num_blocks = config.num_blocks or hardware.num_blocks
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    pairs = zip(kinds, sizes, strict=True)
    most = max(num_blocks // kind.blocks_per_group * size for kind, size in pairs if kind.offered)
    return min(hardware.max_model_len, most)


def sample_workload(trace: Trace, config: SimulationConfig) -> Workload:
    """Requests and arrivals of a run, from its seed."""
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
            raise ConfigError(f"trace {trace.name} has no arrivals: say how many requests per second (--rate)")
        # Without replacement while there are enough.
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
        else prompts_of(picked, config.hash_block_tokens),
    )


def _draw_tenants(num_requests: int, config: SimulationConfig) -> NDArray[np.int32]:
    shares = 1.0 / np.arange(1, config.tenants + 1)
    rng = np.random.default_rng([config.seed, 0x7E4])
    return rng.choice(config.tenants, num_requests, p=shares / shares.sum()).astype(np.int32)


def with_distinct_prompts(workload: Workload, seed: int) -> Workload:
    """The workload with a text for each prompt, unlike all others: a request that is preempted finds its own cache."""
    rng = np.random.default_rng([seed, 0x50A])
    prompts = [rng.integers(0, 1 << 30, length, dtype=np.int32) for length in workload.prompt_tokens.tolist()]
    return dataclasses.replace(workload, prompts=prompts)


def engine_requests(workload: Workload, config: SimulationConfig, longest: int = 2**31) -> list[EngineRequest]:
    """The workload as the engine takes it, in order of arrival; the id is the index.

    Args:
        workload: the requests.
        config: of the run; with its `max_tokens`, `TraceEnds` ends them.
        longest: tokens of prompt and output that there is room for (`longest_request`).
    """
    greedy: dict[int, SamplingParams] = {}
    stops = () if config.max_tokens is None else (_STOP_TOKEN,)
    requests = []
    for i, (prompt_len, length, arrival_s, best_effort) in enumerate(
        zip(
            workload.prompt_tokens.tolist(),
            workload.output_tokens.tolist(),
            workload.arrival_s.tolist(),
            workload.best_effort.tolist(),
            strict=True,
        )
    ):
        if config.max_tokens is not None:
            length = min(config.max_tokens, max(longest - prompt_len, 1))
        params = greedy.get(length)
        if params is None:
            params = greedy[length] = SamplingParams(max_tokens=length, temperature=0.0, stop_token_ids=stops)
        requests.append(
            EngineRequest(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=_prompt(prompt_len) if workload.prompts is None else workload.prompts[i],
                params=params,
                slo=workload.slo(i, config.slo),
                arrival_s=arrival_s,
                slo_class="be" if best_effort else "rt",
                tenant=None if workload.tenant is None else str(workload.tenant[i]),
            )
        )
    return requests


class TraceEnds:
    """The engine's output processor of a run with `SimulationConfig.max_tokens`: outputs end where the trace says.

    Args:
        lengths: (requests,) output tokens, by request id.
    """

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self._left = lengths.tolist()

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Count a token; an empty stop string ends the output."""
        number = int(request.request_id)
        self._left[number] -= 1
        return None if self._left[number] else ""


def _prompt(length: int) -> NDArray[np.int32]:
    if length <= _NO_TEXT.size:
        return _NO_TEXT[:length]
    return np.zeros(length, np.int32)
