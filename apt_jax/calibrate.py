"""Re-exports `apt_jax.executor.calibrate`."""

from apt_jax.executor.calibrate import (
    DEFAULT_BUDGET_S,
    calibrate,
    calibration_path,
    describe,
    load_calibration,
    load_or_calibrate,
    program_shapes,
    store_calibration,
)

__all__ = [
    "DEFAULT_BUDGET_S",
    "calibrate",
    "calibration_path",
    "describe",
    "load_calibration",
    "load_or_calibrate",
    "program_shapes",
    "store_calibration",
]
