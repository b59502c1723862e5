"""Calibration on a tiny random model: what is measured, what is kept, what a broken file does."""

import numpy as np
import pytest
from paged_driver import make_executor

from apt_jax.calibrate import calibrate, calibration_path, load_calibration, load_or_calibrate
from apt_jax.config import CacheMode
from apt_jax.sched.cost_model import DecodePoint, PrefillPoint, fit_cost_model
from apt_jax.sched.view import HIDDEN, KV


def test_a_fit_finds_the_coefficients_that_made_its_points() -> None:
    rng = np.random.default_rng(0)
    prefill_truth, decode_truth = [2e-3, 1e-4, 3e-7], [1e-3, 4e-6, 9e-6, 2e-4, 1e-4]
    prefill, decode = [], []
    for _ in range(40):
        c, m = rng.integers(8, 256, 3).tolist(), rng.integers(0, 256, 3).tolist()
        point = PrefillPoint(chunk_lens=c, prefix_lens=m, time_s=1.0)
        prefill.append(
            PrefillPoint(
                chunk_lens=c, prefix_lens=m, time_s=float(np.dot(prefill_truth, point.features()))
            )
        )
        kv, hidden = (rng.integers(8, 500, rng.integers(0, 9)).tolist() for _ in range(2))
        point = DecodePoint(kv_lens=kv, hidden_lens=hidden, time_s=1.0)
        decode.append(
            DecodePoint(
                kv_lens=kv, hidden_lens=hidden, time_s=float(np.dot(decode_truth, point.features()))
            )
        )
    model = fit_cost_model(prefill, decode)
    np.testing.assert_allclose(model.prefill, prefill_truth, rtol=1e-5)
    np.testing.assert_allclose(model.decode, decode_truth, rtol=1e-5)
    assert model.decode_quality.r2 > 0.999
    assert model.decode_quality.worst_relative_error < 1e-4
    hidden = model.kinds((True, True))[HIDDEN]
    # t = c0 + c1 * tokens; this hidden kind has a negative c0.
    assert hidden.extra_base_s == pytest.approx(-1e-4, rel=1e-3)
    assert hidden.extra_per_token_s == pytest.approx(5e-6, rel=1e-3)
    assert not model.kinds((True, False))[HIDDEN].offered
    assert model.kinds((False, True))[HIDDEN].extra_base_s == 0.0
    assert not model.kinds((False, True))[KV].offered


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 prefill and 5 decode points, got 0 and 0"):
        fit_cost_model([], [])


@pytest.mark.parametrize("mode", ["hybrid", "kv", "hidden"])
def test_every_cache_mode_can_be_calibrated(mode: CacheMode) -> None:
    executor = make_executor(mode)
    told = []
    model = calibrate(executor, 0.2, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert model.prefill_s([32], [0]) > 0
    offered = [
        lens
        for kind, lens in enumerate(([([20], [])], [([], [20])]))
        if executor.kinds_offered[kind]
    ]
    assert all(model.decode_s(*pair) > 0 for pairs in offered for pair in pairs)


def test_calibrations_are_stored_by_what_they_depend_on_and_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    executor = make_executor()
    first = load_or_calibrate(executor, 0.2)
    path = calibration_path(executor)
    assert path.is_relative_to(tmp_path)
    assert load_calibration(path) == first
    assert load_or_calibrate(executor, 0.2) == first
    assert calibration_path(make_executor(attention="reproject")) != path
    path.write_text("{broken")
    assert load_calibration(path) is None
    assert load_or_calibrate(executor, 0.2) != first
