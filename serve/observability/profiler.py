"""JAX profiles on demand, of host and device, for TensorBoard's plug-in xprof and for Perfetto.

At most one profile runs at a time, and it stops by itself after `max_s` seconds. Starting and stopping write files in a
separate thread while the engine continues. Python calls are not recorded, because that would slow down all of them.
"""

import asyncio
import concurrent.futures
import datetime
import errno
import logging
import os
import re
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from apt_jax.errors import ConfigError
from serve.errors import ProfilerStateError, ProfileWriteError
from serve.observability.call_log import log_failure

logger = logging.getLogger(__name__)

FLAG = "--set profiler_dir"

_MAX_S = 60.0
_MAX_KEPT = 20
"""Number of profiles kept on disk."""
_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{6}")
_CLOSE_TIMEOUT_S = 10.0

T = TypeVar("T")


class Profiler:
    """Takes profiles of this process. Used from one event loop only.

    Args:
        directory: parent of the profiles' directories; created if it does not exist.
        max_s: time in seconds after which a profile stops by itself.
        max_kept: number of profiles kept on disk; older profiles are removed when a profile has been written.

    Raises:
        ConfigError: the directory cannot be created.
    """

    def __init__(self, directory: str | Path, *, max_s: float = _MAX_S, max_kept: int = _MAX_KEPT) -> None:
        self._root = Path(directory).absolute()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be created ({error.strerror}) ({FLAG})") from None
        self.max_s = max_s
        self._max_kept = max_kept
        self._running: Path | None = None
        self._end: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="apt-jax-profiler")

    @property
    def is_running(self) -> bool:
        return self._running is not None

    async def start(self) -> Path:
        """Start a profile; returns its directory.

        Raises:
            ProfilerStateError: a profile is already running.
            ProfileWriteError: the profile's directory cannot be created.
        """
        if self._running is not None:
            raise ProfilerStateError(
                f"a profile is already running; it stops by itself {self.max_s:g} s after its start"
            )
        return await self._whole(self._start())

    async def stop(self) -> Path:
        """Stop the profile and write it; returns its directory.

        Raises:
            ProfilerStateError: no profile is running.
            ProfileWriteError: the profile cannot be written; its directory is removed.
        """
        return await self._whole(self._stop())

    async def close(self) -> None:
        """Stop a running profile, within a time limit."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.stop()
        except (ProfilerStateError, TimeoutError):
            pass
        except Exception as error:  # shutdown continues
            log_failure(logger, "stopping the profile", error)
        finally:
            self._thread.shutdown(wait=False)

    async def _start(self) -> Path:
        async with self._changing:
            self._check(running=False)
            loop = asyncio.get_running_loop()
            self._running = directory = await loop.run_in_executor(self._thread, self._begin)
            self._end = loop.call_later(self.max_s, self._stop_by_itself)
        logger.info("a profile has started: %s", directory)
        return directory

    async def _stop(self) -> Path:
        async with self._changing:
            self._check(running=True)
            directory, end = self._running, self._end
            assert directory is not None
            assert end is not None
            end.cancel()
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._finish, directory)
            finally:
                self._running = None
        logger.info("a profile has been written: %s", directory)
        return directory

    def _check(self, *, running: bool) -> None:
        if running and self._running is None:
            raise ProfilerStateError("no profile is running")
        if not running and self._running is not None:
            raise ProfilerStateError("a profile is already running")

    def _begin(self) -> Path:
        name = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H-%M-%S.%f}"
        directory = self._root / name
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise _not_written(directory, error) from error
        import jax  # imported here, because reading flags needs no JAX

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=options)
        return directory

    def _finish(self, directory: Path) -> None:
        try:
            _stop_trace()
        except Exception as error:  # JAX's own error types, and OSError
            shutil.rmtree(directory, ignore_errors=True)  # an incomplete profile is useless, and takes disk space
            raise _not_written(directory, error) from error
        kept = sorted(path for path in self._root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
        for old in kept[: -self._max_kept]:
            shutil.rmtree(old, ignore_errors=True)

    def _stop_by_itself(self) -> None:
        async def stop() -> None:
            try:
                await self._stop()
            except ProfilerStateError:
                pass  # it was stopped meanwhile
            except Exception as error:
                log_failure(logger, "writing a profile", error)

        self._keep(asyncio.ensure_future(stop()))

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change of state to its end, even if the caller is cancelled."""
        return await asyncio.shield(self._keep(asyncio.ensure_future(change)))

    def _keep(self, task: "asyncio.Task[T]") -> "asyncio.Task[T]":
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _not_written(directory: Path, error: Exception) -> ProfileWriteError:
    """Log why a profile could not be written, and return the error for the client, which states the reason only if it
    is an error of the operating system."""
    full = os.strerror(errno.ENOSPC)
    reason = error.strerror if isinstance(error, OSError) else full if full in str(error) else None
    logger.error("%s: the profile could not be written", directory, exc_info=error)
    return ProfileWriteError(f"{directory}: the profile could not be written" + (f" ({reason})" if reason else ""))


def _stop_trace() -> None:
    import jax

    jax.profiler.stop_trace()
