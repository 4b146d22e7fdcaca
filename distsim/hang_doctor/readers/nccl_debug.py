"""NCCL's own lines: communicators and calls of NCCL_DEBUG=INFO (subsystem COLL), and warnings.

A line names the process and the address of a communicator, but neither the rank nor the group.
Lines at the creation of a communicator connect them: its id is the same in all processes, and the
rank in the largest communicator is taken for the global rank. As these lines may come from several
interleaved processes, the calls are assigned only at the end of the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import UNKNOWN_NUMBER, EvidenceCall
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family

_LINE_HEAD = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<dev>\d+)\] "
    r"(?:[\w/.]+:\d+ (?:\(\w+\) )?)?NCCL (?P<level>INFO|WARN) (?P<text>.*)$"
)
#: NCCL's error where two ranks exchange connection data that do not belong together
#: (`bootstrap.cc`, `socket.cc`; seen with 2.28.9 and 2.32.3 where the first messages of two ranks
#: did not mirror each other).
CONNECTION_MISMATCH = re.compile(
    r"Message truncated : received \d+ bytes instead of \d+"
    r"|connecting to address\s+with family \d+ is neither"
)
_COMM_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<size>\d+)"
    r"(?:.*?commId (?P<id>0x[0-9a-f]+))?"
)
_OPERATION = re.compile(
    r"^(?P<op>[A-Z]\w+): opCount (?P<number>[0-9a-f]+) .*?count (?P<count>\d+) "
    r"datatype (?P<type>\d+) op (?P<redop>\d+) root (?P<root>\d+) "
    r"comm (?P<comm>0x[0-9a-f]+)(?: \[nranks=(?P<size>\d+)\])?"
)
#: ncclDataType_t of nccl.h.
_NCCL_DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)
_FOUND = "NCCL_DEBUG lines"
#: No more warnings are noted once there are this many notes.
_MAX_NOTES = 40
_MAX_WARNING_LENGTH = 160


class _Process(NamedTuple):
    host: str
    pid: str


class _CommunicatorHandle(NamedTuple):
    """A communicator as one process knows it: by its address."""

    process: _Process
    address: str


class _Communicator(NamedTuple):
    """``id`` is the same in all processes; empty where the line was cut before it."""

    rank: int
    size: int
    id: str


class _LoggedCall(NamedTuple):
    """A call whose communicator may not be known yet. ``rank``: by the prefix of its line."""

    handle: _CommunicatorHandle
    match: re.Match[str]
    rank: int | None
    order: int


class NcclDebugReader:
    """Takes lines one by one; ``done`` enters the calls.

    ``ranks`` is a set of the caller, to which the ranks found here are added.
    """

    def __init__(self, evidence: Evidence, source: str, ranks: set[int]) -> None:
        self.evidence = evidence
        self.source = source
        self.ranks = ranks
        self.found: set[str] = set()
        self._communicators: dict[_CommunicatorHandle, _Communicator] = {}
        self._calls: list[_LoggedCall] = []
        self._order = 0

    def take(self, line: str, rank: int | None) -> bool:
        """Whether NCCL has written the line. ``rank``: by its prefix or its file."""
        head = _LINE_HEAD.search(line)
        if head is None:
            return False
        self._order += 1
        process = _Process(head["host"], head["pid"])
        text = head["text"]
        init = _COMM_INIT.search(text)
        if init is not None and ("Init" in text or "init" in text):
            self._add_communicator(process, init)
        call = _OPERATION.match(text)
        if call is not None:
            handle = _CommunicatorHandle(process, call["comm"])
            self._calls.append(_LoggedCall(handle, call, rank, self._order))
        elif head["level"] == "WARN":
            self._note_warning(text, rank)
        return True

    def _add_communicator(self, process: _Process, init: re.Match[str]) -> None:
        rank, size = int(init["rank"]), int(init["size"])
        if rank < MAX_RANKS and size <= MAX_RANKS:
            handle = _CommunicatorHandle(process, init["comm"])
            self._communicators[handle] = _Communicator(rank, size, init["id"] or "")
            self.found.add(_FOUND)

    def _note_warning(self, text: str, rank: int | None) -> None:
        subject = f"rank {rank}: " if rank is not None else ""
        if len(self.evidence.notes) < _MAX_NOTES:
            self.evidence.add_note(f"{subject}NCCL warning: {text[:_MAX_WARNING_LENGTH]}")

    def done(self) -> None:
        """Enter all calls, now that every communicator is known."""
        ranks = self._global_ranks()
        keys = self._group_keys(ranks)
        for rank in ranks.values():
            self.ranks.add(rank)
            self.evidence.records_of(rank, self.source)
        for call in self._calls:
            key = keys.get(call.handle) or self._key_of_unknown_communicator(call)
            rank_of_call = ranks.get(call.handle.process, call.rank)
            if rank_of_call is not None and rank_of_call < MAX_RANKS:
                self._add_call(rank_of_call, key, call)
            if operation_family(call.match["op"]) in P2P_OPS:
                self._distrust_counters(key)

    def _global_ranks(self) -> dict[_Process, int]:
        """The rank of each process in the largest communicator."""
        world = max((comm.size for comm in self._communicators.values()), default=0)
        return {
            handle.process: comm.rank
            for handle, comm in self._communicators.items()
            if comm.size == world
        }

    def _group_keys(self, ranks: dict[_Process, int]) -> dict[_CommunicatorHandle, str]:
        """The group of each communicator."""
        members: dict[str, set[int]] = {}
        for handle, comm in self._communicators.items():
            if comm.id and handle.process in ranks:
                members.setdefault(comm.id, set()).add(ranks[handle.process])
        return {
            handle: self._group_key(comm, members.get(comm.id, set()))
            for handle, comm in self._communicators.items()
        }

    def _group_key(self, comm: _Communicator, members: set[int]) -> str:
        """A communicator without an id is identified by its size, if it is the only one."""
        if comm.id:
            all_members = tuple(sorted(members)) if len(members) == comm.size else None
            return self.evidence.add_group(f"comm {comm.id}", "", all_members, True, comm.size)
        kinds = {(other.size, other.id) for other in self._communicators.values()}
        is_only = len(kinds) == 1
        all_members = tuple(range(comm.size)) if is_only else None
        return self.evidence.add_group(f"comm of {comm.size}", "", all_members, is_only, comm.size)

    def _key_of_unknown_communicator(self, call: _LoggedCall) -> str:
        size = int(call.match["size"] or 0)
        return self.evidence.add_group(f"comm of {size}" if size else "", "", None, False, size)

    def _add_call(self, rank: int, key: str, call: _LoggedCall) -> None:
        self.found.add(_FOUND)
        self.ranks.add(rank)
        number = int(call.match["number"], 16)
        op = operation_family(call.match["op"])
        self.evidence.add_call(
            EvidenceCall(
                rank,
                key,
                number,
                op,
                "unknown",
                p2p=op in P2P_OPS,
                elements_in=int(call.match["count"]),
                dtype=_dtype_name(int(call.match["type"])),
                order=call.order,
                source=self.source,
            )
        )
        if op not in P2P_OPS:
            self.evidence.add_progress(rank, key, number, UNKNOWN_NUMBER, self.source)

    def _distrust_counters(self, key: str) -> None:
        """A communicator that carries messages counts them too, a different number on each rank."""
        group = self.evidence.groups[key]
        if not group.sure:
            return
        group.sure = False
        self.evidence.add_note(
            f"{group.label} carries messages, and their number differs between ranks, so its "
            "operation counts do not show which rank is behind"
        )


def _dtype_name(number: int) -> str:
    return _NCCL_DTYPES[number] if number < len(_NCCL_DTYPES) else str(number)
