"""Old path of `apt_jax.models.loading.gguf.file`."""

import sys

from apt_jax.models.loading.gguf import file
from apt_jax.models.loading.gguf.file import *  # noqa: F403

sys.modules[__name__] = file
