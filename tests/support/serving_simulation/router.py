"""A small model of a gateway in front of the replicas."""

import collections

from tests.support.serving_simulation.calls import Answer
from tests.support.serving_simulation.processes import Processes
from tests.support.serving_simulation.replica import Replica
from tests.support.serving_simulation.world import World


class Router:
    """A small model of a gateway: round robin over replicas that are up, a circuit breaker for each, and retries on
    another replica as long as nothing of a response was received."""

    MAX_ATTEMPTS = 3
    OPENS_AFTER = 3
    OPEN_S = 2.0
    RETRIED = frozenset((429, 503))
    CONNECT_TIMEOUT_S = 1.0

    def __init__(self, world: World, processes: Processes) -> None:
        self._world, self._processes = world, processes
        self._next = 0
        self._failures: collections.Counter[int] = collections.Counter()
        self._opened_s: dict[int, float] = {}

    def pick(self, tried: set[int]) -> Replica | None:
        """Choose a replica that has not been tried; None: there is none."""
        world, replicas = self._world, self._processes.replicas
        count = len(replicas)
        for i in range(count):
            place = (self._next + i) % count
            replica = replicas[place]
            if place in tried or replica is None or replica.is_stopping or replica.is_dead:
                continue
            opened_s = self._opened_s.get(place)
            if opened_s is not None:
                if world.loop.time() < opened_s + self.OPEN_S:
                    world.note["breaker open"] += 1
                    continue
                world.note["breaker half-open"] += 1
                self._opened_s[place] = world.loop.time()  # one call tries it
            self._next = place + 1
            return replica
        return None

    def report(self, replica: Replica, *, ok: bool) -> None:
        """Tell how an attempt went."""
        place = replica.place
        if ok:
            self._failures[place] = 0
            self._opened_s.pop(place, None)
            return
        self._failures[place] += 1
        if self._failures[place] >= self.OPENS_AFTER and self._world.scenario.num_replicas > 1:
            self._opened_s[place] = self._world.loop.time()

    def may_retry(self, answer: Answer) -> bool:
        """Return whether another replica may be asked: nothing but an error that says so, or nothing at all, has
        come."""
        return answer.status in (0, *self.RETRIED)
