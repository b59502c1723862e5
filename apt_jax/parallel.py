"""Old path of `apt_jax.models.sharding`."""

import sys

from apt_jax.models import sharding
from apt_jax.models.sharding import *  # noqa: F403

sys.modules[__name__] = sharding
