"""A scenario without a clock: the verdict under the contract, every back end's outcome, and all
findings that follow.

What `distsim check` prints, as records. The verdict speaks of every reading of what blocks and
every order of events; an outcome is what one back end does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from distsim.common.records import gc_paused
from distsim.common.units import show_bytes
from distsim.engine import SimulatedRun, run_program
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

#: What `check` does not see, whatever it says.
NOT_COVERED = (
    "kernels of several communicators that need one GPU at once",
    "NCCL splitting a very large batch differently on each rank",
    "faults of networks, switches and proxies",
)
#: Findings on these verdicts already say why another back end stands still.
_EXPLAINED_VERDICTS = ("invalid", "mismatch", "deadlock")


@dataclass(frozen=True)
class CheckResult:
    """What is known of one file. ``errors`` is empty unless it can't be read; then ``verdict`` is
    None.

    ``backend``: whose outcome decides the exit status, the file's own or the one asked for.
    ``profiles``: name -> outcome. ``schedule``: the order of events that leads to the verdict, as
    plain data; None where any order does. ``strict``: leaks count as errors, and a search that hit
    its bound as no success.
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
        """2: can't be read; 1: an error among the findings, an outcome other than `completes` under
        ``backend``, or a search that is no success (`unsure`); else 0."""
        if self.verdict is None:
            return 2
        own = self.profiles[self.backend]
        bad = any(f.severity == "error" for f in self.findings) or own.outcome != "completes"
        return int(bad or bool(self.inconclusive_reason()))

    def inconclusive_reason(self) -> str:
        """Why a search that hit its bound is no success: a back end may hang, its own may do
        worse than complete, or it is `strict`. Empty where it is one, or where all orders were
        looked at."""
        if self.verdict is None or self.verdict.complete:
            return ""
        own = self.profiles[self.backend]
        may = [name for name, o in self.profiles.items() if "hangs" in o.possible]
        if may:
            return f"the search stopped at its bound, and {' and '.join(may)} may hang"
        if own.possible != ("completes",):
            return f"the search stopped at its bound, and {self.backend} may do worse than complete"
        return (
            "the search stopped at its bound, and --strict takes no `so far`" if self.strict else ""
        )


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
    """Check a scenario file. A file that can't be read is no exception but a result with
    ``errors``.
    """
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
        return CheckResult(
            str(path),
            (
                ScenarioProblem(
                    str(path), 0, 0, error.message.removeprefix(f"{path}: "), hint=error.remedy
                ),
            ),
        )


def check_scenario(
    scenario: Scenario,
    *,
    backend: str | None = None,
    max_states: int = MAX_STATES,
    strict: bool = False,
    max_calls: int | None = None,
    fold: bool | None = None,
) -> CheckResult:
    """Check a scenario. ``backend`` takes the place of the file's; ``max_states`` bounds the search
    over orders of events; ``strict`` makes leaks errors; ``max_calls`` stands for the limits of
    `distsim.program.features`; ``fold``: ranks that do the same are looked at once, None: where the
    program is large. Raises ScenarioErrors, UsageError."""
    with gc_paused():
        check_world_size(scenario, max_calls)
        return _check_bounded(
            scenario, str(backend or scenario.backend), max_states, strict, (max_calls, fold)
        )


def _check_bounded(
    scenario: Scenario,
    backend: str,
    max_states: int,
    strict: bool,
    size: tuple[int | None, bool | None],
) -> CheckResult:
    if backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": backend})
    program = lower(scenario)
    cost = cost_model(scenario, program)
    more = memory_findings(scenario, program, cost.cluster)
    found = _check_folded(program, cost, max_states, more, *size)
    if found is None:
        check_program_size(program, size[0])
        found = check_program(program, cost=cost, max_states=max_states, more=more)
    if strict:
        strictly = tuple(
            replace(f, severity="error") if f.code.startswith("DS5") else f for f in found.findings
        )
        found = replace(found, findings=strictly, strict=True)
    return found


def _check_folded(
    program: Program,
    cost: CostModel,
    max_states: int,
    more: tuple[Finding, ...],
    max_calls: int | None,
    fold: bool | None,
) -> CheckResult | None:
    """What the ranks that stand for all tell; None where they cannot, or where there is more to say
    than that all is well.
    """
    if fold is False or (fold is None and program.call_count <= FOLDING_THRESHOLD_CALLS):
        return None
    small = is_within_size_limit(program, max_calls)
    part, apart = _representative_section(program, cost, small)
    if part is None:
        return None
    check_program_size(part, max_calls)
    try:
        found = check_program(
            part,
            cost=cost,
            max_states=max_states,
            more=more,
            whole=program if small else None,
            apart=apart,
        )
    except FoldingError:
        return None
    if (
        found.verdict is None
        or found.verdict.verdict != "ok"
        or set(found.findings) - {*more, *program.findings}
    ):
        return None if small else _for_all_ranks(part, found)
    return _for_all_ranks(part, found)


def _representative_section(
    program: Program, cost: CostModel, small: bool
) -> tuple[Program | None, frozenset[str]]:
    """The ranks that stand for all, and back ends under which they do not: those whose rules go by
    places in a group.
    """
    costs, every = [cost, *_default_costs(program)], list(BACKEND_PROFILES.values())
    part = representative_program(program, costs, every)
    apart = frozenset(profile.name for profile in every if depends_on_group_rank(program, profile))
    if part is not None or not small or not apart or program.backend in apart:
        return part, frozenset()
    return representative_program(
        program, costs, [profile for profile in every if profile.name not in apart]
    ), apart


def _for_all_ranks(part: Program, found: CheckResult) -> CheckResult:
    """What ranks that stand for all have told, said of all."""
    verdict = found.verdict and replace(
        found.verdict,
        ranks=part.alike(found.verdict.ranks),
        final_state=expand_blocked_state(part, found.verdict.final_state),
    )
    profiles = {
        name: replace(one, ranks=part.alike(one.ranks)) for name, one in found.profiles.items()
    }
    findings = tuple(replace(one, ranks=part.alike(one.ranks)) for one in found.findings)
    return replace(found, verdict=verdict, profiles=profiles, findings=findings)


def _default_costs(program: Program) -> list[CostModel]:
    """Where no cluster is named each back end's own prices count, where time decides anything."""
    found = [default_cluster(name) for name in BACKEND_PROFILES]
    return [
        CostModel(one, program.world_size, program.local_size, program.link_faults) for one in found
    ]


def check_program(
    program: Program,
    *,
    cost: CostModel | None = None,
    max_states: int = MAX_STATES,
    more: tuple[Finding, ...] = (),
    whole: Program | None = None,
    apart: frozenset[str] = frozenset(),
) -> CheckResult:
    """Check a lowered program under its own back end. ``cost``: the prices there, where the order
    of events depends on time (left out: those of the default cluster). ``more``: findings that the
    caller has already.

    ``whole``: all ranks of a program that is cut down to some; back ends that cannot be told by
    these, and those in ``apart``, run that.
    """
    subject = CheckedProgram(program)
    verdict = verdict_of(program, max_states, subject=subject)
    swaps = swap_findings(subject)
    prices = {name: cost if name == program.backend else None for name in BACKEND_PROFILES}
    outcomes = {
        name: _with_swaps(
            _backend_outcome(program, p, prices[name], whole, name in apart), bool(swaps)
        )
        for name, p in BACKEND_PROFILES.items()
    }
    found = _all_findings(subject, verdict, outcomes, cost, (*more, *swaps))
    order = verdict.schedule
    said = schedule_to_json(order, program) if order is not None and order.choices else None
    return CheckResult(
        program.file, (), program.backend, verdict, outcomes, found, program.name, said
    )


def _backend_outcome(
    program: Program,
    profile: BackendProfile,
    cost: CostModel | None,
    whole: Program | None,
    apart: bool,
) -> BackendOutcome:
    """The outcome under a back end. Where some ranks cannot tell that of all, and all do not simply
    complete, raises `FoldingError`.
    """
    if not apart:
        try:
            return backend_outcome(program, profile, cost)
        except FoldingError:
            if whole is None:
                raise
    assert whole is not None
    found = backend_outcome(whole, profile, cost)
    if found.possible != ("completes",):
        raise FoldingError
    return found


def _all_findings(
    subject: CheckedProgram,
    verdict: Verdict,
    outcomes: Mapping[str, BackendOutcome],
    cost: CostModel | None,
    more: tuple[Finding, ...],
) -> tuple[Finding, ...]:
    program, layout, backend = subject.program, subject.layout, subject.program.backend
    profile, own = BACKEND_PROFILES[backend], outcomes[backend]
    clear = verdict.verdict not in _EXPLAINED_VERDICTS
    refused = backend_findings(program, profile, layout)
    stuck = verdict.final_state is not None and bool(verdict.final_state.blocked)
    explain = not (
        stuck or verdict.verdict == "invalid" or any(f.severity == "error" for f in refused)
    )
    ran = (
        _run_findings(program, layout, profile, explain, cost)
        if own.outcome not in ("completes", "wrong-data")
        else ()
    )
    said = (
        *(_with_buffer_sizes(f, outcomes) if f.code == "DS603" else f for f in verdict.findings),
        *more,
        *refused,
    )
    found = (
        *attach_consequences(said, ran),
        *(undefined_findings(program, layout, profile) if clear and _is_undefined(own) else ()),
        *(lint_findings(program, profile, layout) if subject.concerns("lint") else ()),
        *(_portability_findings(program, layout, outcomes, backend) if clear else ()),
    )
    return without_repeated_findings(found)


def _run_findings(
    program: Program,
    layout: ChannelLayout,
    profile: BackendProfile,
    explain: bool,
    cost: CostModel | None = None,
) -> tuple[Finding, ...]:
    """What a run under a back end tells: waits that outlast their timeout and, to ``explain``, who
    stands where in the end.
    """
    priced = cost or CostModel(
        default_cluster(profile.name), program.world_size, program.local_size, program.link_faults
    )
    left: SimulatedRun = run_program(program, profile, priced)
    told = diagnose_hang(program, left.final_state, layout) if explain else ()
    return (*left.findings, *with_host_waits(told, program, left.final_state, profile))


def _is_undefined(outcome: BackendOutcome) -> bool:
    """The back end leaves open what comes of it."""
    return "undefined" in outcome.possible or (
        "completes" in outcome.possible and "hangs" in outcome.possible and bool(outcome.variants)
    )


def _with_swaps(outcome: BackendOutcome, swaps: bool) -> BackendOutcome:
    """Data that meet by order but not by name are wrong data wherever the program gets through."""
    if not swaps or outcome.outcome != "completes":
        return outcome
    possible = tuple(
        dict.fromkeys("wrong-data" if o == "completes" else o for o in outcome.possible)
    )
    variants = outcome.variants and {
        init: "wrong-data" if o == "completes" else o for init, o in outcome.variants.items()
    }
    return replace(outcome, outcome="wrong-data", possible=possible, variants=variants)


def _with_buffer_sizes(finding: Finding, outcomes: Mapping[str, BackendOutcome]) -> Finding:
    """DS603 with the buffer on which each back end's outcome hinges, and what it comes to with
    it.
    """
    words = {"undefined": "is undefined", "wrong-data": "gives wrong data"}
    hinge = {name: o for name, o in outcomes.items() if o.flips_at_nbytes}
    turns = [
        f"{name} buffers {show_bytes(o.flips_at_nbytes or 0)}, and it {words.get(o.outcome, o.outcome)}"
        for name, o in hinge.items()
    ]
    return replace(finding, message=f"{finding.message} ({'; '.join(turns)})") if turns else finding


def _portability_findings(
    program: Program, layout: ChannelLayout, outcomes: Mapping[str, BackendOutcome], backend: str
) -> tuple[Finding, ...]:
    """DS604: it completes under its own back end, and not, or not always, under others. A remark
    where mpi alone differs.
    """
    others = {
        name: o for name, o in outcomes.items() if name != backend and o.possible != ("completes",)
    }
    if outcomes[backend].outcome != "completes" or not others:
        return ()
    width = max(map(len, others))
    lines = [
        f"  {name.ljust(width)}  {_outcome_text(o)}: {_outcome_reason(program, layout, name, o)}"
        for name, o in others.items()
    ]
    first = next(iter(others))
    return (
        Finding(
            "DS604",
            "warning" if any(BACKEND_PROFILES[name].built_in for name in others) else "note",
            "\n".join([f"it completes on {backend}, but not on {' and '.join(others)}", *lines]),
            tuple(sorted({r for o in others.values() for r in o.ranks})),
            (),
            (
                f"if it is meant for {first} as well, `distsim check --backend {first}` shows where and what to do",
            ),
        ),
    )


def _outcome_text(outcome: BackendOutcome) -> str:
    others = [word for word in outcome.possible if word != outcome.outcome]
    return f"{outcome.outcome}, or {' or '.join(others)}" if others else outcome.outcome


def _outcome_reason(
    program: Program, layout: ChannelLayout, name: str, outcome: BackendOutcome
) -> str:
    """The first line of what there is to say about an outcome."""
    profile = BACKEND_PROFILES[name]
    found = backend_findings(program, profile, layout)
    if not found and outcome.outcome in ("hangs", "raises", "crashes"):
        found = _run_findings(program, layout, profile, True)
    if not found and _is_undefined(outcome):
        found = undefined_findings(program, layout, profile)
    return found[0].message.partition("\n")[0] if found else "its rules differ from the contract's"
