"""The command line `apt-jax`."""

from serve.cli.main import main

__all__ = ["main"]
