"""The save thread, which copies program outputs from the device into host memory."""

import collections
import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from apt_jax.errors import one_line

logger = logging.getLogger("apt_jax.executor")

_MAX_SAVES = 4
"""Maximum number of arrays waiting to be stored, on the device or in pinned memory."""


PINNED = "pinned_host"


def stages_in_pinned_memory(device: Any) -> bool:
    """Return True if arrays should be copied to pinned memory first: on a GPU for which JAX can allocate such memory.

    On such a GPU, `jax.Array.copy_to_host_async` uses one fixed buffer of the runtime, so copies and transfers
    alternate instead of overlapping (jax-ml/jax#22114).
    """
    return device.platform == "gpu" and any(memory.kind == PINNED for memory in device.addressable_memories())


class HostSaver:
    """Stores device arrays in host memory in the order of their dispatch, so the last array written to a place remains.

    Args:
        pinned: True: copy arrays to pinned host memory first, and store them from there.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._under_way: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "apt-jax-saves")

    def submit(self, array: Any, what: str, store: Callable[[np.ndarray], None]) -> concurrent.futures.Future[None]:
        """Let the thread copy an array to the host and call `store` with it; waits if too many arrays are pending.

        Args:
            array: array on the device.
            what: description of the contents for the log, if copying or storing fails.
            store: function that writes the array to its place.
        """
        while len(self._under_way) >= _MAX_SAVES:
            concurrent.futures.wait([self._under_way.popleft()])
        if self.pinned:
            try:
                array = jax.device_put(array, array.sharding.with_memory_kind(PINNED))
            except Exception as error:
                logger.warning("copies no longer use pinned host memory: %s", one_line(str(error)))
                self.pinned = False
        if not self.pinned:
            array.copy_to_host_async()
        future = self._thread.submit(self._store, array, what, store)
        self._under_way.append(future)
        return future

    def run(self, function: Callable[[], None], what: str) -> concurrent.futures.Future[None]:
        """Let the thread call a function after everything submitted so far; never waits. `what`: see `submit`."""
        return self._thread.submit(self._run, function, what)

    def wait(self) -> None:
        """Wait until all arrays have been stored or have failed."""
        concurrent.futures.wait(self._under_way)

    @staticmethod
    def _store(array: Any, what: str, store: Callable[[np.ndarray], None]) -> None:
        HostSaver._run(lambda: store(np.asarray(array)), what)

    @staticmethod
    def _run(function: Callable[[], None], what: str) -> None:
        try:
            function()
        except Exception as error:
            logger.error("%s could not be copied to host memory and are lost: %s", what, error)
