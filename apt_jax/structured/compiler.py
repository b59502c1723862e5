"""Structured output: turns users' schemas, regular expressions and grammars into masks over the vocabulary.

llguidance provides a lexer and an Earley parser, which determine the allowed tokens in each state of an output. A
grammar is processed in these steps:

1. `apt_jax.structured.forms.grammar_text` converts it to llguidance's notation.
2. `GrammarCompiler` looks it up in its cache. If it is new, a child process (`apt_jax.structured.compile_worker`)
   compiles it first and generates the first tokens of a few outputs, within two seconds and a memory limit: only a
   process can be killed at any time, and some grammars crash the compiler. Each error becomes one line for the user. A
   grammar that takes too much time or memory is rejected for a minute.
3. Then this process compiles it under the same limits, in a thread with a larger stack than the child's.
4. Each request starts with a copy (microseconds). The engine feeds every token to the copy and gets a mask from it
   before the next token is sampled (`apt_jax.structured.constraint`).

Nothing is ever stored on disk.
"""

import collections
import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from apt_jax.errors import InvalidRequestError, QueueFullError
from apt_jax.request import StructuredOutputsParams, TokenConstraint
from apt_jax.structured.compile_process import StandbyWorker, TrialLostError, TrialWorker
from apt_jax.structured.compile_worker import TokenTable
from apt_jax.structured.constraint import (
    LIMITS,
    MEMORY_LEFT_BYTES,
    LLConstraint,
    MatcherSource,
    Vocabulary,
    error_line,
)
from apt_jax.structured.forms import FIELD, field_of, grammar_text
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.utils.memory import spare_memory_bytes

logger = logging.getLogger(__name__)

COMPILE_LIMIT_S = 2.0
"""Time limit for the trial of one grammar, in seconds."""
CHILD_MEMORY_BYTES = 512 << 20
"""Memory that a trial may take in addition to the tokenizer, in bytes."""
KEEP_LOST_S = 60.0
"""Time in seconds for which a grammar whose trial was aborted is rejected without another trial."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 128 << 20

_WAIT_LIMIT_S = 10.0
_SLOW_SHARE = 0.25
"""Fraction of a trial's time limit after which another child is started."""
_LEAST_ENTRY_BYTES = 16 << 10


@dataclasses.dataclass(kw_only=True, slots=True)
class _Entry:
    """Result of a trial: the error, or the source of matchers."""

    error: str | None
    source: MatcherSource | None
    num_bytes: int
    until_s: float = math.inf
    """Expiry on the monotonic clock; afterwards the grammar is tried again."""


class LLGrammar:
    """A `Grammar` compiled by llguidance."""

    def __init__(self, source: MatcherSource, ends_at_eos: bool) -> None:
        self._source, self._ends_at_eos = source, ends_at_eos

    def start(self) -> LLConstraint:
        return LLConstraint(self._source, self._ends_at_eos)


class PendingGrammar:
    """A `Grammar` that has to be compiled first; see `GrammarCompiler.begin`.

    Attributes:
        was_tried: True if the grammar was compiled before and is only compiled again to free memory, without a trial.
    """

    def __init__(
        self, compiler: "GrammarCompiler", field: str, text: str, key: bytes, ends_at_eos: bool, was_tried: bool
    ) -> None:
        self.was_tried = was_tried
        self._compiler, self._field, self._text, self._key = compiler, field, text, key
        self._ends_at_eos = ends_at_eos

    def start(self) -> TokenConstraint:
        """Raise an error: a pending grammar must be compiled first."""
        raise RuntimeError("a constraint was not compiled before its request was submitted")

    def known(self) -> LLGrammar | None:
        """Return the compiled grammar if the cache has it by now and it need not be compiled again, else None. Never
        waits. Raises: see `compile`."""
        return self._compiler._known(self._field, self._key, self._ends_at_eos)

    def compile(self) -> LLGrammar:
        """Compile the grammar; this may take seconds. Raises: see `GrammarCompiler.compile`."""
        return self._compiler._compile(self._field, self._text, self._key, self._ends_at_eos)


class GrammarCompiler:
    """Compiles users' constraints, one new grammar at a time. Thread-safe.

    Args:
        tokenizer: tokenizer of the model, or a function that returns the text of its tokenizer.json. The tokens are
            read when the first grammar is compiled.
        vocab_size: vocabulary size of the model; ids without a token are never allowed.
        eos_token_ids: ids that end an output.
        num_tokens: number of leading token ids to use, if the tokenizer has more than the model was trained with; None:
            all.
        limit_s: time limit for the trial of one grammar, in seconds.
        keep_lost_s: time in seconds for which a grammar whose trial was aborted is rejected without another trial.
        max_entries, max_bytes: limits of the cache.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[], str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_tokens: int | None = None,
        limit_s: float = COMPILE_LIMIT_S,
        keep_lost_s: float = KEEP_LOST_S,
        max_entries: int = MAX_CACHED,
        max_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self.num_trials = 0
        """Number of trials so far, one for each grammar that was not in the cache."""
        self.cached_bytes = 0
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer()))
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._our_eos = tuple(t for t in eos_token_ids if t < vocab_size)
        # llguidance needs an EOS token of the tokenizer; if there is none, it gets a text token that is never sampled.
        self._num_tokens = min(vocab_size, tokenizer.vocab_size if num_tokens is None else num_tokens)
        self._their_eos = tuple(t for t in self._our_eos if t < self._num_tokens) or (self._num_tokens - 1,)
        self._limit_s, self._keep_lost_s = limit_s, keep_lost_s
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._vocabulary: Vocabulary | None = None
        self._worker: TrialWorker | None = None
        self._standby: StandbyWorker | None = None
        self._busy = threading.Lock()
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool = True) -> LLGrammar:
        """Return the grammar of a checked constraint. This may wait for a trial: do not call it in the engine thread.

        Args:
            wanted: constraint checked by `apt_jax.validation`.
            ends_at_eos: True if EOS may be sampled when the output is complete; otherwise the output continues as long
                as the grammar allows.

        Raises:
            InvalidRequestError: the constraint cannot be used; `field` names it.
            QueueFullError: too many grammars are waiting for a trial.
            MemoryError: not enough memory is free at the moment.
        """
        grammar = self.begin(wanted, ends_at_eos=ends_at_eos)
        return grammar.compile() if isinstance(grammar, PendingGrammar) else grammar

    def begin(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool = True) -> LLGrammar | PendingGrammar:
        """Like `compile`, but never waits: a grammar that is not in the cache, or has to be compiled again to free
        memory, is returned as a `PendingGrammar`."""
        field = f"{FIELD}.{field_of(wanted)}"
        try:
            text = grammar_text(wanted)
        except ImportError:
            raise InvalidRequestError(
                FIELD,
                "this installation has no llguidance; install apt-jax[structured] to serve it",
            ) from None
        except ValueError as error:
            raise InvalidRequestError(field, error_line(str(error), 480)) from None
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        known = self._known(field, key, ends_at_eos)
        if known is not None:
            return known
        return PendingGrammar(self, field, text, key, ends_at_eos, was_tried=self._find(key) is not None)

    def _known(self, field: str, key: bytes, ends_at_eos: bool) -> LLGrammar | None:
        entry = self._find(key)
        if entry is None or (entry.source is not None and entry.source.is_worn):
            return None
        return self._grammar(field, entry, ends_at_eos)

    def _compile(self, field: str, text: str, key: bytes, ends_at_eos: bool) -> LLGrammar:
        entry = self._find(key)
        if entry is None:
            if not self._busy.acquire(timeout=_WAIT_LIMIT_S):
                raise QueueFullError("too many new grammars are being compiled; retry later (structured_outputs)", 2.0)
            try:
                entry = self._find(key) or self._store(key, self._try(text))
            finally:
                self._busy.release()
        if entry.source is not None:
            entry.source.renew_if_worn()
        return self._grammar(field, entry, ends_at_eos)

    def _grammar(self, field: str, entry: _Entry, ends_at_eos: bool) -> LLGrammar:
        if entry.source is None:
            raise InvalidRequestError(field, entry.error or "unusable")
        return LLGrammar(entry.source, ends_at_eos)

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Stop the child process; the next new grammar starts another."""
        with self._busy:
            standby, self._standby = self._standby, None
            worker, self._worker = self._worker, None
            for one in (worker, None if standby is None else standby.take()):
                if one is not None:
                    one.kill()

    def _find(self, key: bytes) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if time.monotonic() > entry.until_s:
                del self._entries[key]
                self.cached_bytes -= entry.num_bytes
                return None
            self._entries.move_to_end(key)
            return entry

    def _store(self, key: bytes, entry: _Entry) -> _Entry:
        with self._lock:
            if entry.num_bytes <= self._max_bytes:
                self._entries[key] = entry
                self.cached_bytes += entry.num_bytes
            while len(self._entries) > self._max_entries or self.cached_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.cached_bytes -= oldest.num_bytes
        return entry

    def _try(self, text: str) -> _Entry:
        self.num_trials += 1
        vocabulary = self._vocabulary or self._make_vocabulary()
        if self._worker is not None and not self._worker.is_alive:
            self._worker.kill()
            self._worker = None
        if self._worker is None:
            standby, self._standby = self._standby, None
            self._worker = (standby and standby.take()) or TrialWorker(self._setup(vocabulary))
        slow = threading.Timer(_SLOW_SHARE * self._limit_s, self._prepare_standby, [vocabulary])
        slow.daemon = True
        slow.start()
        try:
            error, num_bytes = self._worker.attempt(text, self._limit_s)
        except TrialLostError as lost:
            self._worker.kill()
            self._worker = None
            # Kept only for a while: the cause may be a busy machine, not the grammar.
            until_s = time.monotonic() + (self._keep_lost_s if lost.keep else 0.0)
            return _Entry(error=str(lost), source=None, num_bytes=1024, until_s=until_s)
        finally:
            slow.cancel()
        num_bytes = max(num_bytes, 8 * len(text), _LEAST_ENTRY_BYTES)
        if error is not None:
            line = error_line(error)
            return _Entry(error=line, source=None, num_bytes=len(line) + 1024)
        # llguidance aborts the process if an allocation fails. That was harmless in the child, but not here.
        if spare_memory_bytes() < 2 * num_bytes + MEMORY_LEFT_BYTES:
            raise MemoryError("for a grammar")
        source = MatcherSource(vocabulary, text)
        if source.error is not None:
            # llguidance's limits count work, not time: the child would have failed with the same error.
            return _Entry(error=source.error, source=None, num_bytes=1024)
        return _Entry(error=None, source=source, num_bytes=num_bytes)

    def _setup(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return the settings that are sent to a child when it starts."""
        return {
            "tokens": [token.hex() for token in vocabulary.tokens],
            "special": sorted(self._special_ids),
            "eos": list(self._their_eos),
            "limits": dict(LIMITS),
            "memory_bytes": CHILD_MEMORY_BYTES,
            "alarm_s": max(1, round(2 * self._limit_s)),
        }

    def _prepare_standby(self, vocabulary: Vocabulary) -> None:
        """Start another child during a slow trial, so that the next trial need not wait for a child if the current
        child is lost."""
        if self._standby is None:
            self._standby = StandbyWorker(self._setup(vocabulary))

    def _make_vocabulary(self) -> Vocabulary:
        from llguidance import LLTokenizer

        continuations = self._tokenizer.continuations
        if not continuations.is_exact or continuations.word_end is not None:
            raise InvalidRequestError(
                FIELD,
                "this model's tokenizer cannot be used for it: the text of a token depends on the tokens around it",
            )
        size, special = self._vocab_size, self._special_ids
        tokens = continuations.pieces(self._num_tokens)
        tokens += [b""] * (size - len(tokens))
        for token_id in special:
            tokens[token_id] = (self._tokenizer.backend.id_to_token(token_id) or "").encode()
        try:
            table = TokenTable(tokens, special, self._their_eos, continuations.encoder())
            tokenizer = LLTokenizer(table, eos_token=list(self._their_eos))  # pyright: ignore[reportArgumentType]
        except Exception as error:
            logger.warning("structured outputs: llguidance cannot use this tokenizer: %s", error)
            raise InvalidRequestError(FIELD, "this model's tokenizer cannot be used for it") from None
        self._vocabulary = Vocabulary(
            tokenizer=tokenizer,
            tokens=tokens,
            their_eos=self._their_eos,
            our_eos=self._our_eos,
            num_words=-(-len(table.tokens) // 32),
        )
        return self._vocabulary

    @property
    def _special_ids(self) -> list[int]:
        return [i for i in self._tokenizer.special_ids if i < self._num_tokens]


class PendingGrammars:
    """A grammar source (`apt_jax.validation.limits.GrammarSource`) that never waits for a compilation.

    Args:
        compiler: compiler of the grammars.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> LLGrammar | PendingGrammar:
        """See `GrammarCompiler.begin`."""
        return self._compiler.begin(wanted, ends_at_eos=ends_at_eos)
