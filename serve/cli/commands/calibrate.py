"""Measure prefill and decode step times on this machine, with both cache kinds, and store them for later starts."""

import argparse
import dataclasses
import os
from pathlib import Path

from apt_jax.costs.fit import FitQuality
from apt_jax.executor.calibrate import (
    DEFAULT_BUDGET_S,
    calibrate,
    calibration_path,
    describe,
    store_calibration,
)
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.sim.hardware import save_hardware
from serve.cli import options
from serve.cli.output import print_table, starting_bars, write_json
from serve.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    parser.add_argument(
        "--time",
        type=options.positive(float),
        metavar="S",
        default=DEFAULT_BUDGET_S,
        help="approximate measurement time in seconds; every program is measured at least three times",
    )
    parser.add_argument(
        "--describe",
        type=_description_file,
        metavar="FILE",
        help="write the measurements to this .json file, as a hardware description for the simulator",
    )
    options.add_json_argument(parser)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = options.engine_config(args)
    if args.describe and config.cache.mode == "hidden":
        raise CommandError("--describe needs the costs of the KV kind; use --cache kv or hybrid")
    if args.describe and not os.path.isdir(args.describe.parent):  # fail before the measurement, not after it
        raise CommandError(f"cannot write {args.describe} (no such directory) (--describe)")
    bars = starting_bars()
    try:
        parts = build_engine(config, calibrate=False, progress=bars)
        executor = parts.executor
        assert isinstance(executor, JaxExecutor)
        if args.describe and not executor.kinds_offered.kv:  # latents are cached in `hybrid`
            raise CommandError("--describe needs the costs of the KV kind; use --cache kv")
        model = calibrate(executor, args.time, lambda done, total: bars("calibrating", done, total))
    finally:
        bars.close()
    path = calibration_path(executor)
    try:
        store_calibration(model, path)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror})") from None
    if args.describe:
        try:
            save_hardware(describe(model, executor, parts.model_name), args.describe)
        except OSError as error:
            raise CommandError(f"cannot write {args.describe} ({error.strerror}) (--describe)") from None
    c = model.costs
    print_table(
        f"step costs of {parts.model_name}",
        [
            ("prefill: base (ms)", f"{c.prefill_base_s * 1e3:.3f}"),
            ("prefill: per token (µs)", f"{c.prefill_per_token_s * 1e6:.3f}"),
            ("prefill: per token pair in attention (ns)", f"{c.prefill_per_pair_s * 1e9:.3f}"),
            ("prefill: per cached kv token (ns)", f"{c.prefill_per_kv_prefix_s * 1e9:.3f}"),
            ("prefill: per cached hidden token (ns)", f"{c.prefill_per_hidden_prefix_s * 1e9:.3f}"),
            ("decode: base (ms)", f"{c.decode_base_s * 1e3:.3f}"),
            ("decode: per kv request (µs)", f"{c.decode_per_request_s * 1e6:.3f}"),
            ("decode: per hidden request (µs)", f"{c.decode_per_hidden_request_s * 1e6:.3f}"),
            ("decode: per cached kv token (ns)", f"{c.decode_per_token_s * 1e9:.3f}"),
            ("decode: per cached hidden token (ns)", f"{c.decode_per_hidden_token_s * 1e9:.3f}"),
            ("prefill: fit by token", _quality(model.linear_prefill_quality)),
            ("decode: fit by token", _quality(model.linear_decode_quality)),
            ("prefill: fit by program and tile", _quality(model.prefill_quality)),
            ("decode: fit by program and tile", _quality(model.decode_quality)),
            ("stored in", path),
            *([("described in", args.describe)] if args.describe else []),
        ],
    )
    write_json(args.json, {"model": parts.model_name, "path": str(path), **dataclasses.asdict(model)})
    return 0


def _description_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must end in .json")
    return Path(text)


def _quality(quality: FitQuality) -> str:
    mean, worst = 100 * quality.mean_relative_error, 100 * quality.worst_relative_error
    return f"R² {quality.r2:.3f}, error on held-out points {mean:.0f} %, worst {worst:.0f} %"
