"""Apply every mutant to a copy of the tree and run the tests that must notice it.

Exit code 1 where a mutant survives that must not (or the reverse), a patch no longer applies, or a test fails without
any patch.
"""

import argparse
import datetime
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.patch import ROOT, Mutant, read_mutants
from tools.mutants.runner import Verdict, copy_tree, run_all, run_tests

PAGE = ROOT / "docs" / "lab" / "mutants.md"

_DESCRIPTION = "break one defence after the other in a copy of the tree, and run the tests that must notice"
_TIMEOUT_S = 120.0

_INTRO = """# Mutants

Each patch in `tools/mutants/patches` breaks one defence; its header says which, and names the tests that must fail.
`make mutants` runs them and writes this page; `python -m tools.mutants NAME --write` runs one.
Two are canaries: `canary-harmless` changes nothing and must survive, any test must find `canary-gross`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=_DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at once (default: 2)")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them, others every day")
    parser.add_argument(
        "--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}; rows of mutants that are not run stay"
    )
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a patch first")
    args = parser.parse_args(argv)
    mutants = read_mutants()
    unknown = sorted(set(args.names) - {mutant.name for mutant in mutants})
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}")
    if args.names:
        mutants = [mutant for mutant in mutants if mutant.name in args.names]
    if args.sample is not None:
        mutants = random.Random(str(datetime.datetime.now(datetime.UTC).date())).sample(mutants, args.sample)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [Path(directory) / str(job) for job in range(max(1, min(args.jobs, len(mutants))))]
        for tree in trees:
            copy_tree(ROOT, tree)
        if not args.no_baseline and not _passes_without_patch(mutants, trees[0]):
            return 1
        verdicts = run_all(mutants, trees, _TIMEOUT_S, _report)
    wrong = [verdict for verdict in verdicts if not verdict.is_expected]
    print(f"{len(verdicts)} mutants, {len(wrong)} not as expected")
    for verdict in wrong:
        print(f"  {verdict.mutant.name}: {verdict.outcome}, expected: {verdict.mutant.expected}. {verdict.says}")
    if args.write:
        PAGE.write_text(page(verdicts, PAGE.read_text() if PAGE.exists() else "", _where()))
    return 1 if wrong else 0


def page(verdicts: Sequence[Verdict], before: str, where: str) -> str:
    """Return the page of the documentation.

    Args:
        verdicts: of mutants that were run.
        before: the page as it was; rows of other mutants stay as long as there is a patch.
        where: when, and at which commit.
    """
    known = {mutant.name for mutant in read_mutants()} | {verdict.mutant.name for verdict in verdicts}
    rows = {row.split(" | ")[0].strip("| "): row for row in before.splitlines() if row.startswith("| ")}
    rows = {name: row for name, row in rows.items() if name in known} | _rows(verdicts)
    killed = sum(row.endswith("| killed |") for row in rows.values())
    wrong = sum(row.endswith("** |") for row in rows.values())
    last = "last run" if len(verdicts) == len(rows) else f"last run, of {len(verdicts)} of them"
    lines = [
        _INTRO,
        f"{len(rows)} mutants, {killed} killed, {wrong} not as expected; {last}: {where}.",
        "",
        "| mutant | result |",
        "|---|---|",
        *(rows[name] for name in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def _rows(verdicts: Sequence[Verdict]) -> dict[str, str]:
    rows = {}
    for verdict in verdicts:
        result = verdict.outcome if verdict.is_expected else f"**{verdict.outcome}**"
        rows[verdict.mutant.name] = f"| {verdict.mutant.name} | {result} |"
    return rows


def _passes_without_patch(mutants: Sequence[Mutant], tree: Path) -> bool:
    tests = sorted({test for mutant in mutants if mutant.expected != "equivalent" for test in mutant.tests})
    code, says = run_tests(tree, tests, _TIMEOUT_S + 20 * len(tests)) if tests else (0, "")
    print(f"without a patch: {says}", flush=True)
    if code != 0:
        print("the tests must pass without a patch", file=sys.stderr)
    return code == 0


def _report(verdict: Verdict) -> None:
    mark = "ok   " if verdict.is_expected else "WRONG"
    print(
        f"{mark} {verdict.seconds:5.1f} s  {verdict.outcome:<14}  {verdict.mutant.name}: {verdict.mutant.breaks}",
        flush=True,
    )


def _where() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{datetime.datetime.now(datetime.UTC):%d %B %Y}, commit {commit or 'unknown'}"


if __name__ == "__main__":
    sys.exit(main())
