"""Token files for training: memory-mapped uint16, sampled by step number so that a run resumes."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from tools.train_tiny_opt.tokenizer import EOS_ID

CHUNK_TOKENS = 2048
"""Length of a held-out chunk."""
HOLD_OUT_EVERY = 50
"""One chunk in this many is validation text (2 %)."""
_START_SHARE = 0.25
"""Share of the training windows that sit at position 0 behind ``</s>``, as prompts do."""


def write(tokenizer: Tokenizer, documents: Iterable[str], out_dir: Path) -> None:
    """Encodes ``documents``, each closed by ``</s>``, and writes ``train.bin`` and ``val.bin``.

    Every 50th chunk of 2048 tokens is held out whole; ``</s>`` closes the gap that it leaves.
    """
    ids: list[int] = []
    num_bytes = 0
    for encoding, text in _encode(tokenizer, documents):
        ids.extend(encoding)
        ids.append(EOS_ID)
        num_bytes += len(text.encode())
    tokens = np.asarray(ids, dtype=np.uint16)
    chunks = [tokens[i : i + CHUNK_TOKENS] for i in range(0, len(tokens), CHUNK_TOKENS)]
    # The first held-out chunk lies in the middle of its group, so that short texts have one too.
    first = min(HOLD_OUT_EVERY // 2, (len(chunks) - 1) // 2)
    held_out = [c for i, c in enumerate(chunks) if i % HOLD_OUT_EVERY == first]
    gap = np.asarray([EOS_ID], dtype=np.uint16)
    kept = [gap if i % HOLD_OUT_EVERY == first else c for i, c in enumerate(chunks)]
    out_dir.mkdir(parents=True, exist_ok=True)
    np.concatenate(kept).tofile(out_dir / "train.bin")
    np.concatenate(held_out).tofile(out_dir / "val.bin")
    stats = {
        "train_tokens": sum(map(len, kept)),
        "val_tokens": sum(map(len, held_out)),
        "bytes_per_token": num_bytes / len(tokens),
    }
    (out_dir / "tokens.json").write_text(json.dumps(stats, indent=2) + "\n")


def _encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[list[int], str]]:
    for text in documents:
        yield tokenizer.encode(text, add_special_tokens=False).ids, text


def load(data_dir: Path, split: str) -> np.ndarray:
    """Memory-maps ``train`` or ``val``."""
    return np.memmap(data_dir / f"{split}.bin", dtype=np.uint16, mode="r")


def sample(
    tokens: np.ndarray, *, seed: int, step: int, batch: int, seq_len: int, max_len: int
) -> tuple[Int32[np.ndarray, "B W"], Int32[np.ndarray, " B"]]:
    """Draws one batch; a function of ``(seed, step)`` alone.

    Returns:
        Windows of ``seq_len + 1`` tokens and the position of each window's first token. Positions
        are uniform over the context, so that every learned position is trained; a quarter of the
        windows start at 0, and those have ``</s>`` in front.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(tokens) - seq_len, size=batch)
    windows = np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int32)
    offsets = rng.integers(0, max_len - seq_len + 1, size=batch)
    at_start = rng.random(batch) < _START_SHARE
    offsets[at_start] = 0
    windows[offsets == 0, 0] = EOS_ID
    return windows, offsets.astype(np.int32)


def unigram_perplexity(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Perplexity on ``val`` of the token frequencies of ``train`` (add-one smoothing)."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    log_prob = np.log(counts / counts.sum())
    return float(np.exp(-log_prob[np.asarray(val)].mean()))
