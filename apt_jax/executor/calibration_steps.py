"""Draws the steps that a calibration times: every program over its whole range, and steps like a server's.

A round runs every program once, with random rows, contexts, kinds, chunks and prefixes, so that the fit can separate
their effects. Steps as served have the lengths and mixtures of a chat service; they measure how well a fit predicts.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.costs.programs import ProgramShapes
from apt_jax.executor.jax_executor import JaxExecutor

_MOST_CHUNKS = 8
"""Maximum number of chunks in a step, unless a long hidden prefix or the number of tokens needs more."""
_LOG_TOKENS = (4.6, 1.6)
"""Mean and standard deviation of the logarithm of prompt lengths in ShareGPT (the bundled trace); answers are
similar."""
_TRACE_MAX_LEN = 2048
"""Maximum context length of the trace; lengths are scaled down for models that allow less."""


class Step(NamedTuple):
    """Rows of a step to time."""

    kinds: list[int]
    """Cache kind of each row: `KV` or `HIDDEN`."""
    starts: list[int]
    """Number of tokens of each row cached before the step."""
    lens: list[int]
    """Number of tokens that each row computes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A step with chunks, and a decode step of other rows that is timed along with it."""

    prefill: Step
    decode: Step | None
    """The decode step; None: the round has enough decode steps."""
    program: tuple[int, int]
    """Decode rows and chunk tokens that the program of `prefill` pads to."""
    held_back: bool = False
    """True for steps as served, which are held out of the fit."""


class CalibrationSteps:
    """Random steps that an executor can run.

    Args:
        shapes: padded shapes of the executor's programs.
        rng: random generator of all draws.
    """

    def __init__(self, executor: JaxExecutor, shapes: ProgramShapes, rng: np.random.Generator) -> None:
        self._shapes, self._rng = shapes, rng
        self._max_len, self._max_num_seqs = executor.max_model_len, executor.max_num_seqs
        self._max_tokens = executor.max_num_batched_tokens
        self._offered = [kind for kind in (KV, HIDDEN) if executor.kinds_offered[kind]]
        # At most the cached tokens that fit in the pool: with more, a step would read the same blocks several times.
        self._room = executor.num_blocks * executor.hidden_block_size
        if KV in self._offered:
            self._room = executor.num_blocks * executor.block_size // 2

    def round(self, *, ends_first: bool = False) -> list[Episode]:
        """Return episodes that run every program a step can need once, in random order; at least about half of the
        episodes have a decode step.

        Args:
            ends_first: True: instead of the random order, run the smallest and largest sizes first, then repeatedly the
                middle of the largest gap, so that sizes in between can be interpolated early.
        """
        decodes = [i for i in range(len(self._shapes.decode_buckets)) if self._fewest(i) <= self._max_num_seqs]
        prefills = list[tuple[int, bool]]()
        for i in _ends_first(len(self._shapes.prefill_buckets)):
            fewer = self._shapes.prefill_buckets[i - 1] if i else 0
            for with_decode in (False, True) if self._shapes.mixed else (False,):
                if fewer < self._most_tokens(with_decode):
                    prefills.append((i, with_decode))
        decodes = [decodes[i] for i in _ends_first(len(decodes))]
        if not ends_first:
            self._rng.shuffle(decodes)
            self._rng.shuffle(prefills)
        out = []
        for turn in range(max(len(decodes), len(prefills))):
            prefill = self._prompts(*prefills[turn % len(prefills)])
            decode = None
            if turn < len(decodes) or turn % 2:
                decode = self._decode(decodes[turn // 2 % len(decodes) if turn >= len(decodes) else turn])
            out.append(Episode(prefill=prefill, decode=decode, program=self._program(prefill)))
        return out

    def as_served(self) -> Episode:
        """Return an episode as in a chat service: a decode step of some answers, and a step of one or a few prompts
        with or without decode rows."""
        rng = self._rng
        count = int(np.exp(rng.uniform(0, np.log(self._max_num_seqs))))
        decode = self._answers(count)
        chunks = min(int(rng.geometric(0.6)), self._most_chunks(False))
        lens = np.clip(self._lengths(chunks), 2, self._max_len)
        kept = np.diff(np.minimum(np.cumsum(lens), self._max_tokens), prepend=0)
        # A chunk of one token would be a decode row.
        lens = [n for n in kept.tolist() if n > 1] or [min(2, self._max_tokens)]
        starts = [0] * len(lens)
        if rng.random() < 1 / 4 and lens[0] < self._max_len - 1:  # a later chunk, or a prompt with a cached prefix
            starts[0] = self._contexts(1, self._max_len - lens[0])[0]
        beside = 0
        if rng.random() < 3 / 4:
            beside = min(count, self._max_num_seqs - len(lens))
            if not self._shapes.mixed:
                beside = min(beside, self._max_tokens - sum(lens))
        answers = self._answers(beside) if beside > 0 else Step([], [], [])
        kinds = self._kinds(len(lens) + len(answers.lens))
        step = Step(kinds, starts + answers.starts, lens + answers.lens)
        return Episode(prefill=step, decode=decode, program=self._program(step), held_back=True)

    def _program(self, step: Step) -> tuple[int, int]:
        """Return the decode rows and chunk tokens that the program of the step's chunks pads to."""
        kinds, starts, lens = (np.array(of_rows) for of_rows in step)
        num_decode = int(np.count_nonzero(lens == 1))
        prefix = self._shapes.hidden_prefix(starts[(lens > 1) & (kinds == HIDDEN)])
        used, _ = self._shapes.programs_of(num_decode, sum(step.lens) - num_decode, prefix)
        return used[-1]

    def _fewest(self, bucket: int) -> int:
        """Return the smallest number of rows that needs this bucket of decode rows."""
        return self._shapes.decode_buckets[bucket - 1] + 1 if bucket else 1

    def _most_chunks(self, with_decode: bool) -> int:
        return self._max_num_seqs - with_decode

    def _most_tokens(self, with_decode: bool) -> int:
        return min(self._max_tokens, self._most_chunks(with_decode) * self._max_len)

    def _kinds(self, count: int) -> list[int]:
        if len(self._offered) == 2 and self._rng.random() < 1 / 3:
            return self._rng.integers(0, 2, count).tolist()
        return [int(self._rng.choice(self._offered))] * count

    def _contexts(self, count: int, longest: int) -> list[int]:
        # Short contexts are the most common; scales are drawn uniformly in the logarithm.
        longest = max(1, min(longest, self._max_len - 2, self._room // count))
        scale = int(np.exp(self._rng.uniform(np.log(min(16, longest)), np.log(longest))))
        return self._rng.integers(1, scale + 1, count).tolist()

    def _lengths(self, count: int) -> NDArray[np.int64]:
        lengths = self._rng.lognormal(*_LOG_TOKENS, count) * min(1.0, self._max_len / _TRACE_MAX_LEN)
        return np.clip(lengths, 1, self._max_len).astype(np.int64)

    def _answers(self, count: int) -> Step:
        """Return `count` decode rows at random positions of their answers; fewer if the pool is too small."""
        rng = self._rng
        cached = self._lengths(count) + (rng.random(count) * self._lengths(count)).astype(np.int64)
        cached = np.clip(cached, 1, max(1, self._max_len - 2))
        fits = max(1, int(np.searchsorted(np.cumsum(cached), self._room, side="right")))
        starts = np.minimum(cached[:fits], max(1, self._room)).tolist()
        return Step(self._kinds(len(starts)), starts, [1] * len(starts))

    def _decode(self, bucket: int) -> Step:
        high = min(self._shapes.decode_buckets[bucket], self._max_num_seqs)
        count = int(self._rng.integers(self._fewest(bucket), high + 1))
        return Step(self._kinds(count), self._contexts(count, self._max_len), [1] * count)

    def _prompts(self, bucket: int, with_decode: bool) -> Step:
        """Return a step whose chunks need this bucket of tokens; it may also have decode rows, in the same program or
        in a separate program."""
        rng, buckets, max_len = self._rng, self._shapes.prefill_buckets, self._max_len
        low, high = (buckets[bucket - 1] + 1 if bucket else 1), min(buckets[bucket], self._most_tokens(with_decode))
        total = int(rng.integers(min(max(low, 2), high), high + 1))
        fewest, most = -(-total // max_len), min(total // 2, self._most_chunks(with_decode))
        chunks = min(fewest - 1 + int(rng.geometric(2 / 5)), max(fewest, min(_MOST_CHUNKS, most)))
        prefix = self._hidden_prefix()
        chunks = max(chunks, min(-(-prefix // max_len), most))
        # A chunk of one token would be a decode row.
        more = 1 if 2 * chunks <= total else 0
        rest = total - more * chunks
        cuts = np.sort(rng.choice(np.arange(1, rest), chunks - 1, replace=False))
        lens = np.minimum(np.diff([0, *cuts.tolist(), rest]) + more, max_len).tolist()
        for i in range(chunks):  # distribute the tokens of chunks that exceed `max_len`
            lens[i] = min(max_len, lens[i] + total - sum(lens))
        beside = 0
        if with_decode or (not self._shapes.mixed and rng.random() < 1 / 3):
            most = self._max_num_seqs - chunks
            if not with_decode:
                most = min(most, self._max_tokens - total)
            beside = int(np.exp(rng.uniform(0, np.log(most)))) if most > 0 else 0
        kinds = self._kinds(len(lens) + beside)
        starts = self._prefixes(lens, kinds, prefix)
        if beside:
            starts += self._contexts(beside, max_len)
        return Step(kinds, starts, lens + [1] * beside)

    def _hidden_prefix(self) -> int:
        """Draw the number of hidden prefix positions of a step from the range of one program size. Each size is drawn
        half as often as the next smaller size, because it takes longer. 0: any number."""
        sizes = [0, *sorted({room for _, room in self._shapes.prefix_sizes if room and room < self._room}), self._room]
        if HIDDEN not in self._offered or not self._shapes.prefix_sizes:
            return 0
        place = min(int(self._rng.geometric(1 / 2)), len(sizes) - 1)
        return int(self._rng.integers(sizes[place - 1] + 1, sizes[place] + 1))

    def _prefixes(self, lens: list[int], kinds: list[int], hidden_prefix: int) -> list[int]:
        """Draw the number of cached tokens of each chunk: 0 in half of the steps, and for about half of the chunks in
        the other steps.

        Args:
            hidden_prefix: total number of cached positions of the hidden chunks, as far as possible; 0: any number.
        """
        rng, starts = self._rng, [0] * len(lens)
        if rng.random() < 1 / 2:
            return starts
        for i, n in enumerate(lens):
            if n < self._max_len - 1 and rng.random() < 1 / 2:
                starts[i] = self._contexts(1, self._max_len - n)[0]
        rows = [i for i, n in enumerate(lens) if kinds[i] == HIDDEN and n < self._max_len - 1] if hidden_prefix else []
        for num_done, i in enumerate(rows):
            share = hidden_prefix / (len(rows) - num_done) * (rng.uniform(0.5, 1.5) if i != rows[-1] else 1.0)
            starts[i] = int(np.clip(share, 0, min(hidden_prefix, self._max_len - lens[i] - 1)))
            hidden_prefix -= starts[i]
        return starts


def _ends_first(count: int) -> list[int]:
    """Return 0 to count - 1 in this order: first, last, then the middle of each gap, the largest gap first."""
    order = list(dict.fromkeys([0, count - 1]))
    while len(order) < count:
        known = sorted(order)
        low = max(range(len(known) - 1), key=lambda i: known[i + 1] - known[i])
        order.append((known[low] + known[low + 1]) // 2)
    return order
