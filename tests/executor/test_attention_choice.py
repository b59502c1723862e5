"""Choice of attention: XLA's ops in the layers that need them and nowhere else, and refusals of one line."""

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from apt_jax.backends import attention_ops
from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.executor import attention_choice
from apt_jax.executor.attention_choice import check_attention, chip_of, choose_attention, needed_extras
from apt_jax.executor.compiling.compiler_options import compiler_options
from apt_jax.frontend.builder import load_weights
from apt_jax.models import PRESETS, read_model_config
from apt_jax.models.config import ModelConfig
from apt_jax.ops.backend import ATTENTION_OPS, EXTRAS, RULES, KernelBackend
from apt_jax.ops.calls import DecodeCall, LogitModifiers, PrefillCall
from apt_jax.pallas.triton_common import launch
from apt_jax.pallas.triton_tiles import CHIPS, check_chip, chip_for
from tests.support.op_calls import decode_call, prefill_call


def model(name: str) -> ModelConfig:
    return read_model_config(PRESETS[name])[1]


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _decode(rules: LogitModifiers | None = None) -> DecodeCall:
    return decode_call(_floats(2, 16, 8), _ints(1, 2, 1), _ints(1), block_size=16, rules=rules)


def _prefill(rules: LogitModifiers | None = None, with_hidden: bool = False) -> PrefillCall:
    hidden, weights = jax.ShapeDtypeStruct((1,), jnp.bool_), (_floats(1, 8, 8), None, _floats(1, 8, 8), None)
    rows = (_ints(1), _ints(1), _ints(1), hidden, _ints())
    pool = _floats(2, 16, 8)
    return prefill_call(pool, _ints(1, 2, 1), *rows, *weights, block_size=16, with_hidden=with_hidden, rules=rules)


def named(name: str) -> dict[str, Callable[..., Any]]:
    """Ops that return the name of their implementation."""
    return dict.fromkeys(ATTENTION_OPS, lambda *_, **__: name)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> KernelBackend:
    """Kernels that know soft caps in decode over keys and values, and everything but adapters in prefill."""
    xla = attention_ops("cpu", "xla")
    ops = dataclasses.replace(
        xla, **named("kernel"), name="kernels", rows_per_tile=1, branches=False,
        extras={"decode_kv": frozenset({"softcap"}), "prefill": EXTRAS, "prefill_hidden": EXTRAS - {"adapters"}},
    )  # fmt: skip
    chosen = {None: ops, "kernels": ops, "xla": dataclasses.replace(xla, **named("xla"))}
    monkeypatch.setattr(attention_choice, "attention_ops", lambda _, name, __: chosen[name])
    return ops


def test_an_op_falls_back_in_the_layers_whose_rules_it_lacks(
    kernels: KernelBackend, caplog: pytest.LogCaptureFixture
) -> None:
    needed = {"decode_kv": frozenset({"softcap", "window"}), "prefill": frozenset({"softcap", "window"})}
    with caplog.at_level(logging.WARNING):
        ops = choose_attention("gpu", None, None, needed)
    assert ops.decode_kv(_decode(LogitModifiers(softcap=50.0))) == "kernel"
    assert ops.decode_kv(_decode(LogitModifiers(softcap=50.0, window=4096))) == "xla"
    assert ops.prefill(_prefill(LogitModifiers(window=4096))) == "kernel"
    assert not ops.branches
    (line,) = caplog.messages
    assert line == "attention: decode_kv of kernels does not support window; xla is used in the layers that need it"


def test_prefill_falls_back_where_there_are_layer_inputs_alone(kernels: KernelBackend) -> None:
    ops = choose_attention("gpu", None, None, {"prefill_hidden": frozenset({"adapters"})})
    assert ops.prefill(_prefill(with_hidden=True)) == "xla"
    assert ops.prefill(_prefill()) == "kernel"
    assert ops.decode_kv(_decode()) == "kernel"
    assert ops.rows_per_tile == 1


def test_what_is_no_rule_falls_back_in_all_layers(kernels: KernelBackend) -> None:
    ops = choose_attention("gpu", None, None, {"decode_absorbed": frozenset({"input width"})})
    assert (ops.decode_absorbed(_decode()), ops.decode_kv(_decode())) == ("xla", "kernel")


def test_a_backend_that_was_asked_for_must_do_all(kernels: KernelBackend) -> None:
    needed = {"decode_kv": frozenset({"window", "alibi"}), "prefill": frozenset({"window"})}
    with pytest.raises(ConfigError, match=r"'kernels' lacks features of this model: alibi, window; use xla"):
        choose_attention("gpu", "kernels", None, needed)


def test_what_models_need_of_each_op() -> None:
    plain = needed_extras(model("opt-13b"), "absorb", kv=True, hidden=True)
    assert plain == dict.fromkeys(("decode_kv", "prefill", "decode_absorbed", "prefill_hidden"), frozenset())
    windows = dataclasses.replace(model("llama-2-7b"), layer_windows=(4096,) * 32, qk_norm="head")
    needed = needed_extras(windows, "v-absorb", kv=False, hidden=True, adapted_keys=True)
    of_inputs = frozenset({"window", "key norm", "adapters"})
    assert needed == {"prefill": {"window"}, "decode_v_absorbed": of_inputs, "prefill_hidden": of_inputs}


def test_prefill_of_models_with_rules_is_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    rules = frozenset({"window", "softcap", "alibi", "sinks"})
    ops = choose_attention("gpu", None, "sm_80", {"prefill": rules, "prefill_hidden": rules | {"key norm"}})
    assert ops is attention_ops("gpu", None, "sm_80")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("capability", "chip"),
    [("8.0", "sm_80"), ("8.6", "sm_89"), ("8.9", "sm_89"), ("9.0", "sm_90"), ("10.0", "sm_90"), ("12.0", "sm_89"), ("13.0", "sm_89")],
)  # fmt: skip
def test_chips_are_told_by_their_shared_memory(capability: str, chip: str) -> None:
    assert chip_of(SimpleNamespace(compute_capability=capability)) == chip
    assert chip_of(SimpleNamespace()) is None
    assert chip_for(float(capability)) in CHIPS


def test_cards_and_heads_without_tiles_are_refused_in_one_line() -> None:
    def gpu(capability: str) -> Any:
        return SimpleNamespace(platform="gpu", device_kind="Tesla X", compute_capability=capability)

    wide = dataclasses.replace(model("opt-13b"), head_dim=512, num_heads=10, num_kv_heads=10)
    config = EngineConfig(model="opt-13b", load_format="dummy")
    check_attention(config, gpu("8.9"), lambda: model("opt-13b"))
    with pytest.raises(ConfigError, match=r"Tesla X: .* 7\.5 is too old .*--attention-backend xla"):
        check_attention(config, gpu("7.5"), lambda: model("opt-13b"))
    with pytest.raises(ConfigError, match=r"heads of 512 lanes .* 256, .* 99 KiB .*--attention-backend xla"):
        check_attention(config, gpu("8.9"), lambda: wide)
    by_xla = dataclasses.replace(config, attention_backend="xla")
    check_attention(by_xla, gpu("7.5"), lambda: wide)
    check_attention(config, SimpleNamespace(platform="cpu"), lambda: wide)
    with pytest.raises(ValueError, match="no tiles for chip='sm_70'"):
        check_chip("sm_70", 128)


def test_a_pool_of_bytes_that_offsets_do_not_reach_is_refused() -> None:
    def fetch(size: int) -> Any:
        pool = jax.ShapeDtypeStruct((size, 1 << 16), jnp.int8)
        options: dict[str, Any] = {"grid": (1,), "warps": 4, "stages": 1, "name": "read", "interpret": True}

        def kernel(pool_ref: Any, out_ref: Any) -> None:
            out_ref[0] = pool_ref[0, 0]

        return jax.eval_shape(
            lambda pool: launch(kernel, (pool,), jax.ShapeDtypeStruct((1,), jnp.int8), **options), pool
        )

    assert fetch((1 << 15) - 1).shape == (1,)
    with pytest.raises(ValueError, match=r"read: .* 2 GiB or more"):
        fetch(1 << 15)


@pytest.mark.parametrize(("kind", "chip"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v9", None)])
def test_a_tpu_generation_that_was_not_checked_gets_one_line(kind, chip, caplog):
    assert chip_of(SimpleNamespace(platform="tpu", device_kind=kind)) == chip
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (chip is None)
    if chip is None:
        assert lines[0].startswith("TPU v9: apt-jax is checked only for TPUs v5e, v5p, v6e;")
        assert "--attention-backend xla" in lines[0]


def test_tpus_have_kernels_by_default_and_keep_no_argument_in_vmem():
    assert attention_ops("tpu").name == "tpu"
    assert compiler_options("tpu", num_devices=1, num_hosts=1) == {"xla_max_cross_program_prefetches": 0}
    assert compiler_options("cpu", num_devices=1, num_hosts=1) == {}


def test_the_example_in_plain_triton_has_no_rules() -> None:
    example, kernels = (attention_ops("gpu", name, "sm_80") for name in ("jax-triton", "triton"))
    assert not example.extras_of("decode_absorbed") & (RULES | {"input width"})
    assert example.extras_of("decode_kv") == kernels.extras_of("decode_kv")


@pytest.mark.parametrize(
    ("name", "devices"), [("triton", "NVIDIA GPUs"), ("jax-triton", "NVIDIA GPUs"), ("tpu", "TPUs")]
)
def test_kernels_of_another_platform_are_refused_before_anything_is_loaded(name, devices, monkeypatch) -> None:
    monkeypatch.setattr("apt_jax.models.load_model", lambda *_: pytest.fail("loaded"))
    config = EngineConfig(model="tiny-opt", attention_backend=name)
    with pytest.raises(ConfigError, match=f"{name!r} runs on {devices}, not on platform 'cpu'; use one of cpu, .*xla"):
        load_weights(config)
    with pytest.raises(ConfigError, match=f"runs on {devices}"):
        choose_attention("cpu", name, None, {})
