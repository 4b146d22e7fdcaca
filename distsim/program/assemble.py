"""Putting calls together: groups, sites, signatures, and the code of one class of ranks.

Both ways to a `Program` end here: lowering a scenario (`distsim.program.lower`) and plain lists of
calls (`distsim.program.from_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from distsim.common.arrays import sorted_unique
from distsim.findings.codes import CODES
from distsim.findings.finding_types import Finding, Severity
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.program.call_builder import CallDraft, CallRequests, InvalidCall
from distsim.program.code import (
    BoolVector,
    BufferVector,
    CallSite,
    ChannelEndpoint,
    CodeCall,
    IntVector,
    SharedCode,
    Vec,
    at_row,
    collapse_uniform,
    resolve_call,
)
from distsim.program.memo_keys import VectorKeys, arguments_key, vector_key

#: Bytes of one call; times that follow from them still fit 64 bits.
_MAX_CALL_BYTES = 2**62


class ProgramTables:
    """What all codes of a program share: groups, sites, signatures and the findings made on the
    way.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        self.world_size = world_size
        self.groups: list[RankGroup] = [RankGroup(0, "world", tuple(range(world_size)), backend)]
        self.sites: list[CallSite] = []
        self._site_of: dict[CallSite, int] = {}
        self._signatures: dict[Hashable, int] = {}
        self._found: dict[tuple[str, int, str], set[int]] = {}
        self._members: dict[int, frozenset[int]] = {}
        self._partition_of: dict[
            int, IntVector
        ] = {}  # group id -> the group of every rank of the world
        self._tables: dict[Hashable, tuple[IntVector, IntVector, IntVector]] = {}
        self._parts: dict[Hashable, list[IntVector]] = {}
        self._sizes: dict[Hashable, Vec] = {}

    def site(self, site: CallSite) -> int:
        number = self._site_of.get(site)
        if number is None:
            number = self._site_of[site] = len(self.sites)
            self.sites.append(site)
        return number

    def group(
        self,
        name: str,
        ranks: Iterable[int],
        backend: str | None = None,
        timeout_ns: int | None = None,
    ) -> int:
        """Make a group; torch sorts its ranks (semantics 2.3)."""
        self.groups.append(
            RankGroup(len(self.groups), name, tuple(sorted(ranks)), backend, timeout_ns)
        )
        return len(self.groups) - 1

    def partition(self, ids: IntVector) -> None:
        """Note that these groups, one per rank of the world, cut the world into parts."""
        for group in sorted_unique(ids).tolist():
            self._partition_of[group] = ids

    def is_member(self, group: Vec, ranks: IntVector) -> BoolVector:
        """Is each rank in the group beside it? Ranks outside the world are in none."""
        inside = (ranks >= 0) & (ranks < self.world_size)
        if not isinstance(group, np.ndarray):
            return inside if group == 0 else inside & np.isin(ranks, self.groups[group].ranks)
        found = np.zeros(len(ranks), dtype=np.bool_)
        safe = np.where(inside, ranks, 0)
        for part in self._parts_of(group):
            found |= part[safe] == group
        return found & inside

    def _parts_of(self, group: IntVector) -> list[IntVector]:
        """The partitions that some groups are of."""
        key = vector_key(group)
        if key not in self._parts:
            those = (self._partition_of.get(g) for g in sorted_unique(group).tolist())
            self._parts[key] = list({id(p): p for p in those if p is not None}.values())
        return self._parts[key]

    def sizes(self, group: Vec) -> Vec:
        """How many ranks a group has; of several, one number each where they differ."""
        if not isinstance(group, np.ndarray):
            return self.groups[group].size
        key = vector_key(group)
        if key not in self._sizes:
            values, which = np.unique(group, return_inverse=True)
            each = np.array([self.groups[g].size for g in values.tolist()], dtype=np.int64)
            self._sizes[key] = collapse_uniform(each[np.asarray(which).reshape(-1)])
        return self._sizes[key]

    def global_ranks(self, group: Vec, group_ranks: IntVector) -> tuple[IntVector, BoolVector]:
        """Global ranks of group ranks, and which of these exist (where they don't, the rank is
        0).
        """
        key = vector_key(group)
        if key not in self._tables:
            ids = sorted_unique(np.asarray(group))
            sizes = np.array([self.groups[g].size for g in ids.tolist()], dtype=np.int64)
            table = np.zeros((len(ids), int(sizes.max())), dtype=np.int64)
            for row, g in enumerate(ids.tolist()):
                table[row, : sizes[row]] = self.groups[g].ranks
            self._tables[key] = (np.searchsorted(ids, group), sizes, table)
        rows, sizes, table = self._tables[key]
        good = (group_ranks >= 0) & (group_ranks < sizes[rows])
        return np.asarray(table[rows, np.where(good, group_ranks, 0)]), good

    def members(self, group: int) -> frozenset[int]:
        if group not in self._members:
            self._members[group] = frozenset(self.groups[group].ranks)
        return self._members[group]

    def signature(self, agreement: Mapping[str, Hashable]) -> int:
        return self._signatures.setdefault(
            tuple(sorted(agreement.items(), key=lambda kv: kv[0])), len(self._signatures)
        )

    def report(self, code: str, site: int, reason: str, ranks: Iterable[int]) -> None:
        self._found.setdefault((code, site, reason), set()).update(ranks)

    def findings(self) -> tuple[Finding, ...]:
        """Findings in the order of their places; one per place, code and reason."""
        found = sorted(
            self._found.items(),
            key=lambda item: (self.sites[item[0][1]][:3], item[0][0], item[0][2]),
        )
        return tuple(
            self._finding(code, site, reason, tuple(sorted(ranks)))
            for (code, site, reason), ranks in found
        )

    def _finding(self, code: str, site: int, reason: str, ranks: tuple[int, ...]) -> Finding:
        text, _, help_text = reason.partition("\n")
        if not help_text and code in CODES and code != "DS112":  # its message says it all
            help_text = CODES[code].remedy[0].lower() + CODES[code].remedy[1:].rstrip(".")
        severity: Severity = "warning" if code.startswith("DS9") else "error"
        places = tuple(self.sites[site].place(rank) for rank in ranks[:1]) or (
            self.sites[site].place(),
        )
        return Finding(
            code, severity, text, ranks, ranks, (help_text,) if help_text else (), places
        )


_NO_REQUESTS = CallRequests()

#: Of a call: its port, bytes and signature, and which ranks raise at it, why (None: none).
CheckedCallFacts = tuple[int, Vec, Vec, tuple[BoolVector, str] | None]


class CodeBuilder:
    """Builds the code of one class of ranks, call by call."""

    def __init__(self, shelf: ProgramTables, ranks: Sequence[int]) -> None:
        self.shelf = shelf
        self.ranks = tuple(int(r) for r in ranks)
        self.vector = np.array(self.ranks, dtype=np.int64)
        self.calls: list[CodeCall] = []
        self.guards: list[BoolVector | None] = []
        self.ports: list[ChannelEndpoint] = []
        self.groups: list[Vec] = []
        self._ports: dict[Hashable, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._sound: dict[Hashable, CheckedCallFacts] = {}
        self._key = VectorKeys()

    # --- handles of groups and ports ---
    def group_index(self, group: Vec) -> int:
        key = self._key(group)
        if key not in self._groups:
            self._groups[key] = len(self.groups)
            self.groups.append(group)
        return self._groups[key]

    def port(self, peer: Vec, group: int, tag: Vec) -> int:
        key = (self._key(peer), group, self._key(tag))
        if key not in self._ports:
            self._ports[key] = len(self.ports)
            self.ports.append(ChannelEndpoint(peer, group, tag))
        return self._ports[key]

    # --- calls ---
    def append(self, call: CodeCall, guard: BoolVector | None = None) -> None:
        self.calls.append(call)
        self.guards.append(guard)

    def finish(self, iterations: Sequence[int] = ()) -> SharedCode:
        guards = self.guards if any(g is not None for g in self.guards) else None
        return SharedCode(
            self.ranks, self.calls, self.ports, self.groups, guards, tuple(iterations)
        )

    def make(self, draft: CallDraft, requests: CallRequests = _NO_REQUESTS) -> CodeCall:
        """Judge a draft, give it port, signature and bytes. What was judged before and is sound is
        not judged again.
        """
        row, key = draft.row, self._facts_key(draft)
        found = self._sound.get(key) if key is not None else None
        port, nbytes, signature, invalid = self._checked(draft) if found is None else found
        if key is not None and invalid is None:
            self._sound[key] = (port, nbytes, signature, None)
        return CodeCall(
            row.op,
            draft.site,
            draft.is_async,
            self.group_index(draft.group),
            port,
            nbytes,
            signature,
            *requests,
            draft.parts,
            invalid,
            draft.fields,
        )

    def _facts_key(self, draft: CallDraft) -> Hashable:
        """What decides a call's facts; None where it is judged each time."""
        if draft.invalid or draft.row.kind not in ("p2p", "collective", "local", "wait"):
            return None
        guard = None if draft.guard is None else draft.guard.tobytes()
        if draft.row.kind in ("local", "wait"):
            return (draft.row, guard)
        return (
            draft.row,
            self._key(draft.group),
            self._key(draft.peer),
            self._key(draft.tag),
            draft.is_async,
            guard,
            arguments_key(draft.fields),
        )

    def _checked(self, draft: CallDraft) -> CheckedCallFacts:
        """Port, bytes and signature of a call, and which ranks raise at it."""
        row = draft.row
        group = self.group_index(draft.group)
        if row.kind in ("p2p", "collective", "remote") and not _invalid_on_all_rows(draft.invalid):
            self._check_member(draft)
            self._check_peer(draft)
            self._check_root(draft)
        broken = self._mask(draft, but="DS108")  # such a call is whole itself
        port = self.port(draft.peer, group, draft.tag) if draft.peer is not None else -1
        call = CodeCall(
            row.op, draft.site, draft.is_async, group, port, parts=draft.parts, fields=draft.fields
        )
        return port, *self._facts(draft, call, broken), self._invalid(draft)

    # --- validity (design §3, "Two kinds of fault") ---
    def _rows(self, draft: CallDraft) -> BoolVector:
        return np.ones(len(self.ranks), dtype=np.bool_) if draft.guard is None else draft.guard

    def _mask(self, draft: CallDraft, but: str = "") -> BoolVector:
        mask = np.zeros(len(self.ranks), dtype=np.bool_)
        for rows, code, _ in draft.invalid:
            if code != but:
                mask |= rows
        return mask & self._rows(draft)

    def _check_member(self, draft: CallDraft) -> None:
        outside = self._rows(draft) & ~self.shelf.is_member(draft.group, self.vector)
        for group in self._groups_at(draft, outside):
            reason = (
                f"{draft.row.op} on group {group.name}, which the caller is not in; its ranks are {_ranks_text(group.ranks)}"
                "\nlet the group's ranks alone make it, or name a group that the caller is in"
            )
            draft.invalid.append(
                InvalidCall(outside & np.asarray(draft.group == group.id), "DS104", reason)
            )

    def _groups_at(self, draft: CallDraft, rows: BoolVector) -> list[RankGroup]:
        if not rows.any():
            return []
        return [
            self.shelf.groups[g]
            for g in sorted_unique(
                np.broadcast_to(np.asarray(draft.group), len(rows))[rows]
            ).tolist()
        ]

    def _check_peer(self, draft: CallDraft) -> None:
        if draft.peer is None:
            return
        side = "to" if draft.row.direction == "send" or draft.row.gives == "all" else "from"
        peer, rows = (
            np.broadcast_to(np.asarray(draft.peer), len(self.ranks)),
            self._rows(draft) & ~self._mask(draft),
        )
        world = self.shelf.world_size
        self._per_value(
            draft,
            peer,
            rows & ((peer < -1) | (peer >= world)),
            "DS101",
            lambda p: (
                f"{draft.row.op} {side} rank {p}, but the world has ranks 0 to {world - 1}\n"
                "a ring closes with `% world_size`; at the end of a line the last rank has no neighbour"
            ),
        )
        self._per_value(
            draft,
            peer,
            rows & (peer == self.vector),
            "DS102",
            lambda p: (
                f"rank {p}: {draft.row.op} {side} itself\n"
                "a rank needs no message to itself; copy the tensor, or check the peer's expression"
            ),
        )
        rows &= (peer >= 0) & (peer < world) & (peer != self.vector)
        out = rows & ~self.shelf.is_member(draft.group, peer)
        words, help_text = (
            f"{draft.row.op} {side} rank",
            "src and dst are global ranks; group_src and group_dst count inside the group",
        )
        self._reject_non_members(draft, peer, out, "DS101", words, help_text)

    def _check_root(self, draft: CallDraft) -> None:
        if draft.row.root_field is None:
            return
        root = np.broadcast_to(np.asarray(draft.fields["root"]), len(self.ranks))
        out = self._rows(draft) & ~self._mask(draft) & ~self.shelf.is_member(draft.group, root)
        side = draft.row.root_field
        help_text = f"{side} is a global rank; group_{side} counts inside the group"
        self._reject_non_members(draft, root, out, "DS103", f"{draft.row.op} has {side}", help_text)

    def _reject_non_members(
        self,
        draft: CallDraft,
        ranks: IntVector,
        rows: BoolVector,
        code: str,
        words: str,
        help_text: str,
    ) -> None:
        """Ranks that are named, but not in the group."""
        for group in self._groups_at(draft, rows):

            def reason(p: int, g: RankGroup = group) -> str:
                return f"{words} {p}, which is not in group {g.name}; its ranks are {_ranks_text(g.ranks)}\n{help_text}"

            self._per_value(draft, ranks, rows & np.asarray(draft.group == group.id), code, reason)

    def _per_value(
        self,
        draft: CallDraft,
        values: IntVector,
        rows: BoolVector,
        code: str,
        reason: Callable[[int], str],
    ) -> None:
        for value in sorted_unique(values[rows]).tolist():
            draft.invalid.append(InvalidCall(rows & (values == value), code, reason(value)))

    def _invalid(self, draft: CallDraft) -> tuple[BoolVector, str] | None:
        if not draft.invalid:
            return None
        total = np.zeros(len(self.ranks), dtype=np.bool_)
        first = ""
        for mask, code, reason in draft.invalid:
            rows = np.broadcast_to(np.asarray(mask), len(self.ranks)) & self._rows(draft) & ~total
            if rows.any():
                self.shelf.report(code, draft.site, reason, self.vector[rows].tolist())
                total |= rows
                first = first or f"{code} {reason.partition(chr(10))[0]}"
        return (total, first) if total.any() else None

    # --- what the row says of the resolved call ---
    def _facts(self, draft: CallDraft, call: CodeCall, broken: BoolVector) -> tuple[Vec, Vec]:
        """(nbytes, signature) by the row's columns, once per distinct set of arguments; buffers
        that don't fit are reported.
        """
        if draft.row.kind in ("local", "wait", "batch"):
            return 0, -1
        rows = np.flatnonzero(self._rows(draft) & ~broken)
        nbytes, signature = (
            np.zeros(len(self.ranks), dtype=np.int64),
            np.full(len(self.ranks), -1, dtype=np.int64),
        )
        seen: dict[Hashable, tuple[int, int, str | None]] = {}
        vectors = _varying_arguments(draft, self.vector)
        sizes = self.shelf.sizes(draft.group)
        code = SharedCode(self.ranks, [], self.ports, self.groups)
        rows_left = rows[:1] if not vectors and isinstance(sizes, int) else rows
        for i in rows_left.tolist():
            key = (at_row(sizes, i), *(v[i].item() for v in vectors))
            if key not in seen:
                seen[key] = self._facts_of(draft, resolve_call(code, self.shelf.groups, i, call))
            nbytes[i], signature[i], fault = seen[key]
            if fault is not None:
                mask = np.zeros(len(self.ranks), dtype=np.bool_)
                mask[rows if len(rows_left) < len(rows) else [i]] = True
                draft.invalid.append(InvalidCall(mask, *fault_with_code(fault)))
        if len(rows_left) and len(rows_left) < len(rows):
            return int(nbytes[rows[0]]), int(signature[rows[0]])
        return collapse_uniform(nbytes), collapse_uniform(signature)

    def _facts_of(self, draft: CallDraft, call: ResolvedCall) -> tuple[int, int, str | None]:
        fault = draft.row.faults(call)
        if fault is not None:
            return 0, -1, fault
        nbytes = draft.row.nbytes(call)
        if nbytes > _MAX_CALL_BYTES:
            return 0, -1, f"{draft.row.op} moves {nbytes:.3g} bytes, more than 62 bits can count"
        return nbytes, self.shelf.signature(draft.row.agreement(call)), None


def fault_with_code(fault: str) -> tuple[str, str]:
    """The finding's code of a row's fault: splits have their own, and so has what is no matter of
    buffers.
    """
    if "split" in fault.lower():
        return "DS107", fault
    return ("DS112" if re.search(r"\b(tag|channel|batch|reduce op)\b", fault) else "DS110"), fault


def _invalid_on_all_rows(invalid: list[InvalidCall]) -> bool:
    return any(np.all(mask) for mask, _, _ in invalid)


def _varying_arguments(draft: CallDraft, ranks: IntVector) -> list[NDArray[np.generic]]:
    """The vectors that the row's columns can see: shapes, root, splits, ranks, and who is the root.
    Peers don't matter to them.
    """
    found: list[NDArray[np.generic]] = []

    def look(value: object) -> None:
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, BufferVector):
            look(value.shape)
        elif isinstance(value, tuple):
            for item in value:
                look(item)

    for name in ("root", "inputs", "outputs", "input_splits", "output_splits", "ranks"):
        look(draft.fields.get(name))
    if draft.row.root_field is not None:
        found.append(np.asarray(draft.fields["root"] == ranks))
    if (
        draft.row.kind == "collective"
        and draft.row.coalesces is None
        and any(
            len(draft.fields.get(name) or ()) > 1
            for name in ("inputs", "outputs", "input_splits", "output_splits")
        )
    ):
        found.append(ranks)
    if isinstance(draft.tag, np.ndarray):
        found.append(draft.tag)
    return found


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, … ({len(ranks)} in all)" if len(ranks) > 8 else shown
