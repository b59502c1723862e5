"""The smallest number of devices that keeps latency objectives under a load, found with the simulator.

    load, objectives ──► can each request alone be in time? ──no──► binding constraint
                                  │ yes
                                  ▼
    1, 2, 4, .. replicas until the target is attained, then bisection, under each setting ──► `Answer`

A number of replicas is tried on the same seeds as every other, and attains the target if the mean attainment over the
seeds does. A run ends early once the mean can no longer reach the target; its attainment is then an upper bound. A
later setting replaces an earlier one only if it needs fewer replicas. Attainment is assumed to grow with the replicas;
that the answer attains the target and one replica fewer does not has been simulated.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO, SchedulerConfig, SessionOrder
from apt_jax.core.kinds import KV
from apt_jax.costs.hardware import Hardware
from apt_jax.errors import ConfigError, counted, nearest
from apt_jax.metrics import RequestRecord
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import known_hardware, load_hardware
from apt_jax.sim.host_link import block_bytes, with_transfers
from apt_jax.sim.sessions import alone_s
from apt_jax.sim.simulator import SimulationResult, simulate, step_limits
from apt_jax.sim.trace import Trace, load_trace
from apt_jax.sim.workload import Workload, drop_oversized, longest_request, sample_workload

BURST_TTFTS = 10
"""Multiple of the TTFT objective: a run whose requests all arrive within it counts as a burst, not a sustained rate."""
NUM_REQUESTS, MOST_REQUESTS = 300, 3000
"""Usual number of requests of a run, and the number up to which it grows to avoid a burst."""
NUM_CALLS, _LEAST_SESSIONS = 200, 4
"""Usual number of calls of a run with sessions, and the least number of sessions."""
HOST_GIB = 64.0
"""GiB of host memory per replica in `usual_settings`."""
Progress = Callable[[float, str], None]
"""Function of the share of the work that is done, in [0, 1], and a description of the current simulation."""

_TRIALS = 6
"""Numbers of replicas that a search tries, for the progress."""
_BUSY = 0.85
"""Share of the time from which devices count as fully used."""
_LOST = 0.05
"""Share of the prompt tokens; if more are computed again, late requests are explained by memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Fields of `SimulationConfig` that a plan may choose beside the number of devices."""

    policy: str
    retention: str = "lru"
    session_order: SessionOrder = "arrival"
    swap_space: float = 0.0
    """GiB of host memory per replica."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """Shares of the requests that an idle engine with all shared tokens cached serves in time: upper bounds for any
    policy and any number of replicas."""

    ttft: float
    tbt: float
    e2e: float
    slo: float
    longest_prefill_s: float
    """Seconds from the arrival of the slowest request to its first token."""
    slowest_step_s: float
    """Seconds of a decode step of one request, for the longest prompt."""
    longest_e2e_s: float
    shared: float
    """Share of the prompt tokens that an earlier prompt begins with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A number of replicas under a setting, simulated on every seed."""

    config: SimulationConfig
    """Configuration of the first seed."""
    attainments: tuple[float, ...]
    """SLO attainment per seed, fewer if the target was out of reach before; upper bounds if not `is_whole`."""
    is_whole: bool
    attains: bool
    """True if the mean attainment is at least the target."""
    limit: str
    """Reason for late requests: the objective that most of them missed, and the scarce resource."""
    tokens_per_s: float
    """Output tokens per second, mean over the seeds."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.attainments)

    def as_dict(self) -> dict[str, Any]:
        return {
            "replicas": self.config.replicas, "policy": self.config.policy, "retention": self.config.retention,
            "session_order": self.config.session_order, "swap_space": self.config.swap_space,
            "attainment": self.mean, "half_width": half_width(self.attainments), "by_seed": self.attainments,
            "is_upper_bound": not self.is_whole, "attains": self.attains, "limit": self.limit,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer for one hardware description."""

    hardware: Hardware
    trials: tuple[Trial, ...]
    """All that was simulated, in order."""
    best: Trial | None
    """The trial of the answer; None: the target is out of reach, or needs more devices than another answer."""
    fewer: Trial | None
    """The trial with one replica fewer; None: the answer is one replica, or there is no answer."""
    constraint: str
    """Reason why `best` is None; else empty."""
    share_left_out: float
    """Share of the trace's requests that can never fit, and are left out."""

    @property
    def num_devices(self) -> int | None:
        return None if self.best is None else self.best.config.replicas * self.hardware.num_devices

    @property
    def device_hours_per_million(self) -> float | None:
        """Device hours per million output tokens at this load."""
        if self.best is None or self.num_devices is None or not self.best.tokens_per_s:
            return None
        return self.num_devices * 1e6 / (self.best.tokens_per_s * 3600)

    def as_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware.name, "tensor_parallel_size": self.hardware.num_devices,
            "num_devices": self.num_devices, "constraint": self.constraint or None,
            "device_hours_per_million_output_tokens": self.device_hours_per_million,
            "pool_tokens": self.hardware.num_kv_tokens, "share_left_out": self.share_left_out,
            "best": None if self.best is None else self.best.as_dict(),
            "one_replica_fewer": None if self.fewer is None else self.fewer.as_dict(),
            "trials": [trial.as_dict() for trial in self.trials],
        }  # fmt: skip


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of `values` (Student's t); 0 for one value."""
    from scipy.special import stdtrit  # heavy to import

    n = len(values)
    return statistics.stdev(values) / n**0.5 * float(stdtrit(n - 1, 0.975)) if n > 1 else 0.0


def hardware_named(model: str, name: str) -> str:
    """Return the name of the device kind that a user means: a file, a name, or the beginning of one, in any case.

    Raises:
        ConfigError: the model has no description of such a device, or of several.
    """
    if name.endswith(".json"):
        return name
    of_model = sorted({hardware for of, hardware, _ in known_hardware() if of == model})
    if not of_model:
        models = sorted({of for of, _, _ in known_hardware()})
        raise ConfigError(
            f"no hardware description for model {model!r:.60}{nearest(model, models)}; known: {', '.join(models)} (--model, or a .json file as --hardware)"
        )
    wanted = name.lower()
    meant = sorted((one for one in of_model if one.startswith(wanted)), key=len)
    if not meant or wanted == "":
        raise ConfigError(
            f"no description of {model} on {name!r:.60}{nearest(wanted, of_model)}; known: {', '.join(of_model)} (--hardware)"
        )
    if not all(one.startswith(meant[0]) for one in meant):
        raise ConfigError(f"{name!r:.60} is one of {', '.join(meant)}; give the whole name (--hardware)")
    return meant[0]


def usual_settings(hardware: Hardware, *, of_sessions: bool) -> list[Setting]:
    """Return the settings that a plan chooses from: the defaults of `apt-jax serve`, and for sessions retention by
    value with host memory, if the description tells the size of a block and the host's bandwidth."""
    found = [Setting(policy=SchedulerConfig().policy)]
    if of_sessions:
        with contextlib.suppress(ConfigError):
            with_transfers(hardware.step_costs(), hardware)
            block_bytes(hardware)
            found.append(
                Setting(
                    policy=SchedulerConfig().policy, retention="knapsack", session_order="hrrn", swap_space=HOST_GIB
                )
            )
    return found


def sized(config: SimulationConfig, trace: Trace) -> SimulationConfig:
    """Return the configuration with the usual number of requests, or without `num_sessions` of sessions."""
    if trace.calls is None:
        wanted = math.ceil((config.rate or 0.0) * BURST_TTFTS * min(config.slo.ttft_s, 60.0))
        return dataclasses.replace(config, num_requests=min(max(wanted, NUM_REQUESTS), MOST_REQUESTS))
    num = max(math.ceil(NUM_CALLS * trace.calls.num_sessions / trace.num_requests), _LEAST_SESSIONS)
    return dataclasses.replace(config, num_sessions=max(num, 2 * (config.concurrent_sessions or 0)))


def alone(workload: Workload, config: SimulationConfig, hardware: Hardware) -> Alone | None:
    """Return the attainment of one request at a time; None: not known, because keys and values are not used or step times
    are those of compiled programs."""
    if hardware.programs is not None or not hardware.kinds(config.cache, config.hidden_attention)[KV].offered:
        return None
    prompt, output = workload.prompt_tokens, np.minimum(workload.output_tokens, config.max_tokens or 2**31 - 1)
    costs, shared = hardware.step_costs(config.hidden_attention), _shared(workload, config)
    budget = step_limits(config, hardware)[1]
    first_s = alone_s(prompt, np.ones_like(output), shared, costs, budget)
    last_s = alone_s(prompt, output, shared, costs, budget)
    row_s = costs.decode_base_s + costs.decode_per_request_s + costs.experts_read_s(1)
    step_s = row_s + costs.decode_per_token_s * (prompt + 1.0)
    step_s += costs.decode_per_window_token_s * np.minimum(prompt + 1.0, costs.window_tokens)
    step_s = np.where(output > 1, step_s, 0.0)
    slo = config.slo
    in_time = first_s <= slo.ttft_s, step_s <= slo.tbt_s, last_s <= slo.e2e_s
    return Alone(
        ttft=float(in_time[0].mean()),
        tbt=float(in_time[1].mean()),
        e2e=float(in_time[2].mean()),
        slo=float((in_time[0] & in_time[1] & in_time[2]).mean()),
        longest_prefill_s=float(first_s.max()),
        slowest_step_s=float(step_s.max()),
        longest_e2e_s=float(last_s.max()),
        shared=float(shared.sum() / prompt.sum()),
    )


def _shared(workload: Workload, config: SimulationConfig) -> NDArray[np.int64]:
    """Return the (n,) most tokens at the beginning of each prompt that can be found cached."""
    prompts = workload.prompts
    if prompts is None:
        return np.zeros(workload.prompt_tokens.size, np.int64)
    if workload.calls is not None:
        return workload.shared_tokens(config)
    # In lexicographic order the longest common prefix is one with a neighbour.
    keys = [prompt.astype(">i4").tobytes() for prompt in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    most = np.zeros(len(keys), np.int64)
    for a, b in itertools.pairwise(order):
        n = min(prompts[a].size, prompts[b].size)
        differs = np.flatnonzero(prompts[a][:n] != prompts[b][:n])
        same = int(differs[0]) if differs.size else n
        most[a], most[b] = max(most[a], same), max(most[b], same)
    return np.minimum(most, workload.prompt_tokens - 1)


def _cannot(bounds: Sequence[Alone], slo: SLO, target: float) -> str:
    """Return the reason why requests are late even on an idle device; empty: enough of them are in time."""
    if not bounds or statistics.mean(bound.slo for bound in bounds) >= target - 1e-12:
        return ""

    def worst(name: str) -> float:
        return max(getattr(bound, name) for bound in bounds)

    found = (
        ("ttft", f"prefill: the prompt alone takes longer than the TTFT objective of {slo.ttft_s:g} s (up to {worst('longest_prefill_s'):.3g} s)"),
        ("tbt", f"decode: a step alone takes longer than the TBT objective of {1e3 * slo.tbt_s:g} ms (up to {1e3 * worst('slowest_step_s'):.3g} ms)"),
        ("e2e", f"length: alone they take longer than the end-to-end objective of {slo.e2e_s:g} s (up to {worst('longest_e2e_s'):.3g} s)"),
    )  # fmt: skip
    shares = [(statistics.mean(getattr(bound, name) for bound in bounds), text) for name, text in found]
    share, text = min(shares)
    return f"{text}, {100 * (1 - share):.1f} % of the requests"


def _limit(results: Sequence[SimulationResult], late: Mapping[str, int], shared: float) -> str:
    """Return the reason for late requests in the runs of a trial: the objective that most missed, and the resource.

    Args:
        results: the runs.
        late: number of requests that missed each objective, by its name.
        shared: share of the prompt tokens that can be found cached.
    """
    name, most = max(late.items(), key=lambda item: item[1])
    if not most:
        return "none is late"
    busy = statistics.mean(result.device_busy_fraction for result in results)
    lost = shared - statistics.mean(result.prefix_hit_fraction for result in results)
    served = sum(one is not None for result in results for one in result.requests)
    preempted = sum(result.preemptions for result in results) / max(served, 1)
    if lost > _LOST:
        cause = f"memory: {100 * lost:.0f} % of the prompt tokens had left the cache"
    elif preempted > _LOST:
        cause = f"memory: {preempted:.2f} preemptions per request"
    elif busy > _BUSY:
        cause = f"compute: devices busy {100 * busy:.0f} % of the time"
    else:
        cause = f"bursts: devices busy {100 * busy:.0f} % of the time"
    return f"{name}, {cause}"


class _Search:
    """Trials of one hardware description; a trial is run once.

    Args:
        base: configuration with model, hardware, load and objectives.
        hardware: the description.
        workloads: requests of each seed.
        target: share of the requests to attain, in (0, 1].
        shared: share of the prompt tokens that can be found cached.
        say: called with the share of the trial that is done and its description.
    """

    def __init__(
        self, base: SimulationConfig, hardware: Hardware, workloads: dict[int, Workload], *, target: float,
        shared: float, say: Progress,
    ) -> None:  # fmt: skip
        self._base, self._hardware, self._workloads = base, hardware, workloads
        self._target, self._shared, self._say = target, shared, say
        self.trials: dict[tuple[Setting, int], Trial] = {}

    def trial(self, setting: Setting, replicas: int) -> Trial:
        found = self.trials.get((setting, replicas))
        if found is None:
            config = dataclasses.replace(self._base, replicas=replicas, **dataclasses.asdict(setting))
            found = self.trials[setting, replicas] = self._run(config)
        return found

    def _run(self, config: SimulationConfig) -> Trial:
        attained: list[float] = []
        results: list[SimulationResult] = []
        late = collections.Counter({"TTFT": 0, "TBT": 0, "end to end": 0})
        is_whole, num = True, len(self._workloads)
        what = f"{config.hardware} x{self._hardware.num_devices}, {counted(config.replicas, 'replica')}, {config.policy}, {config.retention}"
        for done, (seed, workload) in enumerate(self._workloads.items()):
            # What this seed must attain if all later ones attain everything.
            needed = num * self._target - sum(attained) - (num - done - 1)
            n = workload.prompt_tokens.size
            missed = 0

            def is_hopeless(record: RequestRecord, most: float = n * (1 - needed) + 1e-9) -> bool:
                nonlocal missed
                missed += not record.slo_attained
                late.update(TTFT=not record.ttft_attained, TBT=not record.tbt_attained)
                late["end to end"] += not record.e2e_attained
                return missed > most

            def progress(ended: int, of: int, done: int = done) -> None:
                self._say((done + ended / of) / num, what)

            result = simulate(
                dataclasses.replace(config, seed=seed), hardware=self._hardware, workload=workload,
                progress=progress, stop=is_hopeless,
            )  # fmt: skip
            results.append(result)
            if missed > n * (1 - needed) + 1e-9:
                is_whole = False
                attained.append(1 - missed / n)
                break
            attained.append(result.summary.slo_attainment)
        return Trial(
            config=config,
            attainments=tuple(attained),
            is_whole=is_whole,
            attains=is_whole and statistics.mean(attained) >= self._target - 1e-12,
            limit=_limit(results, late, self._shared),
            tokens_per_s=statistics.mean(result.summary.tokens_per_s for result in results),
        )

    def best(self, settings: Sequence[Setting], most: int) -> Trial | None:
        """Return the trial with the fewest replicas, up to `most`, that attains the target; None: none does."""
        found: Trial | None = None
        for setting in settings:
            if found is not None:
                most = found.config.replicas - 1
                if most < 1 or not self.trial(setting, most).attains:
                    continue
            replicas = self._smallest(setting, most)
            if replicas is not None:
                found = self.trial(setting, replicas)
        return found

    def _smallest(self, setting: Setting, most: int) -> int | None:
        """Return the smallest number of replicas up to `most` that attains the target; None: none does."""
        low, high = 0, 1
        while not self.trial(setting, high).attains:
            if high == most:
                return None
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            if self.trial(setting, middle).attains:
                high = middle
            else:
                low = middle
        return high


def plan(
    base: SimulationConfig,
    hardware: Iterable[str],
    settings: Sequence[Setting] | None = None,
    *,
    target: float = 0.9,
    seeds: Sequence[int] = (0, 1, 2),
    max_devices: int = 64,
    progress: Progress | None = None,
) -> list[Answer]:
    """Find the smallest number of devices of each kind that attains the objectives.

    Args:
        base: model, workload, load and objectives; its `hardware`, `replicas`, `seed` and the fields of a `Setting` are
            replaced. `num_devices` None: every number of devices per replica that has a description.
        hardware: names (`hardware_named`) or files.
        settings: settings to choose from, in order of preference; None: `usual_settings`.
        target: share of the requests to attain, in (0, 1].
        seeds: seeds on which every number is simulated.
        max_devices: largest number of devices to consider.
        progress: see `Progress`.

    Returns:
        One answer per description, in order; of one kind those with fewer devices per replica first.

    Raises:
        ConfigError: a name is unknown, or the workload cannot be drawn.
    """
    trace = load_trace(base.trace)
    descriptions: list[tuple[str, Hardware]] = []
    for given in dict.fromkeys(hardware):
        name = hardware_named(base.model, given)
        sizes = [n for model, known, n in known_hardware() if (model, known) == (base.model, name)]
        numbers = [base.num_devices] if base.num_devices or not sizes else sizes
        descriptions += [(name, load_hardware(base.model, name, number)) for number in numbers]
    answers: list[Answer] = []
    fewest: dict[str, int] = {}
    for at, (name, one) in enumerate(descriptions):

        def say(share: float, what: str, at: int = at) -> None:
            if progress is not None:
                progress((at + share) / len(descriptions), what)

        config = dataclasses.replace(base, hardware=name, num_devices=one.num_devices)
        # A larger number of devices per replica is an answer only if it needs fewer devices altogether.
        choice = usual_settings(one, of_sessions=trace.calls is not None) if settings is None else settings
        limit = min(max_devices, fewest.get(name, max_devices + 1) - 1)
        answer = _plan_one(config, one, trace, choice, target, seeds, limit, fewest.get(name), say)
        answers.append(answer)
        if answer.num_devices is not None:
            fewest[name] = answer.num_devices
    if progress is not None:
        progress(1.0, "done")
    return answers


def _plan_one(
    base: SimulationConfig, hardware: Hardware, trace: Trace, settings: Sequence[Setting], target: float,
    seeds: Sequence[int], max_devices: int, fewest: int | None, say: Progress,
) -> Answer:  # fmt: skip
    answer = functools.partial(
        Answer, hardware=hardware, trials=(), best=None, fewer=None, constraint="", share_left_out=0.0
    )
    longest = longest_request(hardware, base)
    tokens = _lengths(trace.scale_outputs(base.output_scale).scale_tokens(base.scale_tokens))
    share = float((tokens > longest).mean())
    if share > 1 - target + 1e-12 and not base.drop_too_long:
        is_pool = longest < (base.max_model_len or hardware.max_model_len)
        bound = "the pool" if is_pool else "the maximum length (--max-model-len)"
        return answer(
            constraint=f"contexts: {100 * share:.1f} % of the requests have more than {longest:,} tokens, {bound} of {hardware.model} on {hardware.name} x{hardware.num_devices}, up to {int(tokens.max()):,} (--drop-too-long leaves them out)"
        )
    kept = drop_oversized(trace, hardware, dataclasses.replace(base, drop_too_long=True))
    answer = functools.partial(answer, share_left_out=1 - kept.num_requests / trace.num_requests)
    workloads = {seed: sample_workload(kept, dataclasses.replace(base, seed=seed)) for seed in seeds}
    bounds = [bound for workload in workloads.values() if (bound := alone(workload, base, hardware)) is not None]
    if reason := _cannot(bounds, base.slo, target):
        return answer(constraint=reason)
    most = max_devices // hardware.num_devices
    if base.concurrent_sessions is not None:
        most = min(most, base.concurrent_sessions)
    if most < 1 and fewest is not None:
        return answer(
            constraint=f"not tried: with fewer devices per replica {fewest} in all {'is' if fewest == 1 else 'are'} enough"
        )
    if most < 1:
        raise ConfigError(
            f"max_devices={max_devices} are fewer than the {hardware.num_devices} of a replica (--max-devices)"
        )
    done = 0

    def of_trial(share: float, what: str) -> None:
        nonlocal done
        done += share >= 1
        say(min((done + share % 1) / (_TRIALS * len(settings)), 0.95), what)

    shared = statistics.mean(bound.shared for bound in bounds) if bounds else 0.0
    search = _Search(base, hardware, workloads, target=target, shared=shared, say=of_trial)
    best = search.best(settings, most)
    trials = tuple(search.trials.values())
    if best is not None:
        fewer = [t for t in trials if dataclasses.replace(t.config, replicas=t.config.replicas + 1) == best.config]
        return answer(trials=trials, best=best, fewer=fewer[0] if fewer else None)
    closest = max(trials, key=lambda trial: trial.mean)
    if fewest is not None:
        reason = f"fewer than {fewest} devices, enough with fewer per replica, are not enough"
    else:
        at_most = "" if closest.is_whole else "at most "
        reason = f"{closest.limit}; {at_most}{100 * closest.mean:.1f} % with {counted(closest.config.replicas * hardware.num_devices, 'device')}"
        if most == max_devices // hardware.num_devices:
            reason += " (--max-devices)"
    return answer(trials=trials, constraint=reason)


def _lengths(trace: Trace) -> NDArray[np.int64]:
    return trace.prompt_tokens.astype(np.int64) + trace.output_tokens
