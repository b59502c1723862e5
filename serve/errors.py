"""Errors of the command line and of the servers that it starts."""


class CommandError(Exception):
    """A verb cannot go on; one line for the user. Exit code 1."""


class PortInUseError(Exception):
    """The address cannot be bound; one line that names the flag."""
