"""Calibration on a tiny random model: what is measured, what is kept, what a broken file does."""

import dataclasses
import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apt_jax.config import CacheConfig, CacheMode, HiddenAttention
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import Conversions, StepBatch
from apt_jax.costs.fit import CostModel, FitQuality, StepPoint, fit_cost_model
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.errors import ConfigError
from apt_jax.executor.calibrate import (
    _transfers_s,
    calibrate,
    calibration_path,
    describe,
    load_calibration,
    load_or_calibrate,
    program_shapes,
    store_calibration,
    synthetic_batch,
)
from apt_jax.executor.calibration_steps import CalibrationSteps
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.models.params import dummy_params
from apt_jax.sched import StepCosts
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware, save_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from apt_jax.utils.cache_dir import write_verified
from serve.observability.arrivals import description
from tests.support.cases import num_cases
from tests.support.paged_driver import BLOCK, CONFIG, PARAMS, few_programs, make_executor

SHAPES = ProgramShapes(
    decode_buckets=(1, 2, 4, 8),
    prefill_buckets=(32, 64),
    max_num_seqs=8,
    mixed=False,
    rows_per_tile=4,
    tokens_per_tile=16,
    query_tile=32,
    key_tile=32,
)

MODES = pytest.mark.parametrize(
    ("mode", "mixed"),
    [
        ("hybrid", True),
        ("kv", False),
        ("hidden", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("hybrid", False), ("kv", True), ("hidden", False))),
    ],
)


def draw_step(rng: np.random.Generator) -> StepPoint:
    n = int(rng.integers(1, 9))
    lens = np.ones(n, int) if rng.random() < 0.5 else rng.integers(1, 64 // n + 1, n)
    return StepPoint(
        num_tokens=lens.tolist(),
        start=rng.integers(0, 200, n).tolist(),
        kind=rng.integers(0, 2, n).tolist(),
        time_s=1.0,
    )


@pytest.mark.parametrize("one_program", [True, False])
def test_a_fit_finds_the_linear_coefficients_that_made_its_points(one_program: bool) -> None:
    rng = np.random.default_rng(0)
    truth = StepCosts(
        prefill_base_s=2e-3,
        prefill_per_token_s=1e-4,
        prefill_per_pair_s=3e-7,
        prefill_per_kv_prefix_s=1e-6,
        prefill_per_hidden_prefix_s=5e-6,
        decode_base_s=1e-3,
        decode_per_token_s=4e-6,
        decode_per_hidden_token_s=9e-6,
        decode_per_request_s=2e-4,
        decode_per_hidden_request_s=1e-4,
        one_program=one_program,
    )
    points = []
    for _ in range(200):
        p = draw_step(rng)
        if p.is_prefill:
            # In one program, decodes beside chunks hide what a chunk of one token would cost.
            lens = [max(2, n) if one_program else n for n in p.num_tokens[:4]]
            p = dataclasses.replace(p, num_tokens=lens, start=p.start[:4], kind=p.kind[:4])
        if not p.is_prefill or not one_program:
            p = dataclasses.replace(p, start=[max(1, s) for s in p.start])
        points.append(dataclasses.replace(p, time_s=truth.step_s(*p.arrays())))
    model = fit_cost_model(points, dataclasses.replace(SHAPES, mixed=one_program))
    for field in dataclasses.fields(StepCosts):
        expected = getattr(truth, field.name)
        assert getattr(model.costs, field.name) == pytest.approx(expected, rel=1e-4), field.name
    assert model.linear_decode_quality.r2 > 0.999
    assert model.linear_prefill_quality.worst_relative_error < 1e-4
    hidden = model.kinds((True, True), absorbs=True)[HIDDEN]
    # t = c0 + c1 * tokens; this hidden kind has a negative c0.
    assert hidden.extra_base_s == pytest.approx(-1e-4, rel=1e-3)
    assert hidden.extra_per_token_s == pytest.approx(5e-6, rel=1e-3)
    assert not model.kinds((True, False), absorbs=True)[HIDDEN].offered
    assert model.kinds((False, True), absorbs=True)[HIDDEN].extra_base_s == 0.0
    assert not model.kinds((False, True), absorbs=True)[KV].offered


def test_a_fit_finds_the_staircase_that_made_its_points() -> None:
    rng = np.random.default_rng(1)
    truth = ProgramCosts(
        shapes=SHAPES,
        coefficients=tuple(rng.uniform(1e-3, 5e-3, len(SHAPES.feature_names())).tolist()),
    )
    points = [draw_step(rng) for _ in range(400)]
    points = [dataclasses.replace(p, time_s=truth.step_s(*p.arrays())) for p in points]
    model = fit_cost_model(points, SHAPES)
    # Bases are drawn towards the lines between their neighbours, a little.
    assert model.prefill_quality.worst_relative_error < 1e-3
    assert model.decode_quality.worst_relative_error < 1e-3
    for p in (draw_step(rng) for _ in range(100)):
        predicted, expected = (m.step_s(*p.arrays()) for m in (model.programs, truth))
        assert predicted == pytest.approx(expected, rel=1e-3)
    # No line through tokens can be this staircase.
    assert model.linear_decode_quality.worst_relative_error > 0.05


def brute_force_tiles(lens: list[int], kinds: list[int], which: int, rows: int) -> int:
    """Tiles of cache that decode rows of one kind read, by going through the padded batch tile by tile."""
    order = sorted(range(len(lens)), key=lambda i: (kinds[i], -lens[i]))
    total = 0
    for first in range(0, len(order), rows):
        longest = max((lens[i] for i in order[first : first + rows] if kinds[i] == which), default=0)
        total += -(-longest // SHAPES.tokens_per_tile)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_tiles_are_counted_as_the_executor_visits_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    starts, kinds = rng.integers(0, 200, n).tolist(), rng.integers(0, 2, n).tolist()
    step = StepPoint(num_tokens=[1] * n, start=starts, kind=kinds, time_s=1.0)
    found = dict(zip(SHAPES.feature_names(), SHAPES.features(*step.arrays()), strict=True))
    padded = next(b for b in SHAPES.decode_buckets if b >= n)
    assert [name for name in found if name.startswith("program") and found[name]] == [f"program_{padded}_0"]
    rows = min(padded, SHAPES.rows_per_tile)
    lens = [s + 1 for s in starts]
    for which, name in ((KV, "kv"), (HIDDEN, "hidden")):
        tiles = brute_force_tiles(lens, kinds, which, rows)
        assert found[f"decode_{name}_tile"] == tiles
        assert found[f"decode_{name}_tile_row"] == tiles * rows
        assert found[f"decode_{name}"] == (which in kinds)


def test_chunks_are_counted_in_pairs_of_tiles() -> None:
    step = StepPoint(num_tokens=[40, 1, 20], start=[0, 33, 64], kind=[0, 0, 1], time_s=1.0)
    found = dict(zip(SHAPES.feature_names(), SHAPES.features(*step.arrays()), strict=True))
    assert found["program_0_64"] == found["program_1_0"] == 1  # the row that decodes has its own
    assert (found["decode_kv"], found["decode_hidden"]) == (1, 0)
    assert (found["row"], found["token"], found["chunk"]) == (1, 60, 2)
    assert found["own_tile"] == 3 + 1  # 40 tokens: one tile over itself, one over both
    assert (found["kv_prefix_tile"], found["hidden_prefix_tile"]) == (0, 2)
    assert found["prefix_tile"] == 2


def test_a_step_beyond_the_programs_is_refused() -> None:
    costs = ProgramCosts(shapes=SHAPES, coefficients=(1.0,) * len(SHAPES.feature_names()))
    step = StepPoint(num_tokens=[1] * 9, start=[5] * 9, kind=[0] * 9, time_s=1.0)
    with pytest.raises(ValueError, match="a step has 9 rows or tokens, but programs were measured only up to 8"):
        costs.step_s(*step.arrays())
    assert (costs.max_num_seqs, costs.max_num_batched_tokens) == (8, 64)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5 prefill and 5 decode points, got 0 and 0"):
        fit_cost_model([], SHAPES)


def test_hiccups_of_the_machine_hardly_move_a_fit() -> None:
    rng = np.random.default_rng(2)
    truth = ProgramCosts(shapes=SHAPES, coefficients=(1e-3,) * len(SHAPES.feature_names()))
    points = [draw_step(rng) for _ in range(400)]
    slowed = [
        dataclasses.replace(p, time_s=truth.step_s(*p.arrays()) * (5.0 if rng.random() < 0.1 else 1.0)) for p in points
    ]
    model = fit_cost_model(slowed, SHAPES)
    ratio = [model.programs.step_s(*p.arrays()) / truth.step_s(*p.arrays()) for p in points]
    assert 0.9 < min(ratio) < max(ratio) < 1.1


@pytest.mark.in_turn(1)
@pytest.mark.seeds  # sizes of programs
@MODES
def test_every_cache_mode_can_be_calibrated(mode: CacheMode, mixed: bool) -> None:
    executor = make_executor(mode, mixed=mixed, max_num_seqs=num_cases(2, 4) if mode == "kv" else 4)
    if mode != "kv":
        few_programs(executor)
    told = []
    model = calibrate(executor, 0.2, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert model.prefill_s([32], [0]) > 0
    offered = [lens for kind, lens in enumerate(([([20], [])], [([], [20])])) if executor.kinds_offered[kind]]
    assert all(model.decode_s(*pair) > 0 for pairs in offered for pair in pairs)
    kind = KV if executor.kinds_offered[KV] else HIDDEN
    for rows, tokens in model.programs.shapes.programs():
        lens = [1] * rows + ([tokens // 2, tokens - tokens // 2] if tokens else [])
        n = min(len(lens), executor.max_num_seqs)
        step = StepPoint(num_tokens=lens[-n:], start=[7] * n, kind=[kind] * n, time_s=0.0)
        assert model.programs.step_s(*step.arrays()) > 0


def test_conversions_are_measured_where_they_can_be_asked_for(monkeypatch) -> None:
    executor = JaxExecutor(
        PARAMS,
        CONFIG,
        cache=CacheConfig(block_size=BLOCK, num_blocks_override=400, mode="hybrid"),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=128,
        conversion=True,
    )
    assert calibration_path(executor) != calibration_path(make_executor())
    few_programs(executor)
    real = executor.transfers._convert

    def slow(batch: StepBatch, conversions: Conversions) -> None:
        real(batch, conversions)
        time.sleep(1e-3 * float(batch.start[conversions.rows].sum()))

    monkeypatch.setattr(executor.transfers, "_convert", slow)
    found = calibrate(executor, 0.2).costs.convert_per_hidden_token_s
    assert found == pytest.approx(1e-3, rel=0.5)


def test_transfers_are_measured_where_there_is_host_memory(monkeypatch) -> None:
    executor = make_executor(swap_space=1 / 1024)
    assert calibration_path(executor) != calibration_path(make_executor())
    few_programs(executor)
    host = executor.host
    assert host is not None
    host.sizes = [16]
    real_load, real_store = host.load, host._store

    now_s = 0.0

    def slow_load(loads: np.ndarray) -> None:
        nonlocal now_s
        real_load(loads)
        now_s += 0.01 + 1e-3 * len(loads)

    def slow_store(array: Any, blocks: np.ndarray, generations: np.ndarray) -> None:
        nonlocal now_s
        now_s += 2e-3 * len(blocks)
        real_store(array, blocks, generations)

    monkeypatch.setattr("apt_jax.executor.calibrate.time", SimpleNamespace(perf_counter=lambda: now_s))

    monkeypatch.setattr(host, "load", slow_load)
    monkeypatch.setattr(host, "_store", slow_store)
    found: list[list[float]] = []

    def measure():
        found.append((yield from _transfers_s(executor, host, np.random.default_rng(0))))

    assert len(list(measure())) > 0
    [(load_base_s, load_s, save_s)] = found
    assert (load_base_s, load_s, save_s) == pytest.approx((0.01, 1e-3, 2e-3))
    assert make_executor().host is None


def bounded_executor(
    mode: CacheMode, block_size: int, seqs: int, tokens: int, length: int, mixed: bool = False
) -> JaxExecutor:
    return JaxExecutor(
        PARAMS,
        CONFIG,
        cache=CacheConfig(block_size=block_size, num_blocks_override=2, mode=mode),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        mixed=mixed,
    )


@pytest.mark.in_turn(10, group="executors with models")
@MODES
def test_measured_steps_are_ones_that_serving_can_have(mode: CacheMode, mixed: bool) -> None:
    rng = np.random.default_rng(0)
    for block_size, seqs, tokens, length in itertools.product((1, 1024), (1, 3, 8), (1, 8, 31, 200), (2, 3, 4, 8, 128)):
        if tokens < seqs:
            continue
        executor = bounded_executor(mode, block_size, seqs, tokens, length, mixed)
        steps = CalibrationSteps(executor, program_shapes(executor), rng)
        for episode in (*steps.round(), *steps.round(ends_first=True), steps.as_served(), steps.as_served()):
            for kinds, starts, lens in (episode.prefill, *([] if episode.decode is None else [episode.decode])):
                case = f"{block_size=} {seqs=} {tokens=} {length=} {kinds=} {starts=} {lens=}"
                assert len(kinds) == len(starts) == len(lens) <= seqs, case
                assert all(executor.kinds_offered[kind] for kind in kinds), case
                ends = [start + n for start, n in zip(starts, lens, strict=True)]
                assert min(lens) >= 1, case
                assert min(starts) >= 0, case
                assert max(ends) <= length, case
                assert sum(n for n in lens if n > 1 or not mixed) <= tokens, case
                tables = synthetic_batch(executor, kinds, starts, lens).block_tables
                assert tables.shape[2] <= -(-length // block_size), case
                assert tables.max() <= 2, case
            assert (max(episode.prefill.lens) > 1) == (tokens > 1)
            assert episode.decode is None or max(episode.decode.lens) == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seqs", [1, 2, 3, 4, 8])
def test_every_round_measures_every_program_that_can_occur(seqs: int, mixed: bool) -> None:
    executor = bounded_executor("kv", 16, seqs, 256, 34, mixed)
    shapes = program_shapes(executor)
    assert shapes.prefill_buckets == (32, 64, 128, 256)
    possible = set()
    for rows, tokens in shapes.programs():
        least = {32: 2, 64: 33, 128: 65, 256: 129}.get(tokens, 0)
        if least <= 34 * (seqs - (tokens > 0 and rows > 0)):
            possible.add(f"program_{rows}_{tokens}")
    steps = CalibrationSteps(executor, shapes, np.random.default_rng(0))
    for turn in range(10):
        seen = set()
        for episode in steps.round(ends_first=not turn):
            for kinds, starts, lens in (episode.prefill, *([] if episode.decode is None else [episode.decode])):
                step = StepPoint(num_tokens=lens, start=starts, kind=kinds, time_s=1.0)
                found = zip(shapes.feature_names(), shapes.features(*step.arrays()), strict=True)
                seen |= {name for name, value in found if name.startswith("program") and value}
        assert seen == possible


@pytest.mark.parametrize(("tokens", "num_prefill"), [(32, 8), (1, 0)])
def test_an_executor_with_few_programs_can_be_calibrated(tokens: int, num_prefill: int) -> None:
    model = calibrate(bounded_executor("kv", BLOCK, 1, tokens, 4), 1e-3)
    assert model.prefill_quality.num_points == num_prefill
    assert model.decode_quality.num_points == 8
    assert model.decode_s([2], []) > 0


def test_tiles_are_of_whole_blocks() -> None:
    shapes = program_shapes(bounded_executor("kv", 128, 8, 64, 128))
    assert shapes.tokens_per_tile == 128
    assert program_shapes(bounded_executor("kv", 24, 8, 64, 128)).tokens_per_tile == 48


def test_a_description_allows_as_many_requests_as_the_engine_that_was_measured() -> None:
    executor = bounded_executor("kv", BLOCK, 5, 5, 128)
    assert executor.buckets.decode[-1] == 8
    shapes = program_shapes(executor)
    programs = ProgramCosts(shapes=shapes, coefficients=(1.0,) * len(shapes.feature_names()))
    assert (programs.max_num_seqs, programs.max_num_batched_tokens) == (5, 5)
    hardware = describe(dataclasses.replace(MODEL, programs=programs), executor, "tiny")
    workload = Workload(
        prompt_tokens=np.array([2], np.int32),
        output_tokens=np.array([2], np.int32),
        arrival_s=np.array([0.0]),
        best_effort=np.array([False]),
    )
    config = SimulationConfig(policy="fcfs")
    assert simulate(config, hardware=hardware, workload=workload).summary.num_completed == 1
    with pytest.raises(ConfigError, match=r"max_num_seqs=6 is more than .* calibrated for, 5 "):
        simulate(dataclasses.replace(config, max_num_seqs=6), hardware=hardware, workload=workload)


def test_calibrations_are_stored_by_what_they_depend_on_and_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    executor = few_programs(make_executor())
    first = load_or_calibrate(executor, 0.2)
    assert not executor.can_convert
    assert first.costs.convert_per_hidden_token_s == 0.0
    path = calibration_path(executor)
    assert path.is_relative_to(tmp_path)
    assert load_calibration(path) == first
    assert load_or_calibrate(executor, 0.2) == first
    assert calibration_path(make_executor(attention="reproject")) != path
    path.write_text("{broken")
    assert load_calibration(path) is None
    assert load_or_calibrate(executor, 0.2) != first


QUALITY = FitQuality(num_points=9, num_held_back=2, r2=0.99, worst_relative_error=0.1, mean_relative_error=0.05)
MODEL = CostModel(
    costs=StepCosts(
        prefill_base_s=5e-3,
        prefill_per_token_s=1e-4,
        prefill_per_pair_s=1e-8,
        decode_base_s=2e-2,
        decode_per_token_s=8e-7,
        decode_per_hidden_token_s=2e-6,
        decode_per_request_s=4e-5,
        decode_per_hidden_request_s=9e-5,
        convert_per_hidden_token_s=3e-6,
        one_program=SHAPES.mixed,
    ),
    programs=ProgramCosts(
        shapes=SHAPES,
        coefficients=tuple(1e-3 + 1e-5 * i for i in range(len(SHAPES.feature_names()))),
    ),
    prefill_quality=QUALITY,
    decode_quality=QUALITY,
    linear_prefill_quality=QUALITY,
    linear_decode_quality=QUALITY,
)


def test_calibrations_of_older_versions_and_other_programs_are_not_read(tmp_path: Path) -> None:
    executor, path = make_executor(), tmp_path / "kept.json"
    store_calibration(MODEL, path)
    assert load_calibration(path) == MODEL
    old = dataclasses.asdict(MODEL)
    for name in ("by_kind", "prefix_sizes", "prefix_step"):  # as they were before programs by kind
        del old["programs"]["shapes"][name]
    write_verified(path, json.dumps(old).encode())
    assert load_calibration(path) is None
    before = calibration_path(executor)
    executor.buckets.prefill.insert(0, 8)
    assert calibration_path(executor) != before


@pytest.mark.parametrize("mode", ["kv", "hybrid", "hidden"])
def test_a_server_tells_operators_the_description_of_its_machine(mode: CacheMode, tmp_path: Path) -> None:
    executor = make_executor(mode)
    parts: Any = SimpleNamespace(executor=executor, cost_model=MODEL, model_name="tiny")
    told = description(parts)
    if mode == "hidden":
        assert told is None
        return
    path = tmp_path / "here.json"
    path.write_text(json.dumps(told))
    assert load_hardware("tiny", str(path)) == describe(MODEL, executor, "tiny")
    assert description(SimpleNamespace(executor=executor, cost_model=None, model_name="tiny")) is None  # pyright: ignore[reportArgumentType]


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
    assert found.kinds("hybrid") == MODEL.kinds((True, True), absorbs=mode == "absorb")
    assert found.fit["decode"]["r2"] == 0.99
    assert found.programs == MODEL.programs
    other: HiddenAttention = "absorb" if mode == "reproject" else "reproject"
    with pytest.raises(ConfigError, match=f"'{other}' is not described .* not measured"):
        found.step_costs(other)


def test_a_calibration_of_narrow_layer_inputs_fills_their_blocks(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, head_dim=12)  # 48 values a key, 32 a layer input
    executor = make_executor(params=dummy_params(config, "float32", 0), config=config)
    assert (executor.block_size, executor.hidden_block_size) == (4, 6)
    batch = synthetic_batch(executor, [KV, HIDDEN, HIDDEN], [0, 11, 12], [12, 1, 1])
    assert (batch.block_tables > 0).sum(axis=2).tolist() == [[3, 3], [2, 0], [3, 0]]
    path = str(tmp_path / "here.json")
    save_hardware(describe(MODEL, executor, "tiny"), path)
    assert load_hardware("tiny", path).hidden_block_size == 6
    plain = make_executor()
    assert describe(MODEL, plain, "tiny").hidden_block_size is None
    assert calibration_path(executor) != calibration_path(plain)


def test_a_calibration_without_both_kinds_describes_what_it_measured() -> None:
    found = describe(MODEL, make_executor("kv"), "tiny")
    assert [kind.offered for kind in found.kinds("hybrid")] == [True, False]
    with pytest.raises(ConfigError, match="not measured by this calibration"):
        found.kinds("hidden")
    with pytest.raises(ValueError, match="KV kind were not measured"):
        describe(MODEL, make_executor("hidden"), "tiny")


def test_the_simulator_times_steps_by_what_was_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "here.json")
    save_hardware(describe(MODEL, make_executor("hybrid"), "tiny"), path)
    hardware = load_hardware("tiny", path)
    workload = Workload(
        prompt_tokens=np.array([20], np.int32),
        output_tokens=np.array([2], np.int32),
        arrival_s=np.array([0.0]),
        best_effort=np.array([False]),
    )
    result = simulate(SimulationConfig(policy="fcfs"), hardware=hardware, workload=workload)
    steps = [([20], [0], [0]), ([1], [20], [0])]
    expected = sum(
        MODEL.programs.step_s(*StepPoint(num_tokens=n, start=s, kind=k, time_s=0).arrays()) for n, s, k in steps
    )
    assert result.summary.duration_s == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"max_num_seqs=9 is more than .* calibrated for, 8 "):
        simulate(SimulationConfig(max_num_seqs=9), hardware=hardware, workload=workload)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": [1.0]}, "coefficients: 1 given, 21 needed"),
        ({"coefficients": ["x"] * 21}, "coefficients.0: 'x' must be a number"),
        ({"coefficients": [-1.0] * 21}, "must be finite and not < 0"),
        ({"shapes": {}}, "shapes.decode_buckets: missing"),
        ({"other": 1}, "programs.other: unknown field"),
    ],
)
def test_a_broken_description_of_programs_is_named(tmp_path: Path, change, message) -> None:
    path = tmp_path / "here.json"
    save_hardware(describe(MODEL, make_executor("hybrid"), "tiny"), path)
    data = json.loads(path.read_text())
    data["programs"].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_hardware("tiny", str(path))
