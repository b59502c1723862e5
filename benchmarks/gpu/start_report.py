"""Report of a start: seconds of each of its programs, as soon as it is made."""

import dataclasses
import logging
import time
from collections.abc import Callable

from apt_jax.executor import runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltProgram:
    """A program that a start has lowered and compiled, or loaded."""

    name: str
    """The function: decode, forward, sample, ..."""
    static: str
    """Its static arguments, by which programs of one function differ."""
    lower_s: float
    """Python and MLIR; 0: it was loaded."""
    compile_s: float
    """XLA, with autotuning; or loading."""
    at_s: float
    """Seconds since `report_programs`."""


def report_programs(receive: Callable[[BuiltProgram], object]) -> Callable[[], None]:
    """Hand over each program from now on, in the thread that made it; returns a function that ends this."""
    began = time.perf_counter()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg is runner.BUILT and isinstance(record.args, tuple):
                name, static, lower_s, compile_s = record.args
                at_s = time.perf_counter() - began
                receive(
                    BuiltProgram(name=name, static=static, lower_s=lower_s, compile_s=compile_s, at_s=at_s)  # type: ignore[arg-type]
                )

    handler, level = Handler(logging.DEBUG), runner.logger.level
    runner.logger.addHandler(handler)
    runner.logger.setLevel(logging.DEBUG)

    def end() -> None:
        runner.logger.removeHandler(handler)
        runner.logger.setLevel(level)

    return end
