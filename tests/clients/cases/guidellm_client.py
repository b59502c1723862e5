"""GuideLLM: a short benchmark with synthetic data."""

import subprocess
import sys
import tempfile
from pathlib import Path

from harness import MODEL, ROOT_URL, expect, feature, run


@feature("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "benchmark",
            "run",
            "--target",
            ROOT_URL,
            "--model",
            MODEL,
        ]
        command += ["--profile", "synchronous", "--max-requests", "5", "--data", "prompt_tokens=16,output_tokens=8"]
        command += ["--processor", str(_tokenizer(Path(folder))), "--output-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-500:])


def _tokenizer(folder: Path) -> Path:
    """A tokenizer on disk, as there may be no hub: one of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 10, trainers.BpeTrainer(special_tokens=["[UNK]"])
    )
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


run()
