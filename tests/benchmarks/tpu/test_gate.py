"""The gate that compiles TPU code without a TPU: what it counts, and that it fails when it should.

The half that compiles needs libtpu: `make gate-tpu` runs it with it.
"""

import dataclasses
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu.gate import replace_between
from benchmarks.tpu import gate
from benchmarks.tpu.compile_only import CHIPS, TpuReport, read_program
from benchmarks.tpu.engine_step import TpuCase
from benchmarks.tpu.environment import ENVIRONMENT

KV = TpuCase(model="opt-125m", num_layers=2, cache="kv")
GOOD = TpuReport(
    pool_bytes=1000,
    pool_copies=0,
    aliased_bytes=1000,
    temporary_bytes=299,  # of six times the pool: two of twelve layers are compiled
    total_bytes=2000,
    moved_bytes=130,
    kernels=2,
    loops=0,
    collectives="none",
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pool_copies": 1}, "1 copies of a layer's pool"),
        ({"aliased_bytes": 999}, "only 999 of the pools' 1000 bytes"),
        ({"temporary_bytes": 300}, "temporaries take 5.0% of the pool"),
        ({"kernels": 1}, "1 kernels (must be 2)"),
        ({"collectives": "1 all-gather"}, "collectives: 1 all-gather (must be none)"),
    ],
)
def test_a_step_fails_by_one_property(change, said):
    assert gate.step_failures(KV, GOOD, 100) == []
    (failure,) = gate.step_failures(KV, dataclasses.replace(GOOD, **change), 100)
    assert said in failure


def test_traffic_is_judged_of_whole_models_where_no_loop_hides_it():
    whole = dataclasses.replace(KV, num_layers=None)
    good = dataclasses.replace(GOOD, kernels=12, temporary_bytes=0)
    assert gate.step_failures(whole, good, 100) == []
    (failure,) = gate.step_failures(whole, dataclasses.replace(good, moved_bytes=131), 100)
    assert "moves 1.31 times the bytes" in failure
    assert gate.step_failures(whole, dataclasses.replace(good, moved_bytes=131, loops=1), 100) == []
    assert gate.step_failures(KV, dataclasses.replace(GOOD, moved_bytes=131), 100) == []


@pytest.mark.parametrize(
    ("case", "kernels", "collectives"),
    [
        (KV, 2, "none"),
        (dataclasses.replace(KV, cache="hybrid"), 4, "none"),
        (dataclasses.replace(KV, cache="hidden"), 2, "none"),
        (dataclasses.replace(KV, backend="xla"), 0, "none"),
        (dataclasses.replace(KV, num_devices=4), 2, "5 all-reduce; 1 all-gather"),
        (
            dataclasses.replace(KV, cache="hybrid", num_devices=4),
            2,
            "7 all-reduce, 2 all-gather, 4 reduce-scatter; 1 all-gather",
        ),
        (TpuCase(model="llama-2-7b", num_layers=3), 3, "none"),
    ],
)
def test_what_the_design_has(case, kernels, collectives):
    assert gate.expected_kernels(case) == kernels
    assert gate.expected_collectives(case) == collectives


HLO = """
%rows (table: bf16[512,16], i: s32[2]) -> bf16[2,16] {
  %table = bf16[512,16]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  ROOT %g = bf16[2,16]{1,0} gather(%table, %i), slice_sizes={1,16}
}

%write (p: bf16[512,16], i: s32[2], r: bf16[2,16]) -> bf16[512,16] {
  %p = bf16[512,16]{1,0} parameter(0)
  %i.1 = s32[2]{0} parameter(1)
  %r = bf16[2,16]{1,0} parameter(2)
  ROOT %s = bf16[512,16]{1,0} scatter(%p, %i.1, %r), to_apply=%last
}

%more (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} all-reduce(%x), to_apply=%add
}

%none (y: f32[8]) -> f32[8] {
  ROOT %y = f32[8]{0} parameter(0)
}

ENTRY %main (pool: bf16[512,16], i: s32[2], w: bf16[4,64], o: f32[8]) -> bf16[512,16] {
  %pool = bf16[512,16]{1,0:T(8,128)(2,1)} parameter(0)
  %i.2 = s32[2]{0:T(128)S(1)} parameter(1)
  %w = bf16[4,64]{1,0:T(8,128)(2,1)} parameter(2)
  %o = f32[8]{0:T(128)} parameter(3)
  %b = bf16[512,16]{1,0:T(8,128)(2,1)} bitcast(%pool)
  LINE
  %choice = f32[8]{0:T(128)} conditional(%c, %o, %o), true_computation=%more, false_computation=%none
  ROOT %out = (bf16[512,16]{1,0:T(8,128)(2,1)}) tuple(%b)
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        # What lies in VMEM, S(1), is not counted: neither indices nor what is fetched there.
        ("%f = bf16[2,16]{1,0:T(8,128)(2,1)S(1)} fusion(%b, %i.2), kind=kCustom, calls=%rows", 64),
        ("%f = bf16[2,16]{1,0:T(8,128)(2,1)} fusion(%b, %i.2), kind=kCustom, calls=%rows", 128),
        ("%f = bf16[512,16]{1,0:T(8,128)(2,1)} fusion(%b, %i.2, %v), kind=kCustom, calls=%write", 64),
        ("%f = bf16[512,16]{1,0:T(8,128)(2,1)} copy(%b)", 2 * 16384),
        (
            "%f = (bf16[4,64]{1,0:T(8,128)(2,1)S(1)}, bf16[4,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)\n"
            "  %g = bf16[4,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%f)\n"
            "  %h = f32[4]{0:T(128)S(1)} reduce(%g), to_apply=%add",
            512,
        ),
        (
            "%f = ((bf16[4,64]{1,0:T(8,128)(2,1)}), bf16[1,64]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%w)",
            128,
        ),
    ],
)
def test_traffic_of_the_optimized_program(line, moved):
    found = read_program(HLO.replace("LINE", line))
    assert found["moved_bytes"] == moved + 64  # of the all-reduce, in a branch
    assert found["collectives"] == "1 all-reduce"


def test_kernels_and_loops_are_counted():
    call = '%k = f32[8]{0} custom-call(%pool), custom_call_target="tpu_custom_call"'
    loop = "%l = f32[8]{0} while(%o), condition=%ends, body=%none"
    found = read_program(HLO.replace("LINE", f"{call}\n  {loop}"))
    assert (found["kernels"], found["loops"], found["moved_bytes"]) == (1, 1, 64)


def test_an_overflow_of_memory_is_one_line():
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20G of 15G.\n\nTotal"
    said = gate.compile_error(RuntimeError(text))
    assert said.startswith("does not fit the TPU's memory: XLA:TPU compile permanent error. Ran out of memory")
    assert "\n" not in said
    assert gate.compile_error(ValueError("no such\nthing")) == "does not compile: ValueError: no such"


def test_every_step_and_kernel_is_compiled_for_every_chip_and_the_quick_gate_has_all_chips():
    items = gate.all_items(2)
    for case, _ in items:
        is_prompt = isinstance(case, TpuCase) and case.prefill_tokens
        assert len({chip for other, chip in items if other == case}) == (1 if is_prompt else len(CHIPS))
    assert {case.model for case, _ in items if isinstance(case, TpuCase)} == {
        "opt-125m",
        "opt-13b",
        "llama-3-8b",
        "llama-2-7b",
    }
    quick = gate.quick_items()
    assert {chip for _, chip in quick} == set(CHIPS)
    assert {case.num_devices for case, _ in quick if isinstance(case, TpuCase)} == {1, 4}


def test_whole_models_get_the_pool_that_fits_or_are_left_out():
    whole = TpuCase(model="opt-13b", num_layers=None)
    kept, left_out = gate.that_fit([(whole, "v5e"), (whole, "v5p"), (whole, "v6e")])
    assert [(case, chip) for case, chip in kept] == [
        (whole, "v5p"),
        (dataclasses.replace(whole, num_blocks=796), "v6e"),
    ]
    assert [(chip, why) for _, chip, why in left_out] == [("v5e", "25.7 GB of weights, 17.2 GB of memory each")]


def test_the_document_has_room_for_the_tables():
    for name in ("versions", "kernels", "steps"):
        assert replace_between(gate.DOCUMENT.read_text(), name, "new")


# ---- compiled for real


compiles = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make gate-tpu")


@pytest.fixture
def no_tpu(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))


@compiles
@pytest.mark.usefixtures("no_tpu")
def test_a_step_must_donate_its_pools():
    assert gate.check_step(KV, "v5e").failures == ()
    failures = gate.check_step(dataclasses.replace(KV, donate=False), "v5e").failures
    assert "2 copies of a layer's pool (must be 0)" in failures
    assert "only 0 of the pools' 301989888 bytes are updated in place" in failures


@compiles
@pytest.mark.usefixtures("no_tpu")
def test_a_pool_that_does_not_fit_is_refused():
    (failure,) = gate.check_step(dataclasses.replace(KV, num_blocks=1 << 19), "v5e").failures
    assert failure.startswith("does not fit the TPU's memory: ")


@compiles
@pytest.mark.usefixtures("no_tpu")
def test_a_kernel_over_another_layout_of_the_pool_fails():
    case = gate.TpuKernelCase(op="decode_kv", shape="opt-13b", dtype="bfloat16")
    assert gate.check_kernel(case, "v5e").failures == ()

    def of_two_axes(q, pool, *rest):
        # As if the pool came in tiles over blocks and elements.
        flat = pool.reshape(pool.shape[0], -1) * jnp.bfloat16(2)
        return gate.op_of(case, "v5e")(q, flat.reshape(pool.shape), *rest)

    (failure,) = gate.check_kernel(case, "v5e", of_two_axes).failures
    assert "bytes beside its result" in failure


@compiles
@pytest.mark.usefixtures("no_tpu")
def test_a_kernel_that_mosaic_refuses_fails_by_name():
    case = gate.TpuKernelCase(op="decode_kv", shape="opt-125m", dtype="float16")
    outcome = gate.check_kernel(case, "v6e")
    assert outcome.place == "decode_kv, opt-125m float16 on v6e"
    assert "does not support float16" in outcome.failures[0]
    assert jax.default_backend() == "cpu"
