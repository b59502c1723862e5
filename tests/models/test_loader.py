"""Round trips through model directories, and every way in which one can be wrong."""

import json
import logging
import os
import pickle
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import LoadedModel, load_model, resolve_model
from apt_jax.models.loading import loader
from tests.support.opt_checkpoint import (
    TINY,
    join_header,
    random_tensors,
    safetensors_bytes,
    write_model,
)

_VARIANTS = {
    "plain": TINY,
    "350m": TINY | {"do_layer_norm_before": False, "word_embed_proj_dim": 8},
    "no bias": TINY | {"enable_bias": False},
    "no affine": TINY | {"layer_norm_elementwise_affine": False},
    "no final norm": TINY | {"_remove_final_layer_norm": True},
    "untied": TINY | {"tie_word_embeddings": False},
}


def _load(path: Path, **options) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), **options))


def _refusal(path: Path, **options) -> str:
    with pytest.raises(ModelLoadError) as error:
        _load(path, **options)
    message = str(error.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def _assert_equal(model: LoadedModel, tensors: dict[str, np.ndarray]) -> None:
    """Compare leaf by leaf with the tensors that the files were written from."""
    d, n = model.config.hidden_size, model.config.num_heads
    get = tensors.__getitem__
    np.testing.assert_array_equal(model.params.embed, get("model.decoder.embed_tokens.weight"))
    np.testing.assert_array_equal(model.params.position, get("model.decoder.embed_positions.weight"))
    for i, layer in enumerate(model.params.layers):
        name = f"model.decoder.layers.{i}."
        for leaf, projection in ((layer.wq, "q"), (layer.wk, "k"), (layer.wv, "v")):
            # Row h of head n is row n * H + h of the stored matrix.
            stored = get(f"{name}self_attn.{projection}_proj.weight")
            np.testing.assert_array_equal(leaf[1, 2], stored[d // n + 2])
            np.testing.assert_array_equal(np.asarray(leaf).reshape(d, d), stored)
        stored = get(f"{name}self_attn.out_proj.weight")
        np.testing.assert_array_equal(layer.wo[:, 1, 2], stored[:, d // n + 2])
        np.testing.assert_array_equal(layer.w_up, get(f"{name}fc1.weight"))
        np.testing.assert_array_equal(layer.w_down, get(f"{name}fc2.weight"))
        if layer.bq is not None:
            np.testing.assert_array_equal(layer.bq[1], get(f"{name}self_attn.q_proj.bias")[4:8])
            np.testing.assert_array_equal(layer.bo, get(f"{name}self_attn.out_proj.bias"))
            np.testing.assert_array_equal(layer.b_up, get(f"{name}fc1.bias"))
            np.testing.assert_array_equal(layer.b_down, get(f"{name}fc2.bias"))
        assert layer.attn_norm is not None
        assert layer.ffn_norm is not None
        if f"{name}final_layer_norm.weight" in tensors:
            np.testing.assert_array_equal(layer.attn_norm.scale, get(f"{name}self_attn_layer_norm.weight"))
            np.testing.assert_array_equal(layer.ffn_norm.bias, get(f"{name}final_layer_norm.bias"))
        else:
            np.testing.assert_array_equal(layer.attn_norm.scale, np.ones(d))
            np.testing.assert_array_equal(layer.ffn_norm.bias, np.zeros(d))
    if model.params.head is not None:
        np.testing.assert_array_equal(model.params.head, get("lm_head.weight"))
    if model.params.project_in is not None:
        np.testing.assert_array_equal(model.params.project_in, get("model.decoder.project_in.weight"))
        np.testing.assert_array_equal(model.params.project_out, get("model.decoder.project_out.weight"))


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_what_was_written_is_loaded(tmp_path, variant, shards):
    fields = _VARIANTS[variant]
    tensors = random_tensors(fields)
    write_model(tmp_path, fields, tensors, shards)
    model = _load(tmp_path)
    _assert_equal(model, tensors)
    assert model.path == tmp_path
    assert model.eos_token_ids == (2,)


@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder.", "model.", ""])
def test_names_are_accepted_with_any_published_prefix(tmp_path, prefix):
    tensors = random_tensors(TINY)
    renamed = {prefix + name.removeprefix("model.decoder."): v for name, v in tensors.items()}
    write_model(tmp_path, TINY, renamed)
    _assert_equal(_load(tmp_path), tensors)


def test_files_of_the_safetensors_library_are_read(tmp_path):
    tensors = random_tensors(TINY)
    write_model(tmp_path, TINY, {})
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _assert_equal(_load(tmp_path), tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_every_leaf_is_cast_to_the_dtype_asked_for(tmp_path, stored, dtype):
    tensors = {name: v.astype(stored) for name, v in random_tensors(TINY).items()}
    write_model(tmp_path, TINY, tensors)
    params = _load(tmp_path, dtype=dtype).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    want = tensors["model.decoder.embed_tokens.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(params.embed, want)


def test_a_stored_copy_of_the_tied_head_is_accepted_and_a_different_one_refused(tmp_path):
    tensors = random_tensors(TINY)
    embed = tensors["model.decoder.embed_tokens.weight"]
    write_model(tmp_path, TINY, tensors | {"lm_head.weight": embed})
    model = _load(tmp_path)
    assert model.params.head is None
    write_model(tmp_path, TINY, tensors | {"lm_head.weight": embed + np.float32(1)})
    assert "tie_word_embeddings" in _refusal(tmp_path)


def test_a_link_into_the_blobs_of_a_hub_cache_is_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "abc", tmp_path / "models--a" / "blobs"
    tensors = random_tensors(TINY)
    write_model(snapshot, TINY, tensors)
    blobs.mkdir()
    for i, file in enumerate(list(snapshot.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(Path("../../blobs") / str(i))
    _assert_equal(_load(snapshot), tensors)


def test_end_ids_come_from_the_generation_config_first(tmp_path):
    write_model(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    model = _load(tmp_path)
    assert model.eos_token_ids == (5, 7)
    assert model.config.eos_token_id == 2
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    assert "generation_config.json: eos_token_id=-1" in _refusal(tmp_path)


def test_end_ids_without_a_row_are_left_out(tmp_path):
    """A tokenizer may have more ids than the model has rows."""
    write_model(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 480]}')
    assert _load(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 480}')
    assert _load(tmp_path).eos_token_ids == (2,)


def test_F8_a_model_without_an_end_token_loads_with_a_warning(tmp_path, caplog):
    write_model(tmp_path, TINY | {"eos_token_id": None}, random_tensors(TINY))
    with caplog.at_level(logging.WARNING):
        assert _load(tmp_path).eos_token_ids == ()
    assert len(caplog.records) == 1


def test_F6_remote_code_is_ignored_with_one_warning(tmp_path, caplog):
    fields = TINY | {
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "trust_remote_code": True,
    }
    write_model(tmp_path, fields, random_tensors(TINY))
    (tmp_path / "evil.py").write_text("raise SystemExit(1)")
    with caplog.at_level(logging.WARNING):
        _load(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "never run" in caplog.text


# Which model


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ModelLoadError) as error:
        load_model(EngineConfig(model="no-such-model"))
    message = str(error.value)
    assert "hub id" in message
    assert "apt-jax info --list" in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("name", "near"),
    [("tiny-op", "tiny-opt?"), ("OPT-125", "opt-125m"), ("facebook/../opt-13", "opt-13b")],
)
def test_an_unknown_name_is_answered_with_those_near_it(name, near):
    with pytest.raises(ModelLoadError, match="did you mean") as error:
        resolve_model(name)
    assert near in str(error.value)
    assert len(str(error.value)) < 280
    if near == "opt-125m":
        assert "--load-format dummy" in str(error.value)
        with pytest.raises(ModelLoadError) as error:
            resolve_model(name, offer_preset=False)
        assert "dummy" not in str(error.value)


@pytest.mark.parametrize("name", ["opt-125m", "facebook/opt-125m"])
def test_a_preset_needs_dummy_weights(name):
    with pytest.raises(ModelLoadError, match="--load-format dummy"):
        resolve_model(name)
    with pytest.raises(ModelLoadError) as error:
        resolve_model(name, offer_preset=False)  # for those who have no such flag
    assert "dummy" not in str(error.value)
    resolved = resolve_model(name, allow_preset=True)
    assert resolved.path is None
    assert resolved.fields["hidden_size"] == 768


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~nobody-of-this-name/model", "..", "a\nb"])
def test_strange_names_are_refused(name):
    with pytest.raises(ModelLoadError) as error:
        resolve_model(name)
    assert "\n" not in str(error.value)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_dummy_weights_need_the_configuration_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = _load(tmp_path, load_format="dummy", seed=3, dtype="bfloat16")
    again = _load(tmp_path, load_format="dummy", seed=3, dtype="bfloat16")
    assert model.path == tmp_path
    np.testing.assert_array_equal(model.params.layers[1].wq, again.params.layers[1].wq)


def test_F5_a_model_larger_than_the_memory_is_refused_before_allocation(monkeypatch):
    monkeypatch.setattr(loader, "dummy_params", lambda *_: pytest.fail("allocated"))
    monkeypatch.setattr(loader, "free_memory_bytes", lambda: 2**30)
    with pytest.raises(ModelLoadError, match=r"23\.9 GiB in bfloat16, but 1\.0 GiB"):
        load_model(EngineConfig(model="opt-13b", load_format="dummy", dtype="bfloat16"))


# F1: pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "x.pth"])
def test_F1_pickles_are_never_opened_unasked(tmp_path, name):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    write_model(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    _load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    message = _refusal(tmp_path)
    assert name in message
    assert "--load-format pt" in message
    assert not (tmp_path / "sprung").exists()


def test_no_weights_at_all_are_reported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert "has neither model.safetensors nor" in _refusal(tmp_path)
    assert "has neither pytorch_model.bin nor" in _refusal(tmp_path, load_format="pt")
    assert _refusal(tmp_path).endswith("(--load-format dummy)")


# F2: damaged safetensors files

_GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
_EIGHT = bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\x00\x01\x02", "too short"),
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header"),
        ((200).to_bytes(8, "little") + b"{}", "cut off within its header"),
        (join_header(b"", b""), "not valid JSON"),
        (join_header(b"not json", b""), "not valid JSON"),
        (join_header(b'{"a": NaN}', b""), "not valid JSON"),
        (join_header(b'{"a\xff": 1}', b""), "not valid JSON"),
        (join_header(b"[" * 100_000, b""), "not valid JSON"),
        (join_header(b'{"a": ' + b"9" * 5000 + b"}", b""), "not valid JSON"),
        (join_header(b"[]", b""), "must hold a JSON object"),
        (join_header({"a": 1}, b""), "exactly dtype"),
        (join_header({"a": _GOOD | {"extra": 1}}, _EIGHT), "exactly dtype"),
        (join_header({"a": _GOOD | {"dtype": "F7"}}, _EIGHT), "unknown dtype"),
        (join_header({"a": _GOOD | {"dtype": ["F32"]}}, _EIGHT), "unknown dtype"),
        (join_header({"a": _GOOD | {"shape": [-2]}}, _EIGHT), "not a list of sizes"),
        (join_header({"a": _GOOD | {"shape": [2.0]}}, _EIGHT), "not a list of sizes"),
        (join_header({"a": _GOOD | {"shape": [True]}}, _EIGHT), "not a list of sizes"),
        (join_header({"a": _GOOD | {"shape": 2}}, _EIGHT), "not a list of sizes"),
        (join_header({"a": _GOOD | {"shape": [2**62, 4]}}, _EIGHT), "not a list of sizes"),
        (join_header({"a": _GOOD | {"shape": [2**40, 2**40]}}, _EIGHT), "spans 8 bytes"),
        (join_header({"a": _GOOD | {"shape": [3]}}, _EIGHT), "takes 12"),
        (join_header({"a": _GOOD | {"data_offsets": [8, 0]}}, _EIGHT), "spans -8 bytes"),
        (join_header({"a": _GOOD | {"data_offsets": [-8, 0]}}, _EIGHT), "not two byte offsets"),
        (join_header({"a": _GOOD | {"data_offsets": [0]}}, _EIGHT), "not two byte offsets"),
        (join_header({"a": _GOOD | {"data_offsets": [2**64, 2**64 + 8]}}, _EIGHT), "not two byte"),
        (join_header({"a": _GOOD | {"data_offsets": [8, 16]}}, bytes(16)), "leaves a gap"),
        (join_header({"a": _GOOD, "b": _GOOD}, _EIGHT), "overlaps"),
        (join_header({"a": _GOOD}, bytes(7)), "cut off"),
        (join_header({"a": _GOOD}, bytes(9)), "belong to no tensor"),
        (join_header({"a": _GOOD, "__metadata__": {"b": 1}}, _EIGHT), "__metadata__"),
        (join_header(b'{"a": 1, "a": 2}', b""), "the key 'a' occurs twice"),
    ],
)
def test_F2_a_damaged_file_is_refused_and_named(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(content)
    refusal = _refusal(tmp_path)
    assert message in refusal
    assert "model.safetensors" in refusal


def test_weights_that_are_a_directory_or_a_pipe_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").mkdir()
    assert "cannot be read" in _refusal(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "too short" in _refusal(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    write_model(tmp_path, TINY, random_tensors(TINY))
    match = loader._match

    def cut_after_the_checks(*args):
        os.truncate(tmp_path / "model.safetensors", 9000)
        return match(*args)

    monkeypatch.setattr(loader, "_match", cut_after_the_checks)
    assert "was truncated while it was being read" in _refusal(tmp_path)


def test_F2_mutated_files_load_equal_or_are_refused(tmp_path):
    """300 mutations: whatever the bytes, the outcome is a typed error, or values that the file really holds."""
    tensors = random_tensors(TINY)
    write_model(tmp_path, TINY, tensors)
    good = safetensors_bytes(tensors)
    header_end = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    messages: list[str] = []
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            kind = rng.randrange(5)
            # Most mutations fall into the header, where the structure is.
            at = rng.randrange(header_end if rng.random() < 0.8 else len(data))
            at = min(at, len(data) - 1)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice(b'0123456789-{}[]",:')
            elif kind == 2:
                del data[at : at + rng.randrange(1, 40)]
            elif kind == 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 40))
            else:
                del data[max(at, 8) :]
            if not data:
                data = bytearray(b"\0")
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            model = _load(tmp_path)
        except ModelLoadError as error:
            messages.append(str(error))
        else:
            stored = safetensors.numpy.load(bytes(data))
            by_name = {"model.decoder." + n.split("decoder.")[-1]: v for n, v in stored.items()}
            _assert_equal(model, by_name)
    assert len(messages) > 200
    assert all(message.isprintable() for message in messages)


def test_F5_mutated_configurations_load_or_are_refused(tmp_path):
    write_model(tmp_path, TINY, random_tensors(TINY))
    rng = random.Random(1)
    junk = [None, True, -1, 0, 1, 3, 2**31, 2**70, 1.5, 1e999, "", "relu", [], [2], {}, "\ud800"]
    names = [*TINY, "enable_bias", "tie_word_embeddings", "quantization_config", "auto_map"]
    messages: list[str] = []
    for _ in range(150):
        fields = dict(TINY)
        for name in rng.sample(names, rng.randrange(1, 4)):
            fields[name] = rng.choice(junk)
        (tmp_path / "config.json").write_text(json.dumps(fields).replace("Infinity", "1e999"))
        try:
            _load(tmp_path)
        except ModelLoadError as error:
            messages.append(str(error))
    assert all(message.isprintable() for message in messages)


# F3: files that do not belong together


def _changed(tensors, drop=(), **add):
    return {name: v for name, v in tensors.items() if name not in drop} | add


def test_F3_missing_extra_misshapen_and_mistyped_tensors_are_named_in_one_line(tmp_path):
    tensors = random_tensors(TINY)
    fc1, embed = "model.decoder.layers.1.fc1.weight", "model.decoder.embed_tokens.weight"
    tensors[embed] = tensors[embed].T.copy()
    tensors["model.decoder.layers.0.fc2.bias"] = np.zeros(16, np.int64)
    del tensors[fc1]
    tensors["model.decoder.layers.2.fc1.bias\n"] = np.zeros(3, np.float32)
    write_model(tmp_path, TINY, tensors)
    message = _refusal(tmp_path)
    assert "1 missing (layers.1.fc1.weight)" in message
    assert "1 unexpected (model.decoder.layers.2.fc1.bias)" in message
    assert "1 misshapen (embed_tokens.weight has [16, 48], not [48, 16])" in message
    assert "1 not floating-point (layers.0.fc2.bias is I64)" in message


def test_F3_nothing_reaches_the_device_before_the_names_are_checked(tmp_path, monkeypatch):
    tensors = random_tensors(TINY)
    tensors.popitem()
    write_model(tmp_path, TINY, tensors)
    monkeypatch.setattr(loader, "read_cast", lambda *_: pytest.fail("read"))
    assert "missing" in _refusal(tmp_path)


def test_one_tensor_under_two_names_is_refused(tmp_path):
    tensors = random_tensors(TINY)
    again = {"decoder.layers.0.fc1.bias": tensors["model.decoder.layers.0.fc1.bias"]}
    write_model(tmp_path, TINY, tensors | again)
    assert "are the same tensor" in _refusal(tmp_path)


def test_F3_a_missing_shard_is_named(tmp_path):
    write_model(tmp_path, TINY, random_tensors(TINY), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "of 3 shards 1 is missing: model-00002-of-00003" in _refusal(tmp_path)


def test_shards_that_contradict_the_index_or_each_other_are_refused(tmp_path):
    tensors = random_tensors(TINY)
    write_model(tmp_path, TINY, tensors, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert name in _refusal(tmp_path)
    first = tmp_path / "model-00001-of-00002.safetensors"
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    assert "is in model-00001-of-00002.safetensors too" in _refusal(tmp_path)


# F4: values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_F4_values_that_are_not_finite_are_refused(tmp_path, dtype, value):
    tensors = {name: v.astype(dtype) for name, v in random_tensors(TINY).items()}
    tensors["model.decoder.layers.1.fc2.weight"][3, 5] = value
    write_model(tmp_path, TINY, tensors)
    message = _refusal(tmp_path, dtype="bfloat16")
    assert "model.decoder.layers.1.fc2.weight' holds NaN or infinite" in message


def test_values_beyond_the_range_of_the_dtype_are_refused(tmp_path):
    tensors = random_tensors(TINY)
    tensors["model.decoder.layers.1.fc2.weight"][3, 5] = 1e6
    write_model(tmp_path, TINY, tensors)
    assert "beyond the range of float16" in _refusal(tmp_path, dtype="float16")
    _load(tmp_path, dtype="bfloat16")


# F5: the configuration file itself (its values: test_opt.py)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b'{"a": ' * 30_000, "not valid JSON"),
        (b'{"a": ' * 100_000, "parsing it would take 108 MiB of memory"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "occurs twice"),
        (b"{}", "known: Bloom, "),
    ],
)
def test_F5_a_damaged_configuration_is_refused_and_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    refusal = _refusal(tmp_path)
    assert message in refusal
    assert refusal.count(str(tmp_path)) == 1


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    assert "config.json: cannot be read" in _refusal(tmp_path)


# F9: paths


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b", "", ".", "..", "x\0", "x\ud800", "x" * 256]
)
def test_F9_an_index_that_points_elsewhere_is_refused(tmp_path, name):
    write_model(tmp_path / "model", TINY, random_tensors(TINY), shards=2)
    (tmp_path / "other.safetensors").write_bytes(safetensors_bytes(random_tensors(TINY)))
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    index.write_text(json.dumps(content))
    assert "must be the name of a file in the same directory" in _refusal(tmp_path / "model")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    write_model(tmp_path, TINY, random_tensors(TINY), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map must map tensor names to files" in _refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_F9_a_link_out_of_the_directory_is_refused(tmp_path, file):
    write_model(tmp_path / "model", TINY, random_tensors(TINY))
    (tmp_path / "model" / file).rename(tmp_path / file)
    (tmp_path / "model" / file).symlink_to(tmp_path / file)
    assert "link out of the model directory" in _refusal(tmp_path / "model")


def test_a_link_to_itself_is_refused(tmp_path):
    write_model(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    _refusal(tmp_path)
