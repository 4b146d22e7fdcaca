"""The devices of the presets, as data; each number has its source.

Peak rates are for dense operations. Memory sizes are the nominal ones.

``compute_efficiency`` is the share of the peak that large matrix products reach in a training step.
In isolation, for a short time and with the best shape, bf16 matrix products reach these shares: .87
on A100, .81 on its PCIe card, .80 on H100, .84 on GH200, .78 on B200, .73 on GB200, .51 on MI300X.
In fp8 they reach .71 to .78 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). A training
step has other shapes and data, and a GPU under constant load has lower clocks. There, matrix
products reach .74 of these shares on A100 and .69 on H100. These two factors come from published
training steps, after all memory-bound work was counted separately (`benchmarks/training_steps.py`).
There are no such steps for other devices; so the PCIe card has the factor of A100, and GH200, B200
and GB200 have that of H100. The values for V100, L40S and L4 are assumptions.
"""

from __future__ import annotations

from typing import Final

PresetData = dict[str, object]


def _gpu(
    name: str,
    architecture: str,
    peak: dict[str, str],
    memory: tuple[str, str],
    efficiency: float,
    source: str,
) -> PresetData:
    """A GPU; ``memory`` is (bandwidth, capacity).

    The capacity is the one in torch's out-of-memory messages ("GPU 0 has a total capacity of
    79.11 GiB"), which differs from the name of the product; each is taken from public error logs.
    A launch takes 3 to 5 us in CUDA micro-benchmarks; STREAM-like kernels reach .85 of the HBM
    bandwidth. Kernels that run at the same time as communication take 18.9 % longer, on average
    over A100, H100, MI210 and MI250 (arXiv:2507.03114). The slow-down of transfers is an
    assumption: simulators use 0 to 20 %.
    """
    return {
        "name": name,
        "architecture": architecture,
        "peak": peak,
        "memory_bandwidth": memory[0],
        "memory_size": memory[1],
        "launch": "4 us",
        "compute_efficiency": efficiency,
        "memory_efficiency": 0.85,
        "overlap_compute": 1.19,
        "overlap_transfers": 1.1,
        "source": source,
    }


def _peaks(
    half: float,
    single: float,
    double: float,
    eight: float | None = None,
    integer: float | None = None,
) -> dict[str, str]:
    """Peaks in TFLOP/s; ``half`` for both 16-bit types."""
    found = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    found |= {} if eight is None else {"float8_e4m3fn": eight, "float8_e5m2": eight}
    found |= {} if integer is None else {"int8": integer}
    return {key: f"{value:g} TFLOP/s" for key, value in found.items()}


_A100 = _peaks(312, 19.5, 19.5, None, 624)
_H100 = _peaks(989, 67, 67, 1979, 1979)
_A100_SHEET = "NVIDIA A100 data sheet; efficiencies: published training runs"
_HOPPER_SHEET = "data sheet; efficiencies: published training runs"

V100: Final = _gpu(
    "NVIDIA V100 SXM2 32 GB",
    "volta",
    {"float16": "125 TFLOP/s", "float32": "15.7 TFLOP/s", "float64": "7.8 TFLOP/s"},
    ("900 GB/s", "32491 MiB"),
    0.6,
    "NVIDIA V100 data sheet",
)
A100: Final = _gpu(
    "NVIDIA A100 SXM 80 GB", "ampere", _A100, ("2039 GB/s", "81039 MiB"), 0.64, _A100_SHEET
)
A100_40: Final = _gpu(
    "NVIDIA A100 SXM 40 GB", "ampere", _A100, ("1555 GB/s", "40325 MiB"), 0.64, _A100_SHEET
)
A100_PCIE: Final = _gpu(
    "NVIDIA A100 PCIe 80 GB", "ampere", _A100, ("1935 GB/s", "81039 MiB"), 0.6, _A100_SHEET
)
H100: Final = _gpu(
    "NVIDIA H100 SXM 80 GB",
    "hopper",
    _H100,
    ("3350 GB/s", "81008 MiB"),
    0.55,
    f"NVIDIA H100 {_HOPPER_SHEET}",
)
#: H100 with less NVLink bandwidth and slow float64 (arXiv:2505.09343, section 2.1).
H800: Final = _gpu(
    "NVIDIA H800 SXM 80 GB",
    "hopper",
    _peaks(989, 67, 1, 1979, 1979),
    ("3350 GB/s", "81008 MiB"),
    0.55,
    f"NVIDIA H100 {_HOPPER_SHEET}; arXiv:2505.09343",
)
H200: Final = _gpu(
    "NVIDIA H200 SXM 141 GB",
    "hopper",
    _H100,
    ("4800 GB/s", "143155 MiB"),
    0.55,
    f"NVIDIA H200 {_HOPPER_SHEET}",
)
GH200: Final = _gpu(
    "NVIDIA GH200 96 GB",
    "hopper",
    _H100,
    ("4000 GB/s", "97157 MiB"),
    0.58,
    f"NVIDIA GH200 {_HOPPER_SHEET}",
)
B200: Final = _gpu(
    "NVIDIA B200 180 GB",
    "blackwell",
    _peaks(2250, 75, 37, 4500, 4500),
    ("7700 GB/s", "182630 MiB"),
    0.54,
    "NVIDIA DGX B200 data sheet",
)
GB200: Final = _gpu(
    "NVIDIA GB200 186 GB",
    "blackwell",
    _peaks(2500, 80, 40, 5000, 5000),
    ("8000 GB/s", "188733 MiB"),
    0.5,
    "NVIDIA GB200 NVL72 data sheet",
)
#: 654 of 1307 TFLOP/s in bf16 is what AMD measures as achievable (rocm.blogs.amd.com, "Measuring
#: Max-Achievable FLOPs").
MI300X: Final = _gpu(
    "AMD MI300X 192 GB",
    "cdna3",
    _peaks(1307, 163.4, 163.4, 2615, 2615),
    ("5300 GB/s", "196587 MiB"),
    0.5,
    "AMD MI300X data sheet; efficiency: AMD's max-achievable FLOPs",
)
L40S: Final = _gpu(
    "NVIDIA L40S 48 GB",
    "ada",
    _peaks(362, 91.6, 1.4, 733, 733),
    ("864 GB/s", "45486 MiB"),
    0.6,
    "NVIDIA L40S data sheet",
)
L4: Final = _gpu(
    "NVIDIA L4 24 GB",
    "ada",
    _peaks(121, 30.3, 0.5, 242, 242),
    ("300 GB/s", "22558 MiB"),
    0.6,
    "NVIDIA L4 data sheet",
)

CPU: Final[PresetData] = {
    "name": "one CPU socket",
    "peak": {
        "float32": "1.28 TFLOP/s",
        "float64": "0.64 TFLOP/s",
    },  # 16 cores x 2.5 GHz x 32 (AVX2: 2 FMA x 8 float32)
    "memory_bandwidth": "204.8 GB/s",  # 8 channels of DDR4-3200
    "memory_size": "256 GB",
    "compute_efficiency": 0.7,  # blocked GEMM in a BLAS
    "memory_efficiency": 0.7,  # STREAM triad over the channels' peak
    "source": "16 cores at 2.5 GHz with AVX2, 8 channels of DDR4-3200",
}

#: Loopback TCP between processes of one machine, as Gloo uses it.
LOOPBACK: Final[PresetData] = {
    "kind": "shm",
    "latency": "15 us",  # Gloo's wake-up per step, lower end of published 15 to 60 us
    "bandwidth": "1.6 GB/s",  # one Gloo loop thread per process carries 1 to 1.6 GB/s, loopback too
    "efficiency": 0.8,  # the middle of that range
    "source": "published Gloo sweeps (one loop thread per process)",
}
