"""Sampling on the device: penalties, bias, temperature, top-k, top-p, min-p, seeded draws, log probabilities.

Thresholds are found by a search over the ordered bit patterns of the scores instead of by sorting: 8 passes over (B, V)
give the exact k-th largest value, while sorting 50,000 columns costs many times as much.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, UInt32

NUM_LOGPROBS = 20
"""Maximum number of most likely tokens whose log probabilities a step can return."""
NUM_BIASES = 336
"""Length of a row's bias list: 300 entries for the user, the others to forbid EOS and stop tokens before
`min_tokens`."""

_FORBIDDEN = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Per-row sampling settings on the device; B rows."""

    temperature: Float[Array, " B"]
    """Temperature; 0: greedy."""
    top_k: Int32[Array, " B"]
    """Number of most likely tokens to sample from; 0: all."""
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]
    position: Int32[Array, " B"]
    """Index of the token among the request's outputs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    """Per-row inputs of penalties and bias; passed only to steps that need them."""

    in_prompt: Bool[Array, "B V"]
    """True for tokens that occur in the prompt."""
    outputs: Int32[Array, "B V"]
    """Number of times that each token occurs in the outputs that the host has seen."""
    last_slot: Int32[Array, " B"]
    """Slot of the row if the host has not seen its last token yet, so the token is missing from `outputs`; otherwise
    out of range."""
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    bias_ids: Int32[Array, "B 336"]
    """Token ids of the bias list; padding has ids out of range, which are ignored."""
    bias_values: Float[Array, "B 336"]
    """Addend to each biased token's score; -inf forbids the token."""


def _ordered_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Map floats, which must not be NaN, to unsigned integers in the same order; both zeros give the same integer."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    negative = bits >= jnp.uint32(0x80000000)
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _split(x: Array) -> Array:
    """Reshape rows (B, V) to (B, parts, V / parts), because a GPU would reduce a whole row on one multiprocessor."""
    parts = math.gcd(x.shape[1], 32)
    return x.reshape(x.shape[0], parts, -1)


def _row_sums(terms: tuple[UInt32[Array, "B parts _"], ...]) -> tuple[UInt32[Array, " B"], ...]:
    """Sum several arrays over all axes except rows, in one reduction, which reads their common inputs once.

    The arrays are integers, so the sums do not depend on the order of addition, the device or the other rows.
    """

    def add(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(x, y, strict=True))

    zeros = (jnp.uint32(0),) * len(terms)
    return lax.reduce(lax.reduce(terms, zeros, add, (2,)), zeros, add, (1,))


def _largest_threshold(
    bits: UInt32[Array, "B V"],
    weigh: Callable[[Array], Array],
    wanted: UInt32[Array, " B"],
    unroll: bool,
) -> UInt32[Array, "B 1"]:
    """Return the largest threshold of each row such that the weights of scores at or above it sum to at least `wanted`;
    0: no threshold does.

    Each pass finds four bits: it reads a row once and sums the weights at or above each of 15 thresholds.

    Args:
        bits: ordered bits of the scores.
        weigh: function from the bits to the weights, uint32; a row's weights sum to less than 2³².
        wanted: minimum sum of each row.
        unroll: True: unroll the loop over the passes.
    """
    parts = _split(bits)

    def body(i: Array, t: Array) -> Array:
        shift = jnp.uint32(28) - jnp.uint32(4) * i.astype(jnp.uint32)
        weights = weigh(parts)
        thresholds = [(t | (jnp.uint32(digit) << shift))[:, None, None] for digit in range(1, 16)]
        above = tuple(jnp.where(parts >= threshold, weights, jnp.uint32(0)) for threshold in thresholds)
        digit = sum((total >= wanted).astype(jnp.uint32) for total in _row_sums(above))
        return t | (digit << shift)

    return lax.fori_loop(0, 8, body, jnp.zeros(bits.shape[0], jnp.uint32), unroll=unroll)[:, None]


def _normalise(relative: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Return probabilities, given their ratios to the largest probability. The ratios are split into three digits of 13
    bits, which are summed as integers; there must be fewer than 2¹⁹ tokens."""
    scale, rest = 2.0**13, _split(relative)
    digits = []
    for _ in range(3):
        rest = rest * scale
        digits.append(jnp.floor(rest).astype(jnp.uint32))
        rest = rest - jnp.floor(rest)
    total = jnp.zeros(relative.shape[0], jnp.float32)
    for digit in reversed(_row_sums(tuple(digits))):
        total = (total + digit.astype(jnp.float32)) / scale
    return relative / total[:, None]


_CERTAIN = 2.0**31
"""Probability 1 as an integer."""


def restrict(
    scores: Float[Array, "B V"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    branches: bool = True,
) -> Float[Array, "B V"]:
    """Set scores to -inf for every token outside top-k, then for every remaining token outside top-p, then for every
    token below min-p. Ties at a limit are kept.

    The most likely token is always kept. Top-p sums probabilities as multiples of 2⁻³¹.

    Args:
        scores: scores after temperature.
        top_k, top_p, min_p: see `SamplingRows`.
        branches: True: branch on the device, to skip work that no row needs. False: use neither branches nor loops, so
            the code can be part of one CUDA graph.
    """
    vocab = scores.shape[1]
    k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    unroll = not branches

    def everything(of: Array) -> Array:
        return jnp.ones(of.shape, bool)

    def where_needed(needed: Array, keep: Callable[[Array], Array], of: Array) -> Array:
        return lax.cond(jnp.any(needed), keep, everything, of) if branches else keep(of)

    def by_count(scores: Array) -> Array:
        bits = _ordered_bits(scores)
        return bits >= _largest_threshold(bits, lambda _: jnp.uint32(1), k.astype(jnp.uint32), unroll)

    kept = where_needed(k < vocab, by_count, scores)
    scores = jnp.where(kept, scores, _FORBIDDEN)
    relative = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))  # to the most likely token

    def by_mass(relative: Array) -> Array:
        def weigh(bits: Array) -> Array:
            return jnp.round(lax.bitcast_convert_type(bits, jnp.float32) * _CERTAIN).astype(jnp.uint32)

        wanted = jnp.ceil(jnp.minimum(top_p, 1.0 - 1e-6) * _CERTAIN).astype(jnp.uint32)
        wanted = jnp.maximum(wanted, 1)  # top_p may be 0 in float32
        bits = lax.bitcast_convert_type(_normalise(relative), jnp.uint32)  # nonnegative, so in the order of the floats
        return (bits >= _largest_threshold(bits, weigh, wanted, unroll)) | (top_p >= 1.0)[:, None]

    kept = where_needed(top_p < 1.0, by_mass, relative)
    kept &= relative >= min_p[:, None]
    return jnp.where(kept, scores, _FORBIDDEN)


def penalise(
    scores: Float[Array, "B V"], rows: PenaltyRows, last_tokens: Int32[Array, " slots"]
) -> Float[Array, "B V"]:
    """Apply the repetition penalty to tokens of prompt and output, presence and frequency penalties to tokens of the
    output, then the bias (as in vLLM and OpenAI's API)."""
    batch, vocab = scores.shape
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    last = last_tokens.at[rows.last_slot].get(mode="fill", fill_value=vocab)[:, None]
    outputs = rows.outputs.astype(jnp.float32).at[index, last].add(1.0, mode="drop")
    seen = rows.in_prompt | (outputs > 0)
    repetition = rows.repetition[:, None]
    scores = jnp.where(seen, jnp.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores -= rows.frequency[:, None] * outputs + rows.presence[:, None] * (outputs > 0).astype(jnp.float32)
    return scores.at[index, rows.bias_ids].add(rows.bias_values, mode="drop")


def allow(scores: Float[Array, "B V"], masks: Int32[Array, "B W"]) -> Float[Array, "B V"]:
    """Set scores to -inf for every token i whose bit (i % 32 of word i // 32) is not set; W = ceil(V / 32)."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return jnp.where(bits.reshape(masks.shape[0], -1)[:, : scores.shape[1]] > 0, scores, _FORBIDDEN)


def gumbel(seed: UInt32[Array, " B"], position: Int32[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    """Return Gumbel noise that depends only on a row's seed and position, so a draw never depends on other rows."""

    def row(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,), jnp.float32)

    return jax.vmap(row)(seed, position)


def _first(found: Bool[Array, "B V"]) -> Int32[Array, " B"]:
    """Return the lowest marked index of each row, or 0 if no index is marked. CPUs compute this several times faster
    than argmax, which reduces pairs."""
    index = jnp.arange(found.shape[1], dtype=jnp.int32)[None, :]
    lowest = jnp.min(jnp.where(found, index, found.shape[1]), axis=1)
    return jnp.where(lowest < found.shape[1], lowest, 0).astype(jnp.int32)


def is_finite_row(scores: Float[Array, "B V"]) -> Bool[Array, " B"]:
    """Return True for rows from which a token can be sampled. In rows with NaN or +inf, or with every token forbidden,
    argmax and the draw would silently return an arbitrary index."""
    return jnp.isfinite(jnp.max(scores, axis=1)) & ~jnp.any(jnp.isnan(scores), axis=1)


def greedy(scores: Float[Array, "B V"]) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """Return the most likely token of each row (the lowest id if scores are equal), and True if the row is valid
    (`is_finite_row`)."""
    top = jnp.max(scores, axis=1)
    finite = jnp.isfinite(top) & ~jnp.any(jnp.isnan(scores), axis=1)
    return _first(scores == top[:, None]), finite


def sample(
    scores: Float[Array, "B V"], rows: SamplingRows, *, branches: bool = True
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """Draw one token per row by the Gumbel-max rule after temperature, top-k, top-p and min-p; greedy rows take the
    most likely token."""
    best, finite = greedy(scores)
    is_greedy = rows.temperature <= 0.0
    scaled = scores / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
    scaled = jnp.where(jnp.isnan(scaled), 0.0, scaled)
    scaled = restrict(scaled, rows.top_k, rows.top_p, rows.min_p, branches)
    drawn = jnp.argmax(scaled + gumbel(rows.seed, rows.position, scores.shape[1]), axis=1).astype(jnp.int32)
    return jnp.where(is_greedy, best, drawn), finite


def log_probabilities(
    scores: Float[Array, "B V"], chosen: Int32[Array, " B"]
) -> tuple[Float[Array, " B"], Int32[Array, "B 20"], Float[Array, "B 20"]]:
    """Return the log probabilities of the chosen token and of the `NUM_LOGPROBS` most likely tokens in the model's own
    distribution, before penalties and temperature."""
    log_p = jax.nn.log_softmax(scores, axis=-1)
    values, ids = lax.top_k(log_p, min(NUM_LOGPROBS, scores.shape[1]))
    return jnp.take_along_axis(log_p, chosen[:, None], axis=1)[:, 0], ids.astype(jnp.int32), values
