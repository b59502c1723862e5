"""Fields of other servers that would change the output but are not supported. Requests that use them are rejected.

Fields that do not change the output (`cache_prompt`, `id_slot`, `user`, ...) and unknown fields are ignored.
docs/serving/request_fields.md, written by tests/support/request_fields.py, lists all fields of vLLM and OpenAI.
"""

from apt_jax.request import WAYS_OUT
from serve.http_api.records import Refused


def _refused(*harmless: object, way_out: str = "") -> Refused:
    why = f"is not supported; {way_out}" if way_out else "is not supported"
    return Refused(harmless, why, "Not supported; these values have no effect.")


REFUSED = {
    # OpenAI
    "audio": _refused(),
    "modalities": _refused(["text"]),
    "moderation": _refused(way_out="moderation models are not served"),
    "web_search_options": _refused(),
    # vLLM
    "chat_template": _refused(way_out="operators choose it (--chat-template)"),
    "documents": _refused([], way_out="put them into a message"),
    "ec_transfer_params": _refused({}, way_out="the server has no separate encoder"),
    "include_reasoning": _refused(True, way_out="leave out reasoning_content when reading the answer"),
    "kv_transfer_params": _refused({}, way_out="caches are not moved between servers"),
    "logits_processors": _refused([], way_out=WAYS_OUT["logits_processors"]),
    "logprob_token_ids": _refused(way_out="use top_logprobs, or logprobs of completions"),
    "prompt_embeds": _refused(way_out="send text or token ids"),
    "repetition_detection": _refused(way_out=WAYS_OUT["repetition_detection"]),
    "return_prompt_text": _refused(False, way_out="use return_token_ids and /detokenize"),
    "spaces_between_special_tokens": _refused(True, way_out="use return_token_ids"),
    "thinking_token_budget": _refused(-1, way_out=WAYS_OUT["thinking_token_budget"]),
    "truncation_side": _refused("left", way_out="truncate_prompt_tokens keeps the last tokens"),
    "use_beam_search": _refused(False, way_out=WAYS_OUT["use_beam_search"]),
    "watermarking": _refused(False, way_out="outputs are not watermarked"),
    # SGLang
    "custom_logit_processor": _refused(),
    "custom_params": _refused({}),
    "lora_path": _refused(),
    "no_stop_trim": _refused(False, way_out=WAYS_OUT["no_stop_trim"]),
    "return_hidden_states": _refused(False),
    "session_params": _refused({}),
    "stop_regex": _refused("", [], way_out=WAYS_OUT["stop_regex"]),
    "structural_tag": _refused(),
    # llama.cpp
    "adaptive_target": _refused(-1),
    "dry_multiplier": _refused(0),
    "dynatemp_range": _refused(0),
    "grammar_lazy": _refused(False),
    "grammar_triggers": _refused([]),
    "image_data": _refused([]),
    "lora": _refused([]),
    "min_keep": _refused(0),
    "mirostat": _refused(0),
    "n_indent": _refused(0),
    "n_predict": _refused(-1, way_out=WAYS_OUT["n_predict"]),
    "n_probs": _refused(0, way_out=WAYS_OUT["n_probs"]),
    "repeat_penalty": _refused(1, way_out=WAYS_OUT["repeat_penalty"]),
    "samplers": _refused(),
    "t_max_predict_ms": _refused(0, way_out="use deadline_ms"),
    "top_n_sigma": _refused(-1, 0),
    "typical_p": _refused(1),
    "xtc_probability": _refused(0),
    # text-generation-webui, KoboldCpp, transformers
    "ban_eos_token": _refused(False, way_out="use ignore_eos"),
    "banned_strings": _refused([], way_out="use bad_words or logit_bias"),
    "custom_token_bans": _refused("", way_out="use bad_words or logit_bias"),
    "do_sample": _refused(True, way_out=WAYS_OUT["do_sample"]),
    "epsilon_cutoff": _refused(0),
    "eta_cutoff": _refused(0),
    "guidance_scale": _refused(1),
    "max_length": _refused(way_out=WAYS_OUT["max_length"]),
    "max_new_tokens": _refused(way_out=WAYS_OUT["max_new_tokens"]),
    "mirostat_mode": _refused(0),
    "negative_prompt": _refused(""),
    "no_repeat_ngram_size": _refused(0),
    "num_beams": _refused(1),
    "penalty_alpha": _refused(0),
    "rep_pen": _refused(1, way_out="use repetition_penalty"),
    "smoothing_factor": _refused(0),
    "tfs": _refused(1),
    "tfs_z": _refused(1),
    "top_a": _refused(0),
    "typical": _refused(1),
}
"""Unsupported fields of completions and chat completions, each with the values that have no effect."""
