"""Compile and run every program that serving can need."""

import concurrent.futures
import functools
import os
from collections.abc import Callable

import jax
import numpy as np

from apt_jax.executor.buckets import SamplerVariant
from apt_jax.executor.runner import ProgramCall, ProgramRunner

_MAX_COMPILERS = 8
"""Programs that are compiled at once."""
_NO_COPIES = np.zeros((0, 2), np.int32)


def warm_up(
    runner: ProgramRunner,
    *,
    mixed: bool,
    copies: bool,
    conversions: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile and run every program once, on padding that touches no block.

    Where programs are many, as nothing branches on the device, they are first compiled side by side.

    Args:
        mixed: steps may have decode rows and prompt chunks in one program.
        copies: blocks may be copied.
        conversions: layer inputs may be converted.
    """
    calls = _calls(runner, mixed=mixed, copies=copies, conversions=conversions)
    ahead = 0 if runner.programs.branches else len(calls)
    total = ahead + len(calls)
    if progress:
        progress(0, total)
    if ahead:
        with concurrent.futures.ThreadPoolExecutor(min(_MAX_COMPILERS, os.cpu_count() or 1)) as threads:
            compiled = [threads.submit(lambda call=call: call().lower().compile()) for call in calls]
            for done, future in enumerate(concurrent.futures.as_completed(compiled), 1):
                future.result()
                if progress:
                    progress(done, total)
    for done, call in enumerate(calls, ahead + 1):
        jax.block_until_ready(call().run())
        if progress:
            progress(done, total)


def _calls(runner: ProgramRunner, *, mixed: bool, copies: bool, conversions: bool) -> list[Callable[[], ProgramCall]]:
    programs, step_format, buckets = runner.programs, runner.step_format, runner.step_format.buckets
    variants = SamplerVariant.variants(branches=programs.branches)
    part = functools.partial
    calls: list[Callable[[], ProgramCall]] = [
        part(runner.empty_forward_call, *shape, kinds)
        for shape in buckets.forward_shapes(mixed=mixed)
        for kinds in programs.kind_sets()
    ]
    calls += [part(runner.empty_sample_call, rows, variant) for rows in buckets.decode for variant in variants]
    calls += [
        part(runner.empty_sample_call, rows, variant)
        for rows in buckets.masked
        for variant in SamplerVariant.masked_variants()
    ]
    calls += [
        part(runner.empty_decode_call, rows, kinds, variant)
        for rows in (() if programs.branches else buckets.decode)
        for kinds in programs.kind_sets()
        for variant in variants
        if not variant.penalised
    ]
    calls += [part(runner.copy_call, _NO_COPIES, size) for size in (buckets.copies if copies else ())]
    calls += [
        part(runner.convert_call, step_format.empty_conversion(n)[1], n)
        for n in (buckets.conversions if conversions else ())
    ]
    return calls
