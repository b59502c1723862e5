"""Tables of text: for terminals, and between markers of documents."""

from collections.abc import Sequence


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def replace_between(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers `<!-- NAME -->` and `<!-- /NAME -->`."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(opening)
    _, ends, after = rest.partition(closing)
    if not (found and ends):
        raise ValueError(f"no markers {opening} and {closing}")
    return f"{before}{opening}\n{content}\n{closing}{after}"
