"""Cases of tests that take turns by day."""

import collections
from typing import Any

import pytest

from tests.support import cases


class Item:
    """The part of a pytest item that is used."""

    def __init__(self, nodeid: str, *markers: pytest.Mark) -> None:
        self.nodeid = nodeid
        self.markers = {marker.name: marker for marker in markers}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


def items() -> list[Item]:
    turn, group = pytest.mark.in_turn(2).mark, pytest.mark.in_turn(1, group="both").mark
    grid = [Item(f"a.py::test_grid[{i}]", turn) for i in range(5)]
    slow = Item("a.py::test_grid[slow]", turn, pytest.mark.slow.mark)
    return [*grid, slow, Item("a.py::test_one", group), Item("b.py::test_other", group), Item("a.py::test_plain")]


def of_day(day: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("APT_JAX_SEED_BASE", f"{day}0000")
    made: list[Any] = items()
    cases.mark_all_but_those_in_turn(made)
    return [item.nodeid for item in made if item.get_closest_marker("slow") is None]


def test_each_day_has_so_many_and_a_month_has_all(monkeypatch):
    monkeypatch.setattr(cases, "ALL", False)
    seen: collections.Counter[str] = collections.Counter()
    for day in range(20261101, 20261131):
        today = of_day(day, monkeypatch)
        assert today == of_day(day, monkeypatch)
        assert collections.Counter(name.partition("[")[0].partition("::")[2] for name in today)["test_grid"] == 2
        assert ("a.py::test_one" in today) != ("b.py::test_other" in today)
        seen.update(today)
    assert set(seen) == {item.nodeid for item in items()} - {"a.py::test_grid[slow]"}
    assert seen["a.py::test_plain"] == 30


def test_where_all_run_the_slow_ones_are_all_of_them(monkeypatch):
    monkeypatch.setattr(cases, "ALL", True)
    assert of_day(20261126, monkeypatch) == ["a.py::test_plain"]
