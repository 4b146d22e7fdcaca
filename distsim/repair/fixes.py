"""Repairs of a failing scenario: each proposal is checked as its file would be, under every reading and back end, and priced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from distsim.checking import CheckResult, check
from distsim.errors import OUT_OF_BOUNDS, DistsimError
from distsim.repair.patch import diff, patched
from distsim.repair.proposals import LEAVES_OUT, Data, Path, Proposal, proposals, steps_of
from distsim.scenario import loads
from distsim.scenario.construct import construct
from distsim.scenario.document import Document, compose
from distsim.scenario.problems import Problems
from distsim.simulation import simulate

#: Changed files that are checked, of all steps together.
MOST: Final = 400
#: A repair is at most so many proposals one after the other, each tried on the best few of the files before.
_STEPS: Final = 3
_BEST: Final = 3
#: Repairs that are shown.
_SHOWN: Final = 3
_STATES: Final = 20_000
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
    text: str
    result: CheckResult
    words: tuple[str, ...]
    kind: int

    @property
    def worth(self) -> tuple[int, int, int]:
        """Less is nearer to a program that is right."""
        assert self.result.verdict is not None
        verdict = self.result.verdict
        return len(verdict.ranks), _ORDER.index(verdict.verdict), len(self.result.findings)


def fixes(text: str, file: str, *, backend: str | None = None, most: int = MOST) -> tuple[Fix, ...]:
    """Repairs that check `ok` and complete under the file's back end (or ``backend``), the best first: on more back ends, less
    intrusive, sooner done. Empty where none was found, or nothing fails. Raises ScenarioErrors."""
    first = _State(text, check(loads(text, file), backend=backend), (), 0)
    if _right(first.result):
        return ()
    states, tried, seen = [first], 0, {text}
    for _ in range(_STEPS):
        left, good = [], []
        for state in states:
            for changed, proposal in _changed(state, file):
                if changed in seen or tried >= most:
                    continue
                seen.add(changed)
                tried += 1
                result = _checked(changed, file, backend)
                if result is None or result.verdict is None:
                    continue
                after = _State(changed, result, (*state.words, proposal.words), max(state.kind, proposal.kind))
                (good if _right(result) else left).append(after)
                if len(good) >= 3 * _SHOWN:
                    break
        if good:
            return tuple(sorted((_fix(s, text, file, backend) for s in good), key=_order)[:_SHOWN])
        states = sorted(left, key=lambda s: s.worth)[:_BEST]
    return ()


def _right(result: CheckResult) -> bool:
    return result.verdict is not None and result.verdict.verdict == "ok" and result.status() == 0


def _order(fix: Fix) -> tuple[int, int, int, int]:
    return fix.kind >= LEAVES_OUT, -len(fix.completes), fix.kind, fix.makespan_ns


def _changed(state: _State, file: str) -> Iterator[tuple[str, Proposal]]:
    """The texts of what may be tried next."""
    document = _document(state.text, file)
    root: Data = document.root
    lines: dict[Path, int] = {}
    for path in steps_of(root):
        mark = document.mark(path)
        lines[path] = mark.line + 1 if mark is not None else 0
    found = [f for f in state.result.findings if f.severity != "note"]
    places = {p.line for f in found for p in f.places} | {int(n) for f in found for n in _LINE.findall(f.message)}
    for proposal in proposals(_plain(root), lines, frozenset(places)):
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


def _checked(text: str, file: str, backend: str | None) -> CheckResult | None:
    try:
        return check(loads(text, file), backend=backend, max_states=_STATES)
    except (DistsimError, *OUT_OF_BOUNDS):
        return None


def _fix(state: _State, before: str, file: str, backend: str | None) -> Fix:
    done = simulate(loads(state.text, file), backend=backend, with_verdict=False, with_values=False)
    completes = tuple(name for name, o in state.result.profiles.items() if o.possible == ("completes",))
    return Fix(state.kind, state.words, completes, done.makespan_ns, state.text, diff(before, state.text, file))


__all__ = ["MOST", "Fix", "fixes"]
