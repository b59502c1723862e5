"""Code for experiments: policies and kernels for comparison, optimal schedules, training, and recorded runs.

No module outside this package imports it directly: `apt_jax.sched` loads `apt_jax.lab.policies` by name when a policy
is not one of its own, `apt_jax.backends` loads `apt_jax.lab.kernels` in the same way, and `apt-jax optimal` loads its
command by name.
"""
