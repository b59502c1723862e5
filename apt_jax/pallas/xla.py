"""Old path of `apt_jax.ops.linear`, `xla_common`, `xla_decode` and `xla_prefill`."""

from apt_jax.ops.linear import *  # noqa: F403
from apt_jax.ops.xla_common import *  # noqa: F403
from apt_jax.ops.xla_decode import *  # noqa: F403
from apt_jax.ops.xla_prefill import *  # noqa: F403
