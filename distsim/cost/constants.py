"""What NCCL's algorithms cost: constants that multiply its own latencies and bandwidths, fitted to 57 published nccl-tests tables.

One set for all GPUs, with shrunken offsets by transport and architecture; `benchmarks/accuracy/run.py --fit` prints the fitted ones
again, and `benchmarks/accuracy/run.py` how well they predict tables and systems that were left out of the fit. Latencies NCCL has a
figure for are multiples of it; those it has none for (launch, starts, channels, messages, peers) are us; the rest are shares of
bandwidth, the two of `ADDED` exponents of (n - 1) / n. An offset multiplies (an exponent's is added). RoCE is priced as InfiniBand,
Blackwell as Hopper.
"""

from typing import Final

CONSTANTS: Final[dict[str, float]] = {
    "launch": 2.515,
    "launch, driven": 2.280,
    "base": 0.530,
    "start, Simple": 5.841,
    "start, LL128": 2.943,
    "start, Simple between": 5.353,
    "channel": 0.447,
    "channel, driven": 0.942,
    "hop inside, LL": 1.795,
    "hop inside, LL128": 0.982,
    "hop inside, Simple": 1.869,
    "hop between, LL": 1.054,
    "hop between, LL128": 3.487,
    "hop between, Simple": 1.793,
    "hop, NVLS": 1.641,
    "hop between, NVLS": 1.871,
    "message": 7.031,
    "launch, sends": 3.499,
    "launch, pairs": 0.416,
    "peer inside": 1.694,
    "peer between": 6.846,
    "bandwidth, Simple": 0.978,
    "bandwidth, Simplex": 1.040,
    "bandwidth, LL": 0.813,
    "bandwidth, LL128": 0.787,
    "ring, LL": 0.707,
    "ring, Simple": 0.386,
    "crowd": 0.963,
    "tree": 0.988,
    "two nodes": 0.853,
    "bandwidth, NVLS": 0.852,
    "bandwidth, NVLS gather": 0.908,
    "bandwidth, NVLS tree": 0.837,
    "bandwidth, message": 0.969,
    "bandwidth, messagex": 0.873,
    "bandwidth, message LL": 0.881,
}
ADDED: Final = ("ring, LL", "ring, Simple")
BY_TRANSPORT: Final[dict[str, dict[str, float]]] = {
    "efa": {
        "channel": 1.130,
        "hop between, LL": 20.850,
        "hop between, LL128": 7.723,
        "hop between, Simple": 4.949,
        "bandwidth, Simplex": 1.033,
        "bandwidth, LL": 0.841,
        "bandwidth, LL128": 0.861,
    },
    "slingshot": {
        "start, Simple": 1.044,
        "start, Simple between": 1.039,
        "channel": 1.356,
        "hop between, LL": 1.275,
        "hop between, LL128": 3.304,
        "hop between, Simple": 1.430,
        "message": 1.383,
        "peer between": 2.324,
        "bandwidth, Simplex": 0.781,
        "bandwidth, LL": 0.286,
        "bandwidth, LL128": 0.722,
        "ring, LL": 0.105,
        "ring, Simple": 0.034,
        "tree": 0.725,
        "two nodes": 0.860,
        "bandwidth, messagex": 0.502,
        "bandwidth, message LL": 0.832,
    },
    "pcie": {
        "hop inside, LL": 0.495,
        "hop inside, Simple": 0.697,
        "bandwidth, Simple": 1.217,
        "bandwidth, LL": 1.283,
    },
    "staged": {
        "bandwidth, Simple": 0.450,
        "bandwidth, LL": 0.600,
    },
}
BY_ARCHITECTURE: Final[dict[str, dict[str, float]]] = {
    "volta": {
        "launch": 1.051,
        "launch, driven": 1.281,
        "base": 1.095,
        "channel": 2.316,
        "channel, driven": 0.766,
        "hop inside, LL": 1.286,
        "hop inside, LL128": 1.033,
        "hop inside, Simple": 0.967,
        "bandwidth, Simple": 1.034,
    },
    "hopper": {
        "launch, driven": 1.120,
        "base": 0.932,
        "channel": 0.748,
        "channel, driven": 0.444,
        "hop inside, LL": 0.813,
        "hop inside, LL128": 0.929,
        "hop inside, Simple": 0.944,
        "hop between, LL": 0.936,
        "hop between, Simple": 0.967,
        "hop, NVLS": 1.065,
        "hop between, NVLS": 1.083,
        "peer between": 0.924,
        "bandwidth, Simplex": 1.063,
        "bandwidth, LL": 1.042,
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
