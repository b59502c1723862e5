"""Options of XLA's compiler for the programs of an executor, also used where programs are only compiled
(`benchmarks.gpu`)."""

import os
from pathlib import Path
from typing import Any

TRITON_TOKENS = 64
"""Maximum number of tokens of a program whose products XLA may compile with Triton. On an H100 that saved 25 % of a
step of 1 token, 8 % of a step of 64 and 2 % of a step of 512, and trying Triton's variants took most of the compile
time."""
_DEFAULT_COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
"""Operations that XLA puts into a command buffer (a CUDA graph) by default."""
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_RESULTS = "xla_gpu_per_fusion_autotune_cache_dir"


def compiler_options(
    platform: str, *, num_devices: int, num_hosts: int, tuning_dir: Path | None = None
) -> dict[str, Any]:
    """Return the options for `jax.jit(..., compiler_options=)`.

    Args:
        platform: JAX's name of the platform: "cpu", "gpu", "cuda", "tpu".
        num_devices: number of devices that share the model.
        num_hosts: number of processes that the devices belong to.
        tuning_dir: directory in which XLA keeps its autotuning results for products on this card; None: in memory only.
    """
    if platform == "tpu":
        # XLA may prefetch an argument into VMEM across calls. It takes the largest that fits, which is the embedding
        # table, although a step reads only a few of its rows: a step of OPT-125M, which must read 250 MB, read another
        # 154 MB.
        return {"xla_max_cross_program_prefetches": 0}
    if not _is_gpu(platform):
        return {}
    options: dict[str, Any] = {}
    if not _is_chosen_by_user(_TRITON_PRODUCTS):
        options[_TRITON_PRODUCTS] = False
    if tuning_dir is not None and not _is_chosen_by_user(_RESULTS):
        options[_RESULTS] = str(tuning_dir)
    if num_devices > 1:  # without this, every all-reduce ends a graph
        options["xla_gpu_enable_command_buffer"] = f"{_DEFAULT_COMMAND_BUFFERS},COLLECTIVES"
    if num_hosts > 1:  # sharded autotuning requires all hosts to compile programs in the same order
        options["xla_gpu_shard_autotuning"] = False
    return options


def options_of_program(platform: str, num_tokens: int) -> dict[str, Any]:
    """Return the options of one program in addition to `compiler_options`, for `Lowered.compile(compiler_options=)`.

    Args:
        num_tokens: number of rows of its matrix products, padding included; 0: it has no products.
    """
    is_few = 0 < num_tokens <= TRITON_TOKENS
    return {_TRITON_PRODUCTS: True} if is_few and _is_gpu(platform) and not _is_chosen_by_user(_TRITON_PRODUCTS) else {}


def without_places(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that change compiled code, without the compiler's file locations."""
    return {name: value for name, value in options.items() if name != _RESULTS}


def _is_gpu(platform: str) -> bool:
    return platform in ("gpu", "cuda")


def _is_chosen_by_user(option: str) -> bool:
    """Return True if XLA_FLAGS sets the option, which then has precedence."""
    return f"--{option}" in {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
