"""What NCCL's algorithms cost: constants that multiply its own latencies and bandwidths, fitted to 57 published nccl-tests tables.

One set for all GPUs, with shrunken offsets by transport and architecture; `benchmarks/accuracy/run.py --fit` prints the fitted ones
again, and `benchmarks/accuracy/run.py` how well they predict tables and systems that were left out of the fit. Latencies NCCL has a
figure for are multiples of it; those it has none for (launch, starts, channels, messages, peers) are us; the rest are shares of
bandwidth, the two of `ADDED` exponents of (n - 1) / n. An offset multiplies (an exponent's is added). RoCE is priced as InfiniBand,
Blackwell as Hopper.
"""

from typing import Final

CONSTANTS: Final[dict[str, float]] = {
    "launch": 2.620,
    "launch, driven": 2.252,
    "base": 0.573,
    "start, Simple": 5.801,
    "start, LL128": 2.972,
    "start, Simple between": 5.509,
    "channel": 0.382,
    "channel, driven": 0.891,
    "hop inside, LL": 1.712,
    "hop inside, LL128": 1.157,
    "hop inside, Simple": 1.983,
    "hop between, LL": 1.033,
    "hop between, LL128": 2.549,
    "hop between, Simple": 1.776,
    "hop, NVLS": 1.586,
    "hop between, NVLS": 1.801,
    "message": 7.290,
    "launch, sends": 3.247,
    "launch, pairs": 0.442,
    "peer inside": 1.750,
    "peer between": 6.743,
    "bandwidth, Simple": 0.980,
    "bandwidth, Simplex": 1.043,
    "bandwidth, LL": 0.819,
    "bandwidth, LL128": 0.805,
    "ring, LL": 0.698,
    "ring, Simple": 0.392,
    "crowd": 0.961,
    "tree": 0.987,
    "two nodes": 0.849,
    "bandwidth, NVLS": 0.851,
    "bandwidth, NVLS gather": 0.908,
    "bandwidth, NVLS tree": 0.836,
    "bandwidth, message": 0.969,
    "bandwidth, messagex": 0.872,
    "bandwidth, message LL": 0.890,
}
ADDED: Final = ("ring, LL", "ring, Simple")
BY_TRANSPORT: Final[dict[str, dict[str, float]]] = {
    "efa": {
        "start, Simple": 1.045,
        "start, Simple between": 1.041,
        "channel": 1.126,
        "hop between, LL": 20.831,
        "hop between, LL128": 4.946,
        "hop between, Simple": 4.182,
        "bandwidth, Simplex": 1.047,
        "bandwidth, LL": 0.861,
        "bandwidth, LL128": 0.958,
    },
    "slingshot": {
        "start, Simple": 1.106,
        "start, Simple between": 1.081,
        "channel": 1.510,
        "hop between, LL": 1.260,
        "hop between, LL128": 2.139,
        "hop between, Simple": 1.563,
        "message": 1.639,
        "peer between": 2.172,
        "bandwidth, Simplex": 0.778,
        "bandwidth, LL": 0.292,
        "bandwidth, LL128": 0.790,
        "ring, LL": 0.109,
        "ring, Simple": 0.036,
        "crowd": 1.032,
        "tree": 0.757,
        "two nodes": 0.823,
        "bandwidth, messagex": 0.496,
        "bandwidth, message LL": 0.851,
    },
    "pcie": {
        "hop inside, LL": 0.499,
        "hop inside, Simple": 0.679,
        "bandwidth, Simple": 1.220,
        "bandwidth, LL": 1.278,
    },
    "staged": {
        "bandwidth, Simple": 0.450,
        "bandwidth, LL": 0.600,
    },
}
BY_ARCHITECTURE: Final[dict[str, dict[str, float]]] = {
    "volta": {
        "launch": 1.056,
        "launch, driven": 1.275,
        "base": 1.102,
        "channel": 1.795,
        "channel, driven": 0.748,
        "hop inside, LL": 1.301,
        "bandwidth, Simple": 1.033,
    },
    "hopper": {
        "launch": 0.969,
        "launch, driven": 1.114,
        "base": 0.927,
        "channel": 0.807,
        "channel, driven": 0.443,
        "hop inside, LL": 0.793,
        "hop inside, Simple": 0.937,
        "hop between, LL": 0.927,
        "hop between, LL128": 1.032,
        "hop between, Simple": 0.970,
        "hop, NVLS": 1.061,
        "hop between, NVLS": 1.079,
        "peer between": 0.925,
        "bandwidth, Simplex": 1.067,
        "bandwidth, LL": 1.043,
    },
}
#: No open table of these. Blackwell: NCCL's tables treat it as Hopper but for the figures that `distsim.cost.tuning` has.
BY_ARCHITECTURE["blackwell"] = BY_ARCHITECTURE["hopper"]
#: GPUDirect-TCPX and TCP: assumed, neither fitted nor measured here. A hop is taken for some 20 us, against 2 to 3 over InfiniBand, and
#: the kernel's copies for part of TCP's wire: measure (`distsim calibrate`) where it matters.
BEFOREHAND: Final[dict[str, dict[str, float]]] = {
    "tcpx": {
        "hop between, LL": 8.0,
        "hop between, LL128": 6.0,
        "hop between, Simple": 3.0,
        "hop between, NVLS": 3.0,
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
#: What the presets have as ``call_overhead``, in ns: the launch.
LAUNCH_NS: Final = 2600
