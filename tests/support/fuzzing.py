"""Shared parts of the fuzz tests: number of cases, seeds, inputs that failed, servers in a thread, and the check for
leaks.

`make fuzz` runs the full counts (`APT_JAX_FUZZ=full`), `make fuzz FUZZ=release` more; otherwise each test takes seconds.

Every day has other inputs: the seed is the date, or $APT_JAX_FUZZ_SEED. An input that fails is written to
`tests/fuzz_inputs/TARGET` and the failure says how to run it again; commit the file with the fix, and every run begins
with it.
"""

import asyncio
import contextlib
import hashlib
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import tqdm
from hypothesis import strategies as st

from apt_jax.text.chat import ChatTemplate
from serve.batches.config import BatchConfig
from serve.batches.store import BatchStore
from serve.security.api_keys import ApiKeys
from tests.support.chat_templates import WITH_TOOLS
from tests.support.http_serving import HttpServed, http_serving
from tests.support.toy_openai import in_thread
from tests.support.toy_serving import assert_clean, expected_tokens, toy_parts

SIZE = os.environ.get("APT_JAX_FUZZ", "")
assert SIZE in ("", "full", "release"), f"APT_JAX_FUZZ={SIZE} must be full or release"
FULL = bool(SIZE)
SEED = int(os.environ["APT_JAX_FUZZ_SEED"])
"""Set by tests/conftest.py, so that all workers of a run have the same, even over midnight."""
LIMIT_S = float(os.environ.get("APT_JAX_FUZZ_MINUTES") or (1e9 if SIZE == "release" else 15)) * 60
"""Time limit of one target; what has run by then is reported."""
INPUTS = Path(os.path.relpath(Path(__file__).parents[1] / "fuzz_inputs"))
CHECK_EVERY = 500
"""Cases between two checks that nothing is left."""
KEY = "fuzz-0123456789-0123456789"
MAX_MODEL_LEN = 64
"""Short, so that no case takes long."""


_CHUNK = 1000
"""Inputs that Hypothesis makes with one seed; it remembers all of them."""


def cases(few: int, full: int, release: int | None = None) -> int:
    """Return the number of cases: `few`, or `full` in the full run, or `release` before one (None: as many as
    `full`)."""
    if SIZE == "release" and release is not None:
        return release
    return full if FULL else few


def inputs_of(target: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Inputs of a target that once failed: the arguments of its check, as Python literals."""
    for path in sorted((INPUTS / target).glob("*.txt")):
        yield path, read_input(path)


def read_input(path: Path) -> dict[str, Any]:
    # Literals alone, but for these two.
    return eval(path.read_text(), {"__builtins__": {}}, {"nan": math.nan, "inf": math.inf})


def keep_input(target: str, given: dict[str, Any]) -> Path:
    """Write an input that failed to where later runs find it."""
    text = repr(given)
    path = INPUTS / target / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path


def replay_line(path: Path) -> str:
    """How to run one input again."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "TEST").rpartition(" ")[0]
    shown = path.read_text().strip()
    content = f"\n  it holds {shown}" if len(shown) < 4000 else ""
    return (
        f"again: APT_JAX_FUZZ_INPUT={path} python -m pytest '{test}'\n"
        f"  or with all inputs of the day: APT_JAX_FUZZ_SEED={SEED}{content}"
    )


class Progress:
    """Counts the inputs of a target on a bar, says how many there were, and whether the time is over."""

    def __init__(self, target: str, total: int) -> None:
        self.target, self.total, self.done = target, total, 0
        self._began_s = time.monotonic()
        self._bar = tqdm.tqdm(total=total, desc=target, unit=" inputs", file=sys.stderr, disable=not FULL)

    def note(self) -> None:
        self.done += 1
        self._bar.update()

    @property
    def is_over(self) -> bool:
        return self.done >= self.total or time.monotonic() - self._began_s > LIMIT_S

    def close(self) -> None:
        self._bar.close()
        print(f"\nfuzz {self.target}: {self.done:,} inputs, {time.monotonic() - self._began_s:.1f} s, seed {SEED}")


def run_kept(target: str, check: Callable[..., None]) -> None:
    """Check all inputs of a target that once failed, or the one in $APT_JAX_FUZZ_INPUT and no others."""
    only = os.environ.get("APT_JAX_FUZZ_INPUT")
    if only is not None:
        check(**read_input(Path(only)))
        pytest.skip(f"{only} passes")
    for path, given in inputs_of(target):
        try:
            check(**given)
        except BaseException as error:
            error.add_note(replay_line(path))
            raise


def fuzz(
    target: str,
    check: Callable[..., None],
    total: int,
    *,
    may_crash: bool = False,
    **strategies: st.SearchStrategy[Any],
) -> int:
    """Check inputs that once failed, then `total` new ones; an input that fails is made small and kept.

    Args:
        target: name of what is fuzzed.
        check: raises where an input does what it must not.
        total: number of inputs; fewer where the time limit comes first.
        may_crash: what is fuzzed is native code in this process: an input is kept while it runs.
        strategies: values of its arguments, made of Python's literals.

    Returns:
        Number of inputs.
    """
    run_kept(target, check)
    progress = Progress(target, total)
    failed: list[dict[str, Any]] = []
    running = INPUTS / target / f"crashed-{os.getpid()}.txt"

    def each(**given: Any) -> None:
        if may_crash:
            running.parent.mkdir(parents=True, exist_ok=True)
            running.write_text(repr(given) + "\n")
        try:
            check(**given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed[:] = [given]
            if not isinstance(error, Exception):  # a panic of a Rust library
                raise AssertionError(f"{type(error).__name__}: {error}") from error
            raise
        progress.note()

    try:
        for part in itertools.count():
            if progress.is_over:
                break
            few = hypothesis.settings(
                max_examples=min(_CHUNK, total - progress.done),
                derandomize=False,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=[
                    hypothesis.HealthCheck.too_slow,
                    hypothesis.HealthCheck.data_too_large,
                    hypothesis.HealthCheck.filter_too_much,
                ],
            )
            hypothesis.seed(SEED * 100_000 + part)(few(hypothesis.given(**strategies)(each)))()
    except BaseException as error:
        if failed:
            error.add_note(replay_line(keep_input(target, failed[0])))
        raise
    finally:
        running.unlink(missing_ok=True)
        progress.close()
    return progress.done


def open_descriptors(at_most: int = 0, limit_s: float = 20.0) -> int:
    """Number of descriptors of this process, as soon as it is small enough or the time is over."""
    process, end_s = psutil.Process(), time.monotonic() + limit_s
    while (number := process.num_fds()) > at_most > 0 and time.monotonic() < end_s:
        time.sleep(0.02)
    return number


class Fuzzed:
    """Servers in a separate thread, with an API key for HTTP.

    Attributes:
        served: the servers.
        num_cases: number of cases that `note` has counted.
    """

    def __init__(self, served: HttpServed, loop: asyncio.AbstractEventLoop, what: str, total: int) -> None:
        self.served, self._loop, self._what = served, loop, what
        self.parts = served.parts
        self.url = f"http://127.0.0.1:{served.server.port}"
        self.grpc_target = f"127.0.0.1:{served.grpc_server.port}"
        self.num_cases = 0
        self.num_excluded = 0
        """Outputs that their own request has left no token."""
        self._num_tasks: int | None = None
        self._bar = tqdm.tqdm(total=total, desc=what, unit=" cases", file=sys.stderr, disable=not FULL or total == 0)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of the servers; return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def note(self) -> None:
        """One more case is over, and no other is under way."""
        self.num_cases += 1
        self._bar.update()
        if self.num_cases % CHECK_EVERY == 0:
            self.check_clean()

    def check_clean(self) -> None:
        """Blocks are free, nothing runs or waits, and the next request has the answer that it must have."""
        self.run(self._check_clean())

    async def _check_clean(self) -> None:
        served = self.served
        await served.idle()
        await asyncio.wrap_future(served.engine.call(lambda: assert_clean(self.parts)))
        assert (await served.engine.stats()).finished.get("error", 0) == self.num_excluded
        key = {"authorization": f"Bearer {KEY}"}
        params = {"max_tokens": 8, "temperature": 0.0}
        body = {"prompt": "hello", "return_token_ids": True, **params}
        response = await served.post("/v1/completions", body, headers=key)
        assert response.status_code == 200, response.text
        request = self.parts.build_request(prompt="hello", params=params)
        assert response.json()["choices"][0]["token_ids"] == expected_tokens(request)
        await served.idle()
        if self._num_tasks is None:
            self._num_tasks = len(asyncio.all_tasks())
        end_s = time.monotonic() + 20
        while len(asyncio.all_tasks()) > self._num_tasks + 2:
            assert time.monotonic() < end_s, "tasks are left"
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._bar.close()


@contextlib.contextmanager
def fuzzing(what: str, total: int) -> Iterator[Fuzzed]:
    """Servers over a toy engine with a chat template; nothing may be left at the end.

    Args:
        what: the label of the progress bar.
        total: cases that are expected; 0: no bar.
    """
    template = ChatTemplate(WITH_TOOLS)
    parts = toy_parts(max_model_len=MAX_MODEL_LEN, chat_template=template)

    @contextlib.asynccontextmanager
    async def servers() -> AsyncIterator[tuple[HttpServed, asyncio.AbstractEventLoop]]:
        with tempfile.TemporaryDirectory() as folder:
            batches = BatchStore(BatchConfig(directory=Path(folder)))
            async with http_serving(parts, app={"keys": ApiKeys([KEY]), "batches": batches}) as served:
                yield served, asyncio.get_running_loop()

    try:
        with in_thread(servers) as (served, loop):
            fuzzed = Fuzzed(served, loop, what, total)
            fuzzed.check_clean()
            yield fuzzed
            fuzzed.check_clean()
            fuzzed.close()
    finally:
        template.close()
        if parts.grammars is not None:
            parts.grammars.close()
