"""Bounds that need no device: programs and seconds of lowering of a start, bytes that steps send from the host, cache that
models have on cards, what decode kernels move and walk, and what the padding of prompts costs.

    python -m benchmarks.gpu.bounds [--out DIR] [--only start,steps,memory,chains,traffic,buckets,designs,projections,onepass]

What it prints is in benchmarks/results/gpu-bounds/, as CSV too.
"""

import argparse
import csv
import dataclasses
import itertools
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
from apt_jax.executor.compiling.quick_lowering import quick_lowering
from apt_jax.executor.compiling.warm_up import Program, all_programs
from apt_jax.lab.kernels import cuda_decode_absorbed
from apt_jax.models import PRESETS
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.memory_plan import memory_plan
from apt_jax.pallas import triton_decode_absorbed, triton_decode_kv, triton_decode_reprojected
from apt_jax.pallas.triton_tiles import tile_for
from apt_jax.pallas.triton_work_list import longest_chain, pieces_for, rows_of
from apt_jax.utils.device_memory import MEMORY_FRACTION
from benchmarks.gpu import bucket_waste
from benchmarks.gpu.absorbed_designs import designs, projections
from benchmarks.gpu.compile_only import CHIPS
from benchmarks.gpu.device_free import pallas_for
from benchmarks.gpu.engine_step import StepCase, abstract_runner, input_failures, sent_bytes
from benchmarks.gpu.gate import as_text
from benchmarks.gpu.problems import ragged, work_of
from benchmarks.gpu.shapes import CACHED_TOKENS, PUBLISHED, AttentionShape

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
    """Programs of a start, and the processor seconds that tracing and lowering them takes on this machine: of all, and by
    kind beside the number of that kind. What programs share is in the kind that comes first."""
    for arch in archs:
        chip = CHIPS[arch]
        for name, case in start_cases():
            ops = attention_ops("gpu", "triton", arch)
            with pallas_for(chip), quick_lowering():
                runner = abstract_runner(case, chip, ops)
                programs = all_programs(runner, mixed=True, copies=True, conversions=False)
                spent: dict[str, float] = {}
                for program in tqdm(programs, desc=f"{case.model} {name}", unit="program", file=sys.stderr):
                    begin = time.thread_time()  # Python holds its lock: more cores do not help
                    program.call().lower()
                    kind = program.name.kind
                    spent[kind] = spent.get(kind, 0.0) + time.thread_time() - begin
            yield {
                "model": case.model,
                "engine": name,
                "chip": arch,
                "programs": len(programs),
                "of the whole model": sum(map(_is_whole_model, programs)),
                "lowering s": round(sum(spent.values()), 1),
                **{f"{kind} s": f"{seconds:.1f} / {_count(programs, kind)}" for kind, seconds in spent.items()},
            }


def _count(programs: Sequence[Program], kind: str) -> int:
    return sum(program.name.kind == kind for program in programs)


def _is_whole_model(program: Program) -> bool:
    return program.name.kind in ("decode", "prefill", "mixed", "fused")


# --- steps -------------------------------------------------------------------------------------------------------


def step_inputs() -> Iterator[Row]:
    """Bytes that a step sends from the host, by model, rows and context.

    Raises:
        ValueError: more than a step may.
    """
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
                name, call = program.name, program.call()
                kind = "masked" if name.variant is not None and name.variant.masked else name.kind
                sent[kind] = max(sent.get(kind, 0), sent_bytes(call))
            most_tokens = runner.step_format.buckets.prefill[-1]
            wrong = input_failures(rows, 0, sent["fused"]) + input_failures(rows, most_tokens, sent["mixed"])
            if wrong:
                raise ValueError(f"{model}, {rows} rows of {context}: {'; '.join(wrong)}")
            yield {
                "model": model,
                "context": context,
                "rows": rows,
                "decode step KiB": round(sent["fused"] / 1024, 1),
                "step with prompts KiB": round(sent["mixed"] / 1024, 1),
                "sampler with penalties KiB": round(sent["sample"] / 1024, 1),
                "and with masks KiB": round(sent["masked"] / 1024, 1),
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


# --- kernels -----------------------------------------------------------------------------------------------------

_LONG = [262_144, *[2_048] * 63]
"""Lengths of the worst batch: one row of the longest context among many."""
_SHARED = ragged(30_000, 64, seed=0)
"""Lengths as a full cache of OPT-13B has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A decode kernel at a shape."""

    name: str
    op: str
    tile: str
    """Its name in `triton_tiles`."""
    shape: AttentionShape

    def pieces(self, chip: str) -> tuple[int, int]:
        """Positions of a tile, and pieces that all tiles of a step are cut into."""
        shape = self.shape
        width = shape.head_dim if self.tile == "kv" else shape.hidden_size
        tokens = tile_for(self.tile, chip, shape.num_heads, width, 2).tokens
        lanes = tile_for("output", chip, shape.num_heads, width, 2).lanes
        absorbed = (-(-width // lanes), triton_decode_absorbed.OUTPUTS_PER_PROCESSOR)
        programs, per_processor = {
            "kv": (shape.num_kv_heads, triton_decode_kv.PROGRAMS_PER_PROCESSOR),
            "scores": absorbed,
            "output": absorbed,
            "reprojected": (shape.num_kv_heads, triton_decode_reprojected.PROGRAMS_PER_PROCESSOR),
        }[self.tile]
        return tokens, pieces_for(chip, programs, per_processor)

    def longest_chain(self, chip: str) -> int:
        """Tiles that one program walks at most."""
        tokens, pieces = self.pieces(chip)
        chain = longest_chain(_LONG, tokens=tokens, pieces=pieces)
        if self.tile != "scores":
            return chain
        per_processor = triton_decode_absorbed.SCORES_PER_PROCESSOR
        return -(-chain // pieces_for(chip, len(_LONG) + pieces, per_processor))


def _kernels() -> list[_Kernel]:
    names = ("opt-13b", "opt-30b", "opt-66b", "llama-2-7b", "llama-3-8b", "yi-6b")
    found = [_Kernel(name="decode_kv", op="decode_kv", tile="kv", shape=PUBLISHED[name]) for name in names]
    for name in ("opt-13b", "opt-30b", "opt-66b"):
        common: dict[str, Any] = {"op": "decode_absorbed", "shape": PUBLISHED[name]}
        found.append(_Kernel(name="absorbed_scores", tile="scores", **common))
        found.append(_Kernel(name="absorbed_output", tile="output", **common))
    reprojected = PUBLISHED["llama-2-7b"]
    found.append(_Kernel(name="decode_reprojected", op="decode_reprojected", tile="reprojected", shape=reprojected))
    return found


def chains() -> Iterator[Row]:
    """Tiles that one program walks at most, one row of 262,144 positions among 63 of 2,048."""
    for kernel in _kernels():
        row: Row = {"kernel": kernel.name, "model": kernel.shape.name}
        for chip in ("sm_80", "sm_90"):
            tokens, _ = kernel.pieces(chip)
            row[f"{chip} tiles"] = kernel.longest_chain(chip)
            row[f"{chip} of the row"] = -(-max(_LONG) // tokens)
        yield row


def traffic() -> Iterator[Row]:
    """Bytes of device memory that decode attention moves by design, against those that it must, MB a layer: 64 rows of
    30,000 cached tokens together, A100's tiles."""
    for shape in (PUBLISHED[name] for name in ("opt-13b", "opt-30b", "opt-66b", "llama-2-7b", "llama-3-8b", "yi-6b")):
        ops = ["decode_kv"]
        if shape.has_hidden:
            ops += ["decode_v_absorbed"] if shape.rotary_dim else ["decode_absorbed", "decode_reprojected"]
        for op in ops:
            work = work_of(op, shape, _SHARED, 2)
            moved = work.moved_bytes
            if "absorbed" in op:  # weights P, written and read
                moved += 2 * 2 * shape.num_heads * sum(_SHARED)
            kernel = _Kernel(name=op, op=op, tile="output" if "absorbed" in op else _TILE_OF[op], shape=shape)
            tokens, pieces = kernel.pieces("sm_80")
            chain = longest_chain(_SHARED, tokens=tokens, pieces=pieces)
            cut = sum(count for n in _SHARED if (count := -(-n // tokens // chain)) > 1)
            width = shape.hidden_size if "absorbed" in op else shape.head_dim
            moved += 2 * 4 * cut * shape.num_heads * width  # states of pieces, written and read
            yield {
                "op": op,
                "model": shape.name,
                "moved MB": round(moved / 1e6, 1),
                "necessary MB": round(work.num_bytes / 1e6, 1),
                "moved / necessary": round(moved / work.num_bytes, 2),
            }


# --- the one-pass kernel -----------------------------------------------------------------------------------------

_H100_BYTES_S = 2.956e12
"""A stream of 8.6 GB on the card of benchmarks/results/gpu/2026-11-26-h100/."""
_FIXED_S = 8e-6
"""Two launches, the first loads of a cluster and its last stores: a guess."""


def one_pass() -> Iterator[Row]:
    """Bytes that the one-pass kernel moves by design for 64 rows, and the time that these take an H100 where nothing else
    limits it: through device memory, from the L2 cache to processors, between the processors of clusters."""
    for name, tokens in itertools.product(("opt-6.7b", "opt-13b", "opt-30b", "opt-66b"), CACHED_TOKENS):
        shape, lens = PUBLISHED[name], ragged(tokens, 64, seed=2)
        heads, width = shape.num_heads, shape.hidden_size
        plan = cuda_decode_absorbed.plan_for(heads, width)
        assert plan is not None
        rows = rows_of(jnp.asarray(lens, jnp.int32), None, tokens=plan.variant.tile)
        count = cuda_decode_absorbed.num_ranges(plan)
        work, starts = cuda_decode_absorbed.ranges_of(rows, count, slack=cuda_decode_absorbed.slack_for(plan, heads))
        items, starts = np.asarray(work.items), np.asarray(starts)
        ends = np.minimum(items[:, 4] * plan.variant.tile, items[:, 2])
        positions = [int((ends - items[:, 3] * plan.variant.tile)[a:b].sum()) for a, b in itertools.pairwise(starts)]
        pieces = int((items[:, 7] >= 0).sum())
        cached, around = 2 * width * tokens, 2 * 2 * len(lens) * heads * width
        partial = 2 * 4 * pieces * heads * width
        of_tile = (
            plan.variant.cluster * plan.variant.heads * (6 * plan.variant.tile + 8)
        )  # scores out, P and factors back
        longest = max(positions) * len(positions) / sum(positions)
        seconds = (longest * cached + around + partial) / _H100_BYTES_S + _FIXED_S
        kv = work_of("decode_kv", shape, lens, 2).num_bytes / _H100_BYTES_S
        yield {
            "model": name,
            "tokens": tokens,
            "clusters": count * plan.groups,
            "HBM MB": round((cached + around) / 1e6, 1),
            "L2 MB": round((plan.groups * cached + around) / 1e6, 1),
            "cluster MB": round(tokens / plan.variant.tile * plan.groups * of_tile / 1e6, 1),
            "pieces MB": round(partial / 1e6, 1),
            "longest / mean": round(longest, 2),
            "us": round(1e6 * seconds, 1),
            "floor of kv us": round(1e6 * kv, 1),
        }


_TILE_OF = {"decode_kv": "kv", "decode_reprojected": "reprojected"}

TABLES = {
    "start": starts,
    "steps": step_inputs,
    "memory": memory_plans,
    "chains": chains,
    "traffic": traffic,
    "buckets": bucket_waste.rows,
    "designs": designs,
    "projections": projections,
    "onepass": one_pass,
}


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
