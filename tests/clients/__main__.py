"""Try other people's clients on a server, each in an environment of its own: `make clients`, `python -m tests.clients NAME ...`.

Not part of the main tests: it installs some twenty packages with all that they need. The matrix goes to docs/lab/clients.md.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from apt_jax.models.loading.gguf.file import GgufFile
from apt_jax.models.loading.gguf.tokenizer import gguf_tokenizer_files
from apt_jax.models.loading.resolve import resolve_model
from apt_jax.version import __version__
from tests.clients.matrix import Outcome, matrix, update

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "lab" / "clients.md"
LIMIT_S = 600.0
"""Time limit for one client."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    name: str
    packages: Sequence[str]
    script: str
    python: str = ""
    """Versions of Python that it runs with; empty: that of this process."""

    @property
    def is_javascript(self) -> bool:
        return self.script.endswith(".mjs")


class NotInstalled(Exception):
    """A client's environment could not be made; its text is what the installer wrote."""


def read_clients() -> list[Client]:
    table = tomllib.loads((HERE / "environments.toml").read_text())
    return [Client(name=name, **row) for name, row in table.items()]


def environment(client: Client, folder: Path) -> Path:
    """The interpreter of a client's environment, which is made if need be; for JavaScript the folder of its packages."""
    made = folder / client.name
    runs, stamp = made if client.is_javascript else made / "bin" / "python", made / ".packages"
    if stamp.exists() and stamp.read_text() == json.dumps(client.packages):
        return runs
    if client.is_javascript:
        made.mkdir(parents=True, exist_ok=True)
        _install(["npm", "install", "--silent", "--prefix", made, *client.packages])
    else:
        uv = Path(sys.executable).with_name("uv")
        _install([uv, "venv", "--quiet", "--clear", "--python", client.python or sys.executable, made])
        _install([uv, "pip", "install", "--quiet", "--python", runs, *client.packages])
    stamp.write_text(json.dumps(client.packages))
    return runs


def _install(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NotInstalled(done.stderr)


@contextlib.contextmanager
def server(model: str, flags: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server of this checkout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "serve.cli", "serve", model, "--port", str(port), "--grpc-port", "0", *flags]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 600
            while not _is_ready(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def tokenizer_directory(model: str, folder: Path) -> Path:
    """A directory with the model's tokenizer as transformers reads it, which lm-eval does."""
    path = resolve_model(model).path
    if path is None or path.is_dir():
        return path or folder
    with contextlib.closing(GgufFile(path)) as file:
        for name, text in gguf_tokenizer_files(file).items():
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def try_client(client: Client, environments: Path, variables: Mapping[str, str]) -> Outcome:
    about = {"server": __version__, "tried": str(datetime.datetime.now(datetime.UTC).date())}
    try:
        python = environment(client, environments)
    except NotInstalled as error:
        return Outcome(**about, features={"installs": str(error)})
    with tempfile.TemporaryDirectory() as folder:  # clients keep caches where they run
        command = [python, HERE / "cases" / client.script]
        if client.is_javascript:  # packages are looked for beside the script
            shutil.copy(HERE / "cases" / "harness.mjs", python)
            command = ["node", shutil.copy(HERE / "cases" / client.script, python)]
        try:
            done = subprocess.run(
                command,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(variables),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            printed, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode(errors="replace")
            errors = f"it took more than {LIMIT_S:g} s"
    features = {}
    for line in printed.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # clients print too
            row = json.loads(line)
            features[row["feature"]] = "" if row["ok"] else row["detail"] or "failed"
    if not features or any(features.values()):
        print(f"{client.name}:\n{errors[-4000:]}", file=sys.stderr)
    version, runtime = _versions(client, python)
    features = features or {"starts": errors[-200:] or "it printed nothing"}
    return Outcome(**about, version=version, runtime=runtime, features=features)


def _versions(client: Client, python: Path) -> tuple[str, str]:
    """Versions of a client and of what runs it."""
    package = client.packages[0].split("[")[0].split("<")[0]
    if client.is_javascript:
        node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
        version = json.loads((python / "node_modules" / package / "package.json").read_text())["version"]
        return version, f"node {node.strip().removeprefix('v')}"
    code = f"import importlib.metadata, platform; print(importlib.metadata.version({package!r}), platform.python_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    version, runtime = done.stdout.split()
    return version, f"Python {runtime}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", help="clients, by their names in environments.toml (default: all)")
    parser.add_argument("--model", default="smollm2-135m", help="what is served")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of the server, after --")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-clients", help="folder of the environments")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument(
        "--write", action="store_true", help="replace the columns of these clients in docs/lab/clients.md"
    )
    options = parser.parse_args()
    clients = read_clients()
    unknown = set(options.names) - {client.name for client in clients}
    if unknown:
        parser.error(f"no client is named {sorted(unknown)[0]!r}; known: {', '.join(c.name for c in clients)}")
    chosen = [client for client in clients if not options.names or client.name in options.names]
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = {
            "CLIENTS_MODEL": options.model,
            "CLIENTS_TOKENIZER": str(tokenizer_directory(options.model, folder)),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        variables["CLIENTS_URL"] = options.url or stack.enter_context(
            server(options.model, options.flags, folder / "server.log")
        )
        for client in (bar := tqdm(chosen)):
            bar.set_description(client.name)
            outcomes[client.name] = try_client(client, options.environments, variables)
            if options.write:
                PAGE.write_text(update(PAGE.read_text(), outcomes, [client.name for client in clients]))
    print(matrix(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps({n: dataclasses.asdict(o) for n, o in outcomes.items()}, indent=1) + "\n")
    return int(any(text for outcome in outcomes.values() for text in outcome.features.values()))


if __name__ == "__main__":
    sys.exit(main())
