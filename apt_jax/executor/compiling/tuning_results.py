"""XLA's autotuning results for matrix products, kept on disk for each card and version of jaxlib; the package ships the
results for some cards.

XLA tries variants of each product on the card and stores the fastest variant in a separate file, named after a hash of
card and product (`xla_gpu_per_fusion_autotune_cache_dir`). Name and contents do not depend on the version of jaxlib, so
each version has a directory. If XLA cannot read a file, it tunes that product again.

The package ships results as `assets/autotune/<card>/<jaxlib>.json`, a table of file names and contents, which
`python -m benchmarks.gpu.autotune` writes on a card.
"""

import importlib.metadata
import json
import logging
import re
from pathlib import Path
from typing import Any

import jax

from apt_jax.utils.cache_dir import log_not_kept

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[2] / "assets" / "autotune"
_NAME = re.compile(r"[\w=+-]+\.textproto")
"""Names of XLA's files: a hash in base 64."""


def card_name(device_kind: str) -> str:
    """Return a card's name as part of a path: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")


def jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def prepare_tuning_dir(device: Any, shipped: Path = SHIPPED) -> Path | None:
    """Return the directory for a GPU's results, after adding the shipped results; None: not a GPU, or JAX keeps no
    compiled programs."""
    kept = jax.config.jax_compilation_cache_dir
    if device.platform not in ("gpu", "cuda") or not kept or not jax.config.jax_enable_compilation_cache:
        return None
    directory = Path(kept) / "autotune" / card_name(device.device_kind) / jaxlib_version()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _add_shipped(directory, shipped / card_name(device.device_kind), device.device_kind)
    except OSError as error:
        log_not_kept(error)
        return None
    return directory


def _add_shipped(directory: Path, shipped: Path, card: str) -> None:
    """Add the package's results to a directory; existing files are kept."""
    path = shipped / f"{jaxlib_version()}.json"
    if not path.is_file():
        others = sorted(other.stem for other in shipped.glob("*.json"))
        if others:
            logger.warning(
                "this package has autotuning results for %s with jaxlib %s, but jaxlib is %s: products are tuned at the "
                "first start",
                card,
                ", ".join(others),
                jaxlib_version(),
            )
        return
    try:
        results = read_results(path)
    except (OSError, ValueError) as error:
        logger.warning("%s: not used, products are tuned at the first start (%s)", path, error)
        return
    for name, content in results.items():
        target = directory / name
        if not target.exists():
            target.write_text(content)


def read_results(path: Path) -> dict[str, str]:
    """Return the names and contents of result files from a file written by `write_results`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has another format.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not all(
        _NAME.fullmatch(name) and isinstance(text, str) for name, text in found.items()
    ):
        raise ValueError("not a table of autotuning results")
    return found


def write_results(directory: Path, path: Path) -> int:
    """Write all results of a directory into one file for shipping; return their number."""
    results = {file.name: file.read_text() for file in sorted(directory.glob("*.textproto"))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    return len(results)
