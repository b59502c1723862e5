"""Pages of 2 MiB: memory keeps its contents while it moves."""

import numpy as np
import pytest

from apt_jax.utils.allocator import use_huge_pages


def test_memory_keeps_its_contents_while_it_moves():
    arrays = [np.arange(3 << 20, dtype=np.int32), np.arange(40 << 20, dtype=np.int32), np.ones(10, np.int8)]
    expected = [array.copy() for array in arrays]
    parts = 0
    for _ in use_huge_pages([(array.ctypes.data, array.nbytes) for array in arrays]):
        parts += 1
        arrays[1][:8] += 1  # it is in use
    assert parts >= 2  # 160 MiB: two parts
    expected[1][:8] += parts
    for array, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("buffers", [[], [(4096, 100)], [(0x7000_0000_0000, 8 << 20)]])
def test_what_is_no_memory_stays(buffers):
    for _ in use_huge_pages(buffers):
        pass
