"""Files that travel with the package: the bundled model and texts to try it on."""

from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parent


def sonnet_prompts(num_prompts: int, seed: int = 0, longest_lines: int = 12) -> list[str]:
    """Return random passages of 1 to `longest_lines` consecutive lines of the bundled sonnets; equal for equal seeds."""
    lines = (ASSETS / "prompts" / "sonnets.txt").read_text(encoding="utf-8").splitlines()
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(num_prompts):
        count = int(rng.integers(1, longest_lines + 1))
        start = int(rng.integers(0, len(lines) - count))
        prompts.append("\n".join(lines[start : start + count]) + "\n")
    return prompts
