"""What the engine says without any edge: the answers that streams are held against, and its speed.

Everything here runs in a process of its own, so that nothing of the engine stays in the one that measures.
"""

import argparse
import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.server.protocols import Ask

_ROUNDING = 2e-5
"""Of scores and of sums of probabilities in float32, with room to spare."""

_WRONG = 1e-2
"""By so much no token may lose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one batch of requests."""

    tokens: int
    wall_s: float
    cpu_s: float
    """Of the process that computes."""


class Offline:
    """An engine in a process of its own, configured by flags of `apt-jax serve`.

    Args:
        model: see `apt-jax serve`.
        flags: of the engine.
        cores: it may run on these alone; None: on all.
    """

    def __init__(self, model: str, flags: Sequence[str], *, cores: Sequence[int] | None = None) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, (model, tuple(flags), cores)
        )

    def answers(self, asks: Sequence[Ask]) -> tuple[list[Ask], list[Answer]]:
        """What `LLM.generate` says to the requests that have one answer alone.

        In float32 the others are left out: a token of theirs wins by no more than what the order of additions is worth, which
        depends on the batch. Those are a few in a hundred of the requests with a seed. Other dtypes and quantised weights are not
        looked at.

        Raises:
            RuntimeError: a plain forward pass says another token, or more than a fifth would be left out.
        """
        answers, certain = self._pool.submit(_answers, asks).result()
        if sum(certain) < 0.8 * len(asks):
            raise RuntimeError(f"only {sum(certain)} of {len(asks)} answers do not hang on rounding")
        return list(itertools.compress(asks, certain)), list(itertools.compress(answers, certain))

    def speed(self, asks: Sequence[Ask]) -> Speed:
        """Of `LLM.generate`, all requests at once."""
        return self._pool.submit(_speed, asks).result()

    def async_speed(self, asks: Sequence[Ask], num_streams: int) -> Speed:
        """Of `AsyncEngine`, so many streams at a time, each the next request when the one before has ended."""
        return self._pool.submit(_async_speed, asks, num_streams).result()

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> "Offline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- in that process ---------------------------------------------------------------------------------------------

_llm: Any = None
_config: Any = None


def _start(model: str, flags: Sequence[str], cores: Sequence[int] | None) -> None:
    global _llm, _config
    if cores is not None:
        os.sched_setaffinity(0, cores)  # before JAX counts them
    from apt_jax.frontend.builder import build_engine
    from apt_jax.frontend.llm import LLM
    from serve.cli import options

    parser = argparse.ArgumentParser()
    options.add_model_argument(parser)
    options.add_engine_arguments(parser)
    _config = options.engine_config(parser.parse_args([model, *flags]))
    _llm = LLM.from_parts(build_engine(_config, calibrate=False))


def _generate(asks: Sequence[Ask]) -> list[Any]:
    return _llm.generate([list(ask.prompt_ids) for ask in asks], [ask.params for ask in asks], use_tqdm=False)


def _answers(asks: Sequence[Ask]) -> tuple[list[Answer], list[bool]]:
    """With whether each is the only one."""
    outputs = [request.outputs[0] for request in _generate(asks)]
    answers = [Answer(token_ids=tuple(o.token_ids), text=o.text, finish_reason=o.finish_reason) for o in outputs]
    if _config.dtype != "float32" or _config.quantization is not None:
        return answers, [True] * len(answers)
    leads = _compiled_leads(_config)
    certain = [_is_certain(leads, ask, a.token_ids) for ask, a in zip(asks, answers, strict=True)]
    return answers, certain


def _is_certain(leads_of: Any, ask: Ask, token_ids: Sequence[int]) -> bool:
    """Whether each token wins by more than rounding over all others in a plain forward pass."""
    row, params = [*ask.prompt_ids, *token_ids], ask.params
    padded = np.zeros(-(-len(row) // 64) * 64, np.int32)  # few shapes to compile for
    padded[: len(row)] = row
    first = len(ask.prompt_ids) - 1  # after it comes the first token of the answer
    leads = leads_of(padded, first, params["temperature"], params.get("top_p", 1.0), params.get("seed", 0))
    leads = np.asarray(leads)[:, first : len(row) - 1]
    if (leads.max(axis=0) < -_WRONG).any():
        raise RuntimeError(f"a plain forward pass says other tokens than the engine to {params}")
    return bool((leads > _ROUNDING).all())


def _compiled_leads(config: Any) -> Any:
    """By how much the token after each position leads all others, at either end of what may be the border of top-p."""
    import jax
    import jax.numpy as jnp

    from apt_jax.models.loading.loader import load_model
    from apt_jax.models.reference import forward
    from apt_jax.ops import sampling

    model = load_model(config)  # the engine joins and lays out its weights anew

    def leads(params: Any, row: Any, first: Any, temperature: Any, top_p: Any, seed: Any) -> Any:
        num, drawn = row.size, temperature > 0
        scores = forward(params, row, model.config)
        scores /= jnp.where(drawn, temperature, 1.0)
        positions = jnp.arange(num, dtype=jnp.int32) - first
        noise = sampling.gumbel(jnp.full(num, seed, jnp.uint32), positions, scores.shape[1])
        here = jax.nn.one_hot(jnp.roll(row, -1), scores.shape[1], dtype=bool)
        found = []
        for shift in (-_ROUNDING, _ROUNDING):
            border = jnp.full(num, jnp.where(drawn, top_p + shift, 1.0), jnp.float32)
            kept = sampling.restrict(scores, jnp.zeros(num, jnp.int32), border, jnp.zeros(num))
            kept = jnp.where(drawn, kept + noise, kept)
            best = [jnp.max(jnp.where(mask, kept, -jnp.inf), axis=1) for mask in (here, ~here)]
            found.append(best[0] - best[1])
        return jnp.stack(found)

    return functools.partial(jax.jit(leads), model.params)


def _speed(asks: Sequence[Ask]) -> Speed:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = _generate(asks)
    return Speed(
        tokens=sum(len(request.outputs[0].token_ids) for request in outputs),
        wall_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )


def _async_speed(asks: Sequence[Ask], num_streams: int) -> Speed:
    from apt_jax.frontend.async_engine import AsyncEngine

    async def run() -> int:
        engine = AsyncEngine(_llm.parts)
        todo, tokens = iter(asks), 0

        async def stream() -> None:
            nonlocal tokens
            for ask in todo:
                request = _llm.parts.build_request(prompt_token_ids=list(ask.prompt_ids), params=ask.params)
                async for delta in engine.submit(request):
                    tokens += len(delta.token_ids)

        await asyncio.gather(*(stream() for _ in range(num_streams)))
        await engine.shutdown()
        return tokens

    started_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = asyncio.run(run())
    return Speed(
        tokens=tokens,
        wall_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )
