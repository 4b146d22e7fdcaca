"""Reads the files of a job with the reader of their format.

A reader is one function that takes paths and returns a `Recording`. To add a format, write such a
function in `distsim.recordings.readers`, and add its file names here. Files of one job have one
format. In a folder, files of other kinds are passed over and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.recordings.readers.distsim_trace import is_distsim_trace, read_distsim_trace
from distsim.recordings.readers.kineto_cuda_job import cuda_recording
from distsim.recordings.readers.kineto_file import RankProfile, is_profile_name, read_profile
from distsim.recordings.readers.kineto_gloo_job import gloo_recording
from distsim.recordings.readers.operation_table import is_operation_table, read_operation_table
from distsim.recordings.recording import Recording

#: Four Gloo ranks under DDP. Rank 2 sleeps for 120 ms in each forward pass.
SAMPLE = Path(__file__).parent / "sample"
#: Function of (files done, files in all).
Progress = Callable[[int, int], None]
_FORMATS = (
    "PyTorch profiler traces (.json, .json.gz), distsim traces (.jsonl) or operation tables "
    "(.csv, .parquet)"
)
#: Formats that are recognised by name and not read, with the reason.
_UNSUPPORTED = {
    ".nsys-rep": "Nsight Systems reports are not supported",
    ".sqlite": "exports of Nsight Systems are not supported",
    ".qdrep": "Nsight Systems reports are not supported",
    ".pb": "TensorBoard profiles are not supported",
    ".et": "Chakra traces are not supported",
    ".otf2": "OTF2 archives are not supported",
}
#: Smaller jobs are read in this process, because starting others takes longer.
_PARALLEL_BYTES = 8 << 20
_DEFAULT_JOBS = 4


class JobFiles(NamedTuple):
    """The files of a job by format, and notes about files that were passed over."""

    tables: list[Path]
    traces: list[Path]
    profiles: list[Path]
    notes: list[str]


def read_recording(
    paths: Sequence[str | Path],
    *,
    jobs: int = _DEFAULT_JOBS,
    progress: Progress | None = None,
) -> Recording:
    """Read one job from files or folders. Raises UsageError if none is readable.

    ``jobs``: the number of processes that read ranks at the same time.
    """
    files = _find_files([_sample_or(Path(path)) for path in paths])
    kinds = [kind for kind in files[:3] if kind]
    if not kinds:
        remedy = "; ".join(files.notes) or f"give {_FORMATS}"
        raise UsageError("no recording was found", remedy)
    if len(kinds) > 1:
        raise UsageError(
            f"the files have different formats ({kinds[0][0]}, {kinds[1][0]})",
            "give the files of one job in one format",
        )
    if files.tables:
        recording = read_operation_table(_only(files.tables))
    elif files.traces:
        recording = read_distsim_trace(_only(files.traces))
    else:
        recording = _read_profiles(files, jobs, progress)
    return replace(recording, notes=(*recording.notes, *files.notes))


def _sample_or(path: Path) -> Path:
    """The recorded job that is part of this package if the path is ``sample`` and no file."""
    return SAMPLE if str(path) == SAMPLE.name and not path.exists() else path


def _only(files: list[Path]) -> Path:
    if len(files) > 1:
        raise UsageError(
            f"{len(files)} files ({files[0]}, {files[1]}, …) that each hold a whole job",
            "give one of them",
        )
    return files[0]


# --- which files ---


def _find_files(paths: Sequence[Path]) -> JobFiles:
    files = JobFiles([], [], [], [])
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", f"give {_FORMATS}")
        if path.is_dir():
            for inner in sorted(path.rglob("*")):
                if inner.is_file() and not _enter(files, inner):
                    files.notes.extend(_skipped(inner))
        elif not _enter(files, path):
            reason = _skipped(path) or [f"{path}: unknown format"]
            raise UsageError(reason[0], f"give {_FORMATS}")
    return files


def _enter(files: JobFiles, path: Path) -> bool:
    """Add a file to its format; False if its name belongs to none."""
    if is_distsim_trace(path):
        files.traces.append(path)
    elif is_operation_table(path):
        files.tables.append(path)
    elif is_profile_name(path):
        files.profiles.append(path)
    else:
        return False
    return True


def _skipped(path: Path) -> list[str]:
    reason = _UNSUPPORTED.get(path.suffix)
    return [f"{path}: {reason}"] if reason else []


# --- profiles ---


def _read_profiles(files: JobFiles, jobs: int, progress: Progress | None) -> Recording:
    profiles = []
    total = len(files.profiles)
    for done, result in enumerate(_read_each(files.profiles, jobs), start=1):
        if isinstance(result, str):
            files.notes.append(result)
        else:
            profiles.append(result)
        if progress is not None:
            progress(done, total)
    if not profiles:
        raise UsageError(files.notes[0], f"give {_FORMATS}")
    by_rank: dict[int, RankProfile] = {}
    for profile in profiles:
        if profile.rank in by_rank:
            raise UsageError(
                f"{by_rank[profile.rank].file} and {profile.file} are both of rank {profile.rank}",
                "give the files of one job, and one file per rank",
            )
        by_rank[profile.rank] = profile
    has_device = any(event.is_device for profile in profiles for event in profile.events)
    return cuda_recording(profiles) if has_device else gloo_recording(profiles)


def _read_each(paths: Sequence[Path], jobs: int) -> list[RankProfile | str]:
    size = sum(path.stat().st_size for path in paths)
    if len(paths) == 1 or jobs < 2 or size < _PARALLEL_BYTES:
        return [_read_or_explain(path) for path in paths]
    with ProcessPoolExecutor(max_workers=min(jobs, len(paths))) as pool:
        return list(pool.map(_read_or_explain, paths))


def _read_or_explain(path: Path) -> RankProfile | str:
    """The profile, or one line that says why there is none."""
    try:
        return read_profile(path)
    except UsageError as error:
        return error.message
