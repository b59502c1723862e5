"""Errors of the command line and of the servers that it starts.

Exception
├── CommandError          a command cannot continue
├── PortInUseError        the address cannot be bound
└── errors of one call, mapped by `serve.http_api.errors` and `serve.grpc_api.errors`:
    UnknownModelError, SlowReaderError, NoTokenizerError, MissingKeyError, OperatorKeyError, ProfilerStateError,
    ProfileWriteError, RequestFailedError
"""


class CommandError(Exception):
    """A command cannot continue. The message is one line for the user; the exit code is 1."""


class PortInUseError(Exception):
    """The address cannot be bound. The message is one line that names the flag."""


class UnknownModelError(Exception):
    """A request names a model that is not served here."""


class SlowReaderError(Exception):
    """The client has not read from its stream for too long."""


class NoTokenizerError(Exception):
    """A client requests the tokenizer of a model that has no tokenizer."""


class MissingKeyError(Exception):
    """A call has no valid API key."""


class OperatorKeyError(Exception):
    """A call that requires an operator's API key has another key. The message is one line that names the flag."""


class ProfilerStateError(Exception):
    """A profile cannot be started while another is running, or stopped while no profile is running."""


class ProfileWriteError(Exception):
    """A profile could not be written. The message is one line with the directory and, if known, the reason."""


class RequestFailedError(Exception):
    """The engine ended this request because of an internal failure."""


def require_matplotlib(flag: str) -> None:
    """Check that matplotlib is installed, so that a command fails at its start and not at its end.

    Args:
        flag: flag that requests a plot, such as ``--png``.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise CommandError(f"{flag} needs matplotlib: pip install 'apt-jax[demo]'") from None
