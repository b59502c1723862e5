"""MPT (MosaicML, 2023): ALiBi, no biases, and q, k and v one after another in one tensor."""

import math
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, Source, flat_shape, rows, split_leaf, whole
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.known_fields import FamilyFields

_TOP_LEVEL = {
    "embed": "wte.weight",
    "final_norm.scale": "norm_f.weight",
    "head": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm.scale": "norm_1.weight",
    "wo": "attn.out_proj.weight",
    "ffn_norm.scale": "norm_2.weight",
    "w_up": "ffn.up_proj.weight",
    "w_down": "ffn.down_proj.weight",
}


def slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """Return MPT's slopes: 2^(-bias_max i / n), where n is the number of heads rounded up to a power of two; if there
    are fewer heads than n, the slopes with even i come first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    all_of_them = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    if power != num_heads:
        all_of_them = all_of_them[1::2] + all_of_them[::2]
    return tuple(all_of_them[:num_heads])


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `bloom.model_config`."""
    get = ConfigFields(fields)
    hidden_size, num_heads, head_dim = get.attention_sizes(
        get.named("d_model", "hidden_size"), get.named("n_heads", "num_attention_heads"), 2048, 16
    )
    found = fields.get("attn_config")
    if found is not None and not isinstance(found, Mapping):
        raise ModelLoadError(f"config.json: attn_config={shown(found, 60)} must be an object")
    attention = ConfigFields(found or {}, "config.json: attn_config.")
    if attention.positive("kv_n_heads", num_heads) != num_heads:
        raise ModelLoadError("config.json: attn_config.kv_n_heads is not supported; only as many as query heads")
    bias_max = attention.number("alibi_bias_max", 8.0, at_least=0.0)
    if bias_max > 1000:
        raise ModelLoadError(f"config.json: attn_config.alibi_bias_max={bias_max:g} must lie in [0, 1000]")
    vocab_size, trained = get.positive("vocab_size", 50368), get.positive("max_seq_len", 2048)
    return ModelConfig(
        family="mpt",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive(get.named("n_layers", "num_hidden_layers"), 24),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=4 * hidden_size,
        max_position=max(trained, max_len or trained),
        activation="gelu",
        norm_bias=False,
        norm_eps=get.number("layer_norm_epsilon", 1e-5, at_least=0.0),
        position="alibi",
        alibi_slopes=slopes(num_heads, bias_max),
        attention_scale=attention.optional_number("softmax_scale"),
        clip_qkv=attention.optional_number("clip_qkv"),
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        tie_embeddings=get.flag("tie_word_embeddings", True),
        **get.special_ids(vocab_size, None, None, None),
    )


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    field, index = split_leaf(leaf)
    if field in ("wq", "wk", "wv"):
        d = config.hidden_size
        start = d * "qkv".index(field[1])
        return rows(f"blocks.{index}.attn.Wqkv.weight", flat_shape(field, shape), start, 3 * d)
    return whole(leaf, shape, _TOP_LEVEL, _IN_LAYER, "blocks.{}.")


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``transformer.``, a prefix that only some transformers classes save."""
    return name.removeprefix("transformer.")


PRESETS: dict[str, dict[str, Any]] = {
    "mpt-7b": {
        "architectures": ["MptForCausalLM"],
        "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432,
    },
    "mpt-30b": {
        "architectures": ["MptForCausalLM"],
        "d_model": 7168, "n_heads": 64, "n_layers": 48, "max_seq_len": 8192, "vocab_size": 50432,
    },
}  # fmt: skip

_FIELDS = FamilyFields(
    read=frozenset({
        "d_model", "hidden_size", "n_heads", "num_attention_heads", "n_layers", "num_hidden_layers", "max_seq_len",
        "layer_norm_epsilon",
    }),
    off={
        "expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (), "norm_type": ("layernorm", "low_precision_layernorm"),
    },
    ignored=frozenset({"learned_pos_emb"}),
    nested={
        "attn_config": FamilyFields(
            read=frozenset({"alibi_bias_max", "softmax_scale", "clip_qkv", "kv_n_heads"}),
            off={
                "attn_type": ("multihead_attention",), "alibi": (True,), "prefix_lm": (False,), "qk_ln": (False,), "qk_gn": (False,),
                "rope": (False,), "sliding_window_size": (-1,),
            },
            ignored=frozenset({"attn_impl", "attn_uses_sequence_id"}),
        ),
        "ffn_config": FamilyFields(read=frozenset(), off={"ffn_type": ("mptmlp",)}, ignored=frozenset({"fc_type"})),
    },
)  # fmt: skip

FAMILY = ModelFamily(
    name="mpt",
    presets=PRESETS,
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)
