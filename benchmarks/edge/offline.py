"""What the engine says without any edge: the answers that streams are held against, and its speed.

Everything here runs in a process of its own, so that nothing of the engine stays in the one that measures.
"""

import argparse
import asyncio
import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.edge.doors import Ask


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

    def __init__(
        self, model: str, flags: Sequence[str], *, cores: Sequence[int] | None = None
    ) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, (model, tuple(flags), cores)
        )

    def answers(self, asks: Sequence[Ask]) -> list[Answer]:
        """What `LLM.generate` says."""
        return self._pool.submit(_answers, asks).result()

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


def _start(model: str, flags: Sequence[str], cores: Sequence[int] | None) -> None:
    global _llm
    if cores is not None:
        os.sched_setaffinity(0, cores)  # before JAX counts them
    from apt_jax.llm import LLM, build_engine
    from serve import options

    parser = argparse.ArgumentParser()
    options.add_model_argument(parser)
    options.add_engine_arguments(parser)
    config = options.engine_config(parser.parse_args([model, *flags]))
    _llm = LLM.from_parts(build_engine(config, calibrate=False))


def _generate(asks: Sequence[Ask]) -> list[Any]:
    return _llm.generate(
        [list(ask.prompt_ids) for ask in asks], [ask.params for ask in asks], use_tqdm=False
    )


def _answers(asks: Sequence[Ask]) -> list[Answer]:
    outputs = [request.outputs[0] for request in _generate(asks)]
    return [
        Answer(token_ids=tuple(o.token_ids), text=o.text, finish_reason=o.finish_reason)
        for o in outputs
    ]


def _speed(asks: Sequence[Ask]) -> Speed:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = _generate(asks)
    return Speed(
        tokens=sum(len(request.outputs[0].token_ids) for request in outputs),
        wall_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )


def _async_speed(asks: Sequence[Ask], num_streams: int) -> Speed:
    from apt_jax.async_engine import AsyncEngine

    async def run() -> int:
        engine = AsyncEngine(_llm.parts)
        todo, tokens = iter(asks), 0

        async def stream() -> None:
            nonlocal tokens
            for ask in todo:
                request = _llm.parts.build_request(prompt_token_ids=list(ask.prompt_ids), params=ask.params)  # fmt: skip
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
