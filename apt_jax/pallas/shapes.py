"""Old path of `apt_jax.ops.shapes`."""

import sys

from apt_jax.ops import shapes
from apt_jax.ops.shapes import *  # noqa: F403

sys.modules[__name__] = shapes
