"""Old path of `apt_jax.models.loading.gguf.tokenizer`."""

import sys

from apt_jax.models.loading.gguf import tokenizer
from apt_jax.models.loading.gguf.tokenizer import *  # noqa: F403

sys.modules[__name__] = tokenizer
