"""The demo: a bundled model under load with either cache kind and several policies."""

from serve.demo.demo import RUNS, demo_config, make_workload

__all__ = ["RUNS", "demo_config", "make_workload"]
