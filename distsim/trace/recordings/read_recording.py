"""Reads the files of a job with the reader of their format.

A reader is one function that takes paths and returns a `Recording`. To add a format, write such a
function in `distsim.trace.recordings.readers`, and add its file names here. Files of one job have
one format. In a folder, files of other kinds are passed over and noted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from distsim.common.errors import UsageError
from distsim.common.file_io import files_below
from distsim.common.reading_limits import activate, current_factor, reading_limits
from distsim.common.worker_process import end_with_parent, starting_workers
from distsim.trace.recordings.readers.chakra_file import is_chakra_name
from distsim.trace.recordings.readers.chakra_job import chakra_recording
from distsim.trace.recordings.readers.chakra_rank import read_chakra_rank
from distsim.trace.recordings.readers.distsim_trace import is_distsim_trace, read_distsim_trace
from distsim.trace.recordings.readers.kineto_cuda_job import cuda_recording
from distsim.trace.recordings.readers.kineto_file import is_profile_name
from distsim.trace.recordings.readers.kineto_gloo_job import gloo_recording
from distsim.trace.recordings.readers.kineto_rank import read_rank
from distsim.trace.recordings.readers.nsight_file import is_nsight_name
from distsim.trace.recordings.readers.nsight_rank import FORMAT as NSIGHT_FORMAT
from distsim.trace.recordings.readers.nsight_rank import read_nsight
from distsim.trace.recordings.readers.operation_table import (
    is_operation_table,
    read_operation_table,
)
from distsim.trace.recordings.readers.unmarked_steps import is_same_division, origin_note
from distsim.trace.recordings.recording import Recording

#: Four Gloo ranks under DDP. Rank 2 sleeps for 120 ms in each forward pass.
SAMPLE = Path(__file__).parent / "sample"
#: Function of (files done, files in all).
Progress = Callable[[int, int], None]
#: What the reader of a file returns.
Reading = TypeVar("Reading")
_FORMATS = (
    "PyTorch profiler traces (.json, .json.gz), distsim traces (.jsonl), operation tables "
    "(.csv, .parquet), Chakra traces (.et) or exports of Nsight Systems (.sqlite)"
)
#: Formats that are recognised by name and not read, with the reason.
_UNSUPPORTED = {
    ".nsys-rep": "export Nsight Systems reports with `nsys export --type sqlite`",
    ".qdrep": "export Nsight Systems reports with `nsys export --type sqlite`",
    ".pb": "TensorBoard profiles are not supported",
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
    chakra: list[Path]
    nsight: list[Path]
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
    kinds = [kind for kind in files[:-1] if kind]
    if not kinds:
        remedy = "; ".join(files.notes) or f"give {_FORMATS}"
        raise UsageError("no recording was found", remedy)
    if len(kinds) > 1:
        raise _different_formats(files)
    if files.tables:
        table = _only(files.tables)
        with reading_limits(table):
            recording = read_operation_table(table)
    elif files.traces:
        trace = _only(files.traces)
        with reading_limits(trace):
            recording = read_distsim_trace(trace)
    elif files.chakra:
        recording = _read_chakra(files, jobs, progress)
    elif files.nsight:
        recording = _read_nsight(files, jobs, progress)
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


def _different_formats(files: JobFiles) -> UsageError:
    formats = {
        "an operation table": files.tables,
        "a distsim trace": files.traces,
        "a PyTorch profile": files.profiles,
        "a Chakra trace": files.chakra,
        "an export of Nsight Systems": files.nsight,
    }
    present = sorted((len(paths), name) for name, paths in formats.items() if paths)
    (_, rarest), (_, usual) = present[0], present[-1]
    return UsageError(
        f"{formats[rarest][0]} is {rarest}, but {formats[usual][0]} is {usual}",
        "name only files of one format, or move the others to another folder",
    )


def _find_files(paths: Sequence[Path]) -> JobFiles:
    files = JobFiles([], [], [], [], [], [])
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", f"give {_FORMATS}")
        is_folder = path.is_dir()
        for file in _files_below(path, files.notes) if is_folder else [path]:
            # A file may be named twice, or lie in two of the folders.
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            if _enter(files, file):
                continue
            reasons = _skipped(file)
            if not is_folder:
                raise UsageError([*reasons, f"{path}: unknown format"][0], f"give {_FORMATS}")
            files.notes.extend(reasons)
    return files


def _files_below(folder: Path, notes: list[str]) -> list[Path]:
    """All files of a folder and its subfolders; unreadable ones are noted."""

    unreadable: list[OSError] = []
    found = files_below(folder, unreadable)
    notes += [f"{error.filename} cannot be read: {error.strerror}" for error in unreadable]
    return found


def _enter(files: JobFiles, path: Path) -> bool:
    """Add a file to its format; False if its name belongs to none."""
    if is_distsim_trace(path):
        files.traces.append(path)
    elif is_operation_table(path):
        files.tables.append(path)
    elif is_profile_name(path):
        files.profiles.append(path)
    elif is_chakra_name(path):
        files.chakra.append(path)
    elif is_nsight_name(path):
        files.nsight.append(path)
    else:
        return False
    return True


def _skipped(path: Path) -> list[str]:
    reason = _UNSUPPORTED.get(path.suffix.lower())
    if path.with_suffix(".sqlite").exists():
        return []  # the export of this report
    return [f"{path}: {reason}"] if reason else []


# --- formats with a file per rank ---


def _read_chakra(files: JobFiles, jobs: int, progress: Progress | None) -> Recording:
    ranks = _read_ranks(files.chakra, files.notes, jobs, progress, read_chakra_rank)
    _check_ranks([(one.rank, one.file) for one in ranks])
    with reading_limits(f"{len(ranks)} Chakra traces", _total_bytes(files.chakra)):
        return chakra_recording(ranks)


def _read_nsight(files: JobFiles, jobs: int, progress: Progress | None) -> Recording:
    read = _read_ranks(files.nsight, files.notes, jobs, progress, read_nsight)
    readings = [rank for of_file in read for rank in of_file.ranks]
    _check_ranks([(one.profile.rank, one.profile.file) for one in readings])
    if not is_same_division([reading.found_steps for reading in readings]):
        paths = sorted({Path(reading.profile.file) for reading in readings})
        again = [read_nsight(path, as_one_step=True) for path in paths]
        readings = [rank for of_file in again for rank in of_file.ranks]
    files.notes.extend(note for of_file in read for note in of_file.notes)
    note = origin_note(readings[0].found_steps)
    if note:
        files.notes.append(note)
    with reading_limits(f"{len(files.nsight)} exports", _total_bytes(files.nsight)):
        return cuda_recording(readings, NSIGHT_FORMAT)


def _read_profiles(files: JobFiles, jobs: int, progress: Progress | None) -> Recording:
    readings = _read_ranks(files.profiles, files.notes, jobs, progress, read_rank)
    _check_ranks([(one.profile.rank, one.profile.file) for one in readings])
    if not is_same_division([reading.found_steps for reading in readings]):
        paths = [Path(reading.profile.file) for reading in readings]
        readings = [read_rank(path, as_one_step=True) for path in paths]
    note = origin_note(readings[0].found_steps)
    if note:
        files.notes.append(note)
    has_device = any(reading.device is not None for reading in readings)
    with reading_limits(f"{len(files.profiles)} profiles", _total_bytes(files.profiles)):
        return cuda_recording(readings) if has_device else gloo_recording(readings)


def _check_ranks(ranks: Sequence[tuple[int, str]]) -> None:
    """Raises UsageError for two files of one rank, given as (rank, file)."""
    file_of: dict[int, str] = {}
    for rank, file in ranks:
        if rank in file_of:
            raise _same_rank(rank, file_of[rank], file)
        file_of[rank] = file


def _same_rank(rank: int, *files: str) -> UsageError:
    """Two files of one rank: of two recordings of a job, if they are in different folders."""
    folders = [Path(file).parent for file in files]
    remedy = "give the files of one job, and one file per rank"
    if folders[0] != folders[1]:
        remedy = f"give the folder of one recording, for example {folders[0]}"
    return UsageError(f"{files[0]} and {files[1]} are both of rank {rank}", remedy)


def _read_ranks(
    paths: Sequence[Path],
    notes: list[str],
    jobs: int,
    progress: Progress | None,
    read: Callable[[Path], Reading],
) -> list[Reading]:
    """What ``read`` returns for each file; a note for each file that it refuses.

    Raises the first UsageError if it refuses all files.
    """
    readings: list[Reading] = []
    errors: list[UsageError] = []
    for done, result in enumerate(_read_each(paths, jobs, read), start=1):
        if isinstance(result, UsageError):
            errors.append(result)
        else:
            readings.append(result)
        if progress is not None:
            progress(done, len(paths))
    if not readings:
        raise errors[0]
    notes.extend(error.message for error in errors)
    return readings


def _read_each(
    paths: Sequence[Path], jobs: int, read: Callable[[Path], Reading]
) -> list[Reading | UsageError]:
    read_or_explain = partial(_read_or_explain, read)
    if len(paths) > 1 and jobs > 1 and _total_bytes(paths) >= _PARALLEL_BYTES:
        # The limits hold in the workers, too. If they end a worker, all files are read again in
        # this process, whose supervisor reports the name of the file.
        with (
            suppress(BrokenProcessPool),
            ProcessPoolExecutor(
                min(jobs, len(paths)),
                initializer=_start_worker,
                initargs=(current_factor(), os.getpid()),
            ) as pool,
        ):
            with starting_workers():
                results = pool.map(read_or_explain, paths)
            return list(results)
    return [read_or_explain(path) for path in paths]


def _start_worker(factor: float | None, parent: int) -> None:
    activate(factor)
    end_with_parent(parent)


def _total_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _read_or_explain(read: Callable[[Path], Reading], path: Path) -> Reading | UsageError:
    """What a file contains, or the error that says why there is nothing."""
    try:
        with reading_limits(path):
            return read(path)
    except UsageError as error:
        return error
