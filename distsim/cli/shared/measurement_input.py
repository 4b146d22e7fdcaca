"""Reading measured times: outputs of `distsim bench`, traces, and logs of nccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from distsim.real.calibrate import MeasuredPoint

#: Part of a GPU's name -> the preset of a machine with it. A longer name comes before its prefix
#: (GB200 before B200, L40S before L4), because the first match wins.
_PRESET_BY_GPU = {
    "GB200": "gb200-nvl72",
    "GH200": "gh200",
    "B200": "dgx-b200",
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "H800": "dgx-h100",
    "A100-PCI": "a100-pcie",
    "V100": "dgx1-v100",
    "MI300X": "mi300x",
    "L40S": "l40s-pcie",
    "L4": "l4-pcie",
}
_DEFAULT_GPU_PRESET = "dgx-a100"
#: Larger files are no logs of nccl-tests.
_MAX_LOG_BYTES = 64 * 2**20


class Measurements(NamedTuple):
    """Measured times, and the preset of the machine that they come from (None: unknown)."""

    points: tuple[MeasuredPoint, ...]
    preset: str | None


def read_measurements(source: Path, op: str | None) -> Measurements:
    """The measured times in a file; ``op``: the operation that an nccl-tests log measures.

    Raises UsageError for a file that cannot be read.
    """
    from distsim.common.reading_limits import reading_limits

    with reading_limits(source):
        return _read_limited(source, op)


def _read_limited(source: Path, op: str | None) -> Measurements:
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes
    from distsim.real.bench.measurement import BENCH_FORMAT, bench_from_json
    from distsim.real.calibrate import points_from_bench, points_from_nccl_tests

    if source.suffix == ".jsonl":
        return _measurements_of_trace(source)
    try:
        text = read_bytes(source, _MAX_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError as fault:
        raise UsageError(
            f"{source} cannot be read: {fault.strerror}",
            "give a bench output, a trace or an nccl-tests log",
        ) from None
    if text.lstrip().startswith("{") and f'"{BENCH_FORMAT}"' in text[:200]:
        return Measurements(points_from_bench(bench_from_json(text, str(source))), None)
    measured = points_from_nccl_tests(text, str(source), op)
    return Measurements(measured.points, _preset_with_gpu(measured.gpu))


def _measurements_of_trace(source: Path) -> Measurements:
    from distsim.real.calibrate import points_from_trace
    from distsim.trace.jsonl import read_trace

    trace = read_trace(source)
    on_gpus = trace.header.get("backend") == "nccl"
    return Measurements(points_from_trace(trace), _DEFAULT_GPU_PRESET if on_gpus else None)


def _preset_with_gpu(device: str) -> str:
    for word, preset in _PRESET_BY_GPU.items():
        if word in device:
            return preset
    return _DEFAULT_GPU_PRESET
