"""The former home and names of `apt_jax.sched.step_packer`, for policies from outside; they go with version 0.3."""

from apt_jax.sched import step_packer
from apt_jax.sched.step_packer import (
    RequestNotes as RequestNotes,
)
from apt_jax.sched.step_packer import (
    Rows as Rows,
)
from apt_jax.sched.step_packer import (
    admissible as admissible,
)
from apt_jax.sched.step_packer import (
    allowed_kinds as allowed_kinds,
)
from apt_jax.sched.step_packer import (
    blocks_after as blocks_after,
)
from apt_jax.sched.step_packer import (
    decode_plan as decode_plan,
)
from apt_jax.sched.step_packer import (
    held_blocks_for as held_blocks_for,
)
from apt_jax.sched.step_packer import (
    num_that_fit as num_that_fit,
)
from apt_jax.sched.step_packer import resolve_prefill_deadlock as unblock
from apt_jax.sched.step_packer import (
    share_tokens as share_tokens,
)
from apt_jax.sched.step_packer import (
    split_running as split_running,
)
from apt_jax.sched.step_packer import (
    start_blocks_for as start_blocks_for,
)
from apt_jax.sched.step_packer import (
    start_options as start_options,
)
from apt_jax.sched.step_packer import (
    step_plan as step_plan,
)
from apt_jax.sched.step_packer import (
    target_tokens as target_tokens,
)


class StepPacker(step_packer.StepPacker):
    """`apt_jax.sched.step_packer.StepPacker` with its former names."""

    go_on = step_packer.StepPacker.continue_prefill

    @property
    def seats_left(self) -> int:
        """The former name of `slots_left`."""
        return self.slots_left


__all__ = [
    "RequestNotes",
    "Rows",
    "StepPacker",
    "admissible",
    "allowed_kinds",
    "blocks_after",
    "decode_plan",
    "held_blocks_for",
    "num_that_fit",
    "share_tokens",
    "split_running",
    "start_blocks_for",
    "start_options",
    "step_plan",
    "target_tokens",
    "unblock",
]
