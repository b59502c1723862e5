"""Two LoRA adapters and the model alone in one batch: `python examples/lora.py`.

The adapters are random and made here, in PEFT's format. With ones that were trained:
`LLM("smollm2-135m", lora_modules={"sql": "adapters/sql"})`, or `apt-jax serve smollm2-135m --lora-modules sql=adapters/sql`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from apt_jax import LLM, SamplingParams


def write_adapter(directory: Path, width: int, rank: int = 4, seed: int = 0) -> None:
    """Change the queries of the first layer at random, for a model of hidden states of `width`."""
    rng = np.random.default_rng(seed)
    module = "base_model.model.model.decoder.layers.0.self_attn.q_proj"
    directory.mkdir()
    matrices = {
        f"{module}.lora_A.weight": rng.standard_normal((rank, width), np.float32),
        f"{module}.lora_B.weight": rng.standard_normal((width, rank), np.float32),
    }
    save_file(matrices, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main(model: str = "tiny-opt", width: int = 256) -> None:
    with tempfile.TemporaryDirectory() as folder:
        adapters = {name: str(Path(folder) / name) for name in ("red", "blue")}
        for seed, directory in enumerate(adapters.values()):
            write_adapter(Path(directory), width, seed=seed)
        llm = LLM(model, lora_modules=adapters, max_num_seqs=4, warm_up=False)
    chosen = ["red", "blue", None]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    for name, output in zip(chosen, llm.generate(["Once upon a time"] * 3, params, lora_request=chosen), strict=True):
        print(f"{name or 'no adapter':10}  {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
