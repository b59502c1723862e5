"""Packed experts of gpt-oss against transformers' own code that widens them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.lab.reference_model import forward
from apt_jax.models import load_model
from tests.models.test_gpt_oss import FIELDS, V, packed_tensors, write

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason=_WHERE)


def _theirs(tensors: dict[str, np.ndarray]) -> Any:
    fields = {name: value for name, value in FIELDS.items() if name not in ("architectures", "quantization_config")}
    config = transformers.GptOssConfig(**fields, rope_theta=150_000.0)
    state = {name: torch.tensor(value) for name, value in tensors.items()}
    for name in [name for name in state if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = state.pop(name), state.pop(base + "_scales")
        state[base] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_logits_of_packed_experts(seed: int, tmp_path: Path) -> None:
    tensors = packed_tensors(seed)
    for name in tensors:
        if name.endswith("sinks"):
            tensors[name] *= 8
    ours = load_model(write(tmp_path, tensors))
    tokens = np.random.default_rng(seed).integers(3, V, 60)
    with torch.no_grad():
        want = _theirs(tensors)(torch.tensor(tokens[None])).logits[0].numpy()
    assert np.abs(want).max() > 0.5
    got = forward(ours.params, jnp.asarray(tokens, jnp.int32), ours.config)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
