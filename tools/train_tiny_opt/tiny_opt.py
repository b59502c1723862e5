"""Train the bundled model from nothing: ``python -m tools.train_tiny_opt.tiny_opt STAGE``.

Stages, each reading what the one before left in ``--work-dir``:

1. ``corpus``     fetch the packages, verify them, write the clean text;
2. ``tokenizer``  learn the byte-level BPE and encode the corpus;
3. ``train``      train, or continue from the last checkpoint;
4. ``export``     write the directory that transformers loads;
5. ``card``       sample, plot the loss, write the model card.

``all`` runs them in order. Corpus and tokenizer are kept if they exist; delete the work directory
to start over.
"""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.train_tiny_opt import card, corpus, data, export, samples, tokenizer, train
from tools.train_tiny_opt.model import OptConfig

STAGES = ("corpus", "tokenizer", "train", "export", "card")
_log = logging.getLogger(__name__)

_TOY_MODEL = OptConfig(vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, ffn_dim=128, max_len=256)
_TOY_TRAIN = train.TrainConfig(
    steps=60,
    tokens_per_step=512,
    phases=((0.8, 64), (1.0, 256)),
    log_every=5,
    eval_every=20,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_tiny_opt.tiny_opt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=("all", *STAGES), help="what to run")
    parser.add_argument("--work-dir", type=Path, required=True, help="all intermediate files")
    parser.add_argument("--out", type=Path, help="model directory (default: WORK_DIR/tiny-opt)")
    parser.add_argument("--data-dir", type=Path, help="train on the .txt files of this directory instead")
    parser.add_argument("--extra-text", type=Path, help="add the .txt and .txt.gz files of this directory")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="optimizer steps (default: 4000)")
    length.add_argument("--max-minutes", type=float, help="training time; the schedule is fitted to it")
    parser.add_argument("--toy", action="store_true", help="a far smaller model, to try the stages in seconds")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and sampling")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the chosen stages."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    model_cfg = _TOY_MODEL if args.toy else OptConfig()
    cfg = _TOY_TRAIN if args.toy else train.TrainConfig()
    cfg = dataclasses.replace(cfg, seed=args.seed, max_minutes=args.max_minutes)
    if args.steps is not None:
        cfg = dataclasses.replace(cfg, steps=args.steps)
    work_dir: Path = args.work_dir
    out_dir: Path = args.out or work_dir / "tiny-opt"
    work_dir.mkdir(parents=True, exist_ok=True)
    wanted = STAGES if args.stage == "all" else (args.stage,)

    if "corpus" in wanted:
        if (work_dir / "manifest.json").exists():
            _log.info("corpus: kept")
        else:
            corpus.build(work_dir, data_dir=args.data_dir, extra_text=args.extra_text)
    if "tokenizer" in wanted:
        if (work_dir / "tokens.json").exists():
            _log.info("tokenizer: kept")
        else:
            documents = list(corpus.read(work_dir / "corpus.jsonl"))
            learned = tokenizer.train(documents, model_cfg.vocab_size)
            tokenizer.save(learned, work_dir, max_len=model_cfg.max_len)
            data.write(learned, documents, work_dir)
    if "train" in wanted:
        train.train(work_dir, model_cfg, cfg, progress_bar=not args.no_progress)
    if "export" in wanted:
        restored = train.restore(work_dir, model_cfg, cfg)
        if restored is None:
            raise SystemExit(f"{work_dir} holds no checkpoint; run the train stage first")
        export.write(restored[1]["params"], model_cfg, work_dir, out_dir)
        _log.info("exported step %d to %s", restored[0], out_dir)
    if "card" in wanted:
        make_card(work_dir, out_dir)


def make_card(work_dir: Path, model_dir: Path) -> None:
    """Measures the exported weights, samples from them and writes the model card.

    A ``samples.json`` that is already in ``work_dir`` is used as it is (``check_transformers.py``
    writes one).
    """
    cfg, params = export.load(model_dir)
    result = json.loads((work_dir / "result.json").read_text())
    windows = [int(w) for w in result["val_perplexity"]]
    loss = train.evaluate(params, cfg, data.load(work_dir, "val"), window=max(windows))
    weights = export.to_float16(params, cfg)
    result["float16_perplexity"] = float(np.exp(loss))
    result["num_parameters"] = sum(w.size for w in weights.values())
    result["size_bytes"] = (model_dir / "model.safetensors").stat().st_size
    (work_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    if not (work_dir / "samples.json").exists():
        codec = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        made = [
            {
                "prompt": prompt,
                "greedy": False,
                "text": samples.generate(params, cfg, codec, prompt, max_new_tokens=100, seed=i),
                "ended": False,
            }
            for i, prompt in enumerate(samples.PROMPTS)
        ]
        report = {"made_with": "the training code", "samples": made}
        (work_dir / "samples.json").write_text(json.dumps(report, indent=2) + "\n")
    card.write(work_dir, model_dir)


if __name__ == "__main__":
    main()
