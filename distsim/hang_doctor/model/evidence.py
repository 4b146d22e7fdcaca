"""All evidence on one table: what every file said, by rank and by group, with its
contradictions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distsim.hang_doctor.model.evidence_records import (
    MAX_CALL_NUMBER,
    UNKNOWN_NUMBER,
    EvidenceCall,
    EvidenceGroup,
    GroupProgress,
    InputFile,
    ProcessEnd,
    RankEvidence,
    ReportedMismatch,
    StackFrame,
    ThreadStack,
    ToolReport,
)

#: Ranks above are taken for damage.
MAX_RANKS = 1 << 20


@dataclass
class Evidence:
    """``ranks``: of whom something is there. ``world``: how many ranks the job has, 0 unknown."""

    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    groups: dict[str, EvidenceGroup] = field(default_factory=dict)
    files: list[InputFile] = field(default_factory=list)
    said: list[ToolReport] = field(default_factory=list)
    mismatched: list[ReportedMismatch] = field(default_factory=list)
    disputes: list[str] = field(default_factory=list)
    disputed: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    world: int = 0
    orphans: list[ThreadStack] = field(
        default_factory=list
    )  # stacks of processes whose rank nobody said
    callers: dict[tuple[tuple[str, str, int], ...], tuple[StackFrame, ...]] = field(
        default_factory=dict
    )  # stacks of calls, each once
    namesakes: dict[str, list[str]] = field(
        default_factory=dict
    )  # name -> keys of the groups that have it besides the first
    mixed: set[str] = field(
        default_factory=set
    )  # groups whose counters, in logs, are of messages and collectives in turn

    def rank(self, rank: int, source: str) -> RankEvidence:
        """The record of a rank, made at its first mention."""
        if not 0 <= rank < MAX_RANKS:
            raise ValueError(f"no rank {rank}")
        found = self.ranks.setdefault(rank, RankEvidence(rank))
        found.sources[source] = None
        return found

    def group(
        self,
        name: str,
        desc: str = "",
        members: tuple[int, ...] | None = None,
        sure: bool = True,
        size: int = 0,
    ) -> str:
        """The key of a group, by its name in all processes, and by its members where several groups
        have that name.
        """
        key = self._key(name, members)
        known = self.groups.get(key)
        if known is None:
            self.groups[key] = EvidenceGroup(key, name, desc, members, sure, size)
            return key
        if desc and desc != "undefined" and known.desc in ("", "undefined"):
            known.desc = desc
        if members is not None and known.members is not None and set(members) != set(known.members):
            self._members_differ(known, members)
        elif members is not None and known.members is None:
            known.members = members
        known.sure, known.size = known.sure and sure, max(known.size, size)
        return key

    def _key(self, name: str, members: tuple[int, ...] | None) -> str:
        """Older versions of torch give all groups that one split makes the same name. They share no
        rank.
        """
        keys = self.namesakes.get(name, [])
        if members is None:
            return name
        for key in (name, *keys):
            known = self.groups.get(key)
            if known is None or known.members is None or not set(known.members).isdisjoint(members):
                return key
        self.namesakes[name] = [*keys, f"{name} with rank {members[0]}"]
        return self.namesakes[name][-1]

    def _members_differ(self, known: EvidenceGroup, members: tuple[int, ...]) -> None:
        text = f"files name different members of {known.shown}: {list(known.members or ())} and {list(members)}"
        if text not in self.disputes:
            self.disputes.append(text)
        known.sure = False

    def note(self, text: str) -> None:
        """Something that the reader should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def call(self, call: EvidenceCall) -> None:
        self.rank(call.rank, call.source.split("#")[0]).calls.append(call)

    def status(self, rank: int, group: str, enqueued: int, completed: int, source: str) -> None:
        """How far a rank is; of several reports the furthest holds. Numbers that nobody can have
        reached are left out.
        """
        found = self.rank(rank, source).status.setdefault(group, GroupProgress())
        if 0 <= enqueued < MAX_CALL_NUMBER:
            found.enqueued = max(found.enqueued, enqueued)
        if 0 <= completed < MAX_CALL_NUMBER:
            found.completed = max(found.completed, completed)
        if source not in found.sources:
            found.sources.append(source)

    def stack(self, rank: int | None, stack: ThreadStack) -> None:
        if rank is None:
            self.orphans.append(stack)
        else:
            self.rank(rank, stack.source).stacks.append(stack)

    def end(self, rank: int, end: ProcessEnd) -> None:
        ends = self.rank(rank, end.source).ends
        if (end.kind, end.text) not in [(e.kind, e.text) for e in ends]:
            ends.append(end)

    def settle(self) -> None:
        """Put calls in order, drop what was said twice, note what two files say differently, and
        infer what they imply.
        """
        self._place_namesakes()
        for key in self.mixed:
            self._drop_counters(key)
        for evidence in self.ranks.values():
            self._settle_rank(evidence)
        default = next(
            (g for g in self.groups.values() if g.desc == "default_pg" or g.name in ("0", "world")),
            None,
        )
        if default is not None and default.members is None and self.world:
            default.members = tuple(range(self.world))
        members = [m for g in self.groups.values() if g.members for m in g.members]
        self.world = max(self.world, max(members, default=-1) + 1)
        for number, group in enumerate(self.groups.values()):
            if group.sure and group.members and any(m >= MAX_RANKS for m in group.members):
                group.members = None
            group.size = max(group.size, len(group.members or ()), number * 0)

    def _place_namesakes(self) -> None:
        """Logs name no members: what they say of a rank belongs to the group of that name that has
        the rank.
        """
        for name in [
            key
            for key, group in self.groups.items()
            if group.members is not None and group.key == group.name
        ]:
            keys = [name, *self.namesakes.get(name, [])]
            for key in keys if len(keys) > 1 else ():
                self.groups[key].alike = True
            for rank, evidence in self.ranks.items():
                if rank not in (self.groups[name].members or ()):
                    right = next(
                        (key for key in keys if rank in (self.groups[key].members or ())), None
                    )
                    _move_to_group(
                        evidence, name, right or self.group(f"{name} of others", sure=False)
                    )
        for group in self.groups.values():
            if group.of_a_split and group.members is None and group.sure:
                group.sure = False
                self.note(
                    f"{group.shown}: older versions of torch give all groups that one split makes this name; which ranks are in "
                    "one of them, a log does not tell, and a Flight Recorder dump does"
                )

    def _drop_counters(self, key: str) -> None:
        self.note(
            f"on {self.groups[key].shown} the counters of the log are of messages and of collectives in turn: they don't tell who is "
            "behind"
        )
        for evidence in self.ranks.values():
            evidence.status.pop(key, None)
            evidence.calls = [
                replace(c, number=UNKNOWN_NUMBER) if c.group == key and c.op == "coalesced" else c
                for c in evidence.calls
            ]

    def _settle_rank(self, evidence: RankEvidence) -> None:
        by_number: dict[tuple[str, int, bool], EvidenceCall] = {}
        others: list[EvidenceCall] = []
        for call in evidence.calls:
            key = (call.group, call.number, call.p2p)
            before = by_number.get(key)
            if call.number < 0 or call.p2p or before is None:
                if call.number >= 0 and not call.p2p:
                    by_number[key] = call
                else:
                    others.append(call)
            elif before.op != call.op and self.groups[call.group].sure:
                self._dispute(before, call)
            else:
                by_number[key] = merge_calls(before, call)
        evidence.calls = sorted(
            [*by_number.values(), *others], key=lambda c: (c.order, c.at_ns, c.number)
        )

    def _dispute(self, one: EvidenceCall, other: EvidenceCall) -> None:
        self.disputed.add(one.rank)
        self.disputes.append(
            f"call {one.number} of rank {one.rank} on {self.groups[one.group].shown} is {one.op} in {one.source} and {other.op} in "
            f"{other.source}: two jobs, or two ranks with one number; I cannot tell which is right"
        )


def _move_to_group(evidence: RankEvidence, key: str, other: str) -> None:
    """What was said of a rank on one group is of another."""
    if key in evidence.status:
        evidence.status.setdefault(other, evidence.status.pop(key))
    evidence.calls = [
        replace(call, group=other) if call.group == key else call for call in evidence.calls
    ]


def merge_calls(one: EvidenceCall, other: EvidenceCall) -> EvidenceCall:
    """One call that two files tell of: what either knows; done where one of them saw it done."""
    states = {one.state, other.state}
    state = next((s for s in ("done", "waiting", "over") if s in states), "unknown")
    return replace(
        one,
        state=state,  # type: ignore[arg-type]
        started=one.started or other.started,
        sizes=one.sizes if one.sizes is not None else other.sizes,
        elements_in=max(one.elements_in, other.elements_in),
        elements_out=max(one.elements_out, other.elements_out),
        dtype=one.dtype or other.dtype,
        frames=one.frames or other.frames,
        at_ns=one.at_ns or other.at_ns,
        order=max(one.order, other.order),
    )
