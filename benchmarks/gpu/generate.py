"""Stage `generate`: `LLM.generate` on ShareGPT's lengths, all requests at once, beside the sum of its steps' floors.

The engine has its default flags and all of the card's memory. `floor_tokens_s` are the output tokens a second if every
step that was run had taken its floor (weights and cache read once, nothing computed twice).
"""

import functools
import time
from typing import Any

import numpy as np

from apt_jax import LLM, SamplingParams
from apt_jax.frontend.components import build_components
from benchmarks.gpu import whole_model
from benchmarks.gpu.harness import Stage, ceilings

_MODELS = (("opt-13b", 12.0), ("llama-3-8b", 60.0))
"""Models, and seconds below which there is no sense in beginning with them: with programs on disk, and without."""
_REQUESTS = 256
_SAY_EVERY_S = 5.0


class _Talking(whole_model.Recorded):
    """Says every few seconds how far it is, so that a run that is cut off has said what it had."""

    said_s = float("-inf")
    samples = 0

    def execute(self, batch: Any) -> Any:
        self.samples += int(batch.samples.sum())
        now = time.monotonic()
        if self.said_s == float("-inf"):
            self.began_s = self.said_s = now
        if now - self.said_s >= _SAY_EVERY_S:
            self.said_s, seconds = now, now - self.began_s
            print(
                f"  after {seconds:.0f} s: {self.samples / seconds:.0f} output tokens/s, {len(self.steps)} steps",
                flush=True,
            )
        return super().execute(batch)


def generate(stage: Stage) -> None:
    """A row for each model."""
    table = stage.table()
    for name, needs_s in _MODELS[:1] if stage.tiny else _MODELS:
        case = f"{name} {8 if stage.tiny else _REQUESTS} requests"
        if stage.wanted(table, case, needs_s=0.0 if stage.tiny else needs_s):
            stage.run(table, case, functools.partial(_measure, stage, whole_model.model_of(stage, name)), limit_s=600.0)


def _measure(stage: Stage, model: str) -> dict[str, Any]:
    begin = time.perf_counter()
    config = whole_model.engine_config(model, stage.settings, tiny=stage.tiny)
    parts = whole_model.build(whole_model.with_known_pool(config, stage), warm_up=True)
    ready_s = time.perf_counter() - begin
    print(f"  {model}: ready after {ready_s:.0f} s", flush=True)
    executor: Any = parts.executor
    talking: Any = _Talking(executor)
    parts = build_components(
        config, talking, kinds=parts.engine.kinds, vocab_size=parts.vocab_size, max_model_len=parts.limits.max_model_len,
    )  # fmt: skip
    longest = min(parts.limits.max_model_len, parts.limits.max_pool_tokens or 1 << 30)
    work = whole_model.sharegpt(8 if stage.tiny else _REQUESTS, 1.0, longest, tiny=stage.tiny)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, min(1000, parts.vocab_size), int(n)).tolist() for n in work.prompt_tokens]
    params = [SamplingParams(max_tokens=int(n), temperature=0.0, ignore_eos=True) for n in work.output_tokens]
    begin = time.perf_counter()
    outputs = LLM.from_parts(parts).generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    floor_s = whole_model.sum_floor_s(whole_model.StepFloor.of(executor, ceilings(stage.out)), talking.steps)
    return {
        "requests": len(outputs), "ready_s": ready_s, "duration_s": seconds, "prompt_tokens": int(work.prompt_tokens.sum()),
        "output_tokens": tokens, "tokens_s": tokens / seconds, "floor_s": floor_s, "floor_tokens_s": tokens / floor_s if floor_s else 0.0,
        "of_floor": floor_s / seconds, "steps": len(talking.steps), "compilations": executor.compilations,
        "num_blocks": executor.num_blocks, "status": "ok" if tokens == int(work.output_tokens.sum()) else "tokens are missing",
    }  # fmt: skip
