"""Old path of `apt_jax.ops.xla_decode`."""

import sys

from apt_jax.ops import xla_decode
from apt_jax.ops.xla_decode import *  # noqa: F403

sys.modules[__name__] = xla_decode
