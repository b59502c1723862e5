"""The first token of a conversation after a restart, with and without `--prefix-cache-dir`.

Each run begins as a started server does: with a new engine, an empty pool, an empty host memory, and the files that an
earlier engine left at its end. Runs with and without the directory alternate, and answers must be the same. The files are
likely to be in the page cache of the operating system, as they are after a restart of the server alone.

    python -m benchmarks.engine.restart --length 1900
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine, open_disk_store
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.frontend.progress import ProgressBars
from apt_jax.request import EngineRequest, SamplingParams
from benchmarks.engine.prefix_cache import print_facts


def started(parts: EngineComponents, directory: Path | None) -> EngineComponents:
    """A server that has just started, over the same programs."""
    executor, disk = parts.executor, None
    assert isinstance(executor, JaxExecutor)
    executor.reset()
    if directory is not None:
        cache = CacheConfig(swap_space=parts.config.cache.swap_space, prefix_cache_dir=str(directory))
        disk = open_disk_store(cache, executor)
    return build_components(
        parts.config, executor, kinds=parts.engine.kinds, vocab_size=parts.limits.vocab_size,
        max_model_len=parts.limits.max_model_len, costs=parts.engine.costs, disk=disk,
    )  # fmt: skip


def first_token(parts: EngineComponents, tokens: NDArray[np.int32], max_tokens: int) -> tuple[float, list[int], int]:
    """Seconds to the first token, all of them, and how many of the prompt were cached."""
    engine, said, ttft_s, cached = parts.engine, list[int](), 0.0, 0
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.add_request(
        EngineRequest(
            request_id="0",
            prompt=None,
            prompt_token_ids=tokens,
            params=params,
            slo=SLO(),
            arrival_s=engine.clock.now_s(),
        )
    )
    while engine.has_work:
        for output in engine.step():
            ttft_s = ttft_s or time.perf_counter() - began
            said += output.new_token_ids
            cached = output.metrics.num_cached_tokens
    return ttft_s, said, cached


def main() -> int:
    parser = argparse.ArgumentParser(description="The first token of a conversation after a restart.")
    parser.add_argument("--model", default="tiny-opt")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--caches", nargs="*", default=["kv", "hidden"], choices=("kv", "hidden"))
    parser.add_argument("--length", type=int, default=1900, help="tokens of the conversation")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--swap-space", type=float, default=0.25, help="GiB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bars = ProgressBars()
    print(f"{'cache':8} {'without':>10} {'with':>10} {'paired':>8} {'cached':>7} {'files':>10} {'end':>9}")
    for cache in args.caches:
        config = EngineConfig(
            model=args.model, load_format=args.load_format,
            cache=CacheConfig(mode=cache, num_blocks_override=4 * -(-args.length // 16) + 16, swap_space=args.swap_space),
            scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=8, max_num_batched_tokens=512),
        )  # fmt: skip
        parts = build_engine(config, progress=bars)
        bars.close()
        tokens = np.random.default_rng(args.seed).integers(3, parts.limits.vocab_size, args.length).astype(np.int32)
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory) / "prefixes"
            before = started(parts, home)
            expected = first_token(before, tokens, 4)[1]
            ending = time.perf_counter()
            before.engine.close()
            end_s = time.perf_counter() - ending
            pairs: list[tuple[float, float]] = []
            cached = 0
            for _ in range(args.repeats):
                of_pair = []
                for where in (None, home):
                    run = started(parts, where)
                    ttft_s, said, cached = first_token(run, tokens, 4)
                    assert said == expected, "answers differ"
                    of_pair.append(ttft_s)
                    run.engine.close()
                pairs.append((of_pair[0], of_pair[1]))
            size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        without_s, with_s = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = statistics.median(b / a for a, b in pairs)
        print(
            f"{cache:8} {1e3 * without_s:7.1f} ms {1e3 * with_s:7.1f} ms {share:8.2f} {cached:7} {size / 2**20:6.1f} MiB "
            f"{1e3 * end_s:6.0f} ms"
        )
    print_facts(args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
