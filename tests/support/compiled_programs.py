"""Programs of an executor as the compiler left them."""

from apt_jax.executor.jax_executor import JaxExecutor


def compiled_decode_step(executor: JaxExecutor) -> str:
    """The program of a step of as many decode rows as there can be."""
    call = executor.runner.empty_forward_call(executor.buckets.decode[-1], 0, executor.kinds_offered)
    return call.lower().compile().as_text()
