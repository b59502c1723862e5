"""Train on one device and on two, and serve either on one and on two: python -m tests.support.sharded_training MODEL

A process of its own, because the number of simulated devices is fixed when JAX starts. Prints the losses, and the tokens
that each engine generates.
"""

import functools
import json
import os
import sys

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"], os.environ["JAX_NUMPY_RANK_PROMOTION"] = "standard", "allow"  # for Optax

import jax
import numpy as np
import optax
from flax import nnx

from apt_jax import LLM, SamplingParams
from apt_jax.config import EngineConfig
from apt_jax.lab.training import from_nnx, to_nnx
from apt_jax.models import LoadedModel, ModelParams, load_model, sharding


def train(loaded: LoadedModel, tokens: np.ndarray) -> tuple[list[float], ModelParams]:
    model = to_nnx(loaded.params, loaded.config)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def loss_of(model: nnx.Module) -> jax.Array:
        scores = model(tokens[:, :-1])  # type: ignore[operator]
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer) -> jax.Array:
        loss, gradient = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]
    return losses, from_nnx(model, loaded.config)


def main(model: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 4096, (2, 65)).astype(np.int32)
    place = functools.partial(sharding.leaf_sharding, sharding.tensor_mesh(2))
    losses, served = [], []
    for where in (None, place):
        found, params = train(load_model(EngineConfig(model=model), where), tokens)
        losses.append(found)
        assert len(params.embed.devices()) == (1 if where is None else 2)
        for size in (1, 2):
            llm = LLM(
                model, params=params, tensor_parallel_size=size, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64,
                num_blocks_override=32, warm_up=False, use_tqdm=False,
            )  # fmt: skip
            sampling = SamplingParams(max_tokens=8, temperature=0.0)
            (output,) = llm.generate(tokens[0, :9].tolist(), sampling, use_tqdm=False)
            served.append(output.outputs[0].token_ids)
    print(json.dumps({"losses": losses, "served": served}))


if __name__ == "__main__":
    main(sys.argv[1])
