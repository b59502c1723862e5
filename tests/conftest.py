"""Settings for the whole suite: JAX on the CPU, strict about dtypes and ranks."""

import os

# An environment variable, not a call: it also reaches the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
