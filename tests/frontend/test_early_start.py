"""Background preparation: with a fake engine, and with a real executor that compiles no step."""

import concurrent.futures
import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.executor.compiling.buckets import SAMPLED
from apt_jax.executor.compiling.ready_programs import TRANSFERS, ProgramName
from apt_jax.frontend.components import Unprepared
from apt_jax.frontend.early_start import BackgroundPreparation
from apt_jax.request import SamplingParams
from apt_jax.sched import make_policy
from tests.executor.test_jax_executor import (
    GRAPHS,
    PROMPTS,
    Driver,
    few_programs,
    make_executor,
    reference_greedy,
)
from tests.support.host_executor import make_host_executor
from tests.support.paged_driver import draw_greedily
from tests.support.shared_serving import draw_requests, serve

WEIGHTS = np.arange(1 << 20)
GREEDY = SamplingParams(temperature=0.0)


@dataclasses.dataclass
class FakeProgram:
    name: ProgramName
    compiled: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None
    waits: threading.Event | None = None

    def compile(self) -> None:
        self.compiled.set()
        if self.waits is not None:
            self.waits.wait(10.0)
        if self.error is not None:
            raise self.error


class FakeEngine:
    """The part of `AsyncEngine` that is used here; its thread is the caller's."""

    def __init__(self, programs: Any) -> None:
        self.added: list[tuple[ProgramName, bool]] = []
        executor = SimpleNamespace(
            add_program=lambda p, last: self.added.append((p.name, last)),
            num_background_compilers=1,
            host_buffers=lambda: [(WEIGHTS.ctypes.data, WEIGHTS.nbytes)],
        )
        self.parts: Any = SimpleNamespace(
            unprepared=Unprepared(programs=programs, calibration_s=None), executor=executor, cost_model=None
        )
        self.failed: list[str] = []
        self.is_serving, self.dead_reason, self.num_open = True, None, 0

    def call(self, function: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(function())
        return future

    def listen(self, listener: Any) -> None:
        self.listener = listener

    def expect_steps(self) -> None:
        self.expected = self.parts.costs

    def fail(self, reason: str) -> None:
        self.failed.append(reason)


def _programs(count: int) -> list[FakeProgram]:
    return [FakeProgram(ProgramName("sample", 1 + n, SAMPLED)) for n in range(count)]


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_programs_are_added_one_by_one_in_their_order() -> None:
    programs = _programs(3)
    engine: Any = FakeEngine(programs)
    preparation = BackgroundPreparation(engine)
    preparation.start()
    _until(lambda: len(engine.added) == 3)
    assert engine.added == [(p.name, p is programs[-1]) for p in programs]
    assert preparation.stop()
    assert engine.failed == []


def test_a_program_that_cannot_be_compiled_ends_the_engine_with_its_reason() -> None:
    programs = _programs(3)
    programs[1].error = RuntimeError("no such instruction\nand more")
    engine: Any = FakeEngine(programs)
    preparation = BackgroundPreparation(engine)
    preparation.start()
    _until(lambda: engine.failed)
    assert engine.failed == ["background preparation failed: RuntimeError: no such instruction and more"]
    assert not programs[2].compiled.is_set()


def test_a_program_without_memory_is_tried_again_alone() -> None:
    programs = _programs(4)
    programs[1].error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 515 bytes")
    engine: Any = FakeEngine(programs)
    engine.parts.executor.num_background_compilers = 3
    fail, tried = programs[1].compile, []

    def fail_once() -> None:
        tried.append(1)
        if len(tried) == 1:
            fail()

    programs[1].compile = fail_once  # type: ignore[method-assign]
    preparation = BackgroundPreparation(engine)
    preparation.start()
    _until(lambda: len(engine.added) == 4)
    order = [programs[n].name for n in (0, 2, 3, 1)]
    assert engine.added == [(name, name is order[-1]) for name in order]
    assert preparation.stop()
    assert engine.failed == []


def test_serving_goes_on_without_a_program_that_memory_is_lacking_for(caplog: pytest.LogCaptureFixture) -> None:
    programs = _programs(3)
    programs[2].error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 515 bytes")
    engine: Any = FakeEngine(programs)
    engine.parts.executor.num_background_compilers = 2
    preparation = BackgroundPreparation(engine)
    with caplog.at_level("WARNING"):
        preparation.start()
        _until(lambda: caplog.messages)
    assert engine.added == [(p.name, False) for p in programs[:2]]  # never the last: steps must not run the third
    (line,) = caplog.messages
    assert "serving continues without 1 program" in line
    assert preparation.stop()
    assert engine.failed == []


def test_a_stop_does_not_wait_for_the_compiler() -> None:
    programs = _programs(2)
    programs[0].waits = threading.Event()
    engine: Any = FakeEngine(programs)
    preparation = BackgroundPreparation(engine)
    preparation.start()
    assert programs[0].compiled.wait(10.0)
    started = time.monotonic()
    assert not preparation.stop(0.05)
    assert time.monotonic() - started < 5.0
    programs[0].waits.set()
    _until(lambda: preparation.stop(0.05))
    assert engine.added == []
    assert engine.failed == []
    assert not programs[1].compiled.is_set()


def test_costs_are_measured_in_slices_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine([])
    cleared: list[int] = []
    engine.parts.unprepared = Unprepared(programs=[], calibration_s=1.0)
    engine.parts.engine = SimpleNamespace(
        has_work=False, cache=SimpleNamespace(clear_prefixes=lambda: cleared.append(1))
    )
    engine.has_arrivals, engine.num_open = False, 1
    measured: list[int] = []
    kept: list[Any] = []

    def measure(executor: Any, budget_s: float) -> Any:
        for n in range(6):
            measured.append(n)
            engine.has_arrivals = n % 2 == 1  # someone comes during every second one
            yield n / 6
        return "the model"

    monkeypatch.setattr("apt_jax.frontend.early_start._IDLE_S", 0.05)
    monkeypatch.setattr("apt_jax.frontend.early_start._POLL_S", 0.01)
    monkeypatch.setattr("apt_jax.executor.calibrate.calibration", measure)
    monkeypatch.setattr("apt_jax.executor.calibrate.program_shapes", lambda executor: None)
    monkeypatch.setattr("apt_jax.executor.calibrate.calibration_path", lambda executor: "where")
    monkeypatch.setattr("apt_jax.executor.calibrate.keep_calibration", lambda model, path: kept.append((model, path)))
    monkeypatch.setattr(
        "apt_jax.frontend.early_start.with_costs", lambda parts, model: SimpleNamespace(costs=model, cost_model=model)
    )
    seen: list[Any] = []
    preparation = BackgroundPreparation(engine, seen.append)
    preparation.start()
    time.sleep(0.3)
    assert measured == []  # a request is open
    engine.num_open = 0
    for slices in (1, 2, 3):
        _until(lambda slices=slices: len(measured) == 2 * slices)
        time.sleep(0.1)
        assert len(measured) == 2 * slices  # whoever came is served first
        engine.has_arrivals = False
    _until(lambda: seen)
    assert kept == [("the model", "where")]
    assert engine.listener is None
    assert engine.parts.costs == engine.expected == "the model"
    assert len(cleared) >= 6  # measuring overwrites cached prefixes
    assert preparation.stop()
    assert engine.failed == []


def test_nothing_to_prepare_is_no_thread() -> None:
    engine: Any = FakeEngine([])
    engine.parts.unprepared = None
    preparation = BackgroundPreparation(engine)
    preparation.start()
    assert preparation.stop()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, logprobs=2)])
def test_steps_have_the_same_tokens_and_compile_nothing_whatever_is_ready(params: SamplingParams) -> None:
    executor = few_programs(make_executor("kv", mixed=False, max_num_seqs=4))
    assert executor.can_start_early
    others = executor.warm_up_first()
    assert executor.compilations == 0
    driver = Driver(executor)
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt, KV)
    driver.step({slot: len(prompt) for slot, prompt in PROMPTS.items()}, params)
    for number in range(5):
        if number < len(others):
            others[number].compile()
            executor.add_program(others[number], last=False)
        driver.step(dict.fromkeys(PROMPTS, 1), params)
    assert executor.compilations == 0
    for slot, prompt in PROMPTS.items():
        assert driver.tokens[slot] == reference_greedy(prompt, 6)
    assert not executor.ready.is_complete
    assert np.isin(executor.ready.sizes.decode, executor.buckets.decode).all()


@pytest.mark.in_turn(10, group="executors with models")
def test_without_branches_general_programs_serve_until_all_others_are_ready() -> None:
    """As on a GPU, whose programs are compiled for the cache kinds of a step too."""
    executor = make_executor("hybrid", mixed=True, ops=GRAPHS, attention="absorb", max_num_seqs=4)
    executor.buckets.prefill = executor.buckets.prefill[-1:]
    executor.buckets.decode = executor.buckets.masked = [4]
    executor.buckets.copies = executor.buckets.copies[-1:]
    assert executor.can_start_early
    others = executor.warm_up_first()
    kinds = [name.kind for name in executor.ready.first()]
    assert kinds.count("fused") == 1
    assert {program.name.kind for program in others} >= {"fused", "mixed", "sample"}
    driver = Driver(executor)
    sampled = SamplingParams(temperature=0.8, seed=5, logprobs=2)

    def serve(kind_of: dict[int, int]) -> dict[int, list[int]]:
        for slot, prompt in PROMPTS.items():
            driver.add(slot, prompt, kind_of[slot])
        driver.step({0: 3, 1: 20, 2: 1})
        driver.step({0: 1, 1: 10, 2: 1, 3: 5})
        driver.step({0: 1, 1: 7, 2: 1, 3: 12})
        for _ in range(3):
            driver.step(dict.fromkeys(PROMPTS, 1))
        for slot, prompt in PROMPTS.items():
            assert driver.tokens[slot] == reference_greedy(prompt, len(driver.tokens[slot]) - len(prompt)), slot
        driver.step(dict.fromkeys(PROMPTS, 1), sampled)
        return dict(driver.tokens)

    of_kv, of_both = dict.fromkeys(PROMPTS, KV), {0: KV, 1: HIDDEN, 2: HIDDEN, 3: KV}
    early = [serve(of_kv), serve(of_both)]
    assert executor.compilations == 0
    assert not executor.ready.is_complete
    for program in others:
        program.compile()
        executor.add_program(program, last=program is others[-1])
    assert executor.ready.is_complete
    assert [serve(of_kv), serve(of_both)] == early
    assert executor.compilations == 0


@pytest.mark.in_turn(10, group="executors with models")
def test_transfers_begin_with_the_largest_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_greedily(monkeypatch)
    executor = make_host_executor(
        num_blocks=30, max_num_seqs=6, host_sizes=(1, 4, 16), warm_up=False, mixed=False, both_ends=True
    )
    executor.buckets.masked = [6]
    others = [p for p in executor.warm_up_first() if p.name.kind in TRANSFERS]
    assert executor.host is not None
    assert executor.host.slots is not None
    kinds = TRANSFERS[:4]
    assert [executor.ready.transfers(kind, ()) for kind in kinds] == [[16], [16], [512], [512]]
    requests = draw_requests(np.random.default_rng(8))
    expected = serve(executor, requests, "kv", make_policy("fcfs"), share=False)
    said = [serve(executor, requests, "kv", make_policy("bros"), share=True)]
    assert executor.host.slots.loaded_bytes > 0
    for program in others:
        program.compile()
        executor.add_program(program)
        if program.name.kind in ("save", "save kv slots"):
            said.append(serve(executor, requests, "kv", make_policy("bros"), share=True))
    assert all(tokens == expected for tokens in said)
    assert [executor.ready.transfers(kind, ()) for kind in kinds] == [
        [1, 4, 16],
        [1, 4, 16],
        [8, 64, 512],
        [8, 64, 512],
    ]
