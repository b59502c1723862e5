"""Sessions whose prompts begin differently in each call are found, and only those."""

import logging
from typing import Any

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.engine.changed_prefixes import (
    LOG_PERIOD_S,
    MAX_LOGGED,
    MAX_SESSIONS,
    MAX_TOKENS,
    ChangedPrefixes,
    parting,
)
from apt_jax.engine.counters import EngineCounters
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.utils.clock import VirtualClock
from tests.support.fake_serving import Served, prompt


def tokens(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, 50_000, num).astype(np.int32)


def request(prompt: np.ndarray, session: str | None = "s", tenant: str | None = None, work: Any = "") -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt=None, prompt_token_ids=prompt, params=SamplingParams(), slo=SLO(), arrival_s=0.0,
        session_id=session, tenant=tenant, work=work,
    )  # fmt: skip


class World:
    def __init__(self) -> None:
        self.clock, self.counters = VirtualClock(), EngineCounters()
        self.changed = ChangedPrefixes(self.clock, self.counters)

    def lost(self, prompt: np.ndarray, num_found: int = 0, **fields) -> int:
        before = self.counters.changed_prefix_tokens
        self.changed.arrived(request(prompt, **fields), num_found)
        return self.counters.changed_prefix_tokens - before


@pytest.mark.parametrize("seed", range(40))
def test_text_behind_a_changed_line_is_found_at_any_offset(seed):
    rng = np.random.default_rng([seed, 71])
    head, old, new = tokens(rng, int(rng.integers(0, 200))), *(tokens(rng, int(n)) for n in rng.integers(1, 60, 2))
    rest, more = tokens(rng, int(rng.integers(400, 3000))), tokens(rng, int(rng.integers(0, 500)))
    while old[0] == new[0]:
        new[0] += 1
    last, this = np.concatenate([head, old, rest]), np.concatenate([head, new, rest, more])
    part, share = parting(last, this)
    assert part == head.size
    assert share * (last.size - part) == pytest.approx(rest.size, abs=2 * 16 + 0.02 * last.size)
    world = World()
    assert world.lost(last) == 0
    assert world.lost(this) == pytest.approx(rest.size, abs=2 * 16 + 0.02 * this.size)
    assert world.lost(this) == 0  # the same again


@pytest.mark.parametrize("seed", range(20))
def test_prompts_that_continue_or_have_other_text_lose_nothing(seed):
    rng = np.random.default_rng([seed, 72])
    last, other = tokens(rng, int(rng.integers(1, 2000))), tokens(rng, int(rng.integers(1, 2000)))
    cut = int(rng.integers(0, last.size))
    for this in (last, last[:cut], np.concatenate([last, other]), np.concatenate([last[:cut], other]), other):
        world = World()
        world.lost(last)
        assert world.lost(this) == 0
    world = World()
    world.lost(last, session=None)
    assert world.lost(np.concatenate([other[:5], last]), session=None) == 0  # calls without a name are not compared


def test_sessions_of_other_names_and_tenants_are_not_compared():
    rng, world = np.random.default_rng(73), World()
    rest = tokens(rng, 500)
    others: tuple[dict[str, Any], ...] = ({}, {"session": "t"}, {"tenant": "a"}, {"tenant": "b"})
    for number, fields in enumerate(others):
        assert world.lost(np.concatenate([[number], rest]).astype(np.int32), **fields) == 0
    assert world.lost(np.concatenate([[9], rest]).astype(np.int32), tenant="b") > 400
    world.changed.forget("a", "s")
    assert world.lost(np.concatenate([[9], rest]).astype(np.int32), tenant="a") == 0


def test_short_calls_between_do_not_hide_the_long_ones():
    rng, world = np.random.default_rng(74), World()
    rest = tokens(rng, 500)
    for number in range(4):
        lost = world.lost(np.concatenate([[number], rest]).astype(np.int32))
        assert (lost > 400) == (number > 0)
        assert world.lost(tokens(rng, 50)) == 0  # for a title
    for _ in range(20):  # a new conversation begins
        assert world.lost(rest[:100]) == 0
    assert world.lost(np.concatenate([[7], rest[:100]]).astype(np.int32)) >= 64


def test_a_call_that_finds_half_of_the_last_prompt_is_not_compared():
    rng, world = np.random.default_rng(75), World()
    rest = tokens(rng, 500)
    world.lost(np.concatenate([[1], rest]).astype(np.int32))
    assert world.lost(np.concatenate([[2], rest]).astype(np.int32), num_found=251) == 0


def test_only_the_beginnings_of_a_bounded_number_of_sessions_are_kept():
    rng, world = np.random.default_rng(76), World()
    long = tokens(rng, 3 * MAX_TOKENS)
    for number in range(MAX_SESSIONS + 50):
        world.lost(long, session=f"s{number}")
    kept = world.changed._last.values()
    assert len(kept) == MAX_SESSIONS
    assert all(one.begin.base is None and one.begin.size == MAX_TOKENS for one in kept)
    changed = np.concatenate([[-1], long]).astype(np.int32)
    assert world.lost(changed, session="s0") == 0  # forgotten
    assert world.lost(changed, session=f"s{MAX_SESSIONS}") == pytest.approx(long.size, rel=0.01)


def test_the_log_tells_where_prompts_part_once_and_never_their_text(caplog):
    rng, world = np.random.default_rng(77), World()
    head, rest = np.full(23, 40_001, np.int32), tokens(rng, 977)

    def ask(number: int, **fields) -> None:
        world.lost(np.concatenate([head, [number], rest]).astype(np.int32), **fields)

    with caplog.at_level(logging.WARNING, "apt_jax.engine"):
        for number in range(5):
            ask(number, session="the-name")
        (line,) = caplog.messages
        assert line.startswith("prompts of one session part at token 23: ")
        assert "962 of 1001 tokens (96 %)" in line
        assert "40001" not in line
        assert "the-name" not in line
        for number in (8, 9):
            ask(number, tenant="a")
            ask(number, session="u", tenant="a")
            ask(number, work="tool")
        assert len(caplog.messages) == 3  # by tenant and kind of work
        assert sum("of tenant a part" in line for line in caplog.messages) == 1
        world.clock.advance_to(LOG_PERIOD_S)
        for number in (1, 2):
            ask(number)
        assert len(caplog.messages) == 4
        for number in range(2 * MAX_LOGGED):
            for first in (1, 2):
                ask(first, tenant=f"t{number}")
        assert len(caplog.messages) == 3 + MAX_LOGGED
        assert len(world.changed._logged_s) == MAX_LOGGED


def test_the_engine_counts_tokens_behind_a_changed_line():
    served = Served("fcfs", num_blocks=200, budget=512)
    rest = prompt(150, seed=3)

    def ask(first: int, session: str | None) -> None:
        name = f"c{len(served.requests)}"
        served.requests[name] = EngineRequest(
            request_id=name, prompt=None, prompt_token_ids=np.concatenate([[first], rest]).astype(np.int32),
            params=SamplingParams(max_tokens=2, temperature=0.0), slo=SLO(), arrival_s=served.clock.now_s(),
            session_id=session,
        )  # fmt: skip
        served.tokens[name] = []
        served.engine.add_request(served.requests[name])
        served.drain()

    for first in (1, 1, 1):
        ask(first, "s")
    assert served.engine.stats().changed_prefix_tokens == 0
    ask(2, None)
    assert served.engine.stats().changed_prefix_tokens == 0
    ask(3, "s")
    assert served.engine.stats().changed_prefix_tokens == pytest.approx(150, abs=20)
    ask(3, "s")
    served.engine.end_session("s")
    ask(4, "s")
    assert served.engine.stats().changed_prefix_tokens == pytest.approx(150, abs=20)
