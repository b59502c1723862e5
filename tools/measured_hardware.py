"""Write the description of a card from a run of the GPU benchmarks that calibrated too few programs.

The calibration of 2026-11-26 on an H100 measured decode steps well (R2 0.99 on points held back) and prompts of one size
alone, in programs that took no notice of what was in them. The description takes decode steps from it as they are, and
puts prompts together from what the same run timed of their parts:

* products: the program that was calibrated (1,024 tokens) and steps of 512 tokens of 8 and of 16 layers, carried on to
  all layers; between and beyond them a line, and never less than the program of the fewest decode rows, which reads the
  weights;
* attention: the kernels' times over ragged chunks, with and without prefixes of both kinds;
* hidden rows: reprojection of the prefixes that are there, and the launches of a program with room for them, in the
  programs that an engine has now. That is arithmetic: those that were timed took 57 ms more for any hidden row.

    python -m tools.measured_hardware [--data DIRECTORY] [--out DIRECTORY]
"""

import argparse
import csv
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from apt_jax.costs.fit import CostModel, StepPoint, fit_cost_model
from apt_jax.costs.hardware import Hardware
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.executor.calibration_steps import CalibrationSteps
from apt_jax.executor.compiling.buckets import PREFIX_STEP, Buckets
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.sim.hardware import load_hardware, save_hardware

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "results" / "gpu" / "2026-11-26-h100"
MODEL, LAYERS, TILE = "opt-13b", 40, 128
MAX_NUM_BATCHED_TOKENS = 2048
LAUNCH_S = 20e-6
"""Time of a kernel that finds nothing to do: of 57 ms for 2,560 of them, a share."""
PIECE = 8192
"""Positions of hidden prefixes that two launches take."""
_ROUNDS = 40


def _kernels_s(data: Path) -> dict[tuple[str, int], float]:
    """Seconds of a layer by (kernel, cached tokens), of the shape of `MODEL`."""
    with (data / "kernels.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == MODEL and row["status"] == "ok"]
    return {(row["kernel"], int(row["tokens"])): 1e-6 * float(row["us"]) for row in rows}


def _attention(data: Path) -> dict[str, float]:
    """Coefficients of chunks' attention, seconds of all layers."""
    kernels_s = _kernels_s(data)
    one, four = kernels_s["prefill of 2048", 0], kernels_s["prefill of 512", 0]
    behind = kernels_s["prefill of 512", 4096]
    # Pairs of tiles on and below the diagonal: 16 of one chunk, 4 of each of four chunks.
    own = (one - four) / (16 * 17 / 2 - 4 * 4 * 5 / 2)
    # Four chunks of 4 tiles behind prefixes of 1,024 positions.
    prefix = (behind - four) / (4 * 4 * 1024 / TILE)
    hidden = (kernels_s["prefill of 512, hidden prefix", 4096] - behind) / (4096 / TILE)
    return {
        "own_tile": LAYERS * own,
        "prefix_tile": LAYERS * prefix,
        "hidden_prefix_tile": LAYERS * hidden,
    }


def _launches(shapes: ProgramShapes, max_len: int) -> dict[str, float]:
    """Coefficients of the room for hidden prefixes, seconds of all layers: two launches a piece, whatever is in it."""
    found, before = {}, 0
    for room in sorted({room for _, room in shapes.prefix_sizes}, key=lambda room: room or math.inf):
        pieces = -(-(room or shapes.max_num_seqs * max_len) // PIECE)
        found[f"hidden_prefix_{room or 'any'}"] = LAYERS * 2 * LAUNCH_S * (pieces - before)
        before = pieces
    return found


def _step_of_512_s(data: Path) -> float:
    """Seconds of a step of 512 tokens of all layers, from steps of two numbers of layers."""
    few, many = (json.loads((data / f"compile-notriton{name}.json").read_text()) for name in ("", "16"))
    few_s, many_s = (1e-3 * steps["prefill512 kv"]["step_ms"] for steps in (few, many))
    per_layer_s = (many_s - few_s) / (many["layers"] - few["layers"])
    return few_s + (LAYERS - few["layers"]) * per_layer_s


def programs(measured: Hardware, data: Path) -> ProgramCosts:
    """Times of all steps, by what was measured of them and their parts."""
    assert measured.programs is not None
    old = measured.programs.shapes
    known = dict(zip(old.feature_names(), measured.programs.coefficients, strict=True))
    buckets = Buckets.for_limits(
        max_num_seqs=old.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=measured.max_model_len,
        hidden_block_size=measured.block_size,
        rows_multiple=1,
        sparse=True,
        has_rooms=True,
    )
    shapes = dataclasses.replace(
        old,
        prefill_buckets=tuple(buckets.prefill),
        by_kind=True,
        prefix_sizes=tuple((size.tokens, size.prefix_room) for size in buckets.prefixed),
        prefix_step=PREFIX_STEP,
    )
    of_attention = _attention(data)

    def own_s(tokens: int) -> float:
        return of_attention["own_tile"] * (tokens / TILE) * (tokens / TILE + 1) / 2

    [size] = old.prefill_buckets
    small_s = _step_of_512_s(data) - own_s(512)
    per_token_s = (known[f"program_0_{size}"] - own_s(size) - small_s) / (size - 512)
    reading_s = known[f"program_{old.decode_buckets[0]}_0"]
    rows = old.decode_buckets[-1]
    beside_s = known[f"program_{rows}_{size}"] - known[f"program_0_{size}"]
    found = {name: known[name] for name in known if name == "row" or name.startswith("decode")}
    found |= of_attention | _launches(shapes, measured.max_model_len)
    for name in shapes.feature_names():
        if name.startswith("program"):
            num_rows, tokens = map(int, name.split("_")[1:])
            alone_s = max(reading_s, small_s + per_token_s * (tokens - 512))
            found[name] = alone_s + (beside_s if num_rows else 0.0) if tokens else known[name]
    coefficients = tuple(float(f"{found.get(name, 0.0):.6g}") for name in shapes.feature_names())
    return ProgramCosts(shapes=shapes, coefficients=coefficients)


def _linear(costs: ProgramCosts, measured: Hardware) -> CostModel:
    """The linear model of what `costs` says about steps of every program, as a calibration has it."""
    executor: Any = SimpleNamespace(
        max_model_len=measured.max_model_len,
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_num_batched_tokens,
        kinds_offered=(True, True),
        num_blocks=measured.num_blocks,
        block_size=measured.block_size,
        hidden_block_size=measured.block_size,
    )
    steps = CalibrationSteps(cast("JaxExecutor", executor), costs.shapes, np.random.default_rng(0))
    points = []
    for _ in range(_ROUNDS):
        for episode in (*steps.round(), steps.as_served(), steps.as_served()):
            for step in (episode.prefill, episode.decode):
                if step is not None:
                    point = StepPoint(
                        num_tokens=step.lens,
                        start=step.starts,
                        kind=step.kinds,
                        time_s=1.0,
                        held_back=episode.held_back,
                    )
                    points.append(dataclasses.replace(point, time_s=costs.step_s(*point.arrays())))
    return fit_cost_model(points, costs.shapes)


def describe(data: Path) -> Hardware:
    """The card of the run in `data`."""
    measured = load_hardware(MODEL, str(data / "hardware.json"))
    costs = programs(measured, data)
    linear = _linear(costs, measured)
    return dataclasses.replace(
        measured,
        costs={"absorb": linear.step_costs()},
        programs=costs,
        basis={
            "decode": "measured: fitted to steps timed on this card, host time included (`fit`: on points held back)",
            "num_blocks": "measured: the pool of the calibrated engine",
            "prefill": "weak. Measured: steps of 1,024 tokens (28 ms less at 512 tokens, there 8 and 16 of 40 layers, the "
            "rest reckoned by them). Reckoned: other sizes by the line through these two, at least a step of 16 decode rows",
            "prefill_per_pair, prefixes": "reckoned from kernels timed on this card, 40 times one layer",
            "mixed": "weak. What decode rows add to a prompt's step, measured at 1,024 tokens and there mixed up with hidden "
            "rows, is taken for all sizes",
            "hidden prompts": "reckoned, not measured: as keys and values, plus reprojection of the prefixes that are there "
            "(kernels timed on this card) and the launches that a program with room for them makes. The programs of the run took 57 ms more for any "
            "hidden row",
            "absorb": "measured, with two kernels that read layer inputs twice",
            "reproject": "not described: its programs were not calibrated",
            "costs": "what policies weigh: a linear fit to the programs of this description (`fit`, linear)",
        },
        source="apt-jax's own steps and kernels on one NVIDIA H100 80GB HBM3 (benchmarks/results/gpu/2026-11-26-h100; bfloat16, "
        "jax 0.11.2, without XLA's Triton products), put together by tools/measured_hardware.py.",
        fit={
            "decode": measured.fit["decode"],
            "linear prefill": dataclasses.asdict(linear.linear_prefill_quality),
            "linear decode": dataclasses.asdict(linear.linear_decode_quality),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="results of the run")
    parser.add_argument("--out", type=Path, default=ROOT / "apt_jax" / "sim" / "descriptions", help="where to write")
    args = parser.parse_args()
    hardware = describe(args.data)
    save_hardware(hardware, args.out / f"{hardware.model}_{hardware.name}_x{hardware.num_devices}.json")
    assert hardware.programs is not None
    for name, value in zip(hardware.programs.shapes.feature_names(), hardware.programs.coefficients, strict=True):
        print(f"{name:24}{1e6 * value:12.3f} us")


if __name__ == "__main__":
    main()
