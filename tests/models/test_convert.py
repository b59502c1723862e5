"""Conversions: what was written loads equal, and nothing half-made stays."""

import json
import os
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import load_model, resolve_model
from apt_jax.models.loading import checkpoint as checkpoints
from apt_jax.models.loading import convert, loader
from apt_jax.models.loading.convert import convert_model
from apt_jax.models.loading.gguf import file as gguf_file
from apt_jax.models.loading.loader import open_weights
from tests.support.gguf_models import hf_tensors, write_gguf
from tests.support.opt_checkpoint import TINY, random_tensors, write_model

FORMATS = ["orbax", "safetensors"]


def _source(tmp_path, dtype: type = np.float32):
    tensors = {name: values.astype(dtype) for name, values in random_tensors(TINY).items()}
    write_model(tmp_path / "source", TINY, tensors)
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "source" / "model.py").write_text("raise SystemExit")
    return tmp_path / "source"


def _leaves(path, **options):
    return jax.tree.leaves(load_model(EngineConfig(model=str(path), **options)).params)


@pytest.mark.parametrize("format", FORMATS)
def test_a_converted_model_loads_equal(tmp_path, format):
    source, target = _source(tmp_path), tmp_path / "deep" / "target"
    result = convert_model(str(source), target, format=format)
    assert result["tensors"] == len(random_tensors(TINY))
    for ours, theirs in zip(_leaves(target), _leaves(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model = load_model(EngineConfig(model=str(target)))
    assert model.eos_token_ids == (5,)  # generation_config.json went along
    assert model.weights == "F32"
    assert model.format == ("orbax" if format == "orbax" else "directory")
    assert not (target / "model.py").exists()
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("format", FORMATS)
def test_several_groups_are_several_files(tmp_path, monkeypatch, format):
    monkeypatch.setattr(convert, "_GROUP_BYTES", 5000)
    source = _source(tmp_path)
    convert_model(str(source), tmp_path / "target", format=format)
    pattern = "weights/0*" if format == "orbax" else "model-0*.safetensors"
    assert len(list((tmp_path / "target").glob(pattern))) > 2
    for ours, theirs in zip(_leaves(tmp_path / "target"), _leaves(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_there_and_back_again(tmp_path):
    source = _source(tmp_path, np.float16)
    convert_model(str(source), tmp_path / "o", format="orbax")
    convert_model(str(tmp_path / "o"), tmp_path / "s", format="safetensors")
    back = safetensors.numpy.load_file(tmp_path / "s" / "model.safetensors")
    there = safetensors.numpy.load_file(source / "model.safetensors")
    assert back.keys() == there.keys()
    for name, values in there.items():
        assert back[name].dtype == np.float16
        np.testing.assert_array_equal(back[name], values)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_cast_where_asked_for(tmp_path, format):
    source = _source(tmp_path)
    convert_model(str(source), tmp_path / "t", format=format, dtype="bfloat16")
    with open_weights(resolve_model(str(tmp_path / "t"))) as checkpoint:
        assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
    for ours, theirs in zip(_leaves(tmp_path / "t"), _leaves(source), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_gguf_file_becomes_a_directory_of_hugging_face(tmp_path):
    tensors = hf_tensors("gpt2")

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<s>", "a", "b", "ab", *(f"t{i}" for i in range(36))])
        writer.add_token_types([3] + [1] * 39)
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_chat_template("{{ bos_token }}")

    write_gguf(tmp_path / "m.gguf", "gpt2", tensors, extra=add)
    convert_model(str(tmp_path / "m.gguf"), tmp_path / "d", format="safetensors")
    written = safetensors.numpy.load_file(tmp_path / "d" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(written[name], values)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    from apt_jax.text.chat import load_chat_template
    from apt_jax.text.tokenizer import load_tokenizer

    assert load_tokenizer(tmp_path / "d").encode("ab") == [3]
    template = load_chat_template(tmp_path / "d")
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>"}


def test_nothing_is_overwritten(tmp_path):
    source = _source(tmp_path)
    for name in ("file", "dir", "link"):
        target = tmp_path / name
        if name == "file":
            target.write_text("x")
        elif name == "dir":
            target.mkdir()
        else:
            target.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ModelLoadError, match="nothing is overwritten"):
            convert_model(str(source), target)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, format, error):
    source = _source(tmp_path)
    writer = convert._WRITERS[format]
    monkeypatch.setattr(convert, "_GROUP_BYTES", 5000)
    calls = []
    write = writer.write  # type: ignore[attr-defined]

    def fail_later(self, tensors):
        calls.append(1)
        if len(calls) == 3:
            raise error
        write(self, tensors)

    monkeypatch.setattr(writer, "write", fail_later)
    with pytest.raises((KeyboardInterrupt, ModelLoadError)) as caught:
        convert_model(str(source), tmp_path / "t", format=format)
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_without_orbax_the_extra_is_named(tmp_path, monkeypatch):
    source = _source(tmp_path)
    convert_model(str(source), tmp_path / "o")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'apt-jax\[orbax\]'"):
        convert_model(str(source), tmp_path / "p")
    with pytest.raises(ModelLoadError, match=r"pip install 'apt-jax\[orbax\]'"):
        load_model(EngineConfig(model=str(tmp_path / "o")))


def test_a_target_that_cannot_be_written_is_one_line(tmp_path):
    source = _source(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelLoadError, match="cannot be written"):
        convert_model(str(source), tmp_path / "file" / "t")


@pytest.mark.parametrize(
    ("wanted", "works"), [("auto", True), ("orbax", True), ("safetensors", False), ("gguf", False)]
)
def test_the_format_is_found_and_another_one_refused(tmp_path, wanted, works):
    convert_model(str(_source(tmp_path)), tmp_path / "t")
    if works:
        assert load_model(EngineConfig(model=str(tmp_path / "t"), load_format=wanted)).format == "orbax"
        return
    with pytest.raises(ModelLoadError, match=f"--load-format {wanted}"):
        load_model(EngineConfig(model=str(tmp_path / "t"), load_format=wanted))


# --- onto devices --------------------------------------------------------------------------------------------------

_SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from apt_jax.config import EngineConfig
from apt_jax.models import load_model

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))

def sharding(config, leaf):
    if leaf == "embed":
        return NamedSharding(mesh, PartitionSpec(("a", "b"), None))
    if leaf.endswith(("wq", "wk", "wv")):
        return NamedSharding(mesh, PartitionSpec("b"))
    if leaf.endswith("w_up"):
        return NamedSharding(mesh, PartitionSpec("a", "b"))
    return NamedSharding(mesh, PartitionSpec())

for path in sys.argv[2:]:
    plain = load_model(EngineConfig(model=sys.argv[1])).params
    params = load_model(EngineConfig(model=path), sharding).params
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(other.addressable_shards) == 4
    assert {s.data.shape for s in params.embed.addressable_shards} == {(12, 16)}
    assert {s.data.shape for s in params.layers[1].wq.addressable_shards} == {(2, 4, 16)}
    assert {s.data.shape for s in params.layers[1].w_up.addressable_shards} == {(plain.layers[1].w_up.shape[0] // 2, 8)}
"""


def test_leaves_go_to_four_devices_in_shards_from_either_format(tmp_path):
    source = _source(tmp_path)
    convert_model(str(source), tmp_path / "o")
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _SHARDED, str(source), str(source), str(tmp_path / "o")],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_the_host_holds_one_tensor_and_a_piece_while_loading(tmp_path, monkeypatch, kind, whole):
    """Peak of NumPy's memory, devices not counted: below 1.2 times the largest tensor in its final dtype."""
    vocab, width = 2**16 if whole else 2**14, 256
    # A small tensor, in pieces that are as much smaller.
    for module, name in (
        () if whole else ((checkpoints, "_CHUNK_BYTES"), (gguf_file, "_CHUNK_BYTES"), (loader, "_CHUNK_ELEMENTS"))
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // 4)
    embed = np.random.default_rng(0).standard_normal((vocab, width)).astype(np.float32)
    name = "transformer.wte.weight"
    if kind == "Q8_0":
        import gguf

        tensors = {n: v for n, v in hf_tensors("gpt2").items() if n != name}
        stored = gguf.quants.quantize(embed, gguf.GGMLQuantizationType.Q8_0)

        def add(writer):
            writer.add_tensor("token_embd.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

        write_gguf(tmp_path / "m.gguf", "gpt2", tensors, extra=add)
        source = tmp_path / "m.gguf"
    else:
        write_model(tmp_path / "m", TINY, {name: embed.astype(np.float16 if kind == "F16" else np.float32)})
        source = tmp_path / "m"
    del embed
    largest = vocab * width * 4
    with open_weights(resolve_model(str(source))) as checkpoint:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        values = loader.read_cast(checkpoint, name, np.dtype(np.float32), source)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    assert values.nbytes == largest
    assert peak < 1.2 * largest
