"""The one-pass CUDA kernel: its source run by the emulator against the references, over poisoned pools, in orders of warps
that a chip might choose; what is compiled; who takes it."""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from apt_jax import backends
from apt_jax.backends import attention_ops
from apt_jax.lab import kernels
from apt_jax.lab.kernels import cuda_decode_absorbed as cuda
from apt_jax.lab.kernels.cuda_decode_absorbed import VARIANTS, Plan, Variant, plan_for, ranges_of
from apt_jax.ops.calls import LogitModifiers
from apt_jax.pallas.triton_tiles import SHARED_BYTES
from apt_jax.pallas.triton_work_list import rows_of
from benchmarks.gpu.shapes import PUBLISHED
from tests.support import cuda_emulator
from tests.support.attention_cases import expected_decode
from tests.support.cases import num_cases
from tests.support.op_calls import flat
from tools import cuda_kernels

TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}
"""Tolerance of one layer's attention output, relative to its largest value."""
LENGTHS = [0, 1, 15, 16, 17, 65, 0, 129, 33]

SMALL = Variant(cluster=2, warps=2, feature_tiles=1, head_tiles=1, halves=2, stages=5)
"""64 lanes, 8 heads."""
OTHERS = (
    Variant(cluster=1, warps=4, feature_tiles=1, head_tiles=3, halves=2, stages=4),
    Variant(cluster=4, warps=1, feature_tiles=2, head_tiles=2, halves=2, stages=6),
    Variant(cluster=8, warps=1, feature_tiles=1, head_tiles=5, halves=1, stages=4),
)

needs_compiler = pytest.mark.skipif(cuda_emulator.compiler() is None, reason="no C++ compiler")


@dataclasses.dataclass(kw_only=True)
class Case:
    """Arguments of a call over a pool that is NaN wherever no row has a position."""

    args: list[Any]
    dtype: str
    plan: Plan
    count: int = 3
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    value_width: int | None = None

    def actual(self, **how: Any) -> np.ndarray:
        """The emulated kernel's result.

        Args:
            how: of `cuda_emulator.run`.
        """

        def call(*args: Any) -> Any:
            return flat(cuda.decode_absorbed)(
                *args, **self.options, value_width=self.value_width, plan=self.plan, count=self.count, interpret=True
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "launch", functools.partial(cuda_emulator.launch, **how))
            return np.asarray(jax.jit(call)(*self.args)).astype(np.float64)

    def check(self, **how: Any) -> np.ndarray:
        actual = self.actual(**how)
        args = list(self.args)
        if (table_of_row := self.options.get("table_of_row")) is not None:
            args[2] = args[2][table_of_row]
        named = {name: value for name, value in self.options.items() if name != "table_of_row"}
        expected = expected_decode("decode_absorbed", *args, **named)[..., : self.value_width]
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        assert np.abs(actual - expected).max() <= TOLERANCE[self.dtype] * np.abs(expected).max()
        assert not actual[np.asarray(args[3]) == 0].any()
        return actual


def _case(
    lens: Sequence[int],
    *,
    variant: Variant = SMALL,
    heads: int = 7,
    width: int | None = None,
    groups: int = 1,
    dtype: str = "bfloat16",
    block_size: int = 16,
    ranges: bool = False,
    scale: float = 3.0,
    **more: Any,
) -> Case:
    rng = np.random.default_rng(len(lens) + heads)
    width = width or variant.width
    entries = -(-max(*lens, 1) // block_size)
    free = 1 + rng.permutation(len(lens) * entries + 1)
    pool = np.full((len(free) + 1, block_size, width), np.nan, np.float32)
    tables = free[: len(lens) * entries].reshape(len(lens), entries).astype(np.int32)
    bounds = np.zeros((len(lens), entries, 2), np.int32)
    for b, length in enumerate(lens):
        for j in range(-(-length // block_size)):
            own = min(block_size, length - j * block_size)
            first = int(rng.integers(block_size - own + 1)) if ranges else 0
            bounds[b, j] = (first, first + own) if not ranges or rng.integers(2) else (first + own, first)
            pool[tables[b, j], first : first + own] = rng.standard_normal((own, width))
    q = rng.standard_normal((len(lens), heads, width)) * scale * width**-0.5
    options: dict[str, Any] = {"block_size": block_size}
    if ranges:
        options["slot_ranges"] = jnp.asarray(bounds)
    return Case(
        args=[
            jnp.asarray(q.astype(np.float32)).astype(dtype),
            jnp.asarray(pool).astype(dtype),
            jnp.asarray(tables),
            jnp.asarray(lens, jnp.int32),
        ],
        dtype=dtype,
        plan=Plan(variant, groups, -(-heads // groups)),
        options=options,
        **more,
    )


@pytest.mark.in_turn(14, group="kernels in interpreters")
@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", [SMALL, *OTHERS], ids=lambda variant: variant.name)
def test_ragged_lengths_match_the_reference(variant: Variant, dtype: str) -> None:
    _case(LENGTHS, variant=variant, heads=variant.heads - 3, dtype=dtype).check(seed=len(dtype))


@pytest.mark.in_turn(14, group="kernels in interpreters")
@needs_compiler
@pytest.mark.seeds
def test_any_order_of_warps_gives_the_same_bits() -> None:
    case = _case([200, 0, 33, 129, 1])
    want = case.check()
    for seed in range(1, num_cases(8, 100)):
        np.testing.assert_array_equal(case.actual(seed=seed), want)


@needs_compiler
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 1, 64), (1, 1, 64), (13, 2, 64), (24, 3, 48), (5, 1, 56)])
def test_heads_in_groups_and_narrower_layer_inputs(heads: int, groups: int, width: int) -> None:
    _case([0, 40, 100], heads=heads, groups=groups, width=width).check(seed=3)


@needs_compiler
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("ranges", [False, True])
def test_blocks_of_any_size_and_two_requests_in_one(block_size: int, ranges: bool) -> None:
    _case([17, 66, 1, 0, 40], block_size=block_size, ranges=ranges, dtype="float16").check(seed=1)


@needs_compiler
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_rows_are_cut_in_any_number_of_ranges(count: int) -> None:
    _case([300, 5, 0, 64, 17], count=count).check(seed=count)


RULES = {
    "window": LogitModifiers(window=37),
    "softcap": LogitModifiers(softcap=2.0),
    "slopes": LogitModifiers(slopes=jnp.asarray([0.5**i for i in range(7)], jnp.float32)),
    "all": LogitModifiers(window=20, softcap=3.0, slopes=jnp.asarray([0.3] * 7, jnp.float32)),
}


@needs_compiler
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", RULES)
def test_score_rules(name: str) -> None:
    case = _case(LENGTHS, scale=9.0)
    case.options["rules"] = RULES[name]
    case.check(seed=2)


@needs_compiler
def test_query_rows_can_share_a_table() -> None:
    case = _case([40, 0, 90])
    q, pool, tables, _ = case.args
    lens = jnp.asarray([90, 40, 1, 64, 0], jnp.int32)
    case.args = [jnp.concatenate([q, 2 * q[:2]]), pool, tables, lens]
    case.options["table_of_row"] = jnp.asarray([2, 0, 2, 2, 0], jnp.int32)
    case.check()


@needs_compiler
def test_no_row_at_all_gives_zeros() -> None:
    case = _case([5, 20])
    case.args[3] = jnp.zeros(2, jnp.int32)
    assert not case.actual().any()


@needs_compiler
def test_the_value_can_be_the_first_lanes() -> None:
    _case([0, 40, 100], value_width=46).check(seed=1)


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    _case([100, 33], scale=300.0, dtype="float16").check()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_is_compiled_is_right_at_its_own_size(variant: Variant) -> None:
    heads = {7168: 56, 9216: 72}.get(variant.width, variant.heads)
    plan = plan_for(heads, variant.width)
    assert plan is not None
    assert plan.variant == variant
    case = _case([0, 33, 100], variant=variant, heads=heads, count=2)
    case.plan, case.value_width = plan, 512 if variant.width == 576 else None
    case.check(seed=1)


# ---- the emulator sees what it is there for


FAULTS = {
    "a buffer of P too few": ("kWeightBuffers = 3", "kWeightBuffers = 2"),
    "a buffer of scores too few": ("kScoreBuffers = 2", "kScoreBuffers = 1"),
    "no barrier in a block": ("      block_sync();\n      sum_warps", "      sum_warps"),
    "sums of a half overwritten": ("if (half > 0) block_sync();", ""),
    "copies not waited for": ("copies_wait<STAGES - 3>", "copies_wait<STAGES - 2>"),
    "no barrier at the start": ("written to\n  cluster_arrive();\n  cluster_wait();\n", "written to\n"),
    "a row of x beside its place": ("offset + feature : 0", "offset + feature + 1 : 0"),
    "others' slots read": ("(cursor.step.own >> position & 1) != 0 && feature", "feature"),
    "lanes that part": ("    warp_sync();\n    const Step of", "    if (lane) warp_sync();\n    const Step of"),
}


@pytest.mark.in_turn(14, group="kernels in interpreters")
@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str) -> None:
    case = _case([200, 0, 33, 129, 1])
    want = case.actual()
    assert any(_differs(case, want, fault, seed) for seed in range(4))


def _differs(case: Case, want: np.ndarray, fault: str, seed: int) -> bool:
    """True where a fault gives another result, or the emulator says what is wrong."""
    try:
        return not np.array_equal(case.actual(seed=seed, edits=(FAULTS[fault],)), want)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return "EmulationError" in str(error)


# ---- ranges


@pytest.mark.seeds
def test_ranges_have_every_tile_once() -> None:
    rng = np.random.default_rng(5)
    for _ in range(num_cases(10, 300)):
        batch, count = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        lens = rng.integers(0, 700, batch) * (rng.random(batch) < 0.7)
        slack, window = int(rng.integers(0, 8)), [None, 100][int(rng.integers(2))]
        rows = rows_of(jnp.asarray(lens, jnp.int32), None, tokens=16, window=window)
        work, starts = ranges_of(rows, count, slack)
        items, starts = np.asarray(work.items), np.asarray(starts)
        first, last = np.asarray(rows.first), np.asarray(rows.last)
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for row, _, length, start, stop, _, _, place in items[: starts[-1]]:
            assert length == lens[row]
            assert start < stop
            seen.setdefault(int(row), []).append((int(start), int(stop), int(place)))
        assert starts[0] == 0
        assert (np.diff(starts) >= 0).all()
        empty = [int(row) for row in items[starts[-1] :, 0] if row >= 0]
        assert sorted([*seen, *empty]) == list(range(batch))
        used: list[int] = []
        joins = {int(row): (int(at), int(n)) for row, at, n in np.asarray(work.joins) if n}
        for row, pieces in seen.items():
            assert [pieces[0][0], pieces[-1][1]] == [first[row], last[row]]
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            places = [place for _, _, place in pieces]
            assert places == ([-1] if len(pieces) == 1 else list(range(joins[row][0], joins[row][0] + joins[row][1])))
            used += [place for place in places if place >= 0]
        assert sorted(joins) == sorted(row for row, pieces in seen.items() if len(pieces) > 1)
        assert sorted(used) == list(range(len(used)))
        assert len(used) <= work.num_places
        share = max(2, -(-int((last - first).sum()) // count))
        tiles = [items[a:b, 4].sum() - items[a:b, 3].sum() for a, b in itertools.pairwise(starts)]
        assert max(tiles) <= share + 2 * slack


def test_a_cut_near_the_end_of_a_row_moves_there() -> None:
    rows = rows_of(jnp.full(8, 29 * 16, jnp.int32), None, tokens=16)
    whole, _ = ranges_of(rows, 4, slack=5)
    assert (np.asarray(whole.items)[:8, 7] == -1).all()
    cut, _ = ranges_of(rows_of(jnp.full(3, 100 * 16, jnp.int32), None, tokens=16), 4, slack=5)
    assert np.asarray(cut.joins)[:, 2].tolist() == [2, 2, 2]


# ---- what is compiled


def test_the_compiled_kernel_is_of_this_source() -> None:
    assert cuda_kernels.is_current(), "run python -m tools.cuda_kernels"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variants_fit_a_processor_and_say_how_they_are_launched(variant: Variant) -> None:
    assert variant.shared_bytes <= SHARED_BYTES[cuda.CHIP]
    for dtype in ("bfloat16", "float16"):
        ptx = cuda.ptx_of(variant, dtype)
        assert ptx.startswith(".version 8.0\n.target sm_90\n")
        assert f".reqnctapercluster {variant.cluster}, 1, 1" in ptx
        assert f".maxntid {variant.threads}, 1, 1" in ptx
        kinds = set(re.findall(r"m16n8k16\.row\.col\.f32\.(\w+)\.(\w+)\.f32", ptx))
        short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        assert kinds == {(short, short)}
        assert ("bf16" in ptx) == (dtype == "bfloat16")


def test_published_models_have_a_variant() -> None:
    wanted = {
        ("opt-6.7b", 1, 32), ("opt-13b", 1, 40), ("opt-30b", 2, 28), ("opt-66b", 3, 24), ("opt-125m", 1, 12),
    }  # fmt: skip
    for name, groups, heads in wanted:
        shape = PUBLISHED[name]
        plan = plan_for(shape.num_heads, shape.hidden_size)
        assert plan is not None
        assert (plan.groups, plan.group_heads, plan.variant.width) == (groups, heads, shape.hidden_size)
        assert cuda.num_ranges(plan) * groups * plan.variant.cluster <= 132
    latent = plan_for(128, 576)
    assert latent is not None
    assert (latent.groups, latent.group_heads) == (4, 32)
    assert plan_for(40, 300) is None
    assert plan_for(112, 14336) is None


def _abstract(batch: int = 4, heads: int = 40, width: int = 5120, dtype: Any = jnp.bfloat16) -> list[Any]:
    return [
        ShapeDtypeStruct((batch, heads, width), dtype),
        ShapeDtypeStruct((64, 16, width), dtype),
        ShapeDtypeStruct((batch, 8), jnp.int32),
        ShapeDtypeStruct((batch,), jnp.int32),
    ]


def test_the_launch_is_one_custom_call_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "join_pieces", lambda work, results, partial, sinks, interpret: results)
    call, plan = functools.partial(flat(cuda.decode_absorbed), block_size=16), plan_for(40, 5120)
    assert plan is not None
    text = jax.jit(call).trace(*_abstract()).lower(lowering_platforms=("cuda",)).as_text()
    (found,) = re.findall(r"custom_call @__gpu\$xla\.gpu\.ptx.*", text)
    for name, value in (
        ("grid_x", 128),
        ("grid_y", 1),
        ("block_x", 256),
        ("shared_mem_bytes", plan.variant.shared_bytes),
    ):
        assert f"{name} = {value} : i32" in found
    assert 'kernel_type = "ptx"' in found
    assert 'name = "decode_absorbed"' in found


# ---- who takes it


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "two kernels" in r.getMessage()]


@pytest.mark.parametrize(
    ("chip", "width", "dtype", "reason"),
    [
        ("sm_80", 5120, "bfloat16", "needs a chip with clusters (sm_90 or newer; this is sm_80)"),
        ("sm_90", 5120, "float32", "the same 16-bit dtype (float32 layer inputs"),
        ("sm_90", 300, "bfloat16", "layer inputs of 300 lanes in blocks of (16, 300) are not aligned to 8"),
        ("sm_90", 13000, "bfloat16", "not compiled for layer inputs of 13000 lanes"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_two_kernels_with_one_line(
    chip: str, width: int, dtype: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apt_jax.pallas import triton_decode_absorbed

    monkeypatch.setattr(triton_decode_absorbed, "decode_absorbed", lambda q, *_, out_dtype, **__: q.astype(out_dtype))
    attention_ops.cache_clear()
    ops = attention_ops("gpu", "triton-onepass", chip)
    attention_ops.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            call = functools.partial(flat(ops.decode_absorbed), block_size=16)
            out = jax.eval_shape(call, *_abstract(heads=4, width=width, dtype=jnp.dtype(dtype)))
            assert out.dtype == dtype
    (line,) = _logged(caplog)
    assert reason in line


def test_the_backend_replaces_absorbed_decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backends.triton("sm_90")
    monkeypatch.setattr(kernels, "triton", lambda chip: plain)
    one_pass = kernels.BACKENDS["triton-onepass"]("sm_90")
    changed = {name for name, value in vars(plain).items() if vars(one_pass)[name] is not value}
    assert changed == {"name", "decode_absorbed"}


def test_the_programs_of_both_16_bit_kinds_differ_in_two_instructions() -> None:
    for variant in VARIANTS:
        pairs = zip(*(cuda.ptx_of(variant, dtype).splitlines() for dtype in ("bfloat16", "float16")), strict=True)
        changed = {re.split(r"[ \t]", a)[0] for a, b in pairs if a != b}
        assert changed == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "cvt.rn.bf16x2.f32"}
