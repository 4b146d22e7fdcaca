"""Constants that scale NCCL's own latencies and bandwidths to real costs.

They are fitted to published nccl-tests tables: 57 complete tables and parts of three.

One set applies to all GPUs, with regularised (shrunken) offsets by transport and architecture.
`benchmarks/accuracy/run.py --fit` prints the fitted constants again, and
`benchmarks/accuracy/run.py` prints how well they predict tables and systems that the fit did not
use.

Units: latencies for which NCCL has a figure are multiples of that figure. Latencies without one
(launch, starts, channels, messages, peers) are in us. The other constants are shares of bandwidth,
except those in `ADDITIVE_CONSTANTS`, which are exponents of (n - 1) / n. An offset multiplies a
constant; an exponent's offset is added. RoCE has the constants of InfiniBand, Blackwell those of
Hopper.
"""

from typing import Final

CONSTANTS: Final[dict[str, float]] = {
    "launch": 3.132,
    "base": 0.598,
    "start, Simple": 7.390,
    "start, LL128": 2.822,
    "start, Simple between": 5.172,
    "channel": 1.093,
    "hop inside, LL": 2.145,
    "hop inside, LL128": 1.226,
    "hop inside, Simple": 1.542,
    "hop between, LL": 1.125,
    "hop between, LL128": 1.346,
    "hop between, Simple": 1.162,
    "hop, NVLS": 1.389,
    "hop between, NVLS": 1.608,
    "message": 3.642,
    "message between": 22.238,
    "issue": 4.265,
    "issue, message": 0.814,
    "peer inside": 0.863,
    "peer between": 5.965,
    "bandwidth, Simple": 0.975,
    "bandwidth, Simplex": 1.023,
    "bandwidth, LL": 0.810,
    "bandwidth, LL128": 0.811,
    "ring, LL": 0.624,
    "ring, Simple": 0.207,
    "crowd": 0.962,
    "tree": 0.966,
    "two nodes": 0.850,
    "bandwidth, NVLS": 0.852,
    "bandwidth, NVLS gather": 0.906,
    "bandwidth, NVLS tree": 0.846,
    "bandwidth, message": 0.924,
    "bandwidth, messagex": 0.898,
    "bandwidth, message LL": 0.838,
}
ADDITIVE_CONSTANTS: Final = ("ring, LL", "ring, Simple")
BY_TRANSPORT: Final[dict[str, dict[str, float]]] = {
    "efa": {
        "start, Simple": 0.857,
        "start, Simple between": 0.902,
        "channel": 6.910,
        "hop between, LL": 5.027,
        "hop between, LL128": 4.000,
        "hop between, Simple": 1.810,
        "message between": 1.065,
        "peer between": 1.358,
        "bandwidth, Simplex": 0.949,
        "tree": 1.058,
        "two nodes": 1.058,
    },
    "slingshot": {
        "start, Simple": 0.796,
        "start, Simple between": 0.862,
        "channel": 2.125,
        "hop between, Simple": 2.056,
        "message between": 1.134,
        "peer between": 1.845,
        "bandwidth, Simplex": 0.781,
        "bandwidth, LL": 0.175,
        "ring, LL": 0.047,
        "ring, Simple": 0.035,
        "crowd": 1.033,
        "tree": 0.772,
        "two nodes": 0.832,
        "bandwidth, messagex": 0.465,
        "bandwidth, message LL": 0.862,
    },
    "pcie": {
        "hop inside, LL": 0.633,
        "hop inside, Simple": 0.803,
        "bandwidth, Simple": 1.160,
        "bandwidth, LL": 1.187,
    },
    "staged": {
        "bandwidth, Simple": 0.450,
        "bandwidth, LL": 0.600,
    },
}
BY_ARCHITECTURE: Final[dict[str, dict[str, float]]] = {
    "volta": {
        "hop inside, LL": 1.045,
        "hop inside, LL128": 1.151,
        "issue": 1.301,
        "bandwidth, Simple": 1.118,
    },
    "hopper": {
        "launch": 0.873,
        "base": 0.934,
        "channel": 0.678,
        "hop inside, LL": 0.570,
        "hop inside, LL128": 1.173,
        "hop inside, Simple": 0.955,
        "hop between, LL128": 1.084,
        "hop between, Simple": 0.967,
        "hop, NVLS": 1.183,
        "hop between, NVLS": 1.274,
        "message": 0.894,
        "peer inside": 0.859,
        "peer between": 0.956,
        "bandwidth, Simplex": 1.053,
        "bandwidth, message": 1.035,
    },
}
#: There is no complete public table for Blackwell. NCCL's tables treat it as Hopper, except for the
#: figures in `distsim.hardware.cost.nccl_tuning`.
BY_ARCHITECTURE["blackwell"] = BY_ARCHITECTURE["hopper"]
#: GPUDirect-TCPX and TCP: assumptions, neither fitted nor measured. A hop is assumed to take about
#: 20 us, compared with 2 to 3 us over InfiniBand, and the kernel's copies to reduce TCP's
#: bandwidth. Measure (`distsim calibrate`) if accuracy matters.
ASSUMED_BY_TRANSPORT: Final[dict[str, dict[str, float]]] = {
    "tcpx": {
        "hop between, LL": 8.0,
        "hop between, Simple": 3.0,
        "peer between": 3.0,
    },
    "tcp": {
        "hop between, LL": 10.0,
        "hop between, LL128": 8.0,
        "hop between, Simple": 4.0,
        "peer between": 4.0,
        "bandwidth, Simplex": 0.8,
        "bandwidth, messagex": 0.7,
    },
}
ASSUMED_BY_TRANSPORT["tcpxo"] = ASSUMED_BY_TRANSPORT["tcpx"]
#: The presets' ``call_overhead`` in ns: the launch.
LAUNCH_NS: Final = 3100
