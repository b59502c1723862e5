"""The gate that compiles GPU code without a GPU: what it counts, and that it fails when it should.

The half that compiles needs Triton and JAX's CUDA plugin: `make gate` runs it in their environment.
"""

import dataclasses
import itertools

import pytest

pytest.importorskip("benchmarks.gpu.gate")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from apt_jax.backends import attention_ops
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu import compile_only, device_free, engine_step, gate, launches, shapes
from benchmarks.gpu.compile_only import CHIPS, KernelCode, KernelReport
from benchmarks.gpu.device_free import ProgramReport
from benchmarks.gpu.launches import LaunchCase, LaunchReport

A100 = CHIPS["sm_80"]
GOOD_KERNEL = KernelReport(
    registers=96, stack_bytes=0, spill_ops=0, shared_bytes=30_000, ctas_per_sm=4, hmma=24, hgmma=0, async_copies=20
)
GOOD_STEP = ProgramReport(
    pool_bytes=1000,
    pool_copies=0,
    aliased_bytes=1000,
    temporary_bytes=49,
    command_buffers=1,
    kernels=50,
    outside=0,
    collectives=0,
)
LOOP = """
module {
  tt.func public @kernel(%x: !tt.ptr<bf16>) {
    %out = scf.for %k = %a to %b step %c iter_args(%acc = %zero) -> (tensor<64x64xf32>) {
      %tile = tt.load %pointers : tensor<64x64x!tt.ptr<bf16>>
      %next = tt.dot %tile, %w, %acc : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
      scf.yield %next : tensor<64x64xf32>
    }
    tt.return
  }
}
"""


def code(ttir: str, num_stages: int = 3) -> KernelCode:
    return KernelCode(name="kernel", ttir=ttir, num_warps=4, num_stages=num_stages, grid=(1, 1, 1))


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "ctas"),
    [
        (32, 1, 0, 32),  # the most CTAs
        (32, 8, 0, 8),  # 2048 threads
        (128, 4, 0, 4),  # 65536 registers
        (129, 4, 0, 3),  # rounded up to 136
        (64, 4, 40 << 10, 4),  # 164 KiB, one KiB a CTA taken
        (64, 4, 163 << 10, 1),
        (64, 4, (163 << 10) + 1, 0),
    ],
)
def test_occupancy(registers, num_warps, shared_bytes, ctas):
    found = compile_only.occupancy(A100, registers=registers, num_warps=num_warps, shared_bytes=shared_bytes)
    assert found == ctas


def test_a_kernel_that_multiplies_what_its_loop_loads_streams_tiles():
    assert code(LOOP).has_products
    assert code(LOOP).streams_tiles
    assert not code(LOOP, num_stages=1).streams_tiles
    before_the_loop = LOOP.replace("scf.for", "scf.if")
    assert not code(before_the_loop).streams_tiles


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spill_ops": 6}, "6 spill instructions"),
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"ctas_per_sm": 0}, "does not fit an SM"),
        ({"hmma": 0}, "without tensor cores"),
        ({"async_copies": 0}, "without asynchronous copies"),
    ],
)
def test_a_kernel_fails_by_one_property(change, said):
    assert compile_only.failures(code(LOOP), GOOD_KERNEL) == []
    (failure,) = compile_only.failures(code(LOOP), dataclasses.replace(GOOD_KERNEL, **change))
    assert said in failure


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pool_copies": 1}, "1 copies of a layer's pool"),
        ({"aliased_bytes": 999}, "only 999 of the pools' 1000 bytes"),
        ({"temporary_bytes": 50}, "temporaries take 5.0% of the pool"),
        ({"command_buffers": 2}, "2 command buffers and 0 launches"),
        ({"outside": 3}, "1 command buffers and 3 launches"),
    ],
)
def test_a_step_fails_by_one_property(change, said):
    assert device_free.failures(GOOD_STEP) == []
    (failure,) = device_free.failures(dataclasses.replace(GOOD_STEP, **change))
    assert said in failure


def test_a_step_that_sends_whole_tables_fails():
    assert engine_step.input_failures(64, 0, 8192) == []
    (failure,) = engine_step.input_failures(64, 0, 64 * 2 * 16384 * 4)
    assert failure == "8388608 bytes come from the host (must be at most 8192)"
    assert engine_step.input_failures(64, 512, 8192 + 16384) == []


def test_loops_lie_between_command_buffers():
    looped = dataclasses.replace(GOOD_STEP, command_buffers=3, outside=2)
    assert device_free.failures(looped, num_loops=2) == []
    assert "must be 2 and 1" in device_free.failures(looped, num_loops=1)[0]
    assert "must be 3 and 2" in device_free.failures(GOOD_STEP, num_loops=2)[0]


HLO = """
%write (p: bf16[8,16], i: s32[2], r: bf16[2,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %s = bf16[8,16]{1,0} scatter(%p, %i, %r), to_apply=%last
}

%scale (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %m = bf16[8,16]{1,0} multiply(%p, %p)
}

ENTRY %main (pool: bf16[8,16], i: s32[2], r: bf16[2,16]) -> (bf16[8,16], bf16[4,4]) {
  %pool = bf16[8,16]{1,0} parameter(0)
  %flat = bf16[128]{0} bitcast(%pool)
  %small = bf16[4,4]{1,0} copy(%r)
  %written = bf16[8,16]{1,0} fusion(%pool, %i, %r), kind=kInput, calls=%write
  ROOT %out = (bf16[8,16]{1,0}, bf16[4,4]{1,0}) tuple(%written, %small)
}
"""


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("", 0),
        ("%c = bf16[8,16]{1,0} copy(%pool)", 1),
        ("%c = bf16[128]{0} copy(%flat)", 1),
        ("%c = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[]) copy-start(%pool)", 1),
        ("%c = f32[8,16]{1,0} convert(%pool)", 1),
        ("%c = bf16[8,16]{1,0} fusion(%pool), kind=kLoop, calls=%scale", 1),
        ("%c = bf16[16,16]{1,0} copy(%other)", 0),
    ],
)
def test_copies_of_a_pool_are_found_whatever_makes_them(line, copies):
    assert device_free.pool_copies(HLO.replace("  %flat", f"  {line}\n  %flat"), 128) == copies


@pytest.mark.parametrize(
    ("line", "copies"), [("", 0), ("%c = bf16[8,16]{1,0} copy(%pool)", 1), ("%c = bf16[4,4]{1,0} copy(%r)", 0)]
)
def test_copies_within_a_loop_are_found(line, copies):
    loop = f"""
%again (t: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {{
  %t = (s32[], bf16[8,16]{{1,0}}) parameter(0)
  %pool = bf16[8,16]{{1,0}} get-tuple-element(%t), index=1
  {line}
  ROOT %next = (s32[], bf16[8,16]{{1,0}}) tuple(%i, %pool)
}}
"""
    call = "  %loop = (s32[], bf16[8,16]{1,0}) while(%start), condition=%ends, body=%again\n"
    hlo = loop + HLO.replace("  %flat", f"{call}  %flat")
    assert device_free.pool_copies(hlo, 128) == copies


def test_launches_are_counted_inside_and_outside_of_command_buffers():
    assert device_free._launches(
        "000: kCommandBuffer [source] \n"
        "    001: kCustomKernel [source] fusion\n"
        "    002: kAllReduce [source]\n"
        "003: kWhile [source]\n"
    ) == {"command_buffers": 1, "kernels": 2, "outside": 1, "collectives": 1}


def test_every_kernel_of_the_family_is_compiled_at_every_shape_dtype_and_chip():
    fields = {field.name for field in dataclasses.fields(KernelBackend)} - {
        "name",
        "rows_per_tile",
        "branches",
        "extras",
        "add_low_rank",
        "dense",
        "gated",
        "dense_argmax",
        "experts",
        "head_products",
        "add_norm",
        "split_qkv",
        "tiles",
        "skips_rows",
        "decode_layer",
        "takes_layer",
        "takes_shards",
        "integer_products",
    }
    cases = gate.kernel_cases()
    assert {case.op for case in cases} == fields
    for shape, dtype, arch in itertools.product(shapes.GATE, gate.DTYPES, gate.ARCHS):
        ops = {c.op for c in cases if (c.shape, c.dtype, c.arch) == (shape, dtype, arch)}
        rotary = shapes.PUBLISHED[shape].rotary_dim > 0
        assert ops == fields - {"decode_absorbed" if rotary else "decode_v_absorbed"}


def test_the_quick_gate_has_every_kernel_at_every_shape_every_dtype_and_every_step_on_two_days():
    kernels, steps = gate.kernel_cases(), gate.step_cases()
    first, second = (gate.quick(kernels, steps, day) for day in (738_000, 738_001))
    assert abs(len(first) - len(second)) <= 4
    for items in (first, second):
        chips = [item.arch if isinstance(item, gate.KernelCase) else item[1] for item in items]
        assert set(chips) == {case.arch for case in kernels}
        assert {chip for chip, item in zip(chips, items, strict=True) if isinstance(item, tuple)} == set(gate.ARCHS)
    assert not set(map(str, first)) & set(map(str, second))
    items = [*first, *second]
    chosen = [item for item in items if isinstance(item, gate.KernelCase)]
    assert {(c.name, c.shape) for c in chosen} == {(c.name, c.shape) for c in kernels}
    assert {(c.op, c.arch) for c in chosen} == {(c.op, c.arch) for c in kernels}
    assert {c.dtype for c in chosen} == set(gate.DTYPES)
    short = [item for item in items if not isinstance(item, gate.KernelCase)]
    cases = dict.fromkeys(c for c, _ in steps)
    assert {c for c, _ in short} == {gate.with_few_layers(c) for c in cases}
    assert len(short) == len(cases)
    assert {arch for _, arch in short} == set(gate.ARCHS)
    assert all((c.num_layers or 99) < 8 for c, _ in short)
    assert any(c.model.startswith("gemma-3") and c.num_layers == 6 for c, _ in short)
    assert all(any(c.model == case.model and a == arch for c, a in steps) for case, arch in short)


def test_tables_put_chips_side_by_side_and_equal_dtypes_together():
    def outcome(dtype: str, arch: str, registers: int) -> gate.Outcome:
        report = dataclasses.replace(GOOD_KERNEL, registers=registers)
        return gate.Outcome(
            kernel="k", op="o", shape="m", dtype=dtype, arch=arch, report=report, failures=(), seconds=0.0
        )  # fmt: skip

    same = [outcome(*c, 96) for c in itertools.product(gate.DTYPES, gate.ARCHS)]
    assert [row[:5] for row in gate.kernel_table(same)[1:]] == [["k", "o", "m", "both", "96"]]
    different = [outcome("bfloat16", "sm_80", 80), *same[1:]]
    assert [row[3:5] for row in gate.kernel_table(different)[1:]] == [["bfloat16", "80"], ["float16", "96"]]


def test_tables_go_between_markers():
    text = "a\n<!-- t -->\nold\n<!-- /t -->\nb\n"
    assert gate.replace_between(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb\n"
    with pytest.raises(ValueError, match="no markers"):
        gate.replace_between("a", "t", "new")
    for name in ("kernels", "small", "steps", "launches", "versions"):
        assert gate.replace_between(gate.DOCUMENT.read_text(), name, "new")


PLAIN = LaunchReport(fixed=8, per_layer=16, total=648, command_buffers=1, outside=0)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, False),
        ({"per_layer": 17}, False),  # the write of layer inputs
        ({"per_layer": 18}, True),
        ({"fixed": 9}, True),
    ],
)
def test_a_step_without_hidden_prefixes_may_launch_one_kernel_a_layer_more_than_its_twin(change, fails):
    case = LaunchCase(model="opt-13b", hybrid=True, prompt_tokens=64)
    twin, behind = (dataclasses.replace(case, **changed) for changed in ({"hybrid": False}, {"num_prefixes": 1}))
    reports = {
        twin: PLAIN,
        case: dataclasses.replace(PLAIN, **change),
        behind: dataclasses.replace(PLAIN, per_layer=60),
    }
    outcomes = [
        gate.Outcome(kernel=c.name, op="launches", shape="m", dtype="d", arch="a", report=r, failures=(), seconds=0.0, case=c)
        for c, r in reports.items()
    ]  # fmt: skip
    assert [bool(o.failures) for o in launches.with_twins(outcomes)] == [False, fails, False]
    table = launches.table(outcomes)
    assert [row[0] for row in table[1:]] == [c.name for c in reports]
    assert table[1][3:6] == ["16", "8", "648"]
    assert launches.with_twins(outcomes[1:]) == outcomes[1:]  # alone there is nothing to compare with


def test_launches_are_counted_in_the_steps_that_the_engine_runs():
    cases = launches.cases()
    assert {c.model for c in cases} == {"opt-13b", "llama-2-7b", "llama-3-8b"}
    of_opt = {(c.hybrid, c.prompt_tokens, c.num_prefixes) for c in cases if c.model == "opt-13b" and c.prompt_tokens}
    assert of_opt == {(hybrid, t, n) for t in (64, 1024) for hybrid, n in ((False, 0), (True, 0), (True, 1), (True, 8))}
    assert {c.num_rows for c in cases if not c.prompt_tokens} == {1, 64}
    assert all(case.twin is None or case.twin in cases for case in cases)
    rooms = {
        (c.model, c.prompt_tokens, c.num_prefixes): launches.step_of(c, 1).prefix_room
        for c in cases
        if c.prompt_tokens and c.hybrid
    }
    assert [rooms["opt-13b", 1024, n] for n in (0, 1, 8)] == [0, 8192, 32_768]
    assert [rooms["opt-13b", 64, n] for n in (0, 1, 8)] == [0, None, None]  # absorbed
    assert [rooms["llama-2-7b", 64, n] for n in (0, 1, 8)] == [0, 8192, 32_768]
    for day in (0, 1):
        plain, hybrid = launches.quick_cases(day)
        assert hybrid.twin == plain


# ---- compiled for real


@pytest.mark.parametrize("planted", [False, True])
def test_the_gate_finds_a_kernel_that_prompts_without_prefixes_launch(planted, monkeypatch):
    """One that is launched for prefixes that are not there, as if the host did not know."""
    if not (gate._installed("triton") and gate._installed("jax_plugins.xla_cuda12")):
        pytest.skip("needs Triton and JAX's CUDA plugin: make gate")
    case = LaunchCase(model="opt-13b", hybrid=True, prompt_tokens=64)
    assert case.twin is not None
    counted = [gate.check_launches(case.twin, gate.gpu_ops(CHIPS[case.arch]))]
    if planted:
        step_of = launches.step_of
        monkeypatch.setattr(launches, "step_of", lambda c, n: dataclasses.replace(step_of(c, n), prefix_room=8192))
    counted.append(gate.check_launches(case, gate.gpu_ops(CHIPS[case.arch])))
    assert [o.failures for o in counted] == [(), ()]
    assert bool(launches.with_twins(counted)[1].failures) == planted


compiles = pytest.mark.skipif(
    not (gate._installed("triton") and gate._installed("jax_plugins.xla_cuda12")),
    reason="needs Triton and JAX's CUDA plugin: make gate",
)


@compiles
@pytest.mark.parametrize("arch", CHIPS)
def test_a_kernel_that_pipelines_passes(arch):
    from tests.support.gate_kernels import SMALL_OPS

    case = gate.KernelCase(op="decode_kv", shape="opt-13b", dtype="bfloat16", arch=arch)
    (outcome,) = gate.check_kernels(case, SMALL_OPS)
    assert outcome.failures == ()
    assert isinstance(outcome.report, KernelReport)
    assert outcome.report.registers > 32
    assert outcome.report.hmma > 0
    assert outcome.report.async_copies > 0


@compiles
def test_a_kernel_that_spills_fails():
    from tests.support.gate_kernels import spilling

    tiles = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 1024), (1024, 512)))
    (kernel,) = compile_only.pallas_kernels(spilling, tuple(tiles), A100)
    failures = compile_only.failures(kernel, compile_only.compile_kernel(kernel, A100))
    assert len(failures) == 2
    assert "spill instructions" in failures[0]
    assert "bytes of stack" in failures[1]


@compiles
def test_a_kernel_that_cannot_be_lowered_fails_by_name():
    from tests.support.gate_kernels import SMALL_OPS

    case = gate.KernelCase(op="prefill", shape="opt-66b", dtype="float16", arch="sm_90")
    (outcome,) = gate.check_kernels(case, SMALL_OPS)
    assert outcome.place == "prefill [prefill] on sm_90, opt-66b float16"
    assert outcome.failures == ("cannot be lowered: NotImplementedError: the gate's tests have no such kernel",)


@compiles
@pytest.mark.parametrize("arch", CHIPS)
def test_kernels_in_triton_are_compiled_with_aligned_pointers(arch):
    from tests.support.gate_triton_kernel import product

    types = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "width": "i32"}
    constants = {"COLUMNS": 64, "STEP": 64}
    kernel, report = compile_only.compile_triton(product, types, constants, CHIPS[arch], num_warps=4, num_stages=3)
    assert compile_only.failures(kernel, report) == []
    with pytest.raises(ValueError, match="STEP"):
        compile_only.compile_triton(product, types, {"COLUMNS": 64}, A100, num_warps=4, num_stages=3)


@compiles
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_step_must_donate_its_pools(num_devices):
    from tests.support.gate_kernels import SMALL_OPS

    case = engine_step.StepCase(
        model="opt-13b", dtype="bfloat16", kinds=(True, False), num_layers=2, num_devices=num_devices
    )  # fmt: skip
    assert gate.check_step(case, "sm_80", SMALL_OPS).failures == ()
    copying = gate.check_step(dataclasses.replace(case, donate=False), "sm_80", SMALL_OPS)
    assert "2 copies of a layer's pool (must be 0)" in copying.failures


@pytest.mark.parametrize(
    ("step", "loops"),
    [
        ({}, 0),
        ({"kinds": (True, False), "prefill_tokens": 512, "prefix_room": None}, 0),
        ({"prefill_tokens": 512}, 0),
        ({"prefill_tokens": 512, "prefix_room": None}, 2),
        ({"absorb": False}, 2),
        ({"model": "llama-2-7b"}, 2),
        ({"prefill_tokens": 512, "num_devices": 1, "prefix_room": 32_768}, 0),
        ({"prefill_tokens": 512, "num_devices": 1, "prefix_room": None}, 2),
    ],
)
def test_loops_of_steps_over_several_gpus(step, loops):
    usual = {"model": "opt-66b", "dtype": "bfloat16", "kinds": (True, True), "num_layers": 2, "num_devices": 4}
    assert engine_step.StepCase(**usual | step).num_loops == loops


@compiles
def test_a_step_with_loops_outside_its_kernels_fails():
    case = engine_step.StepCase(model="opt-13b", dtype="bfloat16", kinds=(True, False), num_layers=2)
    failures = gate.check_step(case, "sm_80", attention_ops("gpu", "xla")).failures
    assert "command buffers" in failures[-1]


@compiles
@pytest.mark.parametrize("num_rows", [1, 64])
def test_thresholds_of_top_k_and_top_p_read_the_scores_once_a_pass(num_rows):
    vocab = 50_272
    placed = NamedSharding(device_free.make_mesh(A100, 1), PartitionSpec())
    scores, rows, ints = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
        for shape, dtype in (((num_rows, vocab), "f4"), ((num_rows,), "f4"), ((num_rows,), "i4"))
    )
    lowered = jax.jit(lambda *a: sampling.restrict(*a, branches=False)).lower(scores, ints, rows, rows)
    text = str(lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text())
    entry = text[text.index("\nENTRY") :].splitlines()
    sums = [line for line in entry if line.count(f"u32[{num_rows},32]") == 15 or line.count("u32[32]{0}") == 15]
    assert len([line for line in sums if " fusion(" in line]) == 16
    large = [
        size
        for line in entry
        if " fusion(" in line
        for size in device_free._sizes(line.split(" = ")[1].split(" fusion(")[0])
    ]
    assert large.count(num_rows * vocab) < 10  # not 15 a pass
