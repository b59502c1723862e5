"""An engine over a small model, and the tokens that it gives."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock


class Served:
    """Requests through an engine that recounts all blocks after every step.

    Attributes:
        kinds: cache kinds that some request held.
        found: tokens of prompts that were found in the cache.
        most_held: most groups of windowed layers that a request held after a step.
    """

    def __init__(
        self,
        executor: JaxExecutor,
        kinds: Sequence[CacheKindSpec],
        policy: Policy | str,
        prefix_caching: bool = True,
        p_preempt: float = 0.0,
    ) -> None:
        executor.reset()
        if isinstance(policy, str):
            policy = make_policy(policy)
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
        cache = dataclasses.replace(executor.cache_config, enable_prefix_caching=prefix_caching)
        self.engine = Engine(executor, policy, WallClock(), kinds, scheduler, cache, vocab_size=97, debug=True)
        self.rng, self.p_preempt = np.random.default_rng(0), p_preempt
        self.tokens: dict[str, list[int]] = {}
        self.kinds: set[int] = set()
        self.found = self.most_held = 0

    def serve(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        names = [f"{len(self.tokens)}-{i}" for i in range(len(prompts))]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            self.tokens[name] = []
            self.engine.add_request(
                EngineRequest(
                    request_id=name,
                    prompt=None,
                    prompt_token_ids=np.array(prompt, np.int32),
                    params=params,
                    slo=SLO(),
                    arrival_s=self.engine.clock.now_s(),
                )
            )
        windows = self.engine.cache.windows
        for _ in range(5000):
            if not self.engine.has_work:
                break
            for out in self.engine.step():
                assert out.finish_reason in (None, "length"), out.error
                self.tokens[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    self.found += out.metrics.num_cached_tokens or 0
            self.kinds.update(self.engine.table.kind[self.engine.table.live].tolist())
            if windows is not None:
                self.most_held = max(self.most_held, int(windows.num_held.max()))
            if self.rng.random() < self.p_preempt:
                self.engine.preempt(names[int(self.rng.integers(len(names)))])
        assert not self.engine.has_work, "no progress"
        self.engine.check_integrity()
        assert self.engine.stats().used_blocks == 0
        return [self.tokens[name] for name in names]
