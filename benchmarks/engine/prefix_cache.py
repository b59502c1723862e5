"""Savings by prefix caching on conversations: the same turns with and without it, on this machine.

What is timed: conversations over a few system prompts, several turns each; a turn is sent when the answer before it has
come, a fixed number of conversations is open at a time. Time to first token of each turn, wall time of the whole, and
tokens computed in prompts. Programs are compiled before. What limits it: without caching a turn computes all that was
said before (matrix products); with it, what is new.

    python -m benchmarks.engine.prefix_cache --csv prefix.csv --png prefix.png
"""

import argparse
import csv
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.engine import StepOutput
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.frontend.progress import ProgressBars
from apt_jax.request import EngineRequest, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    policy: str
    prefix_caching: bool
    turns: int
    duration_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    prompt_tokens: int
    computed_tokens: int
    """In rows that begin or go on with a prompt."""
    hit_share: float
    host_p50_ms: float
    digest: int
    """Digest of all answers; equal with and without caching."""


def fresh(parts: EngineComponents, policy: str, **cache: Any) -> EngineComponents:
    """Another engine over the same executor, with other settings of its `CacheConfig`."""
    config = dataclasses.replace(
        parts.config,
        cache=dataclasses.replace(parts.config.cache, **cache),
        scheduler=dataclasses.replace(parts.config.scheduler, policy=policy),
    )
    return build_components(
        config, parts.executor, kinds=parts.engine.kinds, vocab_size=parts.limits.vocab_size,
        max_model_len=parts.limits.max_model_len, costs=parts.engine.costs,
    )  # fmt: skip


def serve(parts: EngineComponents, talks: list[list[NDArray[np.int32]]], max_tokens: int, open_at_once: int) -> Run:
    """Serve conversations; the first part of each is its system prompt with the first turn."""
    engine, executor = parts.engine, parts.executor
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    known = [np.zeros(0, np.int32) for _ in talks]
    todo = [list(turns) for turns in talks]
    computed = 0
    ttft_s: list[float] = []
    answers: dict[str, tuple[int, ...]] = {}

    def say(i: int) -> None:
        known[i] = np.concatenate([known[i], todo[i].pop(0)])
        engine.add_request(
            EngineRequest(
                request_id=f"{i}.{len(todo[i])}", prompt=None, prompt_token_ids=known[i], params=params,
                slo=SLO(ttft_s=1.0, tbt_s=0.5), arrival_s=engine.clock.now_s(),
            )
        )  # fmt: skip

    def took(output: StepOutput) -> None:
        i = int(output.request_id.split(".")[0])
        tokens = np.array(output.new_token_ids, np.int32)
        known[i] = np.concatenate([known[i], tokens])
        answers[output.request_id] = (*answers.get(output.request_id, ()), *tokens.tolist())
        if output.finished:
            assert output.metrics.ttft_s is not None
            ttft_s.append(output.metrics.ttft_s)
            if todo[i]:
                say(i)
            elif waiting:
                say(waiting.pop(0))

    execute = executor.execute

    def counting(batch: StepBatch):
        nonlocal computed
        computed += int(batch.num_tokens[batch.start < batch.prompt_len].sum())
        return execute(batch)

    waiting = list(range(len(talks)))
    executor.execute = counting  # type: ignore[method-assign]
    begun_s = time.perf_counter()
    try:
        for _ in range(min(open_at_once, len(talks))):
            say(waiting.pop(0))
        while engine.has_work:
            for output in engine.step():
                took(output)
    finally:
        executor.execute = execute  # type: ignore[method-assign]
    stats = engine.stats()
    assert stats.used_blocks == stats.compilations == 0
    return Run(
        policy=parts.policy.name,
        prefix_caching=parts.config.cache.enable_prefix_caching,
        turns=len(ttft_s),
        duration_s=time.perf_counter() - begun_s,
        ttft_p50_ms=1e3 * float(np.percentile(ttft_s, 50)),
        ttft_p99_ms=1e3 * float(np.percentile(ttft_s, 99)),
        prompt_tokens=stats.prompt_tokens,
        computed_tokens=computed,
        hit_share=stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
        host_p50_ms=stats.host_p50_ms,
        digest=hash(tuple(sorted(answers.items()))) & 0xFFFFFFFF,
    )


def draw(args: argparse.Namespace) -> list[list[NDArray[np.int32]]]:
    rng = np.random.default_rng(args.seed)

    def tokens(num: int) -> NDArray[np.int32]:
        return rng.integers(300, 4000, num).astype(np.int32)

    systems = [tokens(args.system_len) for _ in range(args.systems)]
    return [
        [
            np.concatenate([systems[int(rng.integers(args.systems))], tokens(args.turn_len)]),
            *(tokens(int(rng.integers(1, 2 * args.turn_len))) for _ in range(args.turns - 1)),
        ]
        for _ in range(args.conversations)
    ]


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    names = [f"{r.policy}\n{'on' if r.prefix_caching else 'off'}" for r in runs]
    axes[0].bar(names, [r.ttft_p50_ms for r in runs])
    axes[0].set_ylabel("TTFT p50, ms")
    axes[1].bar(names, [r.computed_tokens for r in runs])
    axes[1].set_ylabel("prompt tokens computed")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def print_facts(seed: int) -> None:
    """Print what was run, and where, as a line of JSON."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts: dict[str, Any] = {
        "command": " ".join(sys.argv), "revision": revision, "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__,
        "python": platform.python_version(), "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "seed": seed,
    }  # fmt: skip
    print(json.dumps(facts))


def main() -> int:
    parser = argparse.ArgumentParser(description="Conversations with and without prefix caching.")
    parser.add_argument("--model", default="tiny-opt")
    parser.add_argument("--policies", nargs="*", default=["fcfs", "apt"])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--open", type=int, default=6, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--systems", type=int, default=3)
    parser.add_argument("--system-len", type=int, default=200, help="tokens of a system prompt")
    parser.add_argument("--turn-len", type=int, default=40, help="tokens of a turn, on average")
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--num-blocks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    bars = ProgressBars()
    config = EngineConfig(
        model=args.model,
        cache=CacheConfig(num_blocks_override=args.num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
    )
    parts = build_engine(config, calibrate=False, progress=bars)
    bars.close()
    talks = draw(args)
    serve(fresh(parts, "fcfs", enable_prefix_caching=False), talks[:2], 4, 2)
    runs = [
        serve(fresh(parts, policy, enable_prefix_caching=on), talks, args.output_len, args.open)
        for policy in args.policies
        for on in (False, True)
    ]
    print(
        f"{'policy':9} {'cache':5} {'turns':>5} {'time':>8} {'TTFT p50':>9} {'TTFT p99':>9} {'prompt':>8} {'computed':>8} {'hits':>5} {'host':>8}"
    )
    for r in runs:
        print(
            f"{r.policy:9} {'on' if r.prefix_caching else 'off':5} {r.turns:5} {r.duration_s:6.2f} s {r.ttft_p50_ms:6.1f} ms {r.ttft_p99_ms:6.1f} ms "
            f"{r.prompt_tokens:8} {r.computed_tokens:8} {r.hit_share:5.0%} {r.host_p50_ms:5.2f} ms"
        )
    assert len({r.digest for r in runs}) == 1, "answers differ"
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[x.name for x in dataclasses.fields(Run)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(r) for r in runs)
    if args.png:
        plot(runs, args.png)
    print_facts(args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
