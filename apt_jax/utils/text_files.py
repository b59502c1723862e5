"""Text files from outside: any common encoding and line ends, or one line that says what to do."""

from pathlib import Path

from apt_jax.errors import ConfigError

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: str | Path, flag: str) -> str:
    """Return the text of a file, with ``\\n`` for every line end and without a byte order mark.

    Args:
        path: UTF-8, or UTF-16 that begins with a byte order mark.
        flag: named in errors.

    Raises:
        ConfigError: it cannot be read; one line.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path of a file
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{str(path)!s:.200}: cannot be read ({reason}) ({flag})") from None
    return decode(data, str(path), flag)


def decode(data: bytes, name: str, flag: str) -> str:
    """As `read_text`, of the bytes of a file with this name."""
    try:
        text = data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}: cannot be read (line {line} is not UTF-8); save it as UTF-8 ({flag})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
