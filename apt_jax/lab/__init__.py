"""The laboratory: policies of the literature, switches for comparison, and optimal schedules.

Nothing outside it imports it but by name: `apt_jax.sched` loads `apt_jax.lab.policies` when a policy is asked for that is
not one of its own, and `apt-jax optimal` loads its command.
"""
