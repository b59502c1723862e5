"""The ``config.json`` fields of the model in a GGUF file, reconstructed from the file's metadata."""

from collections.abc import Callable
from typing import Any

import numpy as np

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.gguf.file import GgufFile

_LLAMA3_TOLERANCE = 1e-3


class _Metadata:
    """Typed access to the metadata of one architecture; errors name the key and its value."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file, self._arch = file, arch

    def _refuse(self, key: str, value: Any, rule: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: metadata {key}={value!r:.60} must be {rule}")

    def raw(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._arch}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; an array of one repeated value counts as that value."""
        key, value = f"{self._arch}.{name}", self.raw(name)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelLoadError(f"{self._file.path}: metadata {key} is missing")
        if type(value) is not int or not 0 < value < 2**31:
            raise self._refuse(key, value, "a positive integer, the same in all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key, value = f"{self._arch}.{name}", self.raw(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelLoadError(f"{self._file.path}: metadata {key} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise self._refuse(key, value, "a finite number")
        # float32 in the file: 1e-5 must not become 9.999999747378752e-06.
        return float(np.format_float_positional(np.float32(value), unique=True))

    def token_id(self, name: str, vocab_size: int) -> int | None:
        key = f"tokenizer.ggml.{name}"
        value = self._file.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < 2**32:
            raise self._refuse(key, value, "a token id")
        return value if value < vocab_size else None  # 2**32 - 1 means no token


_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
)  # fmt: skip
"""Control tokens that end a turn, for files that do not list them in their metadata (llama.cpp has the same list)."""

_CONTROL = 3


def end_ids(file: GgufFile, vocab_size: int) -> list[int]:
    """Return the token ids that end an output: the end-of-text and end-of-turn ids in the metadata, then the control
    tokens listed in `_END_TEXTS`."""
    get = _Metadata(file, "")
    ids = [get.token_id(f"{n}_token_id", vocab_size) for n in ("eos", "eot", "eom")]
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{n}") for n in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        control = np.flatnonzero(types == _CONTROL).tolist()
        ids += [i for i in control if tokens[i] in _END_TEXTS and i < vocab_size]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float, where: str) -> dict[str, Any]:
    """Recover the parameters of Llama 3.1's scaling from the tensor of factors, because the file does not store the
    parameters."""
    scale = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = 1.0, 4.0
    for context in (8192, 4096, 16384, 32768):
        smooth = (context / wavelength - low) / (high - low)
        middle = 1 / ((1 - smooth) / scale + smooth)
        want = np.where(wavelength < context / high, 1, np.where(wavelength > context / low, scale, middle))
        if want.shape == factors.shape and np.allclose(want, factors, rtol=_LLAMA3_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": float(np.format_float_positional(np.float32(scale), unique=True)),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise ModelLoadError(f"{where}: tensor 'rope_freqs.weight' holds an unknown scaling")


def _rope_scaling(file: GgufFile, get: _Metadata, head_dim: int, theta: float) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        factors = _small(file, "rope_freqs.weight", head_dim // 2)
        if (factors == 1).all():
            return None
        return _llama3_scaling(factors, head_dim, theta, str(file.path))
    long, short = (f"rope_factors_{n}.weight" for n in ("long", "short"))
    if long in file.tensors or short in file.tensors:
        rotated = get.size("rope.dimension_count", head_dim)
        return {
            "rope_type": "longrope",
            "long_factor": _small(file, long, rotated // 2).tolist(),
            "short_factor": _small(file, short, rotated // 2).tolist(),
        }
    kind = get.raw("rope.scaling.type")
    if kind is None and get.raw("rope.scale_linear") is not None:  # files of 2023
        return {"rope_type": "linear", "factor": get.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": get.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise ModelLoadError(f"{file.path}: metadata rope.scaling.type={kind!r:.40} is not known")
    scaling["original_max_position_embeddings"] = get.size("rope.scaling.original_context_length")
    for name, field in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),
    ):
        if get.raw(f"rope.scaling.{name}") is not None:
            scaling[field] = get.number(f"rope.scaling.{name}")
    return scaling


def _small(file: GgufFile, name: str, size: int) -> np.ndarray:
    info = file.tensors.get(name)
    if info is None or info.shape != (size,):
        shape = "absent" if info is None else list(info.shape)
        raise ModelLoadError(f"{file.path}: tensor {name!r} is {shape}, but must have {size} values")
    values = np.concatenate(list(file.chunks(name))).astype(np.float64)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ModelLoadError(f"{file.path}: tensor {name!r} holds values that are not positive and finite")
    return values


def _rotary_fields(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    """Return the configuration fields that all Llama-like models share."""
    hidden, heads = get.size("embedding_length"), get.size("attention.head_count")
    head_dim = get.size("attention.key_length", max(1, hidden // heads))
    if get.size("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: keys and values of different widths are not supported")
    theta = get.number("rope.freq_base", 10000.0)
    bias = "blk.0.attn_q.bias" in file.tensors
    if get.raw("attention.causal") is False:
        raise ModelLoadError(f"{file.path}: metadata attention.causal=False is not supported; only causal models are")
    return {
        "hidden_size": hidden,
        "intermediate_size": get.size("feed_forward_length"),
        "num_hidden_layers": get.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get.size("context_length"),
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, get, head_dim, theta),
        "hidden_act": "silu",
        "attention_bias": bias,
        "partial_rotary_factor": get.size("rope.dimension_count", head_dim) / head_dim,
    }


def _llama(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    if get.raw("expert_count"):
        return fields | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": get.size("expert_count"),
            "num_experts_per_tok": get.size("expert_used_count"),
            "sliding_window": get.raw("attention.sliding_window") or None,
        }
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    window = get.raw("attention.sliding_window")
    if not window:
        return fields | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return fields | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": get.size("attention.sliding_window"),
    }


def _qwen2(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    del fields["attention_bias"]  # always on q, k and v
    return fields | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    }


def _qwen3(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    return _rotary_fields(file, get) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    }


def _experts(get: _Metadata, *, normalize: bool) -> dict[str, Any]:
    """Return the fields of a mixture of experts; files do not have `normalize`, which llama.cpp knows by
    architecture."""
    return {
        "num_experts": get.size("expert_count"),
        "num_experts_per_tok": get.size("expert_used_count"),
        "norm_topk_prob": normalize,
    }


def _qwen3moe(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    return _rotary_fields(file, get) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "use_sliding_window": False,
        **_experts(get, normalize=True),
        "moe_intermediate_size": get.size("expert_feed_forward_length"),
    }


def _qwen2moe(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    del fields["attention_bias"]  # always on q, k and v
    return fields | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "use_sliding_window": False,
        **_experts(get, normalize=False),
        "moe_intermediate_size": get.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": get.size("expert_shared_feed_forward_length"),
    }


def _olmoe(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    return _rotary_fields(file, get) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        **_experts(get, normalize=False),
    }


def _gemma(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    return _rotary_fields(file, get) | {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }


_GEMMA2_27B_LAYERS = 46


def _gemma2(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    # Not in the file: the largest of the three models scales by D / N, the others by H.
    large = fields["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if large else fields["head_dim"]
    return fields | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": get.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get.number("final_logit_softcapping", 30.0),
        "sliding_window": get.size("attention.sliding_window", 4096),
    }


_GEMMA3_27B_LAYERS = 62


def _gemma3(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    # Not in the file, as with Gemma 2.
    large = fields["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if large else fields["head_dim"]
    has_windows = get.raw("attention.sliding_window") is not None
    return fields | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_theta": get.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": get.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": get.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": get.size("attention.sliding_window") if has_windows else None,
        "sliding_window_pattern": get.size("attention.sliding_window_pattern", 6) if has_windows else 1,
    }


def _phi3(file: GgufFile, get: _Metadata) -> dict[str, Any]:
    fields = _rotary_fields(file, get)
    context = fields["max_position_embeddings"]
    return fields | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": get.size("rope.scaling.original_context_length", context),
        "sliding_window": get.size("attention.sliding_window") if get.raw("attention.sliding_window") else None,
    }


def _gpt2(_file: GgufFile, get: _Metadata) -> dict[str, Any]:
    width, context = get.size("embedding_length"), get.size("context_length")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": get.size("block_count"),
        "n_head": get.size("attention.head_count"),
        "n_positions": context,
        "n_ctx": context,
        "n_inner": get.size("feed_forward_length", 4 * width),
        "layer_norm_epsilon": get.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gptneox(_file: GgufFile, get: _Metadata) -> dict[str, Any]:
    width, heads = get.size("embedding_length"), get.size("attention.head_count")
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": width,
        "intermediate_size": get.size("feed_forward_length"),
        "num_hidden_layers": get.size("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": get.size("context_length"),
        "layer_norm_eps": get.number("attention.layer_norm_epsilon"),
        "rotary_pct": get.size("rope.dimension_count") / max(1, width // heads),
        "rotary_emb_base": get.number("rope.freq_base", 10000.0),
        "use_parallel_residual": bool(get.raw("use_parallel_residual")),
        "hidden_act": "gelu",
    }


def _bloom(_file: GgufFile, get: _Metadata) -> dict[str, Any]:
    width = get.size("embedding_length")
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": width,
        "n_embed": width,
        "n_layer": get.size("block_count"),
        "n_head": get.size("attention.head_count"),
        "seq_length": get.size("context_length"),
        "layer_norm_epsilon": get.number("attention.layer_norm_epsilon"),
    }


def _mpt(_file: GgufFile, get: _Metadata) -> dict[str, Any]:
    width, heads = get.size("embedding_length"), get.size("attention.head_count")
    inner = get.size("feed_forward_length", 4 * width)
    alibi = get.number("attention.max_alibi_bias", 0.0)
    clip = get.number("attention.clamp_kqv", 0.0)
    return {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "d_model": width,
        "n_layers": get.size("block_count"),
        "n_heads": heads,
        "expansion_ratio": inner // width if inner % width == 0 else inner / width,
        "max_seq_len": get.size("context_length"),
        "layer_norm_epsilon": get.number("attention.layer_norm_epsilon", 1e-5),
        "no_bias": True,
        "attn_config": {
            "alibi": alibi > 0,
            "alibi_bias_max": alibi or 8,
            "clip_qkv": clip or None,
            "kv_n_heads": get.size("attention.head_count_kv", heads),
        },
    }


_FIELDS: dict[str, Callable[[GgufFile, _Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "olmoe": _olmoe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "bloom": _bloom,
    "mpt": _mpt,
}

ARCHITECTURES = tuple(_FIELDS)
"""Supported values of ``general.architecture``."""


def architecture_of(file: GgufFile) -> str:
    """Return the architecture of a file.

    Raises:
        ModelLoadError: the architecture is not known, or the file is one of several parts.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _FIELDS:
        raise ModelLoadError(
            f"{file.path}: architecture {arch!r:.60} is not known; known in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ModelLoadError(
            f"{file.path}: is one of {parts!r:.20} parts; join them into one file (llama-gguf-split --merge)"
        )
    return arch


def gguf_fields(file: GgufFile) -> dict[str, Any]:
    """Reconstruct the fields of the model's ``config.json`` from metadata and tensors.

    Raises:
        ModelLoadError: the architecture is unknown, or metadata are missing or invalid.
    """
    arch = architecture_of(file)
    get = _Metadata(file, arch)
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelLoadError(f"{file.path}: tensor 'token_embd.weight' is missing or not a matrix")
    vocab_size = embed.shape[0]
    ends = end_ids(file, vocab_size)
    return _FIELDS[arch](file, get) | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": get.token_id("bos_token_id", vocab_size),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": get.token_id("padding_token_id", vocab_size),
    }


__all__ = ["ARCHITECTURES", "architecture_of", "end_ids", "gguf_fields"]
