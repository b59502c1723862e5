"""The bundled model through the whole engine, token for token against transformers' `generate`."""

import numpy as np
import pytest

from apt_jax.assets import ASSETS, sonnet_prompts
from apt_jax.config import EngineConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.models.loading.loader import load_model
from apt_jax.request import SamplingParams
from tests.support.cases import num_cases
from tests.support.generation import CONDITIONS, MODES, greedy, make_executor
from tests.support.paged_driver import Driver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def model():
    return load_model(EngineConfig(model="tiny-opt"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / "tiny-opt")
    texts = [
        *sonnet_prompts(44, seed=1, longest_lines=14),
        "A",
        "The",
        "Once upon a time",
        "",
        "naïve café ☕",
        "1 + 1 =",
    ]
    return [tokenizer(text).input_ids for text in texts]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-opt", dtype=torch.float32)
    longest = max(map(len, prompts))
    padded = torch.tensor([[model.config.pad_token_id] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    outputs = model.generate(padded, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)[:, longest:]
    special = (model.config.eos_token_id, model.config.pad_token_id)
    return [[token for token in output if token not in special] for output in outputs.tolist()]


@pytest.fixture(scope="module")
def executors(model):
    return {attention: make_executor(model.params, model.config, attention) for attention in ("reproject", "absorb")}


@pytest.mark.in_turn(3)
@pytest.mark.seeds
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers(mode, condition, executors, prompts, expected) -> None:
    kind, attention = mode
    every = num_cases(4, 1) if condition == "one at a time" else 1  # without a batch it takes ten times as long
    assert greedy(executors[attention], prompts[::every], MAX_TOKENS, kind, condition) == expected[::every]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("policy", ["apt", "fcfs"])
def test_hybrid_on_a_tight_pool_gives_the_same_tokens(policy: str, model, prompts, expected) -> None:
    """A pool for about three KV requests: preemptions and both kinds happen by themselves."""
    executor = make_executor(model.params, model.config, "absorb", num_blocks=70)
    assert greedy(executor, prompts, MAX_TOKENS, "hybrid", "batched", policy) == expected


@pytest.mark.parametrize("attention", ["reproject", "absorb"])
def test_logits_of_the_paged_decoder_are_those_of_transformers(attention: str, model, prompts, executors) -> None:
    """float32, within 1e-4: the log probabilities of the 20 best tokens after a prefill and after a decode step of each
    kind."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-opt", dtype=torch.float32)
    executor = executors[attention]
    executor.reset()
    for ids in prompts[:6]:
        ids = ids[:90]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, -1].numpy().astype(np.float64)
        log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        for kind in (KV, HIDDEN):
            for cut in (0, len(ids) - 1, len(ids) // 2):
                driver = Driver(executor)
                driver.add(0, ids, kind)
                params = SamplingParams(temperature=0.0, logprobs=20)
                if 0 < cut < len(ids):
                    driver.step({0: cut}, params)
                    result = driver.step({0: len(ids) - cut}, params)
                else:
                    result = driver.step({0: len(ids)}, params)
                assert result.top_logprobs is not None
                assert result.top_ids is not None
                np.testing.assert_allclose(result.top_logprobs[0], log_p[result.top_ids[0]], atol=1e-4)
