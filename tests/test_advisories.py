"""No locked package is older than the first release without a known serious fault; what `make audit` says of the feeds'
answers.

The floors are reviewed at each release.
"""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

LOCK = Path(__file__).parents[1] / "uv.lock"

FLOORS = {
    "aiohttp": "3.13.4",  # CVE-2026-22815: trailers without bound
    "grpcio": "1.56.2",  # CVE-2023-4785: a flood of connections
    "h11": "0.16.0",  # CVE-2025-43859: chunked bodies, request smuggling
    "jinja2": "3.1.6",  # CVE-2025-27516: out of the sandbox
    "protobuf": "6.33.5",  # CVE-2026-0994: nesting of Any without bound
    "requests": "2.32.4",  # CVE-2024-47081: credentials of another host
    "starlette": "1.0.1",  # CVE-2026-48746: the path by the Host field
    "tqdm": "4.66.3",  # CVE-2024-34062: code from the command line
    "urllib3": "2.7.0",  # CVE-2026-44432: a compressed body without bound
}


def versions() -> dict[str, list[str]]:
    """Every version of a package that is locked, for whatever platform."""
    found: dict[str, list[str]] = {}
    for package in tomllib.loads(LOCK.read_text())["package"]:
        if "version" in package:
            found.setdefault(package["name"], []).append(package["version"])
    return found


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize("name", sorted(FLOORS))
def test_no_package_is_below_its_floor(name):
    found = versions()[name]
    assert found
    assert all(release(version) >= release(FLOORS[name]) for version in found), found


# --- make audit ----------------------------------------------------------------------------------------------------

FAULT = [{"id": "PYSEC-1", "fix_versions": ["2.0"]}]
REQUIREMENTS = "alpha==1.0 \\\n    --hash=sha256:00\nbeta-x==1.0 \\\n    --hash=sha256:00\ngamma==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"


def audited(tmp_path: Path, answers: dict[str, object]) -> tuple[int, str]:
    """Exit code and words of the audit where pip-audit answers so, by service and by what it is asked for; None: it
    cannot ask, and ends as it does then."""
    fake = tmp_path / "pip_audit.py"
    fake.write_text(
        textwrap.dedent(f"""
            import json, pathlib, sys
            args = sys.argv
            assert "--strict" in args
            value = lambda flag: args[args.index(flag) + 1]
            what = "faulty" if "faulty" in value("-r") else "locked"
            answer = {answers!r}.get(value("-s") + " " + what)
            if answer is None:
                sys.exit(1)
            pathlib.Path(value("-o")).write_text(json.dumps({{"dependencies": answer}}))
            sys.exit(any(p.get("vulns") for p in answer))
        """)
    )
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(REQUIREMENTS)
    script = Path(__file__).parents[1] / ".ci" / "audit.py"
    done = subprocess.run(
        [sys.executable, script, requirements, "--pip-audit", f"{sys.executable} {fake}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def package(name: str, *faults: object) -> dict[str, object]:
    return {"name": name, "version": "1.0", "vulns": list(faults)}


KNOWS = [package("jinja2", *FAULT)]
CLEAN = [package("alpha"), package("Beta_X")]


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        pytest.param({}, 0, "not audited: ", id="nobody can be asked"),
        pytest.param({"pypi faulty": [], "pypi locked": CLEAN}, 0, "not audited: ", id="empty answers"),
        pytest.param(
            {"pypi faulty": [package("jinja2")], "pypi locked": CLEAN}, 0, "not audited: ", id="knows of nothing"
        ),
        pytest.param({"pypi faulty": KNOWS, "pypi locked": CLEAN}, 0, "audited: 2 packages", id="clean"),
        pytest.param({"osv faulty": KNOWS, "osv locked": CLEAN}, 0, "(osv)", id="clean by another feed"),
        pytest.param(
            {"pypi faulty": KNOWS, "pypi locked": [*CLEAN, package("gamma", *FAULT)]},
            1,
            "gamma 1.0: PYSEC-1 (fixed in 2.0)",
            id="a fault",
        ),
        pytest.param({"pypi faulty": KNOWS}, 1, "the audit failed", id="breaks off"),
        pytest.param({"pypi faulty": KNOWS, "pypi locked": []}, 1, "alpha beta-x", id="asks for nothing"),
        pytest.param(
            {"pypi faulty": KNOWS, "pypi locked": [package("alpha"), {"name": "beta-x", "skip_reason": "unknown"}]},
            1,
            "1 packages were not asked for: beta-x",
            id="skips one",
        ),
    ],
)
def test_the_audit_is_green_only_where_everything_was_asked_for(tmp_path, answers, code, words):
    found, text = audited(tmp_path, answers)
    assert found == code, text
    assert words in text
    assert ("not audited" in text) == words.startswith("not audited")


def test_versions_compare_as_numbers():
    assert release("1.10.0") > release("1.9.9")
    assert release("1.0.1") > release("1.0")
