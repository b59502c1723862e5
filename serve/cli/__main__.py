"""Run `apt-jax` as `python -m serve.cli`."""

import sys

from serve.cli.main import main

sys.exit(main())
