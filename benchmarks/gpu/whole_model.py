"""Shared parts of the stages with a whole model: random weights made on the device, the engine with its default flags, floors
of steps, and ShareGPT's lengths."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax import backends
from apt_jax.config import CacheConfig, EngineConfig
from apt_jax.core.kinds import HIDDEN
from apt_jax.core.step import StepBatch
from apt_jax.executor import StepHandle
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.llm import configure
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.auto_dtype import with_auto_dtype
from apt_jax.models.loading.resolve import read_model_config, resolve_model
from apt_jax.models.params import ModelParams, abstract_params, is_norm_scale, param_names
from apt_jax.sim.trace import draw_arrivals, load_trace
from apt_jax.sim.workload import Workload
from apt_jax.utils.device_memory import set_memory_fraction
from benchmarks.gpu.harness import ROWS, Stage, floor_s, read_rows

CONTEXT = 469
"""Cached tokens of a decoding request: the mean over the life of a ShareGPT request."""
_AS_ON_A_GPU = "xla without branches"
_TINY = {
    "model_type": "opt", "vocab_size": 512, "hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "ffn_dim": 128, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
"""A model for a CPU: programs of one layer compile in a second."""


def model_of(stage: Stage, name: str = "opt-13b") -> str:
    """The model that a stage measures; on a CPU the directory of a tiny one."""
    if not stage.tiny:
        return name
    path = (stage.work or stage.out) / "tiny"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_TINY))
    return str(path)


def engine_config(model: str, stage_settings: Mapping[str, Any], *, tiny: bool, **options: Any) -> EngineConfig:
    """The engine's configuration: its default flags but for those that the run was given; tiny ones with few programs.

    Args:
        options: of `LLM`.
    """
    set_memory_fraction()  # before weights are made: an engine's share of the card
    given: dict[str, Any] = {"load_format": "dummy", **options}
    given |= {"max_num_seqs": stage_settings.get("slots"), "max_num_batched_tokens": stage_settings.get("step_tokens")}
    if tiny:
        # Interpreted kernels are too slow for a whole model: XLA's, in the programs that a GPU runs.
        make = backends._IMPLEMENTATIONS["xla"]
        backends._IMPLEMENTATIONS[_AS_ON_A_GPU] = lambda chip: dataclasses.replace(make(chip), branches=False)
        given |= {
            "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks_override": 64,
            "attention_backend": _AS_ON_A_GPU, "dtype": "float32",
        }  # fmt: skip
    return configure(model, None, {k: v for k, v in given.items() if v is not None})


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _leaf(key: Any, mean: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return (mean + 0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random_params(config: EngineConfig, seed: int = 0) -> ModelParams:
    """As `dummy_params`, made on the device: 13 billion numbers take the host minutes."""
    fields = resolve_model(config.model, allow_preset=True).fields
    dtype = jnp.dtype(with_auto_dtype(config, fields).dtype)
    model = read_model_config(fields, config.max_model_len)[1]
    count = iter(range(1 << 20))
    key = jax.random.key(seed)

    def leaf(name: str, shape: jax.ShapeDtypeStruct) -> Any:
        mean = jnp.float32(1.0 - model.norm_offset if is_norm_scale(name) else 0.0)
        return _leaf(jax.random.fold_in(key, next(count)), mean, shape.shape, shape.dtype)

    params = jax.tree.map(leaf, param_names(model), abstract_params(model, dtype))
    return jax.block_until_ready(params)


def build(config: EngineConfig, *, warm_up: bool) -> EngineComponents:
    """The engine over random weights, not calibrated.

    Args:
        warm_up: compile all programs, or load those that an earlier stage has left.
    """
    return build_engine(config, params=random_params(config), warm_up=warm_up, calibrate=False)


def with_known_pool(config: EngineConfig, stage: Stage) -> EngineConfig:
    """With the pool that stage `start` had, where it has run: programs depend on its size, and are then on disk."""
    rows = read_rows(stage.out / ROWS, "start")
    known = [row["num_blocks"] for row in rows if row.get("num_blocks") and row["case"].startswith(f"{config.model} ")]
    if (
        not known
        or config.cache.num_blocks_override is not None
        or any(stage.settings.get(k) for k in ("slots", "step_tokens"))
    ):
        return config
    cache = dataclasses.replace(config.cache, num_blocks_override=known[-1])
    return dataclasses.replace(config, cache=cache)


class Recorded:
    """An executor of whose pool only the first blocks are used; it keeps what was in each step.

    Args:
        num_blocks: of the pool; None: all.

    Attributes:
        steps: tokens, cached tokens before them, and kinds of the rows of each step.
    """

    def __init__(self, inner: JaxExecutor, num_blocks: int | None = None) -> None:
        self._inner = inner
        self.num_blocks = min(num_blocks or inner.num_blocks, inner.num_blocks)
        self.steps: list[tuple[Any, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, batch: StepBatch) -> StepHandle:
        """Dispatch a step."""
        self.steps.append((batch.num_tokens.copy(), batch.start.copy(), batch.kind.copy()))
        return self._inner.execute(batch)  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class StepFloor:
    """The least time that steps of a model can take."""

    config: ModelConfig
    weights_bytes: int
    dense: int
    """Weights of the layers: each is multiplied with each token."""
    itemsize: int
    absorbs: bool
    rates: Mapping[str, float]

    @classmethod
    def of(cls, executor: JaxExecutor, rates: Mapping[str, float]) -> "StepFloor":
        params = executor.params
        itemsize = jnp.dtype(params.dtype).itemsize
        weights = itemsize * sum(leaf.size for leaf in jax.tree.leaves(params)) - params.position.nbytes
        dense = sum(leaf.size for leaf in jax.tree.leaves(params.layers))
        return cls(executor.config, weights, dense, itemsize, executor.absorbs, rates)

    def seconds(self, num_tokens: Sequence[int], start: Sequence[int], kind: Sequence[int]) -> float:
        """Seconds of a step that reads weights and cache once and computes nothing twice; 0 where rates are not known.

        Args:
            num_tokens, start, kind: of each row: tokens to compute, cached tokens before them, kind of the cache.
        """
        c, dense_flop = self.config, 2 * self.dense * int(sum(num_tokens))
        flop, cached = 0.0, 0.0
        for tokens, before, of in zip(num_tokens, start, kind, strict=True):
            hidden = int(of) == HIDDEN
            cached += (before + tokens) * (c.hidden_size if hidden else 2 * c.lane)
            flop += 4 * c.num_heads * c.head_dim * tokens * (before + (tokens + 1) / 2)
            if hidden and before and (tokens > 1 or not self.absorbs):
                flop += 4 * c.hidden_size * c.lane * before
        num_bytes = self.weights_bytes + c.num_layers * self.itemsize * cached
        return floor_s(num_bytes, dense_flop + c.num_layers * flop, dict(self.rates))


def sharegpt(num_requests: int, rate: float, longest: int, *, tiny: bool) -> Workload:
    """ShareGPT's lengths at random, as far as they fit `longest` tokens, and Poisson arrivals of `rate` a second."""
    rng = np.random.default_rng(0)
    trace = load_trace("sharegpt")
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if tiny:
        prompts, outputs = prompts // 16 + 2, np.minimum(outputs // 32 + 2, 4)
    fits = np.flatnonzero(prompts + outputs < longest)
    chosen = rng.choice(fits, num_requests)
    return Workload(
        prompt_tokens=prompts[chosen].astype(np.int32),
        output_tokens=outputs[chosen].astype(np.int32),
        arrival_s=draw_arrivals(num_requests, rate, 1.0, rng),
        best_effort=np.zeros(num_requests, np.bool_),
    )


def cache_with(config: EngineConfig, **changes: Any) -> EngineConfig:
    """The configuration with other values of `CacheConfig`."""
    cache: CacheConfig = dataclasses.replace(config.cache, **changes)
    return dataclasses.replace(config, cache=cache)


def sum_floor_s(floor: StepFloor, steps: Iterable[tuple[Any, Any, Any]]) -> float:
    """Sum of the floors of recorded steps, seconds."""
    return sum(floor.seconds(tokens.tolist(), start.tolist(), kind.tolist()) for tokens, start, kind in steps)
