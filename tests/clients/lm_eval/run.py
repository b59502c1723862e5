"""Run lm-eval with local data against a server of this project: every type of task, with both of its tokenizers.

    python tests/clients/lm_eval/run.py --server PYTHON --lm-eval PYTHON [--model tiny-opt] [--tokenizer DIR]

Starts `apt-jax serve` with one interpreter and `lm_eval` with another. Each type of task must end without an error, and
give the same with the tokenizer of the directory ("huggingface") as with that of the server ("remote").
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TASKS = ("local_choice", "local_loglikelihood", "local_rolling", "local_generation")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _served(python: str, model: str, flags: Sequence[str]) -> Iterator[str]:
    """Start a server; gives its address."""
    port = _free_port()
    command = [python, "-m", "serve.cli", "serve", model, "--port", str(port), "--grpc-port", str(_free_port()), *flags]
    process = subprocess.Popen(command, cwd=HERE.parents[2])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/ready", timeout=5):
                break
            time.sleep(1)
        else:
            raise SystemExit("the server did not start within 15 minutes")
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _evaluate(python: str, address: str, model: str, backend: str, tokenizer: str, batch: int) -> dict[str, Any]:
    """Run all tasks; gives the metrics of each."""
    with tempfile.TemporaryDirectory() as temporary:
        tasks = Path(temporary, "tasks")
        tasks.mkdir()
        for file in (HERE / "tasks").glob("*.yaml"):
            (tasks / file.name).write_text(file.read_text().replace("DATA", str(HERE / "data")))
        arguments = [
            f"model={model}",
            f"base_url={address}/v1/completions",
            f"tokenizer_backend={backend}",
            "num_concurrent=4",
        ]
        if backend == "huggingface":
            arguments.append(f"tokenizer={tokenizer}")
        command = [
            python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", ",".join(arguments), "--tasks", ",".join(TASKS),
            "--include_path", str(tasks), "--output_path", str(Path(temporary, "out")), "--batch_size", str(batch),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": temporary,
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment.pop("PYTHONPATH", None)
        subprocess.run(command, check=True, env=environment, cwd=temporary)
        (results,) = Path(temporary, "out").rglob("results_*.json")
        return json.loads(results.read_text())["results"]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=sys.executable, metavar="PYTHON", help="interpreter that has apt-jax")
    parser.add_argument(
        "--lm-eval", required=True, metavar="PYTHON", help="interpreter that has lm-eval[api], transformers"
    )
    parser.add_argument("--model", default="tiny-opt", help="model of the server")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with the model's tokenizer")
    parser.add_argument("--batch", type=int, default=8, help="prompts of one request")
    options, flags = parser.parse_known_args()
    tokenizer = options.tokenizer or str(HERE.parents[2] / "apt_jax/assets" / options.model)
    with _served(options.server, options.model, flags) as address:
        found = {
            backend: _evaluate(options.lm_eval, address, options.model, backend, tokenizer, options.batch)
            for backend in ("huggingface", "remote")
        }
    print(json.dumps(found, indent=2))
    for task in TASKS:
        numbers = [
            {
                name: value
                for name, value in found[backend][task].items()
                if isinstance(value, float) and "stderr" not in name
            }
            for backend in found
        ]
        if not numbers[0] or numbers[0] != numbers[1]:
            raise SystemExit(f"{task}: {numbers[0]} with one tokenizer, {numbers[1]} with the other")
    print(f"{len(TASKS)} tasks, alike with both tokenizers")


if __name__ == "__main__":
    main()
