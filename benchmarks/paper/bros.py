"""BROS Fig. 10 to 12 in simulation: real-time requests beside best-effort ones, and alone.

Times are simulated; nothing is timed on this machine. Setup of §7.1: OPT-13B on two and OPT-30B on four A100 40 GB, Llama-3-70B
on eight A100 80 GB, tensor parallel, greedy, blocks of 16. Real-time (RT) requests have the lengths of Table 2 and
Poisson arrivals; their objectives are 0.4 s to the first token (TTFT) and 0.2 s a token on average after it (TPOT).
Best-effort (BE) requests come in batches: the next one when all of the one before have ended (a closed loop), from the
start until the last RT arrival. Then the RT requests that are left run to their end.

    fig10  mean normalised latency of RT requests and throughput of BE requests, over request rates
    fig11  TTFT and TPOT attainment of the same runs
    fig12  RT requests alone: normalised latency and throughput

Policies: `fcfs` (vLLM), `round-robin` (RR), `bros` without the paper's bidirectional blocks. The paper gives neither the
rates (but the highest, 15 requests/s) nor the size of a BE batch; both are ours. It runs 10 minutes, here it is one: the
first batch alone keeps BE work waiting that long.

    python benchmarks/paper/bros.py all [--quick] [--out DIRECTORY] [--workers N] [--store FILE]
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from cases import effect, print_facts, run_cases
from common import RESULTS, compare, new_figure, print_rows, save_figure, write_csv, write_rows

from apt_jax.clock import VirtualClock
from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.engine import Engine
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.sim.executor import SimulatedExecutor
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.trace import Trace, draw_arrivals, load_trace

Row = dict[str, Any]

TTFT_S, TPOT_S = 0.4, 0.2
MODELS = {
    # model: hardware, devices, rates in requests/s, most tokens of a step (vLLM's own for its length)
    "opt-13b": ("a100-40gb", 2, (2.0, 6.0, 10.0), 2048),
    "opt-30b": ("a100-40gb", 4, (2.0, 6.0, 10.0), 2048),
    "llama-3-70b": ("a100-80gb", 8, (3.0, 9.0, 15.0), 8192),
}
DATASETS = {"share": "bros-sharegpt", "lmsys": "bros-lmsys"}
POLICIES = {"fcfs": "vLLM", "round-robin": "RR", "bros": "BROS"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """One run."""

    policy: str
    model: str
    dataset: str
    rate: float
    """RT requests a second."""
    duration_s: float = 60.0
    """Of RT arrivals."""
    be_batch: int = 256
    """BE requests that come at once; 0: none."""
    max_num_seqs: int = 256
    seed: int = 0

    def run(self) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, 0xB05])
        num = max(int(rng.poisson(self.rate * self.duration_s)), 1)
        arrival_s = draw_arrivals(num, self.rate, 1.0, rng)
        arrival_s *= min(1.0, self.duration_s / float(arrival_s[-1]))
        real_time = _pick(DATASETS[self.dataset], num, rng)
        feed = Feed(self, real_time, arrival_s, np.random.default_rng([self.seed, 0xBE]))
        feed.run()
        return feed.numbers()


def _pick(name: str, num: int, rng: np.random.Generator) -> Trace:
    trace = load_trace(name)
    return trace.take(rng.integers(0, trace.num_requests, num))


class Feed:
    """An engine in virtual time, with RT requests at their arrivals and batches of BE requests one after the other."""

    def __init__(
        self, case: Mixed, real_time: Trace, arrival_s: np.ndarray, rng: np.random.Generator
    ) -> None:
        self.case, self.real_time, self.arrival_s, self.rng = case, real_time, arrival_s, rng
        name, devices, _, budget = MODELS[case.model]
        hardware = load_hardware(case.model, name, devices)
        costs = hardware.step_costs()
        config = SchedulerConfig(
            policy=case.policy,
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
        self.engine = Engine(
            self.executor,
            make_policy(config=config, seed=case.seed),
            self.clock,
            hardware.kinds("kv"),
            config,
            # Prompts are made up and all alike: nothing may be found of them.
            CacheConfig(block_size=hardware.block_size, mode="kv", enable_prefix_caching=False),
            costs=costs,
        )
        self.ended: list[RequestMetrics] = []
        """RT requests."""
        self.be_ended_s: list[float] = []
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
            before = self.executor.num_steps
            outputs = self.engine.step()
            for news in outputs:
                if news.finish_reason is None:
                    continue
                if news.request.slo_class == "rt":
                    self.ended.append(news.metrics)
                else:
                    self.be_ended_s.append(self.clock.now_s())
            if self.executor.num_steps == before and not outputs and self.engine.has_work:
                later_s = now_s + 0.01
                self.clock.advance_to(min(arrivals[sent], later_s) if sent < num else later_s)

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
        normalised, ttft, tpot = [], [], []
        for m in self.ended:
            tokens = m.token_times_s
            assert tokens
            assert m.finished_s is not None
            normalised.append((m.finished_s - m.arrival_s) / len(tokens))
            ttft.append(tokens[0] - m.arrival_s <= TTFT_S)
            gap_s = (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1)
            tpot.append(gap_s <= TPOT_S)
        last_s = max(m.finished_s or 0.0 for m in self.ended)
        stats = self.engine.stats()
        return {
            "rt_requests": len(self.ended),
            "normalised_latency_s": float(np.mean(normalised)),
            "ttft_attainment": float(np.mean(ttft)),
            "tpot_attainment": float(np.mean(tpot)),
            "rt_per_s": len(self.ended) / last_s,
            "be_per_s": sum(t <= until_s for t in self.be_ended_s) / until_s,
            "preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "iterations": self.executor.num_steps,
            "schedule_p50_ms": stats.schedule_p50_ms,
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
    max_num_seqs: int

    @property
    def seeds(self) -> tuple[int, ...]:
        return (0,) if self.quick else (0, 1, 2)

    @property
    def points(self) -> list[tuple[str, float]]:
        """Model and rate: nine of them, where the paper has 15 a data set."""
        points = [(model, rate) for model, (_, _, rates, _) in MODELS.items() for rate in rates]
        return points[1:3] if self.quick else points

    def case(self, policy: str, dataset: str, point: tuple[str, float], seed: int) -> Mixed:
        return Mixed(
            policy=policy,
            model=point[0],
            dataset=dataset,
            rate=point[1],
            duration_s=self.duration_s,
            be_batch=self.be_batch,
            max_num_seqs=self.max_num_seqs,
            seed=seed,
        )


Results = dict[Mixed, dict[str, Any]]


def _measure(options: Options, policies: Sequence[str], name: str) -> Results:
    cases = [
        options.case(policy, dataset, point, seed)
        for point, dataset, seed, policy in itertools.product(
            options.points, DATASETS, options.seeds, policies
        )
    ]
    results = run_cases(cases, options.store, options.workers)
    write_csv(
        options.out / f"bros_{name}.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases]
    )
    return results


def _by_seed(
    options: Options, results: Results, policy: str, dataset: str, metric: str
) -> list[float]:
    """Mean over the cases of a data set, one a seed."""
    return [
        float(
            np.mean([results[options.case(policy, dataset, p, s)][metric] for p in options.points])
        )
        for s in options.seeds
    ]


def _plot(
    options: Options, results: Results, policies: Sequence[str], metrics: dict[str, str], name: str
) -> None:
    models = list(dict.fromkeys(model for model, _ in options.points))
    panels = list(itertools.product(DATASETS, metrics))
    figure, axes = new_figure(len(panels), len(models), height=2.3)
    for line, (dataset, metric) in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            rates = [rate for of, rate in options.points if of == model]
            for policy in policies:
                values = np.array(
                    [
                        [
                            results[options.case(policy, dataset, (model, r), s)][metric]
                            for r in rates
                        ]
                        for s in options.seeds
                    ]
                )
                axis.errorbar(
                    rates,
                    values.mean(0),
                    values.std(0, ddof=1) if len(values) > 1 else None,
                    marker=".",
                    label=POLICIES[policy],
                )
            axis.set(title=f"{model}, {dataset}", ylabel=metrics[metric], xlabel="RT requests/s")
            if metric == "normalised_latency_s":
                axis.set(yscale="log")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / f"bros_{name}.png")


def fig10(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    rows = []
    for dataset, (other, tag) in itertools.product(
        DATASETS, (("fcfs", "vllm"), ("round-robin", "rr"))
    ):
        for kind, metric in (("lat", "normalised_latency_s"), ("be", "be_per_s")):
            ours, theirs = (_by_seed(options, results, p, dataset, metric) for p in ("bros", other))
            cut = [100 * (1 - a / b) if b else 0.0 for a, b in zip(ours, theirs, strict=True)]
            target = f"B-{kind}-{dataset}-{tag}"
            rows.append(
                effect(target, cut)
                if kind == "lat"
                else compare(target, cut, agrees=float(np.mean(cut)) > 0)
            )
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
            * sum(
                results[options.case("fcfs", dataset, p, s)]["ttft_attainment"] == 0
                for p in options.points
            )
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
    policies = ("fcfs", "bros")
    results = _measure(options, policies, "fig12")
    rows = []
    for dataset in DATASETS:
        latency = [_by_seed(options, results, p, dataset, "normalised_latency_s") for p in policies]
        cut = [100 * (1 - b / a) for a, b in zip(*latency, strict=True)]
        rows.append(effect("B-rt-lat", cut, variant=dataset))
        served = [_by_seed(options, results, p, dataset, "rt_per_s") for p in policies]
        gain = [b / a for a, b in zip(*served, strict=True)]
        rows.append(effect("B-rt-thr", gain, variant=dataset))
    metrics = {"normalised_latency_s": "s/token", "rt_per_s": "RT requests/s"}
    _plot(options, results, policies, metrics, "fig12")
    return rows


FIGURES = {"fig10": fig10, "fig11": fig11, "fig12": fig12}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny settings, seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--store", type=Path, help="keeps finished runs, to go on from later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--duration", type=float, help="of RT arrivals, s; default 60, quick 10")
    parser.add_argument("--be-batch", type=int, help="BE requests at once; default 256, quick 64")
    parser.add_argument("--max-num-seqs", type=int, default=256)
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
    )
    for name in FIGURES if "all" in args.figures else args.figures:
        rows = FIGURES[name](options)
        print_rows(rows)
        write_rows(args.out / "bros.csv", rows)
    print_facts("bros.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
