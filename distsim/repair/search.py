"""Repairs of a failing scenario: each proposal is checked as its file would be, under every reading
and back end, and priced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import RESOURCE_ERRORS, DistsimError
from distsim.findings.finding_types import Finding
from distsim.program.lower import lower
from distsim.repair.proposals import REMOVES_CALLS, FailureHints, RepairProposal, propose_repairs
from distsim.repair.scenario_data import DataPath, ScenarioData, batch_part_paths, step_paths
from distsim.repair.text_patch import patched_text, unified_diff
from distsim.scenario import loads
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.simulation.check_scenario import CheckResult, check_scenario
from distsim.simulation.simulate_scenario import simulate

#: Changed files that are checked, of all steps together; and calls of all of them, where that is
#: less, but not under `_MIN_TRIALS` files.
MAX_REPAIR_TRIALS: Final = 1000
_MAX_CHECKED_CALLS: Final = 150_000
_MIN_TRIALS: Final = 60
#: Tried after the first repair that leaves out nothing.
_TRIALS_AFTER_FIRST: Final = 25
#: A repair is at most so many proposals one after the other, each tried on the best few of the
#: files before.
_MAX_REPAIR_STEPS: Final = 3
_KEPT_CANDIDATES: Final = 3
#: Repairs that are shown.
_MAX_SHOWN: Final = 3
_MAX_STATES: Final = 2_000
_LINE_PATTERN: Final = re.compile(r"\bline (\d+)")
_VERDICT_ORDER: Final = ("ok", "leak", "race", "deadlock", "mismatch", "invalid")


class ScenarioRepair(NamedTuple):
    """``words``: what is done, one a step. ``completes``: back ends on which it does.
    ``makespan_ns``: under the file's back end, simulated. ``kind``: the most intrusive of its steps
    (`RepairProposal`). ``text``: the file; ``patch``: its unified diff."""

    kind: int
    words: tuple[str, ...]
    completes: tuple[str, ...]
    makespan_ns: int
    text: str
    patch: str


class _RepairCandidate(NamedTuple):
    """``result``: None where the verdict alone says already that the file is not right. ``calls``:
    of all ranks.
    """

    text: str
    verdict: Verdict
    result: CheckResult | None
    calls: int
    words: tuple[str, ...] = ()
    kind: int = 0

    @property
    def right(self) -> bool:
        return (
            self.result is not None and self.verdict.verdict == "ok" and self.result.status() == 0
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings if self.result is None else self.result.findings

    @property
    def worth(self) -> tuple[int, int, int]:
        """Less is nearer to a program that is right."""
        return (
            len(self.verdict.ranks),
            _VERDICT_ORDER.index(self.verdict.verdict),
            len(self.findings),
        )


def find_repairs(
    text: str,
    file: str,
    *,
    backend: str | None = None,
    most: int = MAX_REPAIR_TRIALS,
    kinds: int = REMOVES_CALLS,
) -> tuple[ScenarioRepair, ...]:
    """Repairs that check `ok` and complete under the file's back end (or ``backend``), the best
    first: on more back ends, less intrusive, sooner done. ``kinds``: the most intrusive that are
    tried. Empty where none was found, nothing fails, or the file can't be read."""
    first = _checked_candidate(text, file, backend)
    if first is None or first.right:
        return ()
    search = _RepairSearch(
        file,
        backend,
        min(most, max(_MIN_TRIALS, _MAX_CHECKED_CALLS // max(first.calls, 1))),
        kinds,
        {text},
    )
    states = [first]
    for _ in range(_MAX_REPAIR_STEPS):
        left = [after for state in states for after in search.after(state)]
        if search.good:
            return tuple(
                sorted(
                    (_finished_repair(s, text, file, backend) for s in search.good), key=_preference
                )[:_MAX_SHOWN]
            )
        states = _best_candidates(left)
    return ()


def _best_candidates(left: list[_RepairCandidate]) -> list[_RepairCandidate]:
    """The states to go on from: the best, and that of the fewest findings in which the calls are
    those of the file.
    """
    ranked = sorted(left, key=lambda s: (*s.worth, s.kind))
    same = sorted(
        (state for state in ranked if state.kind <= 1),
        key=lambda s: (len(s.findings), s.worth, s.kind),
    )
    return list(
        {
            state.text: state for state in (*ranked[: _KEPT_CANDIDATES - 1], *same[:1], *ranked)
        }.values()
    )[:_KEPT_CANDIDATES]


@dataclass
class _RepairSearch:
    """What was tried. ``most``: files that may still be, by proposals of ``kinds`` at most;
    ``good``: those that are right.
    """

    file: str
    backend: str | None
    most: int
    kinds: int
    seen: set[str]
    good: list[_RepairCandidate] = field(default_factory=list)

    def after(self, state: _RepairCandidate) -> list[_RepairCandidate]:
        """Files one proposal on that are not right yet."""
        left: list[_RepairCandidate] = []
        for changed, proposal in _proposed_texts(state, self.file):
            if self.most <= 0 or len(self.good) >= 3 * _MAX_SHOWN:
                break
            if changed in self.seen or proposal.kind > self.kinds:
                continue
            self.seen.add(changed)
            self.most -= 1
            after = _checked_candidate(changed, self.file, self.backend)
            if after is None:
                continue
            after = after._replace(
                words=(*state.words, proposal.words), kind=max(state.kind, proposal.kind)
            )
            (self.good if after.right else left).append(after)
            if after.right and after.kind < REMOVES_CALLS:
                self.most = min(self.most, _TRIALS_AFTER_FIRST)
        return left


def _preference(fix: ScenarioRepair) -> tuple[int, int, int, int]:
    return fix.kind >= REMOVES_CALLS, -len(fix.completes), fix.kind, fix.makespan_ns


def _proposed_texts(state: _RepairCandidate, file: str) -> Iterator[tuple[str, RepairProposal]]:
    """The texts of what may be tried next."""
    document = _parse_document(state.text, file)
    root: ScenarioData = document.root
    lines: dict[DataPath, int] = {}
    steps = step_paths(root)
    for path in (*steps, *batch_part_paths(root, steps)):
        mark = document.mark(path)
        lines[path] = mark.line + 1 if mark is not None else 0
    found = [f for f in state.findings if f.severity != "note"]
    places = {p.line for f in found for p in f.places} | {
        int(n) for f in found for n in _LINE_PATTERN.findall(f.message)
    }
    fault = FailureHints(
        lines,
        frozenset(places),
        frozenset(state.verdict.culprits),
        state.verdict.verdict in ("mismatch", "invalid"),
    )
    for proposal in propose_repairs(_plain_data(root), fault):
        if proposal.data["program"] and not proposal.kind == state.kind == REMOVES_CALLS:
            yield patched_text(document, proposal.data), proposal


def _plain_data(data: ScenarioData) -> ScenarioData:
    """Data without its nodes, which are not to be copied with every proposal."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {str(key): plain(value) for key, value in data.items()}


def _parse_document(text: str, file: str) -> YamlDocument:
    document = YamlDocument(file, text)
    document.node = compose(document)
    document.root = construct(document, document.node, ProblemCollector(document))
    return document


def _checked_candidate(text: str, file: str, backend: str | None) -> _RepairCandidate | None:
    """The back ends are asked only where the verdict is ok. None for a file that is refused."""
    try:
        scenario = loads(text, file)
        program = lower(scenario)
        verdict = verdict_of(program, _MAX_STATES)
        whole = (
            check_scenario(scenario, backend=backend, max_states=_MAX_STATES)
            if verdict.verdict == "ok"
            else None
        )
    except (DistsimError, *RESOURCE_ERRORS):
        return None
    return _RepairCandidate(text, verdict, whole, program.call_count)


def _finished_repair(
    state: _RepairCandidate, before: str, file: str, backend: str | None
) -> ScenarioRepair:
    assert state.result is not None
    done = simulate(loads(state.text, file), backend=backend, with_verdict=False, with_values=False)
    completes = tuple(
        name for name, o in state.result.profiles.items() if o.possible == ("completes",)
    )
    return ScenarioRepair(
        state.kind,
        state.words,
        completes,
        done.makespan_ns,
        state.text,
        unified_diff(before, state.text, file),
    )


__all__ = ["MAX_REPAIR_TRIALS", "ScenarioRepair", "find_repairs"]
