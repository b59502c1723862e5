"""Reference answers and speed of the engine alone, without HTTP or gRPC.

The engine runs in a separate process, so that it leaves nothing in the measuring one.
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

from benchmarks.server.protocols import LoadRequest, PromptText

_ROUNDING = 2e-5
"""Rounding error of scores and of sums of probabilities in float32, with a margin."""

_WRONG = 1e-2
"""A chosen token whose score is lower than the best one by more than this is an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Reference answer to one request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt: PromptText | None = None
    """The prompt as text, and its tokens; None: the model has no tokenizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Time taken for one batch of requests."""

    tokens: int
    wall_s: float
    cpu_s: float
    """CPU time of the process that computes."""


class Offline:
    """An engine in a separate process, configured by flags of `apt-jax serve`.

    Args:
        model: see `apt-jax serve`.
        flags: flags of the engine.
        cores: the cores that it may run on; None: all of them.
    """

    def __init__(self, model: str, flags: Sequence[str], *, cores: Sequence[int] | None = None) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, (model, tuple(flags), cores)
        )

    def answers(self, requests: Sequence[LoadRequest]) -> tuple[list[LoadRequest], list[Answer]]:
        """Return the requests whose answer is unambiguous, and the answers of `LLM.generate` to them.

        In float32 the others are dropped: at some token the best two scores differ by no more than the rounding error,
        and the order of additions, which depends on the batch, decides. That is the case for a few percent of the
        requests with a seed. Other dtypes and quantised weights are not checked.

        Raises:
            RuntimeError: a plain forward pass chooses another token, or more than a fifth of the requests are
            ambiguous.
        """
        answers, certain = self._pool.submit(_answers, requests).result()
        if sum(certain) < 0.8 * len(requests):
            raise RuntimeError(f"only {sum(certain)} of {len(requests)} answers do not depend on rounding")
        return list(itertools.compress(requests, certain)), list(itertools.compress(answers, certain))

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of texts, without special tokens."""
        return self._pool.submit(_encode, texts).result()

    def speed(self, requests: Sequence[LoadRequest]) -> Speed:
        """Measure `LLM.generate` with all requests at once."""
        return self._pool.submit(_speed, requests).result()

    def async_speed(self, requests: Sequence[LoadRequest], num_streams: int) -> Speed:
        """Measure `AsyncEngine` with `num_streams` concurrent streams; each takes the next request when its last one
        has ended."""
        return self._pool.submit(_async_speed, requests, num_streams).result()

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


def _generate(requests: Sequence[LoadRequest]) -> list[Any]:
    return _llm.generate(
        [list(request.prompt_ids) for request in requests], [request.params for request in requests], use_tqdm=False
    )


def _answers(requests: Sequence[LoadRequest]) -> tuple[list[Answer], list[bool]]:
    """Return the answers, and for each whether it is unambiguous."""
    outputs = [result.outputs[0] for result in _generate(requests)]
    answers = [
        Answer(token_ids=tuple(o.token_ids), text=o.text, finish_reason=o.finish_reason, prompt=_prompt_text(r))
        for r, o in zip(requests, outputs, strict=True)
    ]
    if _llm.parts.config.dtype != "float32" or _config.quantization is not None:
        return answers, [True] * len(answers)
    leads = _compiled_leads(_config)
    certain = [_is_certain(leads, request, a.token_ids) for request, a in zip(requests, answers, strict=True)]
    return answers, certain


def _prompt_text(request: LoadRequest) -> PromptText | None:
    tokenizer = _llm.parts.tokenizer
    if tokenizer is None:
        return None
    text = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    return PromptText(text, tuple(tokenizer.encode(text)) if text else ())


def _is_certain(leads_of: Any, request: LoadRequest, token_ids: Sequence[int]) -> bool:
    """Return whether each token leads all others by more than the rounding error in a plain forward pass."""
    row, params = [*request.prompt_ids, *token_ids], request.params
    padded = np.zeros(-(-len(row) // 64) * 64, np.int32)  # few shapes to compile for
    padded[: len(row)] = row
    first = len(request.prompt_ids) - 1  # after it comes the first token of the answer
    allowed = _allowed(request, token_ids, first, padded.size)
    leads = leads_of(padded, first, params["temperature"], params.get("top_p", 1.0), params.get("seed", 0), allowed)
    leads = np.asarray(leads)[:, first : len(row) - 1]
    if (leads.max(axis=0) < -_WRONG).any():
        raise RuntimeError(f"a plain forward pass chooses other tokens than the engine for {params}")
    return bool((leads > _ROUNDING).all())


def _allowed(request: LoadRequest, token_ids: Sequence[int], first: int, size: int) -> Any:
    """Return which tokens the constraint of a request allows after each of `size` positions."""
    allowed = np.ones((size, _llm.parts.vocab_size), bool)
    constraint = request.params.get("structured_outputs")
    if constraint is None:
        return allowed
    built = _llm.parts.build_request(prompt_token_ids=list(request.prompt_ids), params=request.params)
    state = built.grammar.start()
    mask = np.zeros(-(-allowed.shape[1] // 32), np.int32)
    for position, token_id in enumerate(token_ids, first):
        state.fill_mask(mask)
        allowed[position] = np.unpackbits(mask.view(np.uint8), bitorder="little")[: allowed.shape[1]]
        if position + 1 < first + len(token_ids):  # the last one may be EOS
            state.accept(token_id)
    return allowed


def _compiled_leads(config: Any) -> Any:
    """Compile a function of the lead of the token after each position over all others, at both ends of the uncertainty
    of top-p."""
    import jax
    import jax.numpy as jnp

    from apt_jax.lab.reference_model import forward
    from apt_jax.models.loading.loader import load_model
    from apt_jax.ops import sampling

    model = load_model(config)  # a second copy: the engine joins weights and changes their layout

    def leads(params: Any, row: Any, first: Any, temperature: Any, top_p: Any, seed: Any, allowed: Any) -> Any:
        num, drawn = row.size, temperature > 0
        scores = jnp.where(allowed, forward(params, row, model.config), -jnp.inf)
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


def _encode(texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(_llm.parts.tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def _speed(requests: Sequence[LoadRequest]) -> Speed:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = _generate(requests)
    return Speed(
        tokens=sum(len(result.outputs[0].token_ids) for result in outputs),
        wall_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )


def _async_speed(requests: Sequence[LoadRequest], num_streams: int) -> Speed:
    from apt_jax.frontend.async_engine import AsyncEngine

    async def run() -> int:
        engine = AsyncEngine(_llm.parts)
        todo, tokens = iter(requests), 0

        async def stream() -> None:
            nonlocal tokens
            for wanted in todo:
                request = _llm.parts.build_request(prompt_token_ids=list(wanted.prompt_ids), params=wanted.params)
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
