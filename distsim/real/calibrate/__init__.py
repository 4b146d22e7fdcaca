"""Derives a hardware model from measurements: `distsim bench`, recorded traces, or nccl-tests.

Two things go into the file. A few fitted parameters (cost of a call, latency and bandwidth per
class of link, on CPUs the rate of reductions) predict what was not measured. The measured times
themselves correct the model where it was measured. The fit is judged by predicting each measured
size from the others.
"""

from __future__ import annotations

from distsim.real.calibrate.fit_cluster import CalibrationResult, FitError, calibrate_cluster
from distsim.real.calibrate.measured_points import (
    MeasuredPoint,
    points_from_bench,
    points_from_trace,
    pool_points,
)
from distsim.real.calibrate.nccl_tests import points_from_nccl_tests

__all__ = [
    "CalibrationResult",
    "FitError",
    "MeasuredPoint",
    "calibrate_cluster",
    "points_from_bench",
    "points_from_nccl_tests",
    "points_from_trace",
    "pool_points",
]
