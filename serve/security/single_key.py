"""Reads a server's single API key from its environment or, for local tests, from the command line.

The variable is removed from the environment when it is read, to keep it from child processes. Every user of
the machine can read the command line in the list of processes; the server warns about this.
"""

import logging
from collections.abc import MutableMapping

from apt_jax.errors import ConfigError

KEY_FLAG = "--api-key"
KEY_VARIABLE = "APT_JAX_API_KEY"

logger = logging.getLogger(__name__)


def take_api_key(given: str | None, env: MutableMapping[str, str]) -> str | None:
    """Return the API key, and remove it from the environment; None: no key is given.

    Args:
        given: value of the flag.
        env: environment of the process.

    Raises:
        ConfigError: the flag and the variable have different keys.
    """
    found = env.pop(KEY_VARIABLE, None)
    if given is None:
        return found
    if found is not None and found != given:
        raise ConfigError(f"two API keys; give one, or a file of several ({KEY_FLAG}, {KEY_VARIABLE}, --api-key-file)")
    logger.warning(
        "%s: every user of this machine can read the key in the list of processes; prefer %s or --api-key-file",
        KEY_FLAG,
        KEY_VARIABLE,
    )
    return given


def without_key(argv: list[str]) -> list[str]:
    """Return command-line arguments with the key hidden, for output and logs."""
    shown, hidden = [], False
    for word in argv:
        name = word.partition("=")[0]
        shown.append("***" if hidden else f"{KEY_FLAG}=***" if name == KEY_FLAG and "=" in word else word)
        hidden = word == KEY_FLAG
    return shown
