"""List the scheduling policies: for serving, for comparisons, and installed by other packages."""

import argparse
import importlib.metadata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apt_jax.sched import ENTRY_POINTS, POLICIES, all_policies
from serve.cli import options
from serve.cli.output import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    rows = policies()
    titles = {
        "serving": "for serving",
        "comparison": "for comparisons, from papers and other servers",
        "installed": "from installed packages",
    }
    console = Console(highlight=False, emoji=False)
    for use, title in titles.items():
        table = Table(title=title, box=None, title_justify="left", title_style="bold")
        for heading, no_wrap in (("policy", True), ("summary", False), ("source", False)):
            table.add_column(heading, no_wrap=no_wrap, overflow="fold")
        for row in rows:
            if row["use"] == use:
                table.add_row(Text(row["name"]), Text(row["summary"]), Text(row["source"]))
        if table.row_count:
            console.print(table)
    write_json(args.json, {"policies": rows})
    return 0


def policies() -> list[dict[str, Any]]:
    """Return the name, use (serving, comparison or installed), summary, source and options of each policy."""
    rows = [
        {
            "name": name,
            "use": "serving" if name in POLICIES else "comparison",
            "summary": maker.summary,
            "source": maker.source,
            "options": sorted(maker.options()),
        }
        for name, maker in all_policies().items()
    ]
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        source = f"{point.module}:{point.attr}"
        if point.name not in all_policies():
            rows.append({"name": point.name, "use": "installed", "summary": "", "source": source, "options": []})
    return rows
