"""Building the code of one class of ranks, call by call.

All ways to a `Program` end here: lowering a scenario (`distsim.program.lower`), plain lists of
calls (`distsim.program.from_calls`), captured scripts and replayed traces.

Key idea: validity, endpoint, bytes and signature of a call are found once for each distinct set of
arguments, on resolved calls, with the rules of the operation (`Operation.faults`, `nbytes`,
`agreement`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.call_builder import NO_REQUESTS, CallDraft, CallRequests, InvalidCall
from distsim.program.call_checks import CallChecker
from distsim.program.code import (
    NO_INDEX,
    BoolVector,
    BufferVector,
    ChannelEndpoint,
    CodeCall,
    IntVector,
    InvalidRows,
    SharedCode,
    Vec,
    at_row,
    collapse_uniform,
    resolve_call,
)
from distsim.program.memo_keys import VectorKeys, arguments_key
from distsim.program.program_tables import ProgramTables

#: Limit for the bytes of one call; times that follow from them still fit 64 bits.
_MAX_CALL_BYTES = 2**62
#: Signature of a call without one; it agrees with any other.
_NO_SIGNATURE = -1
#: Operations after which a rank makes no further call.
_OPS_THAT_END_A_RANK = ("exit", "fail")


class CheckedCallFacts(NamedTuple):
    """What is known of a call once it is checked; ``invalid`` as in `CodeCall`."""

    endpoint: int
    nbytes: Vec
    signature: Vec
    invalid: InvalidRows | None


class _RowFacts(NamedTuple):
    """The same for one rank; ``fault`` is why its arguments do not fit the operation."""

    nbytes: int
    signature: int
    fault: str | None


class CodeBuilder:
    """Builds the code of one class of ranks, call by call."""

    def __init__(self, tables: ProgramTables, ranks: Sequence[int]) -> None:
        self.tables = tables
        self.ranks = tuple(int(r) for r in ranks)
        self.vector = np.array(self.ranks, dtype=np.int64)
        self.calls: list[CodeCall] = []
        self.guards: list[BoolVector | None] = []
        self.endpoints: list[ChannelEndpoint] = []
        self.groups: list[Vec] = []
        self._endpoint_numbers: dict[Hashable, int] = {}
        self._group_numbers: dict[Hashable, int] = {}
        self._facts_of_valid_calls: dict[Hashable, CheckedCallFacts] = {}
        self._key = VectorKeys()
        self._checker = CallChecker(tables, self.vector)
        #: The rows that an `exit` or `fail` so far has ended.
        self._ended = np.zeros(len(self.ranks), dtype=np.bool_)

    # --- indices of groups and endpoints ---
    def group_index(self, group: Vec) -> int:
        """The number of a group in the tables."""
        key = self._key(group)
        if key not in self._group_numbers:
            self._group_numbers[key] = len(self.groups)
            self.groups.append(group)
        return self._group_numbers[key]

    def endpoint(self, peer: Vec, group: int, tag: Vec) -> int:
        """The number of a (peer, group, tag) combination."""
        key = (self._key(peer), group, self._key(tag))
        if key not in self._endpoint_numbers:
            self._endpoint_numbers[key] = len(self.endpoints)
            self.endpoints.append(ChannelEndpoint(peer, group, tag))
        return self._endpoint_numbers[key]

    # --- calls ---
    def append(self, call: CodeCall, guard: BoolVector | None = None) -> None:
        """Add a call; ``guard`` selects the rows that make it."""
        self.calls.append(call)
        self.guards.append(guard)
        if call.op in _OPS_THAT_END_A_RANK:
            self._ended |= True if guard is None else guard

    def finish(self, iterations: Sequence[int] = ()) -> SharedCode:
        """The finished code of all ranks of the class."""
        has_guards = any(guard is not None for guard in self.guards)
        guards = self.guards if has_guards else None
        return SharedCode(
            self.ranks, self.calls, self.endpoints, self.groups, guards, tuple(iterations)
        )

    def make(self, draft: CallDraft, requests: CallRequests = NO_REQUESTS) -> CodeCall:
        """Check a draft, and give it endpoint, signature and bytes.

        Facts of valid calls are reused. An invalid call is checked each time, because every site
        needs a finding of its own.
        """
        key = self._facts_key(draft)
        facts = None if key is None else self._facts_of_valid_calls.get(key)
        if facts is None:
            facts = self._checked(draft)
            if key is not None and facts.invalid is None:
                self._facts_of_valid_calls[key] = facts
        return CodeCall(
            draft.row.op,
            draft.site,
            draft.is_async,
            self.group_index(draft.group),
            facts.endpoint,
            facts.nbytes,
            facts.signature,
            *requests,
            draft.parts,
            facts.invalid,
            draft.fields,
        )

    def _facts_key(self, draft: CallDraft) -> Hashable:
        """Everything that decides a call's facts; None if it must be checked each time."""
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
        """Port, bytes and signature of a call, and the ranks that raise at it."""
        row = draft.row
        group = self.group_index(draft.group)
        if row.kind in ("p2p", "collective", "remote"):
            self._checker.check_partners(draft)
        # A call without a process group (DS108) has arguments that can be resolved all the same.
        unresolvable = self._checker.invalid_rows(draft, ignored_code="DS108")
        endpoint = NO_INDEX if draft.peer is None else self.endpoint(draft.peer, group, draft.tag)
        call = CodeCall(
            row.op,
            draft.site,
            draft.is_async,
            group,
            endpoint,
            parts=draft.parts,
            fields=draft.fields,
        )
        # Finds further invalid rows, so it has to come before they are summed up.
        nbytes, signature = self._bytes_and_signature(draft, call, unresolvable)
        return CheckedCallFacts(endpoint, nbytes, signature, self._reported_invalid(draft))

    def _reported_invalid(self, draft: CallDraft) -> InvalidRows | None:
        """All invalid rows, with the first reason; each row is reported for its first reason.

        A rank that has ended before the call never reaches it, so it is not reported.
        """
        if not draft.invalid:
            return None
        raising = np.zeros(len(self.ranks), dtype=np.bool_)
        first: InvalidCall | None = None
        for invalid in draft.invalid:
            everywhere = np.broadcast_to(np.asarray(invalid.rows), len(self.ranks))
            rows = everywhere & self._checker.guarded_rows(draft) & ~raising
            if rows.any():
                reached = rows & ~self._ended
                if reached.any():
                    ranks = self.vector[reached].tolist()
                    self.tables.report(invalid.code, draft.site, invalid.reason, ranks)
                raising |= rows
                first = first or invalid
        if first is None:
            return None
        message, _, _ = first.reason.partition("\n")
        return InvalidRows(raising, first.code, message)

    # --- what the operation's rules say of the resolved call ---
    def _bytes_and_signature(
        self, draft: CallDraft, call: CodeCall, unresolvable: BoolVector
    ) -> tuple[Vec, Vec]:
        """Bytes and signature of each row; adds arguments that do not fit to ``draft.invalid``."""
        if draft.row.kind in ("local", "wait", "batch"):
            return 0, _NO_SIGNATURE
        rows = np.flatnonzero(self._checker.guarded_rows(draft) & ~unresolvable)
        vectors = _varying_arguments(draft, self.vector)
        sizes = self.tables.sizes(draft.group)
        code = SharedCode(self.ranks, [], self.endpoints, self.groups)
        if len(rows) > 1 and not vectors and isinstance(sizes, int):
            # All rows have the same arguments, so the first one speaks for the others.
            facts = self._row_facts(draft, code, call, int(rows[0]))
            if facts.fault is not None:
                self._add_fault(draft, rows, facts.fault)
            return facts.nbytes, facts.signature

        nbytes = np.zeros(len(self.ranks), dtype=np.int64)
        signature = np.full(len(self.ranks), _NO_SIGNATURE, dtype=np.int64)
        known: dict[Hashable, _RowFacts] = {}
        for row in rows.tolist():
            key = (at_row(sizes, row), *(vector[row].item() for vector in vectors))
            if key not in known:
                known[key] = self._row_facts(draft, code, call, row)
            nbytes[row], signature[row], fault = known[key]
            if fault is not None:
                self._add_fault(draft, [row], fault)
        return collapse_uniform(nbytes), collapse_uniform(signature)

    def _add_fault(self, draft: CallDraft, rows: Sequence[int] | IntVector, fault: str) -> None:
        mask = np.zeros(len(self.ranks), dtype=np.bool_)
        mask[rows] = True
        draft.invalid.append(InvalidCall(mask, *fault_with_code(fault)))

    def _row_facts(self, draft: CallDraft, code: SharedCode, call: CodeCall, row: int) -> _RowFacts:
        resolved: ResolvedCall = resolve_call(code, self.tables.groups, row, call)
        fault = draft.row.faults(resolved)
        if fault is not None:
            return _RowFacts(0, _NO_SIGNATURE, fault)
        nbytes = draft.row.nbytes(resolved)
        if nbytes > _MAX_CALL_BYTES:
            fault = f"{draft.row.op} moves {nbytes:.3g} bytes, more than 2**62"
            return _RowFacts(0, _NO_SIGNATURE, fault)
        return _RowFacts(nbytes, self.tables.signature(draft.row.agreement(resolved)), None)


def fault_with_code(fault: str) -> tuple[str, str]:
    """The finding's code for an operation's fault, and the fault.

    Splits have a code of their own, and so have faults that do not concern buffers.
    """
    fault_words = fault.partition("\n")[0]
    if "split" in fault_words.lower():
        return "DS107", fault
    if re.search(r"\b(tag|channel|batch|reduce op)\b", fault_words):
        return "DS112", fault
    return "DS110", fault


def _varying_arguments(draft: CallDraft, ranks: IntVector) -> list[NDArray[np.generic]]:
    """The vectors that an operation's rules can see: shapes, roots, splits, ranks and tags.

    Peers do not matter to the rules.
    """
    found: list[NDArray[np.generic]] = []

    def collect(value: object) -> None:
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, BufferVector):
            collect(value.shape)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)

    for name in ("root", "inputs", "outputs", "input_splits", "output_splits", "ranks"):
        collect(draft.fields.get(name))
    if draft.row.root_field is not None:
        found.append(np.asarray(draft.fields["root"] == ranks))  # the root's rules differ
    if _has_lists(draft):
        found.append(ranks)
    if isinstance(draft.tag, np.ndarray):
        found.append(draft.tag)
    return found


def _has_lists(draft: CallDraft) -> bool:
    """Whether a collective has several buffers or splits, of which each rank reads its own one."""
    if draft.row.kind != "collective" or draft.row.coalesces is not None:
        return False
    names = ("inputs", "outputs", "input_splits", "output_splits")
    return any(len(draft.fields.get(name) or ()) > 1 for name in names)
