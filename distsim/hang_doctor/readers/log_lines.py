"""Lines that people paste: torch's watchdog, desync report and mismatch, Gloo, torchrun,
tracebacks, NCCL's own; with any prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    MAX_CALL_NUMBER,
    UNKNOWN_NUMBER,
    EvidenceCall,
    ProcessEnd,
    ReportedMismatch,
    StackFrame,
    ToolReport,
)
from distsim.hang_doctor.model.operation_names import operation_family
from distsim.hang_doctor.readers.nccl_debug import CONNECTION_MISMATCH, NcclDebugReader
from distsim.hang_doctor.readers.stacks import StackReader

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[(?:36|0|31|32|33|1)m")
#: What launchers put before a line, taken off one after the other.
_PREFIXES = (
    re.compile(
        r"^\[\d+,(?P<rank>\d{1,7})\]<(?:stderr|stdout|stddiag)>:?\s?"
    ),  # mpirun --tag-output
    re.compile(
        r"^\[rank(?P<rank>\d{1,7})\]:?(?=[\s\[])(?: (?=\s*(?:File|Traceback|\w|\()))?"
    ),  # torch
    re.compile(r"^\s{0,4}(?P<weak>\d{1,7}): "),  # srun --label
    re.compile(r"^\[\w+?(?P<weak>\d{1,5})\]:\s?(?!\[?[EWIF]\d)"),  # torchrun --tee: [default3]:
    re.compile(r"^\[pod/[^\]]*\]\s"),  # kubectl logs --prefix
    re.compile(
        r"^\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)\s(?:std(?:err|out) [FP] )?"
    ),  # container logs, kubectl --timestamps
    re.compile(r"^\((?:\w+ )?(?:[\w.]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?"),  # Ray
    re.compile(
        r"^[\w.-]*(?:worker|master|launcher|rank|node|pod)[\w.-]*(?: [\w.-]+)? (?=\[rank|\[E|Traceback|  File)"
    ),  # stern, pdsh
    re.compile(r"^\[\d+\] (?=\[)"),  # the line numbers of a paste
)
_LABEL = re.compile(r"\[rank(\d{1,7})\]")
_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d+) PG )?(?P<guid>GUID )?(?P<name>[^\s()\]]+)\s?(?:\((?P<desc>[^)]*)\))?\s?Rank (?P<rank>\d{1,7})\]"
)
_OWN_RANK = re.compile(r"\[Rank (\d{1,7})\]")
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<number>\d+)|\.\.\.),\s*OpType=(?P<op>\w+)(?:,\s*NumelIn=(?P<in>\d+))?(?:,\s*NumelOut=(?P<out>\d+))?"
)
_LAST_WORK = re.compile(
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+)(?: \(\w*\))?,? *(?:last started(?: NCCL)? work: -?\d+(?: \(\w*\))?,? *)?"
    r"last completed(?: NCCL)? work: (?P<completed>-?\d+)",
    re.IGNORECASE,
)
_TIMED_OUT_WORK = re.compile(
    r"(?:watchdog at work(?: sequence id)?|Timeout at NCCL work):? (\d+)", re.IGNORECASE
)
_FINGERPRINT = re.compile(
    r"CollectiveFingerPrint\((?:SequenceNumber=(\d+),?\s*)?OpType=(\w+)(?:,\s*TensorShape=\[([^\]]*)\])?"
)
_FINGERPRINT_RANK = re.compile(r"Rank (\d+) is running(?: inconsistent)? collective:")
_MONITORED = re.compile(
    r"\[Rank \d+\]: Rank(?:s)? ([\d, ]+) failed to pass monitoredBarrier|Rank(?:s)? ([\d, ]+) failed to pass monitoredBarrier"
)
_LAGGING = re.compile(
    r"\[([\d, ]+)\] (finished collective #(\d+), but didn't join collective #\d+|joined but didn't finish collective #(\d+))"
)
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks that caused this timeout")
_ROOT_CAUSE = re.compile(r"^Root Cause \(first observed failure\):")
_ROOT_CAUSE_FIELD = re.compile(r"^\s*(rank|exitcode|time|traceback)\s*: (.*)$")
_TRACE_HEAD = re.compile(r"^\s*Traceback \(most recent call last\):\s*$")
#: What stands before a traceback that ends no process.
_HARMLESS_TRACEBACK = re.compile(
    r"^\s*(Exception ignored (?:in|on)|--- Logging error ---|Exception in thread |Error in atexit)"
)
_TRACE_FILE = re.compile(r'^\s+File "(.*?)", line (\d+), in (.*)$')
_ERROR = re.compile(
    r"^((?:\w+\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning)\b)(?::\s?(.*))?$"
)
#: Lines after "Stack trace of the failed collective:", innermost first.
_FAILED_FRAME = re.compile(r"^#\d+ (\S+) from (\S+):(\d+)\s*$")
#: Texts of errors that follow from waiting, or from another rank's end.
CONSEQUENCE_TEXTS = (
    "Watchdog caught collective operation timeout",
    "Timed out waiting",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Wait timeout",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited",
    "monitoredBarrier",
    "recv, 0 bytes",
    "Read error",
    "store->get",
    "wait timeout after",
    "ProcessGroupNCCL's watchdog",
    "collective timeout",
    "Detected mismatch between collectives",
    "SIGTERM",
    "SignalException",
    "ChildFailedError",
    "DistNetworkError",
    "Process group watchdog thread terminated",
    "KeyboardInterrupt",
    "NCCL timeout",
    "BrokenPipeError",
    "DistStoreError",
    "Stop_waiting response",
    "ConnectionResetError",
    "Resource temporarily",
)


@dataclass
class _PythonTraceback:
    """A Python traceback that is being read, by the rank whose lines it has."""

    frames: list[StackFrame] = field(default_factory=list)
    harmless: bool = False


@dataclass
class LogReader:
    """Reads the lines of one file. ``rank``: whose file it is, by its name; None where many write
    to it.
    """

    evidence: Evidence
    source: str
    rank: int | None = None
    found: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stacks = StackReader(self.source)
        self._section: int | None = None
        self._traces: dict[int | None, _PythonTraceback] = {}
        self._root: dict[str, str] | None = None
        self._nccl = NcclDebugReader(self.evidence, self.source, self.ranks)
        self._order = 0
        self._works: dict[tuple[int, int], tuple[str, str]] = {}

    def read(self, lines: Iterator[str]) -> None:
        pending = ""
        for raw in lines:
            line = pending + _ESCAPE.sub("", raw.rstrip("\r\n"))
            pending = ""
            if (
                "WorkNCCL(" in line
                and ")" not in line.split("WorkNCCL(", 1)[1]
                and len(line) < 2000
            ):
                pending = line.rstrip()  # wrapped by a terminal
                continue
            if line.endswith("collective operation timeout:"):
                pending = f"{line} "
                continue
            self._line(line)
        if pending:
            self._line(pending)
        self._stack(self._stacks.close())
        self._root_done()
        self._nccl.done()
        self.found |= self._nccl.found

    def _line(self, line: str) -> None:
        rank, weak, plain = split_prefix(line)
        told = (
            rank if rank is not None else self._section if self._section is not None else self.rank
        )
        self._order += 1
        taken, ended = self._stacks.take(plain)
        self._stack(ended)
        if taken:
            self._owner = told if told is not None else weak
            return
        section = re.match(
            r"^\W*rank\W{0,3}(\d{1,7})\W*(?:(?:stack|dump|py-?spy|pid|https?:|unix).*)?$",
            plain,
            re.IGNORECASE,
        )
        if section is not None and int(section[1]) < MAX_RANKS:
            self._section = int(section[1])
            return
        failed = _FAILED_FRAME.match(plain)
        if failed is not None and self._last_work is not None:
            self._frame_of_failed(StackFrame(failed[1], failed[2], int(failed[3])))
            return
        if (exchanged := CONNECTION_MISMATCH.search(plain)) is not None:
            self._say("NCCL", "" if told is None else str(told), exchanged[0])
        if "NCCL" in plain:
            self._torch(line, rank, weak)
            if self._nccl.take(plain, told if told is not None else weak):
                return
        self._reports(plain)
        self._elastic(plain)
        self._traceback(plain, told if told is not None else weak)

    _owner: int | None = None
    _last_work: tuple[int, int] | None = None

    def _frame_of_failed(self, frame: StackFrame) -> None:
        """A frame of the stack that the watchdog prints for the call that timed out."""
        assert self._last_work is not None
        rank, number = self._last_work
        calls = self.evidence.ranks[rank].calls
        for at, call in enumerate(calls):
            if call.number == number and call.source == self.source and not call.p2p:
                calls[at] = replace(call, frames=(*call.frames, frame))
                return

    def _stack(self, stack: object) -> None:
        from distsim.hang_doctor.model.evidence_records import ThreadStack

        if not isinstance(stack, ThreadStack):
            return
        rank = self._owner if self._owner is not None else self._stacks.command_rank
        self.found.add("stacks")
        if rank is not None and rank < MAX_RANKS:
            self.ranks.add(rank)
            self.evidence.add_stack(rank, stack)
        else:
            self.evidence.add_stack(None, stack)

    # --- torch's watchdog ---

    def _torch(self, line: str, rank: int | None, weak: int | None) -> None:
        work, last = _WORK.search(line), _LAST_WORK.search(line)
        if work is None and last is None:
            if "watchdog got stuck" in line and rank is not None:
                self.evidence.add_note(
                    f"rank {rank}'s watchdog thread made no progress: a CUDA call or the GIL holds it"
                )
            return
        group = _GROUP.search(line)
        own = _OWN_RANK.search(line)
        label = rank if rank is not None else int(m[1]) if (m := _LABEL.search(line)) else None
        inner = int(group["rank"]) if group else int(own[1]) if own else None
        default = group is not None and (
            group["desc"] == "default_pg" or bool(group["guid"] and group["name"] == "0")
        )
        who = (
            label
            if label is not None
            else inner
            if inner is not None
            else weak
            if weak is not None
            else self.rank
        )
        if who is None or who >= MAX_RANKS:
            self.evidence.add_note("lines of a watchdog name no rank")
            return
        self.found.add("watchdog lines")
        self.ranks.add(who)
        self.evidence.records_of(who, self.source).backend = "nccl"
        if work is not None:
            self._works[who, _work_number(work)] = (operation_family(work["op"]), "")
            self._last_work = (who, _work_number(work))
        sure = bool(group and (group["guid"] or group["desc"] == "default_pg")) and (
            label is not None or default
        )
        key = self._group(group, sure)
        if last is not None:
            self._status(line, who, key, last)
        if work is not None:
            self._work(who, key, work)

    def _group(self, group: re.Match[str] | None, sure: bool) -> str:
        if group is None:
            return ""
        name = group["name"] if group["guid"] or group["desc"] else f"PG {group['name']}"
        return self.evidence.add_group(name, group["desc"] or "", None, sure)

    def _status(self, line: str, who: int, key: str, last: re.Match[str]) -> None:
        enqueued, completed = int(last["enqueued"]), int(last["completed"])
        if enqueued < 0:
            self.evidence.add_note(f"rank {who} had enqueued no collective on {self._shown(key)}")
        if 0 <= enqueued == completed and "from this local rank" in line:
            self.evidence.add_note(
                f"rank {who} ran out of time on another group: on {self._shown(key)} it has finished all {completed} calls"
            )
        if 0 <= enqueued < completed < MAX_CALL_NUMBER and key:
            self.evidence.groups_counting_messages.add(key)
        key = key or self.evidence.add_group("", sure=False)
        self.evidence.add_progress(who, key, enqueued, completed, self.source)
        at = _TIMED_OUT_WORK.search(line)
        number = int(at[1]) if at else None
        known = self._works.pop((who, number), None) if number is not None else None
        if number is not None and known is not None:
            self._rename(who, number, key)

    def _shown(self, key: str) -> str:
        return self.evidence.groups[key].label if key else "its group"

    def _rename(self, who: int, number: int, key: str) -> None:
        """The call of the line before, which named no group, is this group's."""
        calls = self.evidence.ranks[who].calls
        for at, call in enumerate(calls):
            if call.group == "" and call.number == number and call.source == self.source:
                calls[at] = replace(call, group=key)
                if key and (call.p2p or (call.op == "coalesced" and call.elements_in < 0)):
                    self.evidence.groups_counting_messages.add(key)

    def _work(self, who: int, key: str, work: re.Match[str]) -> None:
        key = key or self.evidence.add_group("", sure=False)
        op = operation_family(work["op"])
        sizes = _elements(work["in"]), _elements(work["out"])
        self.evidence.add_call(
            EvidenceCall(
                who,
                key,
                _work_number(work),
                op,
                "waiting",
                op in ("send", "recv"),
                None,
                True,
                None,
                *sizes,
                order=self._order,
                source=self.source,
            )
        )

    # --- what tools concluded ---

    def _reports(self, line: str) -> None:
        lagging, never, passed = (
            _LAGGING.search(line),
            _NEVER_JOINED.search(line),
            _MONITORED.search(line),
        )
        if lagging is not None:
            self._say("torch's desync report", lagging[1], lagging[2])
        if never is not None:
            self._say("torch's desync report", never[1], "never joined any collective")
        if passed is not None:
            self._say("monitored_barrier", passed[1] or passed[2], "did not come to it")
        ranks = [int(r) for r in _FINGERPRINT_RANK.findall(line)][:2]
        prints = _FINGERPRINT.findall(line)[:2]
        if len(ranks) == 2 and len(prints) == 2:
            self.found.add("a mismatch found by torch")
            self.ranks |= set(ranks)
            (a, b), (x, y) = (
                ranks,
                [
                    f"{operation_family(op)}{f' of [{shape}]' if shape else ''}"
                    for _, op, shape in prints
                ],
            )
            known = ReportedMismatch(a, x, b, y, self.source)
            if known not in self.evidence.reported_mismatches:
                self.evidence.reported_mismatches.append(known)

    def _say(self, tool: str, ranks: str, text: str) -> None:
        self.found.add(tool)
        named = tuple(sorted({int(r) for r in re.findall(r"\d{1,7}", ranks)}))
        said = ToolReport(tool, named, text, self.source)
        if said not in self.evidence.tool_reports:
            self.evidence.tool_reports.append(said)

    # --- ends ---

    def _elastic(self, line: str) -> None:
        """torchrun's summary: which process it saw fail first, and how."""
        if _ROOT_CAUSE.match(line.strip()):
            self._root_done()
            self._root = {}
            return
        field_ = _ROOT_CAUSE_FIELD.match(line) if self._root is not None else None
        if field_ is not None and self._root is not None:
            self._root.setdefault(field_[1], field_[2])
            if field_[1] == "traceback":
                self._root_done()

    def _root_done(self) -> None:
        root, self._root = self._root, None
        rank = re.match(r"(\d{1,7})", root.get("rank", "")) if root else None
        code = re.match(r"(-?\d+)", root.get("exitcode", "")) if root else None
        if root is None or rank is None or code is None or int(rank[1]) >= MAX_RANKS:
            return
        number = int(code[1])
        self.found.add("torchrun's summary")
        self.ranks.add(int(rank[1]))
        text = f"ended first of all by torchrun's count, {f'by signal {-number}' if number < 0 else f'with exit status {number}'}"
        self.evidence.add_end(
            int(rank[1]),
            ProcessEnd(
                "killed" if number < 0 else "raised",
                text,
                number in (-6, -15, -2),
                at=root.get("time", ""),
                source=self.source,
                unexplained=number >= 0,
            ),
        )

    def _traceback(self, line: str, rank: int | None) -> None:
        if _HARMLESS_TRACEBACK.match(line):
            self._traces[rank] = _PythonTraceback(harmless=True)
            return
        if _TRACE_HEAD.match(line):
            before = self._traces.get(rank)
            self._traces[rank] = _PythonTraceback(
                harmless=before is not None and before.harmless and not before.frames
            )
            return
        trace = self._traces.get(rank)
        if trace is None:
            return
        file = _TRACE_FILE.match(line)
        if file is not None:
            trace.frames.append(StackFrame(file[3], file[1], int(file[2])))
            return
        error = _ERROR.match(line.strip()) if line[:1] not in (" ", "\t") else None
        if error is not None and trace.frames:
            del self._traces[rank]
            if trace.harmless:
                where = "a process" if rank is None else f"rank {rank}"
                self.evidence.add_note(
                    f"{where} raised {line.strip()[:160]} where it ends a thread at most, and no process"
                )
            else:
                self._raised(rank, line.strip(), trace)

    def _raised(self, rank: int | None, text: str, trace: _PythonTraceback) -> None:
        if rank is None or rank >= MAX_RANKS:
            if not any(word in text for word in CONSEQUENCE_TEXTS):
                self.evidence.add_note(
                    f"a process raised {text[:160]}, and its lines do not say which rank it was"
                )
            return
        self.found.add("tracebacks")
        self.ranks.add(rank)
        follows = any(word in text for word in CONSEQUENCE_TEXTS)
        self.evidence.add_end(
            rank,
            ProcessEnd(
                "raised", text[:300], follows, tuple(reversed(trace.frames)), source=self.source
            ),
        )


def _elements(text: str | None) -> int:
    """A count of elements, -1 unknown: of a batch torch prints a word that nobody has written."""
    return int(text) if text and int(text) < MAX_CALL_NUMBER else UNKNOWN_NUMBER


def _work_number(work: re.Match[str]) -> int:
    """The call's number, -1 where whoever pasted it left it out."""
    return int(work["number"]) if work["number"] else -1


def split_prefix(line: str) -> tuple[int | None, int | None, str]:
    """(the rank that a launcher or torch put before the line, a number that may be one, the line
    without prefixes)
    """
    rank: int | None = None
    weak: int | None = None
    for _ in range(4):
        for pattern in _PREFIXES:
            match = pattern.match(line)
            if match is None:
                continue
            groups = match.groupdict()
            rank = int(groups["rank"]) if rank is None and groups.get("rank") else rank
            weak = int(groups["weak"]) if weak is None and groups.get("weak") else weak
            line = line[match.end() :]
            break
        else:
            break
    return (rank if rank is None or rank < MAX_RANKS else None), weak, line
