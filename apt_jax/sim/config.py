"""The configuration of a simulation."""

import dataclasses

from apt_jax.config import SLO, CacheMode, HiddenAttention
from apt_jax.errors import ConfigError
from apt_jax.options import check_options, option
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
    """Number of devices per replica (default: the fewest that are described)."""
    trace: str = option("sharegpt", metavar="NAME|FILE")
    """Name from `apt_jax.sim.trace.known_traces`, or a CSV file."""
    rate: float | None = option(None, metavar="R", positive=True, high=1e9, rule="be positive requests/s")
    """Requests per second; needed unless the trace has arrivals, which it stretches, or --rates or --find-rate is
    given."""
    cv: float | None = option(None, metavar="CV", positive=True, low=0.05, high=100)
    """Coefficient of variation of the gaps (Gamma; 1: Poisson; default: recorded arrivals, else 1)."""
    num_requests: int = option(1000, metavar="N", positive=True, low=1)
    """Number of requests, drawn from the trace at random; with recorded arrivals its first ones."""
    seed: int = option(0, metavar="SEED", low=0)
    """Random seed of requests and arrivals."""
    policy: str = option("apt", flag="--scheduling-policy", metavar="POLICY[,POLICY...]")
    """Scheduling policy, as in `SchedulerConfig.policy`."""
    cache: CacheMode = option("hybrid")
    """Cache kinds that the scheduler may use."""
    hidden_attention: HiddenAttention = option("auto")
    """Cost of the hidden kind: the paper's (reproject) or ours (absorb)."""
    rho_us: float | None = option(None, metavar="US")
    """Microseconds per cached token that policies charge the hidden cache with (rho of Apt-Serve Eq. 6), whatever it
    really costs: 70 is what the authors' probe most likely gave, 5 the same in float16 (default: the true cost, 15.9
    for OPT-13B reprojected on an A100). There is no charge per request."""
    host_s: float = 0.0
    """Seconds of the host for every step. The device is idle meanwhile, unless steps overlap and it has one to run."""
    overlap: bool | None = option(None)
    """Decide and dispatch a step while the one before it runs, as apt-jax serve does (default: as the described engine
    does: yes for descriptions of apt-jax calibrate, no for the papers' engines). A new request then waits for up to two
        steps."""
    slo: SLO = SLO(ttft_s=1.0, tbt_s=1.0)  # noqa: RUF009 - frozen
    output_scale: float = option(1.0, metavar="FACTOR", positive=True, high=1000, rule="be positive")
    """Factor on output lengths."""
    max_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """Output tokens that each request allows itself, where the model's positions and the pool have room for them; it
    ends by itself at its length in the trace, which no policy knows, or is cut off (default: it declares its length in
    the trace, and policies that read max_tokens know it)."""
    drop_too_long: bool = option(False)
    """Leave out requests that can never fit instead of rejecting the trace; bundled traces always do, and the result
    says how many."""
    max_num_seqs: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of requests that hold cache (default: 256, as in vLLM, or what a calibrated description was
    measured up to)."""
    max_num_batched_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of tokens per step (default: what a calibrated description was measured up to, else the model's
    positions, 2,048 to 16,384)."""
    num_blocks: int | None = option(None, flag="--num-blocks-override", metavar="BLOCKS", positive=True, low=1)
    """Number of cache blocks (default: the hardware's)."""
    replicas: int = option(1, metavar="N", positive=True, low=1)
    """Number of engines that share the requests, each on hardware of its own."""
    routing_policy: str = option("round_robin")
    """Policy that chooses the replica of a request: in turn, the least loaded as the gateway smg computes it, or the
    one with most time left to the request's TTFT SLO. A name of `apt_jax.sim.routing.ROUTING_POLICIES`."""
    enable_prefix_caching: bool | None = option(None)
    """Share the cache of common prompt prefixes, by the column hash_ids of the trace (default: where the trace has
    one)."""
    swap_space: float = option(0.0, metavar="GIB", low=0, high=1 << 20)
    """Host memory for cached blocks that leave the device, in GiB, as of `apt-jax serve`; prompts are then unlike each
    other where the trace has no column hash_ids (default: 0, none)."""
    share_blocks: bool = option(True)
    """Let real-time and best-effort requests share blocks, under a policy that does so (bros) and with swap space
    (default: on)."""
    hash_block_tokens: int = option(512, metavar="N", positive=True, low=1)
    """Prompt tokens per entry of the trace's hash_ids, 512 in the traces of Mooncake."""
    tenants: int = option(1, metavar="N", positive=True, low=1)
    """Number of tenants that send requests, for the policy vtc: the first sends twice as many as the second, three
    times as many as the third, and so on (Zipf's law)."""

    def __post_init__(self) -> None:
        def require(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        check_options(self)
        require(
            not self.swap_space or self.enable_prefix_caching is not False,
            f"swap_space={self.swap_space:g} keeps cached prefixes; leave out --no-enable-prefix-caching or --swap-space",
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
