"""Errors of the command line."""


class CommandError(Exception):
    """A verb cannot go on; one line for the user. Exit code 1."""
