"""The table of sessions: what a retention policy may know of each, one NumPy column per property."""

import numpy as np

from apt_jax.core.kinds import NUM_KINDS
from apt_jax.sched.request_table import ColumnTable, column

UNKNOWN, TOOL, PERSON = range(3)
"""Kinds of work between an answer and the next call (`SessionTable.work`)."""
WORKS = {"": UNKNOWN, "tool": TOOL, "person": PERSON}
"""Numbers of `EngineRequest.work`."""
NOBODY = 0
"""Row of the groups that belong to no session, such as groups that a session's next call does not use."""


class SessionTable(ColumnTable):
    """Sessions that an engine remembers; a row number is stable while the session is remembered and is then reused."""

    live = column(np.bool_)
    tenant = column(np.int32)  # number of the tenant
    begun_s = column(np.float64)  # arrival of the first call
    ended_s = column(np.float64)  # when the last call ended; 0: none has
    until_s = column(np.float64)  # the retention policy's time to live; `Retention.ended` may set it
    last_gap_s = column(np.float64, fill=-1)  # seconds before the last call; -1: there was none
    hint_s = column(np.float64)  # seconds that the client asked for; 0: none
    work = column(np.int8)  # what the last answer asked for: UNKNOWN, TOOL or PERSON
    is_over = column(np.bool_)  # True: the client has ended the session
    num_calls = column(np.int32)  # calls that have ended
    num_live = column(np.int32)  # calls that wait or run
    num_tokens = column(np.int32)  # length of the last call, prompt and output
    attained = column(np.int64)  # tokens computed for the session's calls that have ended
    device_groups = column(np.int32, width=NUM_KINDS)  # idle groups on the device, by kind
    host_groups = column(np.int32, width=NUM_KINDS)  # groups only in host memory, by kind

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(capacity)
        self._free = list(range(capacity - 1, NOBODY, -1))
        self.live[NOBODY] = self.is_over[NOBODY] = True

    def add(self) -> int:
        """Add a session and return its row. A full table grows."""
        if not self._free:
            self._free = list(range(2 * self.capacity - 1, self.capacity - 1, -1))
            self.grow(2 * self.capacity)
        row = self._free.pop()
        self.clear_row(row)
        self.live[row] = True
        return row

    def remove(self, row: int) -> None:
        """Forget a session, which must have no groups and no live calls."""
        assert self.live[row]
        assert row != NOBODY
        self.live[row] = False
        self._free.append(row)
