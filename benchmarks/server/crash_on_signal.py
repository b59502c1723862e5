"""`apt-jax serve` whose engine thread ends at SIGUSR1, as if its code had left it: python -m
benchmarks.server.crash_on_signal serve MODEL ..."""

import ctypes
import signal
import sys
import threading

from serve.cli import main


class _Crash(BaseException):
    """Nothing in the engine handles it; a `SystemExit` of a policy is replaced by `fcfs`."""


def _end_engine_thread(*_: object) -> None:
    thread = next(t for t in threading.enumerate() if t.name == "apt-jax-engine")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Crash))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _end_engine_thread)
    sys.exit(main())
