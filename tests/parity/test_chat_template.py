"""Prompts of chat templates against transformers' `apply_chat_template`: the same text, the same ids."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.tokenizer import Tokenizer
from tests.support.chat_templates import CONVERSATIONS, SPECIALS, TEMPLATES, WITH_SYSTEM

transformers = pytest.importorskip("transformers", reason="runs in the reference environment (make reference)")


def _backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    tokens = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in SPECIALS])
    return backend


def _unigram() -> tokenizers.Tokenizer:
    """Special tokens are pieces of the vocabulary, and so is that for characters it lacks."""
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in SPECIALS), ("▁", -3.0)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in ["<unk>", *SPECIALS]])
    return backend


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [_backend, _unigram])
def test_prompts_are_those_of_transformers(make, name, add_generation_prompt):
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make(),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES[name],
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours, tokenizer = ChatTemplate(TEMPLATES[name], special_tokens=tokens), Tokenizer(make())
    options = {"add_generation_prompt": add_generation_prompt}
    for messages in [*CONVERSATIONS, WITH_SYSTEM]:
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            with pytest.raises(InvalidRequestError):
                ours.render(messages, **options)
            continue
        assert ours.render(messages, **options) == text
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
        assert ours.encode(tokenizer, messages, **options) == ids
    ours.close()
