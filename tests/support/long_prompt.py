"""Peak memory of the log probabilities of one prompt: python -m tests.support.long_prompt DIRECTORY LENGTH.

The model is small but for its vocabulary of 50,000: the logits of 100,000 tokens would be 18.6 GiB. Prints MiB.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np

from apt_jax import LLM, SamplingParams

VOCAB_SIZE, CONTEXT = 50_000, 131_072


def main(directory: Path, length: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(directory), load_format="dummy", dtype="float32", cache="kv", max_model_len=CONTEXT, block_size=16,
        num_blocks_override=14_000, max_num_seqs=2, warm_up=False, use_tqdm=False,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, length).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None, output
    assert len(output.prompt_logprobs) == length
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
