"""`python -m serve.cli` is `apt-jax`."""

import sys

from serve.cli.main import main

sys.exit(main())
