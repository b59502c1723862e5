"""Small random models of every family, as transformers describes them: (class of the configuration, its fields)."""

from typing import Any

_BASE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 100.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
_GEMMA4 = _BASE | dict(
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    global_head_dim=32,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    sliding_window=10,
    final_logit_softcapping=5.0,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
)
_FACTORS = [1.0 + 0.1 * i for i in range(4)]
_LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", _BASE | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "opt post-norm": ("OPTConfig", _BASE | dict(ffn_dim=48, word_embed_proj_dim=8, do_layer_norm_before=False)),
    "llama": ("LlamaConfig", _BASE | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama grouped, llama3 rope, biases": ("LlamaConfig", _BASE | dict(
        num_key_value_heads=2, rope_parameters=_LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama linear rope": ("LlamaConfig", _BASE | dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0})),
    "llama yarn rope": ("LlamaConfig", _BASE | dict(rope_parameters=_YARN)),
    "llama dynamic rope": ("LlamaConfig", _BASE | dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0})),
    "mistral": ("MistralConfig", _BASE | dict(num_key_value_heads=2, sliding_window=13)),
    "ministral": ("MinistralConfig", _BASE | dict(
        num_key_value_heads=2, head_dim=8, sliding_window=9, layer_types=["full_attention", "sliding_attention"])),
    "mistral wide heads": ("MistralConfig", _BASE | dict(num_key_value_heads=4, head_dim=16, sliding_window=None)),
    "ministral3": ("Ministral3Config", _BASE | dict(
        num_key_value_heads=2, head_dim=8, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0})),
    "ministral3 with images": ("Mistral3Config", dict(
        text_config=_BASE | dict(model_type="ministral3", num_key_value_heads=4, head_dim=8, sliding_window=21,
                                 rope_parameters=_YARN | {"llama_4_scaling_beta": 0.5}),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                           head_dim=8, image_size=28, patch_size=14),
        tie_word_embeddings=False)),
    "smollm3": ("SmolLM3Config", _BASE | dict(num_hidden_layers=4, num_key_value_heads=2)),
    "smollm3 of many heads, windows": ("SmolLM3Config", _BASE | dict(
        num_hidden_layers=3, num_key_value_heads=4, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=9, mlp_bias=True)),
    "qwen2": ("Qwen2Config", _BASE | dict(num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen2 grouped": ("Qwen2Config", _BASE | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", _BASE | dict(num_key_value_heads=2, head_dim=16)),
    "qwen3 biases": ("Qwen3Config", _BASE | dict(num_key_value_heads=4, head_dim=8, attention_bias=True)),
    "phi3": ("Phi3Config", _BASE | dict(num_key_value_heads=4, sliding_window=11)),
    "phi3 longrope, partial": ("Phi3Config", _BASE | dict(
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=128, rope_parameters={
            "rope_type": "longrope", "short_factor": _FACTORS, "long_factor": [2 * f for f in _FACTORS],
            "partial_rotary_factor": 0.5, "rope_theta": 1000.0, "original_max_position_embeddings": 128})),
    "phi3 grouped, tied, partial longrope": ("Phi3Config", _BASE | dict(
        num_attention_heads=3, hidden_size=48, num_key_value_heads=1, tie_word_embeddings=True, sliding_window=262144,
        max_position_embeddings=256, original_max_position_embeddings=128, rope_parameters={
            "rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
            "partial_rotary_factor": 0.75, "rope_theta": 1000.0, "original_max_position_embeddings": 128})),
    "gemma": ("GemmaConfig", _BASE | dict(num_key_value_heads=4, head_dim=12)),
    "gemma one key head": ("GemmaConfig", _BASE | dict(num_key_value_heads=1, head_dim=16)),
    "gemma2": ("Gemma2Config", _BASE | dict(
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=24, sliding_window=10, attn_logit_softcapping=2.0, final_logit_softcapping=5.0)),
    "gemma2 wide inputs": ("Gemma2Config", _BASE | dict(
        hidden_size=20, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=10)),
    "gemma2 no caps": ("Gemma2Config", _BASE | dict(
        num_key_value_heads=4, head_dim=8, query_pre_attn_scalar=8, sliding_window=64, attn_logit_softcapping=None, final_logit_softcapping=None)),
    "gemma3": ("Gemma3TextConfig", _BASE | dict(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=24, sliding_window=10, sliding_window_pattern=3,
        rope_theta=1000.0, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 4.0})),
    "gemma3 wide inputs, cap": ("Gemma3TextConfig", _BASE | dict(
        hidden_size=20, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=10,
        layer_types=["full_attention", "sliding_attention"], final_logit_softcapping=5.0)),
    "gemma3 with images": ("Gemma3Config", dict(
        text_config=_BASE | dict(num_key_value_heads=4, head_dim=8, sliding_window=9, sliding_window_pattern=2),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14),
        mm_tokens_per_image=4)),
    "gemma4 12b": ("Gemma4TextConfig", _GEMMA4 | dict(num_global_key_value_heads=1)),
    "gemma4 31b": ("Gemma4TextConfig", _GEMMA4 | dict(num_global_key_value_heads=2, final_logit_softcapping=None)),
    "gemma4, two tensors": ("Gemma4TextConfig", _GEMMA4 | dict(
        num_hidden_layers=3, attention_k_eq_v=False, num_key_value_heads=2, global_head_dim=24, attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"])),
    "gemma4 26b-a4b": ("Gemma4TextConfig", _GEMMA4 | dict(
        num_global_key_value_heads=2, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=16)),
    "gemma4 with images": ("Gemma4Config", dict(
        text_config=_GEMMA4 | dict(num_hidden_layers=2, num_global_key_value_heads=1, use_bidirectional_attention="vision"),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                           head_dim=8, patch_size=4, position_embedding_size=16))),
    "qwen3 moe": ("Qwen3MoeConfig", _BASE | dict(
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True)),
    "qwen3 moe, a dense layer": ("Qwen3MoeConfig", _BASE | dict(
        num_hidden_layers=3, num_key_value_heads=4, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=False, mlp_only_layers=[1], attention_bias=True,
        use_sliding_window=True, sliding_window=9)),
    "qwen2 moe": ("Qwen2MoeConfig", _BASE | dict(
        num_hidden_layers=4, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, decoder_sparse_step=2, use_sliding_window=True, sliding_window=11, max_window_layers=3)),
    "mixtral": ("MixtralConfig", _BASE | dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "mixtral, window": ("MixtralConfig", _BASE | dict(num_key_value_heads=4, num_local_experts=3, num_experts_per_tok=1, sliding_window=9)),
    "olmoe": ("OlmoeConfig", _BASE | dict(num_key_value_heads=4, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)),
    "olmoe grouped": ("OlmoeConfig", _BASE | dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, attention_bias=True)),
    "deepseek v2, greedy": ("DeepseekV2Config", _BASE | _LATENT | dict(
        q_lora_rank=None, num_hidden_layers=3, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=16,
        first_k_dense_replace=1, rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707})),
    "deepseek v2, groups": ("DeepseekV2Config", _BASE | _LATENT | dict(
        q_lora_rank=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=16, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=4.0, rope_parameters=_YARN | {"mscale": 1.0})),
    "deepseek v3": ("DeepseekV3Config", _BASE | _LATENT | dict(
        q_lora_rank=24, num_hidden_layers=3, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=16,
        n_group=4, topk_group=2, first_k_dense_replace=1, rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})),
    "glm4 moe lite": ("Glm4MoeLiteConfig", _BASE | _LATENT | dict(
        q_lora_rank=24, qk_nope_head_dim=24, v_head_dim=32, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        rms_norm_eps=1e-3, mlp_layer_types=["sparse", "dense"])),
    "minicpm3": ("MiniCPM3Config", _BASE | _LATENT | dict(
        q_lora_rank=24, v_head_dim=None, rms_norm_eps=1e-3, dim_model_base=16, max_position_embeddings=256, rope_parameters={
            "rope_type": "longrope", "short_factor": _FACTORS, "long_factor": [2 * f for f in _FACTORS], "rope_theta": 1000.0,
            "original_max_position_embeddings": 128})),
    "minicpm3 plain queries": ("MiniCPM3Config", _BASE | _LATENT | dict(
        q_lora_rank=None, scale_depth=None, dim_model_base=None, tie_word_embeddings=False)),
    "gpt_oss": ("GptOssConfig", _BASE | dict(
        num_key_value_heads=2, head_dim=8, num_local_experts=6, num_experts_per_tok=3, sliding_window=9, swiglu_limit=1.5,
        rope_parameters=_YARN | {"truncate": False})),
    "gpt_oss many key heads": ("GptOssConfig", _BASE | dict(
        num_hidden_layers=3, num_key_value_heads=4, head_dim=16, num_local_experts=4, num_experts_per_tok=4, sliding_window=21,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=False, swiglu_alpha=0.7)),
    "olmo2": ("Olmo2Config", _BASE | dict(num_key_value_heads=4)),
    "olmo2 grouped": ("Olmo2Config", _BASE | dict(num_key_value_heads=2)),
    "gpt2": ("GPT2Config", dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)),
    "gpt2 unscaled, untied": ("GPT2Config", dict(
        vocab_size=97, n_embd=24, n_layer=2, n_head=3, n_positions=128, n_inner=40, activation_function="gelu", scale_attn_weights=False,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)),
    "neox": ("GPTNeoXConfig", _BASE | dict(num_attention_heads=2, rotary_pct=0.25)),
    "neox sequential": ("GPTNeoXConfig", _BASE | dict(rotary_pct=1.0, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)),
    "bloom": ("BloomConfig", dict(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)),
    "bloom six heads": ("BloomConfig", dict(vocab_size=97, hidden_size=48, n_layer=2, n_head=6, bos_token_id=1, eos_token_id=2)),
    "mpt": ("MptConfig", dict(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=128)),
    "mpt six heads, clipped": ("MptConfig", dict(
        vocab_size=97, d_model=48, n_heads=6, n_layers=2, max_seq_len=128, attn_config={"clip_qkv": 0.8, "softmax_scale": 0.5})),
}  # fmt: skip
