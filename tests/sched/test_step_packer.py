import itertools

import numpy as np
import pytest

from apt_jax.sched.step_packer import may_start
from tests.support.sched_world import HIDDEN, KV, World, blocks


@pytest.mark.parametrize("mode", ["kv", "hidden", "hybrid"])
@pytest.mark.parametrize("hidden_block_size", [None, 8])
def test_nothing_may_start_just_where_nothing_fits(mode: str, hidden_block_size: int | None) -> None:
    offered = {"kv": (KV,), "hidden": (HIDDEN,), "hybrid": (KV, HIDDEN)}[mode]
    for lengths, ahead in itertools.product([(3,), (4, 9), (17, 8, 30)], [0, 1, 5]):
        world = World(num_blocks=100, mode=mode, hidden_block_size=hidden_block_size)
        for length in lengths:
            world.add(length, max_tokens=2)
        view = world.view()
        least = min(
            blocks(length + min(ahead, 2), kind, 4, hidden_block_size) for length in lengths for kind in offered
        )
        assert [may_start(view, view.waiting, free, ahead) for free in (0, least - 1, least)] == [False, False, True]
        assert not may_start(view, np.zeros(0, np.int32), 100, ahead)


def test_with_shared_prefixes_all_may_start() -> None:
    world = World(num_blocks=100)
    row = world.add(40)
    world.table.shared_prefix_blocks[row, KV] = 18
    assert may_start(world.view(), world.view().waiting, 4)
