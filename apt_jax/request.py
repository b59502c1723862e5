"""The types that represent a request and its outputs at each stage.

1. A front end collects raw user input and calls `apt_jax.validation.build_request`.
2. This returns an `EngineRequest`: frozen, complete and validated. No other function creates them, and the engine loop
   accepts no other requests.
3. The engine returns `RequestOutput`s with the text and tokens so far; the last has a finish reason and
   `RequestMetrics`.

Field names and defaults follow vLLM.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO, SloClass
from apt_jax.core.kinds import CacheKindName
from apt_jax.errors import explained

FinishReason = Literal["stop", "length", "abort", "error"]

_STRUCTURED = "use structured_outputs=StructuredOutputsParams(...)"
WAYS_OUT = {
    # vLLM
    "best_of": "raise n and choose by logprobs",
    "detokenize": "outputs have text and token ids; leave it out",
    "early_stopping": "beam search is not supported; leave it out",
    "extra_args": "there are no plugins that read it; leave it out",
    "flat_logprobs": "logprobs are a list with a dict per token; leave it out",
    "guided_decoding": _STRUCTURED,
    "length_penalty": "beam search is not supported; leave it out",
    "logits_processors": "requests cannot run code; use logit_bias, bad_words or a constraint",
    "output_kind": "LLM returns whole outputs, AsyncEngine.submit deltas; leave it out",
    "repetition_detection": "use repetition_penalty or max_tokens",
    "skip_reading_prefix_cache": "use LLM(..., enable_prefix_caching=False)",
    "spaces_between_special_tokens": "use the token ids of the output",
    "thinking_token_budget": "use max_tokens, or enable_thinking in chat_template_kwargs",
    "use_beam_search": "use n with a temperature, or a temperature of 0",
    # SGLang
    "ebnf": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "max_new_tokens": "use max_tokens",
    "no_stop_trim": "use include_stop_str_in_output",
    "regex": _STRUCTURED,
    "stop_regex": "use stop",
    # llama.cpp, transformers
    "do_sample": "use a temperature of 0 for greedy outputs",
    "grammar": _STRUCTURED,
    "max_length": "use max_tokens",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
}
"""Replacements for sampling parameters of other engines, keyed by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the whole output: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is set.
    See docs/structured_output.md."""

    json: str | bool | Mapping[str, object] | None = None
    """JSON schema, as JSON text or as an object; the output is one JSON value that the schema allows."""
    regex: str | None = None
    """Regular expression that the whole output matches, without look-around and backreferences."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """Context-free grammar in llguidance's dialect of Lark (start rule ``start``) or in GBNF (start rule ``root``)."""
    json_object: bool | None = None
    """True: the output is any JSON object."""
    disable_any_whitespace: bool = False
    """True: no whitespace between the tokens of the JSON; applies to `json` and `json_object`."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace allowed between JSON tokens, for `json` and `json_object`; None: the
    whitespace that common pretty-printers write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Bounds are declared in `apt_jax.validation.REQUEST_FIELDS` and checked for all front
    ends."""

    max_tokens: int = 16
    """Maximum number of output tokens. None, as in vLLM: as many as the model's length and the cache allow."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum; 1: off."""
    min_p: float = 0.0
    """Sample only tokens at least this likely relative to the most likely token; 0: off."""
    seed: int | None = None
    """Random seed for sampling; each draw depends only on the seed and the token's position. None: the engine picks a
    seed."""
    repetition_penalty: float = 1.0
    """Factor for tokens that occur in the prompt or output: positive logits are divided by it, negative logits
    multiplied; 1: off."""
    presence_penalty: float = 0.0
    """Amount subtracted once from the logit of every token that is in the output; 0: off."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit for each occurrence in the output; 0: off."""
    logit_bias: Mapping[int, float] | None = None
    """Amount added to a token's logit, keyed by token id."""
    min_tokens: int = 0
    """Minimum number of output tokens: until then neither EOS, stop tokens nor stop strings end the output."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation ends when one of them appears in the output text."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens: generation ends when one of them is sampled."""
    ignore_eos: bool = False
    """Ignore the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string in the output text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output text."""
    logprobs: int | None = None
    """Return the log probabilities of each sampled token and of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """Return the log probability of each prompt token after the first, and of this many most likely tokens at its
    position."""
    pooling: Literal["mean", "last"] | None = None
    """Return a hidden state of the prompt after the final norm: the mean over its tokens or the last token's."""
    structured_outputs: StructuredOutputsParams | None = None
    """Structured output constraint: in every step, tokens that cannot continue an allowed output are masked."""
    bad_words: tuple[str, ...] = ()
    """Words that the output must not contain: when all tokens of a word but the last have been generated, the last is
    masked."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Ids of the only tokens that may be sampled; end tokens must be listed too. None: all tokens."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of prompt tokens to keep, counted from the end; earlier tokens are dropped. -1: as many as fit
    together with the output; None: no limit."""
    n: int = 1
    """Number of outputs per prompt, with the seeds ``seed``, ``seed + 1`` and so on."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        """True if logits are changed by penalties, a bias or `min_tokens`."""
        return self.counts_tokens or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def counts_tokens(self) -> bool:
        """True if a penalty depends on the tokens of the prompt or output."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


SamplingParams.__init__ = explained(WAYS_OUT)(SamplingParams.__init__)
StructuredOutputsParams.__init__ = explained(
    {"json_schema": "use json", "choices": "use choice", "backend": "llguidance serves every constraint; leave it out"}
)(StructuredOutputsParams.__init__)


class TokenConstraint(Protocol):
    """State of a constraint: the tokens that one request may generate next, given its output so far. If a method
    raises, only this request fails."""

    @property
    def ended(self) -> bool:
        """True if the output is complete and nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the next token of the output, which is never a stop token."""
        ...

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        """Write the mask of allowed next tokens into all words of `row`: bit i % 32 of ``row[i // 32]`` for token i.

        Returns:
            False if no token may follow: the output is complete, or no token of the vocabulary continues it.
        """
        ...


class Grammar(Protocol):
    """A compiled constraint on outputs; requests may share it."""

    def start(self) -> TokenConstraint:
        """Return the constraint's state at the start of an output. Must be fast, because it runs in the engine
        thread."""
        ...


def engine_id(tenant: str | None, label: str) -> str:
    """Return the engine's id for a tenant's request. Ids of different tenants never collide, because labels contain no
    colon."""
    return label if tenant is None else f"{tenant}:{label}"


def split_engine_id(request_id: str) -> tuple[str | None, str]:
    """Return the tenant and the label in an engine's request id; tenant None: the request has no tenant."""
    tenant, colon, label = request_id.rpartition(":")
    return (tenant if colon else None), label


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """A validated request, created only by `apt_jax.validation.build_request`."""

    request_id: str
    """Id unique among live requests: `engine_id` of tenant and label."""
    prompt: str | None
    """Text of the prompt; None: it was given as tokens, or `truncate_prompt_tokens` is set."""
    prompt_token_ids: NDArray[np.int32]
    """Token ids of the prompt, (prompt_len,), read-only."""
    params: SamplingParams
    """Sampling parameters with `seed` filled in, and the model's EOS added to `stop_token_ids` unless `ignore_eos`."""
    slo: SLO
    arrival_s: float
    """Arrival time on the engine's clock."""
    slo_class: SloClass = "rt"
    """Class of the request: real time or best effort."""
    grammar: Grammar | None = None
    """Constraint compiled from `params.structured_outputs`."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that `params.bad_words` forbid (`apt_jax.validation.sampling.bad_words_token_ids`)."""
    num_outputs: int = 1
    """Number of outputs that the call asks for per prompt (`n`)."""
    max_queue_s: float | None = None
    """Maximum queueing time in seconds, after which the request is rejected; None: the server's limit. Values above the
    server's limit have no effect."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: no adapter. Requests with different adapters share no cached prefixes, because
    the cache depends on the adapter."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests that have the same salt; None is a salt too."""
    tenant: str | None = None
    """Tenant, derived from the API key and never from the request. Tenants have separate ids and separate shares of the
    queue, and share cached prefixes only with `CacheConfig.share_prefixes`."""

    session_id: str | None = None
    """Session that the call belongs to, as its client names it; sessions never cross tenants. None: the session whose
    cached prefix the prompt continues, if any (`apt_jax.engine.sessions`)."""
    retain_s: float | None = None
    """Seconds after the answer for which the client asks to keep the session's cache, or after which a simulation's next
    call comes; advice that retention policies bound. None or 0: the client does not ask."""
    work: Literal["", "tool", "person"] = ""
    """Kind of work that the answer asks for before the session's next call, as far as it is known beforehand
    (`Engine.note_answer`)."""

    @property
    def has_token_rules(self) -> bool:
        """True if `allowed_token_ids` or bad words mask tokens, independently of `grammar`."""
        return self.params.allowed_token_ids is not None or bool(self.bad_words_token_ids)

    @property
    def label(self) -> str:
        """The client's request id, at most 128 characters of ``[A-Za-z0-9._-]``. Further requests of one
        `apt_jax.validation.build_requests` call get the suffixes ``#1``, ``#2`` and so on."""
        return split_engine_id(self.request_id)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log probability and its text."""

    logprob: float
    rank: int | None
    """Rank of the token, 1 for the most likely; None: the token is not among the returned most likely tokens."""
    decoded_token: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Natural log probabilities of m prompt tokens, each given the tokens before it."""

    logprob: NDArray[np.float32]
    """Log probability of each token, (m,)."""
    rank: NDArray[np.int32]
    """Rank of each token, (m,); 1 for the most likely."""
    top_ids: NDArray[np.int32]
    """Ids of the k most likely tokens at each position, (m, k), most likely first."""
    top_logprobs: NDArray[np.float32]
    """Log probabilities of `top_ids`, (m, k)."""


@dataclasses.dataclass(kw_only=True)
class RequestMetrics:
    """Times and counts of one request. Times are seconds on the engine's clock."""

    arrival_s: float
    first_scheduled_s: float | None = None
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    """Delivery time of each output token."""
    finished_s: float | None = None
    num_preemptions: int = 0
    num_kind_switches: int = 0
    num_conversions: int = 0
    """Number of times that the cached layer inputs were converted to keys and values while the request ran."""
    recomputed_tokens: int = 0
    """Number of positions computed again after preemptions."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were already cached, on the device or in host memory, when the request was first
    scheduled; they were not computed. 0 without prefix caching. HTTP answers have it as `cached_tokens` of the usage."""
    cache_kind: CacheKindName | None = None
    """Cache kind that the request held last; None: it never held a cache."""
    num_blocks: int | None = None
    """Number of blocks, including shared blocks, when the cache was last released; None: never released."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to first token, in seconds; None: no token yet."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tbt_s(self) -> float | None:
        """P99 over the gaps between tokens in seconds (NumPy's linear interpolation); None: fewer than two tokens."""
        if len(self.token_times_s) < 2:
            return None
        return float(np.percentile(np.diff(self.token_times_s), 99))

    @property
    def ttft_attained(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= self.slo.ttft_s

    @property
    def tbt_attained(self) -> bool:
        """True if the P99 gap is within the SLO, or the output has only one token and hence no gap."""
        return bool(self.token_times_s) and (self.tbt_s is None or self.tbt_s <= self.slo.tbt_s)

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the last token so far, in seconds; None: no token yet."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def e2e_attained(self) -> bool:
        return self.e2e_s is not None and self.e2e_s <= self.slo.e2e_s

    @property
    def slo_attained(self) -> bool:
        return self.ttft_attained and self.tbt_attained and self.e2e_attained


@dataclasses.dataclass(kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry per token: the log probabilities of the sampled token and the most likely tokens, keyed by token id."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token or stop string that ended the output; None: another reason, such as EOS."""


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """State of one request: everything generated so far, not a delta."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    """Error message if the request ended with `finish_reason == "error"`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token: the log probabilities of the token and the most likely tokens at its position, keyed
    by token id; the first entry is None. None: not requested."""
    pooled: NDArray[np.float32] | None = None
    """Pooled hidden state of the prompt, (D,), not normalised; None: `SamplingParams.pooling` is not set."""
