"""Runs of BROS §7: real-time requests beside best-effort ones in simulation, with the paper's memory management or without.

Each runs the engine that serves, in virtual time.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from apt_jax.cache.sharing import BlockSharing
from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.engine import Engine
from apt_jax.engine.batch import PlainReserver, SharedReserver
from apt_jax.lab.eager_checkpoints import checkpoint_at_once
from apt_jax.lab.policies.bros_paper import BrosAnyPolicy, BrosPaperPolicy
from apt_jax.lab.policies.round_robin import RoundRobinPolicy
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import (
    AptPlusPolicy,
    BrosPolicy,
    Plan,
    Policy,
    SchedulerView,
    make_policy,
)
from apt_jax.sched.policies.real_time_first import RealTimeFirst
from apt_jax.sim.executor import SimulatedExecutor, SimulatedHostMemory
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.host_link import block_bytes, num_host_blocks, with_transfers
from apt_jax.sim.trace import Trace, draw_arrivals, load_trace
from apt_jax.utils.clock import VirtualClock
from benchmarks.paper.longest_wait import LongestWaitPolicy

TTFT_S, TPOT_S = 0.4, 0.2
MODELS = {
    # model: hardware, devices, rates in requests/s, most tokens of a step (vLLM's own for its length)
    "opt-13b": ("a100-40gb", 2, (2.0, 4.0, 6.0, 8.0, 10.0), 2048),
    "opt-30b": ("a100-40gb", 4, (2.0, 4.0, 6.0, 8.0, 10.0), 2048),
    "llama-3-70b": ("a100-80gb", 8, (3.0, 6.0, 9.0, 12.0, 15.0), 8192),
}
DATASETS = {"share": "bros-sharegpt", "lmsys": "bros-lmsys"}
POLICIES = {"fcfs": "vLLM", "round-robin": "RR", "bros": "BROS"}
MEMORIES = ("bros", "bros-eager", "bros-swap", "bros-recompute")
"""BROS's scheduler with shared blocks; with them, but whole groups are checkpointed at once; with host memory for whole
requests; and without host memory."""
COMBINED = (
    "bros",
    "bros-recompute",
    "bros-kinds",
    "apt-plus-blind",
    "apt-plus-blind-last",
    "apt-plus",
    "apt-plus-memory",
)
"""BROS with keys and values and with the kind that costs least; apt-plus that does not tell classes apart, with
`--set best_effort_last=true` and without; and as it is, without host memory and with it."""
PURE = ("fcfs", "tgi", "bros-recompute")
SHOWN = {
    **POLICIES,
    "bros-eager": "shared blocks, whole groups at once",
    "bros-swap": "host memory, blocks not shared",
    "bros-recompute": "recomputation",
    "bros-kinds": "BROS, hybrid cache",
    "apt-plus-blind": "apt-plus, one class",
    "apt-plus-blind-last": "apt-plus, one class, --set best_effort_last=true",
    "apt-plus": "apt-plus",
    "apt-plus-memory": "apt-plus, host memory",
    "tgi": "TGI",
    "longest-wait": "preemptive, 64 tokens",
    "longest-wait-256": "preemptive, 256 tokens",
    "longest-wait-memory": "preemptive, 64 tokens, host memory",
    "longest-wait-256-memory": "preemptive, 256 tokens, host memory",
}
MAX_NUM_SEQS = {"bros": 1024, "tgi": 1024, "apt": 1024}
"""Maximum number of running requests; 256 for other policies."""
VARIANTS: dict[str, Callable[[], Policy]] = {
    "longest-wait": LongestWaitPolicy,
    "longest-wait-16": lambda: LongestWaitPolicy(16),
    "longest-wait-256": lambda: LongestWaitPolicy(256),
    "longest-wait-memory": LongestWaitPolicy,
    "longest-wait-256-memory": lambda: LongestWaitPolicy(256),
    "round-robin-phases": lambda: RoundRobinPolicy(mixed=False),
    "bros-eager": BrosPolicy,
    "bros-swap": BrosPolicy,
    "bros-recompute": BrosPolicy,
    "bros-kinds": lambda: BrosPolicy(kinds="by-cost"),
    "apt-plus-memory": AptPlusPolicy,
    "apt-plus-blind": lambda: AptPlusPolicy(two_classes=False),
    "apt-plus-blind-last": lambda: RealTimeFirst(AptPlusPolicy(two_classes=False), AptPlusPolicy(two_classes=False)),
    "bros-groups": lambda: BrosPolicy(token_group=8),
    "bros-any": BrosAnyPolicy,
    "bros-literal": BrosPaperPolicy,
}
"""Policies that have no name, or have one with other settings or another memory."""
SWAP_GIB_PER_DEVICE = 4.0
"""Host memory for cached blocks. The paper does not say how much; this was the default of vLLM, which it compares with
("CPU swap space size (GiB) per GPU", --swap-space). `variants` has 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """One run."""

    policy: str
    model: str
    dataset: str
    rate: float
    """RT requests per second."""
    duration_s: float = 60.0
    """Duration of the RT arrivals."""
    be_batch: int = 256
    """BE requests that arrive at once; 0: none."""
    max_num_seqs: int = 256
    num_requests: int = 0
    """RT requests; 0: as many as come in `duration_s`."""
    seed: int = 0
    swap_gib: float = 0.0
    """Host memory for cached blocks in all; 0: preempted requests are computed again."""
    share_blocks: bool = False
    """RT and BE requests share blocks (BROS §5); needs host memory."""
    is_lazy: bool = True
    """Single slots are checkpointed, as they are overwritten."""
    overhead_s: float = 0.0
    """Added to every step: an engine whose host is slower than the modelled one's."""
    cache_mode: Literal["kv", "hidden", "hybrid"] = "kv"
    """Attention over hidden cache is by absorption."""

    def run(self) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, 0xB05])
        num = self.num_requests or max(int(rng.poisson(self.rate * self.duration_s)), 1)
        arrival_s = draw_arrivals(num, self.rate, 1.0, rng)
        if not self.num_requests:
            arrival_s *= min(1.0, self.duration_s / float(arrival_s[-1]))
        real_time = _pick(DATASETS[self.dataset], num, rng)
        feed = Feed(self, real_time, arrival_s, np.random.default_rng([self.seed, 0xBE]))
        feed.run()
        return feed.numbers()


def _pick(name: str, num: int, rng: np.random.Generator) -> Trace:
    trace = load_trace(name)
    return trace.take(rng.integers(0, trace.num_requests, num))


class Watched:
    """A policy whose calls are timed and whose last plan is kept."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.name = inner, inner.name
        self.spent_s = 0.0
        """Time spent in the policy, on this host."""
        self.ranks = np.zeros(0, np.int64)
        """Ranks of the requests in the last plan."""

    def schedule(self, view: SchedulerView) -> Plan:
        start_s = time.perf_counter()
        plan = self.inner.schedule(view)
        self.spent_s += time.perf_counter() - start_s
        self.ranks = view.table.rank[plan.rows]
        return plan


class Feed:
    """An engine in virtual time, with RT requests at their arrivals and batches of BE requests one after the other."""

    def __init__(self, case: Mixed, real_time: Trace, arrival_s: np.ndarray, rng: np.random.Generator) -> None:
        self.case, self.real_time, self.arrival_s, self.rng = case, real_time, arrival_s, rng
        name, devices, _, budget = MODELS[case.model]
        hardware = load_hardware(case.model, name, devices)
        costs = hardware.step_costs()
        costs = dataclasses.replace(
            costs,
            prefill_base_s=costs.prefill_base_s + case.overhead_s,
            decode_base_s=costs.decode_base_s + case.overhead_s,
        )
        memory = None
        if case.swap_gib:
            costs = with_transfers(costs, hardware)
            memory = SimulatedHostMemory(num_host_blocks(hardware, case.swap_gib), block_bytes(hardware))
        self.limited_steps = 0
        """Steps whose transfers took longer than their computation."""

        def step_s(batch: StepBatch) -> float:
            return costs.step_s(batch.num_tokens, batch.start, batch.kind)

        def transfer_s(batch: StepBatch) -> float:
            transfer_s = costs.transfer_s(*batch.moved_blocks((hardware.block_size, hardware.block_size)))
            self.limited_steps += transfer_s > step_s(batch)
            return transfer_s

        config = SchedulerConfig(
            policy="fcfs" if case.policy in VARIANTS else case.policy,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_queued_reqs=real_time.num_requests + 2 * case.be_batch + 1,
            overlap=False,
        )
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(
            self.clock,
            step_s,
            num_blocks=hardware.num_blocks,
            block_size=hardware.block_size,
            max_num_seqs=case.max_num_seqs,
            transfer_s=None if memory is None else transfer_s,
            lengths_only=True,
        )
        self.policy = Watched(
            VARIANTS[case.policy]() if case.policy in VARIANTS else make_policy(config=config, seed=case.seed)
        )
        self.engine = Engine(
            self.executor,
            self.policy,
            self.clock,
            hardware.kinds(case.cache_mode),
            config,
            # The second tier keeps what prefix caching registers. Prompts are all different: a request finds its own.
            CacheConfig(block_size=hardware.block_size, mode=case.cache_mode, enable_prefix_caching=memory is not None),
            costs=costs,
            tiers=Tiers(host=memory),
            reserver=SharedReserver if case.share_blocks else PlainReserver,
        )
        sharing = self.engine.cache.placement
        if isinstance(sharing, BlockSharing) and not case.is_lazy:
            checkpoint_at_once(sharing)
        self.ended: list[RequestMetrics] = []
        """Metrics of finished RT requests."""
        self.be_ended_s: list[float] = []
        self.executed_s: list[float] = []
        """Time of the steps that each request was in, in the order of sending."""
        self.served_s: list[float] = []
        """Time of the steps of RT requests, in the order of finishing."""
        self._ranks: dict[str, int] = {}
        self._num_be = 0
        self._texts = np.random.default_rng([case.seed, 0x50A])

    def run(self) -> None:
        sent, num = 0, self.real_time.num_requests
        arrivals = self.arrival_s.tolist()
        prompt, output = self.real_time.prompt_tokens, self.real_time.output_tokens
        while len(self.ended) < num:
            now_s = self.clock.now_s()
            if self.case.be_batch and self._num_be == len(self.be_ended_s) and sent < num:
                self._send_batch(now_s)
            if sent < num and not self.engine.has_work:
                self.clock.advance_to(max(arrivals[sent], now_s))
                now_s = self.clock.now_s()
            while sent < num and arrivals[sent] <= now_s:
                self._send(f"rt{sent}", int(prompt[sent]), int(output[sent]), arrivals[sent])
                sent += 1
            before, busy_s = self.executor.num_steps, self.executor.busy_s
            outputs = self.engine.step()
            if self.executor.num_steps > before:
                self._note(self.executor.busy_s - busy_s)
            for step_output in outputs:
                if step_output.finish_reason is None:
                    continue
                if step_output.request.slo_class == "rt":
                    self.ended.append(step_output.metrics)
                    self.served_s.append(self.executed_s[self._ranks[step_output.request.request_id]])
                else:
                    self.be_ended_s.append(self.clock.now_s())
            if self.executor.num_steps == before and not outputs and self.engine.has_work:
                later_s = now_s + 0.01
                self.clock.advance_to(min(arrivals[sent], later_s) if sent < num else later_s)

    def _note(self, step_s: float) -> None:
        for rank in self.policy.ranks.tolist():
            self.executed_s[rank] += step_s

    def _send_batch(self, now_s: float) -> None:
        batch = _pick("bros-best-effort", self.case.be_batch, self.rng)
        for i in range(batch.num_requests):
            self._send(
                f"be{self._num_be + i}",
                int(batch.prompt_tokens[i]),
                int(batch.output_tokens[i]),
                now_s,
            )
        self._num_be += batch.num_requests

    def _send(self, name: str, prompt: int, output: int, arrival_s: float) -> None:
        self._ranks[name] = len(self.executed_s)
        self.executed_s.append(0.0)
        has_text = self.engine.cache.tier is not None
        text = self._texts.integers(0, 1 << 30, prompt, np.int32) if has_text else np.zeros(prompt, np.int32)
        self.engine.add_request(
            EngineRequest(
                request_id=name,
                prompt=None,
                prompt_token_ids=text,
                params=SamplingParams(max_tokens=output, temperature=0.0),
                slo=SLO(ttft_s=TTFT_S, tbt_s=TPOT_S),
                arrival_s=arrival_s,
                slo_class="rt" if name.startswith("rt") else "be",
            )
        )

    def numbers(self) -> dict[str, Any]:
        until_s = float(self.arrival_s[-1])
        normalised, ttft, tpot, queueing = [], [], [], []
        for m, served_s in zip(self.ended, self.served_s, strict=True):
            tokens = m.token_times_s
            assert tokens
            assert m.finished_s is not None
            normalised.append((m.finished_s - m.arrival_s) / len(tokens))
            ttft.append(tokens[0] - m.arrival_s <= TTFT_S)
            gap_s = (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1)
            tpot.append(gap_s <= TPOT_S)
            queueing.append(1 - served_s / (m.finished_s - m.arrival_s))
        last_s = max(m.finished_s or 0.0 for m in self.ended)
        stats = self.engine.stats()
        return {
            "rt_requests": len(self.ended),
            "normalised_latency_s": float(np.mean(normalised)),
            "ttft_attainment": float(np.mean(ttft)),
            "tpot_attainment": float(np.mean(tpot)),
            "queueing_share": float(np.mean(queueing)),
            "rt_per_s": len(self.ended) / last_s,
            "be_per_s": sum(t <= until_s for t in self.be_ended_s) / until_s,
            "preemptions": stats.num_preemptions,
            "rt_preemptions": sum(m.num_preemptions for m in self.ended),
            "recomputed_tokens": stats.recomputed_tokens,
            "saved_blocks": stats.saved_blocks,
            "loaded_blocks": stats.loaded_blocks,
            "saved_slots": stats.saved_slots,
            "loaded_slots": stats.loaded_slots,
            "transfer_limited": self.limited_steps,
            "iterations": self.executor.num_steps,
            "schedule_p50_ms": stats.schedule_p50_ms,
            "schedule_share": self.policy.spent_s / (self.policy.spent_s + self.executor.busy_s),
        }
