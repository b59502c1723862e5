"""Model card of an exported directory: data, training, loss curve, perplexity and samples."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

_ARCHIVES = {"debian": "Debian", "npm": "npm", "pypi": "PyPI (source distribution)"}


def plot_loss(loss_csv: Path, out: Path) -> None:
    """Draws training and validation loss over the tokens seen."""
    from matplotlib.figure import Figure

    with loss_csv.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="tight")
    axes = figure.subplots()
    tokens = [int(r["tokens_seen"]) / 1e6 for r in rows]
    axes.plot(tokens, [float(r["train_loss"]) for r in rows], lw=1, label="training")
    val = [(t, float(r["val_loss"])) for t, r in zip(tokens, rows, strict=True) if r["val_loss"]]
    if val:
        axes.plot(*zip(*val, strict=True), "o-", ms=3, lw=1, label="validation (part)")
    axes.set_xlabel("tokens seen (millions)")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out)


def _data_table(manifest: dict[str, Any]) -> str:
    lines = ["| text | package | documents | MB |", "|---|---|---|---|"]
    for name, entry in manifest["inputs"].items():
        if "package" in entry:
            where = f"{_ARCHIVES[entry['archive']]} package `{entry['package']}` {entry['version']}"
        else:
            where = f"local file `{name}`, SHA-256 {entry['sha256'][:16]}..."
        what = entry["about"]
        size = entry.get("text_bytes", 0) / 1e6
        lines.append(f"| {what} | {where} | {entry.get('documents', 0)} | {size:.2f} |")
    return "\n".join(lines)


def _samples(samples: dict[str, Any]) -> str:
    parts = []
    for sample in samples["samples"]:
        how = "Greedy" if sample["greedy"] else "Sampled, temperature 0.8"
        end = " *(ended by itself)*" if sample["ended"] else ""
        text = sample["text"].strip("\n").replace("\n", "\n> ")
        parts.append(f"{how}{end}:\n\n> **{sample['prompt']}**{text}")
    return "\n\n".join(parts)


def write(work_dir: Path, model_dir: Path) -> None:
    """Writes ``README.md``, ``loss.csv`` and ``loss.png`` into ``model_dir``.

    Reads what the other stages left in ``work_dir``, and ``samples.json`` there.
    """
    result = json.loads((work_dir / "result.json").read_text())
    manifest = json.loads((work_dir / "manifest.json").read_text())
    tokens = json.loads((work_dir / "tokens.json").read_text())
    samples = json.loads((work_dir / "samples.json").read_text())
    shutil.copyfile(work_dir / "loss.csv", model_dir / "loss.csv")
    plot_loss(work_dir / "loss.csv", model_dir / "loss.png")
    model, run = result["model"], result["train"]
    perplexity = result["val_perplexity"]
    best = perplexity[max(perplexity, key=int)]
    phases = ", ".join(f"{n} up to {100 * end:.0f} %" for end, n in run["phases"])
    ppl_rows = "\n".join(
        f"| model, windows of {w} tokens | {v:.2f} |" for w, v in perplexity.items()
    )
    extra = "" if all("package" in e for e in manifest["inputs"].values()) else " --extra-text DIR"
    length = f"--steps {run['steps']}"
    if run["max_minutes"] is not None:
        length = f"--max-minutes {run['max_minutes']:g}"
    card = f"""---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-opt

A small English language model with the OPT architecture, for trying out and testing the engine.
It writes recognisable English in the style of its training books; it knows nothing reliable and
must not be used for anything but demonstration.

- {result["num_parameters"]:,} parameters (output projection tied), float16,
  {result["size_bytes"] / 1e6:.1f} MB
- {model["num_layers"]} layers, width {model["hidden_size"]}, {model["num_heads"]} heads,
  feed-forward {model["ffn_dim"]}, context {model["max_len"]}, learned positions, pre-norm, ReLU
- byte-level BPE, {model["vocab_size"]} entries; `</s>` (id 2) starts every prompt and ends every
  document, `<pad>` is id 1
- loads in transformers with `AutoModelForCausalLM` and `AutoTokenizer`

## Data

Public-domain English text. The script fetches the packages with their ordinary clients and verifies
each by SHA-256; local files come from the directory given with `--extra-text` (or `--data-dir`).

{_data_table(manifest)}

Typographic quotes and dashes are folded to ASCII, hard-wrapped prose lines are joined, headings,
notes and licence texts are removed, repeated paragraphs dropped.
That gives {tokens["train_tokens"]:,} training tokens and {tokens["val_tokens"]:,} held-out ones
(every 50th chunk of 2048 tokens); a token is {tokens["bytes_per_token"]:.2f} bytes on average.

## Training

AdamW (decay {run["weight_decay"]}, gradients clipped at norm 1), peak learning rate
{run["peak_lr"]:g} after warm-up, cosine to 1 % of it; batches of {run["tokens_per_step"]} tokens;
bfloat16 products with float32 accumulation, float32 master weights.
Sequence length by share of the run: {phases}.
Windows sit at random positions of the context, so that every learned position is trained.

{result["steps"]:,} steps, {result["tokens_seen"]:,} tokens seen
({result["tokens_seen"] / tokens["train_tokens"]:.1f} passes), {result["train_s"] / 60:.1f} minutes
of training time at {result["tokens_per_s"]:.0f} tokens/s on {result["device"]}.

![loss](loss.png)

The numbers are in [loss.csv](loss.csv).

## Validation

Perplexity per token on the held-out text, each window read from position 0.

| | perplexity |
|---|---|
| unigram baseline | {result["unigram_perplexity"]:.1f} |
{ppl_rows}
| exported float16 weights, windows of {max(perplexity, key=int)} tokens | {result["float16_perplexity"]:.2f} |

The longest windows correspond to {_bits_per_byte(best, tokens["bytes_per_token"]):.3f} bits per
byte.

## Samples

Made with {samples["made_with"]}; the prompt is in bold. Not selected.

{_samples(samples)}

## Train it again

    pip install 'apt-jax[train]'
    python -m apt_jax.training.tiny_opt all --work-dir build/tiny-opt{extra} {length}

A run that was interrupted continues from its last checkpoint. `--help` lists the stages.
"""
    (model_dir / "README.md").write_text(card)


def _bits_per_byte(perplexity: float, bytes_per_token: float) -> float:
    return math.log2(perplexity) / bytes_per_token
