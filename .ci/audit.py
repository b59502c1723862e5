"""Ask an advisory feed about the locked packages: python .ci/audit.py REQUIREMENTS

The exit code is 0 where every package was asked for and none has a known fault, and where no feed can be reached, which
the last line then says ("not audited: ..."). A feed that knows nothing looks like packages without faults, so it is
first asked for a release that has some.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FAULTY = "jinja2==2.4.1"
SERVICES = ("pypi", "osv")
_TIMEOUT_S = 900


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", type=Path, help="with the hashes, as `uv export` writes it")
    parser.add_argument("--pip-audit", default=f"{shlex.quote(sys.executable)} -m pip_audit", help="the command")
    args = parser.parse_args(argv)
    command = shlex.split(args.pip_audit)
    with tempfile.TemporaryDirectory() as directory:
        faulty = Path(directory) / "faulty.txt"
        faulty.write_text(f"{FAULTY}\n")
        for service in SERVICES:
            found, _, _ = audit(command, service, faulty)
            if any(package.get("vulns") for package in found):
                break
        else:
            print(
                f"not audited: no advisory feed ({', '.join(SERVICES)}) can be reached, or tells of {FAULTY}, which has known faults"
            )
            return 0
    found, code, text = audit(command, service, args.requirements)
    faults = [(package, fault) for package in found for fault in package.get("vulns", ())]
    for package, fault in faults:
        better = ", ".join(fault.get("fix_versions", ())) or "no release yet"
        print(f"{package['name']} {package['version']}: {fault['id']} (fixed in {better})")
    if faults:
        return 1
    asked = {canonical(package["name"]) for package in found if "vulns" in package}
    missing = sorted(required(args.requirements.read_text()) - asked)
    if code or missing or not asked:
        print(text, file=sys.stderr)
        print(
            f"the audit failed: pip-audit ended with {code}, {len(missing)} packages were not asked for: {' '.join(missing[:10])}"
        )
        return 1
    print(f"audited: {len(asked)} packages, none has a known fault ({service})")
    return 0


def audit(command: list[str], service: str, requirements: Path) -> tuple[list[dict[str, Any]], int, str]:
    """Run pip-audit; return its findings, its exit code and its output."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        options = ["--strict", "--disable-pip", "--no-deps", "--progress-spinner", "off", "-f", "json"]
        try:
            done = subprocess.run(
                [*command, *options, "-s", service, "-o", str(report), "-r", str(requirements)],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return [], 1, f"pip-audit did not end within {_TIMEOUT_S} s"
        try:
            return json.loads(report.read_text())["dependencies"], done.returncode, done.stderr
        except (OSError, ValueError, KeyError):
            return [], done.returncode or 1, done.stderr


def required(text: str) -> set[str]:
    """Names of the packages that are required on every platform."""
    lines = (line for line in text.splitlines() if "==" in line and ";" not in line)
    return {canonical(found[0]) for line in lines if (found := re.match(r"[A-Za-z0-9._-]+", line))}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
