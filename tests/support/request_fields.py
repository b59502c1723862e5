"""Every request field of vLLM and OpenAI, and what the server does with it: served, ignored or refused.

`python -m tests.support.request_fields` writes docs/serving/request_fields.md. Verdicts are measured: a field is sent with a
value that asks for something, and the requests that are read from the body are compared with those without it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.fill_in_middle import fills_in_middle
from serve.http_api.endpoints import ENDPOINTS
from serve.http_api.openai_request import Body, parse_json
from serve.http_api.tokenization import detokenize, tokenize
from tests.support.toy_serving import toy_parts

PAGE = Path(__file__).parents[2] / "docs" / "serving" / "request_fields.md"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    "{{ reasoning_effort }}{{ enable_thinking }}{% if add_generation_prompt %}:{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}

# Values that ask for something, by field.
ASKING: dict[str, Any] = {
    "add_generation_prompt": False, "add_special_tokens": False, "allowed_token_ids": [5], "audio": {"voice": "a"},
    "bad_words": ["a"], "background": True, "background_options": {}, "best_of": 2, "cache_salt": "salt",
    "chat_template": "{{ 1 }}", "chat_template_kwargs": {"enable_thinking": True}, "context_management": [{}],
    "continue_final_message": True, "conversation": "c", "dimensions": 2, "documents": [{"text": "a"}], "echo": True,
    "ec_transfer_params": {"a": 1}, "embed_dtype": "float16", "enable_response_messages": True, "encoding_format": "base64",
    "endianness": "big", "frequency_penalty": 0.5, "function_call": {"name": "f"}, "functions": [{"name": "f"}],
    "ignore_eos": True, "include": ["message.output_text.logprobs"], "include_reasoning": False,
    "include_stop_str_in_output": True, "input": "other", "instructions": "Be brief.", "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0, "logit_bias": {"5": 1}, "logits_processors": ["a"], "logprob_token_ids": [5],
    "max_completion_tokens": 3, "max_output_tokens": 3, "max_tokens": 3, "max_tool_calls": 3, "media_io_kwargs": {"a": {}},
    "messages": [{"role": "user", "content": "other"}], "metadata": {"a": "b"}, "min_p": 0.1, "min_tokens": 1,
    "mm_processor_kwargs": {"a": 1}, "modalities": ["text", "audio"], "model": "toy", "moderation": {}, "n": 2,
    "padding": "max_length", "parallel_tool_calls": False, "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 0.5, "previous_input_messages": [{}], "previous_response": {}, "previous_response_id": "r",
    "priority": 1, "prompt": "other", "prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h",
    "prompt_embeds": "aa", "prompt_logprobs": 1, "reasoning": {"effort": "low"}, "reasoning_effort": "low",
    "repetition_detection": {"max_pattern_size": 5}, "repetition_penalty": 1.2, "request_id": "mine", "response_format": SCHEMA,
    "return_mm_kwargs": False, "return_prompt_text": True, "return_token_ids": True, "return_token_offsets": True,
    "return_token_strs": True, "return_tokens_as_token_ids": True, "routed_experts_prompt_start": 1, "safety_identifier": "s",
    "seed": 5, "service_tier": "flex", "session_id": "s", "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "stop": ["x"], "stop_token_ids": [5], "store": True, "stream": True, "stream_interval": 5,
    "stream_options": {"include_usage": True}, "structured_outputs": {"json": {"type": "boolean"}}, "suffix": "b",
    "temperature": 0.5, "text": {"format": {"type": "json_object"}}, "text_1": "other", "text_2": "other",
    "thinking_token_budget": 5, "tokens": [6], "tool_choice": "none", "tools": [TOOL], "top_k": 5, "top_logprobs": 2,
    "top_p": 0.5, "truncate_prompt_tokens": 2, "truncation": "auto", "truncation_side": "right", "use_activation": False,
    "use_beam_search": True, "user": "u", "verbosity": "low", "vllm_xargs": {"a": 1}, "watermarking": True,
    "web_search_options": {}, "access_programs": [{}], "image": {}, "logprobs": True,
}  # fmt: skip

_SAMPLING = [
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "bad_words",
    "add_special_tokens",
    "response_format",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
]
_POOLING = [
    "model",
    "user",
    "truncate_prompt_tokens",
    "padding",
    "truncation_side",
    "request_id",
    "priority",
    "mm_processor_kwargs",
    "cache_salt",
]
_CHAT_TEXT = [
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
]

FIELDS: dict[str, dict[str, list[str]]] = {
    "/v1/completions": {
        "vLLM": ["model", "prompt", "echo", "logprobs", "suffix", *_SAMPLING, "prompt_embeds"],
        "OpenAI": [
            "model",
            "prompt",
            "best_of",
            "echo",
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "max_tokens",
            "n",
            "presence_penalty",
            "seed",
            "stop",
            "stream",
            "stream_options",
            "suffix",
            "temperature",
            "top_p",
            "user",
        ],
    },
    "/v1/chat/completions": {
        "vLLM": [
            *("messages", "model", "logprobs", "top_logprobs", "max_completion_tokens", "tools", "tool_choice"),
            *(
                "reasoning_effort",
                "include_reasoning",
                "parallel_tool_calls",
                "echo",
                "documents",
                "return_prompt_text",
            ),
            *_SAMPLING,
            *_CHAT_TEXT,
        ],
        "OpenAI": [
            "messages",
            "model",
            "audio",
            "frequency_penalty",
            "function_call",
            "functions",
            "logit_bias",
            "logprobs",
            "max_completion_tokens",
            "max_tokens",
            "metadata",
            "modalities",
            "moderation",
            "n",
            "parallel_tool_calls",
            "prediction",
            "presence_penalty",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning_effort",
            "response_format",
            "safety_identifier",
            "seed",
            "service_tier",
            "stop",
            "store",
            "stream",
            "stream_options",
            "temperature",
            "tool_choice",
            "tools",
            "top_logprobs",
            "top_p",
            "user",
            "verbosity",
            "web_search_options",
        ],
    },
    "/v1/responses": {
        "vLLM": [
            "background",
            "include",
            "input",
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "metadata",
            "model",
            "logit_bias",
            "parallel_tool_calls",
            "previous_response_id",
            "prompt",
            "reasoning",
            "service_tier",
            "store",
            "stream",
            "temperature",
            "text",
            "tool_choice",
            "tools",
            "top_logprobs",
            "top_p",
            "top_k",
            "truncation",
            "user",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "prompt_cache_key",
            "request_id",
            "mm_processor_kwargs",
            "priority",
            "cache_salt",
            "enable_response_messages",
            "previous_input_messages",
            "previous_response",
            "structured_outputs",
            "repetition_penalty",
            "seed",
            "stop",
            "ignore_eos",
            "vllm_xargs",
        ],
        "OpenAI": [
            "access_programs",
            "background",
            "background_options",
            "context_management",
            "conversation",
            "image",
            "include",
            "input",
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "metadata",
            "model",
            "moderation",
            "parallel_tool_calls",
            "previous_response_id",
            "prompt",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "store",
            "stream",
            "stream_options",
            "temperature",
            "text",
            "tool_choice",
            "tools",
            "top_logprobs",
            "top_p",
            "truncation",
            "user",
        ],
    },
    "/v1/embeddings": {
        "vLLM": [
            *_POOLING,
            "input",
            "add_special_tokens",
            "messages",
            "encoding_format",
            "embed_dtype",
            "endianness",
            "dimensions",
            "use_activation",
        ],
        "OpenAI": ["input", "model", "dimensions", "encoding_format", "user"],
    },
    "/v1/score": {"vLLM": [*_POOLING, "text_1", "text_2", "use_activation"]},
    "/tokenize": {"vLLM": ["model", "prompt", "messages", "return_token_strs", "tools", *_CHAT_TEXT]},
    "/detokenize": {"vLLM": ["model", "tokens"]},
}
"""Fields by path and API: vLLM's at 002032ee, OpenAI's of its client 3.57."""

BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "you"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
BESIDE: dict[str, dict[str, Any]] = {
    "continue_final_message": {"add_generation_prompt": False},
    "function_call": {"functions": [{"name": "f"}, {"name": "g"}]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
}
"""Fields that another one needs; it stands in both bodies."""
IGNORED = {
    "background_options": "nothing runs in the background",
    "length_penalty": "it belongs to beam search",
    "max_tool_calls": "calls of tools that a server runs; shown in the answer",
    "media_io_kwargs": "there are no media",
    "metadata": "shown in the answer of the Responses API",
    "mm_processor_kwargs": "there are no media",
    "model": "a name of the model; another one is refused",
    "prediction": "only a hint for speed",
    "prompt_cache_retention": "it allows longer caching, which nothing here limits",
    "return_mm_kwargs": "ignored by vLLM here as well",
    "return_token_offsets": "ignored by vLLM here as well",
    "routed_experts_prompt_start": "experts are not returned",
    "safety_identifier": "nothing is stored",
    "store": "nothing is stored without --store-responses",
    "stream_interval": "pieces come as they are computed",
    "stream_options": "usage is in the last event",
    "truncation": "nothing is dropped: input that is too long is refused",
    "user": "nothing is stored",
    "verbosity": "for templates that have it use chat_template_kwargs",
    "vllm_xargs": "no extension reads them, as in vLLM without one",
}
"""Why a field is ignored."""


def _of_endpoint(read: Callable[..., Any]) -> Callable[[EngineComponents, Body], Any]:
    def call(parts: EngineComponents, body: Body) -> Any:
        made = read(parts, body, {}, 0.0, None)
        chat = getattr(made, "chat", made)
        fields = {f.name: getattr(chat, f.name) for f in dataclasses.fields(chat)}
        kept = {k: v for k, v in fields.items() if k not in ("call_id", "created_s", "renamed", "output", "requests")}
        requests = [
            (r.prompt_token_ids.tolist(), dataclasses.replace(r.params, seed=None if "seed" not in body else r.params.seed),
             r.slo_class, r.cache_salt, r.session_id, r.retain_s)
            for r in made.requests
        ]  # fmt: skip
        call_id = made.call_id if "request_id" in body else None
        return repr((kept, requests, call_id))

    return call


READERS: dict[str, Callable[[EngineComponents, Body], Any]] = {
    **{endpoint.path: _of_endpoint(endpoint.read) for endpoint in ENDPOINTS},
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def parts_for_fields() -> EngineComponents:
    return toy_parts(chat_template=ChatTemplate(TEMPLATE), num_blocks=256)


def verdict(parts: EngineComponents, path: str, field: str) -> tuple[str, str]:
    """Measure whether a field is served, ignored or refused, and why."""
    base = {**BASES[path], **BESIDE.get(field, {})}
    if path == "/tokenize" and field in ("tools", "messages", *_CHAT_TEXT):
        base = {"messages": HELLO, **BESIDE.get(field, {})}
    asking = ASKING[field]
    if path == "/v1/responses":
        flat = [{"type": "function", **TOOL["function"]}]
        base |= {"tools": flat} if "tools" in base else {}
        asking = flat if field == "tools" else asking
    if field == "add_special_tokens" and (path == "/v1/chat/completions" or "messages" in base):
        asking = True
    if field == "logprobs" and path == "/v1/completions":
        asking = 2
    if field == "top_logprobs" and path == "/v1/chat/completions":
        base["logprobs"] = True
    body: Mapping[str, Any] = {**base, field: asking}
    try:
        asked = READERS[path](parts, body)
    except InvalidRequestError as error:
        reason = str(error).partition(": ")[2]
        if field == "suffix" and not fills_in_middle(parts.tokenizer):
            return "served", "where the vocabulary has tokens for it"
        return "refused", reason
    if asked != READERS[path](parts, base):
        return "served", ""
    return "ignored", IGNORED.get(field, "")


def _section(title: str, fields: Mapping[str, tuple[str, str]]) -> list[str]:
    served = [f"`{field}`" + (f" ({why})" if why else "") for field, (what, why) in fields.items() if what == "served"]
    others = [
        f"* `{field}` {what}: {why.removeprefix('is not supported; ')}"
        for field, (what, why) in fields.items()
        if what != "served"
    ]
    return [f"## {title}", "", f"Served: {', '.join(served)}.", "", *others, *[""] * bool(others)]


def table(parts: EngineComponents) -> str:
    """The whole page."""
    rows = [
        "# Request fields",
        "",
        "Every request field of vLLM and OpenAI, sent with a value that asks for something: served, ignored on purpose, or refused with 400 and the reason.",
        "Values that ask for nothing (`false`, `null`, defaults) are accepted everywhere.",
        "This page is written by `python -m tests.support.request_fields`, which asks the server.",
        "",
    ]
    found = {
        path: {field: verdict(parts, path, field) for names in apis.values() for field in names}
        for path, apis in FIELDS.items()
    }
    both = found["/v1/completions"].items() & found["/v1/chat/completions"].items()
    shared = {field: what for field, what in found["/v1/completions"].items() if (field, what) in both}
    rows += _section("`/v1/completions` and `/v1/chat/completions`", shared)
    for path, fields in found.items():
        own = {f: w for f, w in fields.items() if (f, w) not in both or "completions" not in path}
        rows += _section(f"`{path}`", own)
    return "\n".join(rows)


def main() -> None:
    parts = parts_for_fields()
    PAGE.write_text(table(parts))
    assert parts.chat_template is not None
    parts.chat_template.close()
    if parts.grammars is not None:
        parts.grammars.close()


if __name__ == "__main__":
    assert parse_json(b"{}") == {}
    main()
