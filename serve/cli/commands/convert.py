"""Convert a model's files from any readable format to an Orbax directory or safetensors.

The configuration and the tokenizer are written with the weights. DST appears only when it is complete.
"""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from apt_jax.config import LoadFormat
from apt_jax.errors import counted
from serve.cli import options
from serve.cli.output import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=options.MODEL_HELP.partition(", or with")[0])
    parser.add_argument("target", metavar="DST", help="directory to create; must not exist")
    parser.add_argument("--format", choices=("orbax", "safetensors"), default="orbax", help="format to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="data type of the weights (default: as stored; bfloat16 where quantized)",
    )
    parser.add_argument(
        "--load-format",
        choices=tuple(name for name in get_args(LoadFormat) if name != "dummy"),
        default="auto",
        help="checkpoint format of SRC",
    )
    options.add_json_argument(parser)


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that partial output is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> int:
    from apt_jax.models.loading.convert import convert_model  # JAX takes a second to import

    started = time.monotonic()
    with _sigterm_as_ctrl_c():
        result = convert_model(
            args.source,
            Path(args.target).expanduser(),
            format=args.format,
            dtype=args.dtype,
            load_format=args.load_format,
        )
    seconds = time.monotonic() - started
    sys.stdout.write(
        f"{result['path']}: {counted(result['tensors'], 'tensor')}, {result['bytes'] / 2**20:.1f} MiB, {seconds:.1f} s\n"
    )
    write_json(args.json, {**result, "seconds": seconds})
    return 0
