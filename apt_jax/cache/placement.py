"""Where the positions of a request lie, if not simply in the first slots of groups that it has for itself.

A `HybridCache` and its `GroupPool` tell a `Placement` of slots and groups that are taken and given back, and ask it
what they cannot know: from which end a request fills a group, and which entries of its block table have none.
"""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotTraffic:
    """Single slots of blocks that went to host memory and came back, in all."""

    saved_slots: int = 0
    """Positions."""
    loaded_slots: int = 0
    saved_blocks: float = 0.0
    """Blocks' worth of them."""
    loaded_blocks: float = 0.0


class Placement(Protocol):
    """Places of positions in groups: from their right ends, beside those of another request, or in host memory."""

    is_downward: NDArray[np.bool_]
    """By first block, whether the lone user of a group fills it from the right."""
    num_holes: NDArray[np.int32]
    """By slot, entries of its block table that have no group."""

    def begin(self, slot: int, owner: int) -> None:
        """A request has taken a slot."""
        ...

    def note_new(self, firsts: int | NDArray[np.int32], slots: int | NDArray[np.int32]) -> None:
        """Groups have got a lone user each."""
        ...

    def release(self, slot: int) -> None:
        """A request gives everything back; the groups that its block table names afterwards are its own."""
        ...

    def downwards(self, slots: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
        """(n, width) whether the requests fill their groups from the right."""
        ...

    def have_two_users(self, firsts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(n,) whether two requests write to the groups, each to slots of its own."""
        ...

    def traffic(self) -> SlotTraffic:
        """Count the slots that have been moved."""
        ...

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            CacheIntegrityError: something does not add up.
        """
        ...
