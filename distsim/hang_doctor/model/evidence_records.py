"""The records of evidence: what one rank was seen to do, by which file, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: How far a call came. ``over``: it ended, well or by a timeout, and the record does not say which
#: (Gloo).
CallState = Literal["waiting", "done", "over", "unknown"]
#: ``proved``: the records say so. ``suspected``: they fit it. ``unknown``: they can't tell.
CauseGrade = Literal["proved", "suspected", "unknown"]

UNKNOWN_NUMBER = -1
#: Counters that are larger were never written (older watchdogs print uninitialised words).
MAX_CALL_NUMBER = 1 << 48


def int_field(given: object, key: str, most: int = MAX_CALL_NUMBER) -> int:
    """The number that an object has under a key; NOWHERE where it has none, or one that is not
    below ``most``.
    """
    value = given.get(key) if isinstance(given, dict) else None
    try:
        number = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN_NUMBER
    return number if 0 <= number < most else UNKNOWN_NUMBER


class StackFrame(NamedTuple):
    """A line of a stack. ``values``: arguments and locals, as the tool printed them."""

    name: str
    file: str
    line: int
    values: Mapping[str, str] = {}

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class EvidenceCall:
    """A call of a rank. ``number`` counts a group's collectives (torch's sequence number), -1 where
    nobody said it.

    ``peer`` is the other rank of a message (a global rank), None for any or unknown. ``started``:
    the device was at it. ``batched``: it was issued together with others, as one. Sizes are
    elements per tensor; ``elements_in``/``elements_out`` their sums, -1 unknown.
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


@dataclass(slots=True)
class GroupProgress:
    """How far a rank is on a group: numbers of its last calls, -1 unknown."""

    enqueued: int = UNKNOWN_NUMBER
    completed: int = UNKNOWN_NUMBER
    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread of a rank, innermost frame first."""

    thread: str
    main: bool
    frames: tuple[StackFrame, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a rank's process ended. ``follows``: because of others, or of waiting; it names no
    culprit. ``unexplained``: it ended, and why is not said.
    """

    kind: Literal["raised", "killed", "exited"]
    text: str
    follows: bool
    frames: tuple[StackFrame, ...] = ()
    at: str = ""
    source: str = ""
    clean: bool = False
    unexplained: bool = False


@dataclass(slots=True)
class EvidenceGroup:
    """A group of ranks. ``sure``: named by what is equal in all processes (GUID, hash, members),
    not by a local number. ``alike``: other groups have its name.
    """

    key: str
    name: str
    desc: str = ""
    members: tuple[int, ...] | None = None
    sure: bool = True
    size: int = 0
    alike: bool = False

    @property
    def of_a_split(self) -> bool:
        """May other groups have its name? Torch counts groups; a mesh on bound devices, and
        split_group, count once for several.
        """
        return self.name.isdecimal() and (self.desc.startswith("mesh_") or ":split:" in self.desc)

    @property
    def shown(self) -> str:
        if not self.name:
            return "a group that the lines do not name"
        if self.desc == "default_pg" or self.name in ("0", "world"):
            return "the default group"
        desc = f" ({self.desc})" if self.desc and self.desc not in ("undefined", self.name) else ""
        return f"group {self.name}{desc}{f' with rank {min(self.members)}' if self.alike and self.members else ''}"


@dataclass(slots=True)
class RankEvidence:
    """All that is known of a rank."""

    rank: int
    calls: list[EvidenceCall] = field(default_factory=list)
    status: dict[str, GroupProgress] = field(default_factory=dict)
    stacks: list[ThreadStack] = field(default_factory=list)
    ends: list[ProcessEnd] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)
    recorded: bool = False  # a Flight Recorder dump, or something as complete, is there
    lapped: bool = False  # its ring buffer has dropped the oldest calls
    messages: bool = False  # its recording has sends and receives too
    backend: str = ""  # the library that its calls go to, as torch names it: nccl, gloo
    longest_wait_ns: int = 0  # the longest time-out of its calls


class InputFile(NamedTuple):
    """A file that was given: what it is, whose, and what could not be read of it."""

    path: str
    kind: str
    ranks: tuple[int, ...]
    problem: str = ""


class ToolReport(NamedTuple):
    """What a tool concluded itself: a desync report, a mismatch found by torch, RAS. ``ranks`` it
    names, ``text`` in short.
    """

    tool: str
    ranks: tuple[int, ...]
    text: str
    source: str


class ReportedMismatch(NamedTuple):
    """Torch's own comparison (TORCH_DISTRIBUTED_DEBUG=DETAIL): two ranks and what each called."""

    rank: int
    call: str
    other: int
    other_call: str
    source: str
