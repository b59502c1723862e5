"""Keeps track of the programs that a step may run. Needs no JAX.

While a server that has started early still compiles programs, steps run only programs that are ready. A step takes the
smallest ready program that it fits. The largest program of each kind and the sampler that serves all rows are ready
first, so there is always a program: a step never waits for the compiler.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from apt_jax.executor.compiling.buckets import (
    CHANGES_PER_CALL,
    EVERYTHING,
    GREEDY,
    Buckets,
    PromptSize,
    SamplerVariant,
    bucket_for,
)

Kind = Literal[
    "decode", "prefill", "mixed", "sample", "fused", "copy", "convert", "save", "load", "tables", "counts",
    "save kv slots", "load kv slots", "save hidden slots", "load hidden slots",
]  # fmt: skip
TRANSFERS: tuple[Kind, ...] = (
    "save", "load", "save kv slots", "load kv slots", "save hidden slots", "load hidden slots",
)  # fmt: skip
"""Kinds that move blocks or slots between the device and host memory."""
_SIZES: dict[Kind, str] = {"decode": "decode", "copy": "copies", "convert": "conversions"}
"""Field of `Buckets` with the sizes of programs, by kind. Prompt sizes have two fields (`Buckets.prompts`)."""
_SIZES_OF_GRAPHS: dict[Kind, str] = {**_SIZES, "decode": "masked", "fused": "decode"}
"""Same as `_SIZES`, for executors in which a decode step and its sampler are one program."""


class ProgramName(NamedTuple):
    """Name of a program: its kind, its padded size, and the variant of its sampler, if it samples."""

    kind: Kind
    size: int
    variant: SamplerVariant | None = None
    prefix_room: int | None = None
    """Maximum total length of the hidden prefixes; see `PromptSize.prefix_room`."""


class ReadyPrograms:
    """The programs that steps may run.

    Attributes:
        sizes: sizes of the ready programs, except separate samplers and transfers to or from host memory.

    Args:
        branches: see `Programs.branches`. If False, programs are also compiled for each set of cache kinds, and until
            all programs are ready, steps run the programs of `first`, which take any kinds.
    """

    def __init__(self, buckets: Buckets, *, branches: bool = True) -> None:
        self._all = self.sizes = buckets
        self._branches, self._size_fields = branches, _SIZES if branches else _SIZES_OF_GRAPHS
        self._samplers: dict[SamplerVariant, list[int]] | None = None
        self._transfers: dict[Kind, list[int]] = {}

    @property
    def is_complete(self) -> bool:
        """True if steps may run all programs."""
        return self._samplers is None

    def first(self) -> set[ProgramName]:
        """Return the names of the smallest set of programs that can run every step, without `TRANSFERS`."""
        fields: dict[Kind, str] = {kind: field for kind, field in self._size_fields.items() if kind != "fused"}
        names = {ProgramName(kind, getattr(self._all, fields[kind])[-1]) for kind in fields}
        prompts = {max(self._all.prompts, key=lambda size: (size.prefix_room is None, size.cost))}
        if self._all.prefixed:
            prompts.add(PromptSize(self._all.prefill[-1], 0))
        of_prompts: tuple[Kind, ...] = ("prefill",) if self._branches else ("prefill", "mixed")
        for kind, size in itertools.product(of_prompts, prompts):
            names.add(ProgramName(kind, size.tokens, prefix_room=size.prefix_room))
        names |= {ProgramName("tables", CHANGES_PER_CALL), ProgramName("counts", CHANGES_PER_CALL)}
        if not self._branches:
            # All numbers of rows, because the compiler times their products on the device, which serving would disturb.
            names |= {ProgramName("fused", rows, GREEDY) for rows in self._all.decode}
        return {*names, ProgramName("sample", self._all.masked[-1], EVERYTHING)}

    def runs_in_one(self, variant: SamplerVariant) -> bool:
        """Return True if the programs that decode and sample with this variant are ready. Meaningless if the executor
        has no such programs."""
        return self.is_complete or variant == GREEDY

    def forget(self) -> None:
        """Restrict steps to programs that are added with `add`."""
        self.sizes = Buckets(decode=[], masked=[], prefill=[], prefixed=[], scored=[], copies=[], conversions=[])
        self._samplers, self._transfers = {}, {}

    def add(self, name: ProgramName) -> None:
        """Let steps use a program, which must be ready."""
        if self._samplers is None:
            return
        if not self._branches and name.kind in ("decode", "fused", "prefill", "mixed") and name not in self.first():
            return
        if name.kind == "sample":
            assert name.variant is not None
            self._samplers[name.variant] = sorted({*self._samplers.get(name.variant, ()), name.size})
            return
        if name.kind in TRANSFERS:
            self._transfers[name.kind] = sorted({*self._transfers.get(name.kind, ()), name.size})
            return
        if name.kind in ("prefill", "mixed"):
            self._add_prompts(PromptSize(name.size, name.prefix_room))
            return
        field = self._size_fields.get(name.kind)
        if field is None:  # such programs have one size
            return
        sizes = sorted({*getattr(self.sizes, field), name.size})
        self.sizes = dataclasses.replace(self.sizes, **{field: sizes})

    def _add_prompts(self, size: PromptSize) -> None:
        if size in self._all.prefixed:
            prefixed = sorted({*self.sizes.prefixed, size}, key=lambda size: size.cost)
            self.sizes = dataclasses.replace(self.sizes, prefixed=prefixed)
        else:
            self.sizes = dataclasses.replace(self.sizes, prefill=sorted({*self.sizes.prefill, size.tokens}))

    def finish(self) -> None:
        """Let steps use all programs, which must be ready."""
        self.sizes, self._samplers = self._all, None

    def transfers(self, kind: Kind, sizes: Sequence[int]) -> Sequence[int]:
        """Return the sizes, ascending, of the ready programs for a kind of transfer; `sizes`: all sizes."""
        return sizes if self._samplers is None else self._transfers[kind]

    def sampler(self, num_rows: int, variant: SamplerVariant) -> tuple[int, SamplerVariant]:
        """Return size and variant of the ready sampler for a number of rows that need at least `variant`."""
        if self._samplers is None:
            return bucket_for(self._all.masked if variant.masked else self._all.decode, num_rows), variant
        for candidate in (variant, *variant.broader()):
            for size in self._samplers.get(candidate, ()):
                if size >= num_rows:
                    return size, candidate
        raise LookupError(f"no sampler for {num_rows} rows")
