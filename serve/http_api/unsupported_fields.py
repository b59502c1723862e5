"""Fields of other servers that would change the output and are not supported: each is rejected by its name.

Fields that change nothing (`cache_prompt`, `id_slot`, `user`, ...) are ignored, as everything that nobody knows.
docs/serving/request_fields.md has each field of vLLM and OpenAI (tests/support/request_fields.py).
"""

from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    # vLLM
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # SGLang
    "custom_logit_processor": (),
    "custom_params": ({},),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "structural_tag": (),
    # llama.cpp
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "image_data": ([],),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_indent": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "samplers": (),
    "t_max_predict_ms": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # text-generation-webui, KoboldCpp, transformers
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "custom_token_bans": ("",),
    "do_sample": (True,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "max_length": (),
    "max_new_tokens": (),
    "mirostat_mode": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "rep_pen": (1,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical": (1,),
}
"""The fields, with the values that change nothing; null never does."""

_HINTS = {
    "chat_template": "operators choose it (--chat-template)",
    "documents": "put them into a message",
    "ec_transfer_params": "the server has no encoder apart",
    "include_reasoning": "leave out reasoning_content when reading the answer",
    "kv_transfer_params": "caches are not moved between servers",
    "logits_processors": "code of requests is not run; use logit_bias, bad_words or a constraint",
    "logprob_token_ids": "use top_logprobs, or logprobs of completions",
    "moderation": "no model here moderates",
    "prompt_embeds": "send text or token ids",
    "repetition_detection": "use repetition_penalty or max_tokens",
    "return_prompt_text": "use return_token_ids and /detokenize",
    "spaces_between_special_tokens": "use return_token_ids",
    "thinking_token_budget": "use max_tokens, or enable_thinking in chat_template_kwargs",
    "truncation_side": "truncate_prompt_tokens keeps the last tokens",
    "use_beam_search": "use n with a temperature, or a temperature of 0",
    "watermarking": "outputs are not marked",
    **dict.fromkeys(("max_length", "max_new_tokens", "n_predict"), "use max_tokens"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "use repetition_penalty"),
    **dict.fromkeys(("banned_strings", "custom_token_bans"), "use bad_words or logit_bias"),
    "ban_eos_token": "use ignore_eos",
    "do_sample": "use a temperature of 0 for greedy outputs",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "stop_regex": "use stop",
    "t_max_predict_ms": "use deadline_ms",
}


def reject_unsupported(body: Mapping[str, Any]) -> None:
    """Check that a body asks for nothing of `UNSUPPORTED`.

    Raises:
        InvalidRequestError: it does; the field is named, and one that does the same if there is one.
    """
    for name in body.keys() & UNSUPPORTED.keys():
        value = body[name]
        if value is None or any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
            continue
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        raise InvalidRequestError(name, f"is not supported{hint}")


def _same(value: object, neutral: object) -> bool:
    """Return whether two values are equal in JSON, where 1 is 1.0 and not true."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
