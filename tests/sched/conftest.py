"""Makes `sched_world` importable: with importlib import mode pytest adds no test directory to the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
