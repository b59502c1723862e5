"""Bounds that need no device: programs and seconds of lowering of a start, bytes that steps send from the host, and how
much cache models have on cards.

    python -m benchmarks.gpu.bounds [--out DIR] [--only start,steps,memory]

What it prints is in benchmarks/results/gpu-bounds/, as CSV too.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from apt_jax.backends import attention_ops
from apt_jax.config import CacheConfig
from apt_jax.errors import ConfigError
from apt_jax.executor.warm_up import Program, all_programs
from apt_jax.models import PRESETS
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.memory_plan import memory_plan
from apt_jax.utils.device_memory import MEMORY_FRACTION
from benchmarks.gpu.compile_only import CHIPS
from benchmarks.gpu.device_free import pallas_for
from benchmarks.gpu.engine_step import StepCase, abstract_runner
from benchmarks.gpu.gate import as_text

_GIB = 2**30
DEFAULTS = {"num_rows": 64, "prefill_tokens": 512, "context": 2048}
"""The engine's: `--max-num-seqs`, `--max-num-batched-tokens`, and OPT's context."""

Row = dict[str, Any]


# --- a start -----------------------------------------------------------------------------------------------------


def start_cases() -> list[tuple[str, StepCase]]:
    """Engines whose start is counted."""
    both, kv = (True, True), (True, False)
    common: dict[str, Any] = {"dtype": "bfloat16", **DEFAULTS}
    large = dict(common, num_rows=256, prefill_tokens=8192)
    return [
        ("hybrid, defaults", StepCase(model="opt-13b", kinds=both, **common)),
        ("kv, defaults", StepCase(model="opt-13b", kinds=kv, **common)),
        ("hybrid, 256 rows, 8192 tokens", StepCase(model="opt-13b", kinds=both, **large)),
        ("kv, defaults", StepCase(model="llama-3-8b", kinds=kv, **dict(common, context=8192))),
    ]


def starts(archs: Sequence[str] = ("sm_80",)) -> Iterator[Row]:
    """Programs of a start, and the processor seconds that tracing and lowering them takes on this machine."""
    for arch in archs:
        chip = CHIPS[arch]
        for name, case in start_cases():
            ops = attention_ops("gpu", "triton", arch)
            with pallas_for(chip):
                runner = abstract_runner(case, chip, ops)
                programs = all_programs(runner, mixed=True, copies=True, conversions=False)
                begin = time.thread_time()  # Python holds its lock: more cores do not help
                for program in tqdm(programs, desc=f"{case.model} {name}", unit="program", file=sys.stderr):
                    program.call().lower()
                seconds = time.thread_time() - begin
            yield {
                "model": case.model,
                "engine": name,
                "chip": arch,
                "programs": len(programs),
                "of the whole model": sum(map(_is_whole_model, programs)),
                "lowering s": round(seconds, 1),
            }


def _is_whole_model(program: Program) -> bool:
    return program.name.kind in ("decode", "prefill", "mixed", "fused")


# --- steps -------------------------------------------------------------------------------------------------------


def step_inputs() -> Iterator[Row]:
    """Bytes that a step sends from the host, by model, rows and context."""
    cases = [
        ("opt-13b", 2048, (64, 256)),
        ("llama-3.1-8b", 131_072, (64, 256)),
        ("llama-3-8b-262k", 262_144, (64, 256)),
        ("yi-6b-200k", 200_000, (64,)),
    ]
    for model, context, counts in cases:
        for rows in counts:
            kinds = (True, model.startswith("opt"))
            case = StepCase(model=model, dtype="bfloat16", kinds=kinds, num_rows=rows, context=context, num_layers=1)
            runner = abstract_runner(case, CHIPS["sm_80"], attention_ops("gpu", "triton", "sm_80"))
            programs = all_programs(runner, mixed=True, copies=False, conversions=False)
            sent: dict[str, int] = {}
            for program in programs:
                call = program.call()
                size = sum(a.nbytes for a in call.args if isinstance(a, np.ndarray))
                sent[program.name.kind] = max(sent.get(program.name.kind, 0), size)
            yield {
                "model": model,
                "context": context,
                "rows": rows,
                "decode step KiB": round(sent["fused"] / 1024, 1),
                "step with prompts KiB": round(sent["mixed"] / 1024, 1),
                "sampler with history KiB": round(sent["sample"] / 1024, 1),
            }


# --- memory ------------------------------------------------------------------------------------------------------


def memory_plans() -> Iterator[Row]:
    """Weights, pool and tokens by model, devices and card, at the engine's defaults."""
    cases = [
        ("opt-13b", 1, 40), ("opt-13b", 1, 80), ("opt-30b", 2, 40), ("opt-66b", 4, 40), ("opt-66b", 4, 80),
        ("llama-2-7b", 1, 40), ("llama-3-8b", 1, 40), ("llama-3-8b-262k", 1, 40), ("yi-6b-200k", 1, 40),
        ("llama-3-70b", 4, 40), ("llama-3-70b", 4, 80), ("gemma-2b", 1, 40), ("gemma-2-9b", 1, 40),
        ("mistral-7b-v0.1", 1, 40), ("phi-3-mini", 1, 40), ("qwen3-8b", 1, 40),
    ]  # fmt: skip
    for model, devices, gib in cases:
        row: Row = {"model": model, "devices": devices, "card GiB": gib}
        try:
            plan = memory_plan(
                read_model_config(PRESETS[model])[1],
                jnp.bfloat16,
                CacheConfig(),
                num_devices=devices,
                device_bytes=gib * _GIB,
                max_num_seqs=64,
                max_num_batched_tokens=512,
                memory_fraction=MEMORY_FRACTION,
            )
        except ConfigError as error:
            yield row | {"weights GiB": "refused", "why": str(error).split(";")[0]}
            continue
        tokens = {f"{kind} tokens": count for kind, count in plan.tokens.items()}
        yield row | {
            "weights GiB": round(plan.weight_bytes / _GIB, 2),
            "pool GiB": round(plan.pool_bytes / _GIB, 2),
            **tokens,
        }


TABLES = {"start": starts, "steps": step_inputs, "memory": memory_plans}


def table_of(rows: Sequence[Row]) -> list[list[str]]:
    """A header and the rows, as text."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for a CSV file a table")
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {', '.join(TABLES)}")
    options = parser.parse_args(arguments)
    for name in options.only.split(","):
        if name not in TABLES:
            parser.error(f"no table {name!r}; there are {', '.join(TABLES)}")
        table = table_of(list(TABLES[name]()))
        print(f"\n== {name}\n{as_text(table)}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
