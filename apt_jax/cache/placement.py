"""Placement of a request's positions if they do not simply fill its own groups from the left.

A `HybridCache` and its `GroupPool` report to a `Placement` which slots and groups are taken and released. The placement
records from which end a request fills a group, and which entries of its block table have no group.
"""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotTraffic:
    """Total numbers of single slots copied to host memory and back."""

    saved_slots: int = 0
    """Number of positions copied to host memory."""
    loaded_slots: int = 0
    saved_blocks: float = 0.0
    """Data copied to host memory, in blocks."""
    loaded_blocks: float = 0.0


class Placement(Protocol):
    """Placement of positions: from the right end of a group, in a group shared with another request, or in host
    memory."""

    is_downward: NDArray[np.bool_]
    """True: the only user of a group fills it from the right; indexed by first block."""
    num_holes: NDArray[np.int32]
    """For each slot, the number of its block table entries without a group."""

    def begin(self, slot: int, owner: int) -> None:
        """Record that a request has taken a slot."""
        ...

    def note_new(self, firsts: int | NDArray[np.int32], slots: int | NDArray[np.int32]) -> None:
        """Record that newly allocated groups have one user."""
        ...

    def release(self, slot: int) -> None:
        """Remove a request from shared groups before it is released; its block table then contains only groups that it
        does not share."""
        ...

    def downwards(self, slots: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
        """Return an (n, width) mask: True if the request fills the group of the table entry from the right."""
        ...

    def have_two_users(self, firsts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask: True if two requests use the group, each with token slots of its own."""
        ...

    def traffic(self) -> SlotTraffic:
        """Return the number of single slots moved so far."""
        ...

    def check_integrity(self) -> None:
        """Recount shared groups and block table entries without a group.

        Raises:
            CacheIntegrityError: the placement is inconsistent.
        """
        ...
