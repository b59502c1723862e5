"""Errors of the command line and of the servers that it starts.

Exception
├── CommandError          a command cannot continue
├── PortInUseError        the address cannot be bound
└── errors of one call, mapped by `serve.http_api.errors` and `serve.grpc_api.errors`:
    UnknownModelError, SlowReaderError, NoTokenizerError, ProfilerStateError, ProfileWriteError, RequestFailedError
"""


class CommandError(Exception):
    """A command cannot continue; one line for the user. Exit code 1."""


class PortInUseError(Exception):
    """The address cannot be bound; one line that names the flag."""


class UnknownModelError(Exception):
    """A request names a model that is not served here."""


class SlowReaderError(Exception):
    """The client has not read its stream for too long."""


class NoTokenizerError(Exception):
    """A client asks for the tokenizer of a model without one."""


class MissingKeyError(Exception):
    """A call has no valid API key."""


class OperatorKeyError(Exception):
    """A call requires an operator's API key but has another key; one line that names the flag."""


class ProfilerStateError(Exception):
    """A profile cannot start while one is running, or stop while no profile is running."""


class ProfileWriteError(Exception):
    """A profile could not be written; one line with the directory and, if it is known, the reason."""


class RequestFailedError(Exception):
    """The engine ended this request because of an internal failure."""


def require_matplotlib(flag: str) -> None:
    """Check that matplotlib is installed when a command begins, so that it does not fail at its end.

    Args:
        flag: flag that asks for a picture, such as ``--png``.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise CommandError(f"{flag} needs matplotlib: pip install 'apt-jax[demo]'") from None
