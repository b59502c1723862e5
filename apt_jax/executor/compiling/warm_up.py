"""Compiles and runs every program that serving can need: all before serving, or first the smallest set that can run
every step, and the others while serving."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from apt_jax.executor.compiling.buckets import CHANGES_PER_CALL, SamplerVariant
from apt_jax.executor.compiling.quick_lowering import quick_lowering
from apt_jax.executor.compiling.ready_programs import TRANSFERS, ProgramName, ReadyPrograms
from apt_jax.executor.programs.runner import ProgramCall, ProgramRunner

MAX_COMPILERS, MAX_COMPILERS_FOR_GPU = 8, 16
"""Maximum number of programs compiled at once; larger for GPUs, whose compiler mostly runs without Python's lock."""
_NO_COPIES = np.zeros((0, 2), np.int32)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its call on padding, which touches no block."""

    name: ProgramName
    call: Callable[[], ProgramCall]
    is_general: bool = True
    """True if the program takes rows of every cache kind and length."""

    def compile(self) -> Any:
        """Compile the program, or load it from the cache directory, for later calls. May be called from any thread."""
        return self.call().compile()

    def temporary_bytes(self) -> int:
        """Return the device memory in bytes that the program takes while it runs, besides its arguments and their
        replacements."""
        memory = self.compile().memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.temp_size_in_bytes + max(0, results)

    def run(self) -> None:
        """Run the program once. Must be called while no other thread runs programs."""
        call = self.call()
        call.compile()
        jax.block_until_ready(call.run())


def warm_up(
    programs: Sequence[Program],
    progress: Callable[[int, int], None] | None = None,
    *,
    allocate: Callable[[], None] = lambda: None,
    num_threads: int = MAX_COMPILERS,
) -> None:
    """Compile programs in parallel, and run each once.

    Args:
        allocate: allocates the pool; called after compilation, because the compiler tunes products on the device.
    """
    if progress:
        progress(0, len(programs))
    num_threads = min(num_threads, os.cpu_count() or 1)
    with quick_lowering(), concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        compiled = [threads.submit(program.compile) for program in programs]
        try:
            # In the order of completion, so that the count grows steadily: the first programs take longest.
            for done, future in enumerate(concurrent.futures.as_completed(compiled), 1):
                future.result()
                if progress:
                    progress(done, len(programs))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    allocate()
    for program in programs:
        program.run()


def largest_programs(programs: Iterable[Program]) -> list[Program]:
    """Return the programs that need the most memory besides the pool: the program that computes the most tokens, and
    the program that samples from the most rows with the most features."""

    def weight(program: Program) -> tuple[int, bool, int]:
        variant, room = program.name.variant, program.name.prefix_room
        return program.name.size, room is None, 0 if variant is None else variant.penalised + variant.masked

    programs = list(programs)
    kinds = {program.name.kind for program in programs}
    found = [
        [p for p in programs if p.name.kind == kind] for kind in ("mixed" if "mixed" in kinds else "prefill", "sample")
    ]
    return [max(reversed(of_kind), key=weight) for of_kind in found]


def first_and_others(programs: Iterable[Program], ready: ReadyPrograms) -> tuple[list[Program], list[Program]]:
    """Return the smallest set of programs that can run every step, and the other programs in the order in which they
    are likely to be needed: programs for one client, then for two, and so on; rarely used samplers last."""
    programs = list(programs)
    transfers = [p.name for p in programs if p.name.kind in TRANSFERS]
    largest = {name.kind: name for name in sorted(transfers, key=lambda name: name.size)}
    names = {*ready.first(), *largest.values()}

    def place(program: Program) -> tuple[bool, int, int]:
        name = program.name
        rare = name.variant is not None and (name.variant.penalised or name.variant.masked)
        kinds = ("fused", "sample", "decode", "prefill", "mixed", "copy", "convert", *TRANSFERS)
        return rare, name.size, kinds.index(name.kind)

    first = [p for p in programs if p.name in names and p.is_general]
    return first, sorted((p for p in programs if p not in first), key=place)


def all_programs(runner: ProgramRunner, *, mixed: bool, copies: bool, conversions: bool) -> list[Program]:
    """Return every program that serving can need, except transfers (`HostPool.programs`) and the programs of
    `prompt_logprobs`.

    Args:
        mixed: True: programs may have decode rows and prompt chunks.
        copies: True: blocks may be copied.
        conversions: True: layer inputs may be converted.
    """
    programs, step_format, buckets = runner.programs, runner.step_format, runner.step_format.buckets
    variants = SamplerVariant.variants()
    part, name = functools.partial, ProgramName
    found: list[Program] = []
    for rows, prompts in buckets.forward_shapes(mixed=mixed):
        tokens, prefix_room = prompts or (0, None)
        kind = "decode" if not tokens else "mixed" if rows else "prefill"
        kind_sets = programs.kind_sets(rows, tokens, prefix_room)
        if not programs.branches and not tokens:
            if rows not in buckets.masked:
                continue
            kind_sets = [programs.kinds_offered]
        for kinds in kind_sets:
            # Decode steps rarely run forward and sampling as separate programs, so one room suffices.
            for room in programs.hidden_rooms(rows, kinds) if tokens else [None]:
                call = part(runner.empty_forward_call, rows, tokens, kinds, room, prefix_room)
                is_general = kinds == programs.kinds_offered and room is None
                found.append(Program(name(kind, tokens or rows, prefix_room=prefix_room), call, is_general))
    found.append(Program(name("tables", CHANGES_PER_CALL), runner.empty_tables_call))
    found.append(Program(name("counts", CHANGES_PER_CALL), runner.empty_counts_call))
    samplers = [(rows, variant) for rows in buckets.decode for variant in variants]
    samplers += [(rows, variant) for rows in buckets.masked for variant in SamplerVariant.masked_variants()]
    for rows, variant in samplers:
        found.append(Program(name("sample", rows, variant), part(runner.empty_sample_call, rows, variant)))
    for rows in () if programs.branches else buckets.decode:
        for kinds in programs.kind_sets(rows, 0):
            for variant, room in itertools.product(variants, programs.hidden_rooms(rows, kinds)):
                if not variant.penalised:
                    call = part(runner.empty_decode_call, rows, kinds, variant, room)
                    is_general = kinds == programs.kinds_offered and room is None
                    found.append(Program(name("fused", rows, variant), call, is_general))
    for size in buckets.copies if copies else ():
        found.append(Program(name("copy", size), part(runner.copy_call, _NO_COPIES, size)))
    for n in buckets.conversions if conversions else ():
        padding = step_format.empty_conversion(n)[1]
        found.append(Program(name("convert", n), part(runner.convert_call, padding, n)))
    return found
