"""Tiny GGUF files as llama.cpp's converter would write them from a Hugging Face model, for tests."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.grouped import quantized

V, D, F, L, N, K, H, CONTEXT, THETA = 40, 16, 32, 2, 4, 2, 4, 64, 10000.0


def _llama_shapes(*, bias: bool = False, norms: bool = False, gemma2: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
    }
    for i in range(L):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (D,),
            p + "post_attention_layernorm.weight": (D,),
            p + "self_attn.q_proj.weight": (N * H, D),
            p + "self_attn.k_proj.weight": (K * H, D),
            p + "self_attn.v_proj.weight": (K * H, D),
            p + "self_attn.o_proj.weight": (D, N * H),
            p + "mlp.gate_proj.weight": (F, D),
            p + "mlp.up_proj.weight": (F, D),
            p + "mlp.down_proj.weight": (D, F),
        }
        if bias:
            shapes |= {p + f"self_attn.{n}_proj.bias": (m * H,) for n, m in (("q", N), ("k", K), ("v", K))}
        if norms:
            shapes |= {p + f"self_attn.{n}_norm.weight": (H,) for n in "qk"}
        if gemma2:
            shapes |= {p + f"{n}_feedforward_layernorm.weight": (D,) for n in ("pre", "post")}
    return shapes


X = 3


def moe_shapes(*, shared: bool = False, mixtral: bool = False, **more: bool) -> dict[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in _llama_shapes(**more).items() if ".mlp." not in name}
    for i in range(L):
        p = f"model.layers.{i}." + ("block_sparse_moe." if mixtral else "mlp.")
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        shapes |= {
            p + "gate.weight": (X, D),
            p + f"experts.{gate}.weight": (X, F, D),
            p + f"experts.{up}.weight": (X, F, D),
            p + f"experts.{down}.weight": (X, D, F),
        }
        if shared:
            shapes |= {
                p + "shared_expert_gate.weight": (1, D),
                p + "shared_expert.gate_proj.weight": (2 * F, D),
                p + "shared_expert.up_proj.weight": (2 * F, D),
                p + "shared_expert.down_proj.weight": (D, 2 * F),
            }
    return shapes


def _fused_shapes(
    top: Mapping[str, tuple[int, ...]], layer: str, inner: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {**top, **{f"{layer}.{i}.{n}": s for i in range(L) for n, s in inner.items()}}


def _phi3_shapes() -> dict[str, tuple[int, ...]]:
    return _fused_shapes(
        {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)},
        "model.layers",
        {
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.qkv_proj.weight": ((N + 2 * K) * H, D), "self_attn.o_proj.weight": (D, N * H),
            "mlp.gate_up_proj.weight": (2 * F, D), "mlp.down_proj.weight": (D, F),
        },
    )  # fmt: skip


def _with_bias(names: Mapping[str, tuple[int, ...]], out: int = 0) -> dict[str, tuple[int, ...]]:
    return {k: v for n, s in names.items() for k, v in ((n + ".weight", s), (n + ".bias", (s[out],)))}


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
    top = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (CONTEXT, D)}
    return _fused_shapes(
        top | _with_bias({"transformer.ln_f": (D,)}),
        "transformer.h",
        _with_bias({"ln_1": (D,), "ln_2": (D,)})
        | _with_bias(
            {
                "attn.c_attn": (D, 3 * D),
                "attn.c_proj": (D, D),
                "mlp.c_fc": (D, F),
                "mlp.c_proj": (F, D),
            },
            1,
        ),
    )


def _gptneox_shapes() -> dict[str, tuple[int, ...]]:
    return _fused_shapes(
        {"gpt_neox.embed_in.weight": (V, D), "embed_out.weight": (V, D)} | _with_bias({"gpt_neox.final_layer_norm": (D,)}),
        "gpt_neox.layers",
        _with_bias(
            {
                "input_layernorm": (D,), "post_attention_layernorm": (D,),
                "attention.query_key_value": (3 * D, D), "attention.dense": (D, D),
                "mlp.dense_h_to_4h": (F, D), "mlp.dense_4h_to_h": (D, F),
            }
        ),
    )  # fmt: skip


def _bloom_shapes() -> dict[str, tuple[int, ...]]:
    return _fused_shapes(
        {"transformer.word_embeddings.weight": (V, D)}
        | _with_bias({"transformer.word_embeddings_layernorm": (D,), "transformer.ln_f": (D,)}),
        "transformer.h",
        _with_bias(
            {
                "input_layernorm": (D,), "post_attention_layernorm": (D,),
                "self_attention.query_key_value": (3 * D, D), "self_attention.dense": (D, D),
                "mlp.dense_h_to_4h": (4 * D, D), "mlp.dense_4h_to_h": (D, 4 * D),
            }
        ),
    )  # fmt: skip


def _mpt_shapes() -> dict[str, tuple[int, ...]]:
    return _fused_shapes(
        {"transformer.wte.weight": (V, D), "transformer.norm_f.weight": (D,)},
        "transformer.blocks",
        {
            "norm_1.weight": (D,), "norm_2.weight": (D,), "attn.Wqkv.weight": (3 * D, D), "attn.out_proj.weight": (D, D),
            "ffn.up_proj.weight": (4 * D, D), "ffn.down_proj.weight": (D, 4 * D),
        },
    )  # fmt: skip


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": _llama_shapes() | {"lm_head.weight": (V, D)},
    "qwen2": _llama_shapes(bias=True),
    "qwen2moe": moe_shapes(bias=True, shared=True),
    "qwen3": _llama_shapes(norms=True),
    "qwen3moe": moe_shapes(norms=True),
    "olmoe": moe_shapes(norms=True)
    | {
        f"model.layers.{i}.self_attn.{n}_norm.weight": (heads * H,)
        for i in range(L)
        for n, heads in (("q", N), ("k", K))
    },
    "gemma": _llama_shapes(),
    "gemma2": _llama_shapes(gemma2=True),
    "gemma3": _llama_shapes(norms=True, gemma2=True),
    "phi3": _phi3_shapes(),
    "gpt2": _gpt2_shapes(),
    "gptneox": _gptneox_shapes(),
    "bloom": _bloom_shapes(),
    "mpt": _mpt_shapes(),
}
"""Hugging Face's tensors by llama.cpp's name of the architecture."""


def hf_tensors(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for all of them."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES[arch].items()}


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _by_kind(values: np.ndarray) -> np.ndarray:
    """llama.cpp, convert_hf_to_gguf.py, GPTNeoXModel and BloomModel: q of all heads, then k, then v."""
    heads = values.reshape(N, 3, D // N, *values.shape[1:])
    return np.concatenate([heads[:, i].reshape(D, *values.shape[1:]) for i in range(3)])


def as_converted(arch: str, name: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor as the converter writes it."""
    if arch == "llama" and "q_proj" in name:
        return _permute(values, N)
    if arch == "llama" and "k_proj" in name:
        return _permute(values, K)
    if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    if arch == "gpt2" and values.ndim == 2 and (".c_" in name):
        return values.T
    if arch in ("gptneox", "bloom") and "query_key_value" in name:
        return _by_kind(values)
    return values


def gguf_name(arch: str, name: str) -> str:
    """By the `gguf` library's own table."""
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    if arch == "bloom":  # published without the prefix
        name = name.removeprefix("transformer.")
    found = gguf.get_tensor_name_map(number, L).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def add_metadata(writer: gguf.GGUFWriter, arch: str) -> None:
    writer.add_vocab_size(V)
    writer.add_block_count(L)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(4 * D if arch in ("bloom", "mpt") else F)
    writer.add_head_count(N)
    if arch in ("gpt2", "gptneox", "bloom", "mpt"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(K)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(THETA)
        writer.add_rope_dimension_count(H)
        writer.add_key_length(H)
        writer.add_value_length(H)
    if arch in ("qwen2moe", "qwen3moe", "olmoe"):
        writer.add_expert_count(X)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(F)
        writer.add_expert_shared_feed_forward_length(2 * F)
    if arch == "gptneox":
        writer.add_rope_dimension_count(H // 2)
        writer.add_parallel_residual(True)
    if arch == "mpt":
        writer.add_max_alibi_bias(8.0)


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    *,
    quant: Callable[[str, np.ndarray], gguf.GGMLQuantizationType | None] = lambda _n, _v: None,
    extra: Callable[[gguf.GGUFWriter], Any] = lambda _writer: None,
) -> None:
    """Write Hugging Face's tensors as a GGUF file.

    Args:
        quant: a quantisation type for a tensor, or None for float32.
        extra: adds more metadata or tensors.
    """
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, arch)
    extra(writer)
    for name, values in tensors.items():
        converted = np.ascontiguousarray(as_converted(arch, name, values))
        kind = quant(name, converted)
        if kind is None:
            writer.add_tensor(gguf_name(arch, name), converted)
        else:
            writer.add_tensor(gguf_name(arch, name), quantized(converted, kind.name), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- files by hand, so that tests can break any part -----------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(8, "little") + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + kind.to_bytes(4, "little") + value


def tensor(name: str | bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = b"".join(size.to_bytes(8, "little") for size in sizes)
    return (
        text(name) + len(sizes).to_bytes(4, "little") + dims + kind.to_bytes(4, "little") + offset.to_bytes(8, "little")
    )


def assemble(
    entries: list[bytes] = (),  # type: ignore[assignment]
    tensors: list[bytes] = (),  # type: ignore[assignment]
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    pad: bool = True,
) -> bytes:
    """A GGUF file from its parts, with any of its numbers replaced."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = magic + version.to_bytes(4, "little") + b"".join(n.to_bytes(8, "little") for n in counts)
    head += b"".join(entries) + b"".join(tensors)
    return head + (b"\0" * (-len(head) % 32) if pad else b"") + data
