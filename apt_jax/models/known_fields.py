"""Fields of a ``config.json`` that each family knows: a field that asks for an unsupported feature is refused, never
ignored.

Each field of a family's configuration class in transformers, and of its nested objects, is in one of three groups
(`tests/parity/test_known_fields.py` checks this):

* read: the family's `model_config` uses it;
* off: refused, unless its value has no effect;
* `IGNORED`: has no effect on the logits of a served decoder; `IGNORED` gives the reason.

Other fields are unknown to transformers as well, which ignores them. They are logged once (`unknown_fields`).
`python -m apt_jax.models.families` prints the table, which is part of the reference documentation.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.config_fields import shown

IGNORED: dict[str, tuple[str, ...]] = {
    "training": (
        "attention_dropout", "attention_probs_dropout_prob", "activation_dropout", "attn_pdrop", "classifier_dropout", "dropout",
        "embd_pdrop", "emb_pdrop", "hidden_dropout", "layerdrop", "resid_pdrop", "initializer_range", "init_std", "initializer_factor",
        "init_config", "init_device", "embedding_fraction", "pretraining_tp", "gradient_checkpointing", "use_bfloat16",
    ),
    "outputs and caches of transformers": (
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate", "torchscript",
        "num_logits_to_keep", "cache_implementation", "use_return_dict",
    ),
    "defaults of generation (generation_config.json)": (
        "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "max_length", "min_length",
        "num_beams", "num_beam_groups", "num_return_sequences", "early_stopping", "diversity_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "bad_words_ids", "task_specific_params",
    ),
    "special tokens that no decoder needs": (
        "sep_token_id", "unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix", "tokenizer_class",
        "tokenizer_name",
    ),
    "heads of other tasks": (
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder",
    ),
    "implementation choices that do not change the result": (
        "chunk_size_feed_forward", "reorder_and_upcast_attn", "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion",
        "bias_dropout_fusion", "attn_implementation", "use_flash_attn", "verbose",
    ),
    "names and versions": ("transformers_version", "name_or_path", "auto_map", "trust_remote_code", "unsloth_version", "unsloth_fixed"),
}  # fmt: skip
"""Fields that are ignored in every family unless the family reads or refuses them, keyed by reason."""

_IGNORED = frozenset(name for names in IGNORED.values() for name in names)

_EVERY_READ = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size",
    "tie_word_embeddings",
})  # fmt: skip
_EVERY_OFF: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "compression_config": (),
    "quantization": (),
}
"""Fields that no family supports, with the values (besides null) that have no effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyFields:
    """Fields that one family knows."""

    read: frozenset[str]
    """Fields that are used; unsupported values are refused."""
    off: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Unsupported fields, with the values (besides null) that have no effect; other values are refused."""
    ignored: frozenset[str] = frozenset()
    """Fields without effect in this family, in addition to `IGNORED`."""
    nested: Mapping[str, "FamilyFields"] = dataclasses.field(default_factory=dict)
    """Known fields of each nested object."""

    def known(self) -> frozenset[str]:
        """Return the names of all fields that are read, refused or ignored."""
        own = (self.read, self.off, self.ignored, self.nested)
        return frozenset().union(*own, _EVERY_READ, _EVERY_OFF, _IGNORED)

    def but(self, *read: str, ignored: frozenset[str] = frozenset(), **off: tuple[Any, ...]) -> "FamilyFields":
        """Return a copy that also knows the given fields. Fields in `off` or `ignored` are no longer read."""
        left = (self.read | frozenset(read)).difference(off, ignored)
        return dataclasses.replace(self, read=left, off={**self.off, **off}, ignored=self.ignored | ignored)


_ROPE = FamilyFields(
    read=frozenset({
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor", "low_freq_factor",
        "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor",
        "long_factor",
    }),
    off={"mrope_section": (), "short_mscale": (), "long_mscale": (), "llama_4_scaling_beta": (0.0,)},
    ignored=frozenset({"finetuned"}),
)  # fmt: skip
ROPE = {"rope_parameters": _ROPE, "rope_scaling": _ROPE}
"""Known fields of the objects that may describe a rotary embedding."""
_ROPE_WITH_GROWTH = dataclasses.replace(
    _ROPE,
    read=_ROPE.read | {"llama_4_scaling_beta"},
    off={name: values for name, values in _ROPE.off.items() if name != "llama_4_scaling_beta"},
    ignored=_ROPE.ignored | {"max_position_embeddings"},
)
ROPE_WITH_GROWTH = {"rope_parameters": _ROPE_WITH_GROWTH, "rope_scaling": _ROPE_WITH_GROWTH}
ROPE_BY_LAYER = {
    "rope_parameters": FamilyFields(read=frozenset(), nested={"full_attention": _ROPE, "sliding_attention": _ROPE}),
    "rope_scaling": _ROPE,
}

LLAMA_FIELDS = FamilyFields(
    read=frozenset({
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "rope_theta", "partial_rotary_factor",
        "attention_bias",
    }),
    nested=ROPE,
)  # fmt: skip
"""Known fields of models with Llama's layout."""


def _is_off(value: Any, values: tuple[Any, ...]) -> bool:
    return value is None or any(type(value) is type(known) and value == known for known in values)


def check_fields(known: FamilyFields, fields: Mapping[str, Any], family: str) -> None:
    """Refuse a configuration that requests a feature which the family does not support.

    Raises:
        ModelLoadError: one line that names the field, its value, and the supported values.
    """
    _check(known, fields, f"model_type {family}", "")
    types = fields.get("layer_types")
    is_full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    if types is not None and "layer_types" not in known.read and not is_full:
        raise ModelLoadError(
            f"config.json: layer_types={shown(types, 60)} is not supported for model_type {family}, whose layers all have full attention"
        )


def _check(known: FamilyFields, fields: Mapping[str, Any], family: str, where: str) -> None:
    for name, values in {**({} if where else _EVERY_OFF), **known.off}.items():
        if not _is_off(fields.get(name), values):
            allowed = " or ".join(map(repr, values)) or "null"
            raise ModelLoadError(
                f"config.json: {where}{name}={shown(fields[name], 60)} is not supported for {family}; only {allowed}"
            )
    for name, inner in known.nested.items():
        if isinstance(fields.get(name), Mapping):
            _check(inner, fields[name], family, f"{where}{name}.")


def unknown_fields(known: FamilyFields, fields: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are set but belong to no group, and so are unknown to transformers too."""
    return list(_unknown(known, fields, ""))


def _unknown(known: FamilyFields, fields: Mapping[str, Any], where: str) -> Iterator[str]:
    names = known.known() | {"quantization_config", "layer_types"}
    for name, value in fields.items():
        if value and name not in names and not name.startswith("_"):
            yield f"{where}{name}"
        elif name in known.nested and isinstance(value, Mapping):
            yield from _unknown(known.nested[name], value, f"{where}{name}.")


def markdown(families: Mapping[str, FamilyFields]) -> str:
    """Return a table of the fields that each family knows, and a list of the fields that are ignored everywhere, in
    Markdown."""

    def names(found: Any) -> str:
        return ", ".join(f"`{name}`" for name in sorted(found))

    def refused(fields: FamilyFields) -> str:
        parts = [
            f"`{name}`: {' or '.join(f'`{v!r}`' for v in values) or 'null'}" for name, values in fields.off.items()
        ]
        parts += [
            f"`{outer}`: {refused(inner)}" for outer, inner in fields.nested.items() if inner.off and inner is not _ROPE
        ]
        return "; ".join(parts)

    lines = ["| model_type | read | refused unless |", "| --- | --- | --- |"]
    lines.append(f"| all | {names(_EVERY_READ)} | {refused(FamilyFields(read=frozenset(), off=_EVERY_OFF))} |")
    lines.append(
        f"| with rotary embeddings: `rope_parameters`, `rope_scaling` | {names(_ROPE.read)} | {refused(_ROPE)} |"
    )
    lines.append(f"| of Llama's layout | {names(LLAMA_FIELDS.read.union(LLAMA_FIELDS.nested))} | |")
    for name, fields in families.items():
        own = fields.read.union(fields.nested)
        inherits = own.union(fields.off, fields.ignored) >= LLAMA_FIELDS.read
        own = own.difference(LLAMA_FIELDS.read, LLAMA_FIELDS.nested) if inherits else own
        lines.append(
            f"| {name} | {'Llama' * inherits}{', ' * bool(inherits and own)}{names(own)} | {refused(fields)} |"
        )
    lines += ["", "Ignored everywhere, by reason:", ""]
    lines += [f"- {reason}: {names(found)}" for reason, found in IGNORED.items()]
    return "\n".join(lines) + "\n"
