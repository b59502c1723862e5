"""The types of a request on its way through the engine.

1. A front end collects raw user input and calls `apt_jax.validation.build_request`, the only maker of
2. `EngineRequest`: frozen, complete and checked; nothing else reaches the loop.
3. The engine answers with `RequestOutput`s: growing text and tokens, and at the end a finish reason and
   `RequestMetrics`.

Field names and defaults follow vLLM, so that code written for it reads the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO, SloClass
from apt_jax.core.kinds import CacheKindName

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the whole output; exactly one of the first five. See docs/structured_output.md."""

    json: str | bool | Mapping[str, object] | None = None
    """JSON schema, as JSON text or as an object; an output is one JSON value that it allows."""
    regex: str | None = None
    """Regular expression that the whole output matches; no look-around, no references back."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """Context-free grammar in llguidance's dialect of Lark; ``start`` is the output. Or in GBNF, where ``root`` is."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """With `json` and `json_object`: no whitespace between the parts of a value."""
    whitespace_pattern: str | None = None
    """With `json` and `json_object`: regular expression of whitespace between parts; None: as pretty-printers put
    it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Bounds are declared in `apt_jax.validation.REQUEST_FIELDS` and checked for every front end
    alike."""

    max_tokens: int = 16
    """Maximum number of output tokens. None, as in vLLM: as many as there is room for after the prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum; 1: off."""
    min_p: float = 0.0
    """Sample only tokens at least this likely relative to the most likely one; 0: off."""
    seed: int | None = None
    """Random seed for sampling; draws depend on it and the token's position alone. None: the engine picks one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1: off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output; 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output; 0: off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    min_tokens: int = 0
    """Number of output tokens before which neither EOS, a stop token nor a stop string ends the output."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation ends when one of them appears in the output text."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens: generation ends after one of them."""
    ignore_eos: bool = False
    """Ignore the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Return the log probabilities of the sampled token and of this many most likely ones."""
    prompt_logprobs: int | None = None
    """Return the log probability of each token of the prompt after the first, and of this many most likely ones in its
    place."""
    pooling: Literal["mean", "last"] | None = None
    """Return the hidden states of the prompt after the final norm, their mean or the last token's."""
    structured_outputs: StructuredOutputsParams | None = None
    """Structured output constraint: tokens that lead to no allowed output are masked at every step."""
    bad_words: tuple[str, ...] = ()
    """Words that the output must not hold: of each the last token is masked where the tokens before it have just come."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled, end tokens among them. None: all."""
    truncate_prompt_tokens: int | None = None
    """Keep only the prompt's last tokens, at most this many; -1: as many as leave room for the output. None: all."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        """True if the logits depend on the tokens so far, or on a bias."""
        return self.counts_tokens or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def counts_tokens(self) -> bool:
        """True if the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenConstraint(Protocol):
    """The tokens that one request may generate next, given its output so far. It may raise: that ends its request
    alone."""

    @property
    def ended(self) -> bool:
        """Return True if the output is complete and nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token of the output; never a stop token."""
        ...

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        """Write the mask of allowed next tokens: bit i % 32 of ``row[i // 32]`` for token i, every word of it.

        Returns:
            False: nothing may follow, the output is complete (or no token of the vocabulary leads on).
        """
        ...


class Grammar(Protocol):
    """A constraint on outputs, ready to use; shared by requests."""

    def start(self) -> TokenConstraint:
        """A constraint at the beginning of an output; quick, called from the engine's thread."""
        ...


def engine_id(tenant: str | None, label: str) -> str:
    """The engine's id of a tenant's request: tenants cannot collide, as no label holds a colon."""
    return label if tenant is None else f"{tenant}:{label}"


def split_engine_id(request_id: str) -> tuple[str | None, str]:
    """The tenant and the label of an engine's id; a tenant of None: its request has none."""
    tenant, colon, label = request_id.rpartition(":")
    return (tenant if colon else None), label


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """A checked request. Made by `apt_jax.validation.build_request` only."""

    request_id: str
    """The engine's id, unique among live requests: `engine_id` of tenant and label."""
    prompt: str | None
    """The prompt's text where there was one."""
    prompt_token_ids: NDArray[np.int32]
    """(prompt_len,), not writeable."""
    params: SamplingParams
    """With `seed` filled in and `stop_token_ids` merged with the model's EOS unless `ignore_eos`."""
    slo: SLO
    arrival_s: float
    """Arrival time on the engine's clock."""
    slo_class: SloClass = "rt"
    """Real time, or best effort."""
    grammar: Grammar | None = None
    """Compiled from `params.structured_outputs`."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as tokens, with and without a space before each."""
    num_outputs: int = 1
    """Outputs that its call asks for to the same prompt (`n`)."""
    max_queue_s: float | None = None
    """Time from arrival after which it is rejected unless it was scheduled by then, seconds; None: the server's. It
    shortens that one only."""
    adapter: str | None = None
    """LoRA adapter that it runs with, by name; None: the model alone. Requests of different adapters share no cached
    prefixes: what is cached depends on the adapter."""
    cache_salt: str | None = None
    """Only requests of the same salt share cached prefixes; None: a salt of its own."""
    tenant: str | None = None
    """The tenant, by API key; never what the request claims. Tenants share neither queue places nor ids, nor cached
    prefixes unless `CacheConfig.share_prefixes`."""

    @property
    def has_token_rules(self) -> bool:
        """True if tokens are masked for other reasons than `grammar`."""
        return self.params.allowed_token_ids is not None or bool(self.bad_words_token_ids)

    @property
    def label(self) -> str:
        """The client's id, at most 128 of ``[A-Za-z0-9._-]``. ``#1`` and so on follow it in the further requests of
        `apt_jax.validation.build_requests`."""
        return split_engine_id(self.request_id)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log probability and its text."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None where it was not among the returned ones."""
    decoded_token: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of m tokens of a prompt, each given the tokens before it; natural logarithms."""

    logprob: NDArray[np.float32]
    """(m,)"""
    rank: NDArray[np.int32]
    """(m,) 1 where no token was more likely."""
    top_ids: NDArray[np.int32]
    """(m, k) most likely tokens in its place, best first."""
    top_logprobs: NDArray[np.float32]
    """(m, k)"""


@dataclasses.dataclass(kw_only=True)
class RequestMetrics:
    """Times of one request, on the engine's clock."""

    arrival_s: float
    first_scheduled_s: float | None = None
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    """Delivery time of each output token."""
    finished_s: float | None = None
    num_preemptions: int = 0
    num_kind_switches: int = 0
    num_conversions: int = 0
    """Times that its layer inputs became keys and values while it ran."""
    recomputed_tokens: int = 0
    """Positions computed again after preemptions."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed because their cache was there already, when it was first scheduled."""
    cache_kind: CacheKindName | None = None
    """The kind held last."""
    num_blocks: int | None = None
    """Blocks of its cache when it was last released, shared ones included; None: never released."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None before it."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tbt_s(self) -> float | None:
        """P99 over the gaps between tokens (numpy's linear interpolation); None with fewer than two tokens."""
        if len(self.token_times_s) < 2:
            return None
        return float(np.percentile(np.diff(self.token_times_s), 99))

    @property
    def ttft_attained(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= self.slo.ttft_s

    @property
    def tbt_attained(self) -> bool:
        """True with a single token: there is no gap to miss."""
        return bool(self.token_times_s) and (self.tbt_s is None or self.tbt_s <= self.slo.tbt_s)

    @property
    def slo_attained(self) -> bool:
        return self.ttft_attained and self.tbt_attained


@dataclasses.dataclass(kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry per token: the sampled token and the most likely ones."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for EOS."""


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """The state of one request, whole so far (not a delta)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    """Reason for which it ended with `finish_reason == "error"`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token where the request asked for it, None for the first: the token and the most likely
    ones in its place."""
    pooled: NDArray[np.float32] | None = None
    """(D,) pooled states of the prompt, not normalised, where `SamplingParams.pooling` asked for them."""
