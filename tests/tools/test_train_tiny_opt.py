"""The training script on a toy model, and the bundled model directory."""

import csv
import dataclasses
import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("flax", reason="needs the extra `train`")
pytest.importorskip("optax", reason="needs the extra `train`")
pytest.importorskip("orbax.checkpoint", reason="needs the extra `train`")

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

from tools.train_tiny_opt import corpus, data, export, model, tiny_opt, tokenizer, train
from tools.train_tiny_opt.model import OptConfig, compute_logits

_CFG = OptConfig(vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, ffn_dim=64, max_len=128)
_TRAIN = train.TrainConfig(
    steps=24,
    tokens_per_step=256,
    phases=((1.0, 64),),
    peak_lr=1e-2,
    log_every=4,
    eval_every=12,
)


@pytest.fixture(scope="module", autouse=True)
def _promotion() -> Iterator[None]:
    """flax and optax broadcast biases and mix scalars, which the suite's strict settings refuse."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


_NAMES = ("Ahab", "Emma", "Alice", "the captain", "the king")
_VERBS = ("saw", "heard", "followed", "forgot", "praised")


def _text() -> str:
    rng = np.random.default_rng(0)
    sentences = [f"On day {i}, {rng.choice(_NAMES)} {rng.choice(_VERBS)} {rng.choice(_NAMES)}." for i in range(1500)]
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the token files of a small text."""
    root = tmp_path_factory.mktemp("prepared")
    (root / "text").mkdir()
    (root / "text" / "days.txt").write_text(_text())
    documents = list(corpus.read(corpus.build(root, data_dir=root / "text")))
    learned = tokenizer.train(documents, _CFG.vocab_size)
    tokenizer.save(learned, root, max_len=_CFG.max_len)
    data.write(learned, documents, root)
    return root


def _work_dir(prepared: Path, name: str) -> Path:
    work_dir = prepared / name
    work_dir.mkdir()
    for file in ("train.bin", "val.bin"):
        (work_dir / file).symlink_to(prepared / file)
    return work_dir


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path) -> tuple[Path, dict]:
    work_dir = _work_dir(prepared, "uninterrupted")
    return work_dir, train.train(work_dir, _CFG, _TRAIN, progress_bar=False)


@pytest.mark.in_turn(2, group="training of the bundled model")
def test_training_lowers_the_loss(uninterrupted: tuple[Path, dict]) -> None:
    with (uninterrupted[0] / "loss.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(r["step"]) for r in rows] == [4, 8, 12, 16, 20, 24]
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 1.0
    result = json.loads((uninterrupted[0] / "result.json").read_text())
    assert result["val_perplexity"]["64"] < result["unigram_perplexity"]


@pytest.mark.in_turn(2, group="training of the bundled model")
def test_resuming_gives_the_parameters_of_an_uninterrupted_run(
    prepared: Path, uninterrupted: tuple[Path, dict]
) -> None:
    work_dir = _work_dir(prepared, "interrupted")
    train.train(work_dir, _CFG, _TRAIN, stop_after=10, progress_bar=False)
    params = train.train(work_dir, _CFG, _TRAIN, progress_bar=False)
    jax.tree.map(np.testing.assert_array_equal, params, uninterrupted[1])
    with (work_dir / "loss.csv").open(newline="") as stream:
        assert [int(r["step"]) for r in csv.DictReader(stream)] == [4, 8, 12, 16, 20, 24]


@pytest.mark.in_turn(2, group="training of the bundled model")
def test_export_has_the_names_and_shapes_of_transformers_and_loads_back(
    prepared: Path, uninterrupted: tuple[Path, dict]
) -> None:
    out = prepared / "exported"
    export.write(uninterrupted[1], _CFG, prepared, out)
    weights = load_file(out / "model.safetensors")
    assert len(weights) == 4 + 16 * _CFG.num_layers
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float16)}
    shapes = {
        "embed_tokens.weight": (320, 32),
        "embed_positions.weight": (130, 32),  # two rows more than positions
        "final_layer_norm.bias": (32,),
        "layers.1.self_attn.out_proj.weight": (32, 32),
        "layers.1.self_attn_layer_norm.weight": (32,),
        "layers.0.fc1.weight": (64, 32),  # [out, in]
        "layers.0.fc2.weight": (32, 64),
    }
    for name, shape in shapes.items():
        assert weights[f"model.decoder.{name}"].shape == shape
    cfg, params = export.load(out)
    assert cfg == _CFG
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
        params,
        jax.device_get(uninterrupted[1]),
    )


def test_export_refuses_values_beyond_float16() -> None:
    params = model.init_params(_CFG, 0)
    embed: Any = params["embed"]
    embed.set_value(embed.get_value().at[3, 3].set(1e6))
    with pytest.raises(ValueError, match=r"embed_tokens.*does not fit float16"):
        export.to_float16(params, _CFG)


def test_logits_do_not_depend_on_later_tokens() -> None:
    params = model.init_params(_CFG, 0)
    tokens = jnp.arange(64, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    logits = jax.jit(compute_logits, static_argnums=1)
    full = logits(params, _CFG, tokens, zero)
    changed = logits(params, _CFG, tokens.at[0, 40:].set(5), zero)
    np.testing.assert_array_equal(full[0, :40], changed[0, :40])


def test_batches_depend_on_seed_and_step_only_and_reach_every_position() -> None:
    tokens = np.arange(5000, dtype=np.uint16)

    def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
        return data.sample(tokens, seed=1, step=step, batch=64, seq_len=8, max_len=16)

    windows, offsets = draw(7)
    for a, b in zip((windows, offsets), draw(7), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(windows, draw(8)[0])
    assert set(offsets) == set(range(9))  # the last position used is 8 + 8 - 1
    assert (windows[offsets == 0, 0] == tokenizer.EOS_ID).all()


def test_held_out_chunks_are_not_trained_on(tmp_path: Path) -> None:
    learned = tokenizer.train([_text()], 300)
    data.write(learned, [_text()], tmp_path)
    train_tokens, val_tokens = data.load(tmp_path, "train"), data.load(tmp_path, "val")
    assert len(val_tokens) == data.CHUNK_TOKENS
    num_tokens = len(learned.encode(_text(), add_special_tokens=False).ids) + 1
    assert len(train_tokens) + len(val_tokens) == num_tokens + 1  # the mark in the gap


def test_clean_joins_wrapped_lines_and_folds_quotes() -> None:
    wrapped = "\u201cIt is a truth\nuniversally acknowledged\u2014\r\n\r\n\r\nthat\u201d"
    assert corpus.clean(wrapped) == '"It is a truth\nuniversally acknowledged--\n\nthat"'
    assert corpus.unwrap("a\nb  c\n\n\nd") == "a b c\n\nd"


def test_a_download_with_another_digest_is_refused(tmp_path: Path) -> None:
    source = corpus.SOURCES[0]
    (tmp_path / source.filename).write_bytes(b"something else")
    with pytest.raises(ValueError, match="delete the file and fetch it again"):
        corpus.fetch(source, tmp_path)


@pytest.mark.in_turn(2, group="training of the bundled model")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_stages_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr(tiny_opt, "_TOY_MODEL", dataclasses.replace(tiny_opt._TOY_MODEL, num_layers=1))
        monkeypatch.setattr(tiny_opt, "_TOY_TRAIN", dataclasses.replace(tiny_opt._TOY_TRAIN, phases=((1.0, 64),)))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "days.txt").write_text(_text())
    work = tmp_path / "work"
    tiny_opt.main(
        [
            *("all", "--toy", "--steps", "4", "--no-progress"),
            *("--work-dir", str(work), "--data-dir", str(tmp_path / "text")),
        ]
    )
    model_dir = work / "tiny-opt"
    assert "unigram baseline" in (model_dir / "README.md").read_text()
    assert (model_dir / "loss.svg").read_text().endswith("</svg>\n")
    assert export.load(model_dir)[0].max_len == 256


# --- the bundled model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled() -> Path:
    return Path(str(importlib.resources.files("apt_jax") / "assets" / "tiny-opt"))


def test_bundled_model_is_complete_and_small(bundled: Path) -> None:
    names = {p.name for p in bundled.iterdir()}
    assert names >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "loss.csv",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(p.stat().st_size for p in bundled.iterdir()) < 20e6
    cfg, params = export.load(bundled)
    assert cfg == OptConfig()
    assert 5e6 < sum(p.size for p in jax.tree.leaves(params)) < 20e6
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "text",
    [
        "Call me Ishmael.",
        "  two  spaces\n\nand\ta break ",
        "na\u00efve caf\u00e9 \u2013 \u6771\u4eac \U0001f40b",
        "",
    ],
)
def test_bundled_tokenizer_round_trips_and_prepends_the_start_token(bundled: Path, text: str) -> None:
    codec = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    assert codec.get_vocab_size() == 4096
    ids = codec.encode(text).ids
    assert ids == [2, *codec.encode(text, add_special_tokens=False).ids]
    assert codec.decode(ids, skip_special_tokens=True) == text


@pytest.mark.in_turn(2, group="training of the bundled model")
def test_bundled_model_prefers_english_to_shuffled_english(bundled: Path) -> None:
    cfg, params = export.load(bundled)
    codec = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    ids = codec.encode("The captain went down to the sea in the morning, and saw that the ship was gone.").ids
    shuffled = [ids[0], *np.random.default_rng(0).permutation(ids[1:])]

    def loss(row: list[int]) -> float:
        tokens = np.asarray(row, np.uint16)
        return train.evaluate(params, cfg, tokens, window=len(row))

    assert loss(ids) < loss(shuffled) - 1.0
