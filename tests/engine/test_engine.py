import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from apt_jax.cache import CacheIntegrityError
from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV, CacheKindSpec
from apt_jax.core.step import TOKEN_ON_DEVICE, StepBatch
from apt_jax.engine import STALL_LIMIT, Engine, StepOutput
from apt_jax.engine.timeline import TimelineLog
from apt_jax.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from apt_jax.request import EngineRequest, Grammar, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.sched.view import Plan, Policy, SchedulerView
from apt_jax.structured.constraint import GrammarError
from apt_jax.utils.clock import VirtualClock
from tests.support.cases import num_cases
from tests.support.fake_executor import FakeExecutor, Fault, FaultKind, reference_tokens
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

VOCAB_SIZE = 1000
BOTH = (True, True)


class Harness:
    """An engine over a `FakeExecutor`, with what came out of it."""

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 64,
        overlap: bool = True,
        debug: bool = True,
        check_plans: bool = False,
        offered: tuple[bool, bool] = BOTH,
        fault: Callable[[StepBatch], Fault | None] | None = None,
        processor=None,
        prefix_caching: bool = True,
        **config,
    ) -> None:
        self.clock = VirtualClock()
        self.batches: list[StepBatch] = []
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            duration_s=lambda batch: 1.0,
            fault=fault,
        )
        execute = self.executor.execute

        def noting_execute(batch: StepBatch):
            self.batches.append(batch)
            return execute(batch)

        self.executor.execute = noting_execute
        self.engine = Engine(
            self.executor,
            policy or RandomPolicy(0, RandomPlanPolicy()),
            self.clock,
            (
                CacheKindSpec(name="kv", blocks_per_group=2, offered=offered[0]),
                CacheKindSpec(name="hidden", blocks_per_group=1, offered=offered[1]),
            ),
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, overlap=overlap, **config),
            CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
            vocab_size=VOCAB_SIZE,
            output_processor=processor,
            debug=debug,
        )
        self.engine._policies.check_plans = check_plans
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, StepOutput] = {}
        self._names = itertools.count()

    def add(
        self,
        prompt_len: int = 5,
        max_tokens: int = 6,
        name: str | None = None,
        grammar: Grammar | None = None,
        **params,
    ) -> str:
        name = name or f"r{next(self._names)}"
        prompt = np.random.default_rng(len(self.requests)).integers(0, VOCAB_SIZE, prompt_len).astype(np.int32)
        request = EngineRequest(
            request_id=name,
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            slo=SLO(),
            arrival_s=self.clock.now_s(),
            grammar=grammar,
        )
        self.engine.add_request(request)
        self.requests[name] = request
        self.tokens[name] = []
        return name

    def step(self, count: int = 1) -> list[StepOutput]:
        outputs = []
        for _ in range(count):
            new = self.engine.step()
            outputs += new
            for output in new:
                self.tokens[output.request_id] += output.new_token_ids
                if output.finished:
                    assert output.request_id not in self.last
                    self.last[output.request_id] = output
            self.engine.check_integrity()
        return outputs

    def drain(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        return reference_tokens(
            request.prompt_token_ids,
            10_000,
            vocab_size=VOCAB_SIZE,
            params=request.params,
            grammar=request.grammar,
        )

    def assert_all_as_expected(self, names: Sequence[str] | None = None) -> None:
        for name in names or list(self.requests):
            assert self.tokens[name] == self.expected(name)
            assert self.last[name].finish_reason in ("length", "stop")
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks

    def row(self, name: str) -> int:
        return self.engine.states.by_id[name].row


class ScriptedPolicy:
    """Plans from a function."""

    name = "scripted"

    def __init__(self, plan: Callable[[SchedulerView], Plan]) -> None:
        self._plan = plan

    def schedule(self, view: SchedulerView) -> Plan:
        return self._plan(view)


def plan_all(view: SchedulerView, kind: int = KV, preempt: Sequence[int] = ()) -> Plan:
    """Everything that waits or runs, whole; the given rows lose their cache."""
    rows = np.concatenate([view.running, view.waiting])
    rows = rows[~np.isin(rows, np.array(preempt, np.int32))]
    held = view.table.kind[rows]
    return Plan(
        rows=rows,
        num_tokens=view.remaining(rows),
        kind=np.where(held >= 0, held, np.int8(kind)),
        preempt=np.array(preempt, np.int32),
        iteration="mixed",
    )


@pytest.fixture(params=[False, True], ids=["in step", "overlap"])
def overlap(request) -> bool:
    return request.param


class TestStreams:
    def test_equal_the_reference(self, overlap):
        h = Harness(overlap=overlap)
        for n in (1, 3, 4, 5, 17):
            h.add(prompt_len=n, max_tokens=n)
        h.drain()
        h.assert_all_as_expected()
        assert all(output.finish_reason == "length" for output in h.last.values())

    def test_equal_the_reference_in_chunks(self, overlap):
        h = Harness(overlap=overlap, budget=8)
        for n in (7, 8, 9, 30):
            h.add(prompt_len=n)
        h.drain()
        h.assert_all_as_expected()

    @pytest.mark.parametrize("offered", [(True, False), (False, True)])
    def test_do_not_depend_on_the_kind(self, offered, overlap):
        h = Harness(overlap=overlap, offered=offered)
        h.add(prompt_len=9, max_tokens=9)
        h.drain()
        h.assert_all_as_expected()
        kind = "kv" if offered[0] else "hidden"
        assert next(iter(h.last.values())).metrics.cache_kind == kind

    def test_one_output_a_token_and_one_end(self, overlap):
        h = Harness(overlap=overlap)
        h.add(max_tokens=4)
        outputs = []
        while h.engine.has_work:
            outputs += h.step()
        assert [len(o.new_token_ids) for o in outputs] == [1, 1, 1, 1]
        assert [o.finish_reason for o in outputs] == [None, None, None, "length"]
        assert [o.num_outputs for o in outputs] == [1, 2, 3, 4]

    def test_a_long_pool_of_requests(self):
        h = Harness(num_blocks=40, max_num_queued_reqs=2000)
        for _ in range(600):  # more than the request table starts with
            h.add(prompt_len=3, max_tokens=2)
        h.drain()
        h.assert_all_as_expected()


class TestEnds:
    def test_stop_token(self, overlap):
        h = Harness(overlap=overlap)
        name = h.add(max_tokens=8)
        stop = h.expected(name)[3]
        h = Harness(overlap=overlap)
        h.add(max_tokens=8, stop_token_ids=(stop,))
        h.drain()
        h.assert_all_as_expected()
        assert len(h.tokens["r0"]) == 4
        assert (h.last["r0"].finish_reason, h.last["r0"].stop_reason) == ("stop", stop)

    def test_stop_token_is_not_heeded_before_min_tokens(self, overlap):
        stop = reference_tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 5), 1, vocab_size=VOCAB_SIZE)[0]
        h = Harness(overlap=overlap)
        h.add(max_tokens=8, stop_token_ids=(stop,), min_tokens=5)
        h.drain()
        h.assert_all_as_expected()
        assert h.tokens["r0"][0] == stop
        assert len(h.tokens["r0"]) >= 5

    def test_E10_stop_before_length(self, overlap):
        h = Harness(overlap=overlap)
        stop = h.expected(h.add(max_tokens=3))[-1]
        h = Harness(overlap=overlap)
        h.add(max_tokens=3, stop_token_ids=(stop,))
        h.drain()
        assert h.last["r0"].finish_reason == "stop"

    @pytest.mark.parametrize(
        ("causes", "ends"),
        [
            ({"bad", "stop token", "stop string", "length"}, ("error", None)),
            ({"raises", "stop string", "length"}, ("error", None)),
            ({"stop token", "raises", "length"}, ("stop", "token")),
            ({"stop token", "stop string", "length"}, ("stop", "token")),
            ({"abort", "stop string", "length"}, ("abort", None)),
            ({"stop string", "length"}, ("stop", "END")),
            ({"length"}, ("length", None)),
        ],
        ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else None,
    )
    def test_E10_of_several_reasons_in_one_step_there_is_one(self, overlap, causes, ends):
        """In this order: an error, a stop token, a stop in the text, the length."""

        class Processor:
            def on_token(self, request, token_id):
                if h.engine.states.by_id["r0"].num_known - 5 < 2:
                    return None
                if "abort" in causes:
                    h.engine.abort("r0")
                if "raises" in causes:
                    raise RuntimeError
                return "END" if "stop string" in causes else None

        prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5)
        token = reference_tokens(prompt, 3, vocab_size=VOCAB_SIZE)[2]
        count = itertools.count()
        h = Harness(
            overlap=overlap,
            processor=Processor(),
            fault=lambda _: Fault(kind=FaultKind.NOT_FINITE) if "bad" in causes and next(count) == 2 else None,
        )
        h.add(max_tokens=3, stop_token_ids=(token,) if "stop token" in causes else ())
        h.drain()
        reason, stop = ends
        assert (h.last["r0"].finish_reason, h.last["r0"].stop_reason) == (
            reason,
            token if stop == "token" else stop,
        )
        assert h.engine.stats().finished == {reason: 1}

    def test_stop_string_comes_from_the_processor(self, overlap):
        class Processor:
            seen: tuple = ()

            def on_token(self, request, token_id):
                self.seen = (*self.seen, token_id)
                return "END" if len(self.seen) == 3 else None

        processor = Processor()
        h = Harness(overlap=overlap, processor=processor)
        h.add(max_tokens=8, min_tokens=2)
        h.drain()
        assert h.tokens["r0"] == list(processor.seen) == h.expected("r0")[:3]
        assert (h.last["r0"].finish_reason, h.last["r0"].stop_reason) == ("stop", "END")

    def test_the_processor_is_not_shown_a_stop_token(self):
        seen = []

        class Processor:
            def on_token(self, request, token_id):
                seen.append(token_id)

        h = Harness(processor=Processor())
        prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5)
        expected = reference_tokens(prompt, 3, vocab_size=VOCAB_SIZE)
        h.add(max_tokens=8, stop_token_ids=(expected[2],))
        h.drain()
        assert (seen, h.tokens["r0"]) == (expected[:2], expected)

    def test_before_min_tokens_the_processor_is_shown_a_stop_token_too(self):
        seen = []

        class Processor:
            def on_token(self, request, token_id):
                seen.append(token_id)

        h = Harness(processor=Processor())
        prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5)
        expected = reference_tokens(prompt, 5, vocab_size=VOCAB_SIZE)
        h.add(max_tokens=5, stop_token_ids=(expected[2],), min_tokens=5)
        h.drain()
        assert seen == h.tokens["r0"] == expected

    def test_E1_a_failing_processor_ends_one_request(self, overlap):
        class Processor:
            def on_token(self, request, token_id):
                if request.request_id == "bad":
                    raise RuntimeError("secret of the prompt")

        h = Harness(overlap=overlap, processor=Processor())
        h.add(name="bad")
        names = [h.add(), h.add()]
        h.drain()
        assert h.last["bad"].finish_reason == "error"
        assert h.last["bad"].error == "output processing failed: RuntimeError"
        h.assert_all_as_expected(names)

    @pytest.mark.parametrize("kind", [FaultKind.NOT_FINITE, FaultKind.BAD_TOKEN])
    @pytest.mark.parametrize("row", [1, 4])
    def test_E7_E8_a_bad_row_ends_one_request(self, kind, row, overlap):
        count = itertools.count()
        h = Harness(overlap=overlap, fault=lambda b: Fault(kind=kind, row=row) if next(count) == 2 else None)
        names = [h.add() for _ in range(3)]
        h.drain()
        assert h.last[names[1]].finish_reason == "error"
        assert (h.last[names[1]].error or "").startswith("numeric")
        assert h.tokens[names[1]] == h.expected(names[1])[:2]
        h.assert_all_as_expected([names[0], names[2]])

    def test_logprobs_come_with_the_tokens(self):
        h = Harness()
        h.add(max_tokens=2, logprobs=3)
        h.add(max_tokens=2)
        outputs = []
        while h.engine.has_work:
            outputs += h.step()
        for output in outputs:
            if output.request_id == "r1":
                assert output.logprobs is None
            else:
                assert output.logprobs is not None
                assert output.logprobs[0].top_ids.shape == output.logprobs[0].top_logprobs.shape == (3,)
                assert output.logprobs[0].top_ids[0] == output.new_token_ids[0]


class TestAdmission:
    def test_an_id_is_used_once(self):
        h = Harness()
        h.add(name="a")
        with pytest.raises(DuplicateRequestError):
            h.add(name="a")
        h.drain()
        h.add(name="b")
        assert h.engine.stats().num_rejected == 1

    def test_the_queue_is_bounded(self):
        h = Harness(max_num_queued_reqs=2)
        h.add()
        h.add()
        with pytest.raises(QueueFullError, match="--max-num-queued-reqs 2") as caught:
            h.add()
        assert caught.value.retry_after_s > 0
        assert h.engine.num_live == 2
        h.step()
        h.add()

    def test_queued_tokens_are_bounded(self):
        h = Harness(max_num_queued_tokens=10)
        h.add(prompt_len=30)
        with pytest.raises(QueueFullError, match="--max-num-queued-tokens 10"):
            h.add(prompt_len=1)

    @pytest.mark.parametrize(("offered", "most"), [((True, False), 32), (BOTH, 64), ((False, True), 64)])
    def test_R3_what_cannot_fit_is_refused(self, offered, most):
        h = Harness(num_blocks=16, offered=offered)
        h.add(prompt_len=most - 3, max_tokens=3)
        with pytest.raises(InvalidRequestError, match="the pool has 16"):
            h.add(prompt_len=most - 3, max_tokens=4)
        h.drain()
        h.assert_all_as_expected()

    def test_R3_what_fits_one_kind_gets_no_other(self, overlap):
        h = Harness(
            num_blocks=16,
            policy=ScriptedPolicy(lambda view: plan_all(view, kind=KV)),
            overlap=overlap,
        )
        h.add(prompt_len=30, max_tokens=6)
        h.drain()
        h.assert_all_as_expected()
        assert all((batch.kind == HIDDEN).all() for batch in h.batches)

    def test_empty_prompts_and_outputs_are_refused(self):
        h = Harness()
        with pytest.raises(InvalidRequestError, match="prompt"):
            h.add(prompt_len=0)
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            h.add(max_tokens=0)

    def test_configurations_that_contradict_each_other(self):
        with pytest.raises(ConfigError, match="--cache"):
            Harness(offered=(False, False))
        h = Harness()
        with pytest.raises(ConfigError, match="--block-size"):
            Engine(
                h.executor,
                h.engine.policy,
                h.clock,
                h.engine.kinds,
                SchedulerConfig(),
                CacheConfig(block_size=8),
            )

    @pytest.mark.parametrize(("kind", "tokens"), [(KV, 16 * 12 // 2), (HIDDEN, 16 * 12)])
    def test_the_pool_holds_twice_the_tokens_in_hidden_mode(self, kind, tokens):
        """12 blocks of 16: 96 tokens of KV, 192 of layer inputs, in one request or in many (Apt-Serve §4.3)."""
        offered = (kind == KV, kind == HIDDEN)
        h = Harness(num_blocks=12, block_size=16, offered=offered, max_num_seqs=64, budget=512)
        h.add(prompt_len=tokens - 1, max_tokens=1)
        with pytest.raises(InvalidRequestError, match=f"up to {tokens + 1} tokens"):
            h.add(prompt_len=tokens, max_tokens=1)
        h.drain()
        for _ in range(20):
            h.add(prompt_len=14, max_tokens=3)
        h.step(2)
        stats = h.engine.stats()
        assert (stats.num_running, stats.free_blocks) == (tokens // 16, 0)
        h.drain()
        h.assert_all_as_expected()


class TestOverlap:
    def test_the_next_step_is_dispatched_before_the_last_one_is_fetched(self):
        h = Harness()
        h.add(max_tokens=4)
        assert h.step() == []
        assert len(h.batches) == 1
        (output,) = h.step()
        assert len(h.batches) == 2
        assert output.new_token_ids == h.expected("r0")[:1]
        assert h.batches[1].token_ids.tolist() == [TOKEN_ON_DEVICE]
        assert h.batches[1].position.tolist() == [1]

    def test_without_it_every_token_is_known(self):
        h = Harness(overlap=False)
        h.add(max_tokens=4)
        h.drain()
        assert all((batch.token_ids != TOKEN_ON_DEVICE).all() for batch in h.batches)

    def test_the_last_token_frees_the_blocks_when_it_is_dispatched(self):
        h = Harness()
        h.add(max_tokens=2)
        h.step(2)
        stats = h.engine.stats()
        assert (stats.num_ending, stats.num_running, stats.free_blocks) == (1, 0, 64)
        h.step()
        assert len(h.batches) == 2
        h.assert_all_as_expected()

    def test_E11_a_stop_token_drops_the_row_in_flight(self):
        h = Harness()
        expected = reference_tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 5), 2, vocab_size=VOCAB_SIZE)
        h.add(max_tokens=8, stop_token_ids=(expected[1],))
        h.drain()
        h.assert_all_as_expected()
        assert len(h.batches) == 3
        assert h.engine.stats().num_discarded_tokens == 1

    def test_E11_blocks_of_a_dropped_row_serve_the_next_request(self):
        h = Harness(num_blocks=4, max_num_seqs=1, offered=(True, False))
        expected = reference_tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 4), 2, vocab_size=VOCAB_SIZE)
        h.add(prompt_len=4, max_tokens=4, stop_token_ids=(expected[0],))
        h.add(prompt_len=4, max_tokens=4)
        h.drain()
        h.assert_all_as_expected()

    def test_E11_a_new_request_in_the_row_of_a_dropped_one(self):
        h = Harness(max_num_seqs=2)
        expected = reference_tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 4), 2, vocab_size=VOCAB_SIZE)
        h.add(prompt_len=4, max_tokens=9, stop_token_ids=(expected[0],))
        row = h.engine.states.by_id["r0"].row
        while "r0" not in h.last or not h.last["r0"].finished:
            h.step()
        h.add(prompt_len=4, max_tokens=9)  # a token of r0 is still on its way
        state = h.engine.states.by_id["r1"]
        assert state.row == row
        h.step()
        assert h.engine.states.in_flight[row] >= 0
        assert h.engine.table.num_tokens[row] == state.num_known + h.engine.states.in_flight[row]
        h.drain()
        h.assert_all_as_expected()

    def test_a_preempted_request_keeps_its_token_in_flight(self):
        h = Harness(prefix_caching=False)
        h.add(max_tokens=6)
        h.step(2)
        assert h.engine.preempt("r0")
        assert h.engine.view().waiting.size == 0, "shown before its token is known"
        h.step()
        assert h.tokens["r0"] == h.expected("r0")[:2]
        h.drain()
        h.assert_all_as_expected()
        metrics = h.last["r0"].metrics
        assert (metrics.num_preemptions, metrics.recomputed_tokens) == (1, 6)


class TestPreemption:
    def test_the_stream_goes_on_with_either_kind(self, overlap):
        steps = itertools.count()

        def plan(view: SchedulerView) -> Plan:
            n = next(steps)
            preempt = view.running[:1].tolist() if n % 4 == 3 else []
            return plan_all(view, kind=(n // 4) % 2, preempt=preempt)

        h = Harness(policy=ScriptedPolicy(plan), overlap=overlap, prefix_caching=False)
        h.add(max_tokens=20)
        h.add(max_tokens=20)
        h.drain()
        h.assert_all_as_expected()
        stats = h.engine.stats()
        assert stats.num_preemptions > 2
        assert min(stats.kind_switches.values()) > 0
        assert stats.recomputed_tokens == sum(o.metrics.recomputed_tokens for o in h.last.values()) > 0
        assert sum(stats.kind_switches.values()) == sum(o.metrics.num_kind_switches for o in h.last.values())

    def test_M1_in_mid_prompt_and_again(self, overlap):
        h = Harness(budget=8, overlap=overlap)
        h.add(prompt_len=30)
        for _ in range(3):
            h.step()
            assert h.engine.preempt("r0")
            assert h.engine.stats().free_blocks == 64
            assert not h.engine.preempt("r0")
        h.drain()
        h.assert_all_as_expected()
        assert h.last["r0"].metrics.num_preemptions == 3

    def test_keeps_the_rank(self):
        h = Harness()
        for _ in range(3):
            h.add()
        h.step(2)
        h.engine.preempt("r0")
        h.step()
        assert h.engine.view().waiting.tolist() == [h.row("r0")]
        h.add()
        assert h.engine.view().waiting.tolist() == [h.row("r0"), h.row("r3")]

    def test_unknown_requests_are_not_preempted(self):
        assert not Harness().engine.preempt("nobody")


class TestAbort:
    def test_M2_in_every_state(self, overlap):
        h = Harness(overlap=overlap, budget=8)
        names = {
            "waiting": h.add(),
            "prefill": h.add(prompt_len=20),
            "running": h.add(),
            "preempted": h.add(),
            "ending": h.add(prompt_len=3, max_tokens=1),
        }
        keep = h.add()
        assert h.engine.abort(names["waiting"])
        for state in ("prefill", "running", "preempted", "ending"):
            name = names[state]
            for _ in range(20):
                row = h.row(name) if name in h.engine.states.by_id else None
                if row is None:
                    break
                cached = int(h.engine.table.num_cached[row])
                if state == "preempted" and cached:
                    h.engine.preempt(name)
                    break
                if (
                    (state == "prefill" and cached)
                    or (state == "running" and cached > 5)
                    or (h.engine.states.status[row] == 3)
                ):
                    break
                h.step()
            h.engine.abort(name)
            h.engine.check_integrity()
        h.drain()
        assert h.tokens[keep] == h.expected(keep)
        for name in names.values():
            assert h.tokens[name] == h.expected(name)[: len(h.tokens[name])]
            assert h.last[name].finished
        assert h.engine.stats().free_blocks == 64

    def test_frees_at_once_and_tells_at_the_next_step(self):
        h = Harness()
        h.add()
        h.step(2)
        assert h.engine.abort("r0")
        assert h.engine.stats().free_blocks == 64
        assert h.engine.has_work
        (output,) = h.step()
        assert (output.finish_reason, output.new_token_ids) == ("abort", [])
        assert not h.engine.abort("r0")
        h.drain()

    def test_C12_from_within_the_processor(self, overlap):
        class Processor:
            engine: Engine

            def on_token(self, request, token_id):
                if request.request_id == "r1":
                    self.engine.abort("r1")
                    self.engine.abort("r2")

        processor = Processor()
        h = Harness(overlap=overlap, processor=processor)
        processor.engine = h.engine
        for _ in range(4):
            h.add()
        h.drain()
        assert [h.last[f"r{i}"].finish_reason for i in range(4)] == [
            "length",
            "abort",
            "abort",
            "length",
        ]
        assert h.tokens["r1"] == h.tokens["r2"] == []
        h.assert_all_as_expected(["r0", "r3"])


@pytest.mark.parametrize("event", ["finish", "preempt", "switch"])
def test_C12_abort_in_the_iteration_of_another_change(event, overlap):
    """One end, and blocks are given back once."""

    def plan(view: SchedulerView) -> Plan:
        first = view.running[:1].tolist()
        if event == "switch" and not switched and first and view.table.num_outputs[first[0]] == 3:
            switched.append(True)
            return plan_all(view, preempt=first)
        return plan_all(view, kind=HIDDEN if switched else KV)

    class Processor:
        seen = 0

        def on_token(self, request: EngineRequest, token_id: int) -> None:
            self.seen += request.request_id == "victim"
            if request.request_id == "victim" and self.seen == last:
                if event == "preempt":
                    h.engine.preempt("victim")
                assert h.engine.abort("victim")
                assert not h.engine.abort("victim")

    switched: list[bool] = []
    last = 6 if event == "finish" else 4
    h = Harness(overlap=overlap, policy=ScriptedPolicy(plan), processor=Processor(), debug=False)
    h.add(name="victim", max_tokens=6)
    h.add(name="other", max_tokens=12)
    h.drain()
    assert h.last["victim"].finish_reason == "abort"
    assert h.tokens["victim"] == h.expected("victim")[: last - 1]
    h.assert_all_as_expected(["other"])
    stats = h.engine.stats()
    assert stats.finished == {"abort": 1, "length": 1}
    assert sum(stats.kind_switches.values()) == (event == "switch")


@pytest.mark.parametrize("name", ["sarathi", "fastgen", "apt-s"])
def test_Q4_long_prompts_do_not_hold_up_what_decodes(name):
    """Every step takes a second here, whatever is in it: a gap of two is one step that a row was left out of."""
    h = Harness(policy=make_policy(name), num_blocks=4096, budget=32, block_size=16)
    running = h.add(prompt_len=8, max_tokens=60)
    h.step(3)
    for _ in range(6):
        h.add(prompt_len=400, max_tokens=2)
    h.drain()
    gaps = np.diff(h.last[running].metrics.token_times_s)
    assert max(gaps) <= 2.0
    h.assert_all_as_expected()


def once(kind: FaultKind, *steps: int) -> Callable[[StepBatch], Fault | None]:
    count = itertools.count()
    return lambda batch: Fault(kind=kind) if next(count) in steps else None


STEP_FAULTS = [
    FaultKind.RAISE_BEFORE,
    FaultKind.RAISE_AFTER,
    FaultKind.RAISE_IN_RESULT,
    FaultKind.PARTIAL,
]


@pytest.mark.usefixtures("quiet")
class TestFailures:
    @pytest.fixture
    def quiet(self):
        logging.getLogger("apt_jax.engine").disabled = True
        yield
        logging.getLogger("apt_jax.engine").disabled = False

    @pytest.mark.parametrize("kind", STEP_FAULTS)
    @pytest.mark.parametrize("at", [0, 1, 3])
    def test_E2_after_one_everything_is_recomputed(self, kind, at, overlap):
        h = Harness(overlap=overlap, fault=once(kind, at))
        for n in (3, 4, 5):
            h.add(prompt_len=n)
        h.drain()
        h.assert_all_as_expected()
        stats = h.engine.stats()
        assert (stats.step_failures, stats.num_preemptions, h.executor.num_resets) == (1, 0, 1)
        assert stats.recomputed_tokens > 0 or at == 0

    @pytest.mark.parametrize("kind", STEP_FAULTS)
    def test_E2_a_second_within_a_minute_ends_the_engine(self, kind, overlap):
        h = Harness(overlap=overlap, fault=once(kind, 2, 4))
        names = [h.add(max_tokens=20) for _ in range(3)]
        for _ in range(10):
            h.step()
            if h.engine.dead_reason:
                break
        assert [h.last[name].finish_reason for name in names] == ["error"] * 3
        assert not h.engine.has_work
        for call in (h.engine.step, h.add):
            with pytest.raises(EngineDeadError, match="twice within 60 s"):
                call()
        assert not h.engine.abort(names[0])

    def test_E2_two_a_minute_apart_do_not(self):
        h = Harness(fault=once(FaultKind.RAISE_AFTER, 2, 40))
        h.add(max_tokens=100)
        for _ in range(20):
            h.step()
        h.clock.advance_to(h.clock.now_s() + 60)
        h.drain()
        h.assert_all_as_expected()

    def test_E12_an_executor_that_cannot_be_reset_ends_the_engine(self, overlap):
        h = Harness(overlap=overlap, fault=once(FaultKind.RAISE_AFTER, 2))

        def reset():
            raise OSError("no device")

        h.executor.reset = reset
        h.add(max_tokens=20)
        for _ in range(5):
            if not h.engine.dead_reason:
                h.step()
        assert h.engine.dead_reason == "the executor cannot be reset"
        assert h.last["r0"].finish_reason == "error"

    def test_fcfs_decides_where_the_policy_fails(self, overlap):
        count = itertools.count()

        def plan(view: SchedulerView) -> Plan:
            if next(count) % 3 == 2:
                raise ZeroDivisionError("no reason")
            return plan_all(view)

        h = Harness(policy=ScriptedPolicy(plan), overlap=overlap, debug=False)
        h.add(max_tokens=20)
        h.add(max_tokens=20)
        h.drain()
        h.assert_all_as_expected()
        assert h.engine.stats().fallback_iterations == next(count) // 3 > 5

    def test_an_engine_whose_fallback_fails_too_ends(self):
        h = Harness(policy=ScriptedPolicy(lambda view: [][0]), debug=False)
        h.engine._policies.fallback.schedule = lambda view: [][1]  # type: ignore[method-assign]
        h.add(max_tokens=20)
        with pytest.raises(EngineDeadError, match="the policy failed, twice"):
            h.step(10)

    def test_E3_accounting_that_contradicts_itself_ends_the_engine(self):
        h = Harness(debug=False)
        h.add(max_tokens=20)
        h.step(2)
        h.engine.cache.tables[:, 0, 0] = 65
        outputs = h.engine.step()
        assert [o.finish_reason for o in outputs] == ["error"]
        with pytest.raises(EngineDeadError, match="CacheIntegrityError"):
            h.engine.step()

    def test_E3_accounting_that_contradicts_itself_raises_in_debug(self):
        h = Harness()
        h.add(max_tokens=20)
        h.step(2)
        h.engine.cache.pool.allocate(1)
        with pytest.raises(CacheIntegrityError, match="1 blocks are lost"):
            h.engine.step()

    def test_a_policy_that_never_schedules_does_not_hold_the_engine_up(self):
        h = Harness(policy=ScriptedPolicy(lambda view: Plan.idle()), debug=False)
        h.add()
        h.add()
        h.step(STALL_LIMIT)
        assert h.last["r0"].finish_reason == "error"
        h.drain()
        h = Harness(policy=ScriptedPolicy(lambda view: Plan.idle()))
        h.add()
        with pytest.raises(AssertionError, match="scheduled nothing"):
            h.step(STALL_LIMIT)

    def test_rows_that_wait_for_each_others_blocks_are_parted(self):
        def plan(view: SchedulerView) -> Plan:
            rows = view.running if view.running.size > 1 else np.concatenate([view.running, view.waiting])
            whole = plan_all(dataclasses.replace(view, running=rows[:0], waiting=rows))
            return dataclasses.replace(whole, num_tokens=np.minimum(whole.num_tokens, 4))

        # Four blocks; each request gets two of them and needs four.
        h = Harness(policy=ScriptedPolicy(plan), num_blocks=4, offered=(True, False), debug=False)
        h.add(prompt_len=4, max_tokens=4)
        h.add(prompt_len=4, max_tokens=4)
        h.drain()
        h.assert_all_as_expected()
        assert h.engine.stats().num_preemptions == 1


def broken_plans() -> dict[str, Callable[[SchedulerView, Plan], Plan]]:
    def changed(**values) -> Callable[[SchedulerView, Plan], Plan]:
        def change(view: SchedulerView, plan: Plan) -> Plan:
            new = {name: getattr(plan, name).copy() for name in ("rows", "num_tokens", "kind", "preempt")}
            for name, value in values.items():
                if name == "preempt":
                    new[name] = np.append(new[name], np.int32(value))
                elif name == "twice":
                    for field in ("rows", "num_tokens", "kind"):
                        new[field] = np.append(new[field], new[field][-1:])
                else:
                    new[name][-1:] = value
            return Plan(**new, iteration="mixed")

        return change

    return {
        "unknown row": changed(rows=10_000),
        "negative row": changed(rows=-1),
        "dead row": changed(rows=200),
        "no tokens": changed(num_tokens=0),
        "too many tokens": changed(num_tokens=1000),
        "unknown kind": changed(kind=7),
        "no kind": changed(kind=-1),
        "other kind": changed(kind=HIDDEN),
        "row twice": changed(twice=True),
        "preempts a stranger": changed(preempt=200),
        "preempts nobody": changed(preempt=-1),
    }


@pytest.mark.parametrize("name", broken_plans())
def test_M5_a_broken_promise_of_the_policy_stays_off_the_device(name, overlap, caplog):
    change, count = broken_plans()[name], itertools.count()

    def plan(view: SchedulerView) -> Plan:
        good = plan_all(view)
        return change(view, good) if next(count) == 3 else good

    h = Harness(policy=ScriptedPolicy(plan), overlap=overlap, debug=False)
    h.add()
    h.add()
    h.drain()
    h.assert_all_as_expected()
    assert h.engine.stats().num_invalid_plan_rows == 1
    assert "violated the contract of Plan" in caplog.text
    count = itertools.count()
    h = Harness(policy=ScriptedPolicy(plan), overlap=overlap)
    h.add()
    h.add()
    with pytest.raises(AssertionError, match="policy scripted"):
        h.drain()


def test_a_plan_for_more_blocks_than_there_are_defers_its_last_rows(overlap):
    h = Harness(
        policy=ScriptedPolicy(plan_all),
        num_blocks=6,
        offered=(True, False),
        overlap=overlap,
        debug=False,
    )
    for _ in range(4):
        h.add(prompt_len=4, max_tokens=1)
    h.step()
    assert h.batches[0].slots.size == 3
    h.drain()
    h.assert_all_as_expected()
    assert h.engine.stats().num_deferred_requests >= 1


def test_metrics_and_stats(overlap):
    h = Harness(overlap=overlap, budget=8)
    h.clock.advance_to(10.0)
    h.add(prompt_len=16, max_tokens=3)
    h.drain()
    metrics = h.last["r0"].metrics
    assert metrics.arrival_s == metrics.first_scheduled_s == 10.0
    assert metrics.token_times_s == [12.0, 13.0, 14.0]
    assert (metrics.finished_s, metrics.ttft_s, metrics.cache_kind) == (14.0, 2.0, "kv")
    stats = h.engine.stats()
    assert stats.iterations == {"mixed": 4}
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (16, 3, {"length": 1})
    assert (stats.num_waiting, stats.num_running, stats.used_blocks, stats.compilations) == (
        0,
        0,
        0,
        0,
    )
    assert 0 < stats.host_p50_ms <= stats.host_p99_ms


def test_gauges_by_kind():
    h = Harness(policy=ScriptedPolicy(lambda view: plan_all(view, kind=HIDDEN if view.running.size else KV)))
    h.add(prompt_len=5)
    h.step()
    h.add(prompt_len=5)
    h.step()
    stats = h.engine.stats()
    assert stats.requests_by_kind == {"kv": 1, "hidden": 1}
    assert stats.blocks_by_kind == {"kv": 4, "hidden": 2}
    assert stats.used_blocks == 6


def test_lengths_of_natural_ends_are_counted_for_the_policies():
    h = Harness()
    for name, max_tokens in (("a", 2), ("b", 9), ("c", 9)):
        h.add(name=name, max_tokens=max_tokens)
    h.step(4)
    h.engine.abort("c")
    h.drain()
    table = h.engine.table
    assert np.flatnonzero(table.output_lengths).tolist() == [2, 9]
    assert table.output_lengths.sum() == table.num_output_lengths == 2


def test_last_token_time_is_set_when_the_token_is_delivered():
    h = Harness()
    h.add()
    h.step(2)
    assert h.engine.table.last_token_s[h.row("r0")] == h.clock.now_s() == 1.0


@pytest.mark.seeds
def test_M11_thousands_of_requests_leave_nothing_behind():
    num = num_cases(2_000, 10_000)
    h = Harness(
        policy=RandomPolicy(3, RandomPlanPolicy(preempt=0.01, chunk=0.05, flip=0.5)),
        num_blocks=96,
        max_num_seqs=32,
        budget=128,
        debug=False,
        max_num_queued_reqs=64,
    )
    engine, rng = h.engine, np.random.default_rng(0)
    prompt_lens, lengths = rng.integers(1, 12, num), rng.integers(1, 5, num)
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    ended = 0
    for i in range(num):
        prompt = rng.integers(0, VOCAB_SIZE, int(prompt_lens[i])).astype(np.int32)
        name, params = str(i), SamplingParams(max_tokens=int(lengths[i]), temperature=0.0)
        if i % 20 == 0:
            expected[name] = reference_tokens(prompt, params.max_tokens, vocab_size=VOCAB_SIZE, params=params)
            got[name] = []
        engine.add_request(
            EngineRequest(
                request_id=name,
                prompt=None,
                prompt_token_ids=prompt,
                params=params,
                slo=SLO(),
                arrival_s=h.clock.now_s(),
            )
        )
        last = i == num - 1 or i % 500 == 499
        while engine.has_work and (last or engine.stats().num_waiting >= 48):
            for output in engine.step():
                if output.request_id in got:
                    got[output.request_id] += output.new_token_ids
                ended += output.finished
        if last:
            engine.check_integrity()
            assert engine.stats().used_blocks == 0
            assert len(engine.cache.free_slots) == 32
            h.batches.clear()
    assert ended == num
    assert got == expected
    assert engine.stats().finished == {"length": num}


class Residues:
    """A grammar whose every token depends on the one before: token t may follow p where (t + p) % 7 == 3.

    Args:
        length: tokens of a whole output.
        fails_at: number of the token whose acceptance, or the mask before which, raises.
        in_mask: it is the mask.
        silent: the end shows in the mask alone.
    """

    def __init__(self, length: int = 100, fails_at: int = -1, in_mask: bool = False, silent=False):
        self.length, self.fails_at, self.in_mask, self.silent = length, fails_at, in_mask, silent

    def start(self) -> "ResidueConstraint":
        return ResidueConstraint(self)


class ResidueConstraint:
    def __init__(self, grammar: Residues):
        self.grammar, self.count, self.last = grammar, 0, 0

    @property
    def ended(self) -> bool:
        return self.count >= self.grammar.length and not self.grammar.silent

    def accept(self, token_id: int) -> None:
        assert (token_id + self.last) % 7 == 3
        if self.count == self.grammar.fails_at and not self.grammar.in_mask:
            raise ValueError("secret of the prompt")
        self.count, self.last = self.count + 1, token_id

    def fill_mask(self, row) -> bool:
        if self.count == self.grammar.fails_at and self.grammar.in_mask:
            raise GrammarError("too complex")
        bits = np.zeros(row.size * 32, np.uint8)
        bits[(3 - self.last) % 7 : VOCAB_SIZE : 7] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return self.count < self.grammar.length


class TestStructuredOutput:
    def test_masks_follow_the_tokens(self, overlap):
        h = Harness(overlap=overlap)
        for n in (1, 4, 9):
            h.add(prompt_len=n, max_tokens=12, grammar=Residues())
            h.add(prompt_len=n, max_tokens=12)
        h.drain()
        h.assert_all_as_expected()
        for name in ("r0", "r2", "r4"):
            tokens = h.tokens[name]
            assert all((a + b) % 7 == 3 for a, b in itertools.pairwise([0, *tokens]))

    def test_others_say_the_same_as_without_it(self, overlap):
        streams = []
        for grammar in (None, Residues()):
            h = Harness(overlap=overlap)
            for i in range(6):
                h.add(prompt_len=3 + i, max_tokens=9, grammar=grammar if i % 2 else None)
            h.drain()
            h.assert_all_as_expected()
            streams.append([h.tokens[f"r{i}"] for i in (0, 2, 4)])
        assert streams[0] == streams[1]

    def test_only_steps_with_masks_wait_for_the_step_before(self):
        h = Harness()
        h.add(max_tokens=30)
        h.step(3)
        assert h.engine._steps.pending is not None
        h.add(max_tokens=4, grammar=Residues())
        h.drain()
        h.assert_all_as_expected()
        masked = [b.masked is not None for b in h.batches]
        assert masked.count(True) == 4
        on_device = [b for b in h.batches if b.masked is not None and (b.token_ids == -1).any()]
        assert on_device  # dispatched before the host knew the token

    @pytest.mark.parametrize("silent", [False, True])
    @pytest.mark.parametrize("min_tokens", [0, 6])
    def test_a_complete_output_ends_with_stop(self, overlap, silent, min_tokens):
        h = Harness(overlap=overlap)
        h.add(max_tokens=9, grammar=Residues(4, silent=silent), min_tokens=min_tokens)
        h.add(max_tokens=4, grammar=Residues(4))
        h.add(max_tokens=3, grammar=Residues(4))
        h.add(max_tokens=9)
        h.drain()
        h.assert_all_as_expected()
        reasons = [h.last[f"r{i}"].finish_reason for i in range(4)]
        assert reasons == ["stop", "stop", "length", "length"]
        assert [len(h.tokens[f"r{i}"]) for i in range(4)] == [4, 4, 3, 9]
        assert h.last["r0"].stop_reason is None

    def test_a_stop_token_that_the_grammar_allows_ends_it(self, overlap):
        h = Harness(overlap=overlap)
        stop = tuple(range(3, VOCAB_SIZE, 7))[::4]
        h.add(max_tokens=20, grammar=Residues(), stop_token_ids=stop)
        h.add(max_tokens=20, grammar=Residues(), stop_token_ids=stop, min_tokens=6)
        h.drain()
        h.assert_all_as_expected()
        assert len(h.tokens["r1"]) >= 6

    @pytest.mark.parametrize("in_mask", [False, True])
    @pytest.mark.parametrize("at", [0, 3])
    def test_E1_a_grammar_that_raises_ends_its_request_alone(self, overlap, in_mask, at, caplog):
        h = Harness(overlap=overlap)
        h.add(name="bad", grammar=Residues(fails_at=at, in_mask=in_mask))
        names = [h.add(), h.add(grammar=Residues())]
        h.drain()
        assert h.last["bad"].finish_reason == "error"
        assert h.last["bad"].error == ("grammar: too complex" if in_mask else "grammar: ValueError")
        assert len(h.tokens["bad"]) == at + (not in_mask)
        assert "secret" not in caplog.text
        h.assert_all_as_expected(names)

    def test_R21_a_row_without_any_token_ends_alone(self, overlap):
        h = Harness(overlap=overlap)
        first = tuple(range(3, VOCAB_SIZE, 7))
        h.add(name="none", grammar=Residues(), stop_token_ids=first, min_tokens=2)
        names = [h.add(), h.add(grammar=Residues())]
        h.drain()
        assert h.last["none"].finish_reason == "error"
        assert (h.last["none"].error or "").startswith("excluded: structured_outputs: allows no token")
        h.assert_all_as_expected(names)

    def test_E1_masks_that_cannot_be_filled_end_their_requests_alone(self, overlap):
        def fail(constraints, masks, rows):
            raise RuntimeError("secret")

        h = Harness(overlap=overlap)
        h.engine._masks.fill_masks = fail
        h.add(name="bad", grammar=Residues())
        names = [h.add()]
        h.drain()
        assert h.last["bad"].finish_reason == "error"
        assert h.last["bad"].error == "grammar: RuntimeError"
        assert h.engine.dead_reason is None
        h.assert_all_as_expected(names)

    def test_preemption_keeps_the_state(self, overlap):
        h = Harness(overlap=overlap)
        h.add(max_tokens=20, grammar=Residues())
        h.add(max_tokens=20, grammar=Residues())
        for i in range(12):
            h.step()
            h.engine.preempt(f"r{i % 2}")
        h.drain()
        h.assert_all_as_expected()
        assert h.engine.stats().num_preemptions > 3

    def test_abort_with_a_mask_on_its_way(self, overlap):
        h = Harness(overlap=overlap)
        h.add(max_tokens=20, grammar=Residues())
        keep = h.add(max_tokens=8, grammar=Residues())
        h.step(3)
        assert h.engine.abort("r0")
        h.drain()
        assert h.last["r0"].finish_reason == "abort"
        assert h.tokens[keep] == h.expected(keep)

    @pytest.mark.parametrize("kind", [*STEP_FAULTS, FaultKind.RAISE_IN_SAMPLE])
    @pytest.mark.parametrize("at", [0, 1, 3])
    def test_a_failed_step_is_recomputed(self, overlap, kind, at):
        logging.getLogger("apt_jax.engine").disabled = True
        try:
            h = Harness(overlap=overlap, fault=once(kind, at))
            for n in (3, 4, 5):
                h.add(prompt_len=n, grammar=Residues() if n % 2 else None)
            h.drain()
        finally:
            logging.getLogger("apt_jax.engine").disabled = False
        h.assert_all_as_expected()
        assert h.engine.stats().step_failures == 1

    @pytest.mark.parametrize("seed", range(8))
    def test_whatever_the_policy_does_streams_are_right(self, overlap, seed):
        chaos = RandomPlanPolicy(preempt=0.1, skip=0.1, chunk=0.3, flip=0.3, shuffle=0.2)
        h = Harness(overlap=overlap, policy=RandomPolicy(seed, chaos), num_blocks=40, budget=24)
        rng = np.random.default_rng(seed)
        for i in range(24):
            grammar = Residues(int(rng.integers(1, 14)), silent=i % 5 == 0) if i % 3 else None
            length = int(rng.integers(1, 20))
            stop = tuple(rng.integers(0, VOCAB_SIZE, 14).tolist()) if i % 4 == 0 else ()
            h.add(length, int(rng.integers(1, 12)), grammar=grammar, stop_token_ids=stop)
            h.step(int(rng.integers(0, 3)))
        h.drain()
        h.assert_all_as_expected()
        assert h.engine.stats().mask_p50_ms >= 0.0

    def test_the_size_of_the_vocabulary_must_be_known(self):
        h = Harness()
        h.engine._controller.can_mask = False
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            h.add(grammar=Residues())
        assert not h.engine.has_work


# --- the log of decisions ------------------------------------------------------------------------------------------


def logged(h: Harness, num_requests: int = 100) -> TimelineLog:
    log = TimelineLog(num_requests, max_num_seqs=8, blocks_needed=h.engine.min_blocks_for)
    h.engine.after_step = log.note
    return log


def run_all(h: Harness, log: TimelineLog, *shapes: tuple[int, int]) -> list[str]:
    names = []
    for prompt_len, max_tokens in shapes:
        names.append(h.add(prompt_len=prompt_len, max_tokens=max_tokens))
        log.begin(h.requests[names[-1]], h.engine.num_decisions)
    h.drain()
    return names


def events(log: TimelineLog, name: str) -> list[dict[str, Any]]:
    found = log.of(name)
    assert found is not None
    return found.as_json()["events"]


def fcfs() -> Any:
    return make_policy(config=SchedulerConfig(policy="fcfs"))


def test_a_request_alone_has_its_steps_in_order():
    h = Harness(policy=fcfs(), budget=16)
    log = logged(h)
    (name,) = run_all(h, log, (40, 6))
    prefill, decode = events(log, name)
    assert prefill["event"] == "prefill"
    assert prefill["tokens"] == 40
    assert prefill["steps"] == 3
    assert decode["event"] == "decode"
    assert decode["tokens"] == decode["steps"] == 5
    assert 0 <= prefill["at_ms"] < prefill["until_ms"] <= decode["until_ms"]


def test_every_token_and_preemption_of_a_crowd_is_there_and_waits_have_reasons():
    h = Harness(num_blocks=24, offered=BOTH)
    log = logged(h)
    names = run_all(h, log, *[(17, 20)] * 12)
    seen = collections.Counter()
    for name in names:
        found = events(log, name)
        metrics = h.last[name].metrics
        by = collections.Counter(e["event"] for e in found)
        seen += by
        assert by["preempted"] == metrics.num_preemptions
        assert by["switched"] == metrics.num_kind_switches
        computed = sum(e["tokens"] for e in found if e["event"] in ("prefill", "decode"))
        lost = sum(e["tokens"] for e in found if e["event"] == "preempted")
        cached = sum(e.get("cached", 0) for e in found if e["event"] == "prefill" and e["steps"] == 1)
        assert computed <= 17 + 19 + lost
        assert computed + cached + lost >= 17 + 19
        for e in found:
            if e["event"] == "waited":
                reasons = e["for_blocks"] + e["for_slots"] + e["behind_others"]
                assert 0 < reasons <= e["iterations"]
    assert seen["preempted"]
    assert seen["waited"]
    assert seen["switched"]
    waits = [e for name in names for e in events(log, name) if e["event"] == "waited"]
    assert sum(e["for_blocks"] for e in waits) > 0


def test_a_wait_for_a_slot_is_recorded():
    h = Harness(policy=fcfs(), num_blocks=512)
    log = logged(h)
    names = run_all(h, log, *[(5, 20)] * 10)
    for name in names[8:]:
        (waited,) = [e for e in events(log, name) if e["event"] == "waited"]
        assert waited["for_slots"] >= 19
        assert waited["for_blocks"] == 0
        assert waited["at_ms"] == 0
        assert waited["until_ms"] >= 19_000


def test_old_requests_and_the_middle_of_long_stories_are_forgotten():
    h = Harness(policy=fcfs())
    log = logged(h, num_requests=2)
    names = run_all(h, log, (5, 3), (5, 3), (5, 3))
    assert log.of(names[0]) is None
    found = log.of(names[2])
    assert found is not None
    for i in range(200):
        log.end(h.requests[names[2]], f"again {i}", 1.0)
    assert len(found.events) == 128
    assert found.num_dropped == len(events(log, names[2])) + found.num_dropped - 128
    assert found.events[0].event in ("prefill", "waited")
    assert found.events[-1].details["reason"] == "again 199"


def test_steps_of_an_id_that_was_used_before_are_not_told_of_the_new_request():
    h = Harness(policy=fcfs())
    log = logged(h)
    first = h.add(max_tokens=20)
    log.begin(h.requests[first], h.engine.num_decisions)
    for _ in range(3):
        h.step()
    h.engine.abort(first)
    log.end(h.requests[first], "abort", h.clock.now_s())
    told = events(log, first)
    second = h.add(name="other", max_tokens=4)
    again = dataclasses.replace(h.requests[second], request_id=first)
    log.begin(again, h.engine.num_decisions)
    log.end(h.requests[first], "abort", h.clock.now_s())  # told late
    h.step()  # the step in flight belonged to the first one
    assert events(log, first) == []
    assert told[-1]["event"] == "ended"
