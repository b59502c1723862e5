"""Writes what XLA finds out about the products of known models on this card, to be shipped with the package.

    python -m benchmarks.gpu.autotune --out DIR [--models opt-13b,llama-3-8b] [--seconds 240]

Compiles the programs of each model's engine at default flags, two layers of it, for the card that is there: products are
the same in every layer. No weights are made. Results so far are written after each model:
DIR/<card>/<jaxlib>.json, which belongs into apt_jax/assets/autotune/. A line of JSON a program says how long it took.
"""

import argparse
import concurrent.futures
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from apt_jax.backends import attention_ops
from apt_jax.config import CacheConfig
from apt_jax.executor.attention_choice import chip_of
from apt_jax.executor.compiling.tuning_results import card_name, jaxlib_version, prepare_tuning_dir, write_results
from apt_jax.executor.compiling.warm_up import MAX_COMPILERS_FOR_GPU, Program, all_programs
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.models.sharding import AXIS
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu.bounds import DEFAULTS
from benchmarks.gpu.engine_step import BLOCK_SIZE, StepCase, described_runner, model_of
from benchmarks.gpu.harness import end_with_parent

MODELS = ("opt-13b", "llama-3-8b", "llama-2-7b", "opt-1.3b", "gemma-2b")
_TINY = ("opt-125m",)
_NUM_LAYERS = 2
_NUM_BLOCKS = 64


def runner_of(model: str, tuning_dir: Path | None, *, tiny: bool) -> ProgramRunner:
    """The engine's programs for this machine's first device, with shapes for weights and pools."""
    device = jax.devices()[0]
    case = StepCase(model=model, dtype="bfloat16", kinds=(True, True), num_layers=_NUM_LAYERS)
    config = model_of(case)
    limits: dict[str, Any] = {
        "max_num_seqs": 4 if tiny else DEFAULTS["num_rows"],
        "max_num_batched_tokens": 32 if tiny else DEFAULTS["prefill_tokens"],
        "max_model_len": min(config.max_position, 64 if tiny else 8192),
    }
    plan = plan_executor(
        config,
        cache=CacheConfig(mode="hybrid", block_size=BLOCK_SIZE),
        num_devices=1,
        platform=device.platform,
        chip=chip_of(device),
        attention=_ops(device),
        **limits,
    )
    return described_runner(plan, Mesh(np.array([device]), (AXIS,)), case.dtype, _NUM_BLOCKS, tuning_dir)


def _ops(device: Any) -> KernelBackend | None:
    """None: the platform's; on a CPU, where only the script is tried, XLA's."""
    return attention_ops("cpu", "xla") if device.platform == "cpu" else None


def products(runner: ProgramRunner) -> list[Program]:
    """The engine's programs that have products. Those that differ in cache kinds or sampler fuse them differently."""
    programs = all_programs(runner, mixed=not runner.programs.branches, copies=False, conversions=False)
    return [program for program in programs if program.call().num_tokens]


def compiled(programs: Sequence[Program], until: float) -> Iterator[dict[str, Any]]:
    """Compile programs side by side; gives a row for each that was compiled by `until`, a time of `time.monotonic`."""
    with concurrent.futures.ThreadPoolExecutor(min(MAX_COMPILERS_FOR_GPU, os.cpu_count() or 1)) as threads:
        began = time.monotonic()
        waiting = {threads.submit(program.compile): program.name for program in programs}
        try:
            for future in concurrent.futures.as_completed(waiting, max(0.0, until - began)):
                name, error = waiting[future], future.exception()
                row: dict[str, Any] = {"program": name.kind, "size": name.size}
                yield row | {
                    "seconds": round(time.monotonic() - began, 2),
                    "error": None if error is None else f"{type(error).__name__}: {error}"[:200],
                }
        except TimeoutError:
            threads.shutdown(cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--models", help=f"presets, the most important first; {','.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no program is begun")
    parser.add_argument("--tiny", action="store_true", help="three small programs, to try the script on a CPU")
    options = parser.parse_args(arguments)
    until, device = time.monotonic() + options.seconds, jax.devices()[0]
    path = options.out / card_name(device.device_kind) / f"{jaxlib_version()}.json"
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)  # results of other programs are not this run's
        tuning_dir = prepare_tuning_dir(device)
        if tuning_dir is None:
            print(f"{device.device_kind} is no GPU: nothing is tuned", file=sys.stderr)
        models = ",".join(_TINY if options.tiny else MODELS) if options.models is None else options.models
        for model in models.split(","):
            runner = runner_of(model, tuning_dir, tiny=options.tiny)
            for row in compiled(products(runner)[: 3 if options.tiny else None], until):
                print(json.dumps({"model": model, **row}), flush=True)
            count = 0 if tuning_dir is None else write_results(tuning_dir, path)
            print(json.dumps({"model": model, "results": count, "file": os.fspath(path)}), flush=True)
            if time.monotonic() > until:
                break
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
