"""Settings for the whole suite: JAX on the CPU, strict about dtypes and ranks."""

import atexit
import datetime
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from typing import Any

# Environment variables, not calls: they also reach the workers, and the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What one test has compiled the others find, in this run alone.
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="apt-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
# Most programs run once or twice, so that their compilation is most of the suite's time. `make test-slow` and
# `make reference` compile them as in service.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may ask the hub
# Every day the fuzz tests have other inputs (tests.support.fuzzing).
os.environ.setdefault("APT_JAX_FUZZ_SEED", f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")
os.environ.setdefault("APT_JAX_SEED_BASE", f"{datetime.datetime.now(datetime.UTC):%Y%m%d}0000")

import numpy as np
import pytest

from tests.support.cases import mark_all_but_those_in_turn

# Neither JAX nor Hypothesis is imported here: tests of scheduling, caches and the engine start without them
# (test_start_up.py).


@functools.cache
def _load_hypothesis_profile() -> None:
    from hypothesis import HealthCheck, settings

    # A slow or busy machine is no reason to fail; in CI the same examples come every time.
    settings.register_profile(
        "suite",
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("suite")


@pytest.fixture(autouse=True)
def log_levels() -> Generator[None]:
    """Restore the levels of logs, which commands that run in the test's process set."""
    loggers = [logging.getLogger(name) for name in ("apt_jax", "serve")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Load the profile before a module with Hypothesis tests is imported: their settings are made then."""
    if isinstance(collector, pytest.Module) and b"hypothesis" in collector.path.read_bytes():
        _load_hypothesis_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave today's cases of tests that have a turn."""
    mark_all_but_those_in_turn(items)
    is_loaded = _load_hypothesis_profile.cache_info().currsize > 0
    if not is_loaded and any(hasattr(getattr(item, "obj", None), "hypothesis") for item in items):
        raise pytest.UsageError("a test module that uses Hypothesis must import it itself")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector from what imports and collection have made: it would walk through it again and again
    (10 % of the time of tests that trace programs or simulate).

    The plugin of Hypothesis imports all of it for its summary, so it goes where no test uses it.
    """
    plugins, plugin = session.config.pluginmanager, sys.modules.get("_hypothesis_pytestplugin")
    if "hypothesis" not in sys.modules and plugins.is_registered(plugin):
        plugins.unregister(plugin)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


_CONFIGS: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    """Keep the configuration of the process that writes to the terminal, for `pytest_runtest_logreport`."""
    _CONFIGS[:] = [] if hasattr(config, "workerinput") else [config]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a run that is cut off would keep it for itself."""
    for config in _CONFIGS if report.failed else ():
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with which inputs the fuzz tests and the simulations ran."""
    seed = os.environ.get("APT_JAX_FUZZ_SEED")
    if seed is not None:
        terminalreporter.write_line(f"inputs of the fuzz tests: APT_JAX_FUZZ_SEED={seed}")
    terminalreporter.write_line(f"seeds of the simulations: APT_JAX_SEED_BASE={os.environ['APT_JAX_SEED_BASE']}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Make recorded NumPy numbers plain ones: test workers can send nothing else to their parent."""
    item.user_properties[:] = [
        (name, value.item() if isinstance(value, np.generic) else value) for name, value in item.user_properties
    ]
    return (yield)
