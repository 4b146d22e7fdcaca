"""Whether a predicted peak of memory fits into a device: certainly, perhaps, or not.

Two things separate the prediction from the device's capacity. The prediction itself is uncertain
(`MEMORY_RANGE`), and some memory lies outside torch's caching allocator: the CUDA context and
NCCL's buffers (`memory_outside_torch`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from distsim.hardware.cluster import ComputeDevice

_MIB: Final = 2**20

#: Measured / predicted peak of the memory that torch's allocator reserves: quantiles .05 and .95 of
#: 42 layouts on H100. `benchmarks/memory.py` prints them.
MEMORY_RANGE: Final = (0.96, 1.14)

#: CUDA context of a process. On H100, a process with a context and one NCCL communicator holds
#: 1.06 GB outside torch (https://github.com/NVIDIA/nccl/issues/1685); the rest is the communicator.
_CONTEXT_NBYTES: Final = 400 * _MIB
#: Buffers of one communicator: 544 MiB for two ranks of an A100 node, 688 MiB for more
#: (https://github.com/NVIDIA/nccl/issues/964). RCCL takes about 0.65 GiB
#: (https://github.com/Lumi-supercomputer/LUMI-AI-Guide/issues/111).
_COMMUNICATOR_NBYTES: Final = 650 * _MIB
#: An all_to_all connects every pair of ranks: 3.28 GB more on 8 H100
#: (https://github.com/NVIDIA/nccl/issues/1685).
_ALL_TO_ALL_NBYTES: Final = 3100 * _MIB


class MemoryFit(NamedTuple):
    """The memory that a rank may need, in bytes, compared with its device.

    ``low_nbytes`` and ``high_nbytes`` bound 90 % of measured peaks; both contain the memory outside
    torch, ``reserve_nbytes``.
    """

    low_nbytes: int
    high_nbytes: int
    reserve_nbytes: int
    capacity_nbytes: int

    @property
    def is_too_large(self) -> bool:
        """Even the lower bound exceeds the device."""
        return self.low_nbytes > self.capacity_nbytes

    @property
    def may_run_out(self) -> bool:
        """The upper bound exceeds the device."""
        return self.high_nbytes > self.capacity_nbytes


def memory_fit(peak_nbytes: int, reserve_nbytes: int, device: ComputeDevice) -> MemoryFit:
    """The range of a rank's memory, for a predicted peak of torch's allocator."""
    low, high = MEMORY_RANGE
    return MemoryFit(
        round(peak_nbytes * low) + reserve_nbytes,
        round(peak_nbytes * high) + reserve_nbytes,
        reserve_nbytes,
        device.memory_nbytes,
    )


def memory_outside_torch(
    device: ComputeDevice, communicators: int, *, has_all_to_all: bool = False
) -> int:
    """Bytes that a rank holds outside torch's allocator; 0 on a CPU.

    ``communicators``: the NCCL communicators of the rank.
    """
    if not device.architecture:
        return 0
    total = _CONTEXT_NBYTES + communicators * _COMMUNICATOR_NBYTES
    if has_all_to_all and communicators:
        total += _ALL_TO_ALL_NBYTES
    return total


__all__ = ["MEMORY_RANGE", "MemoryFit", "memory_fit", "memory_outside_torch"]
