"""OPT (Zhang et al., 2022) as Hugging Face publishes it: configuration and tensor names.

Sizes from 125M to 66B share one layout: pre-norm, ReLU, learned positions whose table starts with two unused rows, the
output head tied to the token embeddings. OPT-350M differs: it has post-norm without a final norm, and token embeddings
of width 512, which two matrices without bias project to the model width and back.

Every leaf of `ModelParams` is one tensor of the checkpoint, reshaped: ``q_proj.weight`` (N*H, D) is `wq` (N, H, D), and
``out_proj.weight`` (D, N*H) is `wo` (D, N, H). Nothing is transposed or split.
"""

import re
from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ACTIVATIONS, ModelFamily, Source, whole
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import FamilyFields

_POSITION_OFFSET = 2

_TOP_LEVEL = {
    "embed": "embed_tokens.weight",
    "position": "embed_positions.weight",
    "project_in": "project_in.weight",
    "project_out": "project_out.weight",
    "final_norm.scale": "final_layer_norm.weight",
    "final_norm.bias": "final_layer_norm.bias",
    "head": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm.scale": "self_attn_layer_norm.weight",
    "attn_norm.bias": "self_attn_layer_norm.bias",
    "wq": "self_attn.q_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "wk": "self_attn.k_proj.weight",
    "bk": "self_attn.k_proj.bias",
    "wv": "self_attn.v_proj.weight",
    "bv": "self_attn.v_proj.bias",
    "wo": "self_attn.out_proj.weight",
    "bo": "self_attn.out_proj.bias",
    "ffn_norm.scale": "final_layer_norm.weight",
    "ffn_norm.bias": "final_layer_norm.bias",
    "w_up": "fc1.weight",
    "b_up": "fc1.bias",
    "w_down": "fc2.weight",
    "b_down": "fc2.bias",
}

_IGNORED_TENSORS = re.compile(r"^version$")
"""Pattern for the name of a tensor that is left over from the format that OPT was converted from."""


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """Return the model shape that a ``config.json`` describes; absent optional fields take Hugging Face's defaults.

    Args:
        max_len: has no effect, because the position table has a fixed length.

    Raises:
        ModelLoadError: a field is missing, out of range, or asks for something that is not implemented.
    """
    del max_len
    get = ConfigFields(fields)
    hidden_size, num_heads, head_dim = get.attention_sizes("hidden_size", "num_attention_heads")
    bias = get.flag("enable_bias", True)
    get.flag("layer_norm_elementwise_affine", True)  # read by `constant_leaf`
    embedding_size = get.positive("word_embed_proj_dim", hidden_size)
    norm_before = get.flag("do_layer_norm_before", True)
    vocab_size = get.positive("vocab_size")
    return ModelConfig(
        family="opt",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=get.positive("ffn_dim"),
        max_position=get.positive("max_position_embeddings"),
        embedding_size=None if embedding_size == hidden_size else embedding_size,
        activation=get.choice("activation_function", "relu", ACTIVATIONS),
        norm_placement="pre" if norm_before else "post",
        final_norm=norm_before and not get.flag("_remove_final_layer_norm", False),
        norm_eps=1e-5,
        position="learned",
        position_offset=_POSITION_OFFSET,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        tie_embeddings=get.flag("tie_word_embeddings", True),
        **get.special_ids(vocab_size, 2, 2, 1),
    )


def constant_leaf(leaf: str, fields: Mapping[str, Any]) -> float | None:
    """Return the value of a leaf that the checkpoint does not store: norms without weights scale by one and add zero.
    None: the leaf is stored."""
    if ConfigFields(fields).flag("layer_norm_elementwise_affine", True):
        return None
    if leaf.endswith("norm.scale"):
        return 1.0
    return 0.0 if leaf.endswith("norm.bias") else None


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`, e.g. ``layers.3.fc1.weight`` for ``layers.3.w_up``."""
    del config
    return whole(leaf, shape, _TOP_LEVEL, _IN_LAYER, "layers.{}.")


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``model.`` and ``decoder.``, prefixes that only some transformers classes save."""
    return name.removeprefix("model.").removeprefix("decoder.")


def _preset(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "ffn_dim": 4 * hidden_size,
        "max_position_embeddings": 2048,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "opt-125m": _preset(12, 768, 12),
    "opt-350m": _preset(24, 1024, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "opt-1.3b": _preset(24, 2048, 32),
    "opt-2.7b": _preset(32, 2560, 32),
    "opt-6.7b": _preset(32, 4096, 32),
    "opt-13b": _preset(40, 5120, 40),
    "opt-30b": _preset(48, 7168, 56),
    "opt-66b": _preset(64, 9216, 72),
}
"""The published sizes, as the fields of their ``config.json`` (Zhang et al., 2022, Table 1)."""

_FIELDS = FamilyFields(
    read=frozenset({
        "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "max_position_embeddings", "word_embed_proj_dim",
        "do_layer_norm_before", "_remove_final_layer_norm", "activation_function", "enable_bias",
        "layer_norm_elementwise_affine",
    }),
)  # fmt: skip

FAMILY = ModelFamily(
    name="opt",
    presets=PRESETS,
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
    ignored_tensors=_IGNORED_TENSORS,
    constant_leaf=constant_leaf,
)
