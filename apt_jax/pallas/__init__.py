"""Kernels for GPUs and TPUs in Pallas and Triton; `apt_jax.backends` chooses one per platform."""
