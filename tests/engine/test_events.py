"""Iteration events say what happened, and slow subscribers hold nothing up."""

import asyncio
import collections
import time

import pytest

from apt_jax.engine.events import Iteration
from apt_jax.errors import EngineDeadError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.streams import EngineClosedError
from apt_jax.request import RequestMetrics
from tests.support.fake_executor import Fault, FaultKind
from tests.support.toy_serving import assert_clean, executor_of, expected_tokens, toy_parts


def run(
    parts: EngineComponents, prompts: list[int], max_tokens: int = 24
) -> tuple[list[Iteration], dict[str, RequestMetrics]]:
    """Serve prompts of these lengths; what was told, and the metrics of each request."""
    told: list[Iteration] = []
    engine = parts.engine
    engine.after_step = told.append
    metrics = {}
    requests = [
        parts.build_request(
            prompt_token_ids=[3 + (i * 7 + j) % 250 for j in range(n)],
            params={"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True},
            request_id=f"r{i}",
        )
        for i, n in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = collections.defaultdict(list)
    for _ in range(3000):
        if not engine.has_work:
            break
        for output in engine.step():
            parts.assembler.delta(output)
            tokens[output.request_id] += output.new_token_ids
            metrics[output.request_id] = output.metrics
    for request in requests:
        assert tokens[request.request_id] == expected_tokens(request)
    return told, metrics


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "apt", "sarathi", "random"])
def test_the_decisions_add_up_to_what_was_computed(policy, overlap):
    lengths = [5, 40, 17, 63, 9, 30, 22, 51]
    for _ in range(5):  # where the clock of the machine decides, a run may go without preemptions
        parts = toy_parts(policy=policy, overlap=overlap, num_blocks=60, step_s=0.0005)
        told, metrics = run(parts, lengths)
        stats = parts.engine.stats()
        if stats.num_preemptions or policy not in ("apt", "random"):
            break
    assert sum(stats.iterations.values()) == sum(bool(i.scheduled) for i in told)
    assert stats.num_preemptions == sum(len(i.preempted) for i in told)
    assert sum(stats.kind_switches.values()) == sum(len(i.switched) for i in told)
    if policy in ("apt", "random"):
        assert stats.num_preemptions > 0
    assert [i.number for i in told] == list(range(len(told)))
    assert [i.at_s for i in told] == sorted(i.at_s for i in told)
    held: dict[str, tuple[str, int]] = {}  # kind and positions of those that hold cache
    kinds: dict[str, str] = {}
    computed: collections.Counter[str] = collections.Counter()
    found: collections.Counter[str] = collections.Counter()
    for iteration in told:
        for row in iteration.preempted:
            assert held.pop(row.request_id) == (row.kind, row.num_tokens)
        switched = {s.request_id: s for s in iteration.switched}
        for row in iteration.scheduled:
            name = row.request_id
            if name in held:
                assert held[name] == (row.kind, row.start)
            else:
                found[name] += row.start
                assert (name in switched) == (kinds.get(name, row.kind) != row.kind)
                if name in switched:
                    assert (switched[name].old, switched[name].new) == (kinds[name], row.kind)
            held[name] = (row.kind, row.start + row.num_tokens)
            kinds[name] = row.kind
            computed[name] += row.num_tokens
        assert iteration.prefill_tokens + iteration.decode_tokens == sum(row.num_tokens for row in iteration.scheduled)
        assert (iteration.step_s is None) == (not iteration.scheduled)
        assert not iteration.failed
        assert iteration.schedule_s >= 0.0
    for name, one in metrics.items():
        lost = [p.num_tokens for i in told for p in i.preempted if p.request_id == name]
        positions = lengths[int(name[1:])] + len(one.token_times_s) - 1
        assert computed[name] + found[name] == positions + sum(lost)
        assert one.num_preemptions == len(lost)
        assert one.num_kind_switches == sum(s.request_id == name for i in told for s in i.switched)
        assert one.cache_kind == kinds[name]
    assert_clean(parts)


def test_steps_that_fail_are_told_and_those_after_them_too():
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps == 4 else None

    fault.steps = 0
    told, _ = run(toy_parts(fault=fault, debug=False), [5, 9])
    failed = [i for i in told if i.failed]
    assert 1 <= len(failed) <= 2  # with overlap the one behind it, too
    assert all(i.step_s is None for i in failed)
    assert not told[-1].failed
    assert [i.number for i in told] == list(range(len(told)))


def test_step_times_are_those_of_the_device_not_of_the_queue():
    parts, started_s = toy_parts(step_s=0.01), time.perf_counter()
    told, _ = run(parts, [5], max_tokens=20)
    passed_s = time.perf_counter() - started_s
    times = sorted(i.step_s for i in told if i.step_s is not None)
    assert times[len(times) // 2] > 0.009
    assert sum(times) <= passed_s  # with overlap a step is dispatched one step early


def test_watched_or_not_the_decisions_are_numbered():
    parts = toy_parts()
    run(parts, [5], max_tokens=3)
    parts.engine.after_step = None
    request = parts.build_request(prompt="x", params={"max_tokens": 2, "ignore_eos": True})
    parts.engine.add_request(request)
    while parts.engine.has_work:
        for output in parts.engine.step():
            parts.assembler.delta(output)
    told: list[Iteration] = []
    parts.engine.after_step = told.append
    parts.engine.add_request(parts.build_request(prompt="x", params={"max_tokens": 1, "ignore_eos": True}))
    while parts.engine.has_work:
        for output in parts.engine.step():
            parts.assembler.delta(output)
    assert [i.number for i in told] == [5]


# --- watching from an event loop -----------------------------------------------------------------------------------


def scenario(body, *, decision_log: int = 1024, **toy) -> None:
    async def whole() -> None:
        engine = AsyncEngine(toy_parts(**toy), decision_log=decision_log)
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            executor_of(engine.parts).gate.set()
            await engine.shutdown()

    asyncio.run(whole())


async def generate(engine: AsyncEngine, max_tokens: int) -> None:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    async for _ in engine.submit(engine.parts.build_request(prompt="hello", params=params)):
        pass


def test_subscribers_see_the_same_and_slow_ones_lose_the_oldest():
    async def body(engine):
        quick, slow = engine.watch(), engine.watch(capacity=5)
        seen: list[Iteration] = []

        async def read() -> None:
            async for batch in quick:
                assert batch.num_dropped == 0
                seen.extend(batch.iterations)

        task = asyncio.create_task(read())
        await generate(engine, 40)
        batch = await anext(slow)
        assert [i.number for i in batch.iterations] == [35, 36, 37, 38, 39]
        assert batch.num_dropped == 35
        await generate(engine, 3)
        batch = await anext(slow)
        assert batch.num_dropped == 0
        assert [i.number for i in batch.iterations] == [40, 41, 42]
        while len(seen) < 43:
            await asyncio.sleep(0.001)
        assert [i.number for i in seen] == list(range(43))
        task.cancel()

    scenario(body, overlap=False)


def test_nothing_is_noted_when_the_last_watcher_has_left():
    async def body(engine):
        first, second = engine.watch(), engine.watch()
        await generate(engine, 2)
        assert engine.parts.engine.after_step is not None
        first.close()
        first.close()
        await generate(engine, 2)
        assert engine.parts.engine.after_step is not None
        second.close()
        await generate(engine, 2)
        assert engine.parts.engine.after_step is None

    scenario(body, decision_log=0)


def test_the_end_of_the_engine_is_the_end_of_the_watch():
    async def body(engine):
        watch = engine.watch()
        await generate(engine, 3)
        await engine.shutdown()
        assert len((await anext(watch)).iterations) >= 3  # what was there is read first
        with pytest.raises(EngineClosedError):
            await anext(watch)
        with pytest.raises(EngineClosedError):
            await anext(engine.watch())
        watch.close()

    scenario(body)


def test_the_death_of_the_engine_is_told():
    async def body(engine):
        watch = engine.watch()
        with pytest.raises(EngineDeadError):
            await generate(engine, 30)
        with pytest.raises(EngineDeadError, match="twice"):
            async for _ in watch:
                pass

    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 3 else None

    fault.steps = 0
    scenario(body, fault=fault, debug=False)


def test_what_is_unread_can_be_taken_without_waiting():
    async def body(engine):
        watch = engine.watch(capacity=3)
        assert watch.take().iterations == []
        await generate(engine, 8)
        batch = watch.take()
        assert [i.number for i in batch.iterations] == [5, 6, 7]
        assert batch.num_dropped == 5
        assert watch.take().iterations == []
        watch.close()

    scenario(body, overlap=False)


# --- timelines of the last requests --------------------------------------------------------------------------------


def test_where_the_last_requests_of_each_tenant_stand():
    async def body(engine):
        executor_of(engine.parts).step_s = 0.005
        params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

        def submit(name: str, tenant: str, **more):
            return engine.submit(
                engine.parts.build_request(prompt="hello", params={**params, **more}, request_id=name, tenant=tenant)
            )

        for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a")):
            async for _ in submit(name, tenant):
                pass
        runs, waits = submit("a4", "a", max_tokens=100), submit("a5", "a")
        await anext(runs)
        log = engine.decision_log
        assert log is not None
        found = await asyncio.wrap_future(
            engine.call(
                lambda: {tenant: [one.summary() for one in last] for tenant, last in log.last({"a", "c"}, 4).items()}
            )
        )
        assert found["c"] == []
        assert [one["request_id"] for one in found["a"]] == ["a5", "a4", "a3", "a2"]
        assert [one["state"] for one in found["a"]] == ["waiting", "running", "length", "length"]
        assert [one["ended_ms"] is None for one in found["a"]] == [True, True, False, False]
        assert [one["kind"] for one in found["a"]] == [None, *["kv"] * 3]
        assert all(one["prompt_tokens"] == 6 for one in found["a"])
        runs.cancel()
        waits.cancel()

    scenario(body, max_num_seqs=1)
