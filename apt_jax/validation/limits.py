"""Bounds on requests: constants, the table of request fields, and the limits of one engine.

`REQUEST_FIELDS` declares type, bounds and default of every field once. It is used by the checks of this package, the
OpenAPI document, the flags of `apt-jax generate`, `chat` and `bench`, and the docs table.
"""

import dataclasses
from typing import Any, Literal, Protocol

import numpy as np

from apt_jax.config import DEFAULT_MAX_SEQUENCES, DEFAULT_MAX_STOP_STRINGS, SLO, SchedulerConfig, SloClass
from apt_jax.errors import InvalidRequestError
from apt_jax.options import field_docs
from apt_jax.request import Grammar, SamplingParams, StructuredOutputsParams

MAX_INTEGER = 2**31 - 1
"""Upper bound on counts, for all models."""
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_PATTERN = rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARS}}}"
MAX_STOP_STRINGS = DEFAULT_MAX_STOP_STRINGS
"""Default maximum number of stop strings of a request (--set max_stop_strings)."""
MAX_STOP_CHARS = 256
MAX_CACHE_SALT_CHARS = 512
MAX_SESSION_ID_CHARS = 512
MAX_RETAIN_S = 3600.0
"""Maximum time for which clients may ask to keep a cached prefix; longer times are shortened to it."""
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_BIAS = 100.0
"""Maximum absolute value of an entry of `logit_bias`."""
MAX_PENALTY = 2.0
"""Maximum absolute value of the presence and frequency penalties."""
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_BYTES = 64 << 10
"""Maximum size in bytes of a schema, regular expression or grammar, and of all choices together."""
MAX_SCHEMA_DEPTH = 64
MAX_TOOL_CALLS = 16
"""Maximum number of function calls in one output: a constrained output ends after this many; in an unconstrained
output, further calls are returned as content."""
MAX_CHOICES = 1024
MAX_WHITESPACE_PATTERN_BYTES = 256
MIN_TEMPERATURE = 0.01
"""Minimum temperature other than 0; smaller temperatures are raised to it, as in vLLM, because scaled logits would
overflow float32."""
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 2.0
MIN_SLO_S = 1e-6
MAX_SLO_S = 86_400.0
MAX_DEADLINE_S = 86_400.0
MAX_WATCH_CAPACITY = 4096
MAX_SEQUENCES = DEFAULT_MAX_SEQUENCES
"""Default maximum number of outputs of a call, prompts times `n` (--set max_sequences_per_call)."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18
TOO_LONG = "context_length_exceeded"
"""`InvalidRequestError.code` of prompts and outputs that are too long for the model or the cache."""
MIN_POSITIVE = float(np.finfo(np.float32).tiny)
"""Smallest positive number accepted; numbers closer to 0 would become 0 on the device."""

_MS = 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """Type, bounds and meaning of one field of a request."""

    name: str
    type: Literal["boolean", "integer", "number", "string", "strings", "token ids", "bias map", "object"]
    min: float | None = None
    """Minimum of a number, or of a map's values."""
    max: float | None = None
    open_min: bool = False
    """True if `min` itself is excluded."""
    max_items: int | None = None
    """Maximum length of a list or map."""
    max_chars: int | None = None
    """Maximum number of characters of each string; strings must not be empty."""
    choices: tuple[str, ...] = ()
    rule: str = ""
    """End of the message "VALUE must ..."; empty: derived from the range."""
    note: str = ""
    """Text appended to the message about a value outside the range."""
    text: str = ""
    """Meaning of the field; empty: the docstring of the `SamplingParams` field of this name."""

    @property
    def range(self) -> str:
        """Accepted numbers, e.g. ``(0, 1]`` or ``at least 1``; empty: not a number."""
        if self.min is None or self.max is None:
            return ""
        if self.rule:
            return self.rule.removeprefix("be ")
        if self.max == MAX_INTEGER:
            return f"at least {self.min:g}"
        high = self.max if self.type == "integer" else f"{self.max:.10g}"
        return f"{'(' if self.open_min else '['}{self.min:g}, {high}]"

    @property
    def bounds(self) -> str:
        """Accepted values, for tables and help texts; empty: any value of the type."""
        parts = [
            f"at most {self.max_items}" if self.max_items else "",
            f"{'of ' if self.max_items else ''}1 to {self.max_chars} characters" if self.max_chars else "",
            f"{'values in ' if self.max_items else ''}{self.range}" if self.range else "",
            " or ".join(self.choices),
        ]  # fmt: skip
        return ", ".join(filter(None, parts))

    @property
    def must(self) -> str:
        """End of the message "VALUE must ..." about a number outside the range."""
        if self.rule:
            return self.rule
        if self.type == "integer":
            return f"be {'' if self.max == MAX_INTEGER else 'an integer in '}{self.range}"
        return f"lie in {self.range}{self.note}"

    @property
    def default(self) -> Any:
        """Value of the field if not given; None: depends on the server."""
        return getattr(_DEFAULTS, self.name, None)

    @property
    def description(self) -> str:
        return self.text or field_docs(SamplingParams)[self.name]


_DEFAULTS = SamplingParams()

REQUEST_FIELDS: dict[str, FieldSpec] = {
    spec.name: spec
    for spec in (
        FieldSpec(name="max_tokens", type="integer", min=1, max=MAX_INTEGER),
        FieldSpec(name="temperature", type="number", min=0, max=MAX_TEMPERATURE, note="; 0 is greedy"),
        FieldSpec(name="top_k", type="integer", min=-1, max=MAX_INTEGER, rule="be at least 1, or 0 for off"),
        FieldSpec(name="top_p", type="number", min=0, max=1, note="; 1 is off, 0 keeps the most likely token"),
        FieldSpec(name="min_p", type="number", min=0, max=1, note="; 0 is off"),
        FieldSpec(name="seed", type="integer", min=-MAX_SEED - 1, max=MAX_SEED, rule="be a 64-bit integer; -1 is a random seed"),
        FieldSpec(name="repetition_penalty", type="number", min=MIN_REPETITION_PENALTY, max=MAX_REPETITION_PENALTY, note="; 1 is off"),
        FieldSpec(name="presence_penalty", type="number", min=-MAX_PENALTY, max=MAX_PENALTY, note="; 0 is off"),
        FieldSpec(name="frequency_penalty", type="number", min=-MAX_PENALTY, max=MAX_PENALTY, note="; 0 is off"),
        FieldSpec(name="logit_bias", type="bias map", max_items=MAX_LOGIT_BIAS, min=-MAX_BIAS, max=MAX_BIAS),
        FieldSpec(name="min_tokens", type="integer", min=0, max=MAX_INTEGER),
        FieldSpec(name="stop", type="strings", max_items=MAX_STOP_STRINGS, max_chars=MAX_STOP_CHARS),
        FieldSpec(name="stop_token_ids", type="token ids", max_items=MAX_STOP_TOKEN_IDS),
        FieldSpec(name="ignore_eos", type="boolean"),
        FieldSpec(name="include_stop_str_in_output", type="boolean"),
        FieldSpec(name="skip_special_tokens", type="boolean"),
        FieldSpec(name="logprobs", type="integer", min=0, max=MAX_LOGPROBS),
        FieldSpec(name="prompt_logprobs", type="integer", min=0, max=MAX_LOGPROBS),
        FieldSpec(name="structured_outputs", type="object"),
        FieldSpec(name="bad_words", type="strings", max_items=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS),
        FieldSpec(name="allowed_token_ids", type="token ids", max_items=MAX_ALLOWED_TOKEN_IDS),
        FieldSpec(name="truncate_prompt_tokens", type="integer", min=-1, max=MAX_INTEGER, rule="be at least 1, or -1 for as many as fit"),
        FieldSpec(name="n", type="integer", min=1, max=MAX_SEQUENCES, text="Number of outputs per prompt."),
        FieldSpec(name="request_id", type="string", max_chars=MAX_REQUEST_ID_CHARS, text="Label of the request, unique among the tenant's live requests."),
        FieldSpec(name="cache_salt", type="string", max_chars=MAX_CACHE_SALT_CHARS, text="Only requests with the same salt share cached prefixes."),
        FieldSpec(name="session_id", type="string", max_chars=MAX_SESSION_ID_CHARS, text="Session that the call belongs to; `--retention` keeps cached prefixes by session."),
        FieldSpec(name="slo_ttft_ms", type="number", min=_MS * MIN_SLO_S, max=_MS * MAX_SLO_S, text="TTFT SLO: time from arrival to the first token, in milliseconds."),
        FieldSpec(name="slo_tbt_ms", type="number", min=_MS * MIN_SLO_S, max=_MS * MAX_SLO_S, text="TBT SLO: P99 of the gaps between tokens, in milliseconds."),
        FieldSpec(name="slo_e2e_ms", type="number", min=_MS * MIN_SLO_S, max=_MS * MAX_SLO_S, text="End-to-end SLO: time from arrival to the last token, in milliseconds; a later request is not aborted."),
        FieldSpec(name="slo_class", type="string", choices=("rt", "be"), text="Service class: real time or best effort (default: the server's, --set default_slo_class)."),
        FieldSpec(name="deadline_ms", type="number", min=0, max=_MS * MAX_DEADLINE_S, open_min=True, text="Time from arrival after which the request is cancelled, in milliseconds."),
    )
}  # fmt: skip
"""Declared request fields, keyed by name; the fields of `SamplingParams` come first."""


def request_fields_table() -> str:
    """Return the table of request fields as Markdown, for the documentation."""
    rows = ["| field | type | values | default | meaning |", "|---|---|---|---|---|"]
    for spec in REQUEST_FIELDS.values():
        default = "" if spec.default in (None, ()) else f"`{str(spec.default).lower()}`"
        rows.append(f"| `{spec.name}` | {spec.type} | {spec.bounds} | {default} | {spec.description} |")
    return "\n".join(rows) + "\n"


class Encoder(Protocol):
    """The part of a tokenizer that validation uses."""

    vocab_size: int
    """Number of token ids; valid ids are in [0, vocab_size)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on `len(encode(text))` that is cheap to compute."""
        ...


class GrammarSource(Protocol):
    """A compiler of grammars; see `apt_jax.structured.compiler.GrammarCompiler`."""

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Grammar: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of the requests that one engine can serve."""

    vocab_size: int
    """V, the smaller of the vocabulary sizes of tokenizer and model: token ids are in [0, V)."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    max_pool_tokens: int | None = None
    """Number of tokens that the whole cache pool can hold in the most compact cache kind; None: unknown."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end an output unless `ignore_eos` is set."""
    max_sequences: int = MAX_SEQUENCES
    """Maximum number of outputs of a call: prompts times `n`."""
    max_stop_strings: int = MAX_STOP_STRINGS
    """Maximum number of stop strings of a request."""
    default_slo: SLO = SLO()  # noqa: RUF009 - frozen
    """Default SLO of real-time requests."""
    default_slo_class: SloClass = "rt"
    """Default class of requests."""
    max_prompt_logprobs: int = SchedulerConfig.max_prompt_logprobs
    """Maximum number of prompt log probabilities that a call may ask for."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that requests may use."""


_TEXT_ALONE = "the model accepts only text; leave it out"
_ONE_PLACE = "a request is computed by one server; leave it out"
UNSUPPORTED = {
    "structural_tag": "structural tags are not supported; use json, regex, choice or grammar",
    "mm_inputs": _TEXT_ALONE,
    "extra_mm_inputs": _TEXT_ALONE,
    "media_refs": _TEXT_ALONE,
    "kv_transfer_params": _ONE_PLACE,
    "kv_transfer_params_json": _ONE_PLACE,
    "data_parallel_rank": "there is one rank, 0; leave it out",
    "dp_rank": "there is one rank, 0; leave it out",
}
"""Error messages for fields that clients of other engines may send, keyed by field."""


def unsupported(field: str) -> InvalidRequestError:
    """Return the error for a field that other engines accept and this engine does not."""
    return InvalidRequestError(field, UNSUPPORTED[field])
