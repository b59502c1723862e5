"""A long prompt beside two streams, served on this machine by each policy: how long the streams stand still.

    python -m benchmarks.scheduling.long_prompt [--model smollm2-135m] [--prompt 4000] [--repeats N]

Two requests decode; once each has had ten tokens a prompt of `--prompt` tokens arrives. Nobody has latency objectives, or
with `--tbt` all have. For each policy, with measured step costs and without any: the largest gap between two tokens of a
stream from then on until the prompt's first token, the time to that token, and the gap in chunks: over the time of the
slowest step of `--max-num-batched-tokens` tokens of the same prompt alone. Means and 95 % intervals over the repeats,
whose order is drawn. It writes `long-prompt.csv`.
"""

import argparse
import csv
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.events import Iteration
from apt_jax.frontend.components import EngineComponents, with_policy
from apt_jax.frontend.progress import ProgressBars
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.utils.clock import WallClock
from benchmarks.paper.common import half_width
from benchmarks.scheduling.simulator_fidelity import calibrated

RESULTS = Path(__file__).resolve().parents[1] / "results" / "long-prompt"
POLICIES = ("apt", "apt-plus", "vllm-v1", "sarathi")
NUM_STREAMS, STREAM_PROMPT, TOKENS_BEFORE = 2, 32, 10


def serve(engine: Engine, prompt_len: int, max_len: int, slo: SLO, seed: int, num_streams: int) -> tuple[float, float]:
    """Largest gap of a stream while the prompt is computed, and its time to first token, seconds."""
    rng, clock = np.random.default_rng(seed), WallClock()

    def add(name: str, length: int, max_tokens: int) -> None:
        engine.add_request(
            EngineRequest(
                request_id=name,
                prompt=None,
                prompt_token_ids=rng.integers(3, 200, length).astype(np.int32),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                slo=slo,
                arrival_s=clock.now_s(),
            )
        )

    for i in range(num_streams):
        add(f"stream{i}", STREAM_PROMPT, max_len - STREAM_PROMPT)
    last_s, count = dict[str, float](), dict[str, int]()
    arrival_s = gap_s = 0.0
    if not num_streams:
        arrival_s = clock.now_s()
        add("prompt", prompt_len, 4)
    while True:
        for out in engine.step():
            name, now_s = out.request.request_id, clock.now_s()
            if name == "prompt" and out.new_token_ids:
                gaps = [now_s - last_s[other] for other in last_s]
                return max([gap_s, *gaps]), now_s - arrival_s
            if arrival_s:
                gap_s = max(gap_s, now_s - last_s[name])
            last_s[name] = now_s
            count[name] = count.get(name, 0) + len(out.new_token_ids)
        if not arrival_s and len(count) == num_streams and min(count.values()) >= TOKENS_BEFORE:
            arrival_s = clock.now_s()
            add("prompt", prompt_len, 4)


def engine_of(parts: EngineComponents, policy: str, costs: StepCosts, cache: str) -> Engine:
    engine = with_policy(parts, policy, "kv" if cache == "kv" else "hybrid").engine
    engine.costs = costs
    return engine


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a shape, with random weights")
    parser.add_argument("--prompt", type=int, default=4000, metavar="TOKENS")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--cache", default="kv", choices=("kv", "hybrid"))
    parser.add_argument(
        "--tbt", type=float, help="objective of everybody's gaps, seconds, with 10 s to the first token"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    max_len = args.prompt + 1000
    config = EngineConfig(
        model=args.model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max_len,
        cache=CacheConfig(mode=args.cache, num_blocks_override=2 * (args.prompt + 3000) // 16),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=args.max_num_batched_tokens),
    )
    slo = SLO() if args.tbt is None else SLO(ttft_s=10.0, tbt_s=args.tbt)
    parts, executor, model, _ = calibrated(config, 30.0)
    cases = [
        (policy, measured, costs)
        for policy in args.policies
        for measured, costs in (("yes", model.step_costs()), ("no", StepCosts(one_program=model.costs.one_program)))
    ]
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    bars, rng = ProgressBars(), np.random.default_rng(0)
    for repeat in range(args.repeats):
        executor.reset()
        engine, steps_s = engine_of(parts, "vllm-v1", StepCosts(), args.cache), list[float]()

        def note(iteration: Iteration, steps_s: list[float] = steps_s) -> None:
            steps_s.append(iteration.step_s or 0.0)

        engine.after_step = note
        serve(engine, args.prompt, max_len, slo, repeat, 0)
        chunk_s = max(steps_s)
        for place, case in enumerate(rng.permutation(len(cases)).tolist()):
            policy, measured, costs = cases[case]
            executor.reset()
            engine = engine_of(parts, policy, costs, args.cache)
            gap_s, ttft_s = serve(engine, args.prompt, max_len, slo, repeat, NUM_STREAMS)
            found.setdefault((policy, measured), []).append((gap_s, ttft_s, gap_s / chunk_s))
            bars("serving", repeat * len(cases) + place + 1, args.repeats * len(cases))
    bars.close()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"long-prompt{'' if args.tbt is None else '-objectives'}.csv"
    print(f"{os.cpu_count()} cores, {datetime.date.today()}, {args.model}, prompt of {args.prompt} tokens")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ("largest gap s", "time to first token s", "gap in chunks")
        writer.writerow(["policy", "costs measured", "tbt s", *(f"{n}{w}" for n in names for w in ("", " half width"))])
        for (policy, measured), values in found.items():
            row = [f"{f(column):.3f}" for column in zip(*values, strict=True) for f in (np.mean, half_width)]
            writer.writerow([policy, measured, args.tbt or "", *row])
            print(
                f"{policy:10} costs {measured:3}  "
                + "  ".join(f"{a} ± {b}" for a, b in zip(row[::2], row[1::2], strict=True))
            )
    print(path)


if __name__ == "__main__":
    main()
