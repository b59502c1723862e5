"""The work list of the decode kernels: every visible tile is in one piece, and pieces have places of their own."""

import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.pallas.triton_work_list import Item, longest_chain, pieces_for, rows_of, work_list
from tests.support.cases import cover

TOKENS = 64


def check(
    lens: np.ndarray, *, window: int | None, pieces: int, most_tiles: int, active: np.ndarray | None = None
) -> int:
    """Compare a list with its definition; the longest piece."""
    rows = rows_of(jnp.asarray(lens), None, tokens=TOKENS, window=window)
    work = work_list(rows, pieces, most_tiles, None if active is None else jnp.asarray(active))
    assert work.items.shape[0] <= len(lens) + pieces
    fields = np.asarray(work.items)
    listed = [Item(*item) for item in fields[:, :6].tolist() if item[0] >= 0]
    assert (fields[len(listed) :, 0] == -1).all()  # the rest is behind
    goals = fields[: len(listed), 6:].tolist()
    used, packed, longest, places = set(), 0, 0, []
    joins = {row: (place, count) for row, place, count in np.asarray(work.joins).tolist() if count}
    for row, length in enumerate(lens.tolist()):
        mine = [item for item in listed if item.row == row]
        own_places = [place for owner, place in goals if owner == row]
        first, last = max(0, length - (window or length)) // TOKENS, -(-length // TOKENS)
        if active is not None and not active[row]:
            assert not mine
            packed += last - first
            continue
        assert mine
        assert all((item.table, item.length) == (row, length) for item in mine)
        assert [tile for item in mine for tile in range(item.first, item.last)] == list(range(first, last))
        for item in mine:
            assert item.packed == packed + item.first - first
            longest = max(longest, item.last - item.first)
        packed += last - first
        if len(mine) == 1:
            assert own_places == [-1]
            assert row not in joins
        else:
            place, count = joins.pop(row)
            assert own_places == list(range(place, place + count))
            places += own_places
        used.add(row)
    assert not joins
    assert len(set(places)) == len(places)
    assert max(places, default=0) < work.num_places
    return longest


@pytest.mark.parametrize("pieces", cover([1, 7, 33], [7]))
def test_every_visible_tile_is_in_one_piece(pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    for window in (None, 1, 100, 4096, None):
        lens = (rng.integers(0, 3000, 9) * rng.integers(0, 2, 9)).astype(np.int32)
        most = -(-3000 // TOKENS)
        active = rng.integers(0, 2, len(lens)).astype(bool)
        longest = check(lens, window=window, pieces=pieces, most_tiles=most)
        if window is None:
            assert longest == longest_chain(lens.tolist(), tokens=TOKENS, pieces=pieces)
        check(lens, window=window, pieces=pieces, most_tiles=most, active=active)


@pytest.mark.parametrize(
    ("lens", "most_tiles"),
    cover([([0, 0], 1), ([64, 64, 0], 1), ([2048] * 5, 32), ([1], 1)], [([64, 64, 0], 1), ([2048] * 5, 32)]),
)
def test_lists_that_are_full(lens: list[int], most_tiles: int) -> None:
    for pieces in (1, 1000):
        check(np.asarray(lens, np.int32), window=None, pieces=pieces, most_tiles=most_tiles)


def test_a_long_row_among_many_is_spread_over_the_chip() -> None:
    lens = [262_144] + [469] * 63
    pieces = pieces_for("sm_90", 8, 8)
    assert longest_chain(lens, tokens=TOKENS, pieces=pieces) * 100 < -(-lens[0] // TOKENS)
    lens = np.asarray(lens, np.int32)
    assert check(lens, window=None, pieces=pieces, most_tiles=4096) == longest_chain(
        lens.tolist(), tokens=TOKENS, pieces=pieces
    )
