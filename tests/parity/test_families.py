"""Every family against transformers: random models that it saved, loaded by us, through the paged decoder."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import EngineConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.lab.reference_model import forward
from apt_jax.models import load_model
from apt_jax.models.decoder import logits
from apt_jax.models.loading.loader import LoadedModel
from tests.support.family_models import MODELS
from tests.support.paged_driver import Driver, make_executor

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)

TOLERANCE = 1e-4
"""On logits of size one to ten, in float32: both sides sum in their own order."""
PROMPT, STEPS = 40, 32


def random_model(name: str, seed: int = 0) -> Any:
    """A model of transformers whose every part moves its logits."""
    config_class, fields = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**fields)
    has_images = config_class in ("Mistral3Config", "Gemma4Config")
    auto = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, value in model.named_parameters():
            if parameter_name.endswith("sinks"):  # some far above the scores, some far below
                value.normal_(0, 4.0)
            elif value.dim() == 1:  # biases and norms
                value.add_(torch.randn_like(value) * 0.3)
                if config_class.startswith("Gemma4") and "k_norm" in parameter_name:
                    value.mul_(len(value) ** -0.5)  # as scores are not divided by sqrt(H)
            elif "emb" in parameter_name or "wte" in parameter_name or "wpe" in parameter_name:
                value.normal_(0, 1.0 / config.get_text_config().hidden_size ** 0.25)
            else:
                value.normal_(0, 1.0 / min(value.shape) ** 0.5)
        for buffer_name, value in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                value.normal_(0, 0.3)
            if buffer_name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
    return model.float()


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> tuple[Any, LoadedModel]:
    """A random model of transformers, and what our loader makes of its files."""
    theirs = random_model(request.param)
    path: Path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(path)
    return theirs, load_model(EngineConfig(model=str(path)))


def _their_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def _tokens() -> list[int]:
    return np.random.default_rng(1).integers(3, 97, PROMPT + STEPS).tolist()


def test_the_plain_forward_pass(pair) -> None:
    theirs, ours = pair
    tokens = _tokens()
    want = _their_logits(theirs, tokens)
    assert np.abs(want).max() > 0.5  # the comparison would be idle on a model that says nothing
    got = forward(ours.params, jnp.asarray(tokens, jnp.int32), ours.config)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.in_turn(18)
@pytest.mark.parametrize("attention", ["absorb", "reproject"])
def test_the_paged_decoder(pair, attention) -> None:
    """A prompt at once, the same in chunks, and 32 decode steps, in each cache kind that the model offers."""
    theirs, ours = pair
    if not ours.config.supports_hidden and attention == "reproject":
        pytest.skip("no hidden kind: the other case covers it")
    alone = ours.config.supports_hidden and not ours.config.offers_hybrid
    executor = make_executor(
        "hidden" if alone else "hybrid", params=ours.params, config=ours.config, attention=attention, num_blocks=1000
    )
    assert executor.kinds_offered == (not alone, ours.config.supports_hidden)
    kinds = [kind for kind in (KV, HIDDEN) if executor.kinds_offered[kind]]
    executor.buckets.decode, executor.buckets.prefill = [8], [64]  # fewer programs to compile
    tokens = _tokens()
    want = _their_logits(theirs, tokens)
    seen: list[np.ndarray] = []
    sample = executor.runner.sample_call

    def record(hidden: Any, *args: Any) -> Any:
        seen.append(np.asarray(logits(executor.params, hidden, ours.config, executor.programs.ops.dense)))
        return sample(hidden, *args)

    executor.runner.sample_call = record  # pyright: ignore[reportAttributeAccessIssue]
    driver = Driver(executor)
    whole, chunked = [2 * k for k in kinds], [2 * k + 1 for k in kinds]

    def step(counts: dict[int, int]) -> None:
        """One step; the logits of rows that reach the end of their tokens, in the order that the executor samples."""
        seen.clear()
        ends = {slot: driver.cached[slot] + n for slot, n in counts.items()}
        driver.step(counts)
        sampling = [slot for slot in counts if ends[slot] + 1 == len(driver.tokens[slot])]
        for row, slot in enumerate(sampling):
            np.testing.assert_allclose(
                seen[0][row],
                want[ends[slot] - 1],
                atol=TOLERANCE,
                rtol=0,
                err_msg=f"slot {slot} at {ends[slot] - 1}",
            )
            driver.tokens[slot] = tokens[: ends[slot] + 1]  # what comes next is given, not sampled

    for kind in kinds:
        driver.add(2 * kind, tokens[:PROMPT], kind)
        driver.add(2 * kind + 1, tokens[:PROMPT], kind)
    for slot in whole:
        step({slot: PROMPT})
    step(dict.fromkeys(chunked, 13))
    step(dict.fromkeys(chunked, 1))
    step(dict.fromkeys(chunked, PROMPT - 14))
    for _ in range(STEPS - 1):
        step(dict.fromkeys(whole + chunked, 1))


_SHORT = [1.0 + 0.1 * i for i in range(4)]
LONGER = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": _SHORT, "long_factor": [3 * f for f in _SHORT], "rope_theta": 1000.0,
        "original_max_position_embeddings": 32, "factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LONGER)
def test_a_context_beyond_the_original_has_the_frequencies_of_its_length(kind, tmp_path) -> None:
    """RoPE parameters that depend on the context length follow `max_model_len`; within the original length nothing
    changes."""
    fields = MODELS["llama"][1] | {"max_position_embeddings": 128 if kind == "longrope" else 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**fields, rope_parameters=LONGER[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in theirs.parameters():
            if value.dim() > 1:
                value.normal_(0, 1.0 / min(value.shape) ** 0.5)
    theirs.save_pretrained(tmp_path)
    tokens = _tokens()
    stretched = load_model(EngineConfig(model=str(tmp_path), max_model_len=len(tokens)))
    plain = load_model(EngineConfig(model=str(tmp_path)))
    assert plain.config.max_position == 32
    assert stretched.config.max_position == len(tokens)
    for ours, n in ((stretched, len(tokens)), (plain, 32)):
        want = _their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens[:n])
        got = forward(ours.params, jnp.asarray(tokens[:n], jnp.int32), ours.config)
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
