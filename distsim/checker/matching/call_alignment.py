"""Align the calls of two ranks on one sequence, and find where they first diverge.

Key idea: the k-th calls of all ranks meet, but a rank that makes one call too many shifts all its
later calls. Comparing calls by number then blames an innocent line. So the calls are aligned as
`diff` aligns the lines of two files: a call may have a counterpart, or be alone.

The cost of a pair depends on its operation, its arguments and its line. Two calls at one line are
probably the same call, even if their arguments differ. Two calls that agree in everything but the
line may still be two different calls, unless each line is used by one rank only: ranks of a file
with one block per rank share no line.

Cost: a common beginning is skipped in linear time. Only a window behind it is aligned with dynamic
programming, and further windows follow only if the calls of a window all have counterparts.

Source: Needleman and Wunsch, doi:10.1016/0022-2836(70)90057-4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

#: ``extra``: calls that only the first rank makes; ``missing``: calls that only the second makes.
#: ``swapped``: the first rank makes a call earlier or later than the second. ``replaced``: the
#: first makes other calls in place of the second's. ``arguments``: one call with other arguments.
DivergenceKind = Literal["extra", "missing", "swapped", "replaced", "arguments"]

#: Calls of each rank that are aligned at once, and windows that are aligned at most.
WINDOW: Final = 96
_MAX_WINDOWS: Final = 32

# Costs of an alignment. Only their order matters: it decides which explanation of two lists wins.
#: A call alone.
_GAP: Final = 4
#: A call alone at a line that only one of the two ranks uses. Such a line is that of a branch, so
#: this is a better explanation than a gap elsewhere.
_GAP_AT_OWN_LINE: Final = 3
#: A pair that differs in one respect costs less than one gap: probably it is the same call.
_OTHER_LINE: Final = 2
_OTHER_ARGUMENTS: Final = 2
#: A pair that differs in both costs no more than two calls alone, even at lines of branches. So it
#: is still a pair, unless other calls fit better.
_OTHER_LINE_AND_ARGUMENTS: Final = 2 * _GAP_AT_OWN_LINE
#: More than two gaps, so that calls of different operations are never counterparts.
_NO_COUNTERPART: Final = 3 * _GAP


class AlignedCall(NamedTuple):
    """What the alignment needs to know of a call.

    ``site`` numbers the line; ``signature`` the arguments on which members must agree, operation
    included. ``column`` is the indentation of the line.
    """

    site: int
    op: str
    signature: int
    column: int = 0


class SequenceDivergence(NamedTuple):
    """The first place where two lists of calls diverge.

    ``own`` and ``other`` are the indices there. ``own_calls`` and ``other_calls`` are the indices
    of the calls without counterpart, or of the calls that differ. Calls without counterpart include
    the later ones of the same cause. Of swapped calls, these are the two occurrences of the call
    that changed places.
    """

    kind: DivergenceKind
    own: int
    other: int
    own_calls: tuple[int, ...] = ()
    other_calls: tuple[int, ...] = ()


class _Step(NamedTuple):
    """A step of an alignment: a pair of calls, or one call alone (the other index is None)."""

    own: int | None
    other: int | None


class _Window(NamedTuple):
    """The alignment of a window; ``left`` are calls behind it, whose counterparts may follow."""

    steps: list[_Step]
    left: list[_Step]


def first_divergence(
    own: Sequence[AlignedCall], other: Sequence[AlignedCall], *, stopped: bool = False
) -> SequenceDivergence | None:
    """Where the calls of one rank first diverge from those of another; None if nowhere.

    ``stopped``: the run was stopped before the ranks made all their calls, so the end of a list
    means nothing.
    """
    return _Alignment(own, other, stopped).first_divergence()


class _Alignment:
    """The alignment of two lists of calls."""

    def __init__(
        self, own: Sequence[AlignedCall], other: Sequence[AlignedCall], stopped: bool
    ) -> None:
        self.own, self.other, self.stopped = own, other, stopped
        self.own_sites = {call.site for call in own}
        self.other_sites = {call.site for call in other}

    def first_divergence(self) -> SequenceDivergence | None:
        i, j = self._skip_equal(0, 0)
        for _ in range(_MAX_WINDOWS):
            if i == len(self.own) or j == len(self.other):
                return self._divergence_at_end(i, j)
            window = self._align_window(i, j)
            found = self._classify(window, i, j)
            if found is not None:
                return found
            i, j = self._skip_equal(i + len(window.steps), j + len(window.steps))
        return None

    # --- the common beginning ---
    def _skip_equal(self, i: int, j: int) -> tuple[int, int]:
        """The indices behind the calls that certainly are counterparts."""
        while i < len(self.own) and j < len(self.other):
            own, other = self.own[i], self.other[j]
            if own.signature != other.signature or self._line_cost(own, other):
                break
            i, j = i + 1, j + 1
        return i, j

    def _line_cost(self, own: AlignedCall, other: AlignedCall) -> int:
        """0 if two calls may stand at the same place of the program, as far as lines tell."""
        if own.site == other.site:
            return 0
        is_apart = own.site not in self.other_sites and other.site not in self.own_sites
        return 0 if is_apart else _OTHER_LINE

    def _divergence_at_end(self, i: int, j: int) -> SequenceDivergence | None:
        """One list is at its end: the rest of the other has no counterpart."""
        if self.stopped or (i == len(self.own) and j == len(self.other)):
            return None
        if i < len(self.own):
            return SequenceDivergence("extra", i, j, tuple(range(i, len(self.own))))
        return SequenceDivergence("missing", i, j, (), tuple(range(j, len(self.other))))

    # --- one window ---
    def _align_window(self, i: int, j: int) -> _Window:
        """The cheapest alignment of the calls from (i, j) on.

        The window ends where one of the two lists of calls does. What the longer one has left is
        free of cost, unless both windows reach the end of the program.
        """
        rows = min(WINDOW, len(self.own) - i)
        columns = min(WINDOW, len(self.other) - j)
        costs = self._suffix_costs(i, j, rows, columns)
        steps: list[_Step] = []
        a = b = 0
        while a < rows and b < columns:
            if costs[a][b] == self._pair_cost(i + a, j + b) + costs[a + 1][b + 1]:
                steps.append(_Step(i + a, j + b))
                a, b = a + 1, b + 1
            elif costs[a][b] == self._gap_cost(self.own[i + a], self.other_sites) + costs[a + 1][b]:
                steps.append(_Step(i + a, None))
                a += 1
            else:
                steps.append(_Step(None, j + b))
                b += 1
        left = [_Step(i + rest, None) for rest in range(a, rows)]
        left += [_Step(None, j + rest) for rest in range(b, columns)]
        if self._is_whole(i, j, rows, columns):
            return _Window(steps + left, [])
        return _Window(steps, left)

    def _is_whole(self, i: int, j: int, rows: int, columns: int) -> bool:
        """Whether the window contains all calls that are left, and no more would follow."""
        return not self.stopped and rows == len(self.own) - i and columns == len(self.other) - j

    def _suffix_costs(self, i: int, j: int, rows: int, columns: int) -> list[list[int]]:
        """By (a, b): the cost of aligning the window's calls from a and b on."""
        own_gaps = [self._gap_cost(self.own[i + a], self.other_sites) for a in range(rows)]
        other_gaps = [self._gap_cost(self.other[j + b], self.own_sites) for b in range(columns)]
        last = [0] * (columns + 1)
        is_whole = self._is_whole(i, j, rows, columns)
        if is_whole:
            for b in reversed(range(columns)):
                last[b] = last[b + 1] + other_gaps[b]
        costs = [last]
        for a in reversed(range(rows)):
            below, row = costs[-1], [0] * (columns + 1)
            row[columns] = below[columns] + own_gaps[a] if is_whole else 0
            for b in reversed(range(columns)):
                row[b] = min(
                    self._pair_cost(i + a, j + b) + below[b + 1],
                    own_gaps[a] + below[b],
                    other_gaps[b] + row[b + 1],
                )
            costs.append(row)
        costs.reverse()
        return costs

    def _gap_cost(self, call: AlignedCall, sites: set[int]) -> int:
        return _GAP if call.site in sites else _GAP_AT_OWN_LINE

    def _pair_cost(self, i: int, j: int) -> int:
        own, other = self.own[i], self.other[j]
        if own.op != other.op:
            return _NO_COUNTERPART
        if own.signature == other.signature:
            return self._line_cost(own, other)
        return _OTHER_ARGUMENTS if not self._line_cost(own, other) else _OTHER_LINE_AND_ARGUMENTS

    # --- classification ---
    def _classify(self, window: _Window, i: int, j: int) -> SequenceDivergence | None:
        """The first divergence in a window that starts at (i, j)."""
        for k, (own, other) in enumerate(window.steps):
            if own is None or other is None:
                return self._classify_gap(_Window(window.steps[k:], window.left), i, j)
            if self.own[own].signature != self.other[other].signature:
                return SequenceDivergence("arguments", own, other, (own,), (other,))
            i, j = own + 1, other + 1
        return None

    def _classify_gap(self, window: _Window, i: int, j: int) -> SequenceDivergence:
        """The divergence at (i, j), where a call has no counterpart and the window begins.

        Explanations are tried in this order: the same call occurs later; the run was stopped, so
        nothing later can tell; both ranks make other calls; one rank makes calls in addition.
        """
        own_calls: list[int] = []
        other_calls: list[int] = []
        length = 0
        for own, other in window.steps:
            if own is not None and other is not None:
                break
            length += 1
            if own is not None:
                own_calls.append(own)
            elif other is not None:
                other_calls.append(other)
        rest = window.steps[length:]
        later = self._same_call_later(own_calls, other_calls, rest + window.left)
        is_one_sided = not (own_calls and other_calls)
        if is_one_sided and later is not None:
            return later
        if self.stopped and not rest:
            guessed = self._guess_at_stop(i, j)
            return guessed or SequenceDivergence("replaced", i, j, (i,), (j,))
        if not is_one_sided:
            return SequenceDivergence("replaced", i, j, tuple(own_calls), tuple(other_calls))
        # Later calls alone count as consequences of the same cause. If both ranks have some, only
        # those at the same lines do.
        later_own = [own for own, other in rest if own is not None and other is None]
        later_other = [other for own, other in rest if other is not None and own is None]
        if own_calls:
            if later_other:
                later_own = self._at_same_lines(self.own, own_calls, later_own)
            own_calls += later_own or self._all_at_own_lines(own_calls)
            return SequenceDivergence("extra", i, j, tuple(own_calls))
        if later_own:
            later_other = self._at_same_lines(self.other, other_calls, later_other)
        return SequenceDivergence("missing", i, j, (), (*other_calls, *later_other))

    @staticmethod
    def _at_same_lines(
        calls: Sequence[AlignedCall], first: list[int], lone: list[int]
    ) -> list[int]:
        """The later calls without counterpart that stand at the lines of the first ones."""
        sites = {calls[index].site for index in first}
        return [index for index in lone if calls[index].site in sites]

    def _all_at_own_lines(self, first: list[int]) -> list[int]:
        """All later calls at lines that the other rank never uses, beyond the window as well."""
        sites = {self.own[index].site for index in first} - self.other_sites
        start = first[-1] + 1
        return [index for index in range(start, len(self.own)) if self.own[index].site in sites]

    def _same_call_later(
        self, own_calls: list[int], other_calls: list[int], rest: list[_Step]
    ) -> SequenceDivergence | None:
        """What follows if one rank makes the first lone call later, alone as well.

        Then the ranks have swapped calls, or one rank makes further calls before it. Both halves do
        the same, with the ranks exchanged.
        """
        if own_calls:
            i = own_calls[0]
            for position, (own, j) in enumerate(rest):
                if own is None and j is not None and self._is_same_call(i, j):
                    passed = [step.other for step in rest[:position] if step.other is not None]
                    if self._are_skipped([self.other[k] for k in passed], self.own_sites):
                        skipped = self._first_of_one_line(self.other, passed)
                        return SequenceDivergence("missing", i, passed[0], (), skipped)
                    return SequenceDivergence("swapped", i, j, (i,), (j,))
            return None
        j = other_calls[0]
        for position, (i_later, other) in enumerate(rest):
            if other is None and i_later is not None and self._is_same_call(i_later, j):
                passed = [step.own for step in rest[:position] if step.own is not None]
                if self._are_skipped([self.own[k] for k in passed], self.other_sites):
                    extra = self._first_of_one_line(self.own, passed)
                    return SequenceDivergence("extra", passed[0], j, extra)
                return SequenceDivergence("swapped", i_later, j, (i_later,), (j,))
        return None

    def _are_skipped(self, calls: Sequence[AlignedCall], sites: set[int]) -> bool:
        """Whether a rank makes these calls at lines that the other, which was stopped, never uses.

        Then the other rank skips them, and the next call of both is not swapped. For example, a
        broadcast of an object makes several calls at one line.
        """
        return self.stopped and bool(calls) and all(call.site not in sites for call in calls)

    @staticmethod
    def _first_of_one_line(calls: Sequence[AlignedCall], indices: list[int]) -> tuple[int, ...]:
        """The first of calls that are all at one line, where the script has one call; else all."""
        is_one_line = len({calls[index].site for index in indices}) == 1
        return tuple(indices[:1] if is_one_line else indices)

    def _is_same_call(self, i: int, j: int) -> bool:
        own, other = self.own[i], self.other[j]
        return own.signature == other.signature and not self._line_cost(own, other)

    def _guess_at_stop(self, i: int, j: int) -> SequenceDivergence | None:
        """The divergence where a run was stopped, so that no later call shows what is missing.

        A line that only one rank uses is that of a branch, and its call is extra. If the line is
        less indented than the other's, it comes after the other's loop: then the rank has skipped
        the other's call. None if the lines tell nothing.
        """
        own, other = self.own[i], self.other[j]
        own_only, other_only = own.site not in self.other_sites, other.site not in self.own_sites
        if own_only == other_only:
            return None
        is_extra = own.column >= other.column if own_only else other.column < own.column
        if is_extra:
            return SequenceDivergence("extra", i, j, (i,))
        return SequenceDivergence("missing", i, j, (), (j,))
