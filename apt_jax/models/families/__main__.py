"""Print the table of the `config.json` fields that each family knows: `python -m apt_jax.models.families`."""

import sys

from apt_jax.models.families.registry import FAMILIES
from apt_jax.models.known_fields import markdown

if __name__ == "__main__":
    sys.stdout.write(markdown({family.name: family.fields for family in FAMILIES.values()}))
