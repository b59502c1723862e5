"""Time that padding prompts to the sizes of compiled programs adds, by traffic and largest step.

A prompt is computed alone, in steps of at most as many tokens as a step may have. A step takes as long as its padded
tokens, and at least as long as reading the weights: below `KNEES` tokens more of them cost nothing. Under load steps are
full, so this is the worst that padding does.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.executor.compiling.buckets import power_of_two_buckets, prompt_buckets
from apt_jax.sim.trace import load_trace

KNEES = {"H100": 240, "A100": 150}
"""Tokens whose products take as long as reading 16-bit weights: 725 TFLOP/s over 3.0 TB/s as measured, and 270 over 1.8."""
LARGEST = (512, 2048, 8192)
"""Values of `--max-num-batched-tokens`."""
AGENT_TOKENS = (
    127,
    154,
    168,
    179,
    188,
    196,
    204,
    212,
    220,
    229,
    238,
    246,
    254,
    263,
    273,
    281,
    291,
    300,
    310,
    319,
    328,
    337,
    347,
    357,
    368,
    377,
    387,
    397,
    409,
    420,
    431,
    444,
    454,
    465,
    478,
    489,
    500,
    512,
    525,
    538,
    553,
    566,
    578,
    592,
    608,
    623,
    639,
    659,
    679,
    698,
    717,
    738,
    759,
    780,
    806,
    834,
    859,
    882,
    912,
    932,
    966,
    998,
    1034,
    1075,
    1117,
    1156,
    1195,
    1237,
    1291,
    1348,
    1409,
    1470,
    1524,
    1591,
    1667,
    1729,
    1796,
    1866,
    1953,
    2052,
    2169,
    2293,
    2437,
    2586,
    2760,
    2927,
    3155,
    3354,
    3609,
    3955,
    4327,
    4772,
    5412,
    6268,
    7243,
    8648,
    10831,
    16022,
    29876,
    108532,
)
"""New tokens of a call of a coding agent behind the prefix that it shares with an earlier one: percentiles 0.5 to 99.5 of
the 23,719 calls of 352 sessions (callanjfox/kv-cache-tester on GitHub, Apache-2.0) that have one; prefixes count in blocks
of 64 tokens."""


def _steps(prompts: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """Tokens of the steps that compute prompts, one after another."""
    whole, rest = np.divmod(prompts, largest)
    return np.concatenate([np.full(int(whole.sum()), largest), rest[rest > 0]])


def waste(buckets: Sequence[int], steps: NDArray[np.int64], knee: int) -> float:
    """Time that padding adds to steps, as a share of the time without."""
    padded = np.asarray(buckets)[np.searchsorted(buckets, steps)]
    return float(np.maximum(padded, knee).sum() / np.maximum(steps, knee).sum() - 1)


def worst_padding(buckets: Sequence[int], above: int) -> float:
    """The largest share by which padding adds to a prompt of more than `above` tokens that fits a step; 0: none does."""
    sizes = [above, *(b for b in buckets if b > above)]
    return max((high / (low + 1) - 1 for low, high in itertools.pairwise(sizes)), default=0.0)


def rows() -> Iterator[dict[str, Any]]:
    """Programs for prompts and what padding costs, in per cent; before: powers of four to 512 tokens and of two above."""
    traffic = {
        "sharegpt": np.asarray(load_trace("sharegpt").prompt_tokens),
        "agents' new tokens": np.asarray(AGENT_TOKENS),
    }
    for name, prompts in traffic.items():
        for largest in LARGEST:
            before = power_of_two_buckets(32, largest)
            before = [size for size in before if size >= 512 or size in (32, 128)]
            sizes = {"before": before, "now": prompt_buckets(largest)}
            steps = _steps(prompts, largest)
            row: dict[str, Any] = {"traffic": name, "most tokens": largest}
            row |= {f"sizes {when}": len(buckets) for when, buckets in sizes.items()}
            for card, knee in KNEES.items():
                row |= {f"{card} % {when}": round(100 * waste(b, steps, knee), 1) for when, b in sizes.items()}
            row |= {f"worst % above 256 {when}": round(100 * worst_padding(b, 256)) for when, b in sizes.items()}
            yield row
