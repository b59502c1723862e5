"""Limit on the memory that parsing a model's JSON file takes, checked before parsing."""

import re

from apt_jax.errors import ModelLoadError

MAX_JSON_BYTES = 32 << 20
"""Maximum size in bytes of JSON files other than tokenizers; the largest known index is half as large."""
_VOCABULARY_TIMES = 16
"""Additional memory allowed for files that describe tokens, as a multiple of the file's size; the largest vocabularies,
stored without whitespace, need 15."""
_BESIDE_BYTES = 40 << 20
"""Memory in bytes that the values of any file may take, no matter how small the file is."""
_MOST_BYTES = 512 << 20
_BYTES_OF = {b"[": 170, b"{": 1000, b",": 100, b":": 130}
"""Estimated bytes of memory per array, object, item and named value, keyed by the character that marks it. Python needs
half of this; the tokenizers library needs all of it for values whose type it does not know in advance."""
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]")


def check_json_memory(text: bytes, where: str, *, allowance: int = 0, is_vocabulary: bool = False) -> None:
    """Check, before parsing JSON, that it will take at most 40 MiB of memory in addition to its strings. A list of
    empty lists, for example, takes 26 times the size of its text.

    Args:
        text: the file's contents.
        where: the file's name, for the error.
        allowance: bytes of memory allowed in addition, up to 512 MiB in total.
        is_vocabulary: True if the file describes tokens; then 16 times its size is allowed in addition.

    Raises:
        ModelLoadError: the file would take more memory.
    """
    needed = sum(text.count(mark) * num_bytes for mark, num_bytes in _BYTES_OF.items())
    if is_vocabulary:
        allowance += _VOCABULARY_TIMES * len(text)
    elif not text.isascii():  # Python stores every character of a string as wide as its widest
        needed += 2 * (3 if _FOUR_BYTES.search(text) else 1) * len(text)
    most = min(_BESIDE_BYTES + allowance, _MOST_BYTES)
    if needed > most:
        raise ModelLoadError(
            f"{where}: parsing it would take {needed / 2**20:.0f} MiB of memory ({text.count(b'[')} arrays, "
            f"{text.count(b'{')} objects, {text.count(b':')} named values), more than the {most >> 20} MiB allowed for such a file"
        )


__all__ = ["MAX_JSON_BYTES", "check_json_memory"]
