"""Old path of `apt_jax.models.weight_layout`."""

import sys

from apt_jax.models import weight_layout
from apt_jax.models.weight_layout import *  # noqa: F403

sys.modules[__name__] = weight_layout
