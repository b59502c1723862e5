"""Files beside a tokenizer.json: tokens that they declare, the space before the first word, and what is malformed.

That ids are those of transformers is tested in the reference environment (`tests/parity/test_tokenizer_config.py`).
"""

import json
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from apt_jax.errors import ModelLoadError
from apt_jax.text.tokenizer import load_tokenizer, tokenizer_config

SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    tokens = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abc"]
    vocab = {t: i for i, t in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def loaded(path, backend: tokenizers.Tokenizer, **files: Any):
    backend.save(str(path / "tokenizer.json"))
    for name, fields in files.items():
        (path / f"{name}.json").write_text(json.dumps(fields))
    return load_tokenizer(path)


def test_declared_tokens_get_the_next_ids_and_are_special(tmp_path):
    config = {"eos_token": "<end>", "extra_special_tokens": ["<a>", "</s>"], "image_token": "<img>"}
    tokenizer = loaded(tmp_path, byte_level(), tokenizer_config=config)
    ids = [tokenizer.special_id(token) for token in ("<end>", "<img>", "<a>")]
    assert ids == [259, 260, 261]
    assert tokenizer.vocab_size == 262
    assert tokenizer.decode(tokenizer.encode("<a>")) == "<a>"  # in a text it stays text
    assert not tokenizer.special_ids & set(tokenizer.encode("<a>"))


def test_tokens_with_ids_are_in_the_order_of_these(tmp_path):
    decoder = {"1000": {"content": "<z>", "special": True}, "999": {"content": "plain", "special": False}}
    tokenizer = loaded(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": decoder})
    assert (tokenizer.backend.token_to_id("plain"), tokenizer.special_id("<z>")) == (259, 260)
    assert tokenizer.encode("plain") == [259]
    assert tokenizer.special_id("plain") is None


def test_older_files_have_the_last_word_where_no_ids_are_declared(tmp_path):
    older = {"eos_token": {"content": "<old>", "lstrip": True}}
    tokenizer = loaded(tmp_path, byte_level(), tokenizer_config={"eos_token": "<new>"}, special_tokens_map=older)
    assert tokenizer.special_id("<old>") == 259
    assert tokenizer.special_id("<new>") is None
    assert tokenizer_config(tmp_path)["eos_token"] == older["eos_token"]
    loaded(tmp_path, byte_level(), tokenizer_config={"eos_token": "<new>", "added_tokens_decoder": {}})
    assert tokenizer_config(tmp_path)["eos_token"] == "<new>"


@pytest.mark.parametrize(
    ("name", "space"), [("GPT2Tokenizer", True), ("PreTrainedTokenizerFast", False), (None, False)]
)
def test_a_space_before_the_first_word_is_an_option_of_the_class(tmp_path, name, space):
    config = {
        "add_prefix_space": True,
        "tokenizer_class": name,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    tokenizer = loaded(tmp_path, byte_level(), tokenizer_config=config)
    assert tokenizer.encode("ab") == byte_level().encode(" ab" if space else "ab").ids


@pytest.mark.parametrize("prefix", [None, True, False])
def test_llamas_space_before_the_first_word_can_be_left_out(tmp_path, prefix):
    config = {"tokenizer_class": "LlamaTokenizer", **({} if prefix is None else {"add_prefix_space": prefix})}
    tokenizer = loaded(tmp_path, sentencepiece(), tokenizer_config=config)
    texts = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("a b")]
    assert texts == [*(["▁"] if prefix is not False else []), "a", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config": {"extra_special_tokens": "<a>"}}, "extra_special_tokens must be a list"),
        ({"tokenizer_config": {"extra_special_tokens": [5]}}, "extra_special_tokens=5 must be a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": "<a>"}}}, "added_tokens_decoder must map ids to tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"5": {"content": 3}}}}, "added_tokens_decoder.5"),
        ({"tokenizer_config": {"eos_token": {"content": "a", "lstrip": 1}}}, "eos_token"),
        ({"tokenizer_config": {"eos_token": "\ud800"}}, "not valid Unicode"),
        ({"tokenizer_config": {"add_prefix_space": "yes"}}, "add_prefix_space='yes' must be true or false"),
        ({"added_tokens": {"<a>": "5"}}, "added_tokens.json: damaged"),
        ({"special_tokens_map": []}, "special_tokens_map.json: damaged"),
    ],
)
def test_malformed_fields_are_one_line(tmp_path, files, says):
    with pytest.raises(ModelLoadError, match=re.escape(says)) as caught:
        loaded(tmp_path, byte_level(), **files)
    assert "\n" not in str(caught.value)
