"""Structured output: schemas, expressions and grammars of users become masks over the vocabulary.

llguidance does the work: a lexer and an Earley parser that say, for each state of an output, which tokens lead on. A
grammar arrives like this:

1. `grammar_text` writes it in llguidance's notation; `apt_jax.validation` has bounded its size and depth before.
2. `GrammarCompiler` looks it up in its cache. If it is new, a child process (`apt_jax.structured.compile_worker`)
   compiles it first, with two seconds and a bound on memory, and begins a few outputs: nothing less than a process can
   be stopped, and some grammars crash the compiler. What is wrong with it becomes one line for the user.
   What takes too much time or memory is remembered for a minute.
3. Only then this process compiles it, in a thread with a larger stack than the child's, under the same limits.
4. Each request starts with a copy (microseconds). The engine tells the copy every token and asks it for a mask before
   the next one is sampled.

A mask that would take too long is an error of its request alone: llguidance counts lexer states, parser items and work
a step, see `LIMITS`. Copies share one lexer, whose states add up over all outputs of a grammar: when it has been used for
long, the grammar is compiled again for the next ones, and where it is full before, each goes on with one of its own
(`_Source`). Nothing is ever stored on disk.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from apt_jax.errors import AptJaxError, InvalidRequestError, QueueFullError, json_kind
from apt_jax.request import StructuredOutputsParams, TokenConstraint
from apt_jax.structured.compile_worker import TokenTable
from apt_jax.structured.json_schema import closed, exact_schema
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.utils.memory import spare_memory_bytes
from apt_jax.utils.worker_process import (
    ChildDiedError,
    ChildGoneError,
    ChildProcess,
    ChildTimeoutError,
)

logger = logging.getLogger(__name__)

FIELD = "structured_outputs"
COMPILE_LIMIT_S = 2.0
"""Time limit of the trial of one grammar."""
CHILD_MEMORY_BYTES = 512 << 20
"""Memory that a trial may take beyond the tokenizer."""
KEEP_LOST_S = 60.0
"""Seconds for which a grammar whose trial was ended is rejected without another trial."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 128 << 20
DEFAULT_WHITESPACE = r"\r?\n[ \t]{0,20}|[ \t]{1,2}"
"""Between the parts of a JSON value: what pretty-printers write. Bounded: small models go on with spaces for ever."""

LIMITS: Mapping[str, int | bool] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,  # 7 ms
    "step_max_items": 25_000,  # 1 ms
    "max_lexer_states": 20_000,  # of 1 to 2 kB
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""`llguidance.LLParserLimits`: what one grammar and one step of it may take."""

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_START_LIMIT_S = 60.0  # importing llguidance and reading a large tokenizer on a busy machine
_WAIT_LIMIT_S = 10.0
_SLOW_SHARE = 0.25
"""Part of the time limit of a trial after which the next child is started."""
_STACK_BYTES = 64 << 20
_MEMORY_LEFT_BYTES = _STACK_BYTES + (64 << 20)
"""Memory that a compilation leaves to others, its stack among it."""
_LEAST_ENTRY_BYTES = 16 << 10
_STACK_SIZE = threading.Lock()  # the size is one of the whole process
_WORN_MASKS = 5_000
"""Number of masks after which a grammar is compiled again for later requests, which frees its lexer's memory."""
_OWN_LEXER_LIMIT_S = 0.02
"""Outputs get a lexer of their own only where compiling the grammar takes no longer: it is done in the engine's thread."""


class GrammarError(AptJaxError):
    """A constraint that cannot go on; the text is for users."""


class NoTokenLeftError(GrammarError):
    """The request itself excludes every token.

    Args:
        field: the one that excludes the last.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: leaves no token here that the rest of the request allows")


# --- what users write --------------------------------------------------------------------------------------------


def field_of(wanted: StructuredOutputsParams) -> str:
    """Return the name of the field that is set."""
    for name in ("json", "regex", "choice", "grammar", "json_object"):
        if getattr(wanted, name) is not None:
            return name
    raise ValueError("no constraint")


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """Return a checked constraint in llguidance's notation. `json` is JSON text here."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(re.escape(text) for text in wanted.choice))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    return LLMatcher.grammar_from_json_schema(json_schema_of(wanted))


def json_schema_of(wanted: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema of a checked `json` or `json_object`, as llguidance compiles it.

    Raises:
        ValueError: a keyword cannot be enforced; one line.
    """
    schema = json.loads(wanted.json) if isinstance(wanted.json, str) else {"type": "object"}
    if isinstance(schema, dict):
        schema = closed(schema)
    whitespace: dict[str, Any] = (
        {"whitespace_flexible": False}
        if wanted.disable_any_whitespace
        else {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}
    )
    return exact_schema(schema, whitespace)


def _as_lark(grammar: str) -> str:
    """A grammar in llguidance's dialect of Lark; one in GBNF, which has ``::=`` in its rules, is rewritten (in linear
    time)."""
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the module raises plain Exception, too
        raise ValueError(f"not GBNF: {error}") from None


def from_response_format(response_format: object) -> StructuredOutputsParams | None:
    """OpenAI's ``response_format`` as ours; None for plain text.

    Raises:
        InvalidRequestError: not one of ``{"type": "text"}``, ``{"type": "json_object"}`` and
            ``{"type": "json_schema", "json_schema": {"schema": ...}}``.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise InvalidRequestError("response_format", f"{json_kind(response_format)} is not an object")
    kind = response_format.get("type")
    known = {"json_schema": {"type", "json_schema"}}.get(str(kind), {"type"})
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError("response_format", "type must be 'text', 'json_object' or 'json_schema'")
    if unknown := response_format.keys() - known:
        raise InvalidRequestError("response_format", f"unknown field {str(min(map(str, unknown)))[:40]!r}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError("response_format.json_schema", "needs an object `schema`")
    return StructuredOutputsParams(json=schema)


# --- masks -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """A tokenizer in llguidance's form, and the tokens that end an output."""

    tokenizer: Any
    """`llguidance.LLTokenizer`."""
    tokens: Sequence[bytes]
    """Bytes that each token adds to a text, or the name of a special one."""
    their_eos: tuple[int, ...]
    """Ids that it takes for such ends."""
    our_eos: tuple[int, ...]
    """Ids that end an output, of the model's vocabulary."""
    num_words: int
    """Words of a mask of llguidance; those after the words of the model's vocabulary are not sampled."""


class _Source:
    """Makes copies of one grammar, which share a lexer: its states, and an overflow of them.

    Args:
        vocabulary: of the model.
        text: the grammar in llguidance's notation; it has been tried.
    """

    def __init__(self, vocabulary: _Vocabulary, text: str) -> None:
        self.num_masks = 0
        """Filled with the present lexer, about."""
        self.is_full = False
        """The present lexer has come to its limit."""
        self.vocabulary, self._text = vocabulary, text
        self._lock = threading.Lock()
        started = time.monotonic()
        self._root = _root(vocabulary, text)
        self._compile_s = time.monotonic() - started

    @property
    def error(self) -> str | None:
        return _line(self._root.get_error()) if self._root.is_error() else None

    def copy(self) -> Any:
        """A matcher at the beginning."""
        with self._lock:
            return self._root.deep_copy()

    def alone(self) -> Any:
        """A matcher at the beginning with a lexer of its own; None where that would take too long."""
        self.is_full = True
        if self._compile_s > _OWN_LEXER_LIMIT_S:
            return None
        return _root(self.vocabulary, self._text)

    @property
    def is_worn(self) -> bool:
        """The lexer has been used for long, or is full."""
        return self.num_masks > _WORN_MASKS or self.is_full

    def renew_if_worn(self) -> None:
        """Compile the grammar again where its lexer is worn; not for the engine's thread."""
        if self.is_worn:
            self.num_masks, self.is_full = 0, False
            root = _root(self.vocabulary, self._text)
            with self._lock:
                self._root = root


class LLConstraint:
    """A `TokenConstraint` over one `llguidance.LLMatcher`."""

    def __init__(self, source: _Source, ends_at_eos: bool) -> None:
        self._source, self._vocabulary, self._ends_at_eos = source, source.vocabulary, ends_at_eos
        self.matcher = source.copy()
        self._tokens: list[int] = []
        self._is_alone = False

    @property
    def ended(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        while not self.matcher.consume_token(token_id):
            self._go_on_or_raise()
        self._tokens.append(token_id)

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        self._compute(row)
        return self.check_mask(row)

    def check_mask(self, row: NDArray[np.int32]) -> bool:
        """Finish a row after llguidance has written the row; see `fill_mask`."""
        while self.matcher.is_error():
            self._go_on_or_raise()
            self._compute(row)
        self._source.num_masks += 1
        words = row.view(np.uint32)
        may_end = self.matcher.is_accepting()
        for token in self._vocabulary.their_eos:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not words.any():
            if may_end:
                return False
            raise NoTokenLeftError(FIELD)
        if may_end and self._ends_at_eos:
            for token in self._vocabulary.our_eos:
                words[token >> 5] |= np.uint32(1 << (token & 31))
        return True

    @property
    def num_words(self) -> int:
        """Words of a mask of llguidance, of which a row has the first ones."""
        return self._vocabulary.num_words

    def _compute(self, row: NDArray[np.int32]) -> None:
        mask = row if self.num_words <= row.size else np.zeros(self.num_words, np.int32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if mask is not row:
            row[:] = mask[: row.size]

    def _go_on_or_raise(self) -> None:
        """After an error: go on with a lexer of one's own where the one that all outputs of the grammar share is full.

        Raises:
            GrammarError: anything else is wrong, or it was this output's own.
        """
        error = self.matcher.get_error()
        if error.startswith("NoExtension"):  # a vocabulary of words, none of which leads on
            raise NoTokenLeftError(FIELD)
        own = None
        if error.startswith("lexer error") and not self._is_alone:
            own = self._source.alone()
        if own is None:
            raise GrammarError(_line(error))
        self.matcher, self._is_alone = own, True
        if self._tokens and not own.consume_tokens(self._tokens):
            raise GrammarError(_line(own.get_error()))


class MaskFiller:
    """Fills the masks of a step, side by side where there are cores and rows enough."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = max(1, (os.cpu_count() or 1) - 1) if num_threads is None else num_threads
        self._executor: Any = None

    def __call__(
        self, constraints: Sequence[TokenConstraint], masks: NDArray[np.int32], rows: Sequence[int]
    ) -> list[bool | Exception]:
        """Fill ``masks[rows[i]]`` for ``constraints[i]``; what `fill_mask` would return or raise for each."""
        alone = self._num_threads < 2 or len(constraints) < 4
        if alone or not all(isinstance(c, LLConstraint) for c in constraints):
            return fill_one_by_one(constraints, masks, rows)
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        ours = [c for c in constraints if isinstance(c, LLConstraint)]
        pairs = [(c.matcher, row) for c, row in zip(ours, rows, strict=True)]
        num_words = max(c.num_words for c in ours)
        wide = masks if num_words <= masks.shape[1] else np.zeros((masks.shape[0], num_words), np.int32)
        self._executor.unsafe_compute_mask_ptr(pairs, wide.ctypes.data, wide.strides[0], wide.shape[0])
        if wide is not masks:
            masks[list(rows)] = wide[list(rows), : masks.shape[1]]
        return [_outcome(c.check_mask, masks[row]) for c, row in zip(ours, rows, strict=True)]


def fill_one_by_one(
    constraints: Sequence[TokenConstraint], masks: NDArray[np.int32], rows: Sequence[int]
) -> list[bool | Exception]:
    """Fill ``masks[rows[i]]`` for ``constraints[i]``; what `fill_mask` would return or raise for each."""
    return [_outcome(c.fill_mask, masks[row]) for c, row in zip(constraints, rows, strict=True)]


def _outcome(fill: Any, row: NDArray[np.int32]) -> bool | Exception:
    try:
        return fill(row)
    except Exception as error:
        return error


# --- compiling ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True, slots=True)
class _Entry:
    """A grammar that has been tried: what is wrong with it, or where its copies come from."""

    error: str | None
    source: _Source | None
    num_bytes: int
    until_s: float = math.inf
    """On the monotonic clock; afterwards it is tried again."""


class LLGrammar:
    """A `Grammar` of llguidance."""

    def __init__(self, source: _Source, ends_at_eos: bool) -> None:
        self._source, self._ends_at_eos = source, ends_at_eos

    def start(self) -> LLConstraint:
        return LLConstraint(self._source, self._ends_at_eos)


class PendingGrammar:
    """A `Grammar` that has to be compiled first; see `GrammarCompiler.begin`.

    Attributes:
        was_tried: it has been compiled before, and is only compiled again for its memory: no trial is needed.
    """

    def __init__(
        self, compiler: "GrammarCompiler", field: str, text: str, key: bytes, ends_at_eos: bool, was_tried: bool
    ) -> None:
        self.was_tried = was_tried
        self._compiler, self._field, self._text, self._key = compiler, field, text, key
        self._ends_at_eos = ends_at_eos

    def start(self) -> TokenConstraint:
        """Not before it is compiled."""
        raise RuntimeError("a constraint was not compiled before its request was submitted")

    def known(self) -> LLGrammar | None:
        """The compiled grammar if it needs no more work by now; quick. Raises InvalidRequestError as `compile`."""
        return self._compiler._known(self._field, self._key, self._ends_at_eos)

    def compile(self) -> LLGrammar:
        """Compile it: it may take seconds. Raises what `GrammarCompiler.compile` raises."""
        return self._compiler._compile(self._field, self._text, self._key, self._ends_at_eos)


class GrammarCompiler:
    """Compiles users' constraints; from any thread, one new grammar at a time.

    Args:
        tokenizer: its tokens are read when the first grammar comes, as they go on with a text; or what gives its
            tokenizer.json.
        vocab_size: V of the model; ids that the tokenizer does not have are never allowed.
        eos_token_ids: end an output.
        num_tokens: of those of the tokenizer, if there are more than a model has been trained with; None: all.
        limit_s: for the trial of one grammar.
        keep_lost_s: time for which a grammar is rejected without another trial, if its trial had to be ended.
        max_entries, max_bytes: of the cache.
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
        """Grammars that were not in the cache."""
        self.cached_bytes = 0
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer()))
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._our_eos = tuple(t for t in eos_token_ids if t < vocab_size)
        # llguidance wants one that the tokenizer has; without any, a text token serves and can then not be sampled.
        self._num_tokens = min(vocab_size, tokenizer.vocab_size if num_tokens is None else num_tokens)
        self._their_eos = tuple(t for t in self._our_eos if t < self._num_tokens) or (self._num_tokens - 1,)
        self._limit_s, self._keep_lost_s = limit_s, keep_lost_s
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._vocabulary: _Vocabulary | None = None
        self._worker: _Worker | None = None
        self._standby: _Standby | None = None
        self._busy = threading.Lock()
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool = True) -> LLGrammar:
        """Return the grammar of a checked constraint. It waits for its trial: call it where nobody else waits.

        Args:
            wanted: from validation.
            ends_at_eos: whether EOS may be sampled where the output may end; without it an output goes on as long as
                it can.

        Raises:
            InvalidRequestError: it cannot be used; the field names the constraint.
            QueueFullError: too many grammars are being tried.
            MemoryError: there is not enough memory for it now.
        """
        grammar = self.begin(wanted, ends_at_eos=ends_at_eos)
        return grammar.compile() if isinstance(grammar, PendingGrammar) else grammar

    def begin(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool = True) -> LLGrammar | PendingGrammar:
        """As `compile`, but quick: what is not in the cache is returned to be compiled where nobody else waits."""
        field = f"{FIELD}.{field_of(wanted)}"
        try:
            text = grammar_text(wanted)
        except ImportError:
            raise InvalidRequestError(
                FIELD,
                "this installation has no llguidance; install apt-jax[structured] to serve it",
            ) from None
        except ValueError as error:
            raise InvalidRequestError(field, _line(str(error), 480)) from None
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
        """End the child process; the next new grammar starts another one."""
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
            self._worker = (standby and standby.take()) or _Worker(self._setup(vocabulary))
        slow = threading.Timer(_SLOW_SHARE * self._limit_s, self._prepare_standby, [vocabulary])
        slow.daemon = True
        slow.start()
        try:
            error, num_bytes = self._worker.attempt(text, self._limit_s)
        except _WorkerLostError as lost:
            self._worker.kill()
            self._worker = None
            # Not for ever: a busy machine is no property of the grammar.
            until_s = time.monotonic() + (self._keep_lost_s if lost.keep else 0.0)
            return _Entry(error=str(lost), source=None, num_bytes=1024, until_s=until_s)
        finally:
            slow.cancel()
        num_bytes = max(num_bytes, 8 * len(text), _LEAST_ENTRY_BYTES)
        if error is not None:
            line = _line(error)
            return _Entry(error=line, source=None, num_bytes=len(line) + 1024)
        # llguidance ends its process where it gets no memory: the child's end was harmless, this one's would not be.
        if spare_memory_bytes() < 2 * num_bytes + _MEMORY_LEFT_BYTES:
            raise MemoryError("for a grammar")
        source = _Source(vocabulary, text)
        if source.error is not None:
            # llguidance's limits count work, not time: the child would have said the same.
            return _Entry(error=source.error, source=None, num_bytes=1024)
        return _Entry(error=None, source=source, num_bytes=num_bytes)

    def _setup(self, vocabulary: _Vocabulary) -> dict[str, Any]:
        """Settings of a child, which is sent them first."""
        return {
            "tokens": [token.hex() for token in vocabulary.tokens],
            "special": sorted(self._special_ids),
            "eos": list(self._their_eos),
            "limits": dict(LIMITS),
            "memory_bytes": CHILD_MEMORY_BYTES,
            "alarm_s": max(1, round(2 * self._limit_s)),
        }

    def _prepare_standby(self, vocabulary: _Vocabulary) -> None:
        """Start another child while a trial is slow, which may end its own: whoever is next does not wait for it."""
        if self._standby is None:
            self._standby = _Standby(self._setup(vocabulary))

    def _make_vocabulary(self) -> _Vocabulary:
        from llguidance import LLTokenizer

        continuations = self._tokenizer.continuations
        if not continuations.is_exact or continuations.word_end is not None:
            raise InvalidRequestError(
                FIELD,
                "this model's tokenizer cannot be used for it: what a token adds to a text is not settled by the token",
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
        self._vocabulary = _Vocabulary(
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
    """A `apt_jax.validation.limits.GrammarSource` that never waits.

    Args:
        compiler: makes the grammars.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> LLGrammar | PendingGrammar:
        """See `GrammarCompiler.begin`."""
        return self._compiler.begin(wanted, ends_at_eos=ends_at_eos)


def _root(vocabulary: _Vocabulary, text: str) -> Any:
    """A matcher at the beginning; in error where the text is wrong."""
    from llguidance import LLMatcher, LLParserLimits

    def make() -> Any:
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # by name
        root = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if not root.is_error():
            root.compute_bitmask()  # copies take over what this has built
        return root

    return _in_deep_thread(make)


def _in_deep_thread(function: Any) -> Any:
    """Run in a thread with a larger stack than the child's: what has not overflowed there does not here."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), name="apt-jax-grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if not result:
        raise RuntimeError("a grammar that had been tried could not be compiled")
    return result[0]


def _line(message: str, most: int = 240) -> str:
    """An error of llguidance as one line with the way out."""
    text = " ".join(re.split("<state>|<backtrace>|<non-verbose/>", message)[0].split())
    text = text.replace("json-schema:///", "")
    _, inline, of_schema = text.partition("failed to compile JSON schema: ")
    if inline:  # in a grammar, of which lines with numbers follow
        text = re.split(r" \d+ \| ", of_schema)[0]
    if text.startswith("NoExtension"):
        text = "unsatisfiable: no text matches it"
    elif "Unimplemented keys" in text:
        text += "; leave out these keywords or say the same with others"
    elif re.search("limit|max is|too (many|complex|big)", text, re.IGNORECASE):
        text += "; make it smaller or less ambiguous"
    elif text.startswith("panic"):
        text = "too large for the compiler; make it smaller"
    return text if len(text) <= most else f"{text[: most - 3]}..."


# --- the child process -------------------------------------------------------------------------------------------


class _WorkerLostError(Exception):
    """The child was killed or has died; the text is for users.

    Args:
        message: for users.
        keep: it says something about the grammar.
    """

    def __init__(self, message: str, *, keep: bool = True) -> None:
        super().__init__(message)
        self.keep = keep


class _Worker:
    """The child process of `apt_jax.structured.compile_worker`; for one thread at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._child = ChildProcess(Path(__file__).with_name("compile_worker.py"))
        try:
            answer = self._child.ask(setup, _START_LIMIT_S)
        except (ChildTimeoutError, ChildDiedError):
            raise RuntimeError("the grammar compiler process does not start") from None
        if answer["error"] is not None:
            self.kill()
            raise RuntimeError(f"grammar compiler process: {answer['error']}")

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def attempt(self, grammar: str, limit_s: float) -> tuple[str | None, int]:
        """Return the error of a grammar, if any, and about how many bytes it takes."""
        try:
            answer = self._child.ask({"grammar": grammar}, limit_s)
        except ChildTimeoutError:
            raise _WorkerLostError(
                f"compiling it takes more than {limit_s:g} s; make it smaller, with fewer alternatives and smaller counts"
            ) from None
        except ChildGoneError:
            raise _WorkerLostError("it could not be tried; send it again", keep=False) from None
        except ChildDiedError:
            raise _WorkerLostError("compiling it takes too much memory or nests too deeply; make it smaller") from None
        return answer["error"], answer["bytes"]

    def kill(self) -> None:
        self._child.close()


class _Standby:
    """A child that starts in a thread."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._made: list[_Worker] = []
        self._thread = threading.Thread(target=self._start, args=[setup], name="apt-jax-standby", daemon=True)
        self._thread.start()

    def _start(self, setup: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # whoever needs one tries again, and says why
            self._made.append(_Worker(setup))

    def take(self) -> _Worker | None:
        """Wait for the child and return it; None: it has not started, or has ended."""
        self._thread.join()
        worker = self._made.pop() if self._made else None
        if worker is not None and not worker.is_alive:
            worker.kill()
            return None
        return worker
