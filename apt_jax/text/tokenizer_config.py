"""The files next to a tokenizer.json that change its token ids: tokenizer_config.json, special_tokens_map.json and
added_tokens.json.

They may declare tokens that tokenizer.json lacks, which get the next ids, and ask for a space before the first word.
Their meaning depends on the class of the tokenizer. Class and tokens follow transformers 5: `_class_of` chooses the
class like its `AutoTokenizer`, and `_declared_tokens` returns tokens in the order in which its classes add them. One
difference: text is always split as tokenizer.json specifies, although some classes of transformers replace this rule.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.utils.json_memory import MAX_JSON_BYTES, check_json_memory

_SEQUENCES = ("normalizers", "pretokenizers", "decoders")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")

_END_OF_TEXT = "<|endoftext|>"
_BYTE_LEVEL = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
        "pad_token": "<|padding|>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SENTENCEPIECE = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": {
        **_LLAMA,
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
_DEFAULTS = {**_BYTE_LEVEL, **_SENTENCEPIECE}
"""Special tokens of each class, used if tokenizer_config.json does not name them."""

_CLASS_OF_MODEL = {
    **dict.fromkeys(("gpt2", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    "code_llama": "CodeLlamaTokenizer",
}
"""Tokenizer class for each ``model_type``, used if no class is declared."""
_NO_CLASS = ("mistral", "ministral", "phi3", "olmo2")
"""Values of ``model_type`` whose tokenizer.json is not adapted to a class, whatever class is declared."""


def json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelLoadError: the file is damaged or too large.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file}: larger than {MAX_JSON_BYTES >> 20} MiB")
        check_json_memory(text, str(file), is_vocabulary=True)
        fields = json.loads(text.decode("utf-8"))
    except ModelLoadError:
        raise
    except (OSError, ValueError, RecursionError):
        raise ModelLoadError(f"{file}: damaged, not JSON") from None
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{file}: damaged, not a JSON object")
    return fields


def _optional(file: Path) -> dict[str, Any]:
    return json_object(file) if os.path.isfile(file) else {}


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the merged contents of tokenizer_config.json and special_tokens_map.json. The first takes precedence if it
    has ``added_tokens_decoder``, otherwise the second, as in older files.

    Raises:
        ModelLoadError: a file is damaged.
    """
    config = _optional(directory / "tokenizer_config.json")
    older = _optional(directory / "special_tokens_map.json")
    return {**older, **config} if "added_tokens_decoder" in config else {**config, **older}


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a special token such as ``bos_token``, which may be a string or an object."""
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _class_of(directory: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> str | None:
    """Return the class that transformers' `AutoTokenizer` uses, or None if that class does not change tokenization."""
    model = _optional(directory / "config.json")
    model_type, declared = model.get("model_type"), config.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(model_type, str | None) or not isinstance(declared, str | None) or model_type in _NO_CLASS:
        return None
    if declared is None or model_type == "qwen2":  # many models of this type declare a wrong class
        declared = _CLASS_OF_MODEL.get(model_type or "")
    name = (declared or "").removesuffix("Fast")
    if name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps(_steps(backend)):  # Llama 3
        return None
    return name if name in _DEFAULTS else None


def _steps(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the steps around the vocabulary, as JSON."""
    steps = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer, "decoder": backend.decoder}
    return {name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()}


def _token(value: Any, where: str, *, special: bool = False) -> tokenizers.AddedToken:
    """Return an added token, given as its text or as an object that describes it."""
    fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or not isinstance(fields.get("content"), str):
        raise ModelLoadError(f"{where}={value!r:.60} must be a token: a string, or an object with a content field")
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelLoadError(f"{where}={value!r:.60} must have true or false for {', '.join(flags)}")
    try:
        return tokenizers.AddedToken(fields["content"], **{**flags, **({"special": True} if special else {})})
    except UnicodeEncodeError:
        raise ModelLoadError(f"{where}={value!r:.60} is not valid Unicode") from None


def _declared_tokens(
    directory: Path, config: Mapping[str, Any], name: str | None, present: Mapping[str, tokenizers.AddedToken]
) -> list[tokenizers.AddedToken]:
    """Return the tokens that the files declare, in the order in which new tokens get ids.

    Args:
        directory: directory of the files.
        config: contents of tokenizer_config.json.
        name: class from `_class_of`.
        present: added tokens of tokenizer.json, keyed by text.
    """
    file = directory / "tokenizer_config.json"
    is_old = "added_tokens_decoder" not in config
    older = _optional(directory / "special_tokens_map.json") if is_old else {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = older.get("extra_special_tokens") or (not extra and older.get("additional_special_tokens")) or []
    if not all(isinstance(tokens, list | Mapping) for tokens in (extra, more)):
        raise ModelLoadError(f"{directory}: extra_special_tokens must be a list or an object of tokens")
    named: dict[str, Any] = {**dict.fromkeys(_NAMED), **_DEFAULTS.get(name or "", {})}
    for fields in (config, older):
        described = {k: v for k, v in fields.items() if k.endswith("_token") and isinstance(v, str | Mapping)}
        named |= described | {k: None for k in _NAMED if k in fields and fields[k] is None}
    for tokens in (extra, more):
        named |= tokens if isinstance(tokens, Mapping) else {}
    extra, more = (
        [_token(t, f"{file}: extra_special_tokens", special=True) for t in ts if isinstance(ts, list)]
        for ts in (extra, more)
    )
    by_name = {k: _token(v, f"{file}: {k}", special=True) for k, v in named.items() if v is not None}
    usual = {token.content for token in [*(by_name[k] for k in _NAMED if k in by_name), *extra]}
    declared = _declared_by_id(directory, config, usual)
    if is_old:
        declared = [present.get(token.content, token) for token in declared]
    found = {token.content for token in declared}
    specials = [*by_name.values(), *extra, *more]
    for token in specials:
        if token.content not in found:
            found.add(token.content)
            declared.append(present.get(token.content, token))
    texts = {token.content for token in specials}
    for token in declared:
        token.special = token.special or token.content in texts
    return declared


def _declared_by_id(directory: Path, config: Mapping[str, Any], specials: set[str]) -> list[tokenizers.AddedToken]:
    """Return the tokens that are declared with their ids, ordered by id."""
    file = directory / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        file = directory / "added_tokens.json"
        added = _optional(file)
        if not all(type(i) is int for i in added.values()):
            raise ModelLoadError(f"{file}: damaged, must map tokens to ids")
        flags = {token: {"special": token in specials, "normalized": token not in specials} for token in added}
        return [
            _token({"content": token, **flags[token]}, str(file)) for token in sorted(added, key=lambda t: added[t])
        ]
    if not isinstance(decoder, Mapping) or not all(key.isascii() and key.isdigit() for key in decoder):
        raise ModelLoadError(f"{file}: added_tokens_decoder must map ids to tokens")
    return [
        _token(decoder[key], f"{file}: added_tokens_decoder.{key:.20}")
        for key in sorted(decoder, key=lambda k: (len(k.lstrip("0")), k.lstrip("0")))
    ]


def apply_config(directory: Path, backend: tokenizers.Tokenizer, default_class: str | None = None) -> None:
    """Apply the files next to a tokenizer.json to its tokenizer.

    Args:
        directory: directory of the files.
        backend: tokenizer loaded from tokenizer.json.
        default_class: class if neither a class nor a model type is declared.

    Raises:
        ModelLoadError: a file is damaged, or a field is malformed.
    """
    config = _optional(directory / "tokenizer_config.json")
    name = _class_of(directory, config, backend) or default_class
    prefix = config.get("add_prefix_space")
    if not isinstance(prefix, bool | None):
        file = directory / "tokenizer_config.json"
        raise ModelLoadError(f"{file}: add_prefix_space={prefix!r:.40} must be true or false")
    if name in _BYTE_LEVEL:
        _set_byte_level_prefix(backend, bool(prefix))
    elif name in ("LlamaTokenizer", "CodeLlamaTokenizer") and prefix is not None:
        _set_word_prefix(backend, prefix, "always" if config.get("legacy") is True else "first")
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = _declared_tokens(directory, config, name, present)
    try:
        backend.add_tokens(tokens)
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{directory}: its added tokens are damaged ({one_line(str(error)):.100})") from None


def _parts(step: Any) -> list[dict[str, Any]]:
    """Return a step and, if it is a sequence, all steps nested in it."""
    if not isinstance(step, dict):
        return []
    inner = [part for name in _SEQUENCES if name in step for part in step[name]]
    return [step, *(part for one in inner for part in _parts(one))]


def _replace(backend: tokenizers.Tokenizer, name: str, fields: dict[str, Any]) -> None:
    step = getattr(backend, name)
    step.__setstate__(json.dumps(fields).encode())
    setattr(backend, name, step)


def _set_byte_level_prefix(backend: tokenizers.Tokenizer, prefix: bool) -> None:
    fields = _steps(backend)["pre_tokenizer"]
    for part in _parts(fields):
        if part.get("type") == "ByteLevel" and part["add_prefix_space"] != prefix:
            part["add_prefix_space"] = prefix
            _replace(backend, "pre_tokenizer", fields)


def _set_word_prefix(backend: tokenizers.Tokenizer, prefix: bool, scheme: str) -> None:
    """Make a SentencePiece tokenizer put a space before the first word if `prefix` is True, and no space otherwise."""
    steps = _steps(backend)
    words = [part for part in _parts(steps["pre_tokenizer"]) if part.get("type") == "Metaspace"]
    prepends = any(part.get("type") == "Prepend" for part in _parts(steps["normalizer"]))
    has_prefix = prepends or any(part["prepend_scheme"] != "never" for part in words)
    if has_prefix == prefix:
        return
    for part in words:
        part["prepend_scheme"] = scheme if prefix else "never"
    if words:
        _replace(backend, "pre_tokenizer", steps["pre_tokenizer"])
    elif prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if prepends:
        for part in _parts(steps["normalizer"]):
            for inner in part.get("normalizers", []):
                if inner.get("type") == "Prepend":
                    part["normalizers"] = [i for i in part["normalizers"] if i is not inner]
        if steps["normalizer"]["type"] == "Prepend":
            backend.normalizer = None
        else:
            _replace(backend, "normalizer", steps["normalizer"])
    for part in _parts(steps["decoder"]):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = scheme if prefix else "never"
        if part.get("type") == "Sequence":
            rest = [inner for inner in part["decoders"] if inner.get("type") != "Strip"]
            strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            part["decoders"] = [*rest, strip] if prefix else rest
    _replace(backend, "decoder", steps["decoder"])
