"""Products of rows with weights in plain XLA, in float32, and the activations between them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from apt_jax.ops.calls import KeyNorm
from apt_jax.ops.weights import Experts, GroupedMatrix


def dot(
    a: Array,
    b: Array,
    contract: tuple[int, int],
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    dtype: Any = None,
) -> Array:
    """Return `lax.dot_general` over one axis of each operand, in `dtype`; None: float32."""
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), batch), preferred_element_type=dtype or jnp.float32)


def head_products(
    x: Float[Array, "B N R"],
    w: Float[Array, "K H D"],
    *,
    onto_inputs: bool,
    rows: tuple[Array, Array] | None = None,
    dtype: Any = jnp.float32,
) -> Array:
    """Multiply every query head by the matrix of its key head: with `onto_inputs` from queries (B, N, H) to (B, N, D),
    otherwise from sums of layer inputs (B, N, D) to (B, N, H). The result has dtype `dtype`. Rows outside the half-open
    range `rows` may have any values."""
    batch, num_heads, width = x.shape
    num_kv_heads = w.shape[0]
    group = num_heads // num_kv_heads
    grouped = x.reshape(batch, num_kv_heads, group, width).transpose(0, 2, 1, 3)
    flat = grouped.reshape(batch * group, num_kv_heads, width).astype(w.dtype)
    out = dot(flat, w, (2, 1 if onto_inputs else 2), ((1,), (0,)), dtype)
    return out.reshape(num_kv_heads, batch, group, -1).transpose(1, 0, 2, 3).reshape(batch, num_heads, -1)


def dense(
    x: Float[Array, "T I"],
    w: Array | GroupedMatrix,
    scale: Float[Array, " O"] | None = None,
    *,
    bias: Float[Array, " O"] | None = None,
    activation: str | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T O"]:
    """Return `activate(x @ w.T * scale + bias)`, computed in float32 and converted to `dtype`; w (O, I) is int8 if
    there is a `scale`. A single 16-bit row is padded to two, because CPUs have a fast matrix product but no fast
    matrix-vector product in 16 bits."""
    rows = x.shape[0]
    if isinstance(w, GroupedMatrix):
        w = w.dequantized(x.dtype)
    w = w.astype(x.dtype) if scale is not None else w
    if rows == 1 and w.dtype.itemsize == 2:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    out = dot(x.astype(w.dtype), w, (1, 1))[:rows]
    if scale is not None:
        out = out * scale[None, :]
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return (out if activation is None else activate(out, activation)).astype(dtype)


def experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T E"],
    weights: Float[Array, "T E"],
    w: Experts,
    activation: str,
    *,
    clamp: tuple[float, float] | None = None,
) -> Float[Array, "T D"]:
    """Return for each row the sum, weighted by `weights`, of the gated feed-forward layers `ids` without `b_down`, in
    float32. Rows are sorted by expert, so that a device reads only the experts that some row goes to.

    Args:
        clamp: alpha and limit of `clamped_swiglu`, in place of the activation; None: `activate(gate) * up`.
    """
    rows, each = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    counts = jnp.bincount(ids.reshape(-1), length=w.router.shape[0]).astype(jnp.int32)
    by_output = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])

    def product(values: Array, matrices: Array) -> Array:
        return lax.ragged_dot_general(values, matrices, counts, by_output, preferred_element_type=jnp.float32)

    def biased(values: Array, bias: Array | None) -> Array:
        return values if bias is None else values + bias[ids.reshape(-1)[order]].astype(jnp.float32)

    sorted_rows = x[order // each].astype(w.w_gate.dtype)
    gate, up = biased(product(sorted_rows, w.w_gate), w.b_gate), biased(product(sorted_rows, w.w_up), w.b_up)
    up = activate(gate, activation) * up if clamp is None else clamped_swiglu(gate, up, *clamp)
    out = product(up.astype(w.w_down.dtype), w.w_down)[jnp.argsort(order)].reshape(rows, each, -1)
    return jnp.sum(out * weights[..., None], axis=1)


def clamped_swiglu(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], alpha: float, limit: float
) -> Float[Array, "T F"]:
    """Return `(up + 1) * gate * sigmoid(alpha * gate)`, where gate is at most `limit` and up lies in [-limit, limit]
    (gpt-oss)."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(alpha * gate)


def activate(x: Float[Array, "T F"], name: str) -> Float[Array, "T F"]:
    """Apply an activation, given by its name in `ModelConfig`."""
    if name == "relu":
        return jax.nn.relu(x)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def project_kv(
    x: Float[Array, "T D"],
    w: Float[Array, "K H D"],
    b: Float[Array, "K H"] | None,
    angles: Float[Array, "T HALF"] | None = None,
    norm: KeyNorm | None = None,
    more: Float[Array, "T E"] | None = None,
) -> Float[Array, "T E"]:
    """Return the keys or values computed from layer inputs, in the dtype of `x`, with the lanes of all heads flattened.
    They are rounded only once, after `rotate`. `more` is added to the product."""
    out = dot(x.astype(w.dtype), w.reshape(-1, w.shape[2]), (1, 1))
    if more is not None:
        out = out + more
    if b is not None:
        out = out + b.astype(jnp.float32).reshape(1, -1)
    if norm is not None:
        heads = out.reshape(x.shape[0], *w.shape[:2])
        out = rms_norm_heads(heads, norm.scale, norm.eps).reshape(out.shape)
    if angles is not None:
        out = rotate(out.reshape(x.shape[0], *w.shape[:2]), angles).reshape(out.shape)
    return out.astype(x.dtype)


def rms_norm_heads(x: Float[Array, "T K H"], scale: Float[Array, " S"], eps: float) -> Float[Array, "T K H"]:
    """Apply `KeyNorm` to float32 queries or keys."""
    shape = x.shape
    if scale.shape[0] != shape[2]:
        x = x.reshape(shape[0], 1, -1)
    scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (scaled * scale.astype(jnp.float32)[None, None]).reshape(shape)


def rotate(x: Float[Array, "S N H"], angles: Float[Array, "S HALF"] | None) -> Float[Array, "S N H"]:
    """Rotate the first `2 * HALF` lanes of every head by `angles`, in float32; None: only convert to float32."""
    if angles is None:
        return x.astype(jnp.float32)
    return apply_rope(x, jnp.cos(angles), jnp.sin(angles))


def apply_rope(
    x: Float[Array, "S N H"], cos: Float[Array, "S HALF"], sin: Float[Array, "S HALF"]
) -> Float[Array, "S N H"]:
    """Rotate as `rotate` does, given the cosines and sines of the angles."""
    x, half = x.astype(jnp.float32), cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
