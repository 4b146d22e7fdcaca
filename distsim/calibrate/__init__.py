"""A cluster's file from measurements: `distsim bench` here, recorded traces, or what nccl-tests wrote.

Two things are fitted. A few parameters (what a call costs, latency and bandwidth per class of link, on CPUs the combining of
what came)
say what nobody measured. The measured times themselves go into the file beside them and correct the model where it was measured.
The fit is judged by predicting each measured size from the others.
"""

from __future__ import annotations

from distsim.calibrate.fit import Calibration, FitError, calibrate
from distsim.calibrate.nccl_tests import from_nccl_log
from distsim.calibrate.points import Point, from_bench, from_trace, pooled

__all__ = ["Calibration", "FitError", "Point", "calibrate", "from_bench", "from_nccl_log", "from_trace", "pooled"]
