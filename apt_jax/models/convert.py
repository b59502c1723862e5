"""Old path of `apt_jax.models.loading.convert`."""

import sys

from apt_jax.models.loading import convert
from apt_jax.models.loading.convert import *  # noqa: F403

sys.modules[__name__] = convert
