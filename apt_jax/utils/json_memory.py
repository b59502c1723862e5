"""Memory that JSON files of models take when they are parsed, bounded before they are."""

import re

from apt_jax.errors import ModelLoadError

MAX_JSON_BYTES = 32 << 20
"""Size of JSON files other than tokenizers: the largest index has half of it."""
_VOCABULARY_TIMES = 16
"""Memory of files that describe tokens, in sizes of the file: the largest vocabularies, without whitespace, need 15."""
_BESIDE_BYTES = 40 << 20
"""Memory that the values of a file may take however small it is."""
_MOST_BYTES = 512 << 20
_BYTES_OF = {b"[": 170, b"{": 1000, b",": 100, b":": 130}
"""Bytes of memory by character: of an array, an object, an item, a named value. Python takes half of it, the tokenizers
library all, for what it cannot tell at once."""
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]")


def check_json_memory(text: bytes, where: str, *, allowance: int = 0, is_vocabulary: bool = False) -> None:
    """Check that JSON takes no more than 40 MiB of memory beside its strings: a list of `[]` takes 26 times its size.

    Args:
        text: the file's contents.
        where: its name, for the error.
        allowance: bytes of memory that it may take in addition, up to 512 MiB in all.
        is_vocabulary: the file describes tokens, and may take 16 times its size in addition.

    Raises:
        ModelLoadError: it would take more.
    """
    needed = sum(text.count(mark) * num_bytes for mark, num_bytes in _BYTES_OF.items())
    if is_vocabulary:
        allowance += _VOCABULARY_TIMES * len(text)
    elif not text.isascii():  # Python keeps all characters of a text as wide as the widest
        needed += 2 * (3 if _FOUR_BYTES.search(text) else 1) * len(text)
    most = min(_BESIDE_BYTES + allowance, _MOST_BYTES)
    if needed > most:
        raise ModelLoadError(
            f"{where}: as JSON it would take {needed / 2**20:.0f} MiB of memory ({text.count(b'[')} arrays, "
            f"{text.count(b'{')} objects, {text.count(b':')} named values), more than the {most >> 20} MiB for such a file"
        )


__all__ = ["MAX_JSON_BYTES", "check_json_memory"]
