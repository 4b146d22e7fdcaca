"""The records that evidence consists of: calls, stacks, process ends, groups and input files.

Every record says which file it comes from. A value that a file does not contain is explicitly
unknown (``UNKNOWN_NUMBER``, None or an empty text). Files are usually incomplete, and the analysis
must not mistake a missing value for a value. This module draws no conclusions and knows no file
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

#: The progress of a call. ``over``: it ended, either normally or by a timeout, and the record does
#: not say which (Gloo).
CallState = Literal["waiting", "done", "over", "unknown"]
#: ``proved``: the records show it. ``suspected``: they are consistent with it. ``unknown``: they
#: cannot decide it.
CauseGrade = Literal["proved", "suspected", "unknown"]

UNKNOWN_NUMBER = -1
#: How messages name a group that the log does not identify.
UNKNOWN_GROUP: Final = "an unknown group"
#: Larger counters were never written: older watchdogs print uninitialised memory.
MAX_CALL_NUMBER = 1 << 48


def int_field(given: object, key: str, most: int = MAX_CALL_NUMBER) -> int:
    """The integer under ``key`` of a dictionary.

    UNKNOWN_NUMBER if there is none, if it is negative, or if it is not below ``most``.
    """
    value = given.get(key) if isinstance(given, dict) else None
    if type(value) is int:  # almost always, and dumps have a million of them
        return value if 0 <= value < most else UNKNOWN_NUMBER
    try:
        number = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN_NUMBER
    return number if 0 <= number < most else UNKNOWN_NUMBER


def non_negative_int(value: object, otherwise: int = 0) -> int:
    """``value`` if it is a non-negative integer of at most 62 bits and no bool."""
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    return otherwise


class StackFrame(NamedTuple):
    """A line of a stack. ``values``: arguments and local variables, as the tool printed them."""

    name: str
    file: str
    line: int
    values: Mapping[str, str] = {}

    @property
    def place(self) -> str:
        """``FILE:LINE``."""
        return f"{self.file}:{self.line}"


class EvidenceCall(NamedTuple):
    """A communication call that a rank made.

    A named tuple, because a job has a hundred thousand: a frozen dataclass takes four times as long
    to create.

    ``number`` counts the collectives of a group (torch's sequence number). ``peer`` is the global
    rank at the other end of a message; None stands for any rank, or for an unknown one.
    ``started``: the device has begun to execute it. ``batched``: it was issued as one unit with
    others. ``sizes`` are the shapes of its tensors; ``elements_in`` and ``elements_out`` their
    total element counts. ``order`` sorts the calls of one source by the time of issue.
    """

    rank: int
    group: str
    number: int
    op: str
    state: CallState
    p2p: bool = False
    peer: int | None = None
    started: bool = False
    sizes: tuple[tuple[int, ...], ...] | None = None
    elements_in: int = UNKNOWN_NUMBER
    elements_out: int = UNKNOWN_NUMBER
    dtype: str = ""
    frames: tuple[StackFrame, ...] = ()
    at_ns: int = 0
    order: int = 0
    source: str = ""
    tag: int | None = None
    batched: bool = False

    def is_collective(self, group: str, number: int) -> bool:
        """Whether this is the collective with this number on this group."""
        return self.group == group and self.number == number and not self.p2p


@dataclass(slots=True)
class GroupProgress:
    """How far a rank has come on a group: the numbers of its last calls."""

    enqueued: int = UNKNOWN_NUMBER
    completed: int = UNKNOWN_NUMBER
    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of one thread, innermost frame first."""

    thread: str
    main: bool
    frames: tuple[StackFrame, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How the process of a rank ended.

    ``follows``: the end is a consequence of another rank's end or of a wait, so it identifies no
    cause. ``unexplained``: the process ended and the record does not say why. ``seen_first``: a
    launcher saw this end before those of the other ranks. ``time_s``: the local time at which it
    was seen, in seconds. ``signal``: the number of the signal that ended it, 0 if none or unknown.
    ``pid``: the process, 0 if unknown.
    """

    kind: Literal["raised", "killed", "exited"]
    text: str
    follows: bool
    frames: tuple[StackFrame, ...] = ()
    seen_first: bool = False
    time_s: float | None = None
    signal: int = 0
    pid: int = 0
    source: str = ""
    clean: bool = False
    unexplained: bool = False


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of a live job, looked at twice.

    ``state``: the letter of ``/proc/PID/stat``, or "gone". ``wait_channel``: the kernel function in
    which it sleeps. ``moved``: the stack of its main thread changed between the looks.
    ``cpu_share``: how much of a CPU it used between them. ``native``: its innermost functions in C.
    ``is_child``: a child process of the rank, such as a worker of its DataLoader.
    """

    pid: int
    host: str
    is_child: bool
    command: str
    state: str
    wait_channel: str
    moved: bool
    cpu_share: float
    native: tuple[str, ...] = ()
    stacks: tuple[ThreadStack, ...] = ()


@dataclass(slots=True)
class EvidenceGroup:
    """A process group.

    ``sure``: its key is the same in all processes (GUID, hash, members), so calls of different
    ranks can be compared. Otherwise the key is a number local to one process. ``shares_name``:
    other groups have the same name.
    """

    key: str
    name: str
    desc: str = ""
    members: tuple[int, ...] | None = None
    sure: bool = True
    size: int = 0
    shares_name: bool = False

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks."""
        return self.desc == "default_pg" or self.name in ("0", "world")

    @property
    def may_share_name(self) -> bool:
        """Whether other groups may have the same name.

        Torch names groups by a counter. A device mesh on bound devices, and split_group, increment
        it once for several groups.
        """
        return self.name.isdecimal() and (self.desc.startswith("mesh_") or ":split:" in self.desc)

    @property
    def label(self) -> str:
        """The group as messages name it."""
        if not self.name:
            return UNKNOWN_GROUP
        if self.is_default:
            return "the default group"
        has_own_desc = self.desc not in ("", "undefined", self.name)
        desc = f' "{self.desc}"' if has_own_desc else ""
        # Groups of one name are distinguished by their lowest rank.
        members = f" with rank {min(self.members)}" if self.shares_name and self.members else ""
        return f"group {self.name}{desc}{members}"


@dataclass(slots=True)
class RankEvidence:
    """All that the files say about one rank."""

    rank: int
    calls: list[EvidenceCall] = field(default_factory=list)
    #: Progress by the key of a group.
    status: dict[str, GroupProgress] = field(default_factory=dict)
    stacks: list[ThreadStack] = field(default_factory=list)
    ends: list[ProcessEnd] = field(default_factory=list)
    #: Its process and its child processes, if the job was inspected live.
    processes: list[ProcessState] = field(default_factory=list)
    #: The files that mention the rank, in order of reading.
    sources: dict[str, None] = field(default_factory=dict)
    #: There is a Flight Recorder dump, or something equally complete.
    recorded: bool = False
    #: The ring buffer of the recording has dropped the oldest calls.
    lost_oldest_calls: bool = False
    #: The recording contains sends and receives as well.
    records_messages: bool = False
    #: The library that executes its calls, as torch names it: nccl, gloo.
    backend: str = ""
    longest_timeout_ns: int = 0
    #: When the earliest wait that a log dates began: the local time in seconds. None if unknown.
    waits_since_s: float | None = None


class InputFile(NamedTuple):
    """A file that was given: its kind, its ranks, and which part could not be read.

    ``rank_of_name``: the rank that its evidence got from the name of the file, if it did.
    """

    path: str
    kind: str
    ranks: tuple[int, ...]
    problem: str = ""
    rank_of_name: int | None = None


class ToolReport(NamedTuple):
    """A conclusion that another tool drew: torch's desync report, NCCL RAS, monitored_barrier.

    ``ranks`` are those that the tool names, ``text`` is its conclusion in short.
    """

    tool: str
    ranks: tuple[int, ...]
    text: str
    source: str


class ToolCount(NamedTuple):
    """What a tool counts on each rank: the finished calls of a kind on one communicator.

    ``size``: the number of ranks of the communicator.
    """

    tool: str
    size: int
    calls: str


class ReportedMismatch(NamedTuple):
    """Torch's own comparison (TORCH_DISTRIBUTED_DEBUG=DETAIL): two ranks and the call of each."""

    rank: int
    call: str
    other: int
    other_call: str
    source: str
