"""Replay seeds: `python -m tests.support.serving_simulation SEED`, or `FIRST LAST`."""

from tests.support.serving_simulation.simulation import simulate_serving
from tests.support.simulation_harness import replay

if __name__ == "__main__":
    replay(
        simulate_serving,
        lambda report: f"{report.num_steps} steps, {report.virtual_s:.1f} s, {report.digest}",
    )
