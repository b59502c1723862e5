"""Which programs a step may run: all of them or, while a server that has started early compiles the rest, those that
are ready. Needs no JAX.

A step takes the smallest program that is ready and holds it. The largest of each kind are ready first, and so is the
sampler that serves all rows, so that there is always one: a step never waits for the compiler.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from apt_jax.executor.buckets import CHANGES_PER_CALL, EVERYTHING, Buckets, PromptSize, SamplerVariant, bucket_for

Kind = Literal[
    "decode", "prefill", "mixed", "sample", "fused", "copy", "convert", "save", "load", "tables", "counts",
    "save kv slots", "load kv slots", "save hidden slots", "load hidden slots",
]  # fmt: skip
TRANSFERS: tuple[Kind, ...] = (
    "save", "load", "save kv slots", "load kv slots", "save hidden slots", "load hidden slots",
)  # fmt: skip
"""Kinds that move blocks or slots between the device and host memory."""
_SIZES: dict[Kind, str] = {"decode": "decode", "copy": "copies", "convert": "conversions"}
"""The field of `Buckets` that has the sizes of programs of a kind. Those of prompts have two (`Buckets.prompts`)."""


class ProgramName(NamedTuple):
    """A program: what it does, its padded size and, of one that samples, what it offers."""

    kind: Kind
    size: int
    variant: SamplerVariant | None = None
    prefix_room: int | None = None
    """Room of a program for prompts, as of `PromptSize`."""


class ReadyPrograms:
    """The programs that steps may run.

    Attributes:
        sizes: of the programs that neither sample nor move blocks to or from host memory, as `Buckets`.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._all = self.sizes = buckets
        self._samplers: dict[SamplerVariant, list[int]] | None = None
        self._transfers: dict[Kind, list[int]] = {}

    @property
    def is_complete(self) -> bool:
        """True: there is nothing that a step may not run."""
        return self._samplers is None

    def first(self) -> set[ProgramName]:
        """The fewest programs that serve every step, without those of `TRANSFERS`."""
        names = {ProgramName(kind, getattr(self._all, field)[-1]) for kind, field in _SIZES.items()}
        tokens, room = max(self._all.prompts, key=lambda size: (size.prefix_room is None, size.cost))
        names.add(ProgramName("prefill", tokens, prefix_room=room))
        names |= {ProgramName("tables", CHANGES_PER_CALL), ProgramName("counts", CHANGES_PER_CALL)}
        return {*names, ProgramName("sample", self._all.masked[-1], EVERYTHING)}

    def forget(self) -> None:
        """From now on steps run nothing but what `add` names."""
        self.sizes = Buckets(decode=[], masked=[], prefill=[], prefixed=[], scored=[], copies=[], conversions=[])
        self._samplers, self._transfers = {}, {}

    def add(self, name: ProgramName) -> None:
        """A program is ready."""
        if self._samplers is None:
            return
        if name.variant is not None:
            self._samplers[name.variant] = sorted({*self._samplers.get(name.variant, ()), name.size})
            return
        if name.kind in TRANSFERS:
            self._transfers[name.kind] = sorted({*self._transfers.get(name.kind, ()), name.size})
            return
        if name.kind == "prefill":
            self._add_prompts(PromptSize(name.size, name.prefix_room))
            return
        field = _SIZES.get(name.kind)
        if field is None:  # has one size
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
        """All programs are ready."""
        self.sizes, self._samplers = self._all, None

    def transfers(self, kind: Kind, sizes: Sequence[int]) -> Sequence[int]:
        """Sizes, ascending, that programs of a kind of transfer may be run with, of all that there are."""
        return sizes if self._samplers is None else self._transfers[kind]

    def sampler(self, num_rows: int, variant: SamplerVariant) -> tuple[int, SamplerVariant]:
        """Size and variant of the sampler for so many rows that need at least `variant`."""
        if self._samplers is None:
            return bucket_for(self._all.masked if variant.masked else self._all.decode, num_rows), variant
        for candidate in (variant, *variant.broader()):
            for size in self._samplers.get(candidate, ()):
                if size >= num_rows:
                    return size, candidate
        raise LookupError(f"no sampler for {num_rows} rows")
