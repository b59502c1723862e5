"""vLLM's first scheduler with a random order instead of the order of arrival: the experiment of Apt-Serve §3.2."""

import dataclasses

import numpy as np

from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import Plan, SchedulerView


class RandomPolicy:
    """Runs `FcfsPolicy` with queues that are shuffled before every decision.

    "We substitute the original FCFS scheduling with a random scheduling method in vLLM" (Apt-Serve §3.2): priorities
    are random, and all other rules are those of `FcfsPolicy`. So waiting requests are admitted in random order until
    one does not fit, and if the next positions do not fit the pool, random requests are evicted.

    Two rules are our choice. Preempted requests stay before requests that never ran, as in vLLM, in random order; each
    iteration computes a token or a chunk, so all of them run in the end. And partly computed prompts keep their order,
    because switching between them has no advantage.

    Args:
        seed: seed of the random numbers.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._fcfs = FcfsPolicy()

    def schedule(self, view: SchedulerView) -> Plan:
        """Return the plan of one iteration; it draws from the policy's own random generator."""
        again = view.table.num_preemptions[view.waiting] > 0
        waiting = np.concatenate(
            [
                self._rng.permutation(view.waiting[again]),
                self._rng.permutation(view.waiting[~again]),
            ]
        )
        running = self._shuffled_decodes(view)
        return self._fcfs.schedule(dataclasses.replace(view, waiting=waiting, running=running))

    def _shuffled_decodes(self, view: SchedulerView) -> Rows:
        is_decode = view.remaining(view.running) == 1
        decoding = self._rng.permutation(view.running[is_decode])
        return np.concatenate([view.running[~is_decode], decoding])
