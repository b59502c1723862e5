"""The archive of tokenizer files, whatever file the tokenizer came from."""

import io
import json
import zipfile
from typing import Any

import gguf
import pytest
import tokenizers

from apt_jax import LLM
from apt_jax.frontend.components import EngineComponents
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.text.tokenizer import load_tokenizer
from serve.grpc_api.tokenizer_bundle import tokenizer_bundle
from tests.support.gguf_models import hf_tensors, write_gguf
from tests.support.toy_serving import toy_parts

FEW_PROGRAMS: dict[str, Any] = {
    "warm_up": False,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_blocks_override": 16,
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def files_of(parts: EngineComponents) -> dict[str, str]:
    data = tokenizer_bundle(parts)
    assert data is not None
    assert tokenizer_bundle(parts) == data  # equal contents, equal bytes
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def _sentencepiece(writer: gguf.GGUFWriter) -> None:
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁abc"]
    tokens = ["<unk>", "<s>", "</s>", *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 3 + [-1.0 - i for i in range(len(pieces))])
    writer.add_token_types([2, 3, 3, *[1] * len(pieces)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def test_the_tokenizer_of_a_gguf_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", hf_tensors("llama"), extra=_sentencepiece)
    parts = LLM(str(path), **FEW_PROGRAMS).parts
    files = files_of(parts)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    loaded = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert parts.tokenizer is not None
    for text in ("abc a bc", "", "a<s>b"):
        loaded.encode_special_tokens = True
        assert loaded.encode(text).ids == parts.tokenizer.encode(text)
        assert loaded.decode([1, 8, 5]) == parts.tokenizer.decode([1, 8, 5])
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["chat_template"] == TEMPLATE
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert settings["model_max_length"] == 64
    config = json.loads(files["config.json"])
    assert config["model_type"] == "llama"
    assert read_model_config(config)[1] == parts.model_config  # it describes the same model


def test_vocabulary_and_merges_become_one_file(tmp_path):
    tokens = {chr(c): i for i, c in enumerate([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)])}
    vocab = {"<|endoftext|>": len(tokens), "he": len(tokens) + 1, **tokens}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": "evil.py"}, "chat_template": "old"})
    )  # fmt: skip
    parts = toy_parts(tokenizer=load_tokenizer(tmp_path))
    files = files_of(parts)
    loaded = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert loaded.encode("hehe é").ids == parts.tokenizer.encode("hehe é")  # type: ignore[union-attr]
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["eos_token"] == "<|endoftext|>"
    assert "auto_map" not in settings
    assert "chat_template" not in settings  # this engine was started without one


def test_no_tokenizer_no_archive():
    assert tokenizer_bundle(toy_parts(tokenizer=None)) is None


@pytest.mark.parametrize("text", ["Hello, world", "  two\n\nlines 123 "])
def test_a_tokenizer_without_files(text):
    parts = toy_parts()
    loaded = tokenizers.Tokenizer.from_str(files_of(parts)["tokenizer.json"])
    assert loaded.encode(text).ids == parts.tokenizer.encode(text)  # type: ignore[union-attr]
