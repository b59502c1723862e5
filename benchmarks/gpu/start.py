"""Stage `start` of `run.py`: an engine from nothing, with default flags, and again with what the first start left on disk.

Each start has a process of its own, as an operator's has. It loads random weights, compiles, answers one prompt with 16
tokens, and ends.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import Stage

MODELS = ("opt-1.3b", "gemma-2b")
_COLUMNS = [
    "seconds",
    "load_s",
    "warm_up_s",
    "programs",
    "compilations",
    "num_blocks",
    "pool_gib",
    "peak_gib",
    "limit_gib",
]
_LIMIT_S = 240.0


def start(stage: Stage) -> list[str]:
    """First and second start of each model."""
    table = stage.table(_COLUMNS)
    lines = []
    for model in ("tiny-opt",) if stage.tiny else MODELS:
        with tempfile.TemporaryDirectory() as directory:
            for turn in ("first", "second"):
                case = f"{model} {turn}"
                found: dict[str, Any] = {}

                def once(model: str = model, found: dict[str, Any] = found) -> dict[str, Any]:
                    found |= _in_a_process(model, Path(directory), stage.tiny)
                    return found

                if stage.wanted(table, case) and stage.run(table, case, once, limit_s=_LIMIT_S + 20):
                    lines.append(
                        f"{case:18s} {found['seconds']:6.1f} s ready, {found['programs']} programs, "
                        f"pool {found['pool_gib']:.2f} GiB, peak {found['peak_gib']:.2f} of {found['limit_gib']:.2f} GiB"
                    )
    return lines


def _in_a_process(model: str, cache: Path, tiny: bool) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_MEM_FRACTION")}  # the engine's own
    environment |= {"APT_JAX_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.gpu.start", model, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, *, tiny: bool) -> dict[str, Any]:
    """One start in this process, and what it took; `tiny`: with few programs."""
    begin = time.perf_counter()
    from apt_jax import LLM, SamplingParams

    options: dict[str, Any] = {"load_format": "dummy"}
    if tiny:
        options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64, "attention_backend": "xla"}
    llm = LLM(model, use_tqdm=False, **options)
    seconds = time.perf_counter() - begin
    (answer,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 16
    executor: Any = llm.parts.executor
    stats = executor.device.memory_stats() or {}
    return {
        "seconds": seconds,
        "load_s": llm.parts.load_s,
        "warm_up_s": llm.parts.warm_up_s,
        "programs": len(executor.programs.executables),
        "compilations": executor.compilations,
        "num_blocks": executor.num_blocks,
        "pool_gib": executor.num_blocks * executor.block_bytes / 2**30,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "limit_gib": stats.get("bytes_limit", 0) / 2**30,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], tiny="--tiny" in sys.argv)), flush=True)
