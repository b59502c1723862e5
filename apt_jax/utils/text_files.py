"""Reads text files from users: common encodings and line endings are accepted; errors are one line and name a
remedy."""

from pathlib import Path

from apt_jax.errors import ConfigError

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: str | Path, flag: str) -> str:
    """Return the text of a file, with ``\\n`` for every line ending and without a byte order mark.

    Args:
        path: file in UTF-8, or in UTF-16 with a byte order mark.
        flag: command-line flag that errors name.

    Raises:
        ConfigError: the file cannot be read or decoded; the message is one line.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{str(path)!s:.200}: cannot be read ({reason}) ({flag})") from None
    return decode(data, str(path), flag)


def decode(data: bytes, name: str, flag: str) -> str:
    """Decode the bytes of a file like `read_text`; `name` is the file's name in errors."""
    try:
        text = data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}: cannot be read (line {line} is not UTF-8); save it as UTF-8 ({flag})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
