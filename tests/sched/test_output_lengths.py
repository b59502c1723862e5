"""Histograms of output lengths: against the product-limit estimate written out, forgetting, beginnings of prompts."""

import numpy as np
import pytest

from apt_jax.sched.output_lengths import BEGINNINGS, ENDS, FEW_OUTPUTS, UNBOUNDED, OutputLengths
from tests.support.cases import num_cases

NONE = np.zeros((1, len(BEGINNINGS)), np.int32)


def quantile(lengths: OutputLengths, had: int, q: float, numbers=NONE) -> int:
    return int(lengths.quantile(np.asarray(numbers).reshape(1, -1), np.array([had], np.int32), q)[0])


def product_limit(seen: list[tuple[int, bool]], had: int, q: float, half_life: float = np.inf) -> int:
    """The quantile, from all that ended (length, cut off) in order, one length after another."""
    weights = [0.5 ** ((len(seen) - 1 - i) / half_life) for i in range(len(seen))]
    if sum(w for w, (n, _) in zip(weights, seen, strict=True) if n > had) < FEW_OUTPUTS:
        return 0
    survival = 1.0
    for length in range(had + 1, 65):
        at_risk = sum(w for w, (n, _) in zip(weights, seen, strict=True) if n >= length)
        ended = sum(w for w, (n, cut) in zip(weights, seen, strict=True) if n == length and not cut)
        if at_risk:
            survival *= 1 - ended / at_risk
        if survival <= 1 - q + 1e-9:
            return length
    return UNBOUNDED


@pytest.mark.seeds
def test_it_is_the_product_limit_estimate():
    kinds = set()
    for seed in range(num_cases(30, 300)):
        rng = np.random.default_rng(seed)
        half_life = float(rng.choice([1e12, 300.0]))
        lengths, seen = OutputLengths(half_life=half_life), []
        for _ in range(int(rng.integers(20, 200))):
            length = min(int(rng.geometric(0.08)), 64)
            cap = int(rng.integers(1, 64)) if rng.random() < 0.4 else 64
            seen.append((min(length, cap), length > cap))
            lengths.record(NONE[0], seen[-1][0], cut_off=seen[-1][1])
        for had in range(0, 40, 3):
            for q in (0.3, 0.5, 0.9, 0.99):
                expected = product_limit(seen, had, q, half_life)
                assert quantile(lengths, had, q) == expected
                kinds.add(expected if expected in (0, UNBOUNDED) else "length")
    assert kinds == {0, UNBOUNDED, "length"}


def test_without_cut_off_requests_it_is_the_quantile_of_those_that_are_longer():
    rng = np.random.default_rng(0)
    values = rng.integers(1, 65, 500)
    lengths = OutputLengths(half_life=1e12)
    for value in values.tolist():
        lengths.record(NONE[0], value, cut_off=False)
    for had in (0, 10, 40):
        longer = values[values > had]
        for q in (0.5, 0.9):
            assert quantile(lengths, had, q) == np.quantile(longer, q, method="inverted_cdf")


def test_ends_at_max_tokens_are_no_lengths():
    """All requests would take 50 tokens, two of three are cut off at 20: the estimate is 50, not 20."""
    lengths = OutputLengths()
    for i in range(90):
        lengths.record(NONE[0], 20 if i % 3 else 50, cut_off=bool(i % 3))
    assert quantile(lengths, 0, 0.5) == 50
    only_cut_off = OutputLengths()
    for _ in range(90):
        only_cut_off.record(NONE[0], 20, cut_off=True)
    assert quantile(only_cut_off, 0, 0.5) == UNBOUNDED


def test_long_lengths_share_buckets_and_are_never_underestimated():
    for length in (65, 66, 100, 1000, 12345, 400_000):
        lengths = OutputLengths()
        for _ in range(FEW_OUTPUTS + 5):
            lengths.record(NONE[0], length, cut_off=False)
        assert length <= quantile(lengths, 0, 0.9) <= length * 1.05
    assert np.all(np.diff(ENDS) > 0)


def test_old_lengths_are_forgotten_and_weights_stay_finite():
    lengths = OutputLengths(half_life=1.0)
    for _ in range(3000):  # weights double each time: 2^3000 is beyond a float
        lengths.record(NONE[0], 50, cut_off=False)
    assert quantile(lengths, 0, 0.9) == 0  # of the weights only the last few are left
    lengths = OutputLengths(half_life=50.0)
    for length in [60] * 500 + [7] * 500:
        lengths.record(NONE[0], length, cut_off=False)
    assert quantile(lengths, 0, 0.9) == 7


def prompts(*system: int) -> np.ndarray:
    return np.concatenate([np.full(n, i, np.int32) for i, n in enumerate(system, 1)])


class TestBeginnings:
    def test_a_beginning_has_a_histogram_from_its_second_request_on(self):
        lengths = OutputLengths()
        assert lengths.begin(b"", prompts(40)).tolist() == [0, 0, 0]
        first, second, third = (lengths.begin(b"", prompts(40, 10 + i)) for i in range(3))
        assert first[0] == second[0] == third[0] > 0
        assert lengths.begin(b"", prompts(31)).tolist() == [0, 0, 0]  # too short

    def test_the_longest_that_knows_enough_is_used(self):
        lengths = OutputLengths()
        short, long = prompts(40, 200), prompts(32, 100)
        for prompt in (short, long):
            lengths.begin(b"", prompt)
        a, b = lengths.begin(b"", short), lengths.begin(b"", long)
        assert a[0] == b[0]
        assert 0 < a[1] != b[1] > 0
        for _ in range(FEW_OUTPUTS + 5):
            lengths.record(a, 10, cut_off=False)
        assert quantile(lengths, 0, 0.9, a) == 10
        assert quantile(lengths, 0, 0.9, b) == 10  # by their first 32 tokens
        for _ in range(FEW_OUTPUTS + 5):
            lengths.record(b, 60, cut_off=False)
        assert quantile(lengths, 0, 0.9, a) == 10
        assert quantile(lengths, 0, 0.9, b) == 60
        assert quantile(lengths, 20, 0.9, a) == 60  # it knows nothing of those that go on, a shorter beginning does
        assert quantile(lengths, 0, 0.9) == 60

    def test_roots_keep_tenants_and_adapters_apart(self):
        lengths = OutputLengths()
        numbers = {tuple(lengths.begin(root, prompts(40))) for root in (b"a", b"b", b"a", b"b")}
        assert len(numbers - {(0, 0, 0)}) == 2

    def test_memory_is_bounded_and_what_is_in_use_stays(self):
        lengths = OutputLengths(num_histograms=4)
        held = [lengths.begin(b"", prompts(40)) for _ in range(2)][1]
        for _ in range(FEW_OUTPUTS + 5):
            lengths.record(held, 9, cut_off=False)
        for i in range(1000):
            for _ in range(2):
                lengths.end(lengths.begin(str(i).encode(), prompts(40)))
        assert len(lengths._by_key) == 3
        assert len(lengths._seen_once) <= 64
        for _ in range(FEW_OUTPUTS + 5):  # the histogram of all has other lengths by now
            lengths.record(NONE[0], 50, cut_off=False)
        assert quantile(lengths, 0, 0.4, held) == 9
        lengths.end(held)
        busy = [lengths.begin(str(i).encode(), prompts(40)) for i in range(990, 1000) for _ in range(2)]
        assert len({int(numbers[0]) for numbers in busy} - {0}) == 3  # others go without

    def test_a_histogram_that_changes_hands_is_empty(self):
        lengths = OutputLengths(num_histograms=2)
        mine = [lengths.begin(b"a", prompts(40)) for _ in range(2)][1]
        for _ in range(FEW_OUTPUTS + 5):
            lengths.record(mine, 60, cut_off=False)
        assert quantile(lengths, 0, 0.9, mine) == 60
        lengths.end(mine)
        other = [lengths.begin(b"b", prompts(40)) for _ in range(2)][1]
        assert other.tolist() == mine.tolist()
        for _ in range(5 * FEW_OUTPUTS):
            lengths.record(NONE[0], 3, cut_off=False)
        assert quantile(lengths, 0, 0.7, other) == 3


@pytest.mark.parametrize(("histograms", "half_life"), [(0, 10.0), (5, 0.0)])
def test_bad_settings(histograms, half_life):
    with pytest.raises(ValueError, match="at least 1 and"):
        OutputLengths(histograms, half_life)
