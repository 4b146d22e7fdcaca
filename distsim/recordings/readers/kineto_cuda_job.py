"""PyTorch profiles of CUDA jobs: recognised, not read yet."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.common.errors import UsageError
from distsim.recordings.readers.kineto_file import RankProfile
from distsim.recordings.recording import Recording


def cuda_recording(profiles: Sequence[RankProfile]) -> Recording:
    """Raises UsageError."""
    raise UsageError(
        f"{profiles[0].file}: PyTorch profiles with GPU kernels are not supported",
        "give profiles of a CPU job",
    )
