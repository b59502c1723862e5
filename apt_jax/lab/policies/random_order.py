"""vLLM's mechanics with a random order in place of arrival: the experiment of Apt-Serve §3.2."""

import dataclasses

import numpy as np

from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import Plan, SchedulerView


class RandomPolicy:
    """First come, first served with queues that are shuffled before every decision.

    "We substitute the original FCFS scheduling with a random scheduling method in vLLM" (Apt-Serve §3.2): priority is
    drawn at random, and all else is `FcfsPolicy`. So the waiting queue is gone through in random order until one does
    not fit, and when the next positions do not fit the pool, random requests are evicted.

    Two choices of ours. Preempted requests stay in front of those that never ran, as vLLM puts them there, in random
    order among themselves; each iteration brings someone a token or a chunk nearer to one, so that all of them get
    their turn. And partly computed prompts keep their order, because nothing is gained by switching between them.

    Args:
        seed: fixes every draw.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._fcfs = FcfsPolicy()

    def schedule(self, view: SchedulerView) -> Plan:
        """Decide one iteration; draws from the policy's own generator."""
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
