"""Hugging Face's names for the tensors of a GGUF file."""

import dataclasses
import re
from collections.abc import Mapping

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_SANDWICH_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True)
class _Names:
    """Hugging Face's names for the tensors of one architecture, without ``.weight`` and ``.bias``."""

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"


_NAMES: dict[str, _Names] = {
    "llama": _Names(_LLAMA_TOP, _LLAMA_LAYER | _MIXTRAL),
    "qwen2": _Names(_LLAMA_TOP, _LLAMA_LAYER),
    "qwen2moe": _Names(_LLAMA_TOP, _LLAMA_LAYER | _EXPERTS),
    "qwen3": _Names(_LLAMA_TOP, _LLAMA_LAYER),
    "qwen3moe": _Names(_LLAMA_TOP, _LLAMA_LAYER | _EXPERTS),
    "olmoe": _Names(_LLAMA_TOP, _LLAMA_LAYER | _EXPERTS),
    "gemma": _Names(_LLAMA_TOP, _LLAMA_LAYER),
    "gemma2": _Names(_LLAMA_TOP, _SANDWICH_LAYER),
    "gemma3": _Names(_LLAMA_TOP, _SANDWICH_LAYER),
    "phi3": _Names(
        _LLAMA_TOP,
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt2": _Names(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        "transformer.h",
    ),
    "gptneox": _Names(
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        "gpt_neox.layers",
    ),
    "bloom": _Names(
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        "transformer.h",
    ),
    "mpt": _Names(
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        "transformer.blocks",
    ),
}  # fmt: skip

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of the tensors that describe rotary frequencies; they become fields of the configuration, not weights."""

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


def hf_name(arch: str, name: str) -> str | None:
    """Return Hugging Face's name for a tensor of a GGUF file; None: the tensor is not a weight or has no
    counterpart."""
    names = _NAMES[arch]
    base, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias") or name in ROPE_TENSORS:
        return None
    block = _BLOCK.fullmatch(base)
    if block is None:
        top = names.top.get(base)
        return None if top is None else f"{top}.{suffix}"
    inner = names.layer.get(block[2])
    return None if inner is None else f"{names.layers}.{int(block[1])}.{inner}.{suffix}"


__all__ = ["ROPE_TENSORS", "hf_name"]
