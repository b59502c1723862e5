"""Identity of the model, settings and weights that cached groups depend on; files of another identity are never
read."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from typing import Any

import jax
import numpy as np

from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.transfers.prefix_files import FORMAT
from apt_jax.version import __version__


def model_identity(executor: JaxExecutor) -> bytes:
    """Return 32 bytes that differ between executors that cannot use each other's cached groups.

    All weights are read as they are on the device, including LoRA adapters and weights that were not loaded from files.
    """
    host = executor.host
    assert host is not None
    facts = {
        "format": FORMAT,
        "version": __version__,
        "model": dataclasses.asdict(executor.config),
        "quantization": executor.quantization,
        "attention": [executor.attention_name, executor.hidden_mode],
        "devices": executor.num_devices,
        "adapters": executor.adapters,
        "block": [executor.block_size, executor.hidden_block_size, host.blocks.shape, str(np.dtype(host.blocks.dtype))],
        "both ends": executor.step_format.both_ends,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    leaves = jax.tree_util.tree_leaves_with_path(executor.params)
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for (path, _), of_leaf in zip(leaves, threads.map(_digest_of, [leaf for _, leaf in leaves]), strict=True):
            digest.update(jax.tree_util.keystr(path).encode() + of_leaf)
    return digest.digest()


def _digest_of(leaf: Any) -> bytes:
    array = np.ascontiguousarray(leaf)
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8))
    return digest.digest()
