"""The laboratory: what is compared with, optimal schedules, and training.

Nothing outside it imports it but by name: `apt_jax.sched` loads `apt_jax.lab.policies` when a policy is asked for that is
not one of its own, `apt_jax.backends` loads `apt_jax.lab.kernels` in the same way, and `apt-jax optimal` loads its command.
"""
