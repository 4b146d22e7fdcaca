"""Read the given files and folders into evidence: recognise each file by its content.

File names are used only to find the rank that a file belongs to. Recognition and bounds are here
and in ``file_access``; each format has a reader of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.reading_limits import reading_limits
from distsim.common.records import gc_paused
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import InputFile
from distsim.hang_doctor.model.reconcile import reconcile
from distsim.hang_doctor.readers import distsim_files, safe_pickle
from distsim.hang_doctor.readers.archives import ArchiveRefused, archive_members, is_archive
from distsim.hang_doctor.readers.debug_server import is_debug_server_page, parts_of_page
from distsim.hang_doctor.readers.debug_tables import has_debug_tables, read_debug_tables
from distsim.hang_doctor.readers.file_access import (
    MAX_BYTES,
    FileRefused,
    escaped,
    file_bytes,
    files_of_last_attempts,
    list_files,
)
from distsim.hang_doctor.readers.file_names import rank_of_file_name
from distsim.hang_doctor.readers.flight_recorder import is_flight_recorder, read_flight_recorder
from distsim.hang_doctor.readers.inspector import is_inspector_file, read_inspector
from distsim.hang_doctor.readers.kineto import is_kineto, read_kineto
from distsim.hang_doctor.readers.live_bundle import is_live_job, read_live_job
from distsim.hang_doctor.readers.log_lines import LogReader
from distsim.hang_doctor.readers.ras import (
    is_ras_json,
    is_ras_text,
    read_ras_json,
    read_ras_text,
)
from distsim.hang_doctor.readers.stacks import is_pyspy_json, read_pyspy_json
from distsim.hang_doctor.readers.stale_files import drop_stale_ranks
from distsim.hang_doctor.readers.unrelated_files import (
    NOTHING_ABOUT_HANGS,
    unrelated_bytes,
    unrelated_json,
    unrelated_text,
)
from distsim.real.shared.progress_file import FILE_BYTES as PROGRESS_FILE_BYTES
from distsim.trace.recordings.readers.nsight_file import is_nsight_export
from distsim.trace.recordings.readers.nsight_rank import FORMAT as NSIGHT_EXPORT

__all__ = ["MAX_BYTES", "read_dump_bytes", "read_evidence"]

#: Limits for one JSON file. Parsed, each object, list and item takes about a hundred bytes.
_MAX_OBJECTS: Final = 3_000_000
_MAX_ITEMS: Final = 20_000_000
#: Longer lines of a text are cut.
_MAX_LINE: Final = 20_000
_MAX_DIGITS: Final = 1000
#: What remains of a longer number.
_KEPT_DIGITS: Final = 20
_LONG_NUMBER: Final = re.compile(rf"(?<!\d)\d{{{_MAX_DIGITS},}}")
#: A file with more zero bytes at its beginning is not text.
_MAX_ZERO_BYTES: Final = 8
#: Longer names cannot be on a disk, but an archive may contain them; their start is ignored.
_MAX_NAME: Final = 255
#: What torchrun's agent writes between two starts of the workers.
_RESTART = re.compile(r"attempts left; will restart worker group")


class _Part(NamedTuple):
    """A file, or a member of an archive."""

    #: The path of the file on disk.
    path: str
    #: The name that the rank is read from.
    name: str
    #: The name that the report shows.
    shown: str
    data: bytes


class _Result(NamedTuple):
    """What a file turned out to be. ``problem``: what could not be read of it.

    ``rank_of_name``: the rank that its evidence got from the name of the file.
    """

    kind: str
    ranks: set[int]
    problem: str = ""
    rank_of_name: int | None = None


def read_evidence(paths: Sequence[str]) -> Evidence:
    """Everything that the files say.

    Raises UsageError for a path that does not exist. A file that cannot be read is listed with its
    problem.
    """
    evidence = Evidence()
    with gc_paused():
        if paths:
            for path in files_of_last_attempts(evidence, list_files(paths)):
                with reading_limits(path):
                    _read_path(evidence, path)
        with reading_limits("the files", evidence.input_bytes):
            reconcile(evidence)
            drop_stale_ranks(evidence)
    return evidence


def read_dump_bytes(evidence: Evidence, data: bytes, name: str) -> None:
    """Enter a Flight Recorder dump that is in no file. ``name``: as the file would be called."""
    _read_part(evidence, _Part(name, name, name, data))


def _read_path(evidence: Evidence, path: str) -> None:
    if is_nsight_export(Path(path)):
        # Such a database may be larger than any file that doctor reads.
        evidence.files.append(InputFile(escaped(path), f"{NSIGHT_EXPORT}{NOTHING_ABOUT_HANGS}", ()))
        return
    try:
        parts = list(_parts_of(path))
    except (FileRefused, ArchiveRefused) as refusal:
        evidence.files.append(InputFile(escaped(path), "not read", (), str(refusal)))
    except OSError as fault:
        problem = f"the system reports: {fault.strerror}"
        evidence.files.append(InputFile(escaped(path), "not read", (), problem))
    else:
        for part in parts:
            _read_part(evidence, part)


def _parts_of(path: str) -> Iterator[_Part]:
    data = file_bytes(path)
    if not is_archive(data):
        yield _Part(path, path, escaped(path), data)
        return
    for name, member in archive_members(data):
        # The zip format allows names of 64 KiB.
        shown = f"{escaped(path)}/{escaped(name[-_MAX_NAME:])}" if name else escaped(path)
        yield _Part(path, name or path, shown, member)


def _read_part(evidence: Evidence, part: _Part) -> None:
    evidence.input_bytes += len(part.data)
    try:
        result = _read_by_content(evidence, part)
    except FileRefused as refusal:
        result = _Result("not read", set(), str(refusal))
    except RecursionError:
        result = _Result("not read", set(), "its data are nested too deeply")
    ranks = tuple(sorted(result.ranks))
    evidence.files.append(
        InputFile(part.shown, result.kind, ranks, result.problem, result.rank_of_name)
    )


# --- recognition ---


def _read_by_content(evidence: Evidence, part: _Part) -> _Result:
    data = part.data
    rank = rank_of_file_name(part.name)
    if not data.strip():
        return _Result("empty", set(), "the file is empty")
    if len(data) == PROGRESS_FILE_BYTES and rank is not None:
        snapshot = distsim_files.progress_snapshot(data, rank)
        if snapshot is not None:
            distsim_files.read_progress_file(evidence, snapshot, part.shown)
            return _Result("distsim progress file", {snapshot.rank})
    if data[:1] == b"\x80" and data[1:2] in b"\x00\x01\x02\x03\x04\x05":
        return _read_pickle(evidence, part)
    if is_inspector_file(data):
        return _Result("NCCL Inspector", read_inspector(evidence, data, part.shown))
    if has_debug_tables(data):
        ranks = read_debug_tables(evidence, data, part.shown)
        return _Result("tables of torch's debug server", ranks)
    if is_debug_server_page(data):
        return _read_debug_server_page(evidence, part)
    if data.lstrip()[:1] in (b"{", b"["):
        parsed = _parse_json(data)
        if parsed is not None:
            return _read_json(evidence, parsed, rank, part)
        if b'"format": "distsim-trace"' in data[:200]:
            return _read_distsim_trace(evidence, part)
    unrelated = unrelated_bytes(data)
    if unrelated:
        return _Result(unrelated, set())
    if data.count(b"\0", 0, 4096) > _MAX_ZERO_BYTES:
        raise FileRefused("neither text nor a pickle of plain data")
    return _read_text(evidence, data, rank, part.shown)


# --- pickles and Flight Recorder ---


def _read_pickle(evidence: Evidence, part: _Part) -> _Result:
    try:
        found = safe_pickle.loads_plain(part.data)
    except safe_pickle.UnsafePickle as fault:
        raise FileRefused(f"unsafe or damaged pickle: {fault}") from None
    if not is_flight_recorder(found):
        raise FileRefused("this pickle is not a Flight Recorder dump")
    return _read_flight_recorder(evidence, found, part)


def _read_flight_recorder(evidence: Evidence, found: dict[str, Any], part: _Part) -> _Result:
    shown = part.shown
    rank = rank_of_file_name(part.name, is_dump=True)
    if rank is None:
        raise FileRefused(
            "a Flight Recorder dump does not contain its rank, and the file name has none: rename "
            "it to `…_rank_N`"
        )
    problem = read_flight_recorder(evidence, found, rank, shown)
    version = escaped(str(found["version"])[:12])
    return _Result(f"Flight Recorder {version}", {rank}, problem, rank)


# --- JSON ---


def _parse_json(data: bytes) -> Any:
    """The JSON in a file, None if it is none. Refused before it is parsed if it has too many parts.

    The report of NCCL 2.28's RAS lacks commas between objects, which are inserted.
    """
    object_count = data.count(b"{") + data.count(b"[")
    if object_count > _MAX_OBJECTS or data.count(b",") > _MAX_ITEMS:
        return _refuse_large_json(data)
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        if b'"communicators"' not in data[:4096]:
            return None
    try:
        return json.loads(re.sub(r"\}(\s*)\{", r"},\1{", text))
    except ValueError:
        return None


def _refuse_large_json(data: bytes) -> None:
    """Refuse JSON with too many parts; return None for a log that begins with a bracket."""
    try:
        json.loads(data[:2048].decode("utf-8", "replace"))
    except json.JSONDecodeError as fault:
        if fault.pos < 16:
            return
    raise FileRefused(
        f"the JSON has more than {_MAX_OBJECTS} objects and lists, or {_MAX_ITEMS} items: keep "
        "only the latest entries"
    )


def _read_json(evidence: Evidence, parsed: Any, rank: int | None, part: _Part) -> _Result:
    shown = part.shown
    if is_flight_recorder(parsed):
        return _read_flight_recorder(evidence, parsed, part)
    if is_pyspy_json(parsed):
        for stack in read_pyspy_json(parsed, shown):
            evidence.add_stack(rank, stack)
        if rank is None:
            return _Result(
                "py-spy stacks", set(), "the file name has no rank: rename it to `…_rank_N`"
            )
        return _Result("py-spy stacks", {rank}, rank_of_name=rank)
    if is_ras_json(parsed):
        return _Result("NCCL RAS", read_ras_json(evidence, parsed, shown))
    if is_live_job(parsed):
        return _Result("live job", read_live_job(evidence, parsed, shown))
    if is_kineto(parsed):
        rank_of_trace = read_kineto(evidence, parsed, rank, shown)
        if rank_of_trace is None:
            return _Result("Kineto trace", set(), "neither the trace nor the file name has a rank")
        return _Result("Kineto trace", {rank_of_trace})
    if isinstance(parsed, dict) and parsed.get("format") == "distsim-trace":
        return _read_distsim_trace(evidence, part)
    return _read_dumps_of_ranks(evidence, parsed, shown)


def _read_dumps_of_ranks(evidence: Evidence, parsed: Any, shown: str) -> _Result:
    """Dumps of several ranks in one file: a list in order of ranks, or an object by rank."""
    unrelated = unrelated_json(parsed)
    if unrelated:
        return _Result(unrelated, set())
    is_list = isinstance(parsed, list)
    items: Iterable[tuple[Any, Any]] = enumerate(parsed) if is_list else parsed.items()
    ranks = set()
    for key, item in items:
        number = re.fullmatch(r"(?:rank[_ ]?)?(\d{1,6})", str(key))
        if is_flight_recorder(item) and number is not None:
            read_flight_recorder(evidence, item, int(number[1]), f"{shown}#{key}")
            ranks.add(int(number[1]))
    if not ranks:
        raise FileRefused(
            "JSON of an unknown kind. If it should be a Flight Recorder, py-spy, NCCL RAS or "
            "Kineto file, record it again"
        )
    return _Result("Flight Recorder", ranks)


def _read_distsim_trace(evidence: Evidence, part: _Part) -> _Result:
    from distsim.trace.jsonl import read_trace

    try:
        trace = read_trace(part.path)
    except UsageError as refusal:
        raise FileRefused(refusal.message) from None
    problem = ""
    cut = trace.header.get("cut")  # the writer was killed while it wrote
    if cut:
        problem = f"cut short: read up to line {cut['read'] + 1}, the last complete one"
    ranks = distsim_files.read_distsim_trace(evidence, trace, part.shown)
    return _Result("distsim trace", ranks, problem)


# --- pages of torch's debug server ---


def _read_debug_server_page(evidence: Evidence, part: _Part) -> _Result:
    ranks: set[int] = set()
    found: set[str] = set()
    for rank, text in parts_of_page(part.data):
        parsed = _parse_json(text.encode()) if text[:1] in ("{", "[") else None
        source = f"{part.shown}#{rank}"
        if parsed is not None and is_flight_recorder(parsed):
            read_flight_recorder(evidence, parsed, rank, source)
            found.add("Flight Recorder")
            ranks.add(rank)
            continue
        reader = LogReader(evidence, source, rank)
        reader.read(map(_shortened, text.split("\n")))
        found |= reader.found
        ranks |= reader.ranks
    kinds = ", ".join(sorted(found)) or "no stack or dump"
    return _Result(f"page of torch's debug server: {kinds}", ranks)


# --- texts ---


def _shortened(line: str) -> str:
    """The start of a line. Python refuses to read numbers of more than 4300 digits."""
    if len(line) <= _MAX_DIGITS:
        return line
    return _LONG_NUMBER.sub(lambda number: number[0][:_KEPT_DIGITS], line[:_MAX_LINE])


def _read_text(evidence: Evidence, data: bytes, rank: int | None, shown: str) -> _Result:
    text = data.decode("utf-8", "replace")
    lines = list(map(_shortened, _lines_after_restart(evidence, text.split("\n"), shown)))
    reader = LogReader(evidence, shown, rank)
    reader.read(iter(lines))
    if is_ras_text(text):
        reader.ranks.update(read_ras_text(evidence, lines, shown))
        reader.found.add("NCCL RAS report")
    if reader.found:
        # With any other rank, the lines themselves name their ranks.
        rank_of_name = rank if reader.ranks == {rank} else None
        return _Result(", ".join(sorted(reader.found)), reader.ranks, rank_of_name=rank_of_name)
    unrelated = unrelated_text(text)
    if unrelated:
        return _Result(unrelated, set())
    problem = "no torch or NCCL line, no stack and no error found"
    return _Result("text", reader.ranks, problem)


def _lines_after_restart(evidence: Evidence, lines: list[str], shown: str) -> list[str]:
    """The lines of the last start of the job, since the hang is of that one."""
    restarts = [index for index, line in enumerate(lines) if _RESTART.search(line)]
    if not restarts:
        return lines
    start = restarts[-1] + 1
    evidence.add_note(
        f"{shown} contains several starts of the job: only the last one is read, from line "
        f"{start + 1}"
    )
    return lines[start:]
