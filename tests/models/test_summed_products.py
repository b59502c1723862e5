"""Sums of products over devices travel in the dtype of activations."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from apt_jax.backends import attention_ops
from apt_jax.models import sharding
from apt_jax.models.step import StepOptions, apply_dense_summed
from tests.support.paged_driver import CONFIG


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_are_summed_in_the_dtype_of_activations(dtype: str) -> None:
    options = StepOptions(
        num_decode=4, block_size=4, hidden_block_size=4, hidden_mode=None, kinds=(True, False),
        ops=attention_ops("cpu", "xla"), tensor=sharding.TensorParallel(2, CONFIG),
    )  # fmt: skip

    def product(x, w, b):
        return apply_dense_summed(x, w, b, options)

    cut = (P(None, sharding.AXIS), P(None, sharding.AXIS), P())
    sharded = jax.shard_map(
        product,
        mesh=AbstractMesh((2,), (sharding.AXIS,), axis_types=(AxisType.Auto,)),
        in_specs=cut,
        out_specs=P(),
        check_vma=False,
    )
    x, w, b = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((4, 16), (8, 16), (8,)))
    traced = jax.make_jaxpr(sharded)(x, w, b)
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    assert re.findall(r":(\w+)\[4,8\] = psum", str(traced)) == [short]
    assert jax.eval_shape(sharded, x, w, b).dtype == jnp.float32
