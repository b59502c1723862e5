"""The matrix of clients in docs/lab/clients.md: written from outcomes, and read back, so that clients that were not tried
again keep their columns and dates.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping

BEGIN, END = "<!-- matrix: written by `make clients` -->", "<!-- end of the matrix -->"
_SHOWN_CHARS = 200
"""Length of what is shown of an error."""
_FAILURE = re.compile(r"^\* ([^,\n]+), ([^:`\n]+): `([^`\n]*)`$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one client."""

    version: str = ""
    """Version of the client."""
    runtime: str = ""
    """Version of Python, or of node, that it ran with."""
    server: str = ""
    """Version of apt-jax."""
    tried: str = ""
    """Date of the run."""
    features: Mapping[str, str]
    """By feature: empty where it works, else what the client raised."""


_ABOUT = tuple(field.name for field in dataclasses.fields(Outcome) if field.name != "features")


def matrix(outcomes: Mapping[str, Outcome]) -> str:
    """Return a table of features by clients, and a list of what failed below it."""
    rows = [["", *outcomes], [":-"] * (len(outcomes) + 1)]
    rows += [[name, *(getattr(outcome, name) for outcome in outcomes.values())] for name in _ABOUT]
    for feature in dict.fromkeys(itertools.chain.from_iterable(outcome.features for outcome in outcomes.values())):
        found = (outcome.features.get(feature) for outcome in outcomes.values())
        rows.append([feature, *("" if text is None else "no" if text else "yes" for text in found)])
    failures = [
        f"* {name}, {feature}: `{_shown(text)}`"
        for name, outcome in outcomes.items()
        for feature, text in outcome.features.items()
        if text
    ]
    table = [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in rows]
    return "\n".join([*table, *(["", *failures] if failures else [])])


def _shown(text: str) -> str:
    return " ".join(text.replace("`", "'").split())[:_SHOWN_CHARS].strip() or "failed"


def read_matrix(text: str) -> dict[str, Outcome]:
    """Return the outcomes that `matrix` wrote."""
    failures = {(client, feature): why for client, feature, why in _FAILURE.findall(text)}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    outcomes = {}
    for client, _, *cells in zip(*rows, strict=True):
        if not client:
            names = cells
            continue
        column = dict(zip(names, cells, strict=True))
        about = {name: column.pop(name) for name in _ABOUT}
        features = {
            feature: "" if cell == "yes" else failures[client, feature] for feature, cell in column.items() if cell
        }
        outcomes[client] = Outcome(**about, features=features)
    return outcomes


def update(page: str, outcomes: Mapping[str, Outcome], clients: Iterable[str]) -> str:
    """Return the page with these columns replaced, the others kept, and the columns of unknown clients dropped.

    Args:
        clients: known clients, in the order of the columns.
    """
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {**read_matrix(old), **outcomes}
    table = matrix({name: known[name] for name in clients if name in known})
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
