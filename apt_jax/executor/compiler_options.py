"""Options of XLA's compiler for the programs of an executor: the same in service and where programs are only compiled
(`benchmarks.gpu`)."""

from typing import Any

_DEFAULT_COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
"""Operations that XLA puts into a command buffer (a CUDA graph) by default."""


def compiler_options(platform: str, *, num_devices: int, num_hosts: int) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=)`.

    Args:
        platform: of JAX: "cpu", "gpu", "cuda", "tpu".
        num_devices: that share the model.
        num_hosts: processes that they belong to.
    """
    if platform == "tpu":
        # XLA may keep an argument in VMEM from one call to the next, and takes the largest that fits: the table of
        # embeddings, of which a step reads a few rows. OPT-125M's step moved 154 MB more for it, of 250 that it must.
        return {"xla_max_cross_program_prefetches": 0}
    if platform not in ("gpu", "cuda"):
        return {}
    options: dict[str, Any] = {}
    if num_devices > 1:  # else every all-reduce ends a graph
        options["xla_gpu_enable_command_buffer"] = f"{_DEFAULT_COMMAND_BUFFERS},COLLECTIVES"
    if num_hosts > 1:  # hosts that share it wait for each other, program by program in the same order
        options["xla_gpu_shard_autotuning"] = False
    return options
