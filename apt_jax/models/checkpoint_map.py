"""Interface of model adapters, which map parameter leaves to checkpoint tensors, and the helpers that they share.

For every leaf of `params.param_names`, an adapter names the tensor that holds it. Most leaves are a whole tensor, in
which heads and head width form one axis; others are a part of a fused tensor (`Source.take`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from apt_jax.errors import ModelLoadError
from apt_jax.models.config import Activation, ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.known_fields import FamilyFields

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Activation for each name that transformers uses."""

NORM_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias)$"
)
"""Pattern for the bare names of masks and rotary frequencies, which older files store although they can be computed."""

EXPERT = ".*."
"""Part of a tensor name that stands for the number of an expert."""

TIED_HEAD = "lm_head.weight"
"""Bare name of an output head that may be stored, as a copy of the embedding table, even if it is tied."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint tensor that a leaf is loaded from."""

    name: str
    """Bare name: without prefixes such as ``model.``, which depend on the transformers class that saved the
    checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    take: Callable[[np.ndarray], np.ndarray] | None = None
    """Function from the tensor to the leaf; None: the leaf is the whole tensor, reshaped."""
    parts: tuple[str, ...] = ()
    """Bare names of the tensors whose stack is the tensor, if the checkpoint stores them apart: the experts of a
    layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Adapter that fits the checkpoints of one family to the decoder."""

    name: str
    """Value of `ModelConfig.family`."""
    presets: Mapping[str, Mapping[str, Any]]
    """Configuration fields of the published model sizes, keyed by preset name; presets can be run with random
    weights."""
    model_config: Callable[[Mapping[str, Any], int | None], ModelConfig]
    """Function that returns the model's shape, given the fields of a ``config.json`` and the longest context to
    serve."""
    source: Callable[[str, tuple[int, ...], ModelConfig], Source]
    """Function from the name and shape of a leaf of `param_names` to its source tensor."""
    strip_prefix: Callable[[str], str]
    """Function from the name of a stored tensor to its bare name (`Source.name`)."""
    ignored_tensors: re.Pattern[str] = NORM_BUFFERS
    """Pattern for the bare names of stored tensors that are not loaded."""
    inputs_first: bool = False
    """True if the layers' matrices are stored as (inputs, outputs)."""
    fields: FamilyFields
    """Fields of a ``config.json`` that the family knows."""
    quantizations: frozenset[str] = frozenset()
    """Values of ``quantization_config.quant_method`` that can be loaded."""
    constant_leaf: Callable[[str, Mapping[str, Any]], float | None] | None = None
    """Function from a leaf's name and the configuration's fields to the value of all elements of the leaf, or to None
    if the checkpoint stores the leaf."""


def split_leaf(leaf: str) -> tuple[str, str | None]:
    """Return the field and layer number of a leaf: ``("wq", "3")`` for ``layers.3.wq``, ``("embed", None)`` for
    ``embed``."""
    if not leaf.startswith("layers."):
        return leaf, None
    _, index, field = leaf.split(".", 2)
    return field, index


def flat_shape(field: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which checkpoints store a leaf: heads and head width form one axis."""
    if field in ("wq", "wk", "wv"):
        heads, head_dim, width = shape
        return (heads * head_dim, width)
    if field in ("bq", "bk", "bv"):
        heads, head_dim = shape
        return (heads * head_dim,)
    if field == "wo":
        width, heads, head_dim = shape
        return (width, heads * head_dim)
    return shape


def whole(leaf: str, shape: tuple[int, ...], top: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> Source:
    """Return the source of a leaf that is a whole tensor.

    Args:
        top: tensor name of each leaf outside the layers, keyed by leaf name.
        layer: tensor name of each field of a layer, with `EXPERT` in the place of an expert's number.
        prefix: prefix of a layer's tensors, with ``{}`` for its number.
    """
    field, index = split_leaf(leaf)
    name = top[field] if index is None else prefix.format(index) + layer[field]
    if EXPERT not in name:
        return Source(name, flat_shape(field, shape))
    parts = tuple(name.replace(EXPERT, f".{i}.") for i in range(shape[0]))
    return Source(name.replace(EXPERT, "."), shape, parts=parts)


def rows(name: str, shape: tuple[int, ...], start: int, total: int) -> Source:
    """Return the source of a leaf that is rows [start, start + shape[0]) of a tensor with `total` rows; `shape` is the
    leaf's `flat_shape`."""
    stop = start + shape[0]
    return Source(name, (total, *shape[1:]), lambda tensor: tensor[start:stop])


def split_interleaved_qkv(name: str, shape: tuple[int, ...], which: int) -> Source:
    """Return the source of q, k or v (`which` is 0, 1 or 2) in a tensor that stores them head by head; `shape` starts
    with heads and head width."""
    heads, head_dim = shape[:2]

    def take(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(heads, 3, head_dim, *shape[2:])[:, which]

    return Source(name, (3 * heads * head_dim, *shape[2:]), take)


def windows(
    fields: Mapping[str, Any], num_layers: int, is_sliding: Callable[[int], bool] | None = None, *, always: bool = False
) -> tuple[int | None, ...]:
    """Return `ModelConfig.layer_windows` for a configuration.

    Args:
        is_sliding: function that returns True if a layer has the window ``sliding_window``, for configurations without
            ``layer_types``; None: all layers have it, and ``layer_types`` must agree.
        always: True if such layers exist whatever ``sliding_window`` is, so null is refused; False: null means that no
            layer has a window, unless ``layer_types`` says otherwise.

    Raises:
        ModelLoadError: ``layer_types`` is malformed, asks for a window without ``sliding_window``, or contradicts it
            where all layers must have the window; or `always` and no ``sliding_window``.
    """
    window = ConfigFields(fields).optional_positive("sliding_window")
    types = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if types is None:
        sliding = [is_sliding is None or is_sliding(i) for i in range(num_layers)]
    elif isinstance(types, list) and len(types) == num_layers and all(t in known for t in types):
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        raise ModelLoadError(
            f"config.json: layer_types={shown(types)} must name {' or '.join(known)} for each of {num_layers} layers"
        )
    if types is not None and is_sliding is None and any(s != (window is not None) for s in sliding):
        raise ModelLoadError(
            f"config.json: layer_types={shown(types)} with sliding_window={window} is not supported: all layers must have the "
            "window, or none may"
        )
    if types is not None and window is None and any(sliding):
        flag = " and use_sliding_window" if "use_sliding_window" in fields else ""
        raise ModelLoadError(f"config.json: layer_types={shown(types)} needs a sliding_window{flag}")
    if always and window is None and any(sliding):
        raise ModelLoadError(
            "config.json: sliding_window=null is not supported: some layers have a window; give its length"
        )
    return tuple(window if s else None for s in sliding) if window is not None and any(sliding) else ()
