"""Exports of Nsight Systems (`nsys export --type sqlite`), as profiles of the ranks in them.

A report may contain several processes. Each process with GPU kernels is a rank, and becomes a
profile like those of PyTorch's profiler, so that streams and dependencies are found in one place,
`kineto_cuda`. NVIDIA documents the tables in the "SQLite Schema Reference" of the Nsight Systems
user guide (2021.5 and later): ``CUPTI_ACTIVITY_KIND_KERNEL``, ``_MEMCPY``, ``_MEMSET`` and
``_RUNTIME``, ``StringIds``, ``NVTX_EVENTS``, ``TARGET_INFO_SESSION_START_TIME``. Times are
nanoseconds since the start of the session. ``globalPid`` and ``globalTid`` hold the process in bits
24 to 47. Tables are created only when needed, so each of them may be missing.

NVTX ranges of NCCL name the calls; their sizes and communicators are in payloads, see
`nsight_payloads`. A kernel belongs to the calls that its thread made since its last NCCL kernel.
Other NVTX ranges mark steps (``step 3``, ``iteration_3``, ``ProfilerStep#3``) and phases.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters, is_stream
from distsim.trace.recordings.readers.kineto_file import ProfileEvent, RankProfile, steps_of
from distsim.trace.recordings.readers.nsight_payloads import NcclCall, NcclPayloads

SUFFIXES = (".sqlite", ".sqlite3")
_MAGIC = b"SQLite format 3\x00"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
#: Tables of copies -> the category and the name of their events.
_COPIES = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("gpu_memcpy", "Memcpy"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("gpu_memset", "Memset"),
}
_PROFILE_AGAIN = "profile with `nsys profile --trace=cuda,nvtx`, and export the report again"
_RANK_IN_NAME = re.compile(r"(?:rank[-_.]?|[-_.])(\d{1,6})\.sqlite3?$", re.IGNORECASE)
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*)(\d{1,18})$",
    re.IGNORECASE,
)
_VERSION = re.compile(r"_v\d+$|_ptsz(?:_v\d+)?$")
_NCCL_RANGE = re.compile(r"nccl[A-Z]\w*$")
_MAX_RANKS = 1 << 17
_MAX_TIME = 1 << 62
_LONGEST_NAME = 200
#: What a damaged database raises. Python cannot decode some messages of SQLite about it.
_DATABASE_ERRORS = (sqlite3.Error, OverflowError, UnicodeDecodeError)
#: Shorter calls of the host that launch nothing cannot be waits that matter.
_SHORTEST_WAIT_NS = 50_000


class NsightFile(NamedTuple):
    """The ranks of an export, and what is missing in it."""

    file: str
    profiles: list[RankProfile]
    notes: list[str]


def is_nsight_name(path: Path) -> bool:
    """Whether the file's name is that of an export."""
    return path.name.lower().endswith(SUFFIXES)


def is_nsight_export(path: Path) -> bool:
    """Whether a file is a database with tables of Nsight Systems."""
    try:
        # Opening a pipe waits for its writer.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with closing(_open(path)) as database:
            return "StringIds" in _columns_by_table(database)
    except (OSError, UsageError, *_DATABASE_ERRORS):
        return False


def read_nsight_file(path: Path) -> NsightFile:
    """Read one export. Raises UsageError if it is damaged, or has no GPU kernels."""
    try:
        with closing(_open(path)) as database:
            return _Export(path, database).read()
    except _DATABASE_ERRORS as error:
        raise UsageError(
            f"{path}: no readable SQLite export of Nsight Systems ({_reason(error)})",
            "export the report again with `nsys export --type sqlite`",
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "its schema is damaged"
    return escape_control_characters(str(error), one_line=True)[:_LONGEST_NAME]


def _open(path: Path) -> sqlite3.Connection:
    """The database, read-only: also views and triggers of a stranger change nothing."""
    if is_stream(path):
        raise UsageError(f"{path}: a pipe or device, which SQLite cannot read", "name a file")
    try:
        uri = path.resolve().as_uri()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", "check the file") from None
    database = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
    database.text_factory = lambda content: content.decode("utf-8", "replace")
    database.execute("PRAGMA trusted_schema = OFF")
    database.execute("PRAGMA query_only = ON")
    return database


def _columns_by_table(database: sqlite3.Connection) -> dict[str, set[str]]:
    """The names of all tables with their columns; views are no tables."""
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    names = [str(name) for (name,) in tables]
    found = {}
    for name in names:
        columns = database.execute("SELECT name FROM pragma_table_info(?)", (name,)).fetchall()
        found[name] = {str(column) for (column,) in columns}
    return found


class _Launch(NamedTuple):
    """A call of the CUDA API. ``thread``: its globalTid."""

    start: int
    end: int
    thread: int
    name: str


class _Export:
    """Collects the events of each process."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self.database = database
        self.tables = _columns_by_table(database)
        self.notes: list[str] = []
        self.events: dict[int, list[ProfileEvent]] = defaultdict(list)
        self.devices: dict[int, int] = {}
        self.texts: dict[str, str] = {}

    def read(self) -> NsightFile:
        self._check_tables()
        payloads = NcclPayloads(self.database, self.tables)
        calls = self._nccl_calls(payloads)
        launches = self._launches()
        self._add_kernels(launches, calls)
        self._add_copies()
        processes = {process for process, events in self.events.items() if events}
        if not processes:
            raise UsageError(
                f"{self.path}: this Nsight Systems export contains no GPU kernels", _PROFILE_AGAIN
            )
        self._add_launches(launches, processes)
        self._add_ranges(processes)
        self._note_missing(payloads, launches)
        ranks = self._ranks(payloads, processes)
        base = self._session_start()
        profiles = [
            self._profile(process, ranks[process], payloads.world_size(process), base)
            for process in sorted(processes, key=ranks.__getitem__)
        ]
        return NsightFile(str(self.path), profiles, self.notes)

    def _check_tables(self) -> None:
        if "StringIds" not in self.tables:
            raise UsageError(
                f"{self.path}: SQLite database, but no export of Nsight Systems (it has no table "
                "StringIds)",
                "give the file that `nsys export --type sqlite` writes",
            )
        needed = {"start", "end", "streamId", "correlationId", "globalPid"}
        missing = sorted(needed - self.tables.get(_KERNELS, set()))
        if len(missing) == len(needed):
            raise UsageError(
                f"{self.path}: Nsight Systems export without GPU kernels (table {_KERNELS})",
                _PROFILE_AGAIN,
            )
        if missing:
            raise UsageError(
                f"{self.path}: table {_KERNELS} of this Nsight Systems export has no column "
                f"{', '.join(missing)}",
                "export the report with a newer version of Nsight Systems",
            )

    # --- rows ---

    def _rows(self, table: str, *columns: str, where: str = "") -> Iterator[tuple[Any, ...]]:
        """The rows of a table by start. Columns that the table lacks are None.

        A name ends with ``Id`` in ``(columnId)``: the text of that number in StringIds.
        """
        known = self.tables.get(table)
        if known is None:
            return iter(())
        selected = []
        for column in columns:
            if column.startswith("("):
                name = column.strip("()")
                text = f"(SELECT value FROM StringIds WHERE StringIds.id = t.{name})"
                selected.append(text if name in known else "NULL")
            else:
                selected.append(f't."{column}"' if column in known else "NULL")
        query = f'SELECT {", ".join(selected)} FROM "{table}" AS t {where} ORDER BY t.start'
        return iter(self.database.execute(query))

    def _times(self, start: object, end: object) -> tuple[int, int] | None:
        """Start and end in nanoseconds; None for values that are no times."""
        if not isinstance(start, int) or not isinstance(end, int):
            return None
        if not 0 <= start < _MAX_TIME or not 0 <= end < _MAX_TIME:
            return None
        return start, max(start, end)

    def _shared(self, text: object) -> str:
        shown = escape_control_characters(str(text or "")[:_LONGEST_NAME], one_line=True)
        return self.texts.setdefault(shown, shown)

    # --- the device ---

    def _launches(self) -> dict[tuple[int, int], _Launch]:
        """(process, correlation) -> the call."""
        found = {}
        columns = ("start", "end", "correlationId", "globalTid", "(nameId)")
        for start, end, correlation, thread, name in self._rows(_CALLS, *columns):
            times = self._times(start, end)
            if times is None or not isinstance(thread, int) or not isinstance(correlation, int):
                continue
            # Names end with the version of the API: cudaLaunchKernel_v7000.
            short = self._shared(_VERSION.sub("", str(name or "")))
            found[process_of(thread), correlation] = _Launch(*times, thread, short)
        return found

    def _add_kernels(
        self,
        launches: Mapping[tuple[int, int], _Launch],
        calls: dict[int, list[NcclCall]],
    ) -> None:
        names = "(demangledName)" if "demangledName" in self.tables[_KERNELS] else "(shortName)"
        columns = ("start", "end", "streamId", "correlationId", "globalPid", "deviceId", names)
        rows = []
        for start, end, stream, correlation, pid, device, name in self._rows(_KERNELS, *columns):
            times = self._times(start, end)
            if times is None or not isinstance(pid, int):
                continue
            process = process_of(pid)
            self.devices.setdefault(process, device if isinstance(device, int) else 0)
            launch = launches.get((process, correlation))
            rows.append((launch.start if launch else times[0], process, launch, times,
                         stream, correlation, self._shared(name)))  # fmt: skip
        # Calls are handed out in the order of launches, not in that of the kernels.
        rows.sort(key=lambda row: row[0])
        for _, process, launch, (start, end), stream, correlation, name in rows:
            args: dict[str, Any] = {"correlation": correlation, "stream": stream}
            if name.startswith("nccl") and launch is not None:
                args |= _call_arguments(_taken(calls.get(launch.thread, []), launch.end))
            event = ProfileEvent(name, "kernel", str(stream), start, end, args)
            self.events[process].append(event)

    def _add_copies(self) -> None:
        columns = ("start", "end", "streamId", "correlationId", "globalPid")
        for table, (category, name) in _COPIES.items():
            for start, end, stream, correlation, pid in self._rows(table, *columns):
                times = self._times(start, end)
                if times is not None and isinstance(pid, int):
                    args = {"correlation": correlation, "stream": stream}
                    event = ProfileEvent(name, category, str(stream), *times, args)
                    self.events[process_of(pid)].append(event)

    # --- the host ---

    def _add_launches(
        self, launches: Mapping[tuple[int, int], _Launch], processes: set[int]
    ) -> None:
        used = {
            (process, event.args.get("correlation"))
            for process in processes
            for event in self.events[process]
        }
        for (process, correlation), call in launches.items():
            if process not in processes:
                continue
            is_wait = call.end - call.start >= _SHORTEST_WAIT_NS
            if is_wait or (process, correlation) in used or "WaitEvent" in call.name:
                args = {"correlation": correlation}
                event = ProfileEvent(
                    call.name, "cuda_runtime", str(call.thread), call.start, call.end, args
                )
                self.events[process].append(event)

    def _nccl_calls(self, payloads: NcclPayloads) -> dict[int, list[NcclCall]]:
        """By thread, the NCCL calls of the host, in reverse order."""
        found: dict[int, list[NcclCall]] = defaultdict(list)
        for start, end, thread, name, payload in self._range_rows():
            times = self._times(start, end)
            if times is None or not isinstance(thread, int) or not _NCCL_RANGE.match(name):
                continue
            call = payloads.call(process_of(thread), name, times, payload)
            if call is not None:
                found[thread].append(call)
        for of_thread in found.values():
            of_thread.reverse()
        return found

    def _range_rows(self) -> Iterator[tuple[Any, Any, Any, str, Any]]:
        columns = ("start", "end", "globalTid", "text", "(textId)", "binaryData")
        for start, end, thread, text, shared, payload in self._rows("NVTX_EVENTS", *columns):
            yield start, end, thread, self._shared(text or shared), payload

    def _add_ranges(self, processes: set[int]) -> None:
        """NVTX ranges as annotations; those of NCCL as calls."""
        for start, end, thread, name, _ in self._range_rows():
            times = self._times(start, end)
            if times is None or not isinstance(thread, int) or not name:
                continue
            process = process_of(thread)
            if process not in processes:
                continue
            step = _STEP.match(name)
            shown = f"ProfilerStep#{step[1]}" if step else name
            args: dict[str, Any] = {}
            if _NCCL_RANGE.match(name):
                shown, args = "record_param_comms", {"Collective name": name}
            event = ProfileEvent(shown, "user_annotation", str(thread), *times, args)
            self.events[process].append(event)

    # --- which rank ---

    def _ranks(self, payloads: NcclPayloads, processes: set[int]) -> dict[int, int]:
        """Process -> rank: from NCCL, from the name of the file, or in the order of devices."""
        known = {process: payloads.rank(process) for process in processes}
        ranks = {process: rank for process, rank in known.items() if rank is not None}
        if len(ranks) == len(processes) and len(set(ranks.values())) == len(ranks):
            return ranks
        if len(processes) == 1:
            match = _RANK_IN_NAME.search(self.path.name)
            if match is None or int(match[1]) >= _MAX_RANKS:
                raise UsageError(
                    f"{self.path}: Nsight Systems export of one process, without its rank",
                    "name the file rank<N>.sqlite, or profile from the start of NCCL on",
                )
            return dict.fromkeys(processes, int(match[1]))
        ordered = sorted(processes, key=lambda process: (self.devices[process], process))
        self.notes.append(
            f"{self.path} does not name ranks: processes are numbered in the order of their GPUs"
        )
        return {process: rank for rank, process in enumerate(ordered)}

    def _session_start(self) -> int:
        table = "TARGET_INFO_SESSION_START_TIME"
        if "utcEpochNs" not in self.tables.get(table, set()):
            return 0
        row = self.database.execute(f"SELECT utcEpochNs FROM {table}").fetchone()
        value = row[0] if row else 0
        return value if isinstance(value, int) and 0 <= value < _MAX_TIME else 0

    def _note_missing(
        self, payloads: NcclPayloads, launches: Mapping[tuple[int, int], _Launch]
    ) -> None:
        if not launches:
            self.notes.append(
                f"{self.path} contains no calls of the CUDA API, so launches are unknown"
            )
        if not payloads.call_count:
            self.notes.append(
                f"{self.path} contains no NVTX ranges of NCCL, so sizes and communicators are "
                "unknown: its kernels match by stream and order"
            )
        elif payloads.call_count > payloads.sized_count:
            self.notes.append(
                f"{self.path}: {payloads.call_count - payloads.sized_count} of "
                f"{payloads.call_count} NCCL calls have no readable payload, so their sizes are "
                "unknown"
            )

    def _profile(self, process: int, rank: int, world: int, base: int) -> RankProfile:
        events = sorted(self.events[process], key=lambda event: (event.start, -event.end))
        return RankProfile(str(self.path), rank, world, "nccl", {}, base, events, steps_of(events))


def process_of(global_id: int) -> int:
    """The process in a globalPid or globalTid."""
    return global_id >> 24 & 0xFFFFFF


def _taken(waiting: list[NcclCall], until: int) -> list[NcclCall]:
    """Remove and return the calls that started until a launch; ``waiting`` is in reverse order."""
    taken = []
    while waiting and waiting[-1].start <= until:
        taken.append(waiting.pop())
    return taken


def _call_arguments(calls: list[NcclCall]) -> dict[str, Any]:
    """The arguments that a kernel of these calls has in a profile of PyTorch."""
    if not calls:
        return {}
    args: dict[str, Any] = {"In msg nelems": sum(call.nbytes for call in calls), "dtype": "Byte"}
    if calls[0].communicator:
        args["Process Group Name"] = calls[0].communicator
    if len(calls) == 1 and calls[0].operation in ("send", "recv"):
        args["Collective name"] = calls[0].operation
        side = "Dst Rank" if calls[0].operation == "send" else "Src Rank"
        args[side] = calls[0].peer
    return args
