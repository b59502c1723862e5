"""DeepSeek-V2 and V3 (2024) and GLM-4.7-Flash: latent attention and mixtures of experts. MiniCPM3 shares the attention.

Checkpoints store a head's lanes without rotation first, and rotate neighbouring lanes (2 i, 2 i + 1) as a pair. Here the
rotated lanes come first, and lanes i and i + R / 2 are a pair: queries and keys are permuted alike when they are loaded,
so scores stay the same.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, Source, split_leaf, whole
from apt_jax.models.config import ExpertsConfig, LatentConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.families.llama import IN_LAYER, TOP_LEVEL, base_config, preset, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS
from apt_jax.models.rope import latent_score_factor, read_rope

_IN_LAYER = IN_LAYER | {
    "latent.norm.scale": "self_attn.kv_a_layernorm.weight",
    "latent.w_query": "self_attn.q_a_proj.weight",
    "latent.query_norm.scale": "self_attn.q_a_layernorm.weight",
    "experts.router_bias": "mlp.gate.e_score_correction_bias",
}
_SHARED = {
    "w_gate": "mlp.shared_experts.gate_proj.weight",
    "w_up": "mlp.shared_experts.up_proj.weight",
    "w_down": "mlp.shared_experts.down_proj.weight",
}


def latent_config(
    fields: Mapping[str, Any],
    family: str,
    max_len: int | None,
    *,
    query_rank: int = 1536,
    value_dim: int | None = 128,
    **more: Any,
) -> ModelConfig:
    """Return the `ModelConfig` of a model with latent attention.

    Args:
        query_rank, value_dim: defaults of the widths of a query's latent and of a head's values (None: hidden_size /
            heads).
        more: arguments of `llama.base_config`.

    Raises:
        ModelLoadError: see `llama.model_config`; or heads of keys that differ in number from heads of queries.
    """
    get = ConfigFields(fields)
    nope, rotary = get.positive("qk_nope_head_dim"), get.positive("qk_rope_head_dim")
    value_dim = get.optional_positive("v_head_dim") or value_dim
    if value_dim is None:
        _, _, value_dim = get.attention_sizes("hidden_size", "num_attention_heads")
    heads = get.positive("num_attention_heads")
    if get.positive("num_key_value_heads", heads) != heads:
        raise ModelLoadError(
            f"config.json: num_key_value_heads={shown(fields['num_key_value_heads'], 40)} must be num_attention_heads={heads}: all heads "
            "of latent attention have keys of their own"
        )
    if value_dim > nope + rotary:
        raise ModelLoadError(
            f"config.json: v_head_dim={value_dim} is not supported above qk_nope_head_dim + qk_rope_head_dim={nope + rotary}"
        )
    rope, longest = read_rope(fields, rotary, max_len=max_len)
    plain = {**fields, "head_dim": nope + rotary, "rope_scaling": None, "rope_parameters": None}
    factor = latent_score_factor(fields)
    rank = get.optional_positive("q_lora_rank") if "q_lora_rank" in fields else query_rank
    values: dict[str, Any] = dict(
        rope=rope,
        max_position=longest,
        attention_scale=None if factor == 1.0 else (nope + rotary) ** -0.5 * factor,
        latent=LatentConfig(rank=get.positive("kv_lora_rank"), value_dim=value_dim, query_rank=rank),
    )
    return base_config(plain, family, max_len, **(values | more))


def _experts(fields: Mapping[str, Any], num_shared: int, **given: Any) -> ExpertsConfig:
    """Return the mixture that a ``config.json`` describes. `given` are fields of `ExpertsConfig`, or defaults of fields
    that the configuration may leave out, as `num_shared`."""
    get = ConfigFields(fields)
    size = get.positive("moe_intermediate_size", given["size"])
    shared = get.positive("n_shared_experts", num_shared)
    read: dict[str, Any] = dict(
        num_experts=get.positive(
            get.named("n_routed_experts", "num_experts", "num_local_experts"), given["num_experts"]
        ),
        per_token=get.positive("num_experts_per_tok", given["per_token"])
        if "per_token" in given
        else get.positive("num_experts_per_tok"),
        size=size,
        factor=get.number("routed_scaling_factor", given.get("factor", 1.0)),
        shared_size=shared * size,
        shared_gate=False,
    )
    return ExpertsConfig(**(given | read))


def _first_dense(fields: Mapping[str, Any], default: int) -> tuple[int, ...]:
    """Return the indices of the first layers, which have no experts."""
    count = fields.get("first_k_dense_replace", default)
    if type(count) is not int or count < 0:
        raise ModelLoadError(f"config.json: first_k_dense_replace={shown(count, 60)} must be a number of layers")
    return tuple(range(min(count, ConfigFields(fields).positive("num_hidden_layers"))))


def v2_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    method = get.choice("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True})
    groups = (
        {} if not method else {"num_groups": get.positive("n_group"), "groups_per_token": get.positive("topk_group")}
    )
    experts = _experts(
        fields, num_experts=64, size=1407, num_shared=2, normalize=False, dense_layers=_first_dense(fields, 0), **groups
    )
    return latent_config(fields, "deepseek_v2", max_len, experts=experts)


def _sigmoid_groups(fields: Mapping[str, Any], groups: int, per_token: int) -> dict[str, Any]:
    get = ConfigFields(fields)
    return {
        "scoring": "sigmoid",
        "normalize": get.flag("norm_topk_prob", True),
        "num_groups": get.positive("n_group", groups),
        "groups_per_token": get.positive("topk_group", per_token),
    }


def v3_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    experts = _experts(
        fields, num_experts=256, per_token=8, size=2048, factor=2.5, num_shared=1, dense_layers=_first_dense(fields, 3),
        **_sigmoid_groups(fields, 8, 4),
    )  # fmt: skip
    return latent_config(fields, "deepseek_v3", max_len, experts=experts, tokens=(0, 1, None))


def glm_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    types, num_layers = fields.get("mlp_layer_types"), ConfigFields(fields).positive("num_hidden_layers")
    dense = _first_dense(fields, 1)
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise ModelLoadError(
                f"config.json: mlp_layer_types={shown(types)} must name dense or sparse for each of {num_layers} layers"
            )
        dense = tuple(i for i, kind in enumerate(types) if kind == "dense")
    experts = _experts(
        fields, num_experts=64, per_token=4, size=1536, factor=1.8, num_shared=1, dense_layers=dense,
        **_sigmoid_groups(fields, 1, 1),
    )  # fmt: skip
    return latent_config(
        fields, "glm4_moe_lite", max_len, query_rank=768, value_dim=256, eps=1e-5, experts=experts,
        tokens=(0, 1, None),
    )  # fmt: skip


def _rotary(lanes: np.ndarray, axis: int, interleaved: bool) -> np.ndarray:
    """Return rotary lanes in the order of the decoder: of a checkpoint with interleaved pairs (x0, x2, ..., x1, x3, ...)."""
    size = lanes.shape[axis]
    return np.take(lanes, [*range(0, size, 2), *range(1, size, 2)], axis) if interleaved else lanes


def _queries(interleaved: bool, config: ModelConfig, nope: int, tensor: np.ndarray) -> np.ndarray:
    by_head = tensor.reshape(config.num_heads, config.head_dim, -1)
    return np.concatenate([_rotary(by_head[:, nope:], 1, interleaved), by_head[:, :nope]], axis=1)


def _inputs(interleaved: bool, rank: int, tensor: np.ndarray) -> np.ndarray:
    return np.concatenate([tensor[:rank], _rotary(tensor[rank:], 0, interleaved)])


def _keys_or_values(which: str, heads: int, nope: int, turned: int, tensor: np.ndarray) -> np.ndarray:
    """Return W_k or W_v: projections from latents [c; k_r], of which a checkpoint stores those from c."""
    rank = tensor.shape[1]
    by_head = tensor.reshape(heads, -1, rank)
    if which == "wv":
        return np.pad(by_head[:, nope:], ((0, 0), (0, 0), (0, turned)))
    out = np.zeros((heads, turned + nope, rank + turned), tensor.dtype)
    out[:, :turned, rank:] = np.eye(turned, dtype=tensor.dtype)
    out[:, turned:, :rank] = by_head[:, :nope]
    return out


def latent_source(leaf: str, shape: tuple[int, ...], config: ModelConfig, *, interleaved: bool = True) -> Source:
    """Return the source tensor of a leaf of `param_names`.

    Args:
        interleaved: True if the checkpoint rotates neighbouring lanes.
    """
    field, index = split_leaf(leaf)
    latent, heads, prefix = config.latent, config.num_heads, f"layers.{index}.self_attn."
    assert latent is not None
    turned = config.input_width - latent.rank
    nope = config.head_dim - turned
    if field == "wq":
        name = "q_proj" if latent.query_rank is None else "q_b_proj"
        take = functools.partial(_queries, interleaved, config, nope)
        return Source(f"{prefix}{name}.weight", (heads * config.head_dim, shape[2]), take)
    if field == "latent.w":
        take = functools.partial(_inputs, interleaved, latent.rank)
        return Source(prefix + "kv_a_proj_with_mqa.weight", shape, take)
    if field in ("wk", "wv"):
        take = functools.partial(_keys_or_values, field, heads, nope, turned)
        return Source(prefix + "kv_b_proj.weight", (heads * (nope + latent.value_dim), latent.rank), take)
    is_sparse = index is not None and config.experts_of(int(index)) is not None
    return whole(leaf, shape, TOP_LEVEL, {**_IN_LAYER, **(_SHARED if is_sparse else {})}, "layers.{}.")


LATENT_FIELDS = LLAMA_FIELDS.but(
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    ignored=frozenset({"head_dim", "qk_head_dim"}), attention_bias=(False,),
)  # fmt: skip
"""Known fields of models with latent attention."""

_FIELDS = LATENT_FIELDS.but(
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "n_group",
    "topk_group", "first_k_dense_replace",
    ignored=frozenset({
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers", "num_mtp_layers",
    }),
    moe_layer_freq=(1,), ep_size=(1,), rope_interleave=(True,),
)  # fmt: skip
_SIGMOID_FIELDS = _FIELDS.but(
    "norm_topk_prob", "num_local_experts", scoring_func=("sigmoid",), topk_method=("noaux_tc",)
)
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

V2 = ModelFamily(
    name="deepseek_v2",
    presets={
        "deepseek-v2-lite": preset(
            "DeepseekV2ForCausalLM", 27, 2048, 16, 16, 10944, 102400, 163840, q_lora_rank=None, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6,
            moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy",
            rope_scaling=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, bos_token_id=100000, eos_token_id=100001,
        ),
    },
    model_config=v2_config,
    fields=_FIELDS.but(
        "topk_method", "num_experts", norm_topk_prob=(False,), scoring_func=("softmax",), mlp_bias=(False,)
    ),
    source=latent_source,
    strip_prefix=strip_prefix,
)  # fmt: skip

V3 = ModelFamily(
    name="deepseek_v3",
    presets={
        "deepseek-v3": preset(
            "DeepseekV3ForCausalLM", 61, 7168, 128, 128, 18432, 129280, 163840, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, n_group=8, topk_group=4,
            routed_scaling_factor=2.5, norm_topk_prob=True, rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            bos_token_id=0, eos_token_id=1,
        ),
    },
    model_config=v3_config,
    fields=_SIGMOID_FIELDS,
    source=latent_source,
    strip_prefix=strip_prefix,
    ignored_tensors=re.compile(r"rotary_emb\.inv_freq$|^layers\.61\."),  # predicts several tokens
)  # fmt: skip

GLM = ModelFamily(
    name="glm4_moe_lite",
    presets={
        "glm-4.7-flash": preset(
            "Glm4MoeLiteForCausalLM", 47, 2048, 20, 20, 10240, 154880, 202752, q_lora_rank=768, kv_lora_rank=512,
            qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4,
            moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
            routed_scaling_factor=1.8, norm_topk_prob=True, rope_theta=1e6, rms_norm_eps=1e-5, eos_token_id=154820,
        ),
    },
    model_config=glm_config,
    fields=_SIGMOID_FIELDS.but("mlp_layer_types"),
    source=latent_source,
    strip_prefix=strip_prefix,
    ignored_tensors=re.compile(r"rotary_emb\.inv_freq$|^layers\.47\."),  # predicts several tokens
)  # fmt: skip
