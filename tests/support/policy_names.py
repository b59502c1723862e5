"""Bundled policies by name, and which of them are other settings of one that is tested at length."""

from apt_jax.sched import all_policies

NAMES = sorted(all_policies())
VARIANTS = [
    n for n in NAMES if n.endswith(("-ef", "-pc", "-nocp", "-nohy", "-hy", "rank-o", "rank-org", "-v0", "-8192"))
]
"""Other settings of a class that is tested at length under another name: fewer examples will do."""
LEADING = [n for n in NAMES if n not in VARIANTS]
