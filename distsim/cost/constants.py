"""What NCCL's algorithms cost: constants that multiply its own latencies and bandwidths, fitted to 57 published nccl-tests tables.

One set for all GPUs, with shrunken offsets by transport and architecture; `benchmarks/accuracy/run.py --fit` prints the fitted ones
again, and `benchmarks/accuracy/run.py` how well they predict tables and systems that were left out of the fit. Latencies NCCL has a
figure for are multiples of it; those it has none for (launch, starts, channels, messages, peers) are us; the rest are shares of
bandwidth, the two of `ADDED` exponents of (n - 1) / n. An offset multiplies (an exponent's is added). RoCE is priced as InfiniBand,
Blackwell as Hopper.
"""

from typing import Final

CONSTANTS: Final[dict[str, float]] = {
    "launch": 3.255,
    "base": 0.590,
    "start, Simple": 5.708,
    "start, LL128": 2.834,
    "start, Simple between": 5.177,
    "channel": 1.119,
    "hop inside, LL": 2.145,
    "hop inside, LL128": 1.224,
    "hop inside, Simple": 1.460,
    "hop between, LL": 1.029,
    "hop between, LL128": 1.331,
    "hop between, Simple": 1.174,
    "hop, NVLS": 1.376,
    "hop between, NVLS": 1.608,
    "message": 10.584,
    "issue": 4.201,
    "issue, message": 0.740,
    "peer inside": 2.336,
    "peer between": 5.998,
    "bandwidth, Simple": 0.973,
    "bandwidth, Simplex": 1.023,
    "bandwidth, LL": 0.816,
    "bandwidth, LL128": 0.802,
    "ring, LL": 0.633,
    "ring, Simple": 0.213,
    "crowd": 0.963,
    "tree": 0.967,
    "two nodes": 0.851,
    "bandwidth, NVLS": 0.852,
    "bandwidth, NVLS gather": 0.906,
    "bandwidth, NVLS tree": 0.846,
    "bandwidth, message": 0.942,
    "bandwidth, messagex": 0.898,
    "bandwidth, message LL": 0.868,
}
ADDED: Final = ("ring, LL", "ring, Simple")
BY_TRANSPORT: Final[dict[str, dict[str, float]]] = {
    "efa": {
        "start, Simple": 0.896,
        "start, Simple between": 0.910,
        "channel": 6.739,
        "hop between, LL": 5.253,
        "hop between, LL128": 4.000,
        "hop between, Simple": 1.963,
        "message": 1.350,
        "peer between": 1.437,
        "bandwidth, Simplex": 0.947,
        "tree": 1.059,
        "two nodes": 1.059,
    },
    "slingshot": {
        "start, Simple": 0.842,
        "start, Simple between": 0.866,
        "channel": 2.089,
        "hop between, LL": 1.104,
        "hop between, Simple": 2.113,
        "message": 1.822,
        "peer between": 2.066,
        "bandwidth, Simplex": 0.782,
        "bandwidth, LL": 0.177,
        "ring, LL": 0.047,
        "ring, Simple": 0.035,
        "crowd": 1.033,
        "tree": 0.773,
        "two nodes": 0.832,
        "bandwidth, messagex": 0.461,
        "bandwidth, message LL": 0.850,
    },
    "pcie": {
        "hop inside, LL": 0.646,
        "hop inside, Simple": 0.872,
        "bandwidth, Simple": 1.163,
        "bandwidth, LL": 1.194,
    },
    "staged": {
        "bandwidth, Simple": 0.450,
        "bandwidth, LL": 0.600,
    },
}
BY_ARCHITECTURE: Final[dict[str, dict[str, float]]] = {
    "volta": {
        "hop inside, LL": 1.046,
        "hop inside, LL128": 1.137,
        "issue": 1.319,
        "bandwidth, Simple": 1.119,
    },
    "hopper": {
        "launch": 0.951,
        "base": 0.936,
        "channel": 0.667,
        "hop inside, LL": 0.603,
        "hop inside, LL128": 1.172,
        "hop inside, Simple": 0.966,
        "hop between, LL128": 1.079,
        "hop, NVLS": 1.177,
        "hop between, NVLS": 1.274,
        "issue": 1.040,
        "peer between": 0.955,
        "bandwidth, Simplex": 1.053,
    },
}
#: No open table of these. Blackwell: NCCL's tables treat it as Hopper but for the figures that `distsim.cost.tuning` has.
BY_ARCHITECTURE["blackwell"] = BY_ARCHITECTURE["hopper"]
#: GPUDirect-TCPX and TCP: assumed, neither fitted nor measured here. A hop is taken for some 20 us, against 2 to 3 over InfiniBand, and
#: the kernel's copies for part of TCP's wire: measure (`distsim calibrate`) where it matters.
BEFOREHAND: Final[dict[str, dict[str, float]]] = {
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
BEFOREHAND["tcpxo"] = BEFOREHAND["tcpx"]
#: What the presets have as ``call_overhead``, in ns: the launch.
LAUNCH_NS: Final = 3300
