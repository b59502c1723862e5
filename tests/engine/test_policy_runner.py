"""Policies that break their promises, by an engine without a model: the fallback schedules, and no request loses a
token."""

import asyncio
import itertools
import logging
import re

import numpy as np
import pytest

from apt_jax.request import EngineRequest
from apt_jax.sched import AptPolicy
from apt_jax.utils.clock import VirtualClock
from tests.support.cases import cover, num_cases
from tests.support.http_serving import http_serving
from tests.support.outside_policies import BROKEN, Broken
from tests.support.toy_serving import EngineComponents, assert_clean, expected_tokens, toy_parts


def parts_of(promise: str, every: int, **toy) -> EngineComponents:
    policy = f"tests.support.outside_policies:Broken?promise={promise}&every={every}"
    return toy_parts(policy=policy, debug=False, num_blocks=24, max_num_seqs=4, **toy)


def serve_some(parts: EngineComponents, num_requests: int = 12) -> None:
    """More requests than the pool holds, two at a time; each must get its tokens, and nothing is left of it."""
    rng = np.random.default_rng(0)
    requests: list[EngineRequest] = []
    tokens: dict[str, list[int]] = {}
    engine = parts.engine
    for step in range(20_000):
        if step % 3 == 0 and len(requests) < num_requests:
            for _ in range(2):
                requests.append(
                    parts.build_request(
                        prompt="x" * int(rng.integers(1, 20)),
                        params={"max_tokens": int(rng.integers(1, 24)), "temperature": 0.0, "ignore_eos": True},
                    )
                )  # fmt: skip
                engine.add_request(requests[-1])
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                assert output.finish_reason == "length", output.error
            parts.assembler.delta(output)
        engine.check_integrity()
        if len(requests) == num_requests and not engine.has_work:
            break
    assert not engine.has_work
    assert_clean(parts)
    for request in requests:
        assert tokens[request.request_id] == expected_tokens(request)


ALWAYS = ("raises", "row twice", "writes to the table", "nothing is run")
"""Faults that `make test` also plants in every call: then `fcfs` alone schedules, whatever the fault."""


@pytest.mark.in_turn(14)
@pytest.mark.seeds
@pytest.mark.parametrize(
    ("promise", "every"),
    cover(
        itertools.product(BROKEN, (1, 3)), {(promise, 3) for promise in BROKEN} | {(promise, 1) for promise in ALWAYS}
    ),
)
def test_a_broken_plan_loses_nothing(promise, every, caplog):
    parts = parts_of(promise, every)
    # A hundred steps pass before an engine in which nothing is run is helped.
    serve_some(parts, num_cases(4, 12) if promise == "nothing is run" and every == 1 else 12)
    policy, stats = parts.policy, parts.engine.stats()
    assert isinstance(policy, Broken)
    assert policy.num_broken > 10
    assert stats.num_invalid_plan_rows == 0  # nothing of a broken plan was begun
    if promise == "nothing is run" and every > 1:
        assert stats.fallback_iterations == 0  # legal now and then
    else:
        assert stats.fallback_iterations > 10
        assert sum("policy broken failed" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("promise", ["raises", "unknown row", "writes to the table"])
def test_in_debug_mode_mistakes_raise(promise):
    parts = parts_of(promise, 3)
    parts.engine.debug = True
    with pytest.raises((ZeroDivisionError, AssertionError, ValueError)):
        serve_some(parts)


def test_the_log_has_a_line_a_minute(caplog):
    clock = VirtualClock()
    parts = toy_parts(policy="tests.support.outside_policies:Broken", debug=False, clock=clock)
    parts.engine._policies.timer = clock.now_s
    parts.engine.add_request(
        parts.build_request(prompt="hi", params={"max_tokens": 100, "ignore_eos": True, "temperature": 0.0})
    )
    for _ in range(80):
        clock.advance_to(clock.now_s() + 2.0)
        parts.engine.step()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert lines == [
        f"policy broken failed, fcfs schedules instead ({n} iteration{'s' * (n != 1)} so far): ZeroDivisionError: no reason"
        for n in (1, 31, 61)
    ]


def test_a_bundled_policy_that_raises_is_replaced_too(monkeypatch, caplog):
    calls = itertools.count()
    good = AptPolicy.schedule

    def sometimes(self, view):
        if next(calls) % 3 == 2:
            raise FloatingPointError("overflow")
        return good(self, view)

    monkeypatch.setattr(AptPolicy, "schedule", sometimes)
    parts = toy_parts(policy="apt", debug=False, num_blocks=24, max_num_seqs=4)
    serve_some(parts)
    assert parts.engine.stats().fallback_iterations == next(calls) // 3 > 10
    assert "policy apt failed" in caplog.text


def test_bundled_policies_get_the_table_itself(monkeypatch):
    """They are checked by their tests; serving pays nothing for it."""
    parts = toy_parts(policy="fcfs", debug=False)
    monkeypatch.setattr("apt_jax.engine.policy_runner.checked_schedule", lambda policy, view: 1 / 0)
    serve_some(parts)
    assert parts.engine.stats().fallback_iterations == 0


def test_a_served_request_has_the_same_tokens():
    """Over HTTP, under a policy that raises in every third call."""

    async def ask(policy: str) -> tuple[list[str], float]:
        async with http_serving(policy=policy, debug=False) as served:
            answers = await asyncio.gather(*(served.ask(f"request {i}", max_tokens=20) for i in range(6)))
            scraped = (await served.http.get("/metrics")).text
        found = re.search(r"aptjax:scheduler_fallbacks_total\{.*\} (\S+)", scraped)
        assert found is not None
        return [a["choices"][0]["text"] for a in answers], float(found[1])

    plain, none = asyncio.run(ask("fcfs"))
    texts, fallbacks = asyncio.run(ask("tests.support.outside_policies:Broken?promise=raises&every=3"))
    assert (texts, none) == (plain, 0)
    assert fallbacks >= 5
