"""All evidence of a hung job, ordered by rank and by group, with the contradictions found in it.

Readers fill an ``Evidence`` file by file through its ``add_…`` methods. Afterwards
``model.reconcile`` merges what several files say about the same call. This module knows no file
format and draws no conclusions about the hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distsim.hang_doctor.model.evidence_records import (
    MAX_CALL_NUMBER,
    EvidenceCall,
    EvidenceGroup,
    GroupProgress,
    InputFile,
    ProcessEnd,
    ProcessState,
    RankEvidence,
    ReportedMismatch,
    StackFrame,
    ThreadStack,
    ToolCount,
    ToolReport,
)

#: Larger rank numbers are treated as damage.
MAX_RANKS = 1 << 20

#: A stack without its local variables: function, file and line of each frame.
StackKey = tuple[tuple[str, str, int], ...]


@dataclass
class Evidence:
    """What all files say about the job. ``ranks`` holds only ranks that some file mentions."""

    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    groups: dict[str, EvidenceGroup] = field(default_factory=dict)
    files: list[InputFile] = field(default_factory=list)
    tool_reports: list[ToolReport] = field(default_factory=list)
    reported_mismatches: list[ReportedMismatch] = field(default_factory=list)
    #: Counts of finished calls: what was counted -> rank -> count.
    tool_counts: dict[ToolCount, dict[int, int]] = field(default_factory=dict)
    #: Contradictions between files, as sentences.
    disputes: list[str] = field(default_factory=list)
    #: Ranks whose files contradict each other, or may belong to another rank.
    disputed_ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    #: How many ranks the job has, 0 if unknown.
    world: int = 0
    #: Stacks of processes whose rank is unknown.
    orphans: list[ThreadStack] = field(default_factory=list)
    #: Live processes whose rank is unknown.
    orphan_processes: list[ProcessState] = field(default_factory=list)
    #: A live job was inspected without py-spy.
    live_without_stacks: bool = False
    #: How processes of unknown rank ended.
    orphan_ends: list[ProcessEnd] = field(default_factory=list)
    #: Processes that the kernel killed for lack of memory, by their number.
    oom_killed_pids: set[int] = field(default_factory=set)
    #: The stacks of calls. Each distinct stack is stored once and shared, to save memory.
    call_stacks: dict[StackKey, tuple[StackFrame, ...]] = field(default_factory=dict)
    #: Bytes of all inputs, unpacked.
    input_bytes: int = 0
    #: A group name -> keys of the further groups that have the same name.
    keys_of_namesakes: dict[str, list[str]] = field(default_factory=dict)
    #: Keys of groups whose counters, in logs, count messages and collectives in turn.
    groups_counting_messages: set[str] = field(default_factory=set)

    def records_of(self, rank: int, source: str) -> RankEvidence:
        """The record of a rank, created when a rank is first mentioned."""
        if not 0 <= rank < MAX_RANKS:
            raise ValueError(f"no rank {rank}")
        found = self.ranks.setdefault(rank, RankEvidence(rank))
        found.sources[source] = None
        return found

    def add_group(
        self,
        name: str,
        desc: str = "",
        members: tuple[int, ...] | None = None,
        sure: bool = True,
        size: int = 0,
    ) -> str:
        """Enter a group, or complete what is known about it; return its key.

        The key is the name, which is the same in all processes. Where several groups have that
        name, the key also depends on the members.
        """
        key = self._key_of_group(name, members)
        known = self.groups.get(key)
        if known is None:
            self.groups[key] = EvidenceGroup(key, name, desc, members, sure, size)
            return key
        if desc and desc != "undefined" and known.desc in ("", "undefined"):
            known.desc = desc
        if members is not None:
            if known.members is None:
                known.members = members
            elif set(members) != set(known.members):
                self._report_different_members(known, members)
        known.sure = known.sure and sure
        known.size = max(known.size, size)
        return key

    def _key_of_group(self, name: str, members: tuple[int, ...] | None) -> str:
        """The key of the group with this name and members.

        Older versions of torch give the same name to all groups that one split creates. Such
        groups have no rank in common, so disjoint members mean another group.
        """
        if members is None:
            return name
        namesakes = self.keys_of_namesakes.get(name, [])
        for key in (name, *namesakes):
            known = self.groups.get(key)
            if known is None or known.members is None:
                return key
            if not set(known.members).isdisjoint(members):
                return key
        new_key = f"{name} with rank {members[0]}"
        self.keys_of_namesakes[name] = [*namesakes, new_key]
        return new_key

    def _report_different_members(self, known: EvidenceGroup, members: tuple[int, ...]) -> None:
        text = (
            f"files name different members of {known.label}: "
            f"{list(known.members or ())} and {list(members)}"
        )
        if text not in self.disputes:
            self.disputes.append(text)
        known.sure = False

    def add_note(self, text: str) -> None:
        """Add a remark for the reader of the report, unless it was made before."""
        if text not in self.notes:
            self.notes.append(text)

    def add_call(self, call: EvidenceCall) -> None:
        """Enter a call of a rank."""
        # "file#3" is part 3 of a file; sources list whole files.
        file = call.source.split("#")[0]
        self.records_of(call.rank, file).calls.append(call)

    def add_progress(
        self, rank: int, group: str, enqueued: int, completed: int, source: str
    ) -> None:
        """Enter how far a rank is on a group.

        The furthest of several reports counts. Impossible numbers are ignored.
        """
        progress = self.records_of(rank, source).status.setdefault(group, GroupProgress())
        if 0 <= enqueued < MAX_CALL_NUMBER:
            progress.enqueued = max(progress.enqueued, enqueued)
        if 0 <= completed < MAX_CALL_NUMBER:
            progress.completed = max(progress.completed, completed)
        if source not in progress.sources:
            progress.sources.append(source)

    def add_stack(self, rank: int | None, stack: ThreadStack) -> None:
        """Enter the stack of a thread; ``rank`` is None if it is unknown."""
        if rank is None:
            self.orphans.append(stack)
        else:
            self.records_of(rank, stack.source).stacks.append(stack)

    def add_end(self, rank: int | None, end: ProcessEnd) -> None:
        """Enter how a process ended, unless another file says the same.

        ``rank`` is None if it is unknown.
        """
        ends = self.orphan_ends if rank is None else self.records_of(rank, end.source).ends
        known = [(other.kind, other.text) for other in ends]
        if (end.kind, end.text) not in known:
            ends.append(end)
