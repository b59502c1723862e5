"""A kernel written in Triton itself, for tests of the compile gate: out = x @ w for one tile of 64 by 64."""

import triton  # pyright: ignore[reportMissingImports]  # only in the gate's environment
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def product(x, w, out, width, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    rows, columns, step = tl.arange(0, 64), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    acc = tl.zeros((64, COLUMNS), tl.float32)
    for k in range(0, width, STEP):
        a = tl.load(x + rows[:, None] * width + (k + step)[None, :])
        b = tl.load(w + (k + step)[:, None] * COLUMNS + columns[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], acc)
