"""A cluster's file from measurements: `distsim bench` here, recorded traces, or what nccl-tests
wrote.

Two things are fitted. A few parameters (what a call costs, latency and bandwidth per class of link,
on CPUs the combining of what came) say what nobody measured. The measured times themselves go into
the file beside them and correct the model where it was measured. The fit is judged by predicting
each measured size from the others.
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
