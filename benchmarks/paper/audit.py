"""Audit of this project against its papers: which mechanisms and experiments are as the papers have them.

    python -m benchmarks.paper.audit            # counts, and the rows that are not right, as Markdown
    python -m benchmarks.paper.audit FILE       # the same, written between the markers of a Markdown file

`audit.csv` has one row for each mechanism and each experiment: Apt-Serve with its appendix (A), InferMax (I), BROS (B).
Reproduction verdicts are another matter: an experiment is right if it was run as in the paper and its verdicts are
committed, whatever they say.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cache_kinds import splice

FILE = Path(__file__).with_name("audit.csv")
PAPERS = {"A": "Apt-Serve", "I": "InferMax", "B": "BROS"}
"""By the first letter of an id."""
STATUSES = ("right", "partly", "different", "missing")
CAUSES = ("choice", "data", "hardware", "silence", "simulation time")
"""First words of the reason of a row that is not right; silence is the paper's."""
BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A mechanism or an experiment; the fields are the columns of `audit.csv`. Lists are separated by semicolons."""

    id: str
    item: str
    where: str
    """Section, figure or table of the paper."""
    status: str
    evidence: str
    """Files, each with `::name` where a single function, class or constant is meant."""
    shown_by: str
    """Node of a test, or the command that measures it."""
    result: str
    """Committed result file; empty for mechanisms that none is of."""
    reason: str
    """Why the row is not right, after one of `CAUSES`; a remark where it is right."""

    @property
    def paper(self) -> str:
        return PAPERS[self.id[0]]


def read() -> list[Row]:
    """Return all rows."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def markdown(rows: Sequence[Row]) -> str:
    """Return the counts by paper and status, and the rows that are not right with their reasons."""
    columns = ("rows", *STATUSES)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    of_papers = {name: [row for row in rows if row.paper == name] for name in PAPERS.values()}
    for name, own in (*of_papers.items(), ("all", list(rows))):
        counts = [len(own), *(sum(row.status == status for row in own) for status in STATUSES)]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    lines += ["", "| | | paper | status | reason |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.id} | {row.item} | {row.where} | {row.status} | {row.reason} |"
        for row in rows
        if row.status != "right"
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="Markdown file with the markers")
    args = parser.parse_args(argv)
    text = markdown(read())
    if args.file is None:
        sys.stdout.write(text)
    else:
        args.file.write_text(splice(args.file.read_text(), text, BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
