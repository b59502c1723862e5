"""Byte-level BPE tokenizer of the bundled model, with OPT's conventions for special tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, PAD, EOS = "<s>", "<pad>", "</s>"
PAD_ID, EOS_ID = 1, 2
"""``</s>`` starts every prompt and ends every document; ``<s>`` (id 0) is never used, as in OPT."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges on ``texts``.

    Encoding prepends ``</s>``, as OPT's tokenizer does; pass ``add_special_tokens=False`` to get
    the bare ids. Any string decodes back to itself, because the alphabet is all 256 bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A",
        pair=f"{EOS} $A {EOS} $B",
        special_tokens=[(EOS, EOS_ID)],
    )
    assert tokenizer.token_to_id(PAD) == PAD_ID
    assert tokenizer.token_to_id(EOS) == EOS_ID
    return tokenizer


def save(tokenizer: Tokenizer, out_dir: Path, *, max_len: int) -> None:
    """Writes ``tokenizer.json`` and the two JSON files that transformers reads beside it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    specials = {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS, "pad_token": PAD}
    config = {
        **specials,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, value in (("special_tokens_map", specials), ("tokenizer_config", config)):
        (out_dir / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
