"""Lines of torch's NCCL watchdog: the call that timed out, its stack, and its group's counters.

A timeout is printed in several lines, which older versions of torch do not connect: one names the
call (``WorkNCCL(...)``) without its group, a later one the group and its counters. Therefore a call
is first entered under the empty group and moved when its group becomes known.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS
from distsim.hang_doctor.model.evidence_records import (
    MAX_CALL_NUMBER,
    UNKNOWN_NUMBER,
    EvidenceCall,
    StackFrame,
)
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family
from distsim.hang_doctor.readers.log_context import LogContext, local_seconds

_LABEL = re.compile(r"\[rank(\d{1,7})\]")
_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d+) PG )?(?P<guid>GUID )?(?P<name>[^\s()\]]+)\s?"
    r"(?:\((?P<desc>[^)]*)\))?\s?Rank (?P<rank>\d{1,7})\]"
)
_OWN_RANK = re.compile(r"\[Rank (\d{1,7})\]")
_WORK = re.compile(
    r"WorkNCCL\((?:(?:SeqNum=(?P<number>\d+)|\.\.\.),\s*)?OpType=(?P<op>\w+)"
    r"(?:,\s*NumelIn=(?P<in>\d+))?(?:,\s*NumelOut=(?P<out>\d+))?"
)
_LAST_WORK = re.compile(
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+)(?: \(\w*\))?,? *"
    r"(?:last started(?: NCCL)? work: -?\d+(?: \(\w*\))?,? *)?"
    r"last completed(?: NCCL)? work: (?P<completed>-?\d+)",
    re.IGNORECASE,
)
_TIMED_OUT_WORK = re.compile(
    r"(?:watchdog at work(?: sequence id)?|Timeout at NCCL work):? (\d+)", re.IGNORECASE
)
#: The head of a line, which has no year: ``[E109 22:46:25.9`` is of January 9th.
_TIME = re.compile(r"\[[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.")
_RAN_FOR = re.compile(r"ran for (\d{1,12}) milliseconds")
#: Lines after "Stack trace of the failed collective:", innermost first.
_FAILED_FRAME = re.compile(r"^#\d+ (\S+) from (\S+):(\d+)\s*$")


class _Call(NamedTuple):
    """A call of the watchdog's rank, by its number."""

    rank: int
    number: int


class WatchdogReader:
    """Takes lines that mention NCCL, and the frames of the failed call that follow them."""

    def __init__(self, log: LogContext) -> None:
        self._log = log
        self._evidence = log.evidence
        #: The size of the group of each call, by its element counts.
        self._group_sizes: dict[_Call, int] = {}
        #: Calls whose group is unknown so far.
        self._calls_without_group: set[_Call] = set()
        self._latest_call: _Call | None = None

    def take_frame(self, text: str) -> bool:
        """Take a line of the stack that is printed for the call that timed out."""
        if self._latest_call is None:
            return False
        match = _FAILED_FRAME.match(text)
        if match is None:
            return False
        self._add_frame(self._latest_call, StackFrame(match[1], match[2], int(match[3])))
        return True

    def _add_frame(self, failed: _Call, frame: StackFrame) -> None:
        calls = self._evidence.ranks[failed.rank].calls
        for index, call in enumerate(calls):
            is_failed = call.number == failed.number and not call.p2p
            if is_failed and call.source == self._log.source:
                calls[index] = call._replace(frames=(*call.frames, frame))
                return

    def take(self, line: str, rank: int | None, possible_rank: int | None, order: int) -> None:
        """Take a whole line, with its prefixes, and the numbers found in them."""
        work = _WORK.search(line)
        counters = _LAST_WORK.search(line)
        if work is None and counters is None:
            return
        group = _GROUP.search(line)
        label = rank if rank is not None else _rank_of_label(line)
        owner = self._owner(label, group, line, possible_rank)
        if owner is None or owner >= MAX_RANKS:
            self._evidence.add_note("some watchdog lines do not name a rank")
            return
        self._log.found.add("watchdog lines")
        self._log.ranks.add(owner)
        self._evidence.records_of(owner, self._log.source).backend = "nccl"
        if work is not None:
            self._latest_call = _Call(owner, _work_number(work))
            self._calls_without_group.add(self._latest_call)
        key = self._group_key(group, label is not None)
        if counters is not None:
            self._take_counters(line, owner, key, counters)
        if work is not None:
            self._add_call(owner, key, work, order)
            self._date_wait(owner, line)
            self._group_sizes[_Call(owner, _work_number(work))] = _group_size(work)

    def _date_wait(self, rank: int, line: str) -> None:
        """Enter when the wait that timed out began, if the line says it."""
        time = _TIME.search(line)
        duration = _RAN_FOR.search(line)
        if time is None or duration is None:
            return
        ended = local_seconds(*map(int, time.groups()))
        if ended is None:
            return
        records = self._evidence.ranks[rank]
        began = ended - int(duration[1]) / 1000
        known = records.waits_since_s
        records.waits_since_s = began if known is None else min(known, began)

    def _owner(
        self,
        label: int | None,
        group: re.Match[str] | None,
        line: str,
        possible_rank: int | None,
    ) -> int | None:
        """The rank whose watchdog wrote the line, by the most reliable number in it."""
        if label is not None:
            return label
        # The rank inside the group's brackets is the rank in that group.
        if group is not None:
            return int(group["rank"])
        own = _OWN_RANK.search(line)
        if own is not None:
            return int(own[1])
        return possible_rank if possible_rank is not None else self._log.rank

    def _group_key(self, group: re.Match[str] | None, is_labelled: bool) -> str:
        """The key of the group, empty if the line names none.

        The group is sure if its name is the same in all processes, and the rank is a global one:
        from a label, or because the group is the default group.
        """
        if group is None:
            return ""
        is_default = group["desc"] == "default_pg"
        has_global_name = bool(group["guid"]) or is_default
        has_global_rank = is_labelled or is_default or (has_global_name and group["name"] == "0")
        name = group["name"] if group["guid"] or group["desc"] else f"PG {group['name']}"
        sure = has_global_name and has_global_rank
        return self._evidence.add_group(name, group["desc"] or "", None, sure)

    def _take_counters(self, line: str, rank: int, key: str, counters: re.Match[str]) -> None:
        """Counters of a group: the last call that was enqueued, and the last that completed."""
        enqueued, completed = int(counters["enqueued"]), int(counters["completed"])
        label = self._evidence.groups[key].label if key else "its group"
        if enqueued < 0:
            self._evidence.add_note(f"rank {rank} has enqueued no collective on {label}")
        if 0 <= enqueued == completed and "from this local rank" in line:
            self._evidence.add_note(
                f"rank {rank} timed out on another group: on {label} it has finished all "
                f"{completed} calls"
            )
        # More completed than enqueued: the two counters do not count the same calls.
        if 0 <= enqueued < completed < MAX_CALL_NUMBER and key:
            self._evidence.groups_counting_messages.add(key)
        if not key:
            self._evidence.add_group("", sure=False)
        self._evidence.add_progress(rank, key, enqueued, completed, self._log.source)

        timed_out = _TIMED_OUT_WORK.search(line)
        if timed_out is None:
            return
        call = _Call(rank, int(timed_out[1]))
        if call in self._calls_without_group:
            self._calls_without_group.remove(call)
            self._assign_group(call, key)

    def _assign_group(self, wanted: _Call, key: str) -> None:
        """The call of an earlier line, which named no group, is on this group."""
        calls = self._evidence.ranks[wanted.rank].calls
        for index, call in enumerate(calls):
            if call.group != "" or call.number != wanted.number:
                continue
            if call.source != self._log.source:
                continue
            calls[index] = call._replace(group=key)
            self._enter_group_size(wanted, key)
            is_batch_of_messages = call.op == "coalesced" and call.elements_in < 0
            if key and (call.p2p or is_batch_of_messages):
                self._evidence.groups_counting_messages.add(key)

    def _enter_group_size(self, call: _Call, key: str) -> None:
        """Enter how many members a group has, which a gathering call shows."""
        size = self._group_sizes.get(call, 0)
        group = self._evidence.groups[key]
        if size > 1 and group.sure:
            group.size = max(group.size, size)

    def _add_call(self, rank: int, key: str, work: re.Match[str], order: int) -> None:
        if not key:
            self._evidence.add_group("", sure=False)
        op = operation_family(work["op"])
        self._evidence.add_call(
            EvidenceCall(
                rank,
                key,
                _work_number(work),
                op,
                "waiting",
                p2p=op in P2P_OPS,
                started=True,
                elements_in=_elements(work["in"]),
                elements_out=_elements(work["out"]),
                order=order,
                source=self._log.source,
            )
        )


def _rank_of_label(line: str) -> int | None:
    label = _LABEL.search(line)
    return int(label[1]) if label is not None else None


def _work_number(work: re.Match[str]) -> int:
    """The number of the call; unknown where the person who pasted the line cut it."""
    return int(work["number"]) if work["number"] else UNKNOWN_NUMBER


def _elements(text: str | None) -> int:
    """A count of elements. For a batch torch prints uninitialised memory, which is unknown."""
    return int(text) if text and int(text) < MAX_CALL_NUMBER else UNKNOWN_NUMBER


def _group_size(work: re.Match[str]) -> int:
    """The size of the group by the element counts of a call, 0 if they do not show it.

    An all_gather has one part of the output for each member, a reduce_scatter one of the input.
    """
    op = operation_family(work["op"])
    elements_in, elements_out = _elements(work["in"]), _elements(work["out"])
    if elements_in <= 0 or elements_out <= 0:
        return 0
    whole, part = elements_out, elements_in
    if op == "reduce_scatter":
        whole, part = elements_in, elements_out
    elif op != "all_gather":
        return 0
    size, rest = divmod(whole, part)
    return size if rest == 0 and 1 < size <= MAX_RANKS else 0
