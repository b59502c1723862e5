"""The processes of all replicas: started, stopped, killed, paused, cut off and started again."""

import asyncio
import collections
import functools

import numpy as np

from tests.support.serving_simulation.replica import Replica
from tests.support.serving_simulation.world import World


class Processes:
    """One process in each place, and the faults that hit whole processes.

    Attributes:
        replicas: by place; None: its process has ended, and no other has been started.
        past: those that have ended.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.replicas: list[Replica | None] = [None] * world.scenario.num_replicas
        self.past: list[Replica] = []
        self._generations: collections.Counter[int] = collections.Counter()

    def start(self, place: int) -> None:
        """Start a process."""
        self._generations[place] += 1
        self.replicas[place] = Replica(self._world, place, self._generations[place], self._note_end)

    def _note_end(self, replica: Replica) -> None:
        """A process has ended: another one is started in its place after a while."""
        world = self._world
        world.log("gone", replica.place, round(world.loop.time(), 6))
        self.past.append(replica)
        if self.replicas[replica.place] is replica:
            self.replicas[replica.place] = None

            def restart() -> None:
                if self.replicas[replica.place] is None and world.faults_on:
                    world.note["process started again"] += 1
                    self.start(replica.place)

            world.loop.call_later(float(world.rng.uniform(0.1, 2.0)), restart)

    def signal(self, place: int) -> None:
        """SIGTERM."""
        world, replica = self._world, self.replicas[place]
        if replica is not None and world.faults_on:
            world.note["SIGTERM"] += 1
            world.spawn(replica.stop(world.scenario.drain_s))

    async def inject_faults(self) -> None:
        """Crashes, pauses and partitions, four times a second, as long as there are faults."""
        world, scenario = self._world, self._world.scenario
        rng = np.random.default_rng([4, world.seed])
        if not (scenario.p_crash or scenario.p_pause or scenario.p_partition):
            return
        while world.faults_on:
            await asyncio.sleep(0.25)
            for replica in list(self.replicas):
                if replica is None or not world.faults_on:
                    continue
                if rng.random() < scenario.p_crash / 4:
                    world.note["process killed"] += 1
                    replica.kill()
                    continue
                for network_only, p in ((False, scenario.p_pause), (True, scenario.p_partition)):
                    if rng.random() < p / 4 and not replica.is_unreachable:
                        world.note["network cut off" if network_only else "process paused"] += 1
                        replica.pause(network_only=network_only)
                        after_s = float(rng.choice([0.05, 0.5, 3.0]))
                        world.loop.call_later(after_s, functools.partial(replica.resume, network_only=network_only))

    def resume_all(self) -> None:
        """End all pauses and partitions."""
        for replica in self.replicas:
            if replica is not None:
                replica.resume(network_only=True)
                replica.resume(network_only=False)
