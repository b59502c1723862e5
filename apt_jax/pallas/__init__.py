"""Attention kernels in Pallas, for NVIDIA GPUs (Triton backend) and TPUs (Mosaic); `apt_jax.backends` chooses them per
platform."""
