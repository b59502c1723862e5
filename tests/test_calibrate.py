"""Calibration on a tiny random model: what is measured, what is kept, what a broken file does."""

from pathlib import Path

import numpy as np
import pytest
from paged_driver import BLOCK, make_executor

from apt_jax.calibrate import (
    calibrate,
    calibration_path,
    describe,
    load_calibration,
    load_or_calibrate,
)
from apt_jax.config import CacheMode, HiddenAttention
from apt_jax.errors import ConfigError
from apt_jax.sched.cost_model import (
    CostModel,
    DecodePoint,
    FitQuality,
    PrefillPoint,
    fit_cost_model,
)
from apt_jax.sched.view import HIDDEN, KV
from apt_jax.sim.hardware import load_hardware, save_hardware


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


QUALITY = FitQuality(
    num_points=9, num_held_back=2, r2=0.99, worst_relative_error=0.1, mean_relative_error=0.05
)
MODEL = CostModel(
    prefill=(5e-3, 1e-4, 1e-8),
    decode=(2e-2, 8e-7, 2e-6, 4e-5, 9e-5),
    prefill_quality=QUALITY,
    decode_quality=QUALITY,
)


@pytest.mark.parametrize(("attention", "mode"), [("auto", "absorb"), ("reproject", "reproject")])
def test_a_calibration_becomes_a_description_that_the_simulator_reads(
    tmp_path: Path, attention: HiddenAttention, mode: HiddenAttention
) -> None:
    executor = make_executor("hybrid", attention)
    path = str(tmp_path / "here.json")
    save_hardware(describe(MODEL, executor, "tiny"), path)
    found = load_hardware("tiny", path)
    assert (found.num_devices, found.block_size, found.num_blocks) == (1, BLOCK, 400)
    assert found.max_model_len == 128
    assert found.step_costs() == found.step_costs(mode) == MODEL.step_costs()
    assert found.kinds("hybrid") == MODEL.kinds((True, True))
    assert found.fit["decode"]["r2"] == 0.99
    other: HiddenAttention = "absorb" if mode == "reproject" else "reproject"
    with pytest.raises(ConfigError, match=f"'{other}' is not described .* not measured"):
        found.step_costs(other)


def test_a_calibration_without_both_kinds_describes_what_it_measured() -> None:
    found = describe(MODEL, make_executor("kv"), "tiny")
    assert [kind.offered for kind in found.kinds("hybrid")] == [True, False]
    with pytest.raises(ConfigError, match="not measured by this calibration"):
        found.kinds("hidden")
    with pytest.raises(ValueError, match="KV kind were not measured"):
        describe(MODEL, make_executor("hidden"), "tiny")
