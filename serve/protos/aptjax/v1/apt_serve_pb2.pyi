from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SloClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLO_CLASS_UNSPECIFIED: _ClassVar[SloClass]
    SLO_CLASS_RT: _ClassVar[SloClass]
    SLO_CLASS_BE: _ClassVar[SloClass]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class CacheKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_KIND_UNSPECIFIED: _ClassVar[CacheKind]
    CACHE_KIND_KV: _ClassVar[CacheKind]
    CACHE_KIND_HIDDEN: _ClassVar[CacheKind]
SLO_CLASS_UNSPECIFIED: SloClass
SLO_CLASS_RT: SloClass
SLO_CLASS_BE: SloClass
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
CACHE_KIND_UNSPECIFIED: CacheKind
CACHE_KIND_KV: CacheKind
CACHE_KIND_HIDDEN: CacheKind

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "sampling", "slo", "slo_class", "deadline_ms", "retain_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    sampling: SamplingParams
    slo: Slo
    slo_class: SloClass
    deadline_ms: float
    retain_s: float
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., slo_class: _Optional[_Union[SloClass, str]] = ..., deadline_ms: _Optional[float] = ..., retain_s: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "structured_outputs", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    structured_outputs: StructuredOutputs
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., logprobs: _Optional[int] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "whitespace_pattern")
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    json: str
    regex: str
    choice: Choices
    grammar: str
    json_object: bool
    disable_any_whitespace: bool
    whitespace_pattern: str
    def __init__(self, json: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: _Optional[bool] = ..., disable_any_whitespace: _Optional[bool] = ..., whitespace_pattern: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_ms", "tbt_ms", "e2e_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tbt_ms: float
    e2e_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "sequence", "text", "token_ids", "logprobs", "finish", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sequence: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: Finish
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., sequence: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("sampled", "top")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    sampled: Logprob
    top: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, sampled: _Optional[_Union[Logprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "token_text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    token_text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., token_text: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "timings", "slo", "cache_kind", "num_preemptions", "num_kind_switches", "recomputed_tokens", "num_conversions", "slo_class")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    CACHE_KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_KIND_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    timings: Timings
    slo: SloResult
    cache_kind: CacheKind
    num_preemptions: int
    num_kind_switches: int
    recomputed_tokens: int
    num_conversions: int
    slo_class: SloClass
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., slo: _Optional[_Union[SloResult, _Mapping]] = ..., cache_kind: _Optional[_Union[CacheKind, str]] = ..., num_preemptions: _Optional[int] = ..., num_kind_switches: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., num_conversions: _Optional[int] = ..., slo_class: _Optional[_Union[SloClass, str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "ttft_ms", "p99_tbt_ms", "p99_tbt_drop_first_ms", "total_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    P99_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    P99_TBT_DROP_FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    ttft_ms: float
    p99_tbt_ms: float
    p99_tbt_drop_first_ms: float
    total_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., p99_tbt_ms: _Optional[float] = ..., p99_tbt_drop_first_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class SloResult(_message.Message):
    __slots__ = ("ttft_ms", "tbt_ms", "ttft_attained", "tbt_attained", "attained", "e2e_ms", "e2e_attained")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    TBT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    ATTAINED_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tbt_ms: float
    ttft_attained: bool
    tbt_attained: bool
    attained: bool
    e2e_ms: float
    e2e_attained: bool
    def __init__(self, ttft_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., ttft_attained: _Optional[bool] = ..., tbt_attained: _Optional[bool] = ..., attained: _Optional[bool] = ..., e2e_ms: _Optional[float] = ..., e2e_attained: _Optional[bool] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("model", "scheduling_policy", "cache", "uptime_s", "max_model_len", "num_waiting", "num_running", "num_ending", "waiting_prompt_tokens", "requests_by_kind", "total_blocks", "free_blocks", "blocks_by_kind", "block_size", "iterations", "finished", "num_refused", "num_preemptions", "kind_switches", "recomputed_tokens", "prompt_tokens", "generation_tokens", "step_failures", "compilations", "host_p50_ms", "host_p99_ms", "schedule_p50_ms", "dispatch_p50_ms", "schedule_p99_ms", "mask_p50_ms", "mask_p99_ms", "prefix_cache_queries", "prefix_cache_hits", "cached_blocks", "waiting_uncached_tokens", "num_doubtful", "expected_wait_s", "num_conversions", "recomputed_by_cause", "host_blocks", "used_host_blocks", "saved_blocks", "loaded_blocks", "saved_bytes", "loaded_bytes", "host_hit_tokens", "restores", "num_lost_groups", "disk_bytes", "disk_read_bytes", "disk_written_bytes", "disk_hit_tokens", "num_dropped_files", "num_unwritten_groups", "num_waiting_best_effort", "num_running_best_effort", "best_effort_prompt_tokens", "best_effort_generation_tokens", "saved_slots", "loaded_slots", "device_hit_tokens", "changed_prefix_tokens")
    class RequestsByKindEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BlocksByKindEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class IterationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KindSwitchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RecomputedByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RestoresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_POLICY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KIND_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILURES_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_P50_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_P99_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_P50_MS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_P50_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_P99_MS_FIELD_NUMBER: _ClassVar[int]
    MASK_P50_MS_FIELD_NUMBER: _ClassVar[int]
    MASK_P99_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DOUBTFUL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FILES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNWRITTEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BEST_EFFORT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_BEST_EFFORT_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    scheduling_policy: str
    cache: str
    uptime_s: float
    max_model_len: int
    num_waiting: int
    num_running: int
    num_ending: int
    waiting_prompt_tokens: int
    requests_by_kind: _containers.ScalarMap[str, int]
    total_blocks: int
    free_blocks: int
    blocks_by_kind: _containers.ScalarMap[str, int]
    block_size: int
    iterations: _containers.ScalarMap[str, int]
    finished: _containers.ScalarMap[str, int]
    num_refused: int
    num_preemptions: int
    kind_switches: _containers.ScalarMap[str, int]
    recomputed_tokens: int
    prompt_tokens: int
    generation_tokens: int
    step_failures: int
    compilations: int
    host_p50_ms: float
    host_p99_ms: float
    schedule_p50_ms: float
    dispatch_p50_ms: float
    schedule_p99_ms: float
    mask_p50_ms: float
    mask_p99_ms: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    cached_blocks: int
    waiting_uncached_tokens: int
    num_doubtful: int
    expected_wait_s: float
    num_conversions: int
    recomputed_by_cause: _containers.ScalarMap[str, int]
    host_blocks: int
    used_host_blocks: int
    saved_blocks: int
    loaded_blocks: int
    saved_bytes: int
    loaded_bytes: int
    host_hit_tokens: int
    restores: _containers.ScalarMap[str, int]
    num_lost_groups: int
    disk_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    disk_hit_tokens: int
    num_dropped_files: int
    num_unwritten_groups: int
    num_waiting_best_effort: int
    num_running_best_effort: int
    best_effort_prompt_tokens: int
    best_effort_generation_tokens: int
    saved_slots: int
    loaded_slots: int
    device_hit_tokens: int
    changed_prefix_tokens: int
    def __init__(self, model: _Optional[str] = ..., scheduling_policy: _Optional[str] = ..., cache: _Optional[str] = ..., uptime_s: _Optional[float] = ..., max_model_len: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_ending: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., requests_by_kind: _Optional[_Mapping[str, int]] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., blocks_by_kind: _Optional[_Mapping[str, int]] = ..., block_size: _Optional[int] = ..., iterations: _Optional[_Mapping[str, int]] = ..., finished: _Optional[_Mapping[str, int]] = ..., num_refused: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., kind_switches: _Optional[_Mapping[str, int]] = ..., recomputed_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., step_failures: _Optional[int] = ..., compilations: _Optional[int] = ..., host_p50_ms: _Optional[float] = ..., host_p99_ms: _Optional[float] = ..., schedule_p50_ms: _Optional[float] = ..., dispatch_p50_ms: _Optional[float] = ..., schedule_p99_ms: _Optional[float] = ..., mask_p50_ms: _Optional[float] = ..., mask_p99_ms: _Optional[float] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., waiting_uncached_tokens: _Optional[int] = ..., num_doubtful: _Optional[int] = ..., expected_wait_s: _Optional[float] = ..., num_conversions: _Optional[int] = ..., recomputed_by_cause: _Optional[_Mapping[str, int]] = ..., host_blocks: _Optional[int] = ..., used_host_blocks: _Optional[int] = ..., saved_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., restores: _Optional[_Mapping[str, int]] = ..., num_lost_groups: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_read_bytes: _Optional[int] = ..., disk_written_bytes: _Optional[int] = ..., disk_hit_tokens: _Optional[int] = ..., num_dropped_files: _Optional[int] = ..., num_unwritten_groups: _Optional[int] = ..., num_waiting_best_effort: _Optional[int] = ..., num_running_best_effort: _Optional[int] = ..., best_effort_prompt_tokens: _Optional[int] = ..., best_effort_generation_tokens: _Optional[int] = ..., saved_slots: _Optional[int] = ..., loaded_slots: _Optional[int] = ..., device_hit_tokens: _Optional[int] = ..., changed_prefix_tokens: _Optional[int] = ...) -> None: ...

class WatchSchedulerRequest(_message.Message):
    __slots__ = ("capacity",)
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    def __init__(self, capacity: _Optional[int] = ...) -> None: ...

class WatchSchedulerResponse(_message.Message):
    __slots__ = ("num_dropped", "iterations")
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    iterations: _containers.RepeatedCompositeFieldContainer[Iteration]
    def __init__(self, num_dropped: _Optional[int] = ..., iterations: _Optional[_Iterable[_Union[Iteration, _Mapping]]] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("number", "uptime_s", "type", "scheduled", "preempted", "switched", "deferred", "prefill_tokens", "decode_tokens", "num_waiting", "num_running", "free_blocks", "schedule_ms", "step_ms", "failed", "converted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    uptime_s: float
    type: str
    scheduled: _containers.RepeatedCompositeFieldContainer[ScheduledRow]
    preempted: _containers.RepeatedCompositeFieldContainer[PreemptedRow]
    switched: _containers.RepeatedCompositeFieldContainer[KindSwitch]
    deferred: _containers.RepeatedScalarFieldContainer[str]
    prefill_tokens: int
    decode_tokens: int
    num_waiting: int
    num_running: int
    free_blocks: int
    schedule_ms: float
    step_ms: float
    failed: bool
    converted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., uptime_s: _Optional[float] = ..., type: _Optional[str] = ..., scheduled: _Optional[_Iterable[_Union[ScheduledRow, _Mapping]]] = ..., preempted: _Optional[_Iterable[_Union[PreemptedRow, _Mapping]]] = ..., switched: _Optional[_Iterable[_Union[KindSwitch, _Mapping]]] = ..., deferred: _Optional[_Iterable[str]] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., free_blocks: _Optional[int] = ..., schedule_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., failed: _Optional[bool] = ..., converted: _Optional[_Iterable[str]] = ...) -> None: ...

class ScheduledRow(_message.Message):
    __slots__ = ("request_id", "num_tokens", "start", "kind")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    start: int
    kind: CacheKind
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., start: _Optional[int] = ..., kind: _Optional[_Union[CacheKind, str]] = ...) -> None: ...

class PreemptedRow(_message.Message):
    __slots__ = ("request_id", "num_tokens", "kind")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    kind: CacheKind
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., kind: _Optional[_Union[CacheKind, str]] = ...) -> None: ...

class KindSwitch(_message.Message):
    __slots__ = ("request_id", "old", "new")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    old: CacheKind
    new: CacheKind
    def __init__(self, request_id: _Optional[str] = ..., old: _Optional[_Union[CacheKind, str]] = ..., new: _Optional[_Union[CacheKind, str]] = ...) -> None: ...
