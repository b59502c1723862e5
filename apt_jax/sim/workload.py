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
"""Stop token that is never sampled; it marks requests that may end before `max_tokens`."""
_NO_TEXT = _read_only_zeros(1 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The requests of one run; all arrays have one entry per request."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    best_effort: NDArray[np.bool_]
    slos: Sequence[SLO] | None = None
    """Objectives of each request; None: `SimulationConfig.slo` for all."""
    tenant: NDArray[np.int32] | None = None
    """Number of the tenant that each request comes from; None: one tenant."""
    prompts: Sequence[NDArray[np.int32]] | None = None
    """Token ids of each prompt, `prompt_tokens` in length; None: only lengths are known, so prefix caching is not
    possible."""

    def slo(self, index: int, default: SLO) -> SLO:
        """Return the objectives of one request."""
        return default if self.slos is None else self.slos[index]

    def share_with_gaps(self, more_than: int = 100) -> float:
        """Return the share of the requests with more than `more_than` gaps between output tokens.

        The P99 of more than 100 gaps ignores the longest gap, so such a request can meet its TBT objective despite one
        preemption.
        """
        return float(np.mean(self.output_tokens - 1 > more_than))


def drop_oversized(trace: Trace, hardware: Hardware, config: SimulationConfig) -> Trace:
    """Scale the output lengths of a trace, and leave out the requests that the hardware can never serve.

    Raises:
        ConfigError: a request of a trace file can never fit and `drop_too_long` is false, or no request fits.
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
    """Return the maximum number of prompt and output tokens of a request: the smaller of the model's maximum length and
    the tokens that the pool can hold."""
    kinds = hardware.kinds(config.cache, config.hidden_attention)
    num_blocks = config.num_blocks or hardware.num_blocks
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    pairs = zip(kinds, sizes, strict=True)
    most = max(num_blocks // kind.blocks_per_group * size for kind, size in pairs if kind.offered)
    return min(hardware.max_model_len, most)


def sample_workload(trace: Trace, config: SimulationConfig) -> Workload:
    """Draw the requests and arrivals of a run from a trace, with the run's seed."""
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
        else prompts_of(picked, config.hash_block_tokens),
    )


def _draw_tenants(num_requests: int, config: SimulationConfig) -> NDArray[np.int32]:
    shares = 1.0 / np.arange(1, config.tenants + 1)
    rng = np.random.default_rng([config.seed, 0x7E4])
    return rng.choice(config.tenants, num_requests, p=shares / shares.sum()).astype(np.int32)


def with_distinct_prompts(workload: Workload, seed: int) -> Workload:
    """Return the workload with random prompts: a preempted request then finds only its own blocks in the cache."""
    rng = np.random.default_rng([seed, 0x50A])
    prompts = [rng.integers(0, 1 << 30, length, dtype=np.int32) for length in workload.prompt_tokens.tolist()]
    return dataclasses.replace(workload, prompts=prompts)


def engine_requests(workload: Workload, config: SimulationConfig, longest: int = 2**31) -> list[EngineRequest]:
    """Return the workload as engine requests, in order of arrival; the index of a request is its id.

    Args:
        workload: the requests.
        config: configuration of the run; if its `max_tokens` is set, `TraceEnds` must end the outputs.
        longest: maximum number of prompt and output tokens of a request (`longest_request`).
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
