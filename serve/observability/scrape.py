"""A snapshot of all metrics, in the format that Prometheus collects."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from apt_jax.engine import EngineStats
from apt_jax.engine.restore import RESTORES
from apt_jax.frontend.components import EngineComponents
from apt_jax.metrics import Distribution
from serve.observability.metric_families import CLASSES, ByClass, Families

_REASONS = ("stop", "length", "abort", "error")
_OBJECTIVES = ("ttft", "tbt", "e2e", "all", "strict")


@dataclasses.dataclass(kw_only=True)
class Sums:
    """Distributions and counts over all requests so far."""

    ttft_s: ByClass
    inter_token_s: ByClass
    latency_s: Distribution
    queue_s: ByClass
    prompt_tokens: Distribution
    generation_tokens: Distribution
    prefill_s: Distribution
    decode_s: Distribution
    inference_s: Distribution
    time_per_output_token_s: Distribution
    params_max_tokens: Distribution
    params_n: Distribution
    attained: "collections.Counter[tuple[str, str]]"
    """Number of requests that attained an objective, keyed by objective and SLO class."""
    missed: "collections.Counter[tuple[str, str]]"

    def copy(self) -> "Sums":
        return Sums(**{f.name: getattr(self, f.name).copy() for f in dataclasses.fields(self)})


class Scrape(Collector):
    """A snapshot of all metrics.

    Args:
        parts, stats: components and statistics of the engine.
        sums: distributions and counts over all requests.
        rejected_by_memory: number of calls rejected because memory was short.
        others: further metrics.
    """

    def __init__(
        self,
        parts: EngineComponents,
        stats: EngineStats,
        sums: Sums,
        rejected_by_memory: int,
        others: Sequence[Metric],
    ) -> None:
        self._parts, self._stats, self._sums, self._others = parts, stats, sums, others
        self._rejected_by_memory = rejected_by_memory
        self._families = Families(parts.model_name)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._others

    def _gauges(self) -> Iterable[Metric]:
        stats, parts = self._stats, self._parts
        yield self._families.gauge(
            "vllm:num_requests_running",
            "Requests that have started and not ended, without waiting requests.",
            [((), stats.num_running + stats.num_ending)],
        )
        yield self._families.gauge("vllm:num_requests_waiting", "Requests without a cache.", [((), stats.num_waiting)])
        yield self._families.gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the block pool in use, 0 to 1.",
            [((), stats.used_blocks / stats.total_blocks)],
        )
        of_classes = [
            (("rt", "waiting"), stats.num_waiting - stats.num_waiting_best_effort),
            (("rt", "running"), stats.num_running + stats.num_ending - stats.num_running_best_effort),
            (("be", "waiting"), stats.num_waiting_best_effort),
            (("be", "running"), stats.num_running_best_effort),
        ]
        yield self._families.gauge(
            "aptjax:class_requests", "Waiting and running requests, by class.", of_classes, ("class", "state")
        )
        groups = (parts.limits.max_pool_tokens or 0) // parts.executor.block_size
        facts = {
            "block_size": str(parts.executor.block_size),
            "num_gpu_blocks": str(groups),
            "enable_prefix_caching": str(parts.config.cache.enable_prefix_caching),
            "cache_mode": parts.config.cache.mode,
        }
        yield self._families.gauge(
            "vllm:cache_config_info",
            "Cache configuration; num_gpu_blocks counts blocks of block_size tokens of the most compact cache kind.",
            [(tuple(facts.values()), 1)],
            tuple(facts),
        )
        if stats.sessions:
            yield self._families.gauge(
                "aptjax:sessions",
                "Remembered sessions: with a running or waiting call; else with cache on the device, only in host memory, or nowhere.",
                [((state,), count) for state, count in stats.sessions.items()],
                ("state",),
            )
        blocks = [((kind,), count) for kind, count in stats.blocks_by_kind.items()]
        yield self._families.gauge(
            "aptjax:blocks",
            "Blocks of the pool: in use by kind, free with cached prefixes, and otherwise free.",
            [*blocks, (("cached",), stats.cached_blocks), (("free",), stats.free_blocks - stats.cached_blocks)],
            ("kind",),
        )
        if stats.host_blocks:
            yield self._families.gauge(
                "aptjax:host_blocks",
                "Blocks of host memory for cached prefixes: in use, and free.",
                [(("used",), stats.used_host_blocks), (("free",), stats.host_blocks - stats.used_host_blocks)],
                ("state",),
            )
        if parts.config.cache.prefix_cache_dir is not None:
            yield self._families.gauge(
                "aptjax:disk_used_bytes",
                "Bytes of all files of cached prefixes known to this server.",
                [((), stats.disk_bytes)],
            )
        if stats.expected_wait_s is not None:
            yield self._families.gauge(
                "aptjax:expected_wait_seconds",
                "Time that a new request with objectives would wait for others, according to the cost model.",
                [((), stats.expected_wait_s)],
            )
        served = [((phase,), error) for phase, error in sorted(stats.cost_errors.items())]
        if served:
            yield self._families.gauge(
                "aptjax:cost_model_serving_error_ratio",
                "Mean relative error of the step times that the scheduler expects, over the last steps served.",
                served,
                ("phase",),
            )
        model = parts.cost_model
        if model is not None:
            errors = [
                (("prefill",), model.prefill_quality.mean_relative_error),
                (("decode",), model.decode_quality.mean_relative_error),
            ]
            yield self._families.gauge(
                "aptjax:cost_model_error_ratio",
                "Mean relative error of predicted step times, on the held-out points of the calibration.",
                errors,
                ("phase",),
            )

    def _counters(self) -> Iterable[Metric]:
        stats, sums = self._stats, self._sums
        for name, text, value in (
            ("vllm:num_preemptions", "Times that a request was preempted and lost its cache.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of requests that have delivered a token.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens delivered.", stats.generation_tokens),
            (
                "vllm:prefix_cache_queries",
                "Tokens of requests that were scheduled for the first time.",
                stats.prefix_cache_queries,
            ),
            ("vllm:prefix_cache_hits", "Queried tokens that were found in the cache.", stats.prefix_cache_hits),
            (
                "aptjax:changed_prefix_tokens",
                "Prompt tokens computed although the session's last prompt had them, behind a different beginning.",
                stats.changed_prefix_tokens,
            ),
            (
                "aptjax:cache_conversions",
                "Times that the cache of a running request was converted from layer inputs to keys and values.",
                stats.num_conversions,
            ),
            (
                "aptjax:recomputed_tokens",
                "Positions computed again after preemptions and failures.",
                stats.recomputed_tokens,
            ),
            (
                "aptjax:scheduler_fallbacks",
                "Iterations that fcfs scheduled, because the policy raised an error or its plan broke a rule.",
                stats.fallback_iterations,
            ),
            (
                "aptjax:requests_refused",
                "Requests that the engine rejected: queue full, too large, id in use.",
                stats.num_rejected,
            ),
            (
                "aptjax:memory_rejections",
                "Calls rejected because the process used too much memory.",
                self._rejected_by_memory,
            ),
            (
                "aptjax:requests_doubtful",
                "Requests admitted although their TTFT SLO looked out of reach.",
                stats.num_slo_at_risk_admitted,
            ),
        ):
            yield self._families.counter(name, text, [((), value)])
        yield self._families.counter(
            "aptjax:recomputed_tokens_by_cause",
            "Positions computed again, by how their cache was lost.",
            [((cause,), value) for cause, value in stats.recomputed_by_cause.items()],
            ("cause",),
        )
        for name, text, total, best_effort in (
            (
                "aptjax:class_prompt_tokens",
                "Prompt tokens of requests that have delivered a token, by class.",
                stats.prompt_tokens,
                stats.best_effort_prompt_tokens,
            ),
            (
                "aptjax:class_generation_tokens",
                "Tokens delivered, by class.",
                stats.generation_tokens,
                stats.best_effort_generation_tokens,
            ),
        ):
            yield self._families.counter(
                name, text, [(("rt",), total - best_effort), (("be",), best_effort)], ("class",)
            )
        hits = [(("device",), stats.device_hit_tokens)]
        hits += [(("host",), stats.host_hit_tokens)] if stats.host_blocks else []
        yield self._families.counter(
            "aptjax:cache_hit_tokens",
            "Positions of new and preempted requests that were found in the cache, by tier.",
            hits,
            ("tier",),
        )
        has = {"host": bool(stats.host_blocks), "disk": self._parts.config.cache.prefix_cache_dir is not None}
        sources = [((name,), n) for name, n in stats.prompt_tokens_by_source.items() if has.get(name, True)]
        yield self._families.counter(
            "aptjax:prompt_tokens_by_source",
            "Prompt tokens of requests scheduled for the first time: found on a tier, computed again because evicted, or new.",
            sources,
            ("source",),
        )
        if stats.host_blocks:
            yield from self._host_memory()
        if self._parts.config.cache.prefix_cache_dir is not None:
            yield from self._disk()
        ends = [((reason,), stats.finished.get(reason, 0)) for reason in _REASONS]
        yield self._families.counter(
            "vllm:request_success", "Ended requests by finish reason.", ends, ("finished_reason",)
        )
        pairs = [(o, c) for o in _OBJECTIVES for c in CLASSES]
        for name, text, counter in (
            ("aptjax:slo_attained", "Requests that attained this objective.", sums.attained),
            (
                "aptjax:slo_missed",
                "Requests that missed this objective, also by being rejected or aborted.",
                sums.missed,
            ),
        ):
            yield self._families.counter(name, text, [(pair, counter[pair]) for pair in pairs], ("slo", "class"))
        switches = list(stats.kind_switches.items())
        yield self._families.counter(
            "aptjax:cache_kind_switch",
            "Times that a request resumed with another cache kind.",
            switches,
            ("from", "to"),
        )
        actions = {
            **dict.fromkeys(("prefill", "decode", "mixed"), 0),
            **stats.iterations,
            "preempt": stats.num_preemptions,
            "defer": stats.num_deferred_requests,
        }
        yield self._families.counter(
            "aptjax:scheduler_decision",
            "Steps by type, and requests preempted or deferred.",
            [((action,), count) for action, count in actions.items()],
            ("action",),
        )
        yield self._families.counter(
            "aptjax:compilations",
            "Programs compiled after warm-up; anything but 0 is a fault.",
            [(("serving",), stats.compilations)],
            ("phase",),
        )

    def _host_memory(self) -> Iterable[Metric]:
        stats = self._stats
        moved = [(("save",), stats.saved_bytes), (("load",), stats.loaded_bytes)]
        yield self._families.counter(
            "aptjax:host_bytes", "Bytes copied to host memory and back.", moved, ("direction",)
        )
        blocks = [(("save",), stats.saved_blocks), (("load",), stats.loaded_blocks)]
        yield self._families.counter(
            "aptjax:host_moved_blocks", "Whole blocks copied to host memory and back.", blocks, ("direction",)
        )
        slots = [(("save",), stats.saved_slots), (("load",), stats.loaded_slots)]
        yield self._families.counter(
            "aptjax:host_moved_slots",
            "Positions in shared blocks copied before another request overwrote them, and back.",
            slots,
            ("direction",),
        )
        yield self._families.counter(
            "aptjax:host_hit_tokens",
            "Positions copied from host memory instead of being computed.",
            [((), stats.host_hit_tokens)],
        )
        ways = [((way,), stats.restores.get(way, 0)) for way in RESTORES]
        yield self._families.counter(
            "aptjax:restores",
            "Requests whose cache was found only in host memory: copied as keys and values or as layer inputs, or computed "
            "again because that took less time.",
            ways,
            ("way",),
        )
        yield self._families.counter(
            "aptjax:host_lost_groups",
            "Groups of blocks lost in host memory, by a failed copy or a wrong checksum.",
            [((), stats.num_lost_groups)],
        )

    def _disk(self) -> Iterable[Metric]:
        stats = self._stats
        moved = [(("read",), stats.disk_read_bytes), (("write",), stats.disk_written_bytes)]
        yield self._families.counter(
            "aptjax:disk_bytes", "Bytes of cached prefixes read and written.", moved, ("direction",)
        )
        yield self._families.counter(
            "aptjax:disk_hit_tokens",
            "Positions read from disk for requests that waited for them.",
            [((), stats.disk_hit_tokens)],
        )
        yield self._families.counter(
            "aptjax:disk_dropped_files",
            "Files of cached prefixes removed because they were damaged, or not of this model.",
            [((), stats.num_dropped_files)],
        )
        yield self._families.counter(
            "aptjax:disk_unwritten_groups",
            "Groups of blocks that were not written because the disk failed, was full or was too slow.",
            [((), stats.num_unwritten_groups)],
        )

    def _histograms(self) -> Iterable[Metric]:
        stats, sums = self._stats, self._sums
        for name, text, values in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", sums.ttft_s.all),
            ("vllm:inter_token_latency_seconds", "Gaps between the tokens of a request.", sums.inter_token_s.all),
            (
                "vllm:e2e_request_latency_seconds",
                "Arrival to end, of requests that ended with stop or length.",
                sums.latency_s,
            ),
            (
                "vllm:request_queue_time_seconds",
                "Arrival to first step, of requests that ended with stop or length.",
                sums.queue_s.all,
            ),
            ("aptjax:class_time_to_first_token_seconds", "Arrival to first token, by class.", sums.ttft_s),
            (
                "aptjax:class_inter_token_latency_seconds",
                "Gaps between the tokens of a request, by class.",
                sums.inter_token_s,
            ),
            (
                "aptjax:class_queue_time_seconds",
                "Arrival to first step, of requests that ended with stop or length, by class.",
                sums.queue_s,
            ),
            (
                "vllm:request_prompt_tokens",
                "Prompt tokens per request, of requests that ended with stop or length.",
                sums.prompt_tokens,
            ),
            (
                "vllm:request_generation_tokens",
                "Output tokens per request, of requests that ended with stop or length.",
                sums.generation_tokens,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "The same; vLLM counts only the longest output of a prompt.",
                sums.generation_tokens,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean gap between the tokens of a request, 0 for a single token, of requests that ended with stop or length.",
                sums.time_per_output_token_s,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "First step to first token, of requests that ended with stop or length.",
                sums.prefill_s,
            ),
            (
                "vllm:request_decode_time_seconds",
                "First to last token, of requests that ended with stop or length.",
                sums.decode_s,
            ),
            (
                "vllm:request_inference_time_seconds",
                "First step to last token, of requests that ended with stop or length.",
                sums.inference_s,
            ),
            (
                "vllm:request_params_max_tokens",
                "max_tokens of requests that ended with stop or length.",
                sums.params_max_tokens,
            ),
            (
                "vllm:request_params_n",
                "n of calls, once for each of their prompts whose first output ended with stop or length.",
                sums.params_n,
            ),
            ("vllm:iteration_tokens_total", "Tokens per step.", stats.step_tokens),
            ("aptjax:scheduler_step_seconds", "Time that the policy takes for a decision.", stats.schedule_s),
        ):
            yield self._families.histogram(name, text, values)
