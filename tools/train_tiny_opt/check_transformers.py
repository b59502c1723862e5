"""Load an exported directory in transformers, check it and sample from it.

Run in an environment with transformers and torch, which the rest of the package does not need:

    python tools/train_tiny_opt/check_transformers.py MODEL_DIR --val val.bin --out samples.json

It asserts that transformers' tokenizer gives the ids of ``tokenizer.json``, reports the perplexity
on the validation tokens (to be compared with that of the training code), and writes samples, which
the model card shows.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  # lives in another environment
import transformers  # pyright: ignore[reportMissingImports]  # the same
from tokenizers import Tokenizer

PROMPTS = (
    "It was a bright morning, and",
    "The old captain looked out over the sea and",
    '"My dear Emma," said Mr. Knightley,',
    "In the beginning",
    "Fellow-citizens of the Senate and House of Representatives:",
)
_TEXTS = (
    "The whale!",
    "  two  spaces\n\nand a break",
    "na\u00efve caf\u00e9 \u2013 \u6771\u4eac \U0001f40b",
    "",
)
_SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
_GREEDY = {"do_sample": False}


def perplexity(model: torch.nn.Module, tokens: np.ndarray, window: int) -> float:
    """Over whole windows; the first token of each is only context."""
    rows = torch.from_numpy(tokens[: len(tokens) // window * window].astype(np.int64))
    total, count = 0.0, 0
    for row in rows.view(-1, window):
        logits = model(input_ids=row[None]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum").item()
        count += window - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check an exported model in transformers.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--val", type=Path, help="val.bin of the training run")
    parser.add_argument("--window", type=int, default=2048, help="tokens per window")
    parser.add_argument("--out", type=Path, help="file for the samples (JSON)")
    args = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_dir)
    plain = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    for text in (*_TEXTS, *PROMPTS):
        ids = tokenizer(text).input_ids
        assert ids == plain.encode(text).ids, (text, ids)
        assert ids[0] == tokenizer.bos_token_id == 2
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    model, info = transformers.AutoModelForCausalLM.from_pretrained(args.model_dir, output_loading_info=True)
    assert not info["missing_keys"] or set(info["missing_keys"]) <= {"lm_head.weight"}, info
    assert not info["unexpected_keys"], info
    model.eval()
    report: dict[str, object] = {
        "made_with": f"transformers {transformers.__version__}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_parameters": model.num_parameters(),
    }
    with torch.no_grad():
        model = model.float()
        if args.val:
            tokens = np.fromfile(args.val, dtype=np.uint16)
            report["perplexity"] = perplexity(model, tokens, args.window)
        samples = []
        for i, prompt in enumerate(PROMPTS):
            # Greedy decoding of so small a model soon repeats itself; two examples are enough.
            for settings in (_SAMPLED, _GREEDY) if i < 2 else (_SAMPLED,):
                torch.manual_seed(i)
                inputs = tokenizer(prompt, return_tensors="pt")
                out = model.generate(
                    input_ids=inputs.input_ids,
                    attention_mask=inputs.attention_mask,
                    max_new_tokens=120,
                    **settings,
                )[0]
                new = out[inputs.input_ids.shape[1] :]
                samples.append(
                    {
                        "prompt": prompt,
                        "greedy": settings is _GREEDY,
                        "text": tokenizer.decode(new, skip_special_tokens=True),
                        "ended": bool(out[-1] == tokenizer.eos_token_id),
                    }
                )
    report["samples"] = samples
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    if args.out:
        args.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
