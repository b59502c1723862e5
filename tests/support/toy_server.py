"""`apt-jax serve` over the engine of `toy_serving`, as a process of its own: python -m tests.support.toy_server
STEP_MS.

Every token is ASCII text, so that whatever is generated can be compared as text.
"""

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.tokenizer import Tokenizer
from serve.grpc_api.server import ServerConfig
from serve.server import serve
from tests.support.toy_serving import EOS, SPECIALS, VOCAB_SIZE, toy_parts

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def ascii_tokenizer(path: Path | None = None) -> Tokenizer:
    """One token a character of ASCII text; the other ids are pairs of letters, which no text is encoded to."""
    characters = [
        "\u010a",
        "\u0120",
        *map(chr, range(0x21, 0x7F)),
    ]  # newline and space as byte-level vocabularies write them
    pairs = [a + b for a in "abcdefghijklm" for b in "nopqrstuvwxyz"]
    tokens = [*SPECIALS, *characters, *pairs][:VOCAB_SIZE]
    assert len(tokens) == VOCAB_SIZE
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    return Tokenizer(backend, path)


def server_parts(step_s: float = 0.0, path: Path | None = None) -> EngineComponents:
    return toy_parts(
        tokenizer=ascii_tokenizer(path),
        step_s=step_s,
        max_model_len=1024,
        num_blocks=2048,
        debug=False,
        chat_template=ChatTemplate(TEMPLATE, special_tokens={"eos_token": "</s>"}),
        max_num_queued_reqs=8,
    )


def main(step_ms: float) -> int | None:
    logging.basicConfig(level=logging.INFO)
    # A directory without a tokenizer.json: who looks there must ask the server.
    with tempfile.TemporaryDirectory() as path:
        parts = server_parts(step_ms / 1e3, Path(path))
        return asyncio.run(serve(parts.config, ServerConfig(port=0), shutdown_timeout_s=30, build=lambda: parts))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
