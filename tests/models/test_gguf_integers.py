"""`--quantization gguf`: the integers of a file are kept, in every place that uses them."""

import dataclasses
import functools
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import CacheConfig, CacheMode, EngineConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.errors import ModelLoadError
from apt_jax.executor.calibrate import step_time_s, synthetic_batch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab import reference_model
from apt_jax.models import load_model
from apt_jax.models.decoder import logits
from apt_jax.models.quantize import widen_keys
from apt_jax.models.weight_layout import fuse_products
from apt_jax.ops.weights import GroupedMatrix, JoinedMatrix
from benchmarks.engine.perplexity import hidden_states
from tests.support import gguf_models
from tests.support.gguf_models import hf_tensors, write_gguf
from tests.support.grouped import K_KINDS, SMALL_KINDS

Q = gguf.GGMLQuantizationType
KINDS = (*SMALL_KINDS, *K_KINDS)


def _sizes(monkeypatch: pytest.MonkeyPatch, key_heads: int = 2, *, width: int = 64) -> None:
    """Sizes whose matrices are of whole blocks."""
    ffn = 96 if width == 64 else 2 * width
    for name, value in {"V": 80, "D": width, "F": ffn, "N": 4, "K": key_heads, "H": width // 4}.items():
        monkeypatch.setattr(gguf_models, name, value)
    monkeypatch.setitem(gguf_models.SHAPES, "llama", gguf_models._llama_shapes() | {"lm_head.weight": (80, width)})
    monkeypatch.setitem(gguf_models.SHAPES, "qwen2", gguf_models._llama_shapes(bias=True))
    monkeypatch.setitem(gguf_models.SHAPES, "phi3", gguf_models._phi3_shapes())
    monkeypatch.setitem(gguf_models.SHAPES, "gpt2", gguf_models._gpt2_shapes())


def _width(*kinds: str | None) -> int:
    return 256 if set(kinds) & set(K_KINDS) else 64


def _write(path: Path, arch: str, kind: str, other: str | None = None) -> str:
    """A file whose matrices are of a kind, those of v of another one."""

    def quant(name: str, values: np.ndarray) -> Q | None:
        if values.ndim != 2 or "wpe" in name:
            return None
        return Q[other] if other is not None and "v_proj" in name else Q[kind]

    tensors = {n: v / gguf_models.D**0.5 if v.ndim == 2 else 1 + v / 8 for n, v in hf_tensors(arch).items()}
    write_gguf(path / "m.gguf", arch, tensors, quant=quant)
    return str(path / "m.gguf")


def _widened(params, like):
    """Parameters in the places and shapes of `like`, with what the integers stand for."""
    is_grouped = functools.partial(lambda leaf: isinstance(leaf, GroupedMatrix))
    return jax.tree.map(
        lambda w, p: w.dequantized(p.dtype).reshape(p.shape) if isinstance(w, GroupedMatrix) else w,
        params, like, is_leaf=is_grouped,
    )  # fmt: skip


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "gpt2"])
def test_the_integers_stand_for_the_weights_that_are_loaded_else(tmp_path, monkeypatch, arch, kind) -> None:
    _sizes(monkeypatch, width=_width(kind))
    model = _write(tmp_path, arch, kind)
    plain = load_model(EngineConfig(model=model)).params
    kept = load_model(EngineConfig(model=model, quantization="gguf")).params
    for mine, theirs in zip(jax.tree.leaves(_widened(kept, plain)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    layer = kept.layers[0]
    assert isinstance(kept.embed, GroupedMatrix)
    if arch == "gpt2":  # its matrices lie the other way in the file
        assert not isinstance(layer.w_up, GroupedMatrix)
    else:
        assert all(isinstance(w, GroupedMatrix) for w in (layer.wq, layer.wk, layer.wv, layer.wo, layer.w_down))
        assert layer.wk.shape == plain.layers[0].wk.shape
    assert kept.dtype == plain.dtype


def test_fused_products_are_joined_in_parts_of_a_kind(tmp_path, monkeypatch) -> None:
    _sizes(monkeypatch)
    params = load_model(EngineConfig(model=_write(tmp_path, "llama", "Q4_1"), quantization="gguf")).params
    layer, fused = params.layers[0], fuse_products(params, keep=False).layers[0]
    assert fused.wq is None
    rows = [w.dequantized(jnp.float32) for w in (layer.wq, layer.wk, layer.wv)]
    np.testing.assert_array_equal(fused.wqkv.dequantized(jnp.float32), jnp.concatenate(rows))
    assert fused.w_gate_up.shape == (192, 64)
    mixed = load_model(EngineConfig(model=_write(tmp_path, "llama", "Q4_0", "Q8_0"), quantization="gguf")).params
    apart = fuse_products(mixed, keep=False).layers[0]
    assert isinstance(apart.wqkv, JoinedMatrix)
    assert [(part.kind, part.shape) for part in apart.wqkv.parts] == [("Q4_0", (96, 64)), ("Q8_0", (32, 64))]
    layer = mixed.layers[0]
    for part, matrices in zip(apart.wqkv.parts, [(layer.wq, layer.wk), (layer.wv,)], strict=True):
        rows = jnp.concatenate([w.dequantized(jnp.float32) for w in matrices])
        np.testing.assert_array_equal(part.dequantized(jnp.float32), rows)
    assert apart.w_gate_up is not None


def test_keys_that_hidden_rows_need_are_widened(tmp_path, monkeypatch) -> None:
    _sizes(monkeypatch)
    params = load_model(EngineConfig(model=_write(tmp_path, "llama", "Q8_0"), quantization="gguf")).params
    kept = widen_keys(fuse_products(params, keep=True), jnp.dtype("float32")).layers[0]
    assert isinstance(kept.wq, GroupedMatrix)
    assert kept.wk.shape == params.layers[0].wk.shape
    np.testing.assert_array_equal(np.asarray(kept.wk).reshape(32, 64), kept.wqkv.dequantized(jnp.float32)[64:96])


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("backend", ["xla", None])
@pytest.mark.parametrize(
    ("cache", "kind", "other"),
    [
        ("kv", "Q4_1", None), ("hidden", "Q4_1", None), ("kv", "Q4_1", "Q8_0"), ("kv", "Q4_1", "F16"), ("kv", "Q5_0", "Q8_0"),
        ("kv", "Q5_1", "Q5_0"), ("kv", "Q4_K", "Q6_K"), ("kv", "Q5_K", "Q6_K"), ("kv", "Q6_K", "Q4_K"), ("hidden", "Q4_K", "Q6_K"),
    ],
)  # fmt: skip
def test_a_step_is_near_a_plain_pass_over_the_same_weights(
    tmp_path, monkeypatch, cache: CacheMode, kind: str, other: str | None, backend: str | None
) -> None:
    key_heads = 2 if cache == "kv" else 4  # layer inputs are less than keys and values
    _sizes(monkeypatch, key_heads, width=_width(kind, other))
    model = _write(tmp_path, "llama", kind, other)
    plain = load_model(EngineConfig(model=model))
    kept = load_model(EngineConfig(model=model, quantization="gguf"))
    executor = JaxExecutor(
        kept.params, kept.config, cache=CacheConfig(mode=cache, num_blocks_override=16), max_num_seqs=32,
        max_num_batched_tokens=32, max_model_len=32, attention=backend, quantization="gguf",
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(5, 80, 32)
    states = hidden_states(executor, ids, KV if cache == "kv" else HIDDEN)
    scores = np.asarray(logits(executor.params, states, executor.config, executor.programs.ops.dense))
    expected = np.asarray(reference_model.forward(plain.params, jnp.asarray(ids), plain.config))
    tolerance = 1e-4 if backend == "xla" else 0.05  # rows are rounded to 8 bits
    np.testing.assert_allclose(scores, expected, atol=tolerance * np.abs(expected).max())
    step_time_s(executor, synthetic_batch(executor, [KV if cache == "kv" else HIDDEN], [20], [1]))


def test_models_without_integers_are_refused_in_one_line(tmp_path, monkeypatch) -> None:
    with pytest.raises(ModelLoadError, match="tiny-opt: is not a GGUF file"):
        load_model(EngineConfig(model="tiny-opt", quantization="gguf"))
    with pytest.raises(ModelLoadError, match=r"is not a GGUF file.*use int8, or leave it out \(--quantization\)"):
        load_model(EngineConfig(model="opt-125m", load_format="dummy", quantization="gguf"))


def test_a_file_without_groups_is_widened_with_a_warning(tmp_path, monkeypatch, caplog) -> None:
    _sizes(monkeypatch)
    params = load_model(EngineConfig(model=_write(tmp_path, "llama", "F16"), quantization="gguf")).params
    assert "has no matrix in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K; all weights" in caplog.text
    assert not any(isinstance(w, GroupedMatrix) for w in dataclasses.astuple(params.layers[0]))


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q5_1", 2), ("Q4_K", 0), ("Q5_K", 2), ("Q6_K", 208)])
def test_scales_that_are_not_finite_are_refused(tmp_path, monkeypatch, kind: str, at: int) -> None:
    _sizes(monkeypatch, width=_width(kind))
    path = Path(_write(tmp_path, "llama", kind))
    reader = gguf.GGUFReader(path)
    (start,) = (int(t.data_offset) for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[start + at : start + at + 2] = b"\x00\x7c"
    path.write_bytes(bytes(data))
    with pytest.raises(ModelLoadError, match=r"up_proj.weight' holds NaN or infinite values; the file is damaged"):
        load_model(EngineConfig(model=str(path), quantization="gguf"))
