"""Embeddings against transformers' last hidden states, pooled."""

from importlib import resources

import numpy as np
import pytest

from apt_jax import LLM

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)


_TOKENIZER = resources.files("apt_jax") / "assets" / "tiny-opt"


def config_of(family: str):
    common = {"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "opt":
        return transformers.OPTConfig(
            **common, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64, pad_token_id=1, bos_token_id=2,
            eos_token_id=2,
        )  # fmt: skip
    return transformers.LlamaConfig(
        **common,
        intermediate_size=96,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_pooled_states_are_those_of_transformers(family, tmp_path):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=16, max_model_len=96,
        num_blocks_override=64, scheduling_policy="fcfs", warm_up=False, use_tqdm=False, tokenizer=str(_TOKENIZER),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 4096, n).tolist() for n in (1, 5, 40, 70)]
    for pooling in ("mean", "last"):
        raw = llm.embed(prompts, pooling=pooling, normalize=False, use_tqdm=False)
        cut = llm.embed(prompts, pooling=pooling, dimensions=10, use_tqdm=False)
        for prompt, ours, short in zip(prompts, raw, cut, strict=True):
            with torch.no_grad():
                states = model.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy()
            theirs = states.mean(0) if pooling == "mean" else states[-1]
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
            np.testing.assert_allclose(short, theirs[:10] / np.linalg.norm(theirs[:10]), atol=1e-4)
