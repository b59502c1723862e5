"""Background preparation after an early start: programs are compiled and step costs measured while the engine serves.

`build_engine(..., early=True)` prepares only the programs that are needed to serve every request and leaves the others
as `components.Unprepared`. `BackgroundPreparation` prepares them once the engine runs:

1. A thread compiles one program after another; on GPUs, several at once. Between two steps the engine's thread runs
   each new program once, on padding. From then on, or on GPUs once all programs are ready, the steps that it fits best
   use it. No step compiles or waits for the compiler. A program that cannot be compiled for lack of device memory is
   left out, with a line in the log.
2. The weights and the pool are moved to 2 MiB pages, which takes seconds if free memory is fragmented.
3. If no step costs are stored for this machine, they are measured while the engine is idle, for half a second at a
   time. Until then they are estimated from the steps that run (`ServedSteps`). Before there are enough steps, policies
   have no costs (`StepCosts` of zero), as with ``calibrate=False``. The measurement overwrites and drops cached
   prefixes.

Any other failure stops the engine with a one-line reason; without `early` it would have prevented the start.
"""

import collections
import concurrent.futures
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from apt_jax.errors import counted, one_line
from apt_jax.executor import is_out_of_memory
from apt_jax.frontend.components import with_costs
from apt_jax.frontend.served_steps import ServedSteps
from apt_jax.utils.allocator import use_huge_pages

if TYPE_CHECKING:
    from apt_jax.costs.fit import CostModel
    from apt_jax.executor.compiling.warm_up import Program
    from apt_jax.executor.jax_executor import JaxExecutor
    from apt_jax.frontend.async_engine import AsyncEngine
    from apt_jax.frontend.components import EngineComponents

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_S = 1.0
"""Time in seconds without requests after which step costs are measured."""
_SLICE_S = 0.5
"""Maximum delay in seconds of a request that arrives while costs are measured, in addition to the steps that are being
timed: one step on CPUs, up to four on other devices."""
_POLL_S = 0.1
_REPORT_EVERY_S = 10.0


class _StoppedError(Exception):
    """The server is stopping, or its engine has stopped."""


class BackgroundPreparation:
    """Prepares `EngineComponents.unprepared` in a thread while the engine runs.

    Args:
        engine: the running engine.
        on_calibrated: called in the engine's thread with the components whenever new step costs are in use.
    """

    def __init__(
        self, engine: "AsyncEngine", on_calibrated: "Callable[[EngineComponents], object]" = lambda parts: None
    ) -> None:
        self._engine, self._on_calibrated = engine, on_calibrated
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="apt-jax-prepare", daemon=True)

    def start(self) -> None:
        if self._engine.parts.unprepared is not None:
            self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Stop, and wait up to `timeout_s` seconds for the work in progress. Thread-safe; repeated calls are harmless.

        Returns:
            False if a program is still being compiled; the process must then exit with `os._exit`.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        unprepared = self._engine.parts.unprepared
        assert unprepared is not None
        try:
            self._compile(unprepared.programs)
            for _ in use_huge_pages(self._call(_executor_of(self._engine).host_buffers)):
                self._raise_if_stopped()
            if unprepared.calibration_s is not None:
                self._calibrate(unprepared.calibration_s)
            self._call(gc.freeze)  # exclude the objects that tracing has left (`freeze_gc_heap`)
        except _StoppedError:
            return
        except BaseException as error:
            if self._stopped.is_set():
                return
            reason = f"background preparation failed: {type(error).__name__}: {one_line(str(error)):.300}"
            logger.critical("%s", reason, exc_info=error)
            self._engine.fail(reason)

    def _compile(self, programs: "Sequence[Program]") -> None:
        if not programs:
            return
        started = time.monotonic()
        logger.info("serving; preparing %s in the background", counted(len(programs), "more program"))
        num_compilers = _executor_of(self._engine).num_background_compilers
        lacking = self._add(programs, num_compilers)
        if lacking:
            lacking = self._add(lacking, 1)  # compiling one at a time takes less memory
        if lacking:
            logger.warning(
                "serving continues without %s, with slower steps: too little device memory to compile more "
                "(--device-memory-utilization, or --set early_start=false)",
                counted(len(lacking), "program"),
            )
        logger.info(
            "prepared %s in %.1f s, in the background",
            counted(len(programs) - len(lacking), "more program"),
            time.monotonic() - started,
        )

    def _add(self, programs: "Sequence[Program]", num_compilers: int) -> "list[Program]":
        """Compile programs in parallel and add each to the executor; returns the programs that did not fit in
        memory."""
        executor, reported = _executor_of(self._engine), time.monotonic()
        waiting, lacking = iter(programs), []
        compiling: collections.deque[tuple[Program, concurrent.futures.Future[Any]]] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(num_compilers, "apt-jax-compile") as threads:
            for done in range(1, len(programs) + 1):
                self._raise_if_stopped()
                for program in itertools.islice(waiting, num_compilers - len(compiling)):
                    compiling.append((program, threads.submit(program.compile)))
                program, compiled = compiling.popleft()
                try:
                    self._result(compiled)
                except BaseException as error:
                    if not is_out_of_memory(error):
                        threads.shutdown(wait=False, cancel_futures=True)
                        raise
                    lacking.append(program)
                    continue
                last = done == len(programs) and not lacking
                self._call(lambda program=program, last=last: executor.add_program(program, last=last))
                if time.monotonic() - reported >= _REPORT_EVERY_S and done < len(programs):
                    reported = time.monotonic()
                    logger.info("serving; preparing in the background: %d of %d programs", done, len(programs))
        return lacking

    def _calibrate(self, budget_s: float) -> None:
        from apt_jax.executor.calibrate import calibration, calibration_path, keep_calibration, program_shapes

        executor = _executor_of(self._engine)
        measuring, model = calibration(executor, budget_s), None
        started = reported = idle_since = time.monotonic()
        served = ServedSteps(program_shapes(executor))
        self._call(lambda: self._engine.listen(served.note))
        logger.info("serving; measuring step costs while idle, for about %g s in total", budget_s)
        while model is None:
            if self._stopped.wait(_POLL_S):
                raise _StoppedError
            now = time.monotonic()
            if self._engine.num_open:
                idle_since = now
            if now - idle_since >= _IDLE_S:
                model = self._call(lambda: self._measure(measuring))
            elif points := self._call(served.points):
                try:
                    learned = served.fit(points)
                except (RuntimeError, ValueError) as error:  # the solver failed; more steps may help
                    logger.info(
                        "serving; step costs could not be estimated from %s: %s", counted(len(points), "step"), error
                    )
                else:
                    self._use(learned)
                    logger.info(
                        "serving; step costs are estimated from %s until they are measured",
                        counted(len(points), "step"),
                    )
            if now - reported >= 6 * _REPORT_EVERY_S and model is None and not self._engine.parts.cost_model:
                reported = now
                logger.info("serving; step costs are not known yet: waiting for a second without requests")
        self._call(lambda: self._engine.listen(None))
        keep_calibration(model, calibration_path(executor))
        self._use(model)
        logger.info("calibrated in %.1f s, in the background", time.monotonic() - started)

    def _use(self, model: "CostModel") -> None:
        """Make the engine and its watchdog use these step costs."""

        def use() -> None:
            self._engine.parts = with_costs(self._engine.parts, model)
            self._engine.expect_steps()
            self._on_calibrated(self._engine.parts)

        self._call(use)

    def _measure(self, measuring: "Generator[float, None, CostModel]") -> "CostModel | None":
        """Continue the measurement for `_SLICE_S` or until a request arrives; return the cost model once complete, else
        None. Runs in the engine's thread."""
        engine, until = self._engine.parts.engine, time.monotonic() + _SLICE_S
        while time.monotonic() < until and not self._engine.has_arrivals and not engine.has_work:
            engine.cache.clear_prefixes()
            try:
                next(measuring)
            except StopIteration as end:
                return end.value
        return None

    def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, and wait for it."""
        self._raise_if_stopped()
        return self._result(self._engine.call(function))

    def _result(self, future: "concurrent.futures.Future[T]") -> T:
        """Return the result of a future; raises `_StoppedError` if the server stops first."""
        while not concurrent.futures.wait([future], _POLL_S).done:
            if self._stopped.is_set() or self._engine.dead_reason is not None:
                future.cancel()
                raise _StoppedError
        return future.result()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set() or not self._engine.is_serving:
            raise _StoppedError


def _executor_of(engine: "AsyncEngine") -> "JaxExecutor":
    executor: Any = engine.parts.executor
    return executor
