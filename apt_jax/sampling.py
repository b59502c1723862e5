"""Old path of `apt_jax.ops.sampling`."""

import sys

from apt_jax.ops import sampling
from apt_jax.ops.sampling import *  # noqa: F403

sys.modules[__name__] = sampling
