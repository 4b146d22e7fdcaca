"""NCCL's own lines: collective calls of NCCL_DEBUG=INFO with the subsystem COLL, and the text
report of its RAS subsystem.
"""

from __future__ import annotations

import re

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import EvidenceCall, ToolReport
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family

_LINE_HEAD = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<dev>\d+)\] (?:[\w/.]+:\d+ (?:\(\w+\) )?)?NCCL (?P<level>INFO|WARN) (?P<text>.*)$"
)
#: What NCCL says where two ranks exchange connection data that do not belong together
#: (`bootstrap.cc`, `socket.cc`; seen with 2.28.9 and 2.32.3 where the first messages of two ranks
#: did not mirror each other).
CONNECTION_MISMATCH = re.compile(
    r"Message truncated : received \d+ bytes instead of \d+|connecting to address\s+with family \d+ is neither"
)
_COMM_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<size>\d+)(?:.*?commId (?P<id>0x[0-9a-f]+))?"
)
_OPERATION = re.compile(
    r"^(?P<op>[A-Z]\w+): opCount (?P<number>[0-9a-f]+) .*?count (?P<count>\d+) datatype (?P<type>\d+) op (?P<redop>\d+) root (?P<root>\d+) "
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
_RAS_GROUP = re.compile(r"^#(\d+)-(\d+) \(([0-9a-f]+)\) (\w+)")
_RAS_COUNT = re.compile(r"^\s+(\d+) ranks? ha(?:ve|s) launched up to operation (\d+)")
_RAS_RANK = re.compile(r"^\s+Rank (\d+) -- GPU \d+ managed by process (\d+) on node (\S+)")
_RAS_KIND = re.compile(r"different (\w+) operation counts")


class NcclDebugReader:
    """Takes lines of NCCL. Communicators are told apart by their id, which all processes share;
    ranks by the process's number.
    """

    def __init__(self, evidence: Evidence, source: str, ranks: set[int]) -> None:
        self.evidence, self.source, self.ranks = evidence, source, ranks
        self.found: set[str] = set()
        self._comms: dict[
            tuple[str, str, str], tuple[int, int, str]
        ] = {}  # (host, pid, pointer) -> rank in it, its size, its id
        self._calls: list[tuple[tuple[str, str, str], re.Match[str], int | None, int]] = []
        self._order = 0

    def take(self, line: str, told: int | None) -> bool:
        head = _LINE_HEAD.search(line)
        if head is None:
            return False
        self._order += 1
        process = (head["host"], head["pid"])
        init = _COMM_INIT.search(head["text"])
        if init is not None and ("Init" in head["text"] or "init" in head["text"]):
            self._init(process, init)
        call = _OPERATION.match(head["text"])
        if call is not None:
            self._calls.append(((*process, call["comm"]), call, told, self._order))
        elif head["level"] == "WARN":
            self._warned(head["text"], told)
        return True

    def _init(self, process: tuple[str, str], init: re.Match[str]) -> None:
        rank, size = int(init["rank"]), int(init["size"])
        if rank < MAX_RANKS and size <= MAX_RANKS:
            self._comms[(*process, init["comm"])] = (rank, size, init["id"] or "")
            self.found.add("NCCL_DEBUG lines")

    def _warned(self, text: str, told: int | None) -> None:
        who = f"rank {told}: " if told is not None else ""
        note = f"{who}NCCL warns: {text[:160]}"
        if len(self.evidence.notes) < 40 and note not in self.evidence.notes:
            self.evidence.notes.append(note)

    def done(self) -> None:
        """Only now is every communicator known. A process's rank is that in the largest one, which
        is taken for the world.
        """
        world = max((size for _, size, _ in self._comms.values()), default=0)
        ranks = {where[:2]: rank for where, (rank, size, _) in self._comms.items() if size == world}
        members: dict[str, set[int]] = {}
        for where, (_, _, shared) in self._comms.items():
            if shared and where[:2] in ranks:
                members.setdefault(shared, set()).add(ranks[where[:2]])
        keys = {
            where: self._key(size, shared, members.get(shared, set()))
            for where, (_, size, shared) in self._comms.items()
        }
        for rank in ranks.values():
            self.ranks.add(rank)
            self.evidence.records_of(rank, self.source)
        for where, call, told, order in self._calls:
            size = int(call["size"] or 0)
            key = keys.get(where) or self.evidence.add_group(
                f"comm of {size}" if size else "", "", None, False, size
            )
            who = ranks.get(where[:2], told)
            if who is not None and who < MAX_RANKS:
                self._call(who, key, call, order)
            if operation_family(call["op"]) in P2P_OPS and self.evidence.groups[key].sure:
                self.evidence.groups[key].sure = False
                self.evidence.add_note(
                    f"{self.evidence.groups[key].label} carries messages, of which each rank makes another number: its "
                    "operation counts don't tell who is behind"
                )

    def _key(self, size: int, shared: str, members: set[int]) -> str:
        """A communicator whose id was printed is the same in all processes; else its size stands
        for it, if it is the only one.
        """
        if shared:
            return self.evidence.add_group(
                f"comm {shared}",
                "",
                tuple(sorted(members)) if len(members) == size else None,
                True,
                size,
            )
        alone = len({(s, i) for _, s, i in self._comms.values()}) == 1
        return self.evidence.add_group(
            f"comm of {size}", "", tuple(range(size)) if alone else None, alone, size
        )

    def _call(self, rank: int, key: str, call: re.Match[str], order: int) -> None:
        self.found.add("NCCL_DEBUG lines")
        self.ranks.add(rank)
        kind, number = int(call["type"]), int(call["number"], 16)
        dtype = _NCCL_DTYPES[kind] if kind < len(_NCCL_DTYPES) else str(kind)
        count = int(call["count"])
        op = operation_family(call["op"])
        self.evidence.add_call(
            EvidenceCall(
                rank,
                key,
                number,
                op,
                "unknown",
                op in P2P_OPS,
                None,
                False,
                None,
                count,
                -1,
                dtype,
                order=order,
                source=self.source,
            )
        )
        if op not in P2P_OPS:
            self.evidence.add_progress(rank, key, number, -1, self.source)


def is_ras_text(text: str) -> bool:
    """Is this the text report of RAS?"""
    return "Job summary" in text and "Communicators" in text and "ranks" in text.lower()


def read_ras_text(evidence: Evidence, lines: list[str], source: str) -> set[int]:
    """The report's words: which ranks of which communicator are at which operation, as far as it
    lists them.
    """
    seen: set[int] = set()
    group, kind = "", ""
    counts: list[tuple[int, int]] = []
    listed: list[int] = []

    def flush() -> None:
        if counts:
            _report_ras_counts(evidence, group, kind, counts, listed, source)
        counts.clear()
        listed.clear()

    fresh = True
    for line in lines:
        head, count, rank = _RAS_GROUP.match(line), _RAS_COUNT.match(line), _RAS_RANK.match(line)
        if head is not None:
            flush()
            group = evidence.add_group(f"comm {head[3]}")
        elif (named := _RAS_KIND.search(line)) is not None:
            flush()
            kind = named[1]
        elif count is not None:
            counts.append((int(count[1]), int(count[2])))
            fresh = True
        elif rank is not None and counts and int(rank[1]) < MAX_RANKS:
            if fresh:
                listed.clear()
            fresh = False
            listed.append(int(rank[1]))
            seen.add(int(rank[1]))
            evidence.records_of(int(rank[1]), source)
            evidence.add_progress(int(rank[1]), f"{group}", counts[-1][1], -1, source)
    flush()
    return seen


def _report_ras_counts(
    evidence: Evidence,
    group: str,
    kind: str,
    counts: list[tuple[int, int]],
    listed: list[int],
    source: str,
) -> None:
    """What RAS counted. It lists the smaller party, which may be ahead as well as behind."""
    low, high = min(n for _, n in counts), max(n for _, n in counts)
    parts = " and ".join(
        f"{many} at {kind + ' ' if kind else ''}operation {number}" for many, number in counts
    )
    if low == high:
        return
    at = next((number for many, number in counts if many == len(listed)), counts[-1][1])
    behind = at == low
    where = evidence.groups[group].label if group in evidence.groups else "a communicator"
    text = f"on {where}: {parts}; those it lists are {'behind' if behind else 'ahead, and those behind are not listed'}"
    evidence.tool_reports.append(ToolReport("NCCL RAS", tuple(sorted(listed)), text, source))
