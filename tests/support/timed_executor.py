"""An executor whose steps take known times: what a calibration must find.

Two machines serve OPT-13B's shape. `Accelerator` runs one compiled program a step, for each kind and each size of hidden
prefixes: its products take whole waves of tiles, or the time to read the weights, its host works beside the device.
`Processor` runs decodes and prompts one after another, skips the padding of products, and attends by whole tiles. Neither
is of the form that is fitted. Times are of nothing real.
"""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, KindSet
from apt_jax.core.step import StepBatch
from apt_jax.executor.compiling.buckets import Buckets, PromptSize, bucket_for, padded_prefix
from apt_jax.executor.jax_executor import JaxExecutor

LAYERS, WIDTH, PIECE = 40, 5120, 8192
KV_BYTES = LAYERS * 2 * WIDTH * 2
"""Bytes of keys and values per token."""
Rows = NDArray[Any]


def _padded(buckets: list[int], size: int) -> int:
    return bucket_for(buckets, size) if size else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Seconds of a step on the device of an accelerator."""

    buckets: Buckets

    hidden_prompt_s: float = 0.4e-3
    """Extra time of a step with chunks where it has hidden rows."""

    mixed, branches, rows_per_tile, platform = True, False, 1, "gpu"
    host_s = 2e-3

    def step_s(self, num_tokens: Rows, start: Rows, kind: Rows) -> float:
        decode, hidden = num_tokens == 1, kind == HIDDEN
        c, m = num_tokens[~decode].astype(float), start[~decode].astype(float)
        tokens = _padded(self.buckets.prefill, int(c.sum()))
        prefix, room = int(m[hidden[~decode]].sum()), None
        if prefix and self.buckets.prefixed:
            padded = padded_prefix(start[~decode & hidden].astype(np.int32)).sum()
            tokens, room = self.buckets.prompt_size(tokens, int(padded))
        rows = self.buckets.decode[-1] if tokens and decode.any() else _padded(self.buckets.decode, int(decode.sum()))
        waves = sum(np.ceil(np.ceil((rows + tokens) / 128) * n / 256 / 132) * k for n, k in _PRODUCTS)
        step_s = 2e-3 + LAYERS * (2 * waves * 132 * 128 * 256 / 600e12 + 1.5e-9 * (rows + tokens))
        step_s = max(step_s, 11e-3)  # reading the weights
        for of_kind, byte_s, launches in ((~hidden, 2.7e12, 2), (hidden, 3.2e12, 6)):
            if (of_kind & decode).any():
                read = np.ceil((start[of_kind & decode] + 1) / 64).sum() * 64 * KV_BYTES
                step_s += LAYERS * launches * 3e-6 + read / byte_s
        if not tokens:
            return step_s
        step_s += (
            LAYERS * 4 * WIDTH * float(c @ (c / 2 + m + 64)) / 170e12
            + float(m[~hidden[~decode]].sum()) * KV_BYTES / 2e12
        )
        if not hidden.any():
            return step_s
        pieces = np.ceil((room or 131_072 if self.buckets.prefixed and prefix else prefix) / PIECE)
        return step_s + self.hidden_prompt_s + pieces * LAYERS * 2 * 20e-6 + prefix * LAYERS * 4 * WIDTH**2 / 480e12


_PRODUCTS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
"""Columns and depth of the products of a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """Seconds of a step on a CPU."""

    buckets: Buckets
    slowness: float = 1.0
    """Factor of all times but the host's."""

    mixed, branches, rows_per_tile, platform = False, True, 1, "cpu"
    host_s = 1e-3

    def step_s(self, num_tokens: Rows, start: Rows, kind: Rows) -> float:
        decode, step_s = num_tokens == 1, 0.0
        if decode.any():
            read = np.bincount(kind[decode], start[decode] + 1, 2)
            step_s += 8e-3 + 0.5e-3 * float(decode.sum()) + 1e-6 * read[KV] + 2e-6 * read[HIDDEN]
        if decode.all():
            return self.slowness * step_s
        c, m = num_tokens[~decode].astype(float), start[~decode].astype(float)
        hidden, own, tiles = kind[~decode] == HIDDEN, np.ceil(c / 128), np.ceil(m / 128)
        step_s += 6e-3 + 0.2e-3 * float(c.sum()) + 1.6e-3 * float(own @ ((own + 1) / 2 + tiles))
        step_s += 0.1e-3 * float(tiles[~hidden].sum()) + 2.5e-3 * float(tiles[hidden].sum())
        return self.slowness * step_s


@dataclasses.dataclass
class _Handle:
    executor: "TimedExecutor"
    ready_s: float

    def result(self) -> None:
        self.executor.now_s = max(self.executor.now_s, self.ready_s)


class TimedExecutor:
    """The part of a `JaxExecutor` that a calibration needs, on a clock of its own.

    Args:
        machine: how long steps take.
        noise: deviation of the logarithm of a step's time.
        num_blocks: usable blocks of the pool.

    Attributes:
        now_s: the time, for ``time.perf_counter``.
    """

    def __init__(self, machine: Accelerator | Processor, *, noise: float = 0.0, num_blocks: int = 6000) -> None:
        self.machine, self.noise, self.num_blocks = machine, noise, num_blocks
        self.now_s = self._busy_until_s = 0.0
        self._rng = np.random.default_rng(1)
        self.buckets, self.ready = machine.buckets, SimpleNamespace(sizes=machine.buckets)
        self.programs = SimpleNamespace(branches=machine.branches)
        self.kinds_offered = KindSet(kv=True, hidden=True)
        self.mixed, self.rows_per_tile, self.platform = machine.mixed, machine.rows_per_tile, machine.platform
        self.block_size = self.hidden_block_size = 16
        self.max_num_seqs, self.max_num_batched_tokens = machine.buckets.decode[-1], machine.buckets.prefill[-1]
        self.max_model_len = 2048
        self.adapters, self.can_convert, self.host, self.absorbs = {}, False, None, True
        self.params, self.num_devices = SimpleNamespace(dtype="bfloat16"), 1
        self.plan = SimpleNamespace(windows=None, layer_groups=None)

    def send_tables(self, batch: StepBatch) -> None:
        pass

    def execute(self, batch: StepBatch) -> _Handle:
        self.now_s += self.machine.host_s
        begin_s = max(self.now_s, self._busy_until_s)
        step_s = self.machine.step_s(batch.num_tokens, batch.start, batch.kind)
        self._busy_until_s = begin_s + step_s * float(np.exp(self._rng.normal(0, self.noise)))
        return _Handle(self, self._busy_until_s)

    def as_executor(self) -> JaxExecutor:
        return cast("JaxExecutor", self)


def opt_buckets(prefill: list[int], decode: list[int], prefixed: Sequence[PromptSize] = ()) -> Buckets:
    """Buckets of these sizes, and no others that matter here.

    Args:
        prefixed: programs for hidden prefixes; empty: prefixes cost what is in them.
    """
    return Buckets(
        decode=decode,
        masked=decode,
        prefill=prefill,
        prefixed=list(prefixed),
        scored=prefill,
        copies=[],
        conversions=[],
    )
