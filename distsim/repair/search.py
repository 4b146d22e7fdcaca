"""Search for repairs of a failing scenario.

Each proposal (`proposals`) is checked as a file of its own, under every reading and backend. The
search is a beam search: it applies up to three proposals one after the other, and each step starts
from the best few files of the step before. It is bounded by the number of checked files, so an
empty result does not mean that no repair exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import RESOURCE_ERRORS, DistsimError
from distsim.findings.finding_types import Finding
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.repair.data_flow import NO_FLOW_CHANGE, DataFlow, FlowChange
from distsim.repair.declared_names import unused_names
from distsim.repair.exchanged_data import (
    DataLoss,
    ExchangedData,
    completed_contributions,
    outlier_ranks,
)
from distsim.repair.filled_tensors import NO_TENSOR_CHANGE, FilledTensors, TensorChange
from distsim.repair.name_places import with_place
from distsim.repair.proposals import (
    CHANGES_ARGUMENTS,
    REMOVES_CALLS,
    FailureHints,
    RepairProposal,
    propose_repairs,
)
from distsim.repair.rank_repairs import RepairDoubts, ScenarioRepair, preference
from distsim.repair.result_doubts import ProgramResults, ResultChange
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    batch_part_paths,
    op_of,
    plain_data,
    step_paths,
    value_at,
    with_selected_ranks,
)
from distsim.repair.text_hints import TextHints, unusual_orders
from distsim.repair.text_patch import line_numbers_before, patched_text, unified_diff
from distsim.repair.update_expectations import updated_expectations
from distsim.repair.written_numbers import numbers_for_expressions
from distsim.scenario import loads
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.simulation.check_scenario import CheckResult, check_scenario
from distsim.simulation.simulate_scenario import simulate

#: Limits for the changed files that are checked in all steps together: their number, and the number
#: of their calls; but at least `_MIN_TRIALS` files.
MAX_REPAIR_TRIALS: Final = 1000
_MAX_CHECKED_CALLS: Final = 20_000
_MIN_TRIALS: Final = 40
#: Files that are checked after the first repair: if it keeps all data and the calls of all correct
#: ranks, and otherwise.
_TRIALS_AFTER_BEST: Final = 25
_TRIALS_AFTER_FIRST: Final = 150
#: Repairs among which the search chooses.
_MAX_REPAIRED: Final = 16
#: Proposals of one repair, and files with which each step continues.
_MAX_REPAIR_STEPS: Final = 3
_KEPT_CANDIDATES: Final = 3
#: Repairs that are returned.
_MAX_SHOWN: Final = 3
_MAX_STATES: Final = 2_000
_LINE_PATTERN: Final = re.compile(r"\bline (\d+)")
#: Verdicts, the best first.
_VERDICT_ORDER: Final = ("ok", "leak", "race", "deadlock", "mismatch", "invalid")


class _RepairCandidate(NamedTuple):
    """A checked file.

    ``result`` is None if the verdict alone shows that the file is not repaired. ``program`` is None
    while the file waits for the next step: hundreds of programs would fill the memory.
    """

    text: str
    verdict: Verdict
    result: CheckResult | None
    program: Program | None
    words: tuple[str, ...] = ()
    kind: int = 0
    loss: DataLoss = DataLoss(0, 0, 0)
    flow: FlowChange = NO_FLOW_CHANGE
    tensors: TensorChange = NO_TENSOR_CHANGE
    results: ResultChange = ResultChange()
    doubts: RepairDoubts = RepairDoubts()

    @property
    def is_repaired(self) -> bool:
        if self.result is None or self.verdict.verdict != "ok":
            return False
        return self.result.status() == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings if self.result is None else self.result.findings

    @property
    def distance(self) -> tuple[int, int, int]:
        """How far the program is from a correct one; less is better."""
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
    """Repairs with the verdict `ok` that complete under the file's backend (or ``backend``).

    The best come first: those that keep the data of the correct ranks, complete on more backends,
    keep the calls of the majority of ranks, and change the fewest lines. A repair that removes data
    which correct ranks exchanged before the failure, or a reduction on all ranks, is none.
    ``most``: files to check at most. ``kinds``: the most intrusive kind of proposal to try. Empty
    if none was found, nothing fails, or the file cannot be read.
    """
    first = _checked_candidate(text, file, backend)
    if first is None or first.is_repaired:
        return ()
    affordable = max(_MIN_TRIALS, _MAX_CHECKED_CALLS // max(_program_of(first).call_count, 1))
    search = _RepairSearch(file, backend, min(most, affordable), kinds, {text}, _Original(first))
    candidates = [first]
    for step in range(_MAX_REPAIR_STEPS):
        changed = search.extend_all(candidates, is_last=step == _MAX_REPAIR_STEPS - 1)
        if search.repaired:
            chosen = _without_needless_losses(search.repaired)
            repairs = [_finished_repair(each, text, file, backend) for each in chosen]
            return tuple(sorted(repairs, key=preference)[:_MAX_SHOWN])
        candidates = _best_candidates(changed)
    return ()


def _without_needless_losses(repaired: list[_RepairCandidate]) -> list[_RepairCandidate]:
    """The repairs without those that lose data which another repair keeps.

    Equal loops may drop iterations of some ranks: training does so on purpose (drop_last).
    """
    # An added send of a tensor without content keeps no data.
    with_content = [each for each in repaired if not each.flow.empty_sends]
    least = min(each.loss.ended for each in with_content or repaired)

    def is_shown(repair: _RepairCandidate) -> bool:
        drops_iterations = (
            repair.kind < REMOVES_CALLS and repair.loss.lost <= repair.loss.fewer_calls
        )
        return repair.loss.ended == least or drops_iterations

    return list(filter(is_shown, repaired))


def _best_candidates(candidates: list[_RepairCandidate]) -> list[_RepairCandidate]:
    """The files to continue with.

    These are the best ones, and among those with the calls of the original file the one with the
    fewest findings.
    """
    ranked = sorted(candidates, key=lambda each: (*each.distance, each.kind))
    with_same_calls = [each for each in ranked if each.kind <= CHANGES_ARGUMENTS]
    with_same_calls.sort(key=lambda each: (len(each.findings), each.distance, each.kind))
    chosen = (*ranked[: _KEPT_CANDIDATES - 1], *with_same_calls[:1], *ranked)
    by_text = {each.text: each for each in chosen}
    return list(by_text.values())[:_KEPT_CANDIDATES]


class _Original:
    """What a repair must keep of the file that it repairs."""

    def __init__(self, first: _RepairCandidate) -> None:
        program, verdict = _program_of(first), first.verdict
        self.text = first.text
        self.content = plain_data(_parse_document(first.text, "").root)
        self.tensors = FilledTensors(program)
        self.data = ExchangedData(program, self.tensors.empty_roots)
        self.flow = DataFlow(program)
        self.undefined_reads = self.flow.undefined_reads()
        self.results = ProgramResults(program)
        self.hints = TextHints(first.text, self.content, program)
        # A race or a leak is a fault in the order of events: the data of all ranks are right.
        is_misbehaviour = verdict.verdict not in ("race", "leak")
        outliers = set(verdict.culprits) if is_misbehaviour else set()
        outliers |= outlier_ranks(program)
        if verdict.verdict == "invalid" and 2 * len(verdict.ranks) < program.world_size:
            outliers.update(verdict.ranks)
        misled = self.data.ranks_naming(self.tensors.empty_roots)
        self.outliers = frozenset(misled or outliers)
        self.completed = completed_contributions(program, _positions_before_failure(first))

    def doubts_about(self, text: str, program: Program) -> RepairDoubts:
        """Signs that a changed program is not what the author meant."""
        document = _parse_document(text, "")
        data = plain_data(document.root)
        conflicting, unusual = unusual_orders(program)
        return RepairDoubts(
            self.hints.contradictions(data, program),
            conflicting,
            unusual,
            len(unused_names(data)),
            unreached=_unreached_steps(document, program),
            fixed_numbers=numbers_for_expressions(self.content, data),
        )

    def loss_in(self, program: Program, tensors: FilledTensors) -> DataLoss | None:
        """What a changed program loses; None if this makes it no repair."""
        changed = ExchangedData(program, substitutes=self.tensors.substitutes_in(tensors))
        if self.data.drops_collective(changed):
            return None
        if self.data.lost_exchanges(changed, self.completed, self.outliers):
            return None
        return self.data.loss_in(changed, self.outliers)


def _unreached_steps(document: YamlDocument, program: Program) -> int:
    """How many calls of a file no rank makes, such as an exit in an iteration that no rank runs."""
    sites = (call.site for code in program.codes for call in code.distinct_calls())
    reached = {program.sites[site].line for site in sites}
    calls = [path for path in step_paths(document.root) if op_of(value_at(document.root, path))]
    marks = (document.mark(path) for path in calls)
    return sum(mark is not None and mark.line + 1 not in reached for mark in marks)


def _program_of(state: _RepairCandidate, file: str = "") -> Program:
    return state.program or lower(loads(state.text, file))


def _positions_before_failure(first: _RepairCandidate) -> dict[int, int]:
    """By rank, the position of the call that it was in, or of the first call with a fault."""
    program, state = _program_of(first), first.verdict.final_state
    ends = {} if state is None else {end.rank: end.position for end in state.ends}
    # Ranks that only wait for each other have no faulty call before the one they are in, and ranks
    # whose data race have none at all.
    is_call_faulty = first.verdict.verdict not in ("deadlock", "race", "leak")
    lines = _named_lines(first) if is_call_faulty else frozenset()
    positions = {}
    for rank in program.present:
        made = [position for position, _ in program.calls_of(rank)]
        named = (k for k in made if program.place(rank, k).line in lines)
        end = ends.get(rank, made[-1] + 1 if made else 0)
        positions[rank] = min(end, next(named, end))
    return positions


def _named_lines(state: _RepairCandidate) -> frozenset[int]:
    """The lines that errors and warnings name."""
    named: set[int] = set()
    for finding in state.findings:
        if finding.severity != "note":
            named.update(place.line for place in finding.places)
            named.update(int(line) for line in _LINE_PATTERN.findall(finding.message))
    return frozenset(named)


@dataclass
class _RepairSearch:
    """The state of a search.

    ``trials_left``: files that may still be checked. ``max_kind``: the most intrusive kind of
    proposal. ``seen``: the texts that were checked. ``original``: the data to keep. ``repaired``:
    the repairs found.
    """

    file: str
    backend: str | None
    trials_left: int
    max_kind: int
    seen: set[str]
    original: _Original
    repaired: list[_RepairCandidate] = field(default_factory=list)

    def extend_all(
        self, candidates: list[_RepairCandidate], is_last: bool
    ) -> list[_RepairCandidate]:
        """Check the candidates with one more proposal each; return those not repaired yet.

        All steps but the last use half of the trials that are left, in equal shares.
        """
        trials = self.trials_left if is_last else math.ceil(self.trials_left / 2)
        share = math.ceil(trials / max(len(candidates), 1))
        unrepaired: list[_RepairCandidate] = []
        for candidate in candidates:
            unrepaired += self._extend(candidate, share)
        return unrepaired

    def _extend(self, candidate: _RepairCandidate, most: int) -> list[_RepairCandidate]:
        """Check the candidate with one more proposal, ``most`` files at most."""
        unrepaired: list[_RepairCandidate] = []
        trials = 0
        for text, proposal in _proposed_texts(candidate, self.file, self.original):
            is_exhausted = trials >= most or self.trials_left <= 0
            if is_exhausted or len(self.repaired) >= _MAX_REPAIRED:
                break
            if text in self.seen or proposal.kind > self.max_kind:
                continue
            self.seen.add(text)
            trials += 1
            self.trials_left -= 1
            changed = _checked_candidate(text, self.file, self.backend)
            if changed is None:
                continue
            changed = changed._replace(
                words=(*candidate.words, proposal.words), kind=max(candidate.kind, proposal.kind)
            )
            if not changed.is_repaired:
                unrepaired.append(changed._replace(program=None))
                continue
            program = _program_of(changed)
            filled = FilledTensors(program)
            loss = self.original.loss_in(program, filled)
            tensors = self.original.tensors.change_in(filled, self.original.outliers)
            discards_result = changed.kind >= REMOVES_CALLS and tensors.unfilled > 0
            if loss is None or discards_result:
                continue
            flow = self.original.flow.change_in(DataFlow(program))
            results = self.original.results.change_in(
                ProgramResults(program), self.original.outliers
            )
            doubts = self.original.doubts_about(text, program)
            warnings = sum(finding.severity == "warning" for finding in changed.findings)
            doubts = doubts._replace(warnings=warnings)
            repaired = changed._replace(
                program=None, loss=loss, flow=flow, tensors=tensors, results=results, doubts=doubts
            )
            self.repaired.append(repaired)
            keeps_data = not loss.ended and not flow.overwritten and not flow.lost_reads
            keeps_data = keeps_data and not any(tensors)
            keeps_data = keeps_data and not any(results)
            keeps_data = keeps_data and flow.undefined_reads <= self.original.undefined_reads
            contradicts = doubts.against_words or doubts.unused_names or doubts.unreached
            contradicts = contradicts or doubts.fixed_numbers or flow.uneven_reads
            is_best = keeps_data and not loss.changed_ranks and not contradicts
            more = _TRIALS_AFTER_BEST if is_best else _TRIALS_AFTER_FIRST
            self.trials_left = min(self.trials_left, more)
        return unrepaired


def _proposed_texts(
    state: _RepairCandidate, file: str, original: _Original
) -> Iterator[tuple[str, RepairProposal]]:
    """The text of each proposal for a candidate, whose words name lines of the original text."""
    document = _parse_document(state.text, file)
    root: ScenarioData = document.root
    numbers = line_numbers_before(original.text, state.text)
    lines: dict[DataPath, int] = {}
    steps = step_paths(root)
    for path in (*steps, *batch_part_paths(root, steps)):
        mark = document.mark(path)
        lines[path] = mark.line + 1 if mark is not None else 0
    for name in root.get("tensors") or {}:
        mark = document.mark(("tensors", name))
        lines["tensors", name] = mark.line + 1 if mark is not None else 0
    program = _program_of(state, file)
    user_lines = {path: numbers.get(line, 0) for path, line in lines.items()}
    hints = FailureHints(
        lines,
        user_lines,
        _named_lines(state),
        frozenset(state.verdict.culprits),
        state.verdict.verdict in ("mismatch", "invalid"),
        program,
        not state.words,
        original.hints.decisions,
    )
    before = with_selected_ranks(plain_data(root), program)
    for proposal in propose_repairs(before, hints):
        # A repair removes at most one call.
        removes_twice = proposal.kind == state.kind == REMOVES_CALLS
        if proposal.data["program"] and not removes_twice:
            words = with_place(proposal.words, before, proposal.data, user_lines)
            text = patched_text(document, plain_data(proposal.data))
            yield text, proposal._replace(words=words)


def _parse_document(text: str, file: str) -> YamlDocument:
    document = YamlDocument(file, text)
    document.node = compose(document)
    document.root = construct(document, document.node, ProblemCollector(document))
    return document


def _checked_candidate(text: str, file: str, backend: str | None) -> _RepairCandidate | None:
    """Check a file; None if it is refused. Backends are only run if the verdict is ok."""
    try:
        scenario = loads(text, file)
        program = lower(scenario)
        verdict = verdict_of(program, _MAX_STATES)
        result = None
        if verdict.verdict == "ok":
            result = check_scenario(scenario, backend=backend, max_states=_MAX_STATES)
    except (DistsimError, *RESOURCE_ERRORS):
        return None
    return _RepairCandidate(text, verdict, result, program)


def _finished_repair(
    state: _RepairCandidate, before: str, file: str, backend: str | None
) -> ScenarioRepair:
    assert state.result is not None
    updated, words = _with_true_expectations(state.text, before, file)
    simulation = simulate(
        loads(state.text, file), backend=backend, with_verdict=False, with_values=False
    )
    completes = tuple(
        name for name, o in state.result.profiles.items() if o.possible == ("completes",)
    )
    return ScenarioRepair(
        state.kind,
        (*state.words, *words),
        completes,
        simulation.makespan_ns,
        updated,
        unified_diff(before, updated, file),
        state.loss,
        state.flow,
        state.tensors,
        state.results,
        state.doubts,
    )


def _with_true_expectations(text: str, before: str, file: str) -> tuple[str, tuple[str, ...]]:
    """The repaired text, with the expectations that the repair made false updated or removed."""
    document = _parse_document(text, file)
    data = plain_data(document.root)
    if not isinstance(data.get("expect"), dict):
        return text, ()
    changed = updated_expectations(data["expect"], before, text, file)
    if not changed.words:
        return text, ()
    rest = {key: value for key, value in data.items() if key != "expect"}
    if changed.expect is not None:
        rest["expect"] = changed.expect
    return patched_text(document, rest), changed.words


__all__ = ["MAX_REPAIR_TRIALS", "ScenarioRepair", "find_repairs"]
