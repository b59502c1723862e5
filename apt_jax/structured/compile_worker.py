"""Child process that tests grammars: it compiles each grammar and generates the first tokens of a few outputs.

A grammar can take minutes and gigabytes to compile, and a long chain of references can overflow the compiler's stack,
which crashes the process. Testing in a child means that at worst the child is lost. `apt_jax.structured.compiler`
starts the child, reuses it, and kills it if a test exceeds the time limit or the child dies.

Protocol: one line of JSON in each direction. First {"tokens", "special", "eos", "limits", "memory_bytes", "alarm_s"},
the tokens as hexadecimal strings, answered by {"error": null or text}; then any number of {"grammar"}, answered by
{"error": null or text, "bytes"}. The module is run as a script, so that nothing but llguidance is imported.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

STACK_BYTES = 4 << 20
"""Stack size of the compiling thread in this process; the engine's process uses a larger stack."""
TRIAL_TOKENS = 24
"""Number of tokens of a trial output; grammars that are too ambiguous fail within a few tokens."""
NUM_TRIALS = 2
_BYTES_OF_TEXT = [bytes([byte]) for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
"""Every byte that occurs in UTF-8."""
_MAX_FORCED_CHARS = 256
"""Maximum number of characters of a required string that are split into tokens at each step."""


class TokenTable:
    """The vocabulary passed to `llguidance.LLTokenizer`, in place of llguidance's ``TokenizerWrapper``.

    llguidance assumes that tokens can produce every string. If they cannot, as in a vocabulary of words, ids for single
    bytes are appended, which are never sampled.

    Args:
        tokens: bytes that each token adds to a text; empty: the token is never allowed.
        special: ids that grammars can name but that text is never encoded as; their bytes are their names.
        eos: ids that end an output.
        encoder: function that returns the usual tokens of a text; None: long tokens are preferred.

    Attributes:
        unsampled: the appended ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Collection[int],
        eos: Sequence[int],
        encoder: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self.special_token_ids, self.eos_token_id = sorted(special), eos[0]
        self._encoder = encoder
        self._not_text = {*special, *eos}
        self._ids = {data: i for i, data in enumerate(tokens) if data and i not in self._not_text}
        lengths: dict[int, set[int]] = {}
        for data in self._ids:
            lengths.setdefault(data[0], set()).add(len(data))
        self._lengths = {first: sorted(values, reverse=True) for first, values in lengths.items()}
        self.tokens, self.unsampled = list(tokens), range(0)
        self._begun: set[bytes] | None = None
        """Proper prefixes of tokens; None: the vocabulary can produce every string."""
        if not all(byte in self._ids for byte in _BYTES_OF_TEXT):
            self._begun = {data[:end] for data in self._ids for end in range(1, len(data))}
            self.tokens += [b""] * (-len(tokens) % 32)  # whole words of a mask
            self.unsampled = range(len(self.tokens), len(self.tokens) + 256)
            self.tokens += [bytes([byte]) for byte in range(256)]

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a required string, or of a prefix of it.

        llguidance calls this at each step, and uses the first token.
        """
        if not isinstance(text, str):
            return []  # llguidance tests which types are accepted
        text = text[:_MAX_FORCED_CHARS]
        data = text.encode()
        if self._encoder is not None:
            try:
                ids = list(self._encoder(text))
            except Exception:  # a character without a token, and no <unk>
                ids = [len(self.tokens)]
            known = self._not_text.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
            if known and b"".join(self.tokens[i] for i in ids) == data:
                return ids
        return self._split(data)

    def _split(self, data: bytes) -> list[int]:
        """Return tokens that produce the bytes, preferring long tokens if the rest can still be produced. Trailing
        bytes that only begin a token may be returned as ids of single bytes."""
        ids: list[int] = []
        ends, tried = [0], [self._candidates(data, 0)]
        dead: set[int] = set()
        while ends[-1] < len(data):
            length = next(tried[-1], None)
            if length is not None:
                end = ends[-1] + length
                if end not in dead:
                    ids.append(self._ids[data[ends[-1] : end]])
                    ends.append(end)
                    tried.append(self._candidates(data, end))
                continue
            if self._begun is not None and data[ends[-1] :] in self._begun:
                return [*ids, *(self.unsampled[byte] for byte in data[ends[-1] :])]
            dead.add(ends.pop())
            tried.pop()
            if not ids:  # no token that can be sampled fits
                return [self.unsampled[byte] for byte in data] if self.unsampled else []
            ids.pop()
        return ids

    def _candidates(self, data: bytes, at: int) -> Iterator[int]:
        """Yield the lengths of tokens that match at a position, longest first."""
        lengths = self._lengths.get(data[at], ()) if at < len(data) else ()
        return (length for length in lengths if data[at : at + length] in self._ids)


def first_allowed(mask: bytes, rng: random.Random, without: set[int]) -> int | None:
    """Return an allowed token that is not in `without`, searching from a random position; None: no token is left."""
    bits = int.from_bytes(mask, "little")
    for token in without:
        bits &= ~(1 << token)
    if not bits:
        return None
    start = rng.randrange(8 * len(mask))
    above = bits >> start
    if above:
        return start + (above & -above).bit_length() - 1
    return (bits & -bits).bit_length() - 1


def attempt(tokenizer: Any, unsampled: Collection[int], grammar: str, limits: Any) -> tuple[str | None, int]:
    """Compile a grammar and generate the first tokens of a few outputs. Returns the error, if any, and the memory
    growth of this process in bytes."""
    from llguidance import LLMatcher

    give_back_memory()
    before = resident_bytes()
    root = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    error = begin_outputs(root, {*tokenizer.eos_tokens, *unsampled})
    return error, max(0, resident_bytes() - before)  # while the root is still in memory


def begin_outputs(root: Any, without: set[int]) -> str | None:
    """Generate the first tokens of a few outputs, excluding the tokens `without`. Returns the error, if any."""
    if root.is_error():
        return root.get_error()
    mask = root.compute_bitmask()
    if root.is_error():
        return root.get_error()
    if root.is_stopped() or first_allowed(mask, random.Random(0), without) is None:
        return "unsatisfiable: it allows no text, or only the empty text"
    for seed in range(NUM_TRIALS):
        matcher, rng = root.deep_copy(), random.Random(seed)
        for _ in range(TRIAL_TOKENS):
            token = first_allowed(matcher.compute_bitmask(), rng, without)
            if matcher.is_error():
                return matcher.get_error()
            if token is None:
                break
            matcher.consume_token(token)
            if matcher.is_error():
                return matcher.get_error()
            if matcher.is_stopped():
                break
    return None


def give_back_memory() -> None:
    """Return memory freed by earlier trials to the system, because the next trial is measured by the growth of the
    process."""
    # Without glibc, only the memory of a grammar beyond that of the largest earlier grammar is counted.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, without file pages, which the system may drop; 0 if it
    cannot be read."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def limit_memory(more_bytes: int) -> None:
    """Limit the memory growth of this process; an allocation beyond the limit kills it."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return  # not Linux: only the time is limited


def serve() -> None:
    def answer(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    setup = json.loads(sys.stdin.readline())
    try:
        from llguidance import LLParserLimits, LLTokenizer

        limits = LLParserLimits(**setup["limits"])
        table = TokenTable([bytes.fromhex(token) for token in setup["tokens"]], setup["special"], setup["eos"])
        tokenizer = LLTokenizer(table, eos_token=setup["eos"])  # pyright: ignore[reportArgumentType]
    except Exception as error:
        answer(error=str(error) or type(error).__name__)
        return
    limit_memory(setup["memory_bytes"])
    answer(error=None)
    while line := sys.stdin.readline():
        # If the parent has exited and cannot kill this process, the default action of the signal does.
        signal.alarm(setup["alarm_s"])
        try:
            error, num_bytes = attempt(tokenizer, table.unsampled, json.loads(line)["grammar"], limits)
        except Exception as caught:
            error, num_bytes = str(caught) or type(caught).__name__, 0
        signal.alarm(0)
        answer(error=error, bytes=num_bytes)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
