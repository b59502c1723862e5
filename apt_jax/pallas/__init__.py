"""Attention kernels for GPUs and TPUs in Pallas, Triton and CUDA; `apt_jax.backends` chooses them per platform."""
