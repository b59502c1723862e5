"""A small executor with host memory, compiled once for all tests of a file."""

from typing import Any

import pytest

from apt_jax.config import CacheConfig
from apt_jax.executor.jax_executor import JaxExecutor
from tests.support.paged_driver import draw_greedily
from tests.support.parallel_cases import MODELS, distinct_params


def make_host_executor(
    *,
    num_blocks: int = 60,
    max_num_seqs: int = 4,
    host_sizes: tuple[int, ...] = (4, 16),
    warm_up: bool = True,
    **options: Any,
) -> JaxExecutor:
    """Return an executor of "opt" with blocks of four positions and 2 MiB of host memory, its programs compiled.

    Args:
        num_blocks: of the pool.
        max_num_seqs: rows of every decode step.
        host_sizes: blocks that programs move.
        warm_up: False: the caller compiles its programs.
        options: others of `JaxExecutor`.
    """
    config = MODELS["opt"]
    made = JaxExecutor(
        distinct_params(config), config,
        cache=CacheConfig(block_size=4, num_blocks_override=num_blocks, swap_space=2 / 1024),
        max_num_seqs=max_num_seqs, max_num_batched_tokens=32, max_model_len=96, **options,
    )  # fmt: skip
    made.buckets.decode, made.buckets.prefill, made.buckets.masked = [max_num_seqs], [32], []  # fewer to compile
    made.buckets.conversions = [3]
    assert made.host is not None
    made.host.sizes = list(host_sizes)
    if not warm_up:
        return made
    with pytest.MonkeyPatch.context() as patch:
        draw_greedily(patch)
        made.warm_up()
    return made
