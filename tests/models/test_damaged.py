"""Damaged and hostile model files beyond single safetensors files (test_loader.py): each is refused with its reason.

Every case is one line that names the file, and the tensor or key where there is one.
"""

import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import load_model, resolve_model
from apt_jax.models.loading.convert import convert_model
from apt_jax.models.loading.gguf.model import open_gguf
from apt_jax.text.chat import load_chat_template
from apt_jax.text.tokenizer import load_tokenizer
from apt_jax.utils.json_memory import MAX_JSON_BYTES, check_json_memory
from tests.support import hostile_files
from tests.support.gguf_models import assemble, entry, hf_tensors, tensor, text, write_gguf
from tests.support.opt_checkpoint import TINY, random_tensors, safetensors_bytes, write_model

needs_linux = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures memory by /proc")


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ModelLoadError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 700
    return message


# --- GGUF ----------------------------------------------------------------------------------------------------------

_UINT32, _STRING, _ARRAY = 4, 8, 9
_F32, _Q4_0, _Q4_K, _Q6_K = 0, 2, 12, 14
_ARCH = entry("general.architecture", _STRING, text("llama"))
_ONE = tensor("a", (8,), _F32, 0)
_32 = bytes(32)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


GGUF_DAMAGE = {
    "empty": (b"", "is not a GGUF file (0 bytes)"),
    "short": (b"GGUF\x03\0\0\0", "is not a GGUF file (8 bytes)"),
    "wrong magic": (assemble(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (assemble(version=1), "GGUF version 1"),
    "version of the future": (assemble(version=77), "GGUF version 77"),
    "big-endian": (assemble(version=3 << 24), "big-endian"),
    "huge number of tensors": (assemble(num_tensors=2**63), f"claims {2**63} tensors"),
    "huge number of entries": (assemble(num_entries=2**40), f"{2**40} metadata entries"),
    "more entries than there are": (assemble([_ARCH], num_entries=3, pad=False), "cut off at"),
    "more tensors than there are": (assemble([_ARCH], [_ONE], num_tensors=9, pad=False), "cut off at"),
    "huge key": (assemble([_u64(2**62) + b"abc"]), f"a metadata key claims {2**62} bytes"),
    "huge string": (assemble([entry("k", _STRING, _u64(2**50) + b"x")]), "metadata k claims"),
    "huge array of numbers": (assemble([entry("k", _ARRAY, _u32(_UINT32) + _u64(2**60))]), f"metadata k claims {2**60} values"),
    "array longer than the file": (assemble([entry("k", _ARRAY, _u32(_UINT32) + _u64(10**6))]), "cut off at metadata k"),
    "array of strings longer than the file": (assemble([entry("k", _ARRAY, _u32(_STRING) + _u64(10**6))]), "cut off at metadata k"),
    "nested array": (assemble([entry("k", _ARRAY, _u32(_ARRAY) + _u64(1))]), "metadata k is an array of the unknown type 9"),
    "unknown type of value": (assemble([entry("k", 99, b"")]), "metadata k has the unknown type 99"),
    "key that is not UTF-8": (assemble([entry(b"\xff\xfe", _UINT32, _u32(1))]), "a metadata key is not UTF-8"),
    "string that is not UTF-8": (assemble([entry("k", _STRING, text(b"\xc3("))]), "metadata k is not UTF-8"),
    "key twice": (assemble([_ARCH, _ARCH]), "metadata general.architecture occurs twice"),
    "alignment of zero": (assemble([entry("general.alignment", _UINT32, _u32(0))]), "general.alignment=0 must be a power of two"),
    "alignment that is no power of two": (assemble([entry("general.alignment", _UINT32, _u32(48))]), "must be a power of two"),
    "alignment that is a text": (assemble([entry("general.alignment", _STRING, text("32"))]), "must be a power of two"),
    "tensor twice": (assemble([_ARCH], [_ONE, _ONE], _32), "tensor 'a' occurs twice"),
    "tensor name that is not UTF-8": (assemble([_ARCH], [tensor(b"\xff", (8,), _F32, 0)], _32), "a tensor's name is not UTF-8"),
    "no dimensions": (assemble([_ARCH], [tensor("a", (), _F32, 0)], _32), "tensor 'a' has 0 dimensions"),
    "many dimensions": (assemble([_ARCH], [tensor("a", (1,) * 9, _F32, 0)], _32), "tensor 'a' has 9 dimensions"),
    "a size of zero": (assemble([_ARCH], [tensor("a", (8, 0), _F32, 0)], _32), "impossible sizes [8, 0]"),
    "sizes whose product overflows": (assemble([_ARCH], [tensor("a", (2**33, 2**33), _F32, 0)], _32), "impossible sizes"),
    "unknown quantisation": (assemble([_ARCH], [tensor("a", (32,), 250, 0)], _32), "tensor 'a' has the unknown quantisation type 250"),
    "rows that blocks do not fill": (assemble([_ARCH], [tensor("a", (33,), _Q4_0, 0)], bytes(64)), "rows of 33, which Q4_0 cannot hold"),
    "rows that blocks of K-quants do not fill": (assemble([_ARCH], [tensor("blk.0.ffn_up.weight", (576,), _Q4_K, 0)], bytes(512)), "tensor 'blk.0.ffn_up.weight' has rows of 576, which Q4_K cannot hold in blocks of 256"),
    "a block that is cut in the middle": (assemble([_ARCH], [tensor("a", (512,), _Q6_K, 0)], bytes(419)), "tensor 'a' ends at byte"),
    "offset beyond the file": (assemble([_ARCH], [tensor("a", (8,), _F32, 2**40)], _32), "tensor 'a' ends at byte"),
    "offset that overflows": (assemble([_ARCH], [tensor("a", (8,), _F32, 2**64 - 32)], _32), "tensor 'a' ends at byte"),
    "offset that is not aligned": (assemble([_ARCH], [tensor("a", (4,), _F32, 8)], _32), "does not begin at a multiple of 32"),
    "tensors that overlap": (assemble([_ARCH], [tensor("a", (16,), _F32, 0), tensor("b", (8,), _F32, 32)], bytes(64)), "'b' overlaps with 'a'"),
    "data cut off": (assemble([_ARCH], [_ONE], bytes(31)), "it is cut off"),
    "no architecture": (assemble(), "architecture None is not known"),
    "unknown architecture": (assemble([entry("general.architecture", _STRING, text("mamba"))]), "architecture 'mamba' is not known; known in GGUF files: llama"),
    "architecture that is a number": (assemble([entry("general.architecture", _UINT32, _u32(1))]), "architecture 1 is not known"),
    "no embeddings": (assemble([_ARCH], [_ONE], _32), "tensor 'token_embd.weight' is missing"),
    "no hyperparameters": (assemble([_ARCH], [tensor("token_embd.weight", (4, 2), _F32, 0)], _32), "metadata llama.embedding_length is missing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GGUF_DAMAGE)
def test_a_damaged_gguf_file_is_refused_in_one_line_that_names_it(tmp_path, kind):
    content, says = GGUF_DAMAGE[kind]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    message = refusal(lambda: resolve_model(str(path)))
    assert says in message
    assert str(path) in message


def test_hostile_counts_take_no_memory(tmp_path):
    hostile = [content for kind, (content, _) in GGUF_DAMAGE.items() if "huge" in kind or "longer" in kind]
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    for content in hostile:
        path.write_bytes(content)
        refusal(lambda: resolve_model(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


_CHANGES: dict[str, tuple[Callable[..., object], str]] = {
    "heads of zero": (lambda w: w.add_uint32("llama.attention.head_count", 0), "head_count=0 must be a positive integer"),
    "heads as text": (lambda w: w.add_string("llama.attention.head_count", "4"), "head_count='4' must be a positive"),
    "heads that differ by layer": (lambda w: w.add_array("llama.attention.head_count_kv", [2, 4]), "the same in all layers"),
    "epsilon that is not finite": (lambda w: w.add_float32("llama.attention.layer_norm_rms_epsilon", float("nan")), "must be a finite number"),
    "unknown scaling": (lambda w: w.add_string("llama.rope.scaling.type", "magic"), "metadata llama.rope.scaling.factor is missing"),
    "a tensor without a place": (lambda w: w.add_tensor("blk.0.strange.weight", np.zeros(4, np.float32)), "'blk.0.strange.weight' does not belong"),
    "a tensor of no layer": (lambda w: w.add_tensor("blk.x.attn_q.weight", np.zeros(4, np.float32)), "'blk.x.attn_q.weight' does not belong"),
}  # fmt: skip


@pytest.mark.parametrize("kind", _CHANGES)
def test_gguf_metadata_that_contradict_a_model_are_refused(tmp_path, kind):
    change, says = _CHANGES[kind]
    write_gguf(tmp_path / "m.gguf", "llama", hf_tensors("llama"), extra=change)  # overwrites
    message = refusal(lambda: open_gguf(tmp_path / "m.gguf"))
    assert says in message
    assert "m.gguf" in message


def test_mutated_gguf_files_open_or_are_refused(tmp_path):
    """400 mutations of the header: a typed error in one line, or a file that can be read to the end."""
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", hf_tensors("llama"))
    good = path.read_bytes()
    rng = random.Random(0)
    refused, messages = 0, []
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 6))):
            at = rng.randrange(min(2600, len(data)) if rng.random() < 0.9 else len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 8] = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
            elif kind == 2:
                del data[at : at + rng.randrange(1, 20)]
            else:
                del data[max(at, 24) :]
            data = data or bytearray(b"\0")
        path.write_bytes(data)
        try:
            checkpoint, _ = open_gguf(path)
        except ModelLoadError as error:
            refused += 1
            messages.append(str(error))
            continue
        try:
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except ModelLoadError:
            refused += 1
        finally:
            checkpoint.close()
    assert refused > 250
    assert all(message.isprintable() for message in messages)


def test_F10_a_gguf_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", hf_tensors("llama"))
    checkpoint, _ = open_gguf(path)
    path.write_bytes(path.read_bytes()[:3000])
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].start)
    message = refusal(lambda: checkpoint.read(last))
    checkpoint.close()
    assert "was truncated" in message


# --- Orbax ---------------------------------------------------------------------------------------------------------


def _orbax(tmp_path: Path) -> Path:
    pytest.importorskip("orbax.checkpoint")
    write_model(tmp_path / "source", TINY, random_tensors(TINY))
    convert_model(str(tmp_path / "source"), tmp_path / "m", use_tqdm=False)
    return tmp_path / "m"


def _edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        manifest = json.loads((path / "orbax.json").read_text())
        change(manifest)
        (path / "orbax.json").write_text(json.dumps(manifest))

    return edit


def _first(manifest: dict) -> dict:
    return next(iter(manifest["groups"]["00000"].values()))


def _link_out(path: Path) -> None:
    (path / "weights" / "00000").rename(path.parent / "elsewhere")
    (path / "weights" / "00000").symlink_to(path.parent / "elsewhere")


ORBAX_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest that is not JSON": (lambda p: (p / "orbax.json").write_text("{"), "not valid JSON"),
    "manifest of something else": (_edit(lambda m: m.update(format="x")), "is not a manifest of version 1"),
    "manifest of another version": (_edit(lambda m: m.update(version=2)), "is not a manifest of version 1"),
    "groups that are a list": (_edit(lambda m: m.update(groups=[])), "groups must map"),
    "group name with a path": (_edit(lambda m: m["groups"].update({"../x": {}})), "group '../x' is missing"),
    "group that is absent": (_edit(lambda m: m["groups"].update({"00009": {}})), "group '00009' is missing"),
    "group that is a link": (_link_out, "is a link out of the directory"),
    "impossible dtype": (_edit(lambda m: _first(m).update(dtype="I7")), "has an impossible dtype or shape"),
    "impossible shape": (_edit(lambda m: _first(m).update(shape=[2**40, 2**40])), "has an impossible dtype or shape"),
    "other shape than stored": (_edit(lambda m: _first(m).update(dtype="F16")), "not as orbax.json says"),
    "tensor left out": (_edit(lambda m: m["groups"]["00000"].popitem()), "1 missing"),
    "tensor that is not stored": (_edit(lambda m: m["groups"]["00000"].update({"x": {"dtype": "F32", "shape": [1]}})), "1 unexpected (x)"),
    "files that are gone": (lambda p: [f.unlink() for f in (p / "weights" / "00000").rglob("*") if f.is_file()], "cannot be restored"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ORBAX_DAMAGE)
def test_a_damaged_orbax_directory_is_refused(tmp_path, kind):
    path = _orbax(tmp_path)
    damage, says = ORBAX_DAMAGE[kind]
    damage(path)
    assert says in refusal(lambda: load_model(EngineConfig(model=str(path))))


# --- configuration against weights ---------------------------------------------------------------------------------

CONTRADICTIONS = {
    "fewer layers than stored": ({"num_hidden_layers": 1}, "unexpected"),
    "more layers than stored": ({"num_hidden_layers": 3}, "missing"),
    "another width": ({"hidden_size": 32}, "misshapen"),
    "another vocabulary": ({"vocab_size": 49}, "misshapen"),
    "heads that do not divide the width": ({"num_attention_heads": 5}, "must be a multiple of"),
    "a million layers": ({"num_hidden_layers": 10**6}, "[1, 1024]"),
    "a vocabulary of 2^31": ({"vocab_size": 2**31}, "vocab_size"),
    "negative size": ({"ffn_dim": -16}, "ffn_dim=-16"),
    "size as a float": ({"hidden_size": 16.0}, "hidden_size=16.0"),
    "quantised by another tool": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "negative end token": ({"eos_token_id": -5}, "eos_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_configuration_that_contradicts_the_weights_is_refused(tmp_path, kind):
    change, says = CONTRADICTIONS[kind]
    write_model(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "config.json").write_text(json.dumps(TINY | change))
    assert says in refusal(lambda: load_model(EngineConfig(model=str(tmp_path))))


# --- tokenizers and templates --------------------------------------------------------------------------------------


def _gpt2_files(path: Path, **changes: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>", "he"])}
    files = {"vocab.json": json.dumps(vocab), "merges.txt": "#version: 0.2\nh e\n"} | changes
    for name, content in files.items():
        (path / name.replace("_", ".")).write_text(content, encoding="utf-8", errors="surrogateescape")


def test_a_vocabulary_and_merges_are_a_tokenizer(tmp_path):
    _gpt2_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hey he")] == [
        "he",
        "y",
        "Ġ",
        "he",
    ]
    assert tokenizer.special_ids == {256}
    assert tokenizer.is_byte_level
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True})
    )
    assert load_tokenizer(tmp_path).encode("he") == [256, 257]


TOKENIZER_DAMAGE = {
    "vocabulary that is not JSON": ({"vocab.json": "{"}, "vocab.json: damaged, not JSON"),
    "vocabulary that is a list": ({"vocab.json": "[]"}, "must map tokens to ids"),
    "negative id": ({"vocab.json": '{"a": -1}'}, "must map tokens to ids"),
    "not byte-level": ({"vocab.json": '{"a": 1}'}, "is not a byte-level vocabulary"),
    "merge of three": ({"merges.txt": "h e l"}, "merges.txt: damaged"),
    "merge of unknown tokens": ({"merges.txt": "h zz"}, "does not fit vocab.json"),
}


@pytest.mark.parametrize("kind", TOKENIZER_DAMAGE)
def test_damaged_gpt2_tokenizer_files_are_refused(tmp_path, kind):
    changes, says = TOKENIZER_DAMAGE[kind]
    _gpt2_files(tmp_path, **changes)
    assert says in refusal(lambda: load_tokenizer(tmp_path))


def test_a_sentencepiece_file_alone_says_what_is_needed(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05")
    message = refusal(lambda: load_tokenizer(tmp_path))
    assert "tokenizer.model" in message
    assert "tokenizer.json is needed" in message


def test_F8_a_tokenizer_of_another_model_is_refused(tmp_path):
    backend = Backend(models.BPE(vocab={f"t{i}": i for i in range(200)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert "do not belong together" in refusal(lambda: load_tokenizer(tmp_path, model_vocab_size=99))


def test_F8_a_tokenizer_of_500_MB_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(500 << 20)  # holds nothing on the disk
    tracemalloc.start()
    try:
        message = refusal(lambda: load_tokenizer(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "tokenizer.json" in message
    assert "larger than" in message


TEMPLATE_DAMAGE = {
    "a number": ("tokenizer_config.json", '{"chat_template": 5}', "must be a text or a list"),
    "a list of texts": ("tokenizer_config.json", '{"chat_template": ["x"]}', "must be a text or a list"),
    "not JSON": ("tokenizer_config.json", "{", "not JSON"),
    "not UTF-8": ("chat_template.jinja", b"\xff", "not UTF-8"),
    "2 MiB": ("chat_template.jinja", b"a" * 2**21, "larger than 1 MiB"),
    "a syntax error": ("chat_template.jinja", "{% for %}", "TemplateSyntaxError"),
    "a list of many": ("chat_template.jinja", "{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "a large text": ("chat_template.jinja", "{{ 'a' * 10**9 }}", "MiB of memory"),
    "nested loops": (
        "chat_template.jinja",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "did not finish within 1 s",
    ),
    "attribute tricks": ("chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "recursion": ("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    "an endless output": (
        "chat_template.jinja",
        "{% for i in range(99999) %}" + "a" * 100 + "{% endfor %}",
        "output is longer than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATE_DAMAGE)
def test_F7_a_hostile_chat_template_is_refused_at_load(tmp_path, kind):
    name, content, says = TEMPLATE_DAMAGE[kind]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def load() -> None:
        template = load_chat_template(tmp_path)
        assert template is not None
        try:
            template.validate()
        finally:
            template.close()

    message = refusal(load)
    assert says in message
    assert str(tmp_path) in message


def test_F4_weights_that_hold_nan_are_refused_from_every_format(tmp_path):
    tensors = random_tensors(TINY)
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = np.nan
    write_model(tmp_path / "m", TINY, tensors)
    assert "holds NaN" in refusal(lambda: load_model(EngineConfig(model=str(tmp_path / "m"))))
    assert "holds NaN" in refusal(lambda: convert_model(str(tmp_path / "m"), tmp_path / "n", format="safetensors"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]
    assert safetensors_bytes(tensors)


# --- memory of JSON and of metadata -----------------------------------------------------------------------------------

_VOCABULARIES = ("tokenizer_config", "merges", "fields", "vocab")


@pytest.fixture(scope="module")
def hostile_loads() -> list[dict[str, Any]]:
    """Each kind of file with each kind of contents, below the limit, near it and beyond."""
    small = {"arrays": 700_000, "nested": 400_000, "tensors": 1_200_000}
    large = dict.fromkeys(("arrays", "pairs", "nested", "emoji"), 5_000_000)
    kinds = [kind for kind in hostile_files.KINDS if kind != "gguf"]
    cases = [f"{kind}:{unit}:{size}" for kind in kinds for sizes in (small, large) for unit, size in sizes.items()]
    cases += [f"gguf:{unit}:{size}" for unit in ("texts", "emoji") for size in (6_000_000, 30_000_000)]
    command = [sys.executable, "-m", "tests.support.hostile_files", *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_linux
def test_hostile_json_takes_no_more_memory_than_promised(hostile_loads):
    """docs/design/failure_model.md has the promises."""
    assert len(hostile_loads) == 53
    for load in hostile_loads:
        times, beside = (16, 64 << 20) if load["kind"] in _VOCABULARIES else (2, 48 << 20)
        assert load["memory"] <= times * load["files"] + beside, load


@needs_linux
@pytest.mark.parametrize("unit", ["arrays", "pairs", "nested"])
def test_json_of_empty_values_is_refused_before_it_is_parsed(hostile_loads, unit):
    found = [load for load in hostile_loads if load["unit"] == unit and load["files"] > 4_000_000]
    assert len(found) == 7
    for load in found:
        assert re.search(r"parsing it would take \d+ MiB of memory .* more than the \d+ MiB", load["error"]), load
        assert load["memory"] <= 3 * load["files"] + (4 << 20), load


def _index(entries: int) -> dict[str, Any]:
    name = "model.layers.{}.mlp.experts.{}.down_proj.weight_scale_inv"
    files = {name.format(i // 384, i % 384): f"model-{i // 1000:05}-of-00163.safetensors" for i in range(entries)}
    return {"metadata": {"total_size": 1}, "weight_map": files}


def _tokens(entries: int) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"added_tokens_decoder": {str(i): {"content": f"<|s_{i}|>", **flags} for i in range(entries)}}


def _vocabulary(tokens: int, merges: int) -> dict[str, Any]:
    return {"vocab": {f"tok{i:x}": i for i in range(tokens)}, "merges": [[f"a{i:x}", "bcd"] for i in range(merges)]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("fields", "is_vocabulary"),
    [
        (_index(210_000), False),
        ({"id2label": {str(i): f"label {i}" for i in range(22_000)}, "label2id": dict.fromkeys(map(str, range(22_000)), 1)}, False),
        (_tokens(66_000), True),
        (_vocabulary(263_000, 515_000), True),
    ],
    ids=["index", "labels", "added tokens", "vocabulary"],
)  # fmt: skip
def test_json_of_the_size_of_the_largest_models_is_not_refused(fields, is_vocabulary, indent):
    data = json.dumps(fields, indent=indent, separators=(",", ":")).encode()
    assert len(data) < MAX_JSON_BYTES or is_vocabulary
    check_json_memory(data, "x", allowance=len(data), is_vocabulary=is_vocabulary)


def test_the_header_of_many_tensors_may_take_twice_the_memory_of_their_data():
    entry = {"dtype": "F8_E4M3", "shape": [2048, 7168], "data_offsets": [123456789012, 123456789012]}
    data = json.dumps({f"model.layers.{i}.mlp.experts.1.up_proj.weight": entry for i in range(100_000)}).encode()
    check_json_memory(data, "x", allowance=2 * 100_000 * 2048 * 7168)
    with pytest.raises(ModelLoadError, match="200000 arrays, 100001 objects"):
        check_json_memory(data, "x")
