"""An engine over a `FakeExecutor` in virtual time, for tests that feed it by hand."""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Literal

import numpy as np

from apt_jax.config import SLO, CacheConfig, SchedulerConfig, SessionOrder
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.batch import PlainReserver, Reserver
from apt_jax.request import EngineRequest, PromptLogprobs, SamplingParams
from apt_jax.sched import check_plan, make_policy
from apt_jax.sched.view import Plan, SchedulerView
from apt_jax.utils.clock import VirtualClock
from tests.support.fake_disk import FakeDisk
from tests.support.fake_executor import FakeExecutor, Fault, FaultKind, reference_tokens
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

VOCAB_SIZE = 500
COSTS = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-3, decode_base_s=0.01, decode_per_request_s=1e-3)


class Checked:
    """A policy whose plans are checked."""

    def __init__(self, policy: str) -> None:
        self.name = policy
        self._inner = make_policy(policy)

    def schedule(self, view: SchedulerView) -> Plan:
        plan = self._inner.schedule(view)
        check_plan(view, plan)
        return plan


class OneKind:
    """`fcfs` with one of the two kinds."""

    name = "one kind"

    def __init__(self, kind: int) -> None:
        self._inner, self._kind = make_policy("fcfs"), kind

    def schedule(self, view: SchedulerView) -> Plan:
        kinds = [dataclasses.replace(k, offered=i == self._kind) for i, k in enumerate(view.kinds)]
        plan = self._inner.schedule(dataclasses.replace(view, kinds=kinds))
        check_plan(view, plan)
        return plan


class Served:
    """An engine over a `FakeExecutor`, its steps, and what came out of it."""

    def __init__(
        self,
        policy: str = "fcfs",
        *,
        num_blocks: int = 200,
        block_size: int = 4,
        hidden_block_size: int | None = None,
        max_num_seqs: int = 8,
        budget: int = 64,
        overlap: bool = True,
        offered: tuple[bool, bool] = (True, True),
        prefix_caching: bool = True,
        debug: bool = True,
        fault=None,
        engine_class: type[Engine] = Engine,
        adapters: tuple[str, ...] = (),
        num_host_blocks: int = 0,
        lost=None,
        reserver: type[Reserver] = PlainReserver,
        disk: FakeDisk | None = None,
        retention: str = "lru",
        session_order: SessionOrder = "arrival",
    ) -> None:
        self.adapters = adapters
        self.clock = VirtualClock()
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            hidden_block_size=hidden_block_size,
            max_num_seqs=max_num_seqs,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            duration_s=lambda batch: COSTS.step_s(batch.num_tokens, batch.start, batch.kind),
            fault=fault,
            num_host_blocks=num_host_blocks,
            lost=lost,
        )
        self.executor.adapters = adapters
        if disk is not None:
            disk.host = self.executor.host
        self.batches: list[StepBatch] = []
        execute = self.executor.execute

        def noting(batch: StepBatch):
            self.batches.append(batch)
            return execute(batch)

        self.executor.execute = noting
        kinds = tuple(
            CacheKindSpec(name=name, blocks_per_group=n, offered=o, extra_per_token_s=s)
            for name, n, o, s in zip(("kv", "hidden"), (2, 1), offered, (0.0, 1e-7), strict=True)
        )
        self.engine = engine_class(
            self.executor,
            Checked(policy),
            self.clock,
            kinds,
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, overlap=overlap, session_order=session_order
            ),
            CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching, retention=retention),
            costs=COSTS,
            vocab_size=VOCAB_SIZE,
            tiers=Tiers(host=self.executor.host if num_host_blocks else None, disk=disk),
            reserver=reserver,
            debug=debug,
        )
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        self.pooled: dict[str, np.ndarray] = {}
        self.cached: dict[str, int] = {}

    def add(
        self,
        prompt,
        max_tokens: int = 4,
        name: str | None = None,
        grammar=None,
        prompt_logprobs: int | None = None,
        pooling: Literal["mean", "last"] | None = None,
        adapter: str | None = None,
    ) -> str:
        name = name or f"r{len(self.requests)}"
        self.requests[name] = EngineRequest(
            request_id=name,
            prompt=None,
            prompt_token_ids=np.asarray(prompt, np.int32),
            params=SamplingParams(
                max_tokens=max_tokens, temperature=0.0, prompt_logprobs=prompt_logprobs, pooling=pooling
            ),
            slo=SLO(ttft_s=1.0, tbt_s=0.5),
            arrival_s=self.clock.now_s(),
            grammar=grammar,
            adapter=adapter,
        )
        self.tokens[name] = []
        self.engine.add_request(self.requests[name])
        return name

    def step(self) -> list[str]:
        """One iteration; returns who has ended."""
        ended = []
        for output in self.engine.step():
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            if output.prompt_logprobs is not None:
                assert name not in self.prompt_logprobs
                self.prompt_logprobs[name] = output.prompt_logprobs
            if output.pooled is not None:
                assert name not in self.pooled
                self.pooled[name] = output.pooled
            if output.finish_reason is not None:
                self.ended[name] = output.finish_reason
                self.cached[name] = output.metrics.num_cached_tokens
                ended.append(name)
        return ended

    def drain(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests do not end")

    def serve(self, prompt, max_tokens: int = 4) -> str:
        name = self.add(prompt, max_tokens)
        self.drain()
        return name

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        number = 0 if request.adapter is None else 1 + self.adapters.index(request.adapter)
        return reference_tokens(
            request.prompt_token_ids, request.params.max_tokens, vocab_size=VOCAB_SIZE, adapter=number
        )

    def assert_as_expected(self) -> None:
        for name, tokens in self.tokens.items():
            assert tokens == self.expected(name)[: len(tokens)], name
            assert self.ended[name] == "error" or tokens == self.expected(name), name
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.used_blocks == 0
        self.engine.check_integrity()

    def prefilled(self, index: int) -> tuple[int, int]:
        """(first position, tokens) of a step of one row."""
        batch = self.batches[index]
        return int(batch.start[0]), int(batch.num_tokens[0])


def prompt(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([7, seed]).integers(0, VOCAB_SIZE, num).astype(np.int32)


def unsteady(rng: np.random.Generator, seed: int, *, fails: Collection[int], overlap: bool, **others) -> Served:
    """An engine with random plans: preempted, skipped, cut, of another kind, converted.

    Args:
        fails: numbers of the steps that fail.
        others: of `Served`.
    """
    steps = itertools.count()

    def fault(_batch: StepBatch) -> Fault | None:
        return Fault(kind=FaultKind.RAISE_IN_RESULT) if next(steps) in fails else None

    served = Served(budget=int(rng.integers(8, 40)), overlap=overlap, debug=True, fault=fault, **others)
    whims = RandomPlanPolicy(preempt=0.15, skip=0.1, chunk=0.4, flip=0.3, convert=0.3)
    served.engine.policy = RandomPolicy(seed, whims)
    return served


def prompt_with_shared_beginning(rng: np.random.Generator, number: int) -> np.ndarray:
    """A prompt that begins as others do."""
    return np.concatenate([prompt(12)[: int(rng.integers(0, 13))], prompt(int(rng.integers(1, 30)), number)])


def serve_random_requests(served: Served, rng: np.random.Generator, num: int) -> None:
    """Serve requests with common beginnings that come at random, and check the cache after every step and the tokens at
    the end."""
    served.engine.debug = False
    for number in range(num):
        served.add(prompt_with_shared_beginning(rng, number), int(rng.integers(1, 14)))
        for _ in range(int(rng.integers(0, 6))):
            served.step()
            served.engine.check_integrity()
    for _ in range(3000):
        if not served.engine.has_work:
            break
        served.step()
        served.engine.check_integrity()
    served.assert_as_expected()
