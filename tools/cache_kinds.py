"""Table of the cache kinds of every model: memory per token, and how attention over layer inputs is computed.

    python -m tools.cache_kinds            # all published sizes known by name, as Markdown
    python -m tools.cache_kinds FILE       # the same, written between the markers of a Markdown file

Memory is that of one token in all layers; the pool allocates it in blocks, whose last elements may stay empty.
The time of a cached token in a decode step is the larger of its bytes over the bandwidth and its operations over the
matmul rate of an A100 40 GB (1.555 TB/s, 312 TFLOP/s): a lower bound, not a measurement.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from apt_jax.config import CacheConfig
from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.families.registry import PRESETS
from apt_jax.models.loading.resolve import read_model_config

BANDWIDTH_BYTES_S = 1.555e12
MATMUL_FLOP_S = 312e12
ITEMSIZE = 2
"""Bytes of a 16-bit value."""

BLOCK_SIZE = CacheConfig().block_size
"""Keys per block."""

BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"

ATTENTION: dict[HiddenMode, str] = {
    "absorb": "absorb",
    "partial": "rotary lanes of K reprojected, the rest absorbed",
    "v-absorb": "K reprojected, V absorbed",
    "refused": "refused",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKindInfo:
    """Both cache kinds of one model."""

    model: str
    kv_bytes: int
    """Bytes of a token's keys and values in all layers, 16 bit."""
    hidden_bytes: int
    hidden_ratio: float
    """`hidden_bytes` over `kv_bytes`."""
    pool_ratio: float | None
    """Ratio of pool memory per token, hidden over KV kind, in long contexts: layer inputs that do not divide a block of
    `BLOCK_SIZE` keys leave space at its end. None: the hidden kind is not offered."""
    mode: HiddenMode
    hybrid: bool
    """True if `--cache hybrid` offers both kinds; otherwise hybrid means KV."""
    latent: bool
    """True if latents are cached, which `--cache hybrid` does without a choice."""
    refusal: str | None
    """Reason why the hidden kind is not offered; None: it is offered."""
    break_even_tokens: float | None
    """Context length from which absorbed attention moves fewer bytes than attention over keys and values, in a kernel
    that reads layer inputs once and reads and writes queries and results N * D wide. None: such a kernel is bound by
    operations, or the hidden kind is not offered."""
    time_ratio: float | None
    """Lower bound of a cached token's time in attention over layer inputs, over that of keys and values, in contexts
    far beyond `break_even_tokens`."""


def cache_kind_info(model: str, config: ModelConfig) -> CacheKindInfo:
    """The table row of one model."""
    n, d, e, layers = config.num_heads, config.input_width, config.lane, config.num_layers
    mode = config.hidden_mode
    kv_s = max(2 * e * ITEMSIZE / BANDWIDTH_BYTES_S, 4 * n * config.head_dim / MATMUL_FLOP_S)
    if mode == "refused":
        flop = None
    elif mode == "absorb":
        flop = 4 * n * d
    else:
        turned = config.head_dim if config.rope is None or mode == "v-absorb" else config.rope.rotary_dim
        rest = 2 * n * d if turned < config.head_dim else 0
        flop = 2 * d * config.num_kv_heads * turned + 2 * n * turned + rest + 2 * n * d
    ratio = None if flop is None else max(d * ITEMSIZE / BANDWIDTH_BYTES_S, flop / MATMUL_FLOP_S) / kv_s
    inputs = config.hidden_block_size(BLOCK_SIZE)
    return CacheKindInfo(
        model=model,
        kv_bytes=2 * e * layers * ITEMSIZE,
        hidden_bytes=d * layers * ITEMSIZE,
        hidden_ratio=config.hidden_ratio,
        pool_ratio=None if mode == "refused" else BLOCK_SIZE / (2 * inputs) * config.pool_lane(kv=False) / e,
        mode=mode,
        hybrid=config.offers_hybrid,
        latent=config.latent is not None,
        refusal=config.hidden_refusal,
        break_even_tokens=4 * n * d / (2 * e - d) if mode == "absorb" else None,
        time_ratio=ratio,
    )


def published_kinds() -> list[CacheKindInfo]:
    """Table rows of all published sizes that are known by name."""
    return [cache_kind_info(name, read_model_config(fields)[1]) for name, fields in PRESETS.items()]


def markdown(rows: Iterable[CacheKindInfo]) -> str:
    """The table in Markdown."""
    lines = [
        f"| model | KV, KiB a token | hidden / KV, in blocks of {BLOCK_SIZE} | attention over layer inputs | break-even, tokens | time, hidden / KV |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    refused = []
    for row in rows:
        if row.refusal is not None:
            refused.append(f"{row.model} ({row.hidden_ratio:.4g})")
            continue
        what = "latents, absorbed" if row.latent else ATTENTION[row.mode]
        what += "" if row.hybrid or row.latent else "; only with `--cache hidden`"
        even = "" if row.break_even_tokens is None else f"{row.break_even_tokens:.0f}"
        time = "" if row.time_ratio is None else f"{row.time_ratio:.2g}"
        lines.append(f"| {row.model} | {row.kv_bytes / 1024:.4g} | {row.pool_ratio:.3g} | {what} | {even} | {time} |")
    lines += ["", f"Not offered, with the memory of layer inputs over that of keys and values: {', '.join(refused)}."]
    return "\n".join(lines) + "\n"


def splice(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with `table` between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the text must hold {begin} and {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}{end}{rest.split(end)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write it into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="Markdown file with the markers")
    args = parser.parse_args(arguments)
    table = markdown(published_kinds())
    if args.file is None:
        sys.stdout.write(table)
    else:
        args.file.write_text(splice(args.file.read_text(), table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
