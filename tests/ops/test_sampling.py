"""Device sampling against plain NumPy implementations of the same rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.ops import sampling
from tests.support.cases import cover, num_cases

ROWS, VOCAB = 32, 501
"""One size of batch for all restrictions, so that few programs are compiled."""

restrict = jax.jit(sampling.restrict, static_argnames="branches")
sample = jax.jit(sampling.sample)
largest_threshold = jax.jit(sampling._largest_threshold, static_argnums=(1, 3))


def restrict_by_sorting(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The kept set of one row, by sorting: top-k, then top-p of the rest, then min-p; ties at a border stay."""
    keep = np.ones(len(scores), bool)
    if 0 < top_k < len(scores):
        keep &= scores >= np.sort(scores)[-top_k]
    p = np.exp(scores - scores[keep].max()) * keep
    p /= p.sum()
    if top_p < 1.0:
        order = np.sort(p)[::-1]
        border = order[np.searchsorted(np.cumsum(order), top_p)]
        keep &= p >= border
    keep &= p >= min_p * p.max()
    return keep


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_restrictions_keep_the_same_tokens_as_sorting(seed: int, branches: bool) -> None:
    rng = np.random.default_rng(seed)
    b = ROWS
    scores = (rng.standard_normal((b, VOCAB)) * 3).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 7, 100, 501, 1000], b).astype(np.int32)
    top_p = rng.choice([1.0, 0.99, 0.9, 0.5, 0.05, 0.0], b).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.2, 1.0], b).astype(np.float32)
    kept = np.isfinite(np.asarray(restrict(scores, top_k, top_p, min_p, branches=branches)))
    for r in range(b):
        expected = restrict_by_sorting(scores[r].astype(np.float64), int(top_k[r]), float(top_p[r]), float(min_p[r]))
        np.testing.assert_array_equal(kept[r], expected)


def test_without_branches_nothing_branches_or_loops_and_rows_without_borders_keep_what_min_p_leaves() -> None:
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, VOCAB)), jnp.float32)
    off, ones = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, jnp.float32)
    min_p = jnp.asarray(np.resize([0.0, 0.01, 0.2, 1.0], ROWS), jnp.float32)
    arguments = (scores, off, ones, min_p)
    program = restrict.lower(*arguments, branches=False).compile()
    np.testing.assert_array_equal(program(*arguments), restrict(*arguments))
    text = program.as_text() or ""
    for control in (" while(", " conditional("):
        assert control not in text


def test_ties_at_the_border_stay() -> None:
    scores = np.full((ROWS, VOCAB), -9.0, np.float32)
    scores[0, :5] = [1.0, 2.0, 2.0, 0.0, -1.0]
    scores[1, :3] = [0.0, -0.0, -1.0]  # equal, whatever their sign bits
    one = np.ones(ROWS, np.float32)
    for branches in (True, False):
        kept = np.isfinite(np.asarray(restrict(scores, one.astype(np.int32), one, 0 * one, branches=branches)))
        assert [np.flatnonzero(row).tolist() for row in kept[:2]] == [[1, 2], [0, 1]]


def thresholds_by_hand(scores: np.ndarray, top_k: int, top_p: float, slack: float) -> np.ndarray:
    """Scores of one row, -inf outside top-k and, for a top_p that is `slack` larger, outside top-p: by sorting, with
    sums in float64. A `slack` below 0 leaves out what is close to the border, one above 0 keeps it."""
    top_k = len(scores) if top_k <= 0 else min(top_k, len(scores))
    scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    if top_p < 1.0:
        p = np.exp(scores.astype(np.float64) - scores.max())
        order = np.sort(p / p.sum())[::-1]
        enough = np.flatnonzero(np.cumsum(order) >= top_p + slack)
        border = order[enough[0]] if len(enough) else 0.0
        scores = np.where(p / p.sum() >= border * (1 - 10 * slack), scores, -np.inf)
    return scores


TINY = 1e-42
"""A top_p that XLA takes for 0."""


def rows_at_the_edges(rng: np.random.Generator) -> np.ndarray:
    """Scores (ROWS, VOCAB): smooth, peaked, with many ties, with forbidden tokens, equal, with one token left."""
    scores = rng.standard_normal((ROWS, VOCAB)) * rng.choice([0.01, 1.0, 5.0, 30.0], (ROWS, 1))
    scores[::4] = np.round(scores[::4])
    scores[1::4][rng.random((ROWS // 4, VOCAB)) < 0.5] = -np.inf
    scores[:, 0] = 0.0
    scores[2], scores[3, 1:] = 1.5, -np.inf
    return scores.astype(np.float32)


@pytest.mark.in_turn(1)
@pytest.mark.seeds
@pytest.mark.parametrize("vocab", [VOCAB, 512])  # in one part and in 32
@pytest.mark.parametrize("branches", [True, False])
def test_kept_sets_end_at_the_border_and_are_those_of_a_row_alone(vocab: int, branches: bool) -> None:
    for seed in range(num_cases(3, 200)):
        rng = np.random.default_rng(seed)
        scores = rows_at_the_edges(rng)
        scores = np.concatenate([scores, scores[:, : vocab - VOCAB]], axis=1)
        top_k = rng.choice([0, -1, 1, 2, 40, vocab - 1, vocab, vocab + 1], ROWS).astype(np.int32)
        top_p = rng.choice([1.0, 0.9999999, 0.99, 0.9, 0.5, 1e-6, TINY], ROWS).astype(np.float32)
        kept = restrict(scores, top_k, top_p, 0 * top_p, branches=branches)
        for r in range(ROWS):
            row = scores[r], int(top_k[r]), float(top_p[r])
            fewest, most = (np.isfinite(thresholds_by_hand(*row, slack)) for slack in (-2e-6, 2e-6))
            actual = np.isfinite(np.asarray(kept)[r])
            assert actual.any(), (seed, r)
            assert not (fewest & ~actual).any(), (seed, r)
            assert not (actual & ~most).any(), (seed, r)
        row = slice(seed % ROWS, seed % ROWS + 1)
        alone = restrict(scores[row], top_k[row], top_p[row], 0 * top_p[row], branches=branches)
        np.testing.assert_array_equal(alone, kept[row])


@pytest.mark.parametrize("vocab", [501, 512])
def test_thresholds_are_exact(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    bits = rng.integers(0, 2**32, (ROWS, vocab), dtype=np.uint32)
    bits[::2] >>= rng.integers(0, 32, (ROWS // 2, 1), dtype=np.uint32)  # many are equal
    totals = (bits % 1000).sum(1, dtype=np.int64)
    wanted = (totals * rng.choice([0.0, 0.3, 0.9, 1.0, 1.1], ROWS)).astype(np.uint32) + 1
    found = np.asarray(largest_threshold(bits, lambda bits: bits % 1000, wanted, False))[:, 0]
    for row, least, threshold in zip(bits, wanted, found, strict=True):
        enough = [t for t in row if (row[row >= t] % 1000).sum(dtype=np.int64) >= least]
        assert threshold == max(enough, default=0)


def test_the_smallest_top_p_keeps_the_most_likely_token() -> None:
    scores = rows_at_the_edges(np.random.default_rng(0))
    zeros = np.zeros(ROWS, np.int32)
    kept = np.isfinite(np.asarray(restrict(scores, zeros, np.full(ROWS, TINY, np.float32), 0 * scores[:, 0])))
    np.testing.assert_array_equal(kept, scores == scores.max(1, keepdims=True))


def _rows(b: int, temperature: float, seed: int = 0, position: int = 0, top_k: int = 0) -> sampling.SamplingRows:
    return sampling.SamplingRows(
        temperature=jnp.full(b, temperature, jnp.float32),
        top_k=jnp.full(b, top_k, jnp.int32),
        top_p=jnp.ones(b, jnp.float32),
        min_p=jnp.zeros(b, jnp.float32),
        seed=jnp.full(b, seed, jnp.uint32),
        position=jnp.full(b, position, jnp.int32),
    )


def test_draws_follow_the_distribution_and_the_temperature() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    scores = jnp.log(jnp.asarray(probabilities, jnp.float32))
    b = 20_000
    rows = sampling.SamplingRows(**{**vars(_rows(b, 1.0)), "seed": jnp.arange(b, dtype=jnp.uint32)})
    tokens, finite = sample(jnp.tile(scores[None], (b, 1)), rows)
    assert bool(finite.all())
    shares = np.bincount(np.asarray(tokens), minlength=4) / b
    np.testing.assert_allclose(shares, probabilities, atol=4 * np.sqrt(0.25 / b))
    sharp = sampling.SamplingRows(**{**vars(rows), "temperature": jnp.full(b, 0.5, jnp.float32)})
    tokens, _ = sample(jnp.tile(scores[None], (b, 1)), sharp)
    expected = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(np.bincount(np.asarray(tokens), minlength=4) / b, expected, atol=4 * np.sqrt(0.25 / b))


def test_a_draw_depends_on_seed_and_position_and_not_on_neighbours() -> None:
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((4, 300)), jnp.float32)
    alone, _ = sample(scores[1:2], _rows(1, 1.0, 7, 3))
    mixed = sampling.SamplingRows(
        **{
            **vars(_rows(4, 1.0, 9, 1)),
            "seed": jnp.array([1, 7, 2, 3], jnp.uint32),
            "position": jnp.array([0, 3, 5, 3], jnp.int32),
        }
    )
    together, _ = sample(scores, mixed)
    assert int(together[1]) == int(alone[0])
    draws = {int(sample(scores[1:2], _rows(1, 1.0, 7, p))[0][0]) for p in range(20)}
    assert len(draws) > 5


def test_greedy_rows_take_the_top_and_bad_rows_are_flagged() -> None:
    scores = jnp.array([[0.0, 3.0, 3.0], [jnp.nan, 1.0, 2.0], [-jnp.inf, -jnp.inf, -jnp.inf], [0.0, jnp.inf, 1.0]])
    tokens, finite = sample(scores, _rows(4, 0.0))
    assert int(tokens[0]) == 1
    assert finite.tolist() == [True, False, False, False]


def test_penalties_and_bias_follow_the_published_rules() -> None:
    rng = np.random.default_rng(1)
    b, v, s = 3, 40, 16
    scores = rng.standard_normal((b, v)).astype(np.float32)
    history = rng.integers(0, v, (b, s)).astype(np.int32)
    prompt_len, history_len = np.array([4, 0, 7], np.int32), np.array([10, 16, 7], np.int32)
    last_tokens, last_slot = np.array([5, 6, 7, 8], np.int32), np.array([2, 4, 0], np.int32)
    repetition, presence, frequency = (
        np.array([1.3, 1.0, 0.8], np.float32),
        np.array([0.5, 0.0, -1.0], np.float32),
        np.array([0.2, 1.5, 0.0], np.float32),
    )
    bias_ids = np.full((b, sampling.NUM_BIASES), v, np.int32)
    bias_values = np.zeros((b, sampling.NUM_BIASES), np.float32)
    bias_ids[1, :2], bias_values[1, :2] = [3, 9], [2.5, -np.inf]
    in_prompt, outputs = np.zeros((b, v), np.bool_), np.zeros((b, v), np.int32)
    for r in range(b):
        in_prompt[r, history[r, : prompt_len[r]]] = True
        np.add.at(outputs[r], history[r, prompt_len[r] : history_len[r]], 1)
    rows = sampling.PenaltyRows(
        in_prompt=jnp.asarray(in_prompt), outputs=jnp.asarray(outputs), last_slot=jnp.asarray(last_slot),
        repetition=jnp.asarray(repetition), presence=jnp.asarray(presence), frequency=jnp.asarray(frequency),
        bias_ids=jnp.asarray(bias_ids), bias_values=jnp.asarray(bias_values),
    )  # fmt: skip
    actual = np.asarray(jax.jit(sampling.penalise)(jnp.asarray(scores), rows, jnp.asarray(last_tokens)))
    for r in range(b):
        prompt, output = (
            list(history[r, : prompt_len[r]]),
            list(history[r, prompt_len[r] : history_len[r]]),
        )
        if last_slot[r] < 4:
            output.append(last_tokens[last_slot[r]])
        expected = scores[r].astype(np.float64)
        for t in set(prompt) | set(output):
            expected[t] = expected[t] / repetition[r] if expected[t] > 0 else expected[t] * repetition[r]
        for t in set(output):
            expected[t] -= frequency[r] * output.count(t) + presence[r]
        if r == 1:
            expected[3] += 2.5
            expected[9] = -np.inf
        np.testing.assert_allclose(actual[r], expected, rtol=1e-5, atol=1e-5)


def test_log_probabilities_are_normalised_and_ordered() -> None:
    scores = jnp.asarray(np.random.default_rng(2).standard_normal((2, 50)), jnp.float32)
    chosen, ids, values = jax.jit(sampling.log_probabilities)(scores, jnp.array([4, 9], jnp.int32))
    exact = np.asarray(scores) - np.log(np.exp(np.asarray(scores)).sum(1, keepdims=True))
    np.testing.assert_allclose(np.asarray(chosen), [exact[0, 4], exact[1, 9]], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(ids)[0], np.argsort(-exact[0])[:20])
    np.testing.assert_allclose(np.asarray(values)[1], np.sort(exact[1])[::-1][:20], rtol=1e-5)


@pytest.mark.parametrize("vocab", cover([31, 32, 97], [32, 97]))  # whole words, and not
def test_masks_keep_the_allowed_tokens_alone(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    scores = rng.standard_normal((5, vocab)).astype(np.float32)
    allowed = rng.random((5, vocab)) < 0.3
    allowed[3], allowed[4] = True, False
    bits = np.zeros((5, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = allowed
    bits[:3, vocab:] = 1  # beyond the vocabulary: no token
    masks = jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    masked = jax.jit(sampling.allow)(scores, masks)
    np.testing.assert_array_equal(np.asarray(masked), np.where(allowed, scores, -np.inf))
    for temperature in (0.0, 1.0):
        tokens, finite = sample(masked, _rows(5, temperature, 3, top_k=50))
        assert finite.tolist() == [True] * 4 + [False]
        assert all(allowed[r, int(tokens[r])] for r in range(4))
        plain, _ = sample(jnp.asarray(scores), _rows(5, temperature, 3, top_k=50))
        assert int(tokens[3]) == int(plain[3])
