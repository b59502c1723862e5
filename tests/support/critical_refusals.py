"""Print, as JSON, whether each of a list of refusals that protect something happens; run under `python -O` by
tests/test_code_bans.py, where no `assert` is left."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from apt_jax.config import SLO, EngineConfig, ParallelConfig
from apt_jax.distributed.authentication import JoinKey
from apt_jax.distributed.rendezvous import join
from apt_jax.errors import ConfigError, InvalidRequestError, ModelLoadError
from apt_jax.models import resolve_model
from apt_jax.models.loading.checkpoint import open_checkpoint
from apt_jax.utils import cache_dir
from apt_jax.validation import RequestLimits, build_request
from serve.cli.commands import serve
from serve.errors import OperatorKeyError
from serve.http_api.browsers import browser_rules
from serve.http_api.errors import BadCallError
from serve.security.api_keys import ApiKeys, require_operator

KEY = "k" * 40
LIMITS = RequestLimits(
    vocab_size=300, max_model_len=64, max_pool_tokens=48, eos_token_ids=(2,), default_slo=SLO(ttft_s=1.0, tbt_s=0.5)
)


def _file(path: Path, content: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return str(path)


def _call(method: str = "GET", **headers: str) -> dict[str, Any]:
    return {"method": method, "scheme": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}


def _serve_flags(*flags: str) -> Callable[[], object]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["tiny-opt", *flags])
    return lambda: serve.check(args)


def _open(directory: Path) -> None:
    with open_checkpoint(directory, allow_pickle=False):
        pass


def _request(**fields: Any) -> Callable[[], object]:
    return lambda: build_request(LIMITS, None, arrival_s=0.0, **{"prompt_token_ids": [5, 6], **fields})


def refusals(path: Path) -> Iterator[tuple[str, type[Exception], Callable[[], object]]]:
    """Name, error and call of each."""
    yield "API keys that all can read", ConfigError, lambda: ApiKeys.load(_file(path / "a", KEY, 0o644))
    yield "an API key that can be guessed", ConfigError, lambda: ApiKeys.load(_file(path / "b", "EMPTY"))
    yield "no API key", ConfigError, lambda: ApiKeys.load(_file(path / "c", "# none"))
    keys = ApiKeys([KEY])
    caller = keys.caller_of(f"Bearer {KEY}")
    if caller is None or keys.accepts("Bearer " + "x" * 40) or keys.accepts(None) or keys.accepts(KEY):
        raise SystemExit("keys are not told apart")
    yield "an operator's call with a tenant's key", OperatorKeyError, lambda: require_operator(keys, caller)
    yield "an address that all can reach without keys", ConfigError, _serve_flags("--host=0.0.0.0")
    browsers = browser_rules("127.0.0.1", [], [])
    yield "another host's name", BadCallError, lambda: browsers.check(_call(host="evil.example"))
    foreign = _call("POST", host="127.0.0.1", origin="http://evil.example")
    yield "a page of another origin", BadCallError, lambda: browsers.check(foreign)
    yield "a join key that all can read", ConfigError, lambda: JoinKey.load(_file(path / "d", KEY, 0o644))
    yield "a short join key", ConfigError, lambda: JoinKey.load(_file(path / "e", "short"))
    ranks = ParallelConfig(nnodes=2, tensor_parallel_size=2, master_addr="192.0.2.1")
    config = EngineConfig(model="tiny-opt", parallel=ranks)
    model = resolve_model("tiny-opt")
    yield "ranks over a network without a join key", ConfigError, lambda: join(config, config, model)
    (path / "pickles").mkdir()
    _file(path / "pickles" / "pytorch_model.bin", b"\x80\x04N.")
    yield "pickled weights", ModelLoadError, lambda: _open(path / "pickles")
    (path / "index").mkdir()
    _file(path / "index" / "model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    yield "an index that points elsewhere", ModelLoadError, lambda: _open(path / "index")
    (path / "cut").mkdir()
    _file(path / "cut" / "model.safetensors", b"\xff" * 8)
    yield "a header of 2^64 bytes", ModelLoadError, lambda: _open(path / "cut")
    _request()()  # this one is accepted
    yield "a token beyond the vocabulary", InvalidRequestError, _request(prompt_token_ids=[300])
    yield "a negative token", InvalidRequestError, _request(prompt_token_ids=[-1])
    yield "a prompt beyond the context", InvalidRequestError, _request(prompt_token_ids=[5] * 65)
    yield "a temperature of NaN", InvalidRequestError, _request(params={"temperature": float("nan")})
    yield "more stop strings than are allowed", InvalidRequestError, _request(params={"stop": ["a"] * 1000})
    yield "an unknown field", InvalidRequestError, _request(params={"trust": True})
    os.environ["APT_JAX_CACHE_DIR"] = str(path / "cache")
    directory = cache_dir.private_dir("kernels")
    if directory is None:
        raise SystemExit("no directory of its own")

    def unless_opened(file: Path) -> None:
        if cache_dir.open_private(file) is None:
            raise ConfigError("not opened")

    cache_dir.write_verified(directory / "cut.so", b"x" * 1000)
    os.truncate(directory / "cut.so", 500)
    yield "a cut library", ConfigError, lambda: unless_opened(directory / "cut.so")
    cache_dir.write_verified(directory / "k.so", b"x" * 1000)
    unless_opened(directory / "k.so")
    directory.parent.chmod(0o777)
    yield "a library that all could have written", ConfigError, lambda: unless_opened(directory / "k.so")


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stderr(sys.stdout):
        for name, error, call in refusals(Path(path)):
            try:
                call()
                found[name] = "accepted"
            except error:
                found[name] = "refused"
            except Exception as other:
                found[name] = repr(other)
    sys.stdout.write(json.dumps({"debug": __debug__, "refusals": found}) + "\n")


if __name__ == "__main__":
    main()
