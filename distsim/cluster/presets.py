"""Clusters that come with distsim, as data: each number beside its source.

Data-sheet figures are the vendors'; efficiencies and latencies come from published nccl-tests and Gloo sweeps. A ring's busbw
over the data sheet's: NVLink .78 (A100), .81 (H100), HDR and NDR InfiniBand .91 to .98. None of these was measured on your
machines: that is what ``error_band`` says.
"""

from __future__ import annotations

from typing import Final

#: Mean error over 51 open nccl-tests tables of A100 and H100 systems; their median above 64 MiB; 64 KiB to 16 MiB.
_GPU_BAND = "+-37 % (14 % above 64 MiB, 65 % from 64 KiB to 16 MiB)"
_CPU_BAND = "+-40 % (a guess: TCP stacks and hosts differ more than links do)"

_A100: Final[dict[str, object]] = {
    "name": "NVIDIA A100 SXM 80 GB",
    "peak": {  # NVIDIA A100 data sheet, dense; float32 through TF32 tensor cores is 156, plain float32 19.5
        "bfloat16": "312 TFLOP/s", "float16": "312 TFLOP/s", "float32": "19.5 TFLOP/s", "float64": "19.5 TFLOP/s",
        "int8": "624 TFLOP/s",
    },
    "memory_bandwidth": "2039 GB/s",  # A100 data sheet, HBM2e
    "memory_size": "80 GB",  # A100 data sheet
    "launch": "4 us",  # a kernel from the host's call to its start; CUDA micro-benchmarks give 3 to 5 us
    "compute_efficiency": 0.6,  # large GEMMs reach .6 to .8 of the dense peak; Megatron-LM (SC'21) reports .52 end to end
    "memory_efficiency": 0.85,  # STREAM-like kernels on HBM2e
    "source": "NVIDIA A100 data sheet; efficiencies: Megatron-LM (SC'21)",
}  # fmt: skip

_H100: Final[dict[str, object]] = {
    "name": "NVIDIA H100 SXM 80 GB",
    "peak": {  # NVIDIA H100 data sheet, dense (half of the figures with sparsity)
        "bfloat16": "989 TFLOP/s", "float16": "989 TFLOP/s", "float32": "67 TFLOP/s", "float64": "67 TFLOP/s",
        "float8_e4m3fn": "1979 TFLOP/s", "float8_e5m2": "1979 TFLOP/s", "int8": "1979 TFLOP/s",
    },
    "memory_bandwidth": "3350 GB/s",  # H100 data sheet, HBM3
    "memory_size": "80 GB",  # H100 data sheet
    "launch": "4 us",  # as A100
    "compute_efficiency": 0.55,  # published bf16 training runs reach .42 of peak end to end, large GEMMs .55 to .75
    "memory_efficiency": 0.85,  # as A100
    "source": "NVIDIA H100 data sheet; efficiencies: published training runs",
}  # fmt: skip

_CPU: Final[dict[str, object]] = {
    "name": "one CPU socket",
    "peak": {"float32": "1.28 TFLOP/s", "float64": "0.64 TFLOP/s"},  # 16 cores x 2.5 GHz x 32 (AVX2: 2 FMA x 8 float32)
    "memory_bandwidth": "204.8 GB/s",  # 8 channels of DDR4-3200
    "memory_size": "256 GB",
    "compute_efficiency": 0.7,  # blocked GEMM in a BLAS
    "memory_efficiency": 0.7,  # STREAM triad over the channels' peak
    "source": "16 cores at 2.5 GHz with AVX2, 8 channels of DDR4-3200",
}  # fmt: skip

#: Loopback TCP between processes of one machine, as Gloo uses it.
_LOOPBACK: Final[dict[str, object]] = {
    "kind": "shm",
    "latency": "15 us",  # Gloo's wake-up per step, lower end of published 15 to 60 us
    "bandwidth": "1.6 GB/s",  # one Gloo loop thread per process carries 1 to 1.6 GB/s, loopback too
    "efficiency": 0.8,  # the middle of that range
    "source": "published Gloo sweeps (one loop thread per process)",
}  # fmt: skip

PRESETS: Final[dict[str, dict[str, object]]] = {
    "dgx-a100": {
        "name": "dgx-a100",
        "source": "NVIDIA DGX A100 data sheet; NCCL tuning.cc; published nccl-tests tables",
        "error_band": _GPU_BAND,
        "device": _A100,
        "intra": {
            "kind": "nvlink",
            "latency": "0.8 us",  # small all_reduce: 8, 12, 18 us on 2, 4, 8 GPUs (open nccl-tests tables)
            "bandwidth": "300 GB/s",  # NVLink 3: 12 links x 25 GB/s per direction
            "efficiency": 0.78,  # 227 to 235 GB/s busbw at large sizes on 8 GPUs
            "source": "A100 data sheet (NVLink 3); efficiency from open nccl-tests tables",
        },
        "nics": {
            "count": 8,  # DGX A100 data sheet: 8 single-port ConnectX-6 for compute
            "latency": "1 us",  # ConnectX-6 data sheet: below 1 us
            "bandwidth": "200 Gbit/s",  # HDR InfiniBand
            "efficiency": 0.95,  # 188.5 of 200 GB/s at 2 x 8 GPUs
            "source": "DGX A100 data sheet (8 x HDR)",
        },
        "network": {"latency": "4 us", "source": "NCCL tuning.cc, ring, network, LL128"},
        "call_overhead": "6.6 us",  # NCCL tuning.cc, ring, LL: base latency
    },
    "dgx-h100": {
        "name": "dgx-h100",
        "source": "NVIDIA DGX H100 data sheet; NCCL tuning.cc; published nccl-tests tables",
        "error_band": _GPU_BAND,
        "device": _H100,
        "intra": {
            "kind": "nvlink",
            "latency": "0.6 us",  # NCCL tuning.cc, ring, NVLink, LL
            "bandwidth": "450 GB/s",  # NVLink 4: 18 links x 25 GB/s per direction
            "efficiency": 0.81,  # 362 to 367 GB/s busbw of rings at large sizes (NVLS all_reduce: 1.07, not modelled)
            "source": "H100 data sheet (NVLink 4); efficiency from open nccl-tests tables",
        },
        "nics": {
            "count": 8,  # DGX H100 data sheet: 8 ConnectX-7 for compute
            "latency": "1 us",  # as ConnectX-6
            "bandwidth": "400 Gbit/s",  # NDR InfiniBand
            "efficiency": 0.92,  # 46 of 50 GB/s for one pair of cards
            "source": "DGX H100 data sheet (8 x NDR)",
        },
        "network": {"latency": "4 us", "source": "NCCL tuning.cc, ring, network, LL128"},
        "call_overhead": "6.6 us",  # NCCL tuning.cc, ring, LL: base latency
    },
    "cpu-10gbe": {
        "name": "cpu-10gbe",
        "source": "10 Gbit Ethernet, TCP, published Gloo sweeps",
        "error_band": _CPU_BAND,
        "device": _CPU,
        "intra": _LOOPBACK,
        "nics": {
            "count": 1,
            "bandwidth": "10 Gbit/s",  # IEEE 802.3ae
            "efficiency": 0.94,  # TCP payload at an MTU of 1500: 1448 of 1538 bytes on the wire
            "source": "IEEE 802.3ae; TCP framing",
        },
        "network": {"latency": "30 us", "source": "published Gloo sweeps: 15 to 60 us per step over 10 to 40 GbE"},
        "call_overhead": "20 us",  # a Gloo call's hand-over to a worker thread and back
        "collectives": "flat",
    },
    "cpu-25gbe": {
        "name": "cpu-25gbe",
        "source": "25 Gbit Ethernet, TCP, published Gloo sweeps",
        "error_band": _CPU_BAND,
        "device": _CPU,
        "intra": _LOOPBACK,
        "nics": {
            "count": 1,
            "bandwidth": "25 Gbit/s",  # IEEE 802.3by
            "efficiency": 0.57,  # 2.8 of 5 GB/s on 40 GbE with Gloo: the loop thread, not the wire
            "source": "IEEE 802.3by; efficiency from the Gloo project's 4 x 40 GbE sweep",
        },
        "network": {"latency": "25 us", "source": "published Gloo sweeps: 15 to 60 us per step over 10 to 40 GbE"},
        "call_overhead": "20 us",  # as cpu-10gbe
        "collectives": "flat",
    },
}
