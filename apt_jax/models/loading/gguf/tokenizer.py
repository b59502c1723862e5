"""The tokenizer in a GGUF file, as a tokenizer of the `tokenizers` library.

A GGUF file holds the tokens and their merges or scores, but only the name of the rule that splits text into words
(``tokenizer.ggml.pre``); `_SPLITS` has the regular expressions for each name. Two kinds are supported: byte-level BPE
(``gpt2``) and SentencePiece's BPE with byte fallback (``llama``). Other kinds require `--tokenizer` with a directory.
"""

import json
import logging
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.models.loading.gguf.file import GgufFile

_logger = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SPACE_AT_END = r"(?<!\s)\s++$"
r"""Equivalent of the published `\s+$` that does not scan a run of spaces again from each of its characters."""
_GPT2 = "gpt2"
"""Name of GPT-2's pattern, which is built into the library's byte-level pre-tokenizer."""
_DIGITS = "digits"
"""Name of the step that splits off every digit."""

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("a.x-4.0", "gigachat", "granite-docling", "mellum", "trillion", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("exaone", "mellum2"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("midm-2.0", "falcon-h1", "lfm2", "jina-v5-nano", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_LLAMA3.replace("{1,3}", ""),)),
    **dict.fromkeys(("kormo", "f2llmv2", "megrez", "hunyuan", "solar-open"), (_LLAMA3.replace("{1,3}", ""),)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")),
    "seed-coder": (_SEED_CODER,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGITS),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", _SPACE_AT_END, _HAN, _DIGITS,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, _DIGITS),
}  # fmt: skip
"""Steps that split text under each rule, as in the published tokenizers, keyed by rule name: regular expressions,
`_GPT2` or `_DIGITS`. Each step splits the pieces left by the previous step."""
_IGNORE_MERGES = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken", "minicpm5",
)  # fmt: skip
"""Rules under which a word that is a token is never split, whatever the merges."""
_NFC = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "mpt", "olmo")
_ADD_BOS = _IGNORE_MERGES[:-1]
"""Rules that put the BOS token at the start of a text unless the file specifies otherwise."""


class _Vocabulary:
    """Checked access to the metadata under ``tokenizer.ggml``."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise self.refuse("tokens is empty")
        types = file.metadata.get("tokenizer.ggml.token_type")
        if types is None:
            types = np.full(len(self.tokens), _NORMAL)
        if not isinstance(types, np.ndarray) or types.shape != (len(self.tokens),):
            raise self.refuse("token_type does not have one number per token")
        self.types = types.tolist()
        # Padding of a vocabulary to a round size may repeat a name; its first occurrence counts.
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)

    def refuse(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: metadata tokenizer.ggml.{problem}")

    def get(self, name: str) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{name}")

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.refuse(f"{name} is missing or not a list of strings")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{name}={value!r:.40} must be true or false")
        return default if value is None else value

    def special(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def scores(self) -> list[float]:
        scores = self.get("scores")
        if not isinstance(scores, np.ndarray) or scores.shape != (len(self.tokens),):
            raise self.refuse("scores does not have one number per token")
        if not np.isfinite(scores).all():
            raise self.refuse("scores holds NaN or infinite values")
        return scores.tolist()

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        for index, text in enumerate(self.strings("merges")):
            left, space, right = text.partition(" ")
            if not space or not all(p in self.ids for p in (left, right, left + right)):
                raise self.refuse(f"merges[{index}]={text!r:.60} does not join two tokens into a third")
            merges.append((left, right))
        return merges


def _pre_tokenizer(splits: tuple[str, ...], prefix: bool) -> Any:
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == _DIGITS
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
        for split in splits
        if split != _GPT2
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=_GPT2 in splits)
    return pre_tokenizers.Sequence([*steps, level]) if steps else level  # pyright: ignore[reportArgumentType, reportCallIssue]


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pre = vocabulary.get("pre")
    if pre is None:
        _logger.warning("the GGUF file does not name its rule for splitting text; GPT-2's rule is assumed")
        pre = "gpt-2"
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise vocabulary.refuse(
            f"pre={pre!r:.40} is not known (known: {', '.join(_SPLITS)}); give the tokenizer's directory (--tokenizer)"
        )
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=vocabulary.merges(),
        ignore_merges=pre in _IGNORE_MERGES,
    )
    backend = tokenizers.Tokenizer(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(_SPLITS[pre], vocabulary.flag("add_space_prefix", False))
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return merges equivalent to SentencePiece's scores: all splits of all pieces, best-scoring piece first.
    SentencePiece always joins the two neighbours whose union has the best score."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    merges = []
    for piece, index in ids.items():
        if vocabulary.types[index] not in (_NORMAL, _USER_DEFINED) or len(piece) > 512:
            continue
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in merges]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    prefix = vocabulary.flag("add_space_prefix", True)
    if vocabulary.get("precompiled_charsmap") is not None or vocabulary.flag("remove_extra_whitespaces", False):
        raise vocabulary.refuse(
            "model: a SentencePiece normaliser is not supported; give the tokenizer's directory (--tokenizer)"
        )
    unknown = vocabulary.special("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_of_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if prefix else steps  # pyright: ignore[reportArgumentType]
    )
    return backend


def gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer described by the metadata.

    Raises:
        ModelLoadError: the kind of tokenizer is unknown, or arrays contradict each other.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"{file.path}: metadata tokenizer.ggml.model={model!r:.40} is not known (known: gpt2, llama); give the "
            "tokenizer's directory (--tokenizer)"
        )
    vocabulary = _Vocabulary(file)
    try:
        backend = _byte_level(vocabulary) if model == "gpt2" else _sentencepiece(vocabulary)
        _add_tokens(backend, vocabulary)
        _add_template(backend, vocabulary, model == "llama" or vocabulary.get("pre") in _ADD_BOS)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises plain Exception
        reason = one_line(str(error))[:120]
        raise vocabulary.refuse(f"* does not describe a valid tokenizer ({reason})") from None
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    special = {vocabulary.special(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    added = []
    for token, index in vocabulary.ids.items():
        kind = vocabulary.types[index]
        if not token:
            continue
        is_special = kind in (_CONTROL, _UNKNOWN) or (index in special and kind != _BYTE)
        if is_special or kind == _USER_DEFINED:
            added.append(tokenizers.AddedToken(token, special=is_special, normalized=False))
    backend.add_tokens(added)


def _add_template(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, bos_default: bool) -> None:
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    first = bos if vocabulary.flag("add_bos_token", bos_default) else None
    last = eos if vocabulary.flag("add_eos_token", False) else None
    ends = [(vocabulary.tokens[i], i) for i in (first, last) if i is not None]
    if not ends:
        return
    template = ["$A"]
    if first is not None:
        template.insert(0, vocabulary.tokens[first])
    if last is not None:
        template.append(vocabulary.tokens[last])
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(dict(ends).items()))


def gguf_chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates in the metadata, keyed by name; the unnamed template, if present, is called `default`.

    Raises:
        ModelLoadError: a template is not a string.
    """
    key = "tokenizer.chat_template"
    named = {"default": file.metadata[key]} if key in file.metadata else {}
    named |= {k.removeprefix(f"{key}."): value for k, value in file.metadata.items() if k.startswith(f"{key}.")}
    for name, template in named.items():
        if not isinstance(template, str):
            raise ModelLoadError(
                f"{file.path}: metadata {key}{'' if name == 'default' else f'.{name}'} is not a string"
            )
    return named


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """Return the special tokens, keyed by their names in tokenizer_config.json (``bos_token``, ``eos_token`` and so
    on)."""
    vocabulary = _Vocabulary(file)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {f"{short}_token": vocabulary.special(name) for name, short in names.items()}
    return {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}


def gguf_tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return the contents of the tokenizer files that a model directory needs, keyed by file name."""
    config: dict[str, Any] = dict(gguf_special_tokens(file))
    templates = gguf_chat_templates(file)
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    return {
        "tokenizer.json": gguf_tokenizer(file).to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


__all__ = ["gguf_chat_templates", "gguf_special_tokens", "gguf_tokenizer", "gguf_tokenizer_files"]
