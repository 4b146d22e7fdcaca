"""Repairs of a failing scenario: each proposal is checked as its file would be, under every reading and back end, and priced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distsim.check.verdict import Verdict, verdict_of
from distsim.checking import CheckResult, check
from distsim.errors import OUT_OF_BOUNDS, DistsimError
from distsim.findings.record import Finding
from distsim.program.lower import lower
from distsim.repair.patch import diff, patched
from distsim.repair.proposals import LEAVES_OUT, Fault, Proposal, proposals
from distsim.repair.steps import Data, Path, parts_of, steps_of
from distsim.scenario import loads
from distsim.scenario.construct import construct
from distsim.scenario.document import Document, Problems, compose
from distsim.simulation import simulate

#: Changed files that are checked, of all steps together; and calls of all of them, where that is less, but not under `_LEAST` files.
MOST: Final = 1000
_CALLS: Final = 150_000
_LEAST: Final = 60
#: Tried after the first repair that leaves out nothing.
_MORE: Final = 25
#: A repair is at most so many proposals one after the other, each tried on the best few of the files before.
_STEPS: Final = 3
_BEST: Final = 3
#: Repairs that are shown.
_SHOWN: Final = 3
_STATES: Final = 2_000
_LINE: Final = re.compile(r"\bline (\d+)")
_ORDER: Final = ("ok", "leak", "race", "deadlock", "mismatch", "invalid")


class Fix(NamedTuple):
    """``words``: what is done, one a step. ``completes``: back ends on which it does. ``makespan_ns``: under the file's back end,
    simulated. ``kind``: the most intrusive of its steps (`Proposal`). ``text``: the file; ``patch``: its unified diff."""

    kind: int
    words: tuple[str, ...]
    completes: tuple[str, ...]
    makespan_ns: int
    text: str
    patch: str


class _State(NamedTuple):
    """``result``: None where the verdict alone says already that the file is not right. ``calls``: of all ranks."""

    text: str
    verdict: Verdict
    result: CheckResult | None
    calls: int
    words: tuple[str, ...] = ()
    kind: int = 0

    @property
    def right(self) -> bool:
        return self.result is not None and self.verdict.verdict == "ok" and self.result.status() == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings if self.result is None else self.result.findings

    @property
    def worth(self) -> tuple[int, int, int]:
        """Less is nearer to a program that is right."""
        return len(self.verdict.ranks), _ORDER.index(self.verdict.verdict), len(self.findings)


def fixes(text: str, file: str, *, backend: str | None = None, most: int = MOST, kinds: int = LEAVES_OUT) -> tuple[Fix, ...]:
    """Repairs that check `ok` and complete under the file's back end (or ``backend``), the best first: on more back ends, less
    intrusive, sooner done. ``kinds``: the most intrusive that are tried. Empty where none was found, nothing fails, or the file can't be
    read."""
    first = _judged(text, file, backend)
    if first is None or first.right:
        return ()
    search = _Search(file, backend, min(most, max(_LEAST, _CALLS // max(first.calls, 1))), kinds, {text})
    states = [first]
    for _ in range(_STEPS):
        left = [after for state in states for after in search.after(state)]
        if search.good:
            return tuple(sorted((_fix(s, text, file, backend) for s in search.good), key=_order)[:_SHOWN])
        states = _best(left)
    return ()


def _best(left: list[_State]) -> list[_State]:
    """The states to go on from: the best, and that of the fewest findings in which the calls are those of the file."""
    ranked = sorted(left, key=lambda s: (*s.worth, s.kind))
    same = sorted((state for state in ranked if state.kind <= 1), key=lambda s: (len(s.findings), s.worth, s.kind))
    return list({state.text: state for state in (*ranked[: _BEST - 1], *same[:1], *ranked)}.values())[:_BEST]


@dataclass
class _Search:
    """What was tried. ``most``: files that may still be, by proposals of ``kinds`` at most; ``good``: those that are right."""

    file: str
    backend: str | None
    most: int
    kinds: int
    seen: set[str]
    good: list[_State] = field(default_factory=list)

    def after(self, state: _State) -> list[_State]:
        """Files one proposal on that are not right yet."""
        left: list[_State] = []
        for changed, proposal in _changed(state, self.file):
            if self.most <= 0 or len(self.good) >= 3 * _SHOWN:
                break
            if changed in self.seen or proposal.kind > self.kinds:
                continue
            self.seen.add(changed)
            self.most -= 1
            after = _judged(changed, self.file, self.backend)
            if after is None:
                continue
            after = after._replace(words=(*state.words, proposal.words), kind=max(state.kind, proposal.kind))
            (self.good if after.right else left).append(after)
            if after.right and after.kind < LEAVES_OUT:
                self.most = min(self.most, _MORE)
        return left


def _order(fix: Fix) -> tuple[int, int, int, int]:
    return fix.kind >= LEAVES_OUT, -len(fix.completes), fix.kind, fix.makespan_ns


def _changed(state: _State, file: str) -> Iterator[tuple[str, Proposal]]:
    """The texts of what may be tried next."""
    document = _document(state.text, file)
    root: Data = document.root
    lines: dict[Path, int] = {}
    steps = steps_of(root)
    for path in (*steps, *parts_of(root, steps)):
        mark = document.mark(path)
        lines[path] = mark.line + 1 if mark is not None else 0
    found = [f for f in state.findings if f.severity != "note"]
    places = {p.line for f in found for p in f.places} | {int(n) for f in found for n in _LINE.findall(f.message)}
    fault = Fault(lines, frozenset(places), frozenset(state.verdict.culprits), state.verdict.verdict in ("mismatch", "invalid"))
    for proposal in proposals(_plain(root), fault):
        if proposal.data["program"] and not proposal.kind == state.kind == LEAVES_OUT:
            yield patched(document, proposal.data), proposal


def _plain(data: Data) -> Data:
    """Data without its nodes, which are not to be copied with every proposal."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {str(key): plain(value) for key, value in data.items()}


def _document(text: str, file: str) -> Document:
    document = Document(file, text)
    document.node = compose(document)
    document.root = construct(document, document.node, Problems(document))
    return document


def _judged(text: str, file: str, backend: str | None) -> _State | None:
    """The back ends are asked only where the verdict is ok. None for a file that is refused."""
    try:
        scenario = loads(text, file)
        program = lower(scenario)
        verdict = verdict_of(program, _STATES)
        whole = check(scenario, backend=backend, max_states=_STATES) if verdict.verdict == "ok" else None
    except (DistsimError, *OUT_OF_BOUNDS):
        return None
    return _State(text, verdict, whole, program.call_count)


def _fix(state: _State, before: str, file: str, backend: str | None) -> Fix:
    assert state.result is not None
    done = simulate(loads(state.text, file), backend=backend, with_verdict=False, with_values=False)
    completes = tuple(name for name, o in state.result.profiles.items() if o.possible == ("completes",))
    return Fix(state.kind, state.words, completes, done.makespan_ns, state.text, diff(before, state.text, file))


__all__ = ["MOST", "Fix", "fixes"]
