"""Steps that fail, memory that is not there, threads that end: what is lost, what goes on, and who learns of it."""

import asyncio
import ctypes
import dataclasses
import logging
import time
from collections.abc import Callable

import jax
import pytest

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.engine import FAILURE_WINDOW_S, OOM_BACKOFF_S
from apt_jax.engine.timeline import TimelineLog
from apt_jax.errors import ConfigError, EngineDeadError, InvalidRequestError
from apt_jax.executor import is_device_lost, is_out_of_memory
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.request import EngineRequest
from tests.support.faults import JumpingClock, StepFault, fail_allocations, inject, out_of_memory
from tests.support.small_models import write_shallow_model
from tests.support.toy_serving import assert_clean, executor_of, expected_tokens, toy_parts

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet():
    """Planted faults need no log."""
    logger = logging.getLogger("apt_jax.engine")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def request_of(parts: EngineComponents, name: str, prompt: str, max_tokens: int) -> EngineRequest:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return parts.build_request(prompt=prompt, params=params, request_id=name)


def run_all(parts: EngineComponents, requests: list[EngineRequest]) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and finish reason of each, all served at once; nothing may be left."""
    got: dict[str, tuple[list[int], str | None]] = {r.request_id: ([], None) for r in requests}
    for request in requests:
        parts.engine.add_request(request)
    while parts.engine.has_work and parts.engine.dead_reason is None:
        for output in parts.engine.step():
            delta = parts.assembler.delta(output)
            tokens, _ = got[output.request_id]
            got[output.request_id] = (tokens + delta.token_ids, output.finish_reason)
    if parts.engine.dead_reason is None:
        assert_clean(parts)
    return got


# --- a real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["shallow", pytest.param("bundled", marks=pytest.mark.slow)])
def model(request, tmp_path_factory) -> EngineComponents:
    """A model with room for a few requests; programs are compiled as they are needed."""
    shallow = request.param == "shallow"
    config = EngineConfig(
        model=str(write_shallow_model(tmp_path_factory.mktemp("model") / "tiny-opt")) if shallow else "tiny-opt",
        max_model_len=64,
        cache=CacheConfig(block_size=8, num_blocks_override=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return build_engine(config, warm_up=False, calibrate=False)


def fresh(model: EngineComponents, **fields) -> EngineComponents:
    """Another engine over the model's executor."""
    parts = build_components(
        model.config,
        model.executor,
        kinds=model.engine.kinds,
        vocab_size=model.limits.vocab_size,
        max_model_len=model.limits.max_model_len,
        tokenizer=model.tokenizer,
        eos_token_ids=model.limits.eos_token_ids,
        **fields,
    )
    return parts


PROMPTS = ("Once", "The-old-dog", "A-little-girl", "One-day")


@pytest.fixture(scope="module")
def reference(model) -> dict[str, tuple[list[int], str | None]]:
    parts = fresh(model)
    requests = [request_of(parts, p, p, 8) for p in PROMPTS]
    return {r.request_id: run_all(fresh(model), [r])[r.request_id] for r in requests}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "fault",
    [
        StepFault("raise"),
        StepFault("raise", "after"),
        StepFault("raise", "result"),
        StepFault("destroy"),
        StepFault("short"),
        StepFault("memory"),
        StepFault("memory", "result"),
    ],
    ids=lambda fault: f"{fault.what} {fault.when}",
)
@pytest.mark.parametrize("at", [0, 4])
def test_E2_tokens_of_a_real_model_are_the_same_after_a_failed_step(model, reference, fault, at):
    parts = fresh(model)
    faulty = inject(parts, {at: fault})
    got = run_all(parts, [request_of(parts, p, p, 8) for p in PROMPTS])
    assert got == reference
    assert faulty.num_resets == parts.engine.stats().step_failures == 1
    assert parts.engine.stats().num_preemptions == 0


def test_E7_E8_a_bad_row_of_a_real_model_ends_alone(model, reference):
    for what in ("nan", "token"):
        parts = fresh(model)
        inject(parts, {4: StepFault(what, row=1)})
        got = run_all(parts, [request_of(parts, p, p, 8) for p in PROMPTS])
        broken = [p for p in PROMPTS if got[p][1] == "error"]
        assert len(broken) == 1
        assert all(got[p] == reference[p] for p in PROMPTS if p not in broken)


def test_the_old_pool_is_gone_before_there_is_a_new_one(model):
    executor = model.executor
    assert isinstance(executor, JaxExecutor)
    old = executor.runner.pools
    executor.reset()  # also where the step that failed had not taken it
    assert all(pool.is_deleted() for pool in old)
    assert not any(pool.is_deleted() for pool in executor.runner.pools)


# --- no memory for a step ------------------------------------------------------------------------------------------


def test_what_is_want_of_memory():
    assert is_out_of_memory(out_of_memory())
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


@pytest.mark.parametrize("when", ["before", "after", "result"])
def test_D1_after_a_step_without_memory_steps_are_half_as_large_for_a_while(when, caplog):
    clock = JumpingClock()
    parts = toy_parts(clock=clock, debug=True, num_blocks=2048, max_num_seqs=16)
    faulty = inject(parts, {0: StepFault("memory", when)})
    with caplog.at_level("ERROR", "apt_jax.engine"):
        requests = [request_of(parts, f"r{i}", "x" * 60, 4) for i in range(12)]
        got = run_all(parts, requests)
    assert all(got[r.request_id] == (expected_tokens(r), "length") for r in requests)
    first = 1 if when != "result" else 2  # with overlap the next one was on its way
    assert max(tokens for _, tokens in faulty.batches[first:]) == faulty.batches[0][1] // 2
    for flag in ("--max-num-batched-tokens", "--max-num-seqs", "--device-memory-utilization"):
        assert flag in caplog.text
    clock.ahead_s += OOM_BACKOFF_S
    done = len(faulty.batches)
    run_all(parts, [request_of(parts, f"later{i}", "y" * 60, 2) for i in range(4)])
    assert max(tokens for _, tokens in faulty.batches[done:]) == faulty.batches[0][1]


def test_D1_a_second_time_within_a_minute_ends_the_engine_and_later_halves_again():
    clock = JumpingClock()
    parts = toy_parts(clock=clock, debug=False)
    inject(parts, {1: StepFault("memory"), 3: StepFault("memory")})
    got = run_all(parts, [request_of(parts, "one", "hello", 20)])
    assert got["one"][1] == "error"
    assert "twice within 60 s" in str(parts.engine.dead_reason)

    parts = toy_parts(clock=clock)
    faulty = inject(parts, {0: StepFault("memory"), 10: StepFault("memory")})
    first = request_of(parts, "one", "x" * 60, 4)
    assert run_all(parts, [first])["one"] == (expected_tokens(first), "length")
    clock.ahead_s += FAILURE_WINDOW_S + 1
    faulty.plan = {faulty.num_steps: StepFault("memory")}
    second = request_of(parts, "two", "y" * 60, 4)
    assert run_all(parts, [second])["two"] == (expected_tokens(second), "length")
    assert parts.engine.view().max_num_batched_tokens == 16  # half of half of the prompt of 61 is less than the least


def test_D1_steps_stay_large_enough_for_prompts_to_go_on():
    clock = JumpingClock()
    parts = toy_parts(clock=clock)
    faulty = inject(parts, {})
    for i in range(4):
        faulty.plan = {faulty.num_steps + 1: StepFault("memory")}  # a decode step
        request = request_of(parts, f"r{i}", "hello", 4)
        assert run_all(parts, [request])[f"r{i}"] == (expected_tokens(request), "length")
        clock.ahead_s += FAILURE_WINDOW_S + 1
    view = parts.engine.view()
    assert view.max_num_batched_tokens == 16


def test_D3_a_device_that_is_lost_ends_the_engine_at_once():
    """Nothing is tried again in this process: neither a step nor the pool."""
    parts = toy_parts()
    executor = inject(parts, {3: StepFault("lost")})
    requests = [request_of(parts, f"r{i}", "hello", 12) for i in range(2)]
    got = run_all(parts, requests)
    assert all(reason == "error" for _, reason in got.values())
    assert "only a new process" in str(parts.engine.dead_reason)
    assert (executor.num_steps, executor.num_resets) == (4, 0)
    with pytest.raises(EngineDeadError):
        parts.engine.step()


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("INTERNAL: CUDA error: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", True),
        ("INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", True),
        ("INTERNAL: hipErrorIllegalAddress", True),
        ("INTERNAL: device-side assert triggered", True),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes", False),
        ("INVALID_ARGUMENT: the assertion of a shape", False),
    ],
)
def test_D3_errors_that_a_device_does_not_survive(message, is_lost):
    assert is_device_lost(RuntimeError(message)) == is_lost
    assert not is_device_lost(ValueError(message))


# --- no memory at the start ----------------------------------------------------------------------------------------


def test_D2_a_pool_that_is_too_large_is_one_line_with_bytes_and_flags():
    config = EngineConfig(model="tiny-opt", cache=CacheConfig(num_blocks_override=1 << 40))
    with pytest.raises(ConfigError) as caught:
        build_engine(config, warm_up=False, calibrate=False)
    assert_says(caught.value, "--num-blocks-override", "--device-memory-utilization", f"{1 << 40} blocks")


def assert_says(error: Exception, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert "bytes" in text
    for part in parts:
        assert part in text


def test_D2_no_memory_for_a_single_block_is_found_before_anything_is_allocated(model, monkeypatch):
    made = []
    monkeypatch.setattr(JaxExecutor, "allocate", lambda self: made.append(self))
    monkeypatch.setattr("apt_jax.executor.pool_memory.free_memory_bytes", lambda device: 1000)
    config = dataclasses.replace(model.config, cache=CacheConfig(block_size=8))
    with pytest.raises(ConfigError) as caught:
        build_engine(config, warm_up=False, calibrate=False)
    assert_says(caught.value, "1,000 bytes of memory are free", "--device-memory-utilization")
    assert not made


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("load", ("the weights", "--dtype", "--quantization")),
        ("make", ("the weights in the executor's layout", "--dtype")),
        ("warm up", ("--max-num-seqs", "--max-num-batched-tokens", "--device-memory-utilization")),
    ],
)
def test_D2_no_memory_while_it_starts_names_what_to_change(model, monkeypatch, where, says):
    def fail(*args, **kwargs):
        raise out_of_memory()

    if where == "load":
        monkeypatch.setattr("apt_jax.models.load_model", fail)
    elif where == "make":
        monkeypatch.setattr("apt_jax.executor.jax_executor.by_layers", fail)
    else:
        monkeypatch.setattr(JaxExecutor, "warm_up", fail)
    with pytest.raises(ConfigError) as caught:
        build_engine(model.config, calibrate=False)
    assert_says(caught.value, f"{1 << 50:,} bytes were requested", *says)


def test_D2_a_failure_of_another_kind_stays_what_it_is(model, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("another")

    monkeypatch.setattr("apt_jax.executor.jax_executor.by_layers", fail)
    with pytest.raises(RuntimeError, match="another"):
        build_engine(model.config, warm_up=False, calibrate=False)


def test_D4_the_cache_is_allocated_before_the_first_request_and_kept(model):
    """Another process that takes memory later takes none of it."""
    executor = model.executor

    def sizes() -> list[tuple[tuple[int, ...], str]]:
        pools = executor.runner.pools
        assert not any(pool.is_deleted() for pool in pools)
        return [(pool.shape, str(pool.dtype)) for pool in pools]

    parts = fresh(model)
    before = sizes()
    held = sum(pool.nbytes for pool in executor.runner.pools)
    assert held >= executor.num_blocks * executor.block_size * model.model_config.hidden_size
    run_all(parts, [request_of(parts, p, p, 8) for p in PROMPTS])
    assert sizes() == before


def test_M12_a_start_says_where_the_longest_request_does_not_fit(model, caplog):
    def start(num_blocks: int) -> str:
        caplog.clear()
        config = dataclasses.replace(model.config, cache=CacheConfig(block_size=8, num_blocks_override=num_blocks))
        parts = build_engine(config, warm_up=False, calibrate=False)
        assert parts.limits.max_model_len == 64
        assert (parts.limits.max_pool_tokens or 0) >= 8  # one block of each kind at least
        return caplog.text

    assert "the cache holds only 24 tokens, max_model_len is 64: longer requests are rejected" in start(3)
    assert "room for" not in start(8)
    with pytest.raises(ConfigError, match="num_blocks_override=1 must"):
        CacheConfig(num_blocks_override=1)


@pytest.mark.parametrize("policy", ["fcfs", "apt", "fcfs-hybrid"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_M12_pools_of_a_few_blocks_serve_what_fits_and_reject_the_rest(num_blocks, policy):
    served = rejected = 0
    for length in (1, 3, 4, 7):
        for max_tokens in (1, 4, 5):
            parts = toy_parts(num_blocks=num_blocks, max_num_seqs=2, policy=policy)
            fits = -(-(1 + length + max_tokens) // 4) <= num_blocks  # as layer inputs, with a token before the text
            if not fits:
                with pytest.raises(InvalidRequestError, match="cache"):
                    request_of(parts, "r", "x" * length, max_tokens)
                rejected += 1
                continue
            requests = [request_of(parts, f"r{i}", "x" * length, max_tokens) for i in range(3)]
            assert run_all(parts, requests) == {r.request_id: (expected_tokens(r), "length") for r in requests}
            served += 1
    assert served
    assert rejected or num_blocks == 3


# --- blocks that are lost --------------------------------------------------------------------------------------------


def test_M10_a_leak_of_one_block_is_found_by_the_first_idle_engine():
    """As a server runs it, which recounts nothing."""
    parts = toy_parts(debug=False)
    pool = parts.engine.cache.pool
    free = pool.free
    run_all(parts, [request_of(parts, "before", "hello", 4)])
    pool.free = lambda ids: free(ids[:-1])  # type: ignore[method-assign]
    run_all(parts, [request_of(parts, "leaks", "hello", 4)])
    assert parts.engine.dead_reason == "internal error: CacheIntegrityError"


# --- blocks that are not there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_M3_a_failed_allocation_takes_nothing_and_the_request_goes_on_later(overlap):
    parts = toy_parts(overlap=overlap)
    asked = []

    def fails(num: int) -> bool:
        asked.append(num)
        return len(asked) % 3 == 0

    fail_allocations(parts.engine, fails)
    requests = [request_of(parts, f"r{i}", "x" * (5 + 3 * i), 12) for i in range(6)]
    got = run_all(parts, requests)
    assert all(got[r.request_id] == (expected_tokens(r), "length") for r in requests)
    assert parts.engine.stats().num_deferred_requests > 0


# --- clocks --------------------------------------------------------------------------------------------------------


def test_H9_jumps_of_the_wall_clock_change_nothing(monkeypatch):
    wall, jumps = time.time, [3600.0, -3600.0, 0.0]

    async def scenario():
        engine = AsyncEngine(toy_parts(step_s=0.002), step_timeout_s=5.0)
        now_s = engine.parts.clock.now_s
        requests = [request_of(engine.parts, f"r{i}", "x" * i, 40) for i in range(1, 4)]
        streams = [engine.submit(r, deadline_s=now_s() + 60) for r in requests]
        got: list[list[int]] = []
        for stream, jump_s in zip(streams, jumps, strict=True):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: wall() + jump_s)
            got.append([token async for delta in stream for token in delta.token_ids])
        assert got == [expected_tokens(r) for r in requests]
        assert engine.dead_reason is None
        await engine.shutdown()
        assert_clean(engine.parts)

    asyncio.run(asyncio.wait_for(scenario(), 60))


# --- threads that end ----------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Nothing in the engine handles it; a `SystemExit` of a policy is replaced by `fcfs`."""


def end_thread(engine: AsyncEngine) -> None:
    """Raise in the engine's thread, wherever it is."""
    ident = ctypes.c_ulong(engine._thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Crash)) == 1


def by_executor(engine: AsyncEngine) -> None:
    inject(engine.parts, lambda number, batch: StepFault("exit"))


def by_result(engine: AsyncEngine) -> None:
    inject(engine.parts, lambda number, batch: StepFault("exit", "result"))


def by_assembler(engine: AsyncEngine) -> None:
    def ends(output):
        raise SystemExit

    engine.parts.assembler.delta = ends


def by_command(engine: AsyncEngine) -> None:
    def ends():
        raise SystemExit

    engine.call(ends)


@pytest.mark.parametrize("kill", [by_executor, by_result, by_assembler, by_command, end_thread])
def test_E5_E6_a_thread_that_is_ended_is_the_end_of_the_engine_and_all_learn_of_it(kill):
    """An input thread of its own, or one that detokenises, there is none: all of it is the engine's thread."""

    async def scenario():
        parts = toy_parts(step_s=0.01)
        engine = AsyncEngine(parts)
        streams = [engine.submit(request_of(parts, f"r{i}", "x", 200)) for i in range(3)]
        await anext(streams[0])
        kill(engine)
        started_s = time.monotonic()
        assert "internal error" in str(await asyncio.wait_for(engine.wait_ended(), 10))
        assert time.monotonic() - started_s < 2
        for stream in streams:
            with pytest.raises(EngineDeadError, match="internal error"):
                async for _ in stream:
                    pass
        assert not engine.is_serving
        assert engine.num_open == 0
        with pytest.raises(EngineDeadError):
            engine.submit(request_of(parts, "late", "x", 2))
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_E12_a_failure_in_the_error_path_leaves_no_caller_waiting():
    """The engine dies, and then even giving back its requests fails."""

    async def scenario():
        parts = toy_parts(step_s=0.005, debug=False)
        engine = AsyncEngine(parts)

        def broken(*args, **kwargs):
            raise RuntimeError("planted")

        streams = [engine.submit(request_of(parts, f"r{i}", "x", 200)) for i in range(3)]
        await anext(streams[0])
        executor_of(parts).gate.clear()
        recovery = parts.engine._recovery
        recovery.recover = parts.engine.abort = recovery.end = broken  # type: ignore[method-assign]
        inject(parts, lambda number, batch: StepFault("raise"))
        executor_of(parts).gate.set()
        late = engine.submit(request_of(parts, "late", "x", 200))
        late.cancel()
        assert "internal error" in str(await asyncio.wait_for(engine.wait_ended(), 10))
        for stream in streams:
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
        with pytest.raises(Exception, match=r"ended|cancelled"):
            await asyncio.wait_for(anext(late), 10)
        assert engine.num_open == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_E12_what_was_asked_for_and_not_yet_heard_is_answered():
    """One command ends the thread, those behind it in the inbox are told all the same."""

    async def scenario():
        parts = toy_parts()
        engine = AsyncEngine(parts)

        def ends():
            raise SystemExit

        executor_of(parts).gate.clear()
        first = engine.submit(request_of(parts, "first", "x", 5))
        while not parts.engine.num_live:
            await asyncio.sleep(0.002)
        fatal = engine.call(ends)
        behind = engine.submit(request_of(parts, "behind", "x", 5))
        stats = engine.call(parts.engine.stats)
        executor_of(parts).gate.set()
        for stream in (first, behind):
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
        with pytest.raises(SystemExit):
            fatal.result(10)
        assert stats.result(10).num_rejected == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


# --- what is told of it --------------------------------------------------------------------------------------------


def logged(parts: EngineComponents) -> tuple[TimelineLog, Callable[[EngineRequest], None]]:
    """A log of all decisions, and how to add a request to both."""
    engine = parts.engine
    log = TimelineLog(16, max_num_seqs=engine.max_num_seqs, blocks_needed=engine.min_blocks_for)
    engine.after_step = log.note

    def add(request: EngineRequest) -> None:
        engine.add_request(request)
        log.begin(request, engine.num_decisions)

    return log, add


def events(log: TimelineLog, name: str) -> list[str]:
    told = log.of(name)
    assert told is not None
    return [event.event for event in told.events]


def drain(parts: EngineComponents) -> None:
    while parts.engine.has_work:
        for output in parts.engine.step():
            parts.assembler.delta(output)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", [StepFault("raise"), StepFault("raise", "result")])
def test_the_loss_of_cache_is_recorded_once_per_request(overlap, fault):
    # A long prompt in chunks fills steps of its own under a policy that runs prefills alone.
    parts = toy_parts(overlap=overlap, policy="fcfs")
    log, add = logged(parts)
    add(request_of(parts, "holder", "hello", 30))
    for _ in range(4):
        for output in parts.engine.step():
            parts.assembler.delta(output)
    alone = []

    def plan(number, batch):
        if not alone and batch.num_tokens.size == 1 and batch.num_tokens[0] > 1:
            alone.append(number)
            return fault
        return None

    inject(parts, plan)
    add(request_of(parts, "new", "x" * 150, 3))
    drain(parts)
    assert alone, "no step without the holder of cache has failed"
    assert events(log, "holder").count("lost") == 1
    assert events(log, "new").count("lost") == 1
    lost = events(log, "holder").index("lost")
    assert "prefill" in events(log, "holder")[lost:]  # it is recomputed


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preemption_by_no_decision_is_told_with_the_next(overlap):
    parts = toy_parts(overlap=overlap)
    log, add = logged(parts)
    told = []
    note, parts.engine.after_step = log.note, lambda i: (told.append(i), log.note(i))[0]
    assert note == log.note
    add(request_of(parts, "one", "hello", 12))
    add(request_of(parts, "two", "hello", 12))
    for _ in range(4):
        for output in parts.engine.step():
            parts.assembler.delta(output)
    assert parts.engine.preempt("one")
    drain(parts)
    assert events(log, "one").count("preempted") == 1
    assert "preempted" not in events(log, "two")
    assert [i.number for i in told] == list(range(len(told)))
    assert sum(len(i.preempted) for i in told) == parts.engine.stats().num_preemptions == 1


def test_nobody_watches_nothing_is_kept():
    parts = toy_parts()
    parts.engine.add_request(request_of(parts, "one", "hello", 12))
    for _ in range(3):
        for output in parts.engine.step():
            parts.assembler.delta(output)
    parts.engine.preempt("one")
    assert parts.engine._recorder.preempted_between == []
    drain(parts)
