import dataclasses
import json
from pathlib import Path

import jax
import pytest

from apt_jax.config import CacheConfig, EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import reference_generate_greedy
from apt_jax.models import load_model
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import dummy_params
from tests.support.generation import greedy
from tools.cache_kinds import (
    cache_kind_info,
    main,
    markdown,
    published_kinds,
    splice,
)

DOCS = Path(__file__).parents[2] / "docs" / "lab" / "cache_kinds.md"


def test_the_documented_table_is_the_one_that_the_code_makes():
    text = DOCS.read_text()
    assert splice(text, markdown(published_kinds())) == text


def test_what_the_published_sizes_offer():
    facts = {row.model: row for row in published_kinds()}
    expected = {
        "opt-13b": (0.5, "absorb"),
        "llama-2-7b": (0.5, "v-absorb"),
        "llama-3-8b": (2.0, "refused"),
        "qwen3-0.6b": (0.5, "v-absorb"),
        "gemma-7b": (0.375, "v-absorb"),
        "gemma-2-9b": (0.875, "v-absorb"),
        "gemma-2-2b": (1.125, "refused"),
        "gemma-3-1b": (2.25, "refused"),
        "gemma-3-12b": (0.9375, "v-absorb"),
        "phi-4": (2.0, "refused"),
        "phi-3-mini": (0.5, "v-absorb"),
        "pythia-6.9b": (0.5, "partial"),
        "bloom-7b": (0.5, "absorb"),
        "mpt-7b": (0.5, "absorb"),
        "olmo-2-7b": (0.5, "v-absorb"),
        "deepseek-v2-lite": (576 / 6144, "absorb"),
        "minicpm3-4b": (288 / 7680, "absorb"),
    }
    for model, (ratio, mode) in expected.items():
        assert (facts[model].hidden_ratio, facts[model].mode) == (ratio, mode), model
        assert facts[model].hidden_bytes == ratio * facts[model].kv_bytes
    assert facts["opt-13b"].pool_ratio == 0.5
    assert facts["deepseek-v2-lite"].hidden_bytes == 27 * (512 + 64) * 2
    assert facts["deepseek-v2-lite"].pool_ratio == facts["deepseek-v2-lite"].hidden_ratio
    assert facts["gemma-7b"].pool_ratio == 16 / 42  # 21 layer inputs in a block of 16 keys
    assert facts["gemma-2-9b"].pool_ratio == 16 / 18
    assert facts["llama-3-8b"].pool_ratio is None
    assert facts["opt-13b"].kv_bytes == 2 * 40 * 5120 * 2
    assert facts["opt-13b"].break_even_tokens == 4 * 40  # KERNELS: 4 times the heads
    refusal = facts["llama-3-8b"].refusal
    assert refusal is not None
    assert "larger than its keys and values" in refusal


def test_a_model_that_clips_keys_has_no_hidden_kind():
    fields = {
        "architectures": ["MptForCausalLM"],
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 1,
        "attn_config": {"clip_qkv": 8},
    }
    row = cache_kind_info("clipped", read_model_config(fields)[1])
    assert row.mode == "refused"
    assert "clip_qkv" in (row.refusal or "")


def test_hidden_is_refused_with_the_reason_and_hybrid_means_kv(tmp_path):
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_model(EngineConfig(model=str(tmp_path), load_format="dummy"))

    def executor(mode):
        return JaxExecutor(
            model.params, model.config, cache=CacheConfig(mode=mode, num_blocks_override=8), max_num_seqs=1,
            max_num_batched_tokens=32, max_model_len=32,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"larger than its keys and values.*--cache kv"):
        executor("hidden")
    assert executor("hybrid").kinds_offered == (True, False)


def test_the_command_writes_the_table_between_the_markers(tmp_path, capsys):
    file = tmp_path / "table.md"
    file.write_text("before\n<!-- kinds: begin -->\nold\n<!-- kinds: end -->\nafter\n")
    assert main([str(file)]) == 0
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| gemma-7b |" in text
    assert "old" not in text
    assert main([]) == 0
    assert "| opt-13b |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="kinds: begin"):
        splice("nothing", "")


def test_a_window_that_no_context_outgrows_is_none():
    fields = {
        "architectures": ["MistralForCausalLM"], "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64, "sliding_window": 32,
    }  # fmt: skip
    config = read_model_config(fields)[1]
    assert config.layer_windows == (32, 32)
    params = dummy_params(config, "float32", 0)
    for length, windows in ((64, (32, 32)), (32, ())):
        executor = JaxExecutor(
            params, config, cache=CacheConfig(num_blocks_override=8), max_num_seqs=1, max_num_batched_tokens=32,
            max_model_len=length,
        )  # fmt: skip
        assert executor.config.layer_windows == windows


def gemma3_with_a_short_window() -> ModelConfig:
    fields = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 32, "sliding_window": 32, "sliding_window_pattern": 2,
        "rope_local_base_freq": 10.0, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    config = read_model_config(fields)[1]
    assert (config.layer_windows, config.local_layers) == ((32, None), (0,))
    return config


def test_layers_keep_their_rotary_embedding_where_their_windows_are_dropped():
    config = gemma3_with_a_short_window()
    executor = JaxExecutor(
        dummy_params(config, "float32", 0), config, cache=CacheConfig(num_blocks_override=8), max_num_seqs=1,
        max_num_batched_tokens=32, max_model_len=32,
    )  # fmt: skip
    assert executor.config.layer_windows == ()
    assert [executor.config.rope_of(i) for i in range(2)] == [config.local_rope, config.rope]


@pytest.mark.slow
def test_tokens_are_the_same_where_windows_are_dropped():
    config = gemma3_with_a_short_window()
    params = dummy_params(config, "float32", 0)
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)  # so that context counts
    params = dataclasses.replace(params, layers=layers)
    executor = JaxExecutor(
        params, config, cache=CacheConfig(num_blocks_override=64), max_num_seqs=16, max_num_batched_tokens=32, max_model_len=32,
    )  # fmt: skip
    executor.buckets.decode, executor.buckets.prefill = [16], [32]  # fewer programs to compile
    prompt = list(range(5, 20))
    want = reference_generate_greedy(params, prompt, 12, config)
    assert len(set(want)) > 3
    one_rope = dataclasses.replace(config, local_rope=None, local_layers=())
    assert reference_generate_greedy(params, prompt, 12, one_rope) != want
    for kind in ("kv", "hidden"):
        assert greedy(executor, [prompt], 12, kind, "one at a time") == [want]
