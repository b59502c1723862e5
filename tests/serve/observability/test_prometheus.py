"""The metrics at /metrics equal what was served."""

import asyncio
import dataclasses
import json
import math
import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import serve
from apt_jax.costs.model import StepCosts
from serve.observability.prometheus import INTER_TOKEN_S, LATENCY_S, TTFT_S, token_buckets
from tests.support.http_serving import HttpServed, run

LABELS = {"model_name": "toy", "engine": "0"}


class Scraped:
    """One answer of /metrics, parsed."""

    def __init__(self, response: httpx2.Response) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        self.kinds, self.samples = {}, {}
        for family in parse_text(response.text):
            self.kinds[family.name] = family.type
            if family.name.startswith("process_"):  # prometheus_client's own, without labels
                continue
            for sample in family.samples:
                assert sample.labels.items() >= LABELS.items(), sample
                rest = {k: v for k, v in sample.labels.items() if k not in LABELS}
                key = (sample.name, tuple(sorted(rest.items())))
                assert key not in self.samples
                self.samples[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def buckets(self, name: str) -> dict[float, float]:
        return {
            float(dict(labels)["le"]): value
            for (sample, labels), value in self.samples.items()
            if sample == f"{name}_bucket"
        }


async def scrape(served: HttpServed) -> Scraped:
    return Scraped(await served.http.get("/metrics"))


def test_the_names_of_the_contract_are_there():
    gauges = [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "aptjax:blocks",
    ]
    counters = [
        "vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits", "aptjax:slo_attained", "aptjax:slo_missed", "aptjax:cache_kind_switch", "aptjax:cache_conversions",
        "aptjax:recomputed_tokens", "aptjax:recomputed_tokens_by_cause", "aptjax:scheduler_decision", "aptjax:compilations",
    ]  # fmt: skip
    histograms = [
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total", "aptjax:scheduler_step_seconds",
        "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
        "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:request_max_num_generation_tokens",
        "vllm:request_time_per_output_token_seconds", "aptjax:class_time_to_first_token_seconds",
        "aptjax:class_inter_token_latency_seconds", "aptjax:class_queue_time_seconds",
    ]  # fmt: skip

    async def scenario(served):
        kinds = (await scrape(served)).kinds
        assert {kinds[name] for name in gauges} == {"gauge"}
        assert {kinds[name] for name in counters} == {"counter"}
        assert {kinds[name] for name in histograms} == {"histogram"}
        assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= set(kinds)
        text = (await served.http.get("/metrics")).text
        for name in counters:
            assert f"\n{name}_total{{" in text
        facts = next(labels for name, labels in (await scrape(served)).samples if name == "vllm:cache_config_info")
        assert (
            dict(facts).items() >= {"block_size": "4", "num_gpu_blocks": "256", "enable_prefix_caching": "True"}.items()
        )

    run(scenario)


ACCEPTED = [
    "", "*/*", "text/plain", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain;version=1.0.0;escaping=allow-utf-8",
    "text/plain;version=1.0.0;escaping=underscores", "application/openmetrics-text;q=0, text/plain",
    "application/openmetrics-text", "application/openmetrics-text; version=0.0.1", "application/openmetrics-text; version=1.0.0",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;q=0.3",
    "application/openmetrics-text;version=1.0.0;escaping=dots", "application/openmetrics-text;version=1.0.0;escaping=values",
    "Application/OpenMetrics-Text;version=2.0.0;escaping=underscores",
]  # fmt: skip


def test_names_are_the_same_under_every_accept_header():
    """Both parsers are prometheus_client's own."""

    async def scenario(served):
        names = set()
        for accept in ACCEPTED:
            answer = await served.http.get("/metrics", headers={"accept": accept})
            wants_openmetrics = "openmetrics" in accept.lower() and "q=0," not in accept
            kind = "application/openmetrics-text" if wants_openmetrics else "text/plain"
            assert answer.headers["content-type"].startswith(kind)
            families = list((parse_openmetrics if wants_openmetrics else parse_text)(answer.text))
            written = {re.split("[{ ]", line)[0] for line in answer.text.splitlines() if not line.startswith("#")}
            assert written == {sample.name for family in families for sample in family.samples}
            names.add(frozenset(written))
        (found,) = names
        assert {"vllm:num_requests_running", "vllm:prompt_tokens_total", "aptjax:blocks"} <= found

    run(scenario)


def test_metrics_equal_what_both_protocols_served_however_often_they_are_read():
    async def scenario(served):
        before = await scrape(served)
        assert before.value("vllm:generation_tokens_total") == 0
        lens = [3, 5, 8]
        for n in lens:
            await served.ask("x" * n, max_tokens=n)
        async for _ in served.grpc.generate("hello", max_tokens=4, ignore_eos=True, slo_ttft_ms=60_000, slo_class="be"):
            pass
        await served.ask("x", n=2, max_tokens=2, slo={"ttft_ms": 60_000, "tbt_ms": 0.001, "e2e_ms": 60_000})
        scrapes = [await scrape(served) for _ in range(3)]
        first = scrapes[0]
        for other in scrapes[1:]:  # reading changes nothing
            assert other.samples == first.samples
        prompts = [4, 6, 9, 6, 2, 2]  # with the token before each
        outputs = [3, 5, 8, 4, 2, 2]
        assert first.value("vllm:prompt_tokens_total") == sum(prompts)
        assert first.value("vllm:generation_tokens_total") == sum(outputs)
        assert first.value("vllm:request_success_total", finished_reason="length") == 6
        for reason in ("stop", "abort", "error"):
            assert first.value("vllm:request_success_total", finished_reason=reason) == 0
        for name, values in (("prompt", prompts), ("generation", outputs), ("max_num_generation", outputs)):
            full = f"vllm:request_{name}_tokens"
            assert first.value(f"{full}_count") == 6
            assert first.value(f"{full}_sum") == sum(values)
            assert list(first.buckets(full)) == [1, 2, 5, 10, 20, 50, 100, 200, math.inf]
            for bound, count in first.buckets(full).items():
                assert count == sum(value <= bound for value in values)
        assert first.value("vllm:time_to_first_token_seconds_count") == 6
        assert first.value("vllm:inter_token_latency_seconds_count") == sum(n - 1 for n in outputs)
        for name in (
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_params_max_tokens",
        ):
            assert first.value(f"{name}_count") == 6
        prefill, decode, inference = (
            first.value(f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode", "inference")
        )
        assert inference == pytest.approx(prefill + decode)
        per_token = "vllm:request_time_per_output_token_seconds"
        assert first.value(f"{per_token}_count") == 6
        assert decode / 7 <= first.value(f"{per_token}_sum") <= decode  # outputs have 2 to 8 tokens
        assert list(first.buckets(per_token)) == [*INTER_TOKEN_S, math.inf]
        queued, whole = (
            first.value(f"vllm:{name}_seconds_sum") for name in ("request_queue_time", "e2e_request_latency")
        )
        assert 0 < queued + inference <= whole
        stats = served.parts.engine.stats()
        steps = sum(stats.iterations.values())
        assert first.value("vllm:iteration_tokens_total_count") == steps
        decided = sum(first.value("aptjax:scheduler_decision_total", action=a) for a in ("prefill", "decode", "mixed"))
        assert decided == steps
        assert first.value("vllm:prefix_cache_queries_total") == stats.prefix_cache_queries
        assert first.value("vllm:kv_cache_usage_perc") == 0
        assert first.value("vllm:num_requests_running") == 0
        blocks = [v for (name, _), v in first.samples.items() if name == "aptjax:blocks"]
        assert sum(blocks) == 256

        def slo(what: str, slo: str, slo_class: str) -> float:
            return first.value(f"aptjax:slo_{what}_total", slo=slo, **{"class": slo_class})

        assert slo("attained", "ttft", "be") == slo("attained", "all", "be") == 1
        assert slo("attained", "ttft", "rt") == 2
        assert slo("missed", "tbt", "rt") == slo("missed", "all", "rt") == 2
        assert slo("attained", "tbt", "rt") == slo("missed", "ttft", "rt") == 0
        assert slo("attained", "e2e", "rt") == 2
        assert slo("attained", "tbt", "be") == slo("missed", "tbt", "be") == 0
        assert slo("attained", "e2e", "be") == slo("missed", "e2e", "be") == slo("missed", "e2e", "rt") == 0
        assert slo("attained", "strict", "be") == 1
        assert slo("missed", "strict", "rt") == 2

    run(scenario)


def test_the_time_per_output_token_of_a_single_token_is_0_as_in_vllm():
    async def scenario(served):
        await served.ask("x", max_tokens=1)
        found = await scrape(served)
        assert found.value("vllm:request_time_per_output_token_seconds_count") == 1
        assert found.value("vllm:request_time_per_output_token_seconds_sum") == 0

    run(scenario)


def test_outputs_of_one_prompt_are_one_observation():
    async def scenario(served):
        await served.ask(["a", "b"], n=3, max_tokens=2)
        found = await scrape(served)
        assert found.value("vllm:request_params_n_count") == 2
        assert found.value("vllm:request_params_n_sum") == 6
        assert found.value("vllm:request_params_max_tokens_sum") == 12

    run(scenario)


def test_requests_that_were_refused_or_broken_off_have_missed():
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "slo_e2e_ms": 60_000}
        responses = await asyncio.gather(
            *(served.post("/v1/completions", {**body, "deadline_ms": 60.0 + n}) for n in range(4))
        )
        codes = sorted(r.status_code for r in responses)
        assert set(codes) == {408, 429}
        await served.idle()
        after = await scrape(served)
        assert after.value("aptjax:requests_refused_total") == codes.count(429)
        assert after.value("vllm:request_success_total", finished_reason="abort") == codes.count(408)
        assert after.value("aptjax:slo_missed_total", slo="all", **{"class": "rt"}) == 4
        assert after.value("aptjax:slo_missed_total", slo="e2e", **{"class": "rt"}) == 4
        assert after.value("aptjax:slo_attained_total", slo="all", **{"class": "rt"}) == 0
        assert after.value("vllm:e2e_request_latency_seconds_count") == 0

    run(scenario, max_num_seqs=1, max_num_queued_reqs=1, step_s=0.01)


def test_gauges_while_requests_run_and_wait():
    async def scenario(served):
        tasks = [asyncio.create_task(served.ask(f"r{i}", max_tokens=60)) for i in range(4)]
        await served.until(lambda: served.parts.engine.num_live == 4)
        await asyncio.sleep(0.05)
        now = await scrape(served)
        assert now.value("vllm:num_requests_running") == 2
        assert now.value("vllm:num_requests_waiting") == 2
        assert 0 < now.value("vllm:kv_cache_usage_perc") < 1
        await asyncio.gather(*tasks)

    run(scenario, max_num_seqs=2, step_s=0.01)


def test_Q9_metrics_and_health_answer_under_load():
    async def scenario(served):
        gate, engine = served.parts.executor.gate, served.engine
        gate.clear()  # what the clients here take to begin is not the server's time
        tasks = [asyncio.create_task(served.ask("x" * (i % 40 + 1), max_tokens=60)) for i in range(60)]
        await served.until(lambda: len(engine._inbox) + served.parts.engine.num_live == len(tasks))
        gate.set()
        loop, worst, answered = asyncio.get_running_loop(), 0.0, 0
        while not all(task.done() for task in tasks):
            for path in ("/health", "/metrics"):
                started = loop.time()
                assert (await served.http.get(path)).status_code == 200
                worst = max(worst, loop.time() - started)
                answered += 1
            await asyncio.sleep(0.02)
        assert answered >= 4
        assert worst < 2.0  # a tenth of it on a quiet machine

    run(scenario, max_num_queued_reqs=100)


def test_buckets_are_those_of_vllm():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(7) == (1, 2, 5)
    assert token_buckets(2048)[-2:] == (1000, 2000)
    assert (len(TTFT_S), TTFT_S[0], TTFT_S[-1]) == (22, 0.001, 2560.0)
    assert (len(INTER_TOKEN_S), INTER_TOKEN_S[0], INTER_TOKEN_S[-1]) == (19, 0.01, 80.0)
    assert (len(LATENCY_S), LATENCY_S[0], LATENCY_S[-1]) == (21, 0.3, 7680.0)
    for bounds in (TTFT_S, INTER_TOKEN_S, LATENCY_S):
        assert list(bounds) == sorted(set(bounds))


def test_how_good_the_cost_model_is_is_told_where_there_is_one():
    from apt_jax.costs.fit import CostModel, FitQuality

    def quality(mean: float) -> FitQuality:
        return FitQuality(num_points=9, num_held_back=3, r2=0.9, worst_relative_error=1.0, mean_relative_error=mean)

    async def scenario(served):
        model = CostModel(
            costs=None, programs=None,  # type: ignore[arg-type]
            prefill_quality=quality(0.04), decode_quality=quality(0.05),
            linear_prefill_quality=quality(0.2), linear_decode_quality=quality(0.3),
        )  # fmt: skip
        object.__setattr__(served.parts, "cost_model", model)
        now = await scrape(served)
        errors = [now.value("aptjax:cost_model_error_ratio", phase=p) for p in ("prefill", "decode")]
        assert errors == pytest.approx([0.04, 0.05])

    run(scenario)


def test_the_expected_wait_is_that_of_the_queue():
    """Two run, three wait: 6 prompt tokens each with the one before, so 18 in steps of at most 64."""
    name = "aptjax:expected_wait_seconds"

    async def scenario(served):
        engine = served.parts.engine
        assert name not in {key for key, _ in (await scrape(served)).samples}
        assert not (await served.grpc.stats()).HasField("expected_wait_s")
        engine.costs = StepCosts(prefill_base_s=3.0, prefill_per_request_s=2.0, prefill_per_token_s=0.5)
        assert (await scrape(served)).value(name) == 0
        assert (await served.grpc.stats()).expected_wait_s == 0
        tasks = [asyncio.create_task(served.ask(f"{i}hell", max_tokens=60)) for i in range(5)]
        await served.until(lambda: engine.num_live == 5)
        await asyncio.sleep(0.05)
        assert engine.stats().num_waiting == 3
        want = pytest.approx(3.0 + 3 * 2.0 + 18 * 0.5)
        assert (await scrape(served)).value(name) == want
        assert (await served.grpc.stats()).expected_wait_s == want
        await asyncio.gather(*tasks)

    run(scenario, max_num_seqs=2, step_s=0.01)


def test_how_well_steps_are_predicted_while_serving_is_told():
    name = "aptjax:cost_model_serving_error_ratio"

    async def scenario(served):
        await served.ask(max_tokens=20)
        assert name not in {key for key, _ in (await scrape(served)).samples}
        served.parts.engine.costs = StepCosts(prefill_base_s=1e-9, decode_base_s=1e4)
        await served.ask(max_tokens=40)
        now = await scrape(served)
        assert now.value(name, phase="decode") > 100  # predicted are 10,000 s
        for _ in range(8):  # one of any eight steps is looked at
            await served.ask(max_tokens=1)
        now = await scrape(served)
        assert now.value(name, phase="prefill") == pytest.approx(1.0, abs=0.01)

    run(scenario)


def test_host_memory_is_told_where_there_is_some():
    async def scenario(served):
        assert not any(name.startswith(("aptjax:host", "aptjax:sessions")) for name in (await scrape(served)).kinds)
        engine = served.parts.engine
        stats = engine.stats
        engine.stats = lambda: dataclasses.replace(
            stats(), host_blocks=10, used_host_blocks=4, saved_bytes=300, loaded_bytes=200, host_hit_tokens=7,
            restores={"kv": 2, "recomputed": 1}, num_lost_groups=1, sessions={"running": 3, "host": 1},
            prompt_tokens_by_source={"device": 9, "host": 7, "disk": 0, "evicted": 5, "new": 4},
        )  # fmt: skip
        found = await scrape(served)
        assert [found.value("aptjax:host_blocks", state=state) for state in ("used", "free")] == [4, 6]
        assert [found.value("aptjax:host_bytes_total", direction=way) for way in ("save", "load")] == [300, 200]
        ways = ("kv", "hidden", "converted", "recomputed")
        assert [found.value("aptjax:restores_total", way=way) for way in ways] == [2, 0, 0, 1]
        assert found.value("aptjax:host_hit_tokens_total") == 7
        assert found.value("aptjax:host_lost_groups_total") == 1
        assert [found.value("aptjax:sessions", state=state) for state in ("running", "host")] == [3, 1]
        sources = {
            dict(labels)["source"]: n for (name, labels), n in found.samples.items() if "prompt_tokens_by" in name
        }
        assert sources == {"device": 9, "host": 7, "evicted": 5, "new": 4}
        engine.stats = stats

    run(scenario)


def test_classes_are_told_apart():
    async def scenario(served):
        before = await scrape(served)
        classes = ("rt", "be")
        for name in ("prompt_tokens", "generation_tokens"):
            assert [before.value(f"aptjax:class_{name}_total", **{"class": c}) for c in classes] == [0, 0]
        for n, tier in ((3, "default"), (5, "flex"), (8, "flex")):
            await served.ask("x" * n, max_tokens=n, service_tier=tier)
        found = await scrape(served)

        def both(name: str) -> list[float]:
            return [found.value(f"aptjax:class_{name}", **{"class": c}) for c in classes]

        assert both("prompt_tokens_total") == [4, 6 + 9]
        assert both("generation_tokens_total") == [3, 5 + 8]
        for name, counts in (("time_to_first_token", [1, 2]), ("queue_time", [1, 2]), ("inter_token_latency", [2, 11])):
            assert both(f"{name}_seconds_count") == counts
        for ours, theirs in (
            ("time_to_first_token", "time_to_first_token"),
            ("inter_token_latency", "inter_token_latency"),
            ("queue_time", "request_queue_time"),
        ):
            assert sum(both(f"{ours}_seconds_sum")) == pytest.approx(found.value(f"vllm:{theirs}_seconds_sum"))
        served.parts.executor.step_s = 0.02  # while they run, their tokens count too
        calls = [
            asyncio.create_task(served.ask("y", max_tokens=20, service_tier=tier)) for tier in ("flex", "flex", "auto")
        ]
        while both("generation_tokens_total")[1] <= 13:
            found = await scrape(served)
        assert both("generation_tokens_total")[1] < 13 + 40
        live = [found.value("aptjax:class_requests", **{"class": c, "state": "running"}) for c in classes]
        assert live == [1, 2]
        await asyncio.gather(*calls)
        found = await scrape(served)
        assert both("generation_tokens_total") == [3 + 20, 13 + 40]
        states = [(c, s) for c in classes for s in ("waiting", "running")]
        assert all(found.value("aptjax:class_requests", **{"class": c, "state": s}) == 0 for c, s in states)

    run(scenario)


def test_a_disk_is_told_where_there_is_one():
    async def scenario(served):
        assert not any(name.startswith("aptjax:disk") for name in (await scrape(served)).kinds)
        engine, config = served.parts.engine, served.parts.config
        stats = engine.stats
        cache = dataclasses.replace(config.cache, swap_space=1.0, prefix_cache_dir="/somewhere")
        object.__setattr__(served.parts, "config", dataclasses.replace(config, cache=cache))
        engine.stats = lambda: dataclasses.replace(
            stats(), disk_bytes=900, disk_read_bytes=300, disk_written_bytes=200, disk_hit_tokens=16,
            num_dropped_files=2, num_unwritten_groups=1,
        )  # fmt: skip
        found = await scrape(served)
        assert found.value("aptjax:disk_used_bytes") == 900
        assert [found.value("aptjax:disk_bytes_total", direction=way) for way in ("read", "write")] == [300, 200]
        assert found.value("aptjax:disk_hit_tokens_total") == 16
        assert found.value("aptjax:disk_dropped_files_total") == 2
        assert found.value("aptjax:disk_unwritten_groups_total") == 1
        engine.stats = stats
        object.__setattr__(served.parts, "config", config)

    run(scenario)


def test_the_grafana_board_asks_for_what_there_is():
    board = json.loads(Path(serve.__file__).with_name("dashboard").joinpath("grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))

    async def scenario(served):
        served.parts.engine.costs = StepCosts(prefill_base_s=1e-3, decode_base_s=1e-3)
        stats = served.parts.engine.stats
        served.parts.engine.stats = lambda: dataclasses.replace(stats(), host_blocks=10)  # with --swap-space
        for _ in range(8):  # one of any eight steps is looked at
            await served.ask(max_tokens=3, slo={"ttft_ms": 1e4})
        samples = (await scrape(served)).samples
        for expression in expressions:
            found = re.findall(r"(\w+:\w+)\{([^}]*)\}", expression)
            assert found, expression
            grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
            for name, selector in found:
                asked = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector))
                wanted = {label: value for label, value in asked.items() if "|" not in value and "$" not in value}
                series = [dict(labels) for sample, labels in samples if sample == name]
                assert any(wanted.items() <= labels.items() for labels in series), (name, wanted)
                assert all(grouped <= labels.keys() for labels in series), (name, grouped)

    run(scenario)
