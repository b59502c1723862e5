"""vLLM's first scheduler with a random order instead of the order of arrival: the experiment of Apt-Serve §3.2."""

import dataclasses

import numpy as np

from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import Plan, SchedulerView


class RandomPolicy:
    """Runs `FcfsPolicy` with queues that are shuffled before every decision.

    "We substitute the original FCFS scheduling with a random scheduling method in vLLM" (Apt-Serve §3.2): priorities
    are random, and all other rules are those of `FcfsPolicy`. So waiting requests are admitted in random order until a
    request does not fit, and random requests are evicted if the pool has too few blocks for the next positions.

    Two rules are our choice. Preempted requests, in random order, stay before requests that never ran, as in vLLM; each
    iteration computes a token or a chunk, so all of them eventually run. Partly computed prompts keep their order,
    because switching between them has no advantage.

    Args:
        seed: seed of the random numbers.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._fcfs = FcfsPolicy()

    def schedule(self, view: SchedulerView) -> Plan:
        """Return the plan of one iteration; the order is drawn from the policy's own random generator."""
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
