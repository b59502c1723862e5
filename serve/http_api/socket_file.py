"""A listening Unix socket and its file."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from serve.errors import PortInUseError

BACKLOG = 1024
"""Maximum number of connections that wait to be accepted."""
FLAG = "--uds"

_MODE = 0o600
_PROBE_TIMEOUT_S = 1.0


class SocketFile:
    """A listening Unix socket that only this user can connect to.

    The socket file of a server that has stopped is replaced. `remove` does not remove a file that has replaced this
    socket's own file.

    Args:
        path: path of the socket file.

    Raises:
        PortInUseError: another server listens on the path, or the socket cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._remove_stale()
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.listener.bind(path)
                self._path.chmod(_MODE)  # before `listen`: until then no client can connect
                self._identity: tuple[int, int] | None = self._identify()
                self.listener.listen(BACKLOG)
            except OSError:
                self.listener.close()
                raise
        except OSError as error:
            raise PortInUseError(
                f"cannot listen on {path} ({error.strerror or error}); choose another path ({FLAG})"
            ) from None

    def remove(self) -> None:
        """Remove the socket file; later calls do nothing. Open connections stay open.

        Call it before the listener is closed: until then no other file can get the same inode number.
        """
        with contextlib.suppress(OSError):
            if self._identify() == self._identity:
                self._path.unlink()
        self._identity = None

    def _identify(self) -> tuple[int, int]:
        status = os.lstat(self._path)
        return status.st_dev, status.st_ino

    def _remove_stale(self) -> None:
        """Remove the socket file of a server that has stopped.

        Raises:
            OSError: another server listens on the socket, or the file is not a socket or cannot be removed.
        """
        try:
            mode = os.lstat(self._path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise OSError("it exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
            except TimeoutError:  # its backlog is full
                pass
        raise OSError("another server listens on it")
