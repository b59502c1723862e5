"""The configuration of a simulation."""

import dataclasses

from apt_jax.config import SLO, CacheConfig, CacheMode, HiddenAttention, SessionOrder
from apt_jax.errors import ConfigError
from apt_jax.options import check_options, option
from apt_jax.sched.retention import make_retention
from apt_jax.sim.routing import ROUTING_POLICIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Configuration of a simulation; the flags of `apt-jax simulate` derive from the fields."""

    model: str = option("opt-13b", metavar="MODEL")
    """Model of the hardware description."""
    hardware: str = option("a100-40gb", metavar="NAME|FILE")
    """Name from `apt_jax.sim.hardware.known_hardware`, or a description file (.json; apt-jax calibrate --describe
    writes one)."""
    num_devices: int | None = option(None, flag=("--tensor-parallel-size", "-tp"), metavar="N")
    """Number of devices per replica (default: the smallest number that has a description)."""
    trace: str = option("sharegpt", metavar="NAME|FILE")
    """Name from `apt_jax.sim.trace.known_traces`, or a CSV file."""
    rate: float | None = option(None, metavar="R", positive=True, high=1e9, rule="be positive requests/s")
    """Requests per second, or sessions per second of a trace of sessions; recorded arrivals are rescaled to it;
    required for a trace without arrivals, unless --rates, --find-rate or --concurrent-sessions is given."""
    cv: float | None = option(None, metavar="CV", positive=True, low=0.05, high=100)
    """Coefficient of variation of the gaps between arrivals (Gamma; 1: Poisson; default: recorded arrivals, else 1)."""
    num_requests: int = option(1000, metavar="N", positive=True, low=1)
    """Number of requests, drawn from the trace at random; with recorded arrivals the first N requests of the trace; not
    used with sessions."""
    num_sessions: int | None = option(None, metavar="N", positive=True, low=1)
    """Number of sessions, drawn at random from a trace of sessions (docs/lab/sessions.md; default: 20)."""
    concurrent_sessions: int | None = option(None, metavar="N", positive=True, low=1)
    """Number of sessions held constant: the next begins when one has ended. The first N begin within a minute."""
    max_think_s: float | None = option(None, metavar="SECONDS", low=0, high=30 * 86400)
    """Longest time between an answer and the next call of a session; longer ones are cut (default: as recorded)."""
    beside: str | None = option(None, metavar="NAME|FILE:R")
    """A second trace of sessions, R of which begin per second as long as sessions of --trace begin. Its requests are
    real-time and have its own objectives, if it is a generated trace with some; those of --trace are best-effort."""
    seed: int = option(0, metavar="SEED", low=0)
    """Random seed of requests and arrivals."""
    policy: str = option("apt", flag="--scheduling-policy", metavar="POLICY[,POLICY...]")
    """Scheduling policy, as in `SchedulerConfig.policy`."""
    cache: CacheMode = option("hybrid")
    """Cache kinds that the scheduler may use."""
    hidden_attention: HiddenAttention = option("auto")
    """Cost of attention over the hidden cache: the paper's (reproject) or ours (absorb)."""
    rho_us: float | None = option(None, metavar="US")
    """Microseconds per cached token that policies assume as the cost of the hidden cache (rho of Apt-Serve Eq. 6),
    independent of its simulated cost (default: the simulated cost, 15.9 for OPT-13B reprojected on an A100).
    Apt-Serve's authors most likely measured 70, or 5 in float16. With this option policies assume no cost per
    request."""
    host_s: float = 0.0
    """Host time per step in seconds. The device is idle during it, unless steps overlap and another step runs."""
    overlap: bool | None = option(None)
    """Schedule and dispatch a step while the previous one runs, as apt-jax serve does; a new request then waits for up
    to two steps (default: on with a description from apt-jax calibrate, off with the descriptions of the papers'
    engines)."""
    slo: SLO = SLO(ttft_s=1.0, tbt_s=1.0)  # noqa: RUF009 - frozen
    output_scale: float = option(1.0, metavar="FACTOR", positive=True, high=1000, rule="be positive, up to 1000")
    """Factor on output lengths."""
    scale_tokens: float = option(1.0, metavar="FACTOR", positive=True, high=1000, rule="be positive, up to 1000")
    """Factor on prompt and output lengths, such as 1/64 for a small machine; prompts share as large a part as before."""
    max_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """max_tokens of each request, limited to the positions left in the model and the pool; a request ends at its output
    length in the trace, which no policy knows, or is cut off at max_tokens (default: max_tokens is the output length in
    the trace, so policies that read max_tokens know it)."""
    drop_too_long: bool = option(False)
    """Drop requests that can never fit instead of rejecting the trace (always on for bundled traces); the result counts
    them."""
    max_num_seqs: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of requests that hold cache (default: the maximum that a calibrated description was measured
    with, else 256, as in vLLM)."""
    max_num_batched_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of tokens per step (default: the maximum that a calibrated description was measured with, else
    the model's maximum length, clamped to between 2,048 and 16,384)."""
    max_model_len: int | None = option(None, metavar="TOKENS", low=1, high=2**31 - 1)
    """Maximum length of prompt and output, for a variant of the model with another context length and the same costs
    (default: as in the hardware description)."""
    num_blocks: int | None = option(None, flag="--num-blocks-override", metavar="BLOCKS", positive=True, low=1)
    """Number of cache blocks (default: as in the hardware description)."""
    replicas: int = option(1, metavar="N", positive=True, low=1)
    """Number of engines that share the requests, each on its own hardware."""
    routing_policy: str = option("round_robin")
    """Policy that chooses the replica of a request: round_robin takes them in turn, session takes the
    replica of the session's earlier calls, least_load takes the least loaded
    by the formula of the gateway smg, expected_slack takes the replica that leaves the most time to the request's TTFT
    SLO."""
    enable_prefix_caching: bool | None = option(None)
    """Share the cache of common prompt prefixes, as given by the column hash_ids of the trace (default: on if the trace
    has this column)."""
    swap_space: float = option(0.0, metavar="GIB", low=0, high=1 << 20)
    """Host memory for blocks evicted from the device, in GiB, as in `apt-jax serve`. If the trace has no column
    hash_ids, each prompt gets different tokens, so that no two share a prefix (default: 0, no host memory)."""
    retention: str = option("lru", metavar="POLICY")
    """Which cached prefixes stay when blocks are needed, as in `apt-jax serve`; clairvoyant knows when each session
    calls again (docs/sessions.md)."""
    session_order: SessionOrder = option("arrival")
    """Order of requests for policies that take them by arrival, as in `apt-jax serve`."""
    share_blocks: bool = option(True)
    """Let real-time and best-effort requests share blocks; needs swap space and a policy that shares blocks (bros)
    (default: on)."""
    hash_block_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """Prompt tokens per entry of the trace's hash_ids, or per block that calls of a session share (default: 512, as in
    Mooncake's traces; 64 for sessions)."""
    tenants: int = option(1, metavar="N", positive=True, low=1)
    """Number of tenants that send requests, for the policy vtc; the first tenant sends twice as many requests as the
    second, three times as many as the third, and so on (Zipf's law)."""

    def __post_init__(self) -> None:
        def require(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        check_options(self)
        if self.retention.partition("?")[0] != "clairvoyant":
            make_retention(self.retention)  # a wrong name fails first
        require(
            not self.swap_space or self.enable_prefix_caching is not False,
            f"swap_space={self.swap_space:g} keeps cached prefixes; leave out --no-enable-prefix-caching or --swap-space",
        )
        require(
            self.beside is None or (self.rate is not None and self.tenants == 1),
            f"beside={self.beside!r:.80} needs a rate of the first trace, and one tenant (--beside, --rate, --tenants)",
        )
        rho_us = self.rho_us
        require(
            rho_us is None or 0 <= rho_us < 1e6,
            f"rho_us={rho_us!r} must lie in [0, 1e6) microseconds (--rho-us)",
        )
        require(
            0 <= self.host_s < 1e3,
            f"host_s={self.host_s!r} must lie in [0, 1000) seconds (--host-ms)",
        )
        require(
            self.routing_policy in ROUTING_POLICIES,
            f"routing_policy={self.routing_policy!r:.40} must be one of {', '.join(ROUTING_POLICIES)} (--routing-policy)",
        )

    def cache_config(self, block_size: int, *, prefix_caching: bool) -> CacheConfig:
        """Return the cache configuration of an engine.

        Args:
            block_size: number of tokens whose keys (or whose values) a block of the hardware's pool holds.
            prefix_caching: whether the engine may look for common prompt prefixes.
        """
        return CacheConfig(
            block_size=block_size,
            mode=self.cache,
            enable_prefix_caching=prefix_caching,
            swap_space=self.swap_space,
            retention="lru" if self.retention.startswith("clairvoyant") else self.retention,
            share_blocks=self.share_blocks,
        )
