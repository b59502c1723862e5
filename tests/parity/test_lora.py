"""LoRA adapters against transformers with weights merged by hand, and against PEFT where it is installed."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apt_jax.config import EngineConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.frontend.builder import load_adapters
from apt_jax.models import load_model
from apt_jax.models.decoder import logits
from tests.support.lora_adapters import write_adapter
from tests.support.paged_driver import Driver, make_executor

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)

TOLERANCE = 1e-4
PROMPT, STEPS = 24, 12
FAMILIES = ("opt", "llama", "qwen2 grouped", "gemma2", "gemma3", "gpt2", "phi3", "bloom six heads", "neox", "mpt")


def linear_layers(model: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear layer but the output head, by name; GPT-2's are stored the other way."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("Linear", "Conv1D") and "lm_head" not in name:
            shape = tuple(module.weight.shape)
            found[name] = shape if kind == "Conv1D" else shape[::-1]
    return found


def merge(model: Any, tensors: dict[str, np.ndarray], scale: float) -> None:
    """W + scale B A, in place."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in tensors:
            if name.endswith("lora_A.weight"):
                a, b = (torch.from_numpy(tensors[name.replace("lora_A", f"lora_{w}")]) for w in "AB")
                module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
                added = scale * (b.double() @ a.double())
                if type(module).__name__ == "Conv1D":
                    added = added.T
                module.weight.copy_((module.weight.double() + added).float())


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_merged_weights(name, tmp_path):
    """Beside rows of another adapter and of none; prompts at once and in chunks, decoding, in each kind of cache."""
    from tests.parity.test_families import random_model  # it needs torch too

    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "model")
    modules = linear_layers(theirs)
    tensors = {
        "few": write_adapter(tmp_path / "few", dict(list(modules.items())[:3]), rank=3, alpha=3.0, seed=2),
        "all": write_adapter(tmp_path / "all", modules, rank=4, alpha=8.0, seed=1),
    }
    config = EngineConfig(
        model=str(tmp_path / "model"), lora_modules={adapter: str(tmp_path / adapter) for adapter in tensors}
    )  # fmt: skip
    ours = load_model(config)
    executor = make_executor(params=ours.params, config=ours.config, adapters=load_adapters(config, ours))
    executor.buckets.decode, executor.buckets.prefill = [8], [64]  # fewer programs to compile
    tokens = np.random.default_rng(1).integers(3, 97, PROMPT + STEPS).tolist()
    want = [logits_of(theirs, tokens)]
    for adapter, scale in (("few", 1.0), ("all", 2.0)):
        model = copy.deepcopy(theirs)
        merge(model, tensors[adapter], scale)
        want.append(logits_of(model, tokens))
        by_peft = _peft_logits(copy.deepcopy(theirs), tmp_path / adapter, tokens)
        if by_peft is not None:
            np.testing.assert_allclose(want[-1], by_peft, rtol=0, atol=TOLERANCE)
    assert min(np.abs(want[i] - want[j]).max() for i, j in ((0, 1), (1, 2), (0, 2))) > 0.1

    seen: list[np.ndarray] = []
    sample = executor.runner.sample_call

    def record(hidden: Any, *args: Any) -> Any:
        seen.append(np.asarray(logits(executor.params, hidden, ours.config, executor.programs.ops.dense)))
        return sample(hidden, *args)

    executor.runner.sample_call = record  # pyright: ignore[reportAttributeAccessIssue]
    driver = Driver(executor)
    kinds = [kind for kind in (KV, HIDDEN) if executor.kinds_offered[kind]]
    slots = {3 * kind + adapter: adapter for kind in kinds for adapter in range(3)}
    for slot, adapter in slots.items():
        driver.add(slot, tokens[:PROMPT], slot // 3)
        driver.adapter[slot] = adapter

    def step(num_tokens: int, of: Iterable[int] = slots) -> None:
        seen.clear()
        driver.step(dict.fromkeys(of, num_tokens))
        for row, slot in enumerate(of):
            end = driver.cached[slot]
            if end < PROMPT:
                continue
            np.testing.assert_allclose(
                seen[0][row], want[slots[slot]][end - 1], rtol=0, atol=TOLERANCE, err_msg=f"slot {slot} at {end - 1}"
            )
            driver.tokens[slot] = tokens[: end + 1]  # what comes next is given, not sampled

    step(7)
    for slot in slots:
        step(PROMPT - 7, [slot])
    for _ in range(STEPS - 1):
        step(1)


def _peft_logits(model: Any, path: Path, tokens: list[int]) -> np.ndarray | None:
    """By PEFT's merged weights; None: it is not installed. Changes `model`."""
    try:
        import peft  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    settings = json.loads((path / "adapter_config.json").read_text())
    if any(type(m).__name__ == "Conv1D" for m in model.modules()):
        settings["fan_in_fan_out"] = True
        (path / "adapter_config.json").write_text(json.dumps(settings))
    return logits_of(peft.PeftModel.from_pretrained(model, path).merge_and_unload(), tokens)
