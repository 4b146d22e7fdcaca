"""Check a scenario without a clock: verdict, outcome on every backend, and findings.

These are the records that `distsim check` prints. The verdict covers every reading of what blocks
and every order of events; an outcome is what one backend does.

Large programs are folded: representative ranks are checked instead of all, as long as that cannot
change the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES, BackendProfile, default_cluster
from distsim.checker.checked_program import CheckedProgram
from distsim.checker.detectors.backend_support import backend_findings
from distsim.checker.detectors.lint import lint_findings
from distsim.checker.detectors.peak_memory import memory_findings
from distsim.checker.detectors.undefined_behavior import undefined_findings
from distsim.checker.diagnosis.hang_findings import diagnose_hang
from distsim.checker.diagnosis.host_waits import with_host_waits
from distsim.checker.diagnosis.match_findings import attach_consequences, without_repeated_findings
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.reading_result import MAX_STATES
from distsim.checker.replay_schedule import schedule_to_json
from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import ScenarioErrors, ScenarioProblem, UsageError
from distsim.common.file_io import escape_control_characters
from distsim.common.records import gc_paused
from distsim.common.units import show_bytes
from distsim.engine import run_program
from distsim.engine.backend_outcomes import BackendOutcome, backend_outcome
from distsim.engine.expand_folded import expand_blocked_state
from distsim.findings.finding_types import Finding
from distsim.hardware.cost import CostModel
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.program.size_limits import (
    FOLDING_THRESHOLD_CALLS,
    check_program_size,
    check_world_size,
    is_within_size_limit,
)
from distsim.scenario import Scenario, load
from distsim.semantics.classes.rank_keys import depends_on_group_rank
from distsim.semantics.classes.representatives import FoldingError, representative_program
from distsim.simulation.simulate_scenario import cost_model, swap_findings

__all__ = [
    "MAX_STATES",
    "NOT_COVERED",
    "CheckResult",
    "BackendOutcome",
    "check_scenario",
    "check_file",
    "check_program",
]

#: What `check` cannot detect.
NOT_COVERED = (
    "kernels of several communicators that compete for one GPU",
    "large batches of messages, which NCCL may split differently on each rank",
    "failures of the network, of switches or of NCCL's proxy threads",
)
#: The findings on these verdicts already explain why another backend hangs.
_EXPLAINED_VERDICTS = ("invalid", "mismatch", "deadlock")


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one file.

    ``errors`` is empty unless the file cannot be read; ``verdict`` is then None. ``backend`` is the
    scenario's, or the one asked for; its outcome decides the exit status. ``profiles`` maps the
    name of each backend to its outcome. ``schedule``: the event order that leads to the verdict, as
    plain data; None if every order does. ``strict``: leaks count as errors, and a search that hit
    its bound is no success.
    """

    file: str
    errors: tuple[ScenarioProblem, ...] = ()
    backend: str = ""
    verdict: Verdict | None = None
    profiles: Mapping[str, BackendOutcome] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    name: str = ""
    schedule: Mapping[str, object] | None = None
    strict: bool = False

    def status(self) -> int:
        """The exit status.

        2: the file cannot be read. 1: an error among the findings, an outcome other than
        `completes` under ``backend``, or an inconclusive search. 0 otherwise.
        """
        if self.verdict is None:
            return 2
        if any(finding.severity == "error" for finding in self.findings):
            return 1
        completes = self.profiles[self.backend].outcome == "completes"
        return 0 if completes and not self.inconclusive_reason() else 1

    def inconclusive_reason(self) -> str:
        """Why a search that hit its bound is no success; empty if it is one.

        Some backend may hang, the own backend may do worse than complete, or ``strict`` is set.
        """
        if self.verdict is None or self.verdict.complete:
            return ""
        may_hang = [name for name, outcome in self.profiles.items() if "hangs" in outcome.possible]
        if may_hang:
            return f"the search stopped at its limit, and {' and '.join(may_hang)} may hang"
        if self.profiles[self.backend].possible != ("completes",):
            return f"the search stopped at its limit, and the program may fail on {self.backend}"
        if self.strict:
            return "the search stopped at its limit, and --strict requires a complete search"
        return ""


# --- files and scenarios ---
def check_file(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    backend: str | None = None,
    max_states: int = MAX_STATES,
    strict: bool = False,
    max_calls: int | None = None,
    fold: bool | None = None,
) -> CheckResult:
    """Check a scenario file. If it cannot be read, the result has ``errors``."""
    try:
        return check_scenario(
            load(str(path), sets=tuple(sets)),
            backend=backend,
            max_states=max_states,
            strict=strict,
            max_calls=max_calls,
            fold=fold,
        )
    except ScenarioErrors as error:
        return CheckResult(str(path), error.problems)
    except UsageError as error:
        return unreadable_result(str(path), error)


def unreadable_result(file: str, error: UsageError) -> CheckResult:
    """The result of a file that cannot be checked; its problem does not repeat the file's name."""
    name = re.escape(escape_control_characters(file, one_line=True))
    message = re.sub(f"^{name}:? ", "", error.message)
    return CheckResult(file, (ScenarioProblem(file, 0, 0, message, hint=error.remedy),))


def check_scenario(
    scenario: Scenario,
    *,
    backend: str | None = None,
    max_states: int = MAX_STATES,
    strict: bool = False,
    max_calls: int | None = None,
    fold: bool | None = None,
) -> CheckResult:
    """Check a scenario.

    ``backend`` overrides the scenario's. ``max_states`` bounds the search over orders of events.
    ``strict`` makes leaks errors. ``max_calls`` replaces the limits of
    `distsim.program.features`. ``fold``: check ranks with equal roles once; by default, if the
    program is large.

    Raises ScenarioErrors and UsageError.
    """
    backend = str(backend or scenario.backend)
    with gc_paused():
        check_world_size(scenario, max_calls)
        if backend != scenario.backend:
            scenario = scenario.model_copy(update={"backend": backend})
        program = lower(scenario)
        cost = cost_model(scenario, program)
        memory = memory_findings(scenario, program, cost.cluster)
        result = None
        if _is_folding_wanted(program, fold):
            result = _check_folded(program, cost, max_states, memory, max_calls)
        if result is None:
            check_program_size(program, max_calls)
            result = check_program(program, cost=cost, max_states=max_states, more=memory)
        return _strictly(result) if strict else result


def _strictly(result: CheckResult) -> CheckResult:
    """The result with leaks as errors."""
    findings = tuple(
        replace(finding, severity="error") if finding.code.startswith("DS5") else finding
        for finding in result.findings
    )
    return replace(result, findings=findings, strict=True)


# --- folding ---
class _Section(NamedTuple):
    """Representative ranks, and the backends for which these do not suffice."""

    program: Program | None
    full_backends: frozenset[str]


def _is_folding_wanted(program: Program, fold: bool | None) -> bool:
    return program.call_count > FOLDING_THRESHOLD_CALLS if fold is None else fold


def _check_folded(
    program: Program,
    cost: CostModel,
    max_states: int,
    memory: tuple[Finding, ...],
    max_calls: int | None,
) -> CheckResult | None:
    """The result of the representative ranks, extended to all ranks.

    None if they cannot represent all ranks, or if a program that is small enough is not simply
    correct: its findings should name all ranks.
    """
    is_small = is_within_size_limit(program, max_calls)
    section = _representative_section(program, cost, is_small)
    if section.program is None:
        return None
    check_program_size(section.program, max_calls)
    try:
        result = check_program(
            section.program,
            cost=cost,
            max_states=max_states,
            more=memory,
            whole=program if is_small else None,
            apart=section.full_backends,
        )
    except FoldingError:
        return None
    if is_small and not _is_simply_correct(result, {*memory, *program.findings}):
        return None
    return _for_all_ranks(section.program, result)


def _is_simply_correct(result: CheckResult, known: set[Finding]) -> bool:
    """Whether the verdict is ok and no finding goes beyond the known ones."""
    is_ok = result.verdict is not None and result.verdict.verdict == "ok"
    return is_ok and known.issuperset(result.findings)


def _representative_section(program: Program, cost: CostModel, is_small: bool) -> _Section:
    """Ranks that represent all others under as many backends as possible.

    Backends whose rules depend on places in a group may need all ranks. If the program is small
    enough to run there in full, they are excluded from the choice of representatives.
    """
    costs, profiles = [cost, *_default_costs(program)], list(BACKEND_PROFILES.values())
    section = representative_program(program, costs, profiles)
    if section is not None or not is_small:
        return _Section(section, frozenset())
    needs_all = frozenset(
        profile.name for profile in profiles if depends_on_group_rank(program, profile)
    )
    if not needs_all or program.backend in needs_all:
        return _Section(None, frozenset())
    others = [profile for profile in profiles if profile.name not in needs_all]
    return _Section(representative_program(program, costs, others), needs_all)


def _for_all_ranks(section: Program, result: CheckResult) -> CheckResult:
    """The result of representative ranks, with the ranks that they represent."""
    verdict = result.verdict
    if verdict is not None:
        final_state = expand_blocked_state(section, verdict.final_state)
        verdict = replace(verdict, ranks=section.alike(verdict.ranks), final_state=final_state)
    profiles = {
        name: replace(outcome, ranks=section.alike(outcome.ranks))
        for name, outcome in result.profiles.items()
    }
    findings = tuple(
        replace(finding, ranks=section.alike(finding.ranks)) for finding in result.findings
    )
    return replace(result, verdict=verdict, profiles=profiles, findings=findings)


def _default_costs(program: Program) -> list[CostModel]:
    """The costs of each backend's default cluster, which count if the scenario names none."""
    return [_default_cost(program, name) for name in BACKEND_PROFILES]


def _default_cost(program: Program, backend: str) -> CostModel:
    cluster = default_cluster(backend)
    return CostModel(cluster, program.world_size, program.local_size, program.link_faults)


# --- programs ---
def check_program(
    program: Program,
    *,
    cost: CostModel | None = None,
    max_states: int = MAX_STATES,
    more: tuple[Finding, ...] = (),
    whole: Program | None = None,
    apart: frozenset[str] = frozenset(),
) -> CheckResult:
    """Check a lowered program under its own backend.

    ``cost``: the costs there, if the order of events depends on time (default: those of the default
    cluster). ``more``: findings that the caller already has. ``whole``: the program with all ranks,
    if ``program`` has only representatives; the backends in ``apart``, and those that cannot be
    judged by representatives, run that.
    """
    subject = CheckedProgram(program)
    verdict = verdict_of(program, max_states, subject=subject)
    swaps = swap_findings(subject)
    outcomes: dict[str, BackendOutcome] = {}
    for name, profile in BACKEND_PROFILES.items():
        own_cost = cost if name == program.backend else None
        if name in apart:
            outcome = _outcome_of_all_ranks(whole, profile, own_cost)
        else:
            outcome = _backend_outcome(_started_under(program, name), profile, own_cost, whole)
        outcomes[name] = _with_swaps(outcome) if swaps else outcome
    found = _all_findings(subject, verdict, outcomes, cost, (*more, *swaps))
    schedule = None
    if verdict.schedule is not None and verdict.schedule.choices:
        schedule = schedule_to_json(verdict.schedule, program)
    return CheckResult(
        program.file, (), program.backend, verdict, outcomes, found, program.name, schedule
    )


def _started_under(program: Program, backend: str) -> Program:
    """The program with its start-up under a backend."""
    if program.startup is None:
        return program
    # Imported only if needed: most scenarios imply their start-up.
    from distsim.program.startup import with_startup_under

    return with_startup_under(program, backend)


def _backend_outcome(
    program: Program, profile: BackendProfile, cost: CostModel | None, whole: Program | None
) -> BackendOutcome:
    """The outcome under a backend, with all ranks if representatives do not suffice."""
    try:
        return backend_outcome(program, profile, cost)
    except FoldingError:
        if whole is None:
            raise
        return _outcome_of_all_ranks(whole, profile, cost)


def _outcome_of_all_ranks(
    whole: Program | None, profile: BackendProfile, cost: CostModel | None
) -> BackendOutcome:
    """The outcome with all ranks.

    Raises FoldingError unless all ranks simply complete, because the findings would have to name
    ranks that the other results do not know.
    """
    assert whole is not None
    outcome = backend_outcome(whole, profile, cost)
    if outcome.possible != ("completes",):
        raise FoldingError
    return outcome


def _with_swaps(outcome: BackendOutcome) -> BackendOutcome:
    """The outcome if data meet in the wrong order: wrong data instead of completion."""
    if outcome.outcome != "completes":
        return outcome
    possible = tuple(dict.fromkeys(_swapped(word) for word in outcome.possible))
    variants = outcome.variants
    if variants:
        variants = {init: _swapped(word) for init, word in variants.items()}
    return replace(outcome, outcome="wrong-data", possible=possible, variants=variants)


def _swapped(outcome: str) -> str:
    return "wrong-data" if outcome == "completes" else outcome


# --- findings ---
def _all_findings(
    subject: CheckedProgram,
    verdict: Verdict,
    outcomes: Mapping[str, BackendOutcome],
    cost: CostModel | None,
    more: tuple[Finding, ...],
) -> tuple[Finding, ...]:
    program, layout = subject.program, subject.layout
    profile, outcome = BACKEND_PROFILES[program.backend], outcomes[program.backend]
    refused = backend_findings(program, profile, layout)
    hangs: tuple[Finding, ...] = ()
    if outcome.outcome not in ("completes", "wrong-data"):
        is_refused = any(finding.severity == "error" for finding in refused)
        explain = not is_refused and not _explains_hang(verdict)
        hangs = _run_findings(program, layout, profile, explain, cost)
    of_verdict = [
        _with_buffer_sizes(finding, outcomes) if finding.code == "DS603" else finding
        for finding in verdict.findings
    ]
    found = [*attach_consequences((*of_verdict, *more, *refused), hangs)]
    is_explained = verdict.verdict in _EXPLAINED_VERDICTS
    if not is_explained and _is_undefined(outcome):
        found += undefined_findings(program, layout, profile)
    if subject.concerns("lint"):
        found += lint_findings(program, profile, layout)
    if not is_explained:
        found += _portability_findings(program, layout, outcomes)
    return without_repeated_findings(found)


def _explains_hang(verdict: Verdict) -> bool:
    """Whether the findings of the verdict already say why ranks are blocked."""
    if verdict.verdict == "invalid":
        return True
    return verdict.final_state is not None and bool(verdict.final_state.blocked)


def _run_findings(
    program: Program,
    layout: ChannelLayout,
    profile: BackendProfile,
    explain: bool,
    cost: CostModel | None = None,
) -> tuple[Finding, ...]:
    """The findings on a run under a backend.

    These are waits that exceed their timeout and, if ``explain``, the cause of a hang.
    """
    run = run_program(program, profile, cost or _default_cost(program, profile.name))
    hangs = diagnose_hang(program, run.final_state, layout) if explain else ()
    hangs = with_host_waits(hangs, program, run.final_state, profile)
    return attach_consequences(run.findings, hangs)


def _is_undefined(outcome: BackendOutcome) -> bool:
    """Whether the backend leaves the outcome open."""
    if "undefined" in outcome.possible:
        return True
    return bool(outcome.variants) and {"completes", "hangs"} <= set(outcome.possible)


def _with_buffer_sizes(finding: Finding, outcomes: Mapping[str, BackendOutcome]) -> Finding:
    """DS603 with the buffer size at which each backend's outcome changes."""
    words = {"undefined": "is undefined", "wrong-data": "computes wrong data"}
    lines = finding.message.split("\n")
    for name, outcome in outcomes.items():
        if outcome.flips_at_nbytes:
            result = words.get(outcome.outcome, outcome.outcome)
            buffer = show_bytes(outcome.flips_at_nbytes)
            lines = [line for line in lines if not line.startswith(f"  {name} buffers")]
            limit = f"  {name} buffers messages up to {buffer}"
            lines.append(f"{limit}: with this limit, the program {result}")
    return replace(finding, message="\n".join(lines))


def _portability_findings(
    program: Program, layout: ChannelLayout, outcomes: Mapping[str, BackendOutcome]
) -> tuple[Finding, ...]:
    """DS604: the program completes under its own backend, but not, or not always, under others.

    A note if only backends differ that are not built into PyTorch (mpi).
    """
    backend = program.backend
    others = {
        name: outcome
        for name, outcome in outcomes.items()
        if name != backend and outcome.possible != ("completes",)
    }
    if outcomes[backend].outcome != "completes" or not others:
        return ()
    width = max(len(name) for name in others)
    lines = [f"the program completes on {backend}, but not on {' and '.join(others)}"]
    for name, outcome in others.items():
        reason = _outcome_reason(program, layout, name, outcome)
        reason = reason.removeprefix(f"{name}: ")
        separator = " " if reason.startswith("on rank ") else ": "
        lines.append(f"  {name.ljust(width)}  {_outcome_text(outcome)}{separator}{reason}")
    advice = (
        f"if the program must run on {next(iter(others))}, check it with "
        f"`--backend {next(iter(others))}`: the findings show where it fails and what to do"
    )
    concerns_built_in = any(BACKEND_PROFILES[name].built_in for name in others)
    ranks = {rank for outcome in others.values() for rank in outcome.ranks}
    return (
        Finding(
            "DS604",
            "warning" if concerns_built_in else "note",
            "\n".join(lines),
            tuple(sorted(ranks)),
            (),
            (advice,),
        ),
    )


def _outcome_text(outcome: BackendOutcome) -> str:
    others = [word for word in outcome.possible if word != outcome.outcome]
    return f"{outcome.outcome}, or {' or '.join(others)}" if others else outcome.outcome


def _outcome_reason(
    program: Program, layout: ChannelLayout, name: str, outcome: BackendOutcome
) -> str:
    """The first line of the first finding that explains an outcome."""
    profile = BACKEND_PROFILES[name]
    program = _started_under(program, name)
    found: Sequence[Finding] = ()
    # A call that the backend rejects explains a hang only if a rank reaches it.
    if outcome.outcome == "hangs":
        found = _run_findings(program, layout, profile, explain=True)
    found = found or backend_findings(program, profile, layout)
    if not found and outcome.outcome in ("raises", "crashes"):
        found = _run_findings(program, layout, profile, explain=True)
    if not found and _is_undefined(outcome):
        found = undefined_findings(program, layout, profile)
    if found:
        return found[0].message.partition("\n")[0]
    return _failure_of_a_rank(program, profile) or f"{name} handles these calls differently"


def _failure_of_a_rank(program: Program, profile: BackendProfile) -> str:
    """The first rank that fails in a run, and its error; empty if no rank fails."""
    run = run_program(program, profile, _default_cost(program, profile.name))
    for end in run.final_state.ends:
        if end.status in ("raised", "crashed") and end.message:
            return f"on rank {end.rank}: {end.message}"
    return ""
