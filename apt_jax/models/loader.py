"""Old path of `apt_jax.models.loading.loader`."""

import sys

from apt_jax.models.loading import loader
from apt_jax.models.loading.loader import *  # noqa: F403

sys.modules[__name__] = loader
