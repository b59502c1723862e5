"""Requests of two classes, served by a real executor with shared blocks or without."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.batch import PlainReserver, SharedReserver
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy
from apt_jax.utils.clock import WallClock

Requests = list[tuple[list[int], str]]
"""Prompts and classes."""


def serve(
    made: JaxExecutor,
    requests: Requests,
    kind: str,
    policy: Policy,
    *,
    share: bool,
    aborted: Mapping[int, int] | None = None,
) -> list[list[int]]:
    """Tokens of requests that come one a step.

    Args:
        made: has host memory and shares blocks.
        share: with blocks that two requests share, host memory and prefix caching.
        aborted: requests that are aborted, and after how many tokens; None: none is.
    """
    made.reset()
    kinds = (
        CacheKindSpec(name="kv", blocks_per_group=2, offered=kind in ("kv", "hybrid")),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=kind in ("hidden", "hybrid")),
    )
    engine = Engine(
        made, policy, WallClock(), kinds, SchedulerConfig(max_num_seqs=made.max_num_seqs, max_num_batched_tokens=32),
        dataclasses.replace(made.cache_config, enable_prefix_caching=share, swap_space=0.0), costs=StepCosts(prefill_per_token_s=1e-4),
        tiers=Tiers(host=made.host if share else None), reserver=SharedReserver if share else PlainReserver, vocab_size=97, debug=True,
    )  # fmt: skip
    said: dict[str, list[int]] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        if waiting:
            number, (prompt, slo_class) = waiting.pop(0)
            said[str(number)] = []
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            engine.add_request(EngineRequest(
                request_id=str(number), prompt=None, prompt_token_ids=np.array(prompt, np.int32), params=params,
                slo=SLO(), slo_class=slo_class, arrival_s=engine.clock.now_s(),  # type: ignore[arg-type]
            ))  # fmt: skip
        for output in engine.step():  # in debug mode, both pools and the preemption table are recounted after it
            assert output.finish_reason in (None, "length", "abort"), output.error
            said[output.request_id] += output.new_token_ids
        for number, after in (aborted or {}).items():
            if len(said.get(str(number), ())) >= after:
                engine.abort(str(number))
    stats = engine.stats()
    assert (stats.free_blocks, stats.compilations) == (stats.total_blocks, 0)
    return list(said.values())


def draw_requests(rng: np.random.Generator) -> Requests:
    """Seven requests of both classes, some with a common beginning."""
    beginnings = [rng.integers(3, 97, int(n)).tolist() for n in rng.integers(4, 20, 2)]
    requests = []
    for _ in range(7):
        prompt = rng.integers(3, 97, int(rng.integers(3, 30))).tolist()
        if rng.random() < 0.4:
            prompt = [*beginnings[int(rng.integers(2))], *prompt[:10]]
        requests.append((prompt, "be" if rng.random() < 0.6 else "rt"))
    return requests
