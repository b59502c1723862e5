"""`apt-jax` whose programs are compiled when they are first needed: python -m tests.support.cold_serve serve MODEL ..."""

import sys

from apt_jax.executor.jax_executor import JaxExecutor
from serve.cli import main

if __name__ == "__main__":
    JaxExecutor.can_start_early = False  # type: ignore[assignment, method-assign]
    JaxExecutor.warm_up = lambda self, progress=None: None  # type: ignore[method-assign]
    sys.exit(main())
