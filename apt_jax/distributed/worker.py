"""Main loop of a rank other than 0, after it has joined and loaded its part of the model."""

import collections
import time
from typing import Any, Protocol

from apt_jax.distributed.hosts import Follower
from apt_jax.distributed.messages import Plan
from apt_jax.errors import AptJaxError, one_line


class StepError(AptJaxError):
    """A program call of rank 0 failed on this rank."""


class PlanRunner(Protocol):
    """The part of `JaxExecutor` that is used here."""

    def run_plan(self, plan: Plan) -> Any:
        """Make a program call that rank 0 has announced."""


def follow(executor: PlanRunner, follower: Follower) -> None:
    """Make the program calls of rank 0 until it stops. Raises `StepError` if one fails."""
    import jax

    flying: collections.deque[Any] = collections.deque()
    with follower.propagate_errors():
        try:
            for plan in follower.plans():
                flying.append(executor.run_plan(plan))
                if len(flying) > 2:  # to notice failed steps
                    jax.block_until_ready(flying.popleft())
        except Exception as error:
            time.sleep(1.0)  # if a lost rank is the cause, `on_lost` exits the process during this time
            raise StepError(f"a step failed: {one_line(str(error))[:300]}") from error
