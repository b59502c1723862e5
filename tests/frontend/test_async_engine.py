"""The engine loop in its thread: streams, cancellation, deadlines, back-pressure, shutdown, death."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import re
import threading

import pytest

from apt_jax.costs.model import StepCosts
from apt_jax.errors import (
    AptJaxError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.streams import EngineClosedError
from apt_jax.frontend.watchdog import Watchdog
from apt_jax.request import EngineRequest
from apt_jax.validation import build_request
from tests.support.fake_executor import Fault, FaultKind
from tests.support.faults import JumpingClock
from tests.support.toy_serving import assert_clean, executor_of, expected_tokens, toy_parts


def run(scenario, **toy) -> AsyncEngine:
    """Run `scenario(engine)` with a fresh engine, shut it down, and see that nothing is left."""

    async def whole() -> AsyncEngine:
        engine = AsyncEngine(toy_parts(**toy))
        try:
            await asyncio.wait_for(scenario(engine), 60)
        finally:
            executor_of(engine.parts).gate.set()
            await engine.shutdown()
        return engine

    engine = asyncio.run(whole())
    if engine.dead_reason is None:
        assert_clean(engine.parts)
    assert engine.num_open == 0
    return engine


def request(engine: AsyncEngine, prompt: str = "hello", **fields) -> EngineRequest:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields.pop("params", {})}
    return engine.parts.build_request(prompt=prompt, params=params, **fields)


async def collect(engine: AsyncEngine, req: EngineRequest, **kwargs) -> list[int]:
    outputs = [output async for output in engine.generate(req, **kwargs)]
    assert outputs[-1].finished
    return outputs[-1].outputs[0].token_ids


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def test_streams_equal_their_reference():
    async def scenario(engine):
        requests = [request(engine, "x" * n, params={"max_tokens": 5 + n}) for n in range(1, 20)]
        streams = await asyncio.gather(*(collect(engine, r) for r in requests))
        for req, tokens in zip(requests, streams, strict=True):
            assert tokens == expected_tokens(req)

    run(scenario)


def test_the_answers_to_several_requests_come_through_one_reader():
    async def scenario(engine):
        requests = engine.parts.build_requests(
            n=4, prompt="hello", params={"max_tokens": 9, "seed": 5, "ignore_eos": True}
        )
        tokens: list[list[int]] = [[] for _ in requests]
        ended = []
        group = engine.submit_batch(requests)
        async for index, delta in group:
            tokens[index] += delta.token_ids
            ended += [index] * delta.finished
        assert group.ended
        assert sorted(ended) == [0, 1, 2, 3]
        assert tokens == [expected_tokens(r) for r in requests]
        assert len({tuple(t) for t in tokens}) == 4

    run(scenario)


def test_one_refused_request_of_a_group_ends_the_reading_and_cancel_the_rest():
    async def scenario(engine):
        executor_of(engine.parts).gate.clear()  # nothing is scheduled meanwhile
        group = engine.submit_batch(engine.parts.build_requests(n=6, prompt="hello"))
        executor_of(engine.parts).gate.set()
        with pytest.raises(QueueFullError):
            async for _ in group:
                pass
        group.cancel()
        await until(lambda: engine.num_open == 0 and engine.parts.engine.num_live == 0)

    run(scenario, max_num_seqs=1, max_num_queued_reqs=2)


def test_who_would_be_refused_after_a_step_is_refused_while_it_runs():
    async def scenario(engine):
        executor, held = executor_of(engine.parts), threading.Event()
        execute = executor.execute

        def hold(batch):
            executor.gate.clear()
            held.set()
            return execute(batch)

        executor.execute = hold
        first = engine.submit(request(engine, params={"max_tokens": 4}))
        await until(held.is_set)  # the step cannot end
        streams = [engine.submit(request(engine, params={"max_tokens": 4})) for _ in range(6)]
        for stream in streams[3:]:
            with pytest.raises(QueueFullError, match="--max-num-queued-reqs 3"):
                await asyncio.wait_for(anext(stream), 20)
            assert stream.ended
        assert not any(stream.ended for stream in streams[:3])
        assert engine.num_open == 1  # the engine has not seen any of them
        streams[0].cancel()
        executor.execute = execute
        executor.gate.set()
        for stream in (first, *streams[1:3]):
            tokens = [token async for delta in stream for token in delta.token_ids]
            assert tokens == expected_tokens(stream.request)[-len(tokens) :]
        assert (await engine.stats()).num_rejected == 3

    run(scenario, max_num_seqs=1, max_num_queued_reqs=3)


def test_requests_that_come_while_a_step_is_put_together_are_added_before_it_runs():
    async def scenario(engine):
        executor, inner = executor_of(engine.parts), engine.parts.engine
        late: list = []
        look_out, loop = inner.before_dispatch, asyncio.get_running_loop()

        async def send() -> None:
            late.extend(engine.submit(request(engine)) for _ in range(3))

        def during_plan(batch) -> None:
            if not late:
                asyncio.run_coroutine_threadsafe(send(), loop).result(20)
                executor.gate.clear()
            look_out(batch)

        inner.before_dispatch = during_plan
        first = engine.submit(request(engine))
        await until(lambda: engine._gate.snapshot is not None)
        assert engine.num_open == 3  # and the step has not ended
        with pytest.raises(QueueFullError):
            await asyncio.wait_for(anext(late[2]), 20)  # told at once, too
        executor.gate.set()
        for stream in (first, *late[:2]):
            tokens = [token async for delta in stream for token in delta.token_ids]
            assert tokens == expected_tokens(stream.request)

    run(scenario, max_num_seqs=1, max_num_queued_reqs=2)


def test_outputs_grow_and_end_once():
    async def scenario(engine):
        req = request(engine)
        outputs = [o async for o in engine.generate(req)]
        texts = [o.outputs[0].text for o in outputs]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        last = outputs[-1]
        assert last.outputs[0].finish_reason == "length"
        assert last.outputs[0].text == engine.parts.tokenizer.decode(last.outputs[0].token_ids)
        assert last.metrics.ttft_s > 0
        assert len(last.metrics.token_times_s) == 8
        assert outputs[0] is not last
        assert len(outputs[0].outputs[0].token_ids) <= 8

    run(scenario, step_s=0.002)


def test_an_idle_engine_sleeps():
    async def scenario(engine):
        await collect(engine, request(engine))
        turns = 0
        iterate = engine._iterate

        def counting():
            nonlocal turns
            turns += 1
            return iterate()

        engine._iterate = counting
        await engine.stats()  # the wait in progress ends
        await asyncio.sleep(0.2)
        assert turns <= 2
        steps = executor_of(engine.parts).num_steps
        await asyncio.sleep(0.05)
        assert executor_of(engine.parts).num_steps == steps

    run(scenario)


# --- cancellation --------------------------------------------------------------------------------------------------


def test_C1_cancelled_while_queued_is_never_scheduled():
    async def scenario(engine):
        executor = executor_of(engine.parts)
        executor.gate.clear()
        first = asyncio.create_task(collect(engine, request(engine, "a")))
        await until(lambda: engine.parts.engine.num_live == 1)
        stream = engine.submit(request(engine, "b"))
        stream.cancel()
        stream.cancel()
        executor.gate.set()
        await first
        with pytest.raises(AptJaxError, match="cancelled"):
            await anext(stream)
        assert engine.parts.engine.stats().finished.get("abort", 0) == 0  # it was never added

    run(scenario)


def test_C2_cancelled_during_a_chunked_prompt():
    async def scenario(engine):
        stream = engine.submit(request(engine, "x" * 200))  # four chunks of at most 64 tokens
        await until(lambda: executor_of(engine.parts).num_steps >= 2)
        stream.cancel()
        await until(lambda: engine.parts.engine.num_live == 0)
        assert engine.parts.engine.stats().generation_tokens == 0

    run(scenario, step_s=0.02)


def test_C3_leaving_mid_stream_frees_the_blocks_and_bystanders_go_on():
    async def scenario(engine):
        other = request(engine, "bystander", params={"max_tokens": 60})
        bystander = asyncio.create_task(collect(engine, other))
        outputs = engine.generate(request(engine, "leaver", params={"max_tokens": 200}))
        async for output in outputs:
            if len(output.outputs[0].token_ids) >= 3:
                break
        await outputs.aclose()
        await until(lambda: engine.parts.engine.num_live <= 1)
        assert await bystander == expected_tokens(other)
        assert engine.parts.engine.stats().finished == {"abort": 1, "length": 1}

    run(scenario, step_s=0.002)


def test_a_cancelled_task_ends_its_request():
    async def scenario(engine):
        task = asyncio.create_task(collect(engine, request(engine, params={"max_tokens": 200})))
        await until(lambda: engine.parts.engine.num_live == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.parts.engine.num_live == 0)
        assert engine.parts.engine.stats().finished == {"abort": 1}

    run(scenario, step_s=0.002)


def test_C10_a_duplicate_is_refused_and_the_first_one_goes_on():
    async def scenario(engine):
        executor = executor_of(engine.parts)
        first = request(engine, request_id="same", params={"max_tokens": 20})
        executor.gate.clear()
        running = asyncio.create_task(collect(engine, first))
        await until(lambda: engine.parts.engine.num_live == 1)
        second = engine.submit(request(engine, request_id="same"))
        executor.gate.set()
        with pytest.raises(DuplicateRequestError):
            await anext(second)
        second.cancel()  # of a refused request: must not touch the one that is alive
        assert await running == expected_tokens(first)
        assert await collect(engine, request(engine, request_id="same"))  # free again

    run(scenario, step_s=0.001)


def test_C11_abort_by_id_is_exact():
    async def scenario(engine):
        stream = engine.submit(request(engine, request_id="abc", params={"max_tokens": 200}))
        await anext(stream)
        for wrong in ("", "a", "ab", "abcd", "ABC"):
            assert not await asyncio.wrap_future(engine.abort(wrong))
        assert await asyncio.wrap_future(engine.abort("abc"))
        deltas = [d async for d in stream]
        assert deltas[-1].finish_reason == "abort"
        assert not await asyncio.wrap_future(engine.abort("abc"))

    run(scenario, step_s=0.002)


# --- deadlines -----------------------------------------------------------------------------------------------------


def test_C7_a_deadline_in_the_past_runs_nothing():
    async def scenario(engine):
        stream = engine.submit(request(engine), deadline_s=engine.parts.clock.now_s() - 1)
        with pytest.raises(TimeoutError):
            await anext(stream)
        assert executor_of(engine.parts).num_steps == 0

    run(scenario)


def test_C8_a_deadline_ends_a_running_and_a_queued_request():
    async def scenario(engine):
        deadline_s = engine.parts.clock.now_s() + 0.1
        running = request(engine, params={"max_tokens": 200})
        queued = request(engine, params={"max_tokens": 200})
        tasks = [asyncio.create_task(collect(engine, r, deadline_s=deadline_s)) for r in (running, queued)]
        for task in tasks:
            with pytest.raises(TimeoutError):
                await task
        assert engine.parts.clock.now_s() - deadline_s < 1.0
        await until(lambda: engine.parts.engine.num_live == 0)

    run(scenario, max_num_seqs=1, step_s=0.005)


# --- back-pressure -------------------------------------------------------------------------------------------------


def test_C5_a_reader_that_never_reads_blocks_no_other_and_loses_nothing():
    async def scenario(engine):
        lazy_request = request(engine, "lazy", params={"max_tokens": 100, "logprobs": 1})
        lazy = engine.submit(lazy_request)
        others = [request(engine, "x" * n) for n in range(1, 6)]
        for req, tokens in zip(others, await asyncio.gather(*(collect(engine, r) for r in others)), strict=True):
            assert tokens == expected_tokens(req)
        await until(lambda: lazy.ended)
        delta = await anext(lazy)  # one delta holds everything
        assert delta.finished
        assert delta.token_ids == expected_tokens(lazy_request)
        assert len(delta.logprobs) == 100
        assert delta.text == engine.parts.tokenizer.decode(delta.token_ids)
        with pytest.raises(StopAsyncIteration):
            await anext(lazy)

    run(scenario)


def test_requests_beyond_the_queue_limit_are_refused_with_a_hint():
    async def scenario(engine):
        executor_of(engine.parts).gate.clear()
        streams = [engine.submit(request(engine, f"r{i}")) for i in range(8)]
        executor_of(engine.parts).gate.set()
        refused = 0
        for stream in streams:
            try:
                async for _ in stream:
                    pass
            except QueueFullError as error:
                refused += 1
                hint_s = error.retry_after_s
                assert hint_s > 0
        assert 0 < refused < 8

    run(scenario, max_num_seqs=1, max_num_queued_reqs=2)


def test_Q7_a_request_that_waits_too_long_expires():
    async def scenario(engine):
        executor_of(engine.parts).gate.clear()
        first, second = request(engine, "a"), request(engine, "b")
        running = engine.submit(first)
        await asyncio.sleep(0.05)
        waiting = engine.submit(second)
        await asyncio.sleep(0.3)
        executor_of(engine.parts).gate.set()
        with pytest.raises(QueueFullError, match=r"waited for 0.2 s \(--set max_queue_s\)") as caught:
            await anext(waiting)
        assert caught.value.retry_after_s > 0
        got = [token async for output in running for token in output.token_ids]
        assert got == expected_tokens(first)  # older than that too, but it has begun
        assert len(await collect(engine, request(engine, "c"))) == 8

    run(scenario, max_num_seqs=1, max_queue_s=0.2)


def test_Q7_without_a_flag_no_request_waits_for_more_than_ten_minutes():
    clock = JumpingClock()

    async def scenario():
        engine = AsyncEngine(toy_parts(max_num_seqs=1, clock=clock))
        executor_of(engine.parts).gate.clear()
        first = request(engine, "a", params={"max_tokens": 30})
        running = engine.submit(first)
        waiting = engine.submit(request(engine, "b"))
        await asyncio.sleep(0.05)
        clock.ahead_s += 601.0
        executor_of(engine.parts).gate.set()
        with pytest.raises(QueueFullError, match=r"waited for 600 s \(--set max_queue_s\)"):
            await anext(waiting)
        assert [token async for output in running for token in output.token_ids] == expected_tokens(first)
        await engine.shutdown()

    asyncio.run(scenario())


def test_a_step_that_never_ends_does_not_hold_up_shutdown():
    async def scenario():
        engine = AsyncEngine(toy_parts(), step_timeout_s=0.3)
        executor_of(engine.parts).gate.clear()
        stream = engine.submit(request(engine))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(engine.shutdown(0.05), 5)
        assert "has been running" in str(engine.dead_reason)
        with pytest.raises(EngineDeadError):
            await anext(stream)
        executor_of(engine.parts).gate.set()
        engine._thread.join(5)
        assert not engine._thread.is_alive()

    asyncio.run(scenario())


def test_E4_a_step_that_never_ends_ends_the_engine(caplog):
    async def scenario():
        engine = AsyncEngine(toy_parts(), step_timeout_s=0.3)
        executor = executor_of(engine.parts)
        assert len(await collect(engine, request(engine, "fine"))) == 8
        await asyncio.sleep(0.5)  # nothing to do is no step
        executor.gate.clear()
        streams = [engine.submit(request(engine, f"r{i}")) for i in range(3)]
        reason = await asyncio.wait_for(engine.wait_ended(), 30)
        assert reason == engine.dead_reason
        # On a loaded machine the limit grows with the times of steps.
        assert re.search(r"a step has been running for 0\.\d+ s \(--set step_timeout\)", str(reason))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="has been running"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError):
            engine.submit(request(engine, "late"))
        assert engine.num_open == 0
        await engine.stats()  # does not wait for the step
        executor.gate.set()  # it ends after all: nobody hears of it
        engine._thread.join(5)
        assert not engine._thread.is_alive()
        await engine.shutdown()

    asyncio.run(scenario())
    assert "gate.wait" in caplog.text  # where it was


# --- errors --------------------------------------------------------------------------------------------------------


def test_D7_a_slow_device_is_not_taken_for_one_that_hangs(caplog):
    async def scenario():
        engine = AsyncEngine(toy_parts(step_s=0.05), step_timeout_s=0.1)
        executor = executor_of(engine.parts)
        assert len(await collect(engine, request(engine, "a", params={"max_tokens": 10}))) == 10
        assert engine._watchdog.limit_s >= 20 * 0.05
        executor.gate.clear()
        stream = engine.submit(request(engine, "b"))
        await asyncio.sleep(0.4)  # four times what is allowed at the start
        executor.gate.set()
        assert len([token async for output in stream for token in output.token_ids]) == 8
        assert engine.dead_reason is None
        executor.gate.clear()  # and one that hangs is still found
        stream = engine.submit(request(engine, "c"))
        with pytest.raises(EngineDeadError, match="has been running for"):
            async for _ in stream:
                pass
        executor.gate.set()
        engine._thread.join(5)

    asyncio.run(scenario())
    assert "has been running" in caplog.text


def test_D7_E4_the_limit_is_20_times_what_99_of_100_steps_took(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("apt_jax.frontend.watchdog.time.monotonic", lambda: now_s)
    watchdog = Watchdog(threading.current_thread(), 30.0, lambda started_s, message: None)

    def steps(count: int, seconds: float) -> float:
        nonlocal now_s
        for _ in range(count):
            watchdog.restart()
            now_s += seconds
            watchdog.end_step()
            watchdog.pause()
            now_s += 100.0  # nothing to do is no step
        return watchdog.limit_s

    assert watchdog.limit_s == 30.0
    assert steps(10, 0.02) == 30.0
    assert steps(1, 29.0) == 30.0  # a single hiccup
    assert steps(500, 2.0) == pytest.approx(40.0)
    assert steps(5, 10.0) == pytest.approx(40.0)
    assert steps(1, 10.0) == pytest.approx(200.0)  # now they are more than one in a hundred
    assert steps(512, 0.02) == 30.0
    parts = toy_parts()
    parts.engine.costs = StepCosts(prefill_base_s=1.0, prefill_per_token_s=0.5)  # 33 s for the 64 tokens of a full step
    engine = AsyncEngine(parts, step_timeout_s=30.0)
    assert engine._watchdog.limit_s == pytest.approx(20 * 33.0)  # before the first step
    engine.close()
    assert Watchdog(threading.current_thread(), None, lambda started_s, message: None).limit_s == float("inf")


def test_what_can_never_fit_is_refused_by_the_engine_too():
    async def scenario(engine):
        limits = dataclasses.replace(engine.parts.limits, max_pool_tokens=None)
        big = build_request(
            limits,
            engine.parts.tokenizer,
            prompt="x" * 100,
            params={"max_tokens": 100},
            arrival_s=0.0,
        )
        with pytest.raises(InvalidRequestError, match="blocks"):
            await anext(engine.submit(big))
        assert executor_of(engine.parts).num_steps == 0

    run(scenario, num_blocks=20)


BAD_REQUESTS = {
    "R1_empty_prompt": ({"prompt": ""}, "prompt"),
    "R1_empty_ids": ({"prompt_token_ids": []}, "prompt_token_ids"),
    "R2_prompt_longer_than_the_context": ({"prompt": "x" * 300}, "prompt"),
    "R2_max_tokens_past_the_context": ({"params": {"max_tokens": 256}}, "max_tokens"),
    "R3_never_fits_the_pool": ({"prompt": "x" * 200}, "max_tokens"),
    "R4_id_past_the_vocabulary": ({"prompt_token_ids": [259]}, "prompt_token_ids[0]"),
    "R4_negative_id": ({"prompt_token_ids": [5, -1]}, "prompt_token_ids[1]"),
    "R8_nan_sampling_values": ({"params": {"temperature": float("nan")}}, "temperature"),
    "R8_infinite_sampling_values": ({"params": {"min_p": float("inf")}}, "min_p"),
    "R8_negative_sampling_values": ({"params": {"top_p": -0.5}}, "top_p"),
    "R9_max_tokens_0": ({"params": {"max_tokens": 0}}, "max_tokens"),
    "R9_min_tokens_above_max_tokens": ({"params": {"min_tokens": 17}}, "min_tokens"),
    "R10_17_stop_strings": ({"params": {"stop": ["a"] * 17}}, "stop"),
    "R14_a_flag_for_a_number": ({"params": {"max_tokens": True}}, "max_tokens"),
    "R14_an_unknown_parameter": ({"params": {"best_of": 2}}, "best_of"),
    "R15_invalid_utf8": ({"prompt": "a\udcff"}, "prompt"),
    "R20_request_id_with_a_line_break": ({"request_id": "a\nb"}, "request_id"),
    "R24_nan_objective": ({"slo_ttft_ms": float("nan")}, "slo_ttft_ms"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_input_allocates_nothing_and_a_bystander_goes_on(case):
    fields, field = BAD_REQUESTS[case]
    if "prompt_token_ids" not in fields:
        fields = {"prompt": "hello", **fields}

    async def scenario(engine):
        executor = executor_of(engine.parts)
        bystander = request(engine, "bystander", params={"max_tokens": 12})
        executor.gate.clear()
        task = asyncio.create_task(collect(engine, bystander))
        await until(lambda: engine.parts.engine.num_live == 1)
        with pytest.raises(InvalidRequestError) as caught:
            engine.parts.build_request(**fields)
        assert caught.value.field == field
        assert "\n" not in str(caught.value)
        assert engine.num_open == engine.parts.engine.num_live == 1
        executor.gate.set()
        assert await task == expected_tokens(bystander)
        assert (await engine.stats()).finished == {"length": 1}

    run(scenario, num_blocks=40)


@pytest.mark.parametrize("seed", range(4))
def test_refused_cancelled_and_served_requests_at_once_leave_nothing(seed):
    """Whatever order the event loop and the engine's thread meet in, every stream ends once and every block returns."""
    rng = random.Random(seed)

    async def client(engine, number):
        req = request(
            engine,
            "x" * rng.randrange(1, 30),
            request_id=f"r{rng.randrange(12)}",
            params={"max_tokens": rng.randrange(1, 24), "logprobs": 2},
        )
        leave_after = rng.choice([None, None, 0, 1, 3])
        await asyncio.sleep(rng.random() * 0.05)
        outputs = engine.generate(req)
        seen, last = 0, None
        try:
            async for output in outputs:
                last = output
                seen += 1
                if seen == leave_after:
                    break
                await asyncio.sleep(rng.random() * 0.004)
        except (DuplicateRequestError, QueueFullError):
            assert last is None  # before the first output
            return "refused"
        finally:
            await outputs.aclose()
        assert last is not None
        tokens = last.outputs[0].token_ids
        assert tokens == expected_tokens(req)[: len(tokens)]
        assert last.outputs[0].text == engine.parts.tokenizer.decode(tokens) or not last.finished
        return "whole" if last.finished else "left"

    async def scenario(engine):
        endings = await asyncio.gather(*(client(engine, n) for n in range(60)))
        assert "whole" in endings
        await until(lambda: engine.parts.engine.num_live == 0)

    run(scenario, policy="apt", num_blocks=48, max_num_seqs=4, max_num_queued_reqs=6, step_s=0.001)


def test_E7_one_broken_request_ends_alone():
    def fault(batch):
        # Row 0 of the batch is not finite once; whoever it is ends, the rest go on.
        fault.steps += 1
        return Fault(kind=FaultKind.NOT_FINITE, row=0) if fault.steps == 3 else None

    fault.steps = 0

    async def scenario(engine):
        requests = [request(engine, "x" * n) for n in range(1, 5)]

        async def last(req):
            return [o async for o in engine.generate(req)][-1]

        outputs = await asyncio.gather(*(last(r) for r in requests))
        broken = [o for o in outputs if o.outputs[0].finish_reason == "error"]
        assert len(broken) == 1
        assert broken[0].error.startswith("numeric:")
        for req, output in zip(requests, outputs, strict=True):
            if output is not broken[0]:
                assert output.outputs[0].token_ids == expected_tokens(req)

    run(scenario, fault=fault, debug=False)


def test_E1_E5_a_failing_assembler_ends_one_request():
    async def scenario(engine):
        assembler = engine.parts.assembler
        good, bad = request(engine, "good"), request(engine, "bad")
        delta = assembler.delta

        def failing(output):
            if output.request is bad and output.num_outputs == 3:
                delta(output)
                raise ValueError("planted")
            return delta(output)

        assembler.delta = failing
        task = asyncio.create_task(collect(engine, good))
        with pytest.raises(AptJaxError, match="assembled"):
            await collect(engine, bad)
        assert await task == expected_tokens(good)
        assembler.delta = delta

    run(scenario)


def test_P9_engine_death_ends_every_stream_and_refuses_new_requests():
    async def scenario(engine):
        tasks = [asyncio.create_task(collect(engine, request(engine, "x" * n))) for n in (1, 2, 3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert not isinstance(result, EngineClosedError)
        assert "ended" in await engine.wait_ended()
        assert engine.dead_reason
        assert not engine.is_serving
        with pytest.raises(EngineDeadError):
            engine.submit(request(engine))
        assert (await engine.stats()).step_failures >= 2

    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 4 else None

    fault.steps = 0
    run(scenario, fault=fault, debug=False)


def test_E6_an_error_of_the_loop_itself_is_seen_by_all():
    async def scenario(engine):
        def broken():
            raise RuntimeError("planted")

        executor_of(engine.parts).gate.clear()
        stream = engine.submit(request(engine))
        engine.parts.engine.step = broken
        executor_of(engine.parts).gate.set()
        with pytest.raises(EngineDeadError, match="internal"):
            [delta async for delta in stream]
        assert "planted" not in engine.dead_reason

    run(scenario)


# --- shutdown ------------------------------------------------------------------------------------------------------


def test_H1_drain_lets_open_requests_end():
    async def scenario(engine):
        req = request(engine, params={"max_tokens": 40})
        task = asyncio.create_task(collect(engine, req))
        await until(lambda: engine.parts.engine.num_live == 1)
        ending = asyncio.create_task(engine.shutdown(drain_s=30))
        await until(lambda: not engine.is_serving)
        with pytest.raises(EngineClosedError):
            engine.submit(request(engine))
        assert await task == expected_tokens(req)
        await ending
        assert engine.dead_reason is None

    run(scenario, step_s=0.002)


def test_H1_what_does_not_end_in_time_is_cut_off():
    async def scenario(engine):
        task = asyncio.create_task(collect(engine, request(engine, params={"max_tokens": 200})))
        await until(lambda: engine.parts.engine.num_live == 1)
        await engine.shutdown(drain_s=0.05)
        with pytest.raises(EngineClosedError):
            await task
        assert not engine._thread.is_alive() or engine._thread.join(5) is None

    run(scenario, step_s=0.01)


def test_shutdown_twice_and_when_idle():
    async def scenario(engine):
        await engine.shutdown(5)
        await engine.shutdown(0)
        assert await engine.wait_ended() is None
        assert (await engine.stats()).num_running == 0

    run(scenario)


def test_H2_a_second_shutdown_shortens_the_wait():
    async def scenario(engine):
        task = asyncio.create_task(collect(engine, request(engine, params={"max_tokens": 200})))
        await until(lambda: engine.parts.engine.num_live == 1)
        slow = asyncio.create_task(engine.shutdown(30))
        await asyncio.sleep(0)
        await engine.shutdown(0)
        await slow
        with pytest.raises(EngineClosedError):
            await task

    run(scenario, step_s=0.01)


def test_a_reader_whose_event_loop_is_gone_does_not_stop_the_others():
    parts = toy_parts(step_s=0.005)
    held: list[AsyncEngine] = []

    async def start():
        engine = AsyncEngine(parts)
        held.append(engine)
        engine.submit(request(engine, params={"max_tokens": 200}))
        await asyncio.sleep(0.02)

    asyncio.run(start())  # closes its loop with the stream unread
    engine = held[0]

    async def second():
        req = request(engine, "second")
        assert await collect(engine, req) == expected_tokens(req)
        await until(lambda: engine.parts.engine.num_live == 0)

    asyncio.run(second())
    engine.close()
    assert_clean(parts)


def test_calls_run_in_the_loop_thread():
    async def scenario(engine):
        name = await asyncio.wrap_future(engine.call(lambda: threading.current_thread().name))
        assert name == "apt-jax-engine"
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(engine.call(lambda: 1 // 0))

    run(scenario)


def test_many_opened_and_cancelled_leave_nothing():
    async def scenario(engine):
        async def one(number: int) -> None:
            outputs = engine.generate(request(engine, f"r{number}", params={"max_tokens": 50}))
            async for output in outputs:
                if len(output.outputs[0].token_ids) > number % 7:
                    break
            await outputs.aclose()

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(n) for n in range(start, start + 50)))

    run(scenario)


class Notes:
    """An observer that remembers, and fails once."""

    def __init__(self) -> None:
        self.reasons: dict[str, str | None] = {}
        self.refusals: list[str] = []

    def ended(self, delta) -> None:
        self.reasons[delta.request.request_id] = delta.finish_reason
        if delta.request.request_id == "done":
            raise ValueError("of the observer alone")

    def refused(self, request) -> None:
        self.refusals.append(request.request_id)


def test_an_observer_is_told_of_every_request_once(caplog):
    notes = Notes()

    async def whole() -> None:
        engine = AsyncEngine(toy_parts(step_s=0.002, max_num_queued_reqs=1), notes)
        assert await collect(engine, request(engine, request_id="done"))
        long = {"max_tokens": 200}
        left = engine.submit(request(engine, request_id="left", params=long))
        await anext(left)
        left.cancel()
        late = engine.parts.clock.now_s() + 0.03
        with pytest.raises(TimeoutError):
            async for _ in engine.submit(request(engine, request_id="late", params=long), deadline_s=late):
                pass
        executor_of(engine.parts).gate.clear()
        streams = [engine.submit(request(engine, request_id=f"r{i}")) for i in range(3)]
        executor_of(engine.parts).gate.set()
        for stream in streams:
            with contextlib.suppress(QueueFullError):
                async for _ in stream:
                    pass
        cut = engine.submit(request(engine, request_id="cut", params=long))
        await anext(cut)
        await engine.shutdown()
        with pytest.raises(EngineClosedError):
            async for _ in cut:
                pass

    asyncio.run(asyncio.wait_for(whole(), 60))
    assert notes.reasons.items() >= {"done": "length", "left": "abort", "late": "abort", "cut": "abort"}.items()
    served = {name for name in notes.reasons if name.startswith("r")}
    assert served | set(notes.refusals) == {"r0", "r1", "r2"}
    assert len(served) + len(notes.refusals) == 3
    assert notes.refusals
    assert "the observer failed" in caplog.text
