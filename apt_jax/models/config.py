"""Shape of a model: `ModelConfig`, the description shared by all checkpoint families."""

import dataclasses
import math
from typing import Literal

from apt_jax.errors import ConfigError

NormKind = Literal["layer", "rms"]
NormPlacement = Literal["pre", "post", "output", "sandwich"]
Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
Position = Literal["learned", "rope", "alibi"]
HiddenMode = Literal["absorb", "partial", "v-absorb", "refused"]
"""How attention over cached layer inputs handles the key and value projections: "absorb": both are absorbed; "partial":
both are absorbed, except the rotary lanes of keys; "v-absorb": only the value projection is absorbed, and keys are
reprojected; "refused": the hidden kind is not offered."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: lanes i and i + `rotary_dim` / 2 of a head are rotated as a pair by position *
    `inv_freq[i]`."""

    inv_freq: tuple[float, ...]
    """Radians per position for each pair of lanes, as float32 values with scaling applied (`apt_jax.models.rope`)."""
    attention_factor: float = 1.0
    """Factor on the rotated lanes of queries and of keys (YaRN, LongRoPE)."""

    def __post_init__(self) -> None:
        _require(
            len(self.inv_freq) > 0 and all(math.isfinite(f) for f in self.inv_freq),
            "model rope: there must be at least one frequency, and all must be finite",
        )
        _require(
            math.isfinite(self.attention_factor) and self.attention_factor > 0,
            f"model rope: attention_factor={self.attention_factor} must be a positive number",
        )

    @property
    def rotary_dim(self) -> int:
        """R: rotated lanes of a head."""
        return 2 * len(self.inv_freq)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Factor on queries that grows with their position: `1 + factor * log(1 + floor(position / length))` (Llama 4,
    Ministral 3)."""

    factor: float
    length: int

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.factor) and self.factor >= 0 and self.length > 0,
            f"model query_growth: factor={self.factor} must not be negative and length={self.length} must be positive",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Key heads of one layer, and how their keys and values are cached."""

    num_kv_heads: int
    """K"""
    head_dim: int
    """H"""
    one_projection: bool = False
    """True: there is no W_v; values are the projection of keys before the norm and rotation of keys (Gemma 4)."""
    turned_lanes: int | None = None
    """R: keys and values of a head are cached as one tensor, the value followed by the R lanes of the key that its
    position rotates; the other lanes of the key are the value times the scale of the key norm, which queries take
    instead. None: keys and values are cached as two tensors."""

    @property
    def row_width(self) -> int:
        """Elements that are cached for a head in one tensor: H, or H + R."""
        return self.head_dim + (self.turned_lanes or 0)

    @property
    def lane(self) -> int:
        """E = K * `row_width`: elements that are cached for a token in one tensor."""
        return self.num_kv_heads * self.row_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: in sparse layers, a router selects a few feed-forward layers for each token and adds their
    outputs with weights, the softmax of the router's scores."""

    num_experts: int
    """X: experts of a layer."""
    per_token: int
    """Number of experts that a token goes to."""
    size: int
    """F of one expert."""
    normalize: bool
    """True if the weights of a token's experts are divided by their sum."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's products that gives the weights. With "sigmoid" a bias is added where experts are chosen,
    but not to their weights (DeepSeek-V3)."""
    num_groups: int = 1
    """Number of groups of equally many consecutive experts; a token goes to experts of `groups_per_token` of them."""
    groups_per_token: int = 1
    """Groups are chosen by their best expert or, with "sigmoid", by the sum of their two best."""
    factor: float = 1.0
    """Factor on the weights, after `normalize`."""
    dense_layers: tuple[int, ...] = ()
    """Indices of layers with one feed-forward layer of `ModelConfig.ffn_size` for all tokens; indices beyond the last
    layer are ignored."""
    shared_size: int = 0
    """F of an expert that all tokens go to; 0: none. Several such experts are one of their total width."""
    shared_gate: bool = True
    """True if the output of that expert is multiplied by the sigmoid of a product with the token (Qwen2-MoE)."""
    bias: bool = False
    """True if the router and the experts have biases (gpt-oss)."""
    clamp: tuple[float, float] | None = None
    """alpha and limit of experts that compute `down((up + 1) * gate * sigmoid(alpha * gate))`, where gate is at most the
    limit and up lies in [-limit, limit] (gpt-oss); None: `down(activation(gate) * up)`."""

    apart: bool = False
    """True if router and experts read the residual stream with norms of their own, beside the layer of `shared_size` that
    all tokens go to, and both outputs are normed before they are added; every expert then has a factor (Gemma 4)."""

    def __post_init__(self) -> None:
        _require(not self.apart or self.shared_size > 0, "model experts: apart needs shared_size")
        _require(
            self.num_experts > 0 and self.size > 0 and self.shared_size >= 0,
            f"model experts: num_experts={self.num_experts} and size={self.size} must be positive",
        )
        _require(
            0 < self.per_token <= self.num_experts,
            f"model experts: per_token={self.per_token} must lie in [1, {self.num_experts}]",
        )
        size, rest = divmod(self.num_experts, max(1, self.num_groups))
        _require(
            self.num_groups > 0 and rest == 0 and (self.num_groups == 1 or self.scoring == "softmax" or size > 1),
            f"model experts: num_groups={self.num_groups} must divide num_experts={self.num_experts}",
        )
        _require(
            0 < self.groups_per_token <= self.num_groups and self.per_token <= self.groups_per_token * size,
            f"model experts: groups_per_token={self.groups_per_token} must lie in [1, {self.num_groups}], and that many groups "
            f"must hold per_token={self.per_token} experts",
        )
        _require(
            math.isfinite(self.factor) and self.factor > 0, f"model experts: factor={self.factor} must be positive"
        )
        _require(
            self.clamp is None or self.clamp[1] > 0,
            f"model experts: the limit of clamp={self.clamp} must be positive",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA, DeepSeek-V2): keys and values of all heads are projections of one vector per token, the
    latent [c; k_r], which is cached in the place of a layer input.

    c is a projection of the layer input, RMS-normed. k_r is a rotated key that all heads share: the first `rotary_dim`
    lanes of every head's key. The other lanes of keys, and the values, are projections of c.
    """

    rank: int
    """Width of c."""
    value_dim: int
    """Width of a head's values, at most H."""
    query_rank: int | None = None
    """Width of a normed projection of the layer input from which queries are computed; None: queries are computed from
    the layer input."""
    norm_eps: float = 1e-6
    """As `ModelConfig.norm_eps`, of the norms of latents."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer of any checkpoint family."""

    family: str
    """Name of the adapter in `apt_jax/models/families/` that loads the model, e.g. ``"opt"``."""
    vocab_size: int
    """V: rows of the embedding table and width of the logits."""
    hidden_size: int
    """D: width of the residual stream."""
    num_layers: int
    """L: decoder layers."""
    num_heads: int
    """N: query heads."""
    num_kv_heads: int
    """K: key/value heads; equal to `num_heads` for multi-head attention."""
    head_dim: int
    """H: width of one head."""
    global_attention: AttentionShape | None = None
    """Attention of the layers that are not in `local_layers`, if it differs from `num_kv_heads` and `head_dim`
    (Gemma 4)."""
    ffn_size: int
    """F: width of the feed-forward layer."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of the feed-forward layer; None: no layer has one."""
    max_position: int
    """Longest context in tokens that the position embeddings cover."""
    embedding_size: int | None = None
    """Width of the token embeddings if it differs from D (OPT-350M projects 512 to 1024); None: equal to D."""
    embedding_scale: float | None = None
    """Factor on the token embeddings (Gemma: sqrt(D))."""
    embedding_norm: bool = False
    """True if a norm follows the token embeddings (BLOOM)."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and feed-forward before they are added to the residual stream (MiniCPM3)."""
    logits_scale: float = 1.0
    """Factor on the logits (MiniCPM3)."""
    activation: Activation = "relu"
    gated: bool = False
    """True: the feed-forward layer is `down(activation(gate(x)) * up(x))`; False: `down(activation(up(x)))`."""
    norm: NormKind = "layer"
    norm_bias: bool = True
    """True if layer norms add a bias; RMS norms have no bias."""
    norm_offset: float = 0.0
    """Constant added to the stored scale of every norm (Gemma: 1)."""
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    """Where norms are applied; `f` stands for attention or feed-forward: "pre" `h + f(norm(h))`, "post" `norm(h +
    f(h))` (OPT-350M), "output" `h + norm(f(h))` (OLMo-2), "sandwich" `h + norm(f(norm(h)))` (Gemma-2, Gemma-3)."""
    parallel: bool = False
    """True if attention and feed-forward both take the layer's input (GPT-NeoX); only with "pre" norms."""
    final_norm: bool = True
    """True if a norm follows the last layer."""
    qk_norm: Literal["head", "lane"] | None = None
    """RMS norm of queries and keys after projection: over each head (Qwen3, Gemma-3) or over all heads together
    (OLMo-2)."""
    value_norm: bool = False
    """True if values are divided by the root mean square of their head (Gemma 4)."""
    layer_scale: bool = False
    """True if each layer's result is multiplied by a stored number (Gemma 4)."""
    position: Position = "learned"
    position_offset: int = 0
    """Rows skipped at the start of the learned position table (OPT: 2)."""
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    """Rotary embedding of the layers in `local_layers`. The layers are listed rather than derived from their windows,
    because windows that are at least as long as every context are removed (Gemma-3)."""
    local_layers: tuple[int, ...] = ()
    """Indices of the layers with `local_rope`; the others have `rope`. Indices beyond the last layer are ignored."""
    unrotated_layers: tuple[int, ...] = ()
    """Indices of the layers without a rotary embedding, in a model of which other layers have one (SmolLM3); indices
    beyond the last layer are ignored."""
    latent: LatentConfig | None = None
    """Latent attention; None: keys and values are computed from the layer input."""
    query_growth: QueryGrowth | None = None
    """Factor on queries that grows with their position; None: none."""
    alibi_slopes: tuple[float, ...] = ()
    """(N,) slope of each head: `slope * (j - i)` is added to the score of query i and key j."""
    attention_scale: float | None = None
    """Factor on the attention scores; None: 1 / sqrt(H)."""
    attention_softcap: float | None = None
    """Soft cap of the attention scores: s becomes `cap * tanh(s / cap)` (Gemma-2); None: no cap."""
    logits_softcap: float | None = None
    """Soft cap of the logits, like `attention_softcap`."""
    attention_sinks: bool = False
    """True if every query head has a learned score that joins the softmax's denominator and has no value (gpt-oss)."""
    layer_windows: tuple[int | None, ...] = ()
    """Number of positions that each layer attends to, including the query's own; None: all. An empty tuple: no layer
    has a window."""
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to [-clip_qkv, clip_qkv] (MPT); None: no clipping."""
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    """True if the projections to q, k and v (`qkv_bias`), the output projection of attention (`out_bias`) and the
    feed-forward layer (`ffn_bias`) have biases."""
    tie_embeddings: bool = True
    """True if the output head is the transposed embedding table."""
    head_bias: bool = False
    """True if the output head adds a bias."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "max_position",
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and 0 < value < 2**31,
                f"model {name}={value!r} must be a positive integer",
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}",
        )
        _require(
            (self.rope is not None) == (self.position == "rope"),
            f"model position={self.position!r} and rope={self.rope!r:.40} do not go together",
        )
        shape = self.global_attention
        _require(
            self.rope is None or self.rope.rotary_dim <= (shape or self).head_dim,
            "model rope: more rotary lanes than a head has",
        )
        _require(
            self.local_rope is None
            or (self.rope is not None and self.local_rope.rotary_dim == self.rope.rotary_dim)
            or (shape is not None and self.local_rope.rotary_dim <= self.head_dim),
            "model local_rope: must rotate as many lanes as rope",
        )
        _require(
            shape is None or (self.num_heads % shape.num_kv_heads == 0 and self.attention_scale is not None),
            f"model global_attention={shape!r}: num_heads={self.num_heads} must be a multiple of its key heads, and "
            "attention_scale must be given",
        )
        _require(
            shape is None or not shape.one_projection or (self.qk_norm == "head" and self.value_norm),
            f"model global_attention={shape!r}: values from the projection of keys need qk_norm and value_norm",
        )
        _require(
            bool(self.local_layers) == (self.local_rope is not None) and all(layer >= 0 for layer in self.local_layers),
            f"model local_layers={self.local_layers!r:.60} must name the layers of local_rope",
        )
        _require(
            len(self.alibi_slopes) == (self.num_heads if self.position == "alibi" else 0),
            f"model position={self.position!r} with {len(self.alibi_slopes)} ALiBi slopes",
        )
        _require(
            len(self.layer_windows) in (0, self.num_layers) and all(w is None or w > 0 for w in self.layer_windows),
            f"model layer_windows={self.layer_windows!r:.60} must name a positive window or None for each layer",
        )
        _require(
            not self.parallel or self.norm_placement == "pre",
            f"model norm_placement={self.norm_placement!r} with parallel layers",
        )
        if (latent := self.latent) is not None:
            _require(
                latent.rank > 0 and 0 < latent.value_dim <= self.head_dim and (latent.query_rank or 1) > 0,
                f"model latent={latent!r:.80}: ranks must be positive, and value_dim must lie in [1, {self.head_dim}]",
            )
            others = (self.local_rope, self.qk_norm, self.clip_qkv, self.query_growth)
            _require(
                self.rope is not None and self.rope.rotary_dim < self.head_dim and self.num_kv_heads == self.num_heads
                and not self.qkv_bias and not self.unrotated_layers and all(other is None for other in others),
                "model latent: needs partly rotated heads, as many key heads as query heads, and no bias, norm, clipping or "
                "growth of queries and keys",
            )  # fmt: skip

    @property
    def lane(self) -> int:
        """E = K * H: elements of a token's keys, or of its values, in one layer; if layers differ, in the layer that
        caches most."""
        own = self.num_kv_heads * self.head_dim
        return own if self.global_attention is None else max(own, self.global_attention.lane)

    @property
    def value_dim(self) -> int:
        """Width of a head's values. Values narrower than H are cached with zeros in the other lanes."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def input_width(self) -> int:
        """Width of the vector that the hidden kind caches of a token in one layer: D, or the width of the latent."""
        if self.latent is None or self.rope is None:
            return self.hidden_size
        return self.latent.rank + self.rope.rotary_dim

    def pool_lane(self, *, kv: bool) -> int:
        """Return the elements of a slot of the pool: E, but the width of the latent if the model has one and no request
        caches keys and values (`kv` is False)."""
        return self.lane if kv or self.latent is None else self.input_width

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def hidden_ratio(self) -> float:
        """Size of a token's layer input relative to its keys and values: D / 2E."""
        return self.input_width / (2 * self.lane)

    def hidden_block_size(self, block_size: int) -> int:
        """Return the number of layer inputs that fit in a block of `block_size` keys: floor(C E / D); of latents, whose
        pool holds no keys, `block_size`."""
        return block_size * self.pool_lane(kv=False) // self.input_width

    @property
    def hidden_refusal(self) -> str | None:
        """Reason why the hidden kind is not offered; None: it is offered."""
        if self.hidden_ratio >= 1:
            size = "larger" if self.hidden_ratio > 1 else "not smaller"
            return (
                f"its layer inputs ({self.input_width} values per token and layer) are {size} than its keys and values "
                f"(2 x {self.lane})"
            )
        if self.global_attention is not None or self.value_norm:
            return "its keys and values are cached as one tensor, or normed after projection"
        if self.clip_qkv is not None:
            return "it clips keys and values after projection (clip_qkv)"
        if self.attention_sinks:  # absorption drops b_k and adds b_v, which is right if the weights add up to 1
            return "its weights of attention do not add up to 1 (attention_sinks)"
        return None

    @property
    def supports_hidden(self) -> bool:
        """True if the hidden kind is offered; see `hidden_refusal`."""
        return self.hidden_refusal is None

    @property
    def offers_hybrid(self) -> bool:
        """True if an engine can offer both cache kinds: the hidden kind is offered, and layer inputs take at most half
        the memory of K and V. A smaller saving does not outweigh the cost of handling both kinds in every step and, on
        CPUs, of keeping second copies of weights. Latents are so small that a choice would never be for keys and values:
        in such a model "hybrid" means the hidden kind."""
        return self.supports_hidden and self.input_width <= self.lane and self.latent is None

    @property
    def hidden_mode(self) -> HiddenMode:
        """Projections that attention over layer inputs absorbs, as a `HiddenMode`."""
        if not self.supports_hidden:
            return "refused"
        if self.qk_norm is not None:  # the norm lies between the query and the key projection
            return "v-absorb"
        if self.rope is None or self.latent is not None:  # the rotary lanes of a latent are rotated before it is cached
            return "absorb"
        return "partial" if self.rope.rotary_dim < self.head_dim else "v-absorb"

    def attention_of(self, layer: int) -> AttentionShape:
        """Return the key heads of a layer."""
        if self.global_attention is None or layer in self.local_layers:
            return AttentionShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return self.global_attention

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the mixture of experts of a layer; None: it has one feed-forward layer."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def dense_size(self, layer: int) -> int:
        """Return F of the part of a layer's feed-forward layer that all tokens go to; 0: there is none."""
        experts = self.experts_of(layer)
        return self.ffn_size if experts is None else experts.shared_size

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """F of every feed-forward layer that some layer has."""
        sizes = {self.dense_size(i) for i in range(self.num_layers)} | ({self.experts.size} if self.experts else set())
        return tuple(sorted(sizes - {0}))

    @property
    def widest_ffn(self) -> int:
        """Values between the products of a token's feed-forward layer, in the layer that has most."""
        mixed = 0 if self.experts is None else self.experts.per_token * self.experts.size + self.experts.shared_size
        return max(mixed, *(self.dense_size(i) for i in range(self.num_layers)))

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer."""
        if layer in self.unrotated_layers:
            return None
        return self.local_rope if layer in self.local_layers else self.rope

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a layer attends to; None: all."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def num_active_params(self) -> int:
        """Number of parameters that the computation of one token uses: all but those of the experts that it does not go
        to."""
        if self.experts is None:
            return self.num_params
        e, products = self.experts, 3 if self.gated else 2
        of_expert = products * self.hidden_size * e.size + ((products - 1) * e.size + self.hidden_size) * e.bias
        sparse = sum(self.experts_of(i) is not None for i in range(self.num_layers))
        return self.num_params - sparse * (e.num_experts - e.per_token) * of_expert

    @property
    def num_params(self) -> int:
        """Number of parameters, counting tied embeddings once."""
        d, e = self.hidden_size, self.embedding_size or self.hidden_size
        norm = (2 if self.norm_bias else 1) * d
        norms = 4 if self.norm_placement == "sandwich" else 2
        total = self.vocab_size * e
        products = 3 if self.gated else 2
        for i in range(self.num_layers):
            shape = self.attention_of(i)
            q, kv = self.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            qkv = q + (1 if shape.one_projection else 2) * kv
            if self.latent is None:
                total += d * qkv + q * d
            else:
                width, rank, out = self.input_width, self.latent.query_rank, self.num_heads * self.value_dim
                total += d * width + self.latent.rank + width * (kv + out) + out * d
                total += d * q if rank is None else d * rank + rank + rank * q
            total += norms * norm + self.layer_scale
            total += qkv if self.qkv_bias else 0
            total += d if self.out_bias else 0
            total += self.num_heads if self.attention_sinks else 0
            if self.qk_norm is not None:
                total += 2 * shape.head_dim if self.qk_norm == "head" else q + kv
            experts, f = self.experts_of(i), self.dense_size(i)
            total += products * d * f + ((f * (products - 1) + d) if self.ffn_bias else 0)
            if experts is not None:
                total += experts.num_experts * (d + products * d * experts.size)
                total += d if f and experts.shared_gate else 0
                total += 4 * norm + experts.num_experts if experts.apart else 0
                total += experts.num_experts if experts.scoring == "sigmoid" else 0
                biases = 1 + (products - 1) * experts.size + d
                total += experts.num_experts * biases if experts.bias else 0
        if self.position == "learned":
            total += (self.max_position + self.position_offset) * d
        total += norm if self.final_norm else 0
        total += norm if self.embedding_norm else 0
        total += 2 * d * e if e != d else 0
        total += 0 if self.tie_embeddings else self.vocab_size * e
        total += self.vocab_size if self.head_bias else 0
        return total
