"""Eager checkpoints of shared blocks, for comparison with lazy checkpoints (BROS §5.3, Fig. 13)."""

from apt_jax.cache.sharing import BlockSharing, Place


def checkpoint_at_once(sharing: BlockSharing) -> None:
    """Patch `sharing`: as soon as a real-time request takes a group of a best-effort request, the latter's slots in the
    group are checkpointed."""
    join = sharing._join

    def join_and_checkpoint(slot: int, entry: int, place: Place, *, down: bool) -> None:
        join(slot, entry, place, down=down)
        if not down:
            sharing._checkpoint(place, 0)

    sharing._join = join_and_checkpoint  # type: ignore[method-assign]
