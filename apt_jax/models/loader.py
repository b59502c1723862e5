"""Old path of `apt_jax.models.loading.loader` and `resolve`."""

from apt_jax.models.loading.loader import *  # noqa: F403
from apt_jax.models.loading.resolve import *  # noqa: F403
