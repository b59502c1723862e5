"""Options of XLA's compiler for the programs of an executor: the same in service and where programs are only compiled
(`benchmarks.gpu`)."""

import os
from pathlib import Path
from typing import Any

TRITON_TOKENS = 64
"""Tokens of a program up to which XLA may compile its products with Triton. On an H100 that saved 25 % of a step of one
row, 8 % of one of 64 and 2 % of one of 512 tokens, and trying its variants was most of the time to compile a program."""
_DEFAULT_COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
"""Operations that XLA puts into a command buffer (a CUDA graph) by default."""
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_RESULTS = "xla_gpu_per_fusion_autotune_cache_dir"


def compiler_options(
    platform: str, *, num_devices: int, num_hosts: int, tuning_dir: Path | None = None
) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=)`.

    Args:
        platform: of JAX: "cpu", "gpu", "cuda", "tpu".
        num_devices: that share the model.
        num_hosts: processes that they belong to.
        tuning_dir: where XLA finds and keeps what it has found out about products on this card; None: in memory.
    """
    if platform == "tpu":
        # XLA may keep an argument in VMEM from one call to the next, and takes the largest that fits: the table of
        # embeddings, of which a step reads a few rows. OPT-125M's step moved 154 MB more for it, of 250 that it must.
        return {"xla_max_cross_program_prefetches": 0}
    if not _is_gpu(platform):
        return {}
    options: dict[str, Any] = {}
    if not _is_chosen_by_user(_TRITON_PRODUCTS):
        options[_TRITON_PRODUCTS] = False
    if tuning_dir is not None and not _is_chosen_by_user(_RESULTS):
        options[_RESULTS] = str(tuning_dir)
    if num_devices > 1:  # else every all-reduce ends a graph
        options["xla_gpu_enable_command_buffer"] = f"{_DEFAULT_COMMAND_BUFFERS},COLLECTIVES"
    if num_hosts > 1:  # hosts that share it wait for each other, program by program in the same order
        options["xla_gpu_shard_autotuning"] = False
    return options


def options_of_program(platform: str, num_tokens: int) -> dict[str, Any]:
    """Options of one program beside `compiler_options`, for `Lowered.compile(compiler_options=)`.

    Args:
        num_tokens: rows of its products, padding included; 0: it has none.
    """
    is_few = 0 < num_tokens <= TRITON_TOKENS
    return {_TRITON_PRODUCTS: True} if is_few and _is_gpu(platform) and not _is_chosen_by_user(_TRITON_PRODUCTS) else {}


def without_places(options: dict[str, Any]) -> dict[str, Any]:
    """The options that change compiled code, without the compiler's file locations."""
    return {name: value for name, value in options.items() if name != _RESULTS}


def _is_gpu(platform: str) -> bool:
    return platform in ("gpu", "cuda")


def _is_chosen_by_user(option: str) -> bool:
    """True where XLA_FLAGS has it: what the user wants comes first."""
    return f"--{option}" in {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
