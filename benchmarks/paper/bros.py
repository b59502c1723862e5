"""BROS Figs. 3, 10 to 12 and 14 in simulation: real-time requests beside best-effort ones, and alone.

Times are simulated; what is timed on this machine are calls of the scheduler (Fig. 14). Setup of §7.1: OPT-13B on two
and OPT-30B on four A100 40 GB, Llama-3-70B on eight A100 80 GB, tensor parallel, greedy, blocks of 16. Real-time (RT)
requests have the lengths of Table 2 and Poisson arrivals; their objectives are 0.4 s to the first token (TTFT) and 0.2
s a token on average after it (TPOT). Best-effort (BE) requests come in batches: the next one when all of the one before
have ended (a closed loop), from the start until the last RT arrival. Then the RT requests that are left run to their
end.

    fig3      512 RT requests alone: first come first served against preemption by waiting time, with the share of queueing
    fig10     mean normalised latency of RT requests and throughput of BE requests, over request rates
    fig11     TTFT and TPOT attainment of the same runs
    fig12     RT requests alone: normalised latency and throughput
    fig14     share of scheduling in the time of an iteration, in the runs of fig10 with OPT
    variants  what single choices change, in one run per rate: round robin by phases, token groups, the paper's
              replacement

Policies: `fcfs` (vLLM), `tgi`, `round-robin` (RR), `bros` without the paper's bidirectional blocks. The paper gives
neither the rates (but the highest, 15 requests/s) nor the size of a BE batch; both are ours. It has 15 points and runs
of 10 minutes: `--points 15 --duration 600`. The default is 9 points of one minute, of which the first batch alone keeps
BE work waiting. vLLM and RR have vLLM's limit of 256 running requests; TGI has none, and the adaptive batch of BROS
grows up to 1,024.

    python -m benchmarks.paper.bros all [--quick] [--out DIRECTORY] [--workers N] [--store FILE]
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.engine import Engine
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import (
    BrosPolicy,
    Plan,
    Policy,
    RoundRobinPolicy,
    SchedulerView,
    make_policy,
)
from apt_jax.sim.executor import SimulatedExecutor
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.trace import Trace, draw_arrivals, load_trace
from apt_jax.utils.clock import VirtualClock
from benchmarks.paper.cases import effect, print_facts, run_cases
from benchmarks.paper.common import (
    RESULTS,
    claim,
    compare,
    new_figure,
    print_rows,
    save_figure,
    targets,
    write_csv,
    write_rows,
)
from benchmarks.paper.longest_wait import LongestWaitPolicy

Row = dict[str, Any]

TTFT_S, TPOT_S = 0.4, 0.2
MODELS = {
    # model: hardware, devices, rates in requests/s, most tokens of a step (vLLM's own for its length)
    "opt-13b": ("a100-40gb", 2, (2.0, 4.0, 6.0, 8.0, 10.0), 2048),
    "opt-30b": ("a100-40gb", 4, (2.0, 4.0, 6.0, 8.0, 10.0), 2048),
    "llama-3-70b": ("a100-80gb", 8, (3.0, 6.0, 9.0, 12.0, 15.0), 8192),
}
DATASETS = {"share": "bros-sharegpt", "lmsys": "bros-lmsys"}
POLICIES = {"fcfs": "vLLM", "round-robin": "RR", "bros": "BROS"}
PURE = ("fcfs", "tgi", "bros")
SHOWN = {
    **POLICIES,
    "tgi": "TGI",
    "longest-wait": "preemptive, 64 tokens",
    "longest-wait-256": "preemptive, 256 tokens",
}
MAX_NUM_SEQS = {"bros": 1024, "tgi": 1024}
"""Maximum number of running requests; 256 for other policies."""
VARIANTS: dict[str, Callable[[], Policy]] = {
    "longest-wait": LongestWaitPolicy,
    "longest-wait-16": lambda: LongestWaitPolicy(16),
    "longest-wait-256": lambda: LongestWaitPolicy(256),
    "round-robin-phases": lambda: RoundRobinPolicy(mixed=False),
    "bros-groups": lambda: BrosPolicy(token_group=8),
    "bros-any": lambda: BrosPolicy(replacement="any", most_replacements=None),
    "bros-literal": lambda: BrosPolicy(aging_tokens_per_s=0.0, replacement="any", most_replacements=None),
}
"""Policies that have no name, or have one with other settings."""


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
            lambda batch: costs.step_s(batch.num_tokens, batch.start, batch.kind),
            num_blocks=hardware.num_blocks,
            block_size=hardware.block_size,
            max_num_seqs=case.max_num_seqs,
        )
        self.policy = Watched(
            VARIANTS[case.policy]() if case.policy in VARIANTS else make_policy(config=config, seed=case.seed)
        )
        self.engine = Engine(
            self.executor,
            self.policy,
            self.clock,
            hardware.kinds("kv"),
            config,
            # Prompts are synthetic and all alike: nothing may be found of them.
            CacheConfig(block_size=hardware.block_size, mode="kv", enable_prefix_caching=False),
            costs=costs,
        )
        self.ended: list[RequestMetrics] = []
        """Metrics of finished RT requests."""
        self.be_ended_s: list[float] = []
        self.executed_s: list[float] = []
        """Time of the steps that each request was in, in the order of sending."""
        self.served_s: list[float] = []
        """Time of the steps of RT requests, in the order of finishing."""
        self._ranks: dict[str, int] = {}
        self._num_be = 0

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
        self.engine.add_request(
            EngineRequest(
                request_id=name,
                prompt=None,
                prompt_token_ids=np.zeros(prompt, np.int32),
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
            "recomputed_tokens": stats.recomputed_tokens,
            "iterations": self.executor.num_steps,
            "schedule_p50_ms": stats.schedule_p50_ms,
            "schedule_share": self.policy.spent_s / (self.policy.spent_s + self.executor.busy_s),
        }


# --- figures ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    store: Path | None
    workers: int
    quick: bool
    duration_s: float
    be_batch: int
    max_num_seqs: int | None
    num_points: int
    num_seeds: int

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))

    @property
    def points(self) -> list[tuple[str, float]]:
        """Model and rate, 15 a data set in the paper; of nine, the lowest, the middle and the highest rate of each."""
        step = 1 if self.num_points == 15 else 2
        points = [(model, rate) for model, (_, _, rates, _) in MODELS.items() for rate in rates[::step]]
        return points if self.num_points > 2 else points[1:3]

    def case(self, policy: str, dataset: str, point: tuple[str, float], seed: int) -> Mixed:
        return Mixed(
            policy=policy,
            model=point[0],
            dataset=dataset,
            rate=point[1],
            duration_s=self.duration_s,
            be_batch=self.be_batch,
            max_num_seqs=self.max_num_seqs or MAX_NUM_SEQS.get(policy.split("-")[0], 256),
            seed=seed,
        )


Results = dict[Mixed, dict[str, Any]]


def _measure(options: Options, policies: Sequence[str], name: str) -> Results:
    cases = [
        options.case(policy, dataset, point, seed)
        for point, dataset, seed, policy in itertools.product(options.points, DATASETS, options.seeds, policies)
    ]
    results = run_cases(cases, options.store, options.workers)
    write_csv(options.out / f"bros_{name}.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases])
    return results


def _by_seed(options: Options, results: Results, policy: str, dataset: str, metric: str) -> list[float]:
    """Mean over the cases of a data set, one a seed."""
    return [
        float(np.mean([results[options.case(policy, dataset, p, s)][metric] for p in options.points]))
        for s in options.seeds
    ]


def _plot(options: Options, results: Results, policies: Sequence[str], metrics: dict[str, str], name: str) -> None:
    models = list(dict.fromkeys(model for model, _ in options.points))
    panels = list(itertools.product(DATASETS, metrics))
    figure, axes = new_figure(len(panels), len(models), height=2.3)
    for line, (dataset, metric) in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            rates = [rate for of, rate in options.points if of == model]
            for policy in policies:
                values = np.array(
                    [
                        [results[options.case(policy, dataset, (model, r), s)][metric] for r in rates]
                        for s in options.seeds
                    ]
                )
                axis.errorbar(
                    rates,
                    values.mean(0),
                    values.std(0, ddof=1) if len(values) > 1 else None,
                    marker=".",
                    label=SHOWN[policy],
                )
            axis.set(title=f"{model}, {dataset}", ylabel=metrics[metric], xlabel="RT requests/s")
            if metric == "normalised_latency_s":
                axis.set(yscale="log")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / f"bros_{name}.png")


def fig10(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    rows = []
    for dataset, (other, tag) in itertools.product(DATASETS, (("fcfs", "vllm"), ("round-robin", "rr"))):
        for kind, metric in (("lat", "normalised_latency_s"), ("be", "be_per_s")):
            ours, theirs = (_by_seed(options, results, p, dataset, metric) for p in ("bros", other))
            cut = [100 * (1 - a / b) if b else 0.0 for a, b in zip(ours, theirs, strict=True)]
            target = f"B-{kind}-{dataset}-{tag}"
            rows.append(effect(target, cut) if kind == "lat" else compare(target, cut, agrees=float(np.mean(cut)) > 0))
    metrics = {"normalised_latency_s": "s/token", "be_per_s": "BE requests/s"}
    _plot(options, results, tuple(POLICIES), metrics, "fig10")
    return rows


def fig11(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    rows = []

    def percent(policy: str, datasets: Sequence[str], metric: str) -> list[float]:
        each = [_by_seed(options, results, policy, d, metric) for d in datasets]
        return [100 * float(np.mean(values)) for values in zip(*each, strict=True)]

    for dataset, (other, tag), kind in itertools.product(
        DATASETS, (("fcfs", "vllm"), ("round-robin", "rr")), ("ttft", "tpot")
    ):
        ours, theirs = (percent(p, (dataset,), f"{kind}_attainment") for p in ("bros", other))
        # Nothing attained in any of hundreds of requests counts as half of one request.
        least = 100 * 0.5 / min(r["rt_requests"] for r in results.values())
        ratio = [a / max(b, least) for a, b in zip(ours, theirs, strict=True)]
        rows.append(effect(f"B-{kind}-{dataset}-{tag}", ratio))
    both = tuple(DATASETS)
    rows.append(compare("B-vllm-ttft", percent("fcfs", both, "ttft_attainment"), agrees=None))
    for dataset in DATASETS:
        never = [
            15
            / len(options.points)
            * sum(results[options.case("fcfs", dataset, p, s)]["ttft_attainment"] == 0 for p in options.points)
            for s in options.seeds
        ]
        rows.append(compare("B-vllm-zero", never, variant=dataset))
    rows.append(compare("B-rr-ttft", percent("round-robin", both, "ttft_attainment")))
    for policy, tag in (("round-robin", "rr"), ("bros", "bros")):
        for dataset in DATASETS:
            values = percent(policy, (dataset,), "tpot_attainment")
            rows.append(compare(f"B-{tag}-tpot-{dataset}", values))
    metrics = {"ttft_attainment": "TTFT attainment", "tpot_attainment": "TPOT attainment"}
    _plot(options, results, tuple(POLICIES), metrics, "fig11")
    return rows


def fig12(options: Options) -> list[Row]:
    options = dataclasses.replace(options, be_batch=0)
    results = _measure(options, PURE, "fig12")
    rows = []
    for dataset in DATASETS:
        latency = {p: _by_seed(options, results, p, dataset, "normalised_latency_s") for p in PURE}
        served = {p: _by_seed(options, results, p, dataset, "rt_per_s") for p in PURE}
        cut = [100 * (1 - b / a) for a, b in zip(latency["fcfs"], latency["bros"], strict=True)]
        rows.append(effect("B-rt-lat", cut, variant=dataset))
        gain = [b / a for a, b in zip(served["fcfs"], served["bros"], strict=True)]
        rows.append(effect("B-rt-thr", gain, variant=dataset))
        # The paper says of TGI that BROS outperforms it, without a number.
        holds = [
            results[options.case("bros", dataset, p, s)]["normalised_latency_s"]
            <= results[options.case("tgi", dataset, p, s)]["normalised_latency_s"]
            for p in options.points
            for s in options.seeds
        ]
        text = "BROS has less normalised latency than TGI, RT alone"
        rows.append(claim("B-rt-tgi", "Sec 7.3", text, holds, variant=dataset))
    metrics = {"normalised_latency_s": "s/token", "rt_per_s": "RT requests/s"}
    _plot(options, results, PURE, metrics, "fig12")
    return rows


def fig3(options: Options) -> list[Row]:
    policies = ("fcfs", "longest-wait", "longest-wait-256")
    rates = (8.0, 30.0) if options.quick else (5.0, 10.0, 15.0, 20.0, 30.0)
    num = 12 if options.quick else 512

    def case(policy: str, rate: float, seed: int) -> Mixed:
        return Mixed(
            policy=policy,
            model="opt-13b",
            dataset="share",
            rate=rate,
            be_batch=0,
            num_requests=num,
            seed=seed,
        )

    cases = [case(*of) for of in itertools.product(policies, rates, options.seeds)]
    results = run_cases(cases, options.store, options.workers)
    write_csv(options.out / "bros_fig3.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases])
    metrics = {"normalised_latency_s": "s/token", "queueing_share": "share of queueing"}
    figure, axes = new_figure(1, 2)
    rows = []
    for axis, (metric, label) in zip(axes[0], metrics.items(), strict=True):
        means = {
            p: [float(np.mean([results[case(p, r, s)][metric] for s in options.seeds])) for r in rates]
            for p in policies
        }
        for policy, values in means.items():
            axis.plot(rates, values, marker=".", label=SHOWN[policy])
        axis.set(xlabel="RT requests/s", ylabel=label)
        for policy in policies[1:]:
            holds = [b < a for a, b in zip(means["fcfs"], means[policy], strict=True)]
            text = f"preemption by waiting time lowers {label}"
            name = f"B-fig3-{metric.split('_')[0]}"
            rows.append(claim(name, "Fig 3", text, holds, variant=SHOWN[policy]))
    axes[0][0].set(yscale="log")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / "bros_fig3.png")
    return rows


def fig14(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    models = {"opt-13b": "B-ovh13", "opt-30b": "B-ovh30"}
    shares: dict[tuple[str, str], list[float]] = {}
    rows = []
    for (model, target), policy in itertools.product(models.items(), POLICIES):
        by_seed = [
            float(
                np.mean(
                    [
                        100 * results[options.case(policy, dataset, p, s)]["schedule_share"]
                        for dataset in DATASETS
                        for p in options.points
                        if p[0] == model
                    ]
                    or [np.nan]
                )
            )
            for s in options.seeds
        ]
        if np.isnan(by_seed).any():
            continue
        shares[model, policy] = by_seed
        if policy == "bros":
            less = float(np.mean(by_seed)) <= targets()[target].number
            row = compare(target, by_seed, agrees=less)
            rows.append({**row, "paper": targets()[target].value})
    write_csv(
        options.out / "bros_fig14.csv",
        [
            {"model": model, "policy": p, "seed": s, "schedule_share_percent": share}
            for (model, p), of in shares.items()
            for s, share in zip(options.seeds, of, strict=True)
        ],
    )
    figure, axes = new_figure(1, 1)
    for i, policy in enumerate(POLICIES):
        own = [(m, float(np.mean(of))) for (m, p), of in shares.items() if p == policy]
        at = np.arange(len(own)) + 0.25 * i
        axes[0][0].bar(at, [share for _, share in own], 0.2, label=SHOWN[policy])
        axes[0][0].set_xticks(np.arange(len(own)) + 0.25, [m for m, _ in own])
    axes[0][0].set(ylabel="scheduling, % of an iteration")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / "bros_fig14.png")
    return rows


def variants(options: Options) -> list[Row]:
    """No target: a table of what single choices change."""
    names = ("round-robin", "round-robin-phases", "bros", "bros-groups", "bros-any", "bros-literal")
    results = _measure(options, names, "variants")
    metrics = ("normalised_latency_s", "ttft_attainment", "tpot_attainment", "be_per_s")
    print(f"{'':<20}" + "".join(f"{m:>22}" for m in metrics))
    for name in names:
        of = [np.mean([_by_seed(options, results, name, dataset, m) for dataset in DATASETS]) for m in metrics]
        print(f"{name:<20}" + "".join(f"{value:>22.4g}" for value in of))
    return []


FIGURES = {
    "fig3": fig3,
    "fig10": fig10,
    "fig11": fig11,
    "fig12": fig12,
    "fig14": fig14,
    "variants": variants,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny settings, seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--store", type=Path, help="keeps finished runs, to go on from later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--duration", type=float, help="of RT arrivals, s; default 60, quick 10")
    parser.add_argument("--be-batch", type=int, help="BE requests at once; default 256, quick 64")
    parser.add_argument("--max-num-seqs", type=int, help="of all policies; default 256, bros and tgi 1024")
    parser.add_argument(
        "--points",
        type=int,
        choices=(2, 9, 15),
        help="models and rates; the paper has 15, default 9, quick 2",
    )
    parser.add_argument("--seeds", type=int, help="default 3, quick 1")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        out=args.out,
        store=args.store,
        workers=args.workers,
        quick=args.quick,
        duration_s=args.duration or (10.0 if args.quick else 60.0),
        be_batch=args.be_batch or (64 if args.quick else 256),
        max_num_seqs=args.max_num_seqs,
        num_points=args.points or (2 if args.quick else 9),
        num_seeds=args.seeds or (1 if args.quick else 3),
    )
    for name in FIGURES if "all" in args.figures else args.figures:
        rows = FIGURES[name](options)
        if rows:
            print_rows(rows)
            write_rows(args.out / "bros.csv", rows)
    print_facts("bros.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
