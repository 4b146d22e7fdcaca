"""A scenario without a clock: the verdict under the contract, every back end's outcome, and all findings that follow.

What `distsim check` prints, as records. The verdict speaks of every reading of what blocks and every order of events; an outcome
is what one back end does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distsim.check.backends import backend_findings
from distsim.check.diagnose import diagnose
from distsim.check.ending import MAX_STATES
from distsim.check.host_waits import with_host_waits
from distsim.check.judge import fold_waits, untold
from distsim.check.layout import Layout
from distsim.check.memory import memory_findings
from distsim.check.remarks import remarks
from distsim.check.schedule import schedule_to_json
from distsim.check.undefined import undefined_findings
from distsim.check.verdict import Subject, Verdict, verdict_of
from distsim.cost import CostModel
from distsim.engine import Run, run
from distsim.engine.folded import whole_standstill
from distsim.engine.outcomes import ProfileOutcome, outcome_under
from distsim.errors import Problem, ScenarioErrors, UsageError
from distsim.findings.record import Finding
from distsim.profiles import PROFILES, Profile, default_cluster
from distsim.program.features import FOLDED_CALLS, bounded_program, bounded_world, fits
from distsim.program.lower import lower
from distsim.program.records import Program
from distsim.records import no_collection
from distsim.scenario import Scenario, load
from distsim.semantics.facts import goes_by_place
from distsim.semantics.section import Unfold, section
from distsim.simulation import cost_model, swaps_of
from distsim.units import show_bytes

__all__ = ["MAX_STATES", "NOT_COVERED", "CheckResult", "ProfileOutcome", "check", "check_file", "check_program"]

#: What `check` does not see, whatever it says.
NOT_COVERED = (
    "kernels of several communicators that need one GPU at once",
    "NCCL splitting a very large batch differently on each rank",
    "faults of networks, switches and proxies",
)
#: Findings on these verdicts already say why another back end stands still.
_QUIET = ("invalid", "mismatch", "deadlock")


@dataclass(frozen=True)
class CheckResult:
    """What is known of one file. ``errors`` is empty unless it can't be read; then ``verdict`` is None.

    ``backend``: whose outcome decides the exit status, the file's own or the one asked for. ``profiles``: name -> outcome. ``schedule``:
    the order of events that leads to the verdict, as plain data; None where any order does. ``strict``: leaks count as errors, and a
    search that hit its bound as no success.
    """

    file: str
    errors: tuple[Problem, ...] = ()
    backend: str = ""
    verdict: Verdict | None = None
    profiles: Mapping[str, ProfileOutcome] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    name: str = ""
    schedule: Mapping[str, object] | None = None
    strict: bool = False

    def status(self) -> int:
        """2: can't be read; 1: an error among the findings, an outcome other than `completes` under ``backend``, or a search that is no
        success (`unsure`); else 0."""
        if self.verdict is None:
            return 2
        own = self.profiles[self.backend]
        bad = any(f.severity == "error" for f in self.findings) or own.outcome != "completes"
        return int(bad or bool(self.unsure()))

    def unsure(self) -> str:
        """Why a search that hit its bound is no success: a back end may hang, its own may do worse than complete, or it is `strict`.
        Empty where it is one, or where all orders were looked at."""
        if self.verdict is None or self.verdict.complete:
            return ""
        own = self.profiles[self.backend]
        may = [name for name, o in self.profiles.items() if "hangs" in o.possible]
        if may:
            return f"the search stopped at its bound, and {' and '.join(may)} may hang"
        if own.possible != ("completes",):
            return f"the search stopped at its bound, and {self.backend} may do worse than complete"
        return "the search stopped at its bound, and --strict takes no `so far`" if self.strict else ""


def check_file(
    path: str | Path, *, sets: Sequence[str] = (), backend: str | None = None, max_states: int = MAX_STATES, strict: bool = False,
    max_calls: int | None = None, fold: bool | None = None,
) -> CheckResult:  # fmt: skip
    """Check a scenario file. A file that can't be read is no exception but a result with ``errors``."""
    try:
        return check(
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
        return CheckResult(str(path), (Problem(str(path), 0, 0, error.message.removeprefix(f"{path}: "), hint=error.remedy),))


def check(
    scenario: Scenario,
    *,
    backend: str | None = None,
    max_states: int = MAX_STATES,
    strict: bool = False,
    max_calls: int | None = None,
    fold: bool | None = None,
) -> CheckResult:
    """Check a scenario. ``backend`` takes the place of the file's; ``max_states`` bounds the search over orders of events;
    ``strict`` makes leaks errors; ``max_calls`` stands for the limits of `distsim.program.features`; ``fold``: ranks that do the same are
    looked at once, None: where the program is large. Raises ScenarioErrors, UsageError."""
    with no_collection():
        bounded_world(scenario, max_calls)
        return _check(scenario, str(backend or scenario.backend), max_states, strict, (max_calls, fold))


def _check(scenario: Scenario, backend: str, max_states: int, strict: bool, size: tuple[int | None, bool | None]) -> CheckResult:
    if backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": backend})
    program = lower(scenario)
    cost = cost_model(scenario, program)
    more = memory_findings(scenario, program, cost.cluster)
    found = _folded(program, cost, max_states, more, *size)
    if found is None:
        bounded_program(program, size[0])
        found = check_program(program, cost=cost, max_states=max_states, more=more)
    if strict:
        strictly = tuple(replace(f, severity="error") if f.code.startswith("DS5") else f for f in found.findings)
        found = replace(found, findings=strictly, strict=True)
    return found


def _folded(
    program: Program, cost: CostModel, max_states: int, more: tuple[Finding, ...], max_calls: int | None, fold: bool | None
) -> CheckResult | None:
    """What the ranks that stand for all tell; None where they cannot, or where there is more to say than that all is well."""
    if fold is False or (fold is None and program.call_count <= FOLDED_CALLS):
        return None
    small = fits(program, max_calls)
    part, apart = _section(program, cost, small)
    if part is None:
        return None
    bounded_program(part, max_calls)
    try:
        found = check_program(part, cost=cost, max_states=max_states, more=more, whole=program if small else None, apart=apart)
    except Unfold:
        return None
    if found.verdict is None or found.verdict.verdict != "ok" or set(found.findings) - {*more, *program.findings}:
        return None if small else _of_all(part, found)
    return _of_all(part, found)


def _section(program: Program, cost: CostModel, small: bool) -> tuple[Program | None, frozenset[str]]:
    """The ranks that stand for all, and back ends under which they do not: those whose rules go by places in a group."""
    costs, every = [cost, *_default_costs(program)], list(PROFILES.values())
    part = section(program, costs, every)
    apart = frozenset(profile.name for profile in every if goes_by_place(program, profile))
    if part is not None or not small or not apart or program.backend in apart:
        return part, frozenset()
    return section(program, costs, [profile for profile in every if profile.name not in apart]), apart


def _of_all(part: Program, found: CheckResult) -> CheckResult:
    """What ranks that stand for all have told, said of all."""
    verdict = found.verdict and replace(
        found.verdict, ranks=part.alike(found.verdict.ranks), standstill=whole_standstill(part, found.verdict.standstill)
    )
    profiles = {name: replace(one, ranks=part.alike(one.ranks)) for name, one in found.profiles.items()}
    findings = tuple(replace(one, ranks=part.alike(one.ranks)) for one in found.findings)
    return replace(found, verdict=verdict, profiles=profiles, findings=findings)


def _default_costs(program: Program) -> list[CostModel]:
    """Where no cluster is named each back end's own prices count, where time decides anything."""
    found = [default_cluster(name) for name in PROFILES]
    return [CostModel(one, program.world_size, program.local_size, program.link_faults) for one in found]


def check_program(
    program: Program, *, cost: CostModel | None = None, max_states: int = MAX_STATES, more: tuple[Finding, ...] = (),
    whole: Program | None = None, apart: frozenset[str] = frozenset(),
) -> CheckResult:  # fmt: skip
    """Check a lowered program under its own back end. ``cost``: the prices there, where the order of events depends on time (left
    out: those of the default cluster). ``more``: findings that the caller has already.

    ``whole``: all ranks of a program that is cut down to some; back ends that cannot be told by these, and those in ``apart``, run that.
    """
    subject = Subject(program)
    verdict = verdict_of(program, max_states, subject=subject)
    swaps = swaps_of(subject)
    prices = {name: cost if name == program.backend else None for name in PROFILES}
    outcomes = {
        name: _swapped(_outcome(program, p, prices[name], whole, name in apart), bool(swaps)) for name, p in PROFILES.items()
    }
    found = _findings(subject, verdict, outcomes, cost, (*more, *swaps))
    order = verdict.schedule
    said = schedule_to_json(order, program) if order is not None and order.choices else None
    return CheckResult(program.file, (), program.backend, verdict, outcomes, found, program.name, said)


def _outcome(program: Program, profile: Profile, cost: CostModel | None, whole: Program | None, apart: bool) -> ProfileOutcome:
    """The outcome under a back end. Where some ranks cannot tell that of all, and all do not simply complete, raises `Unfold`."""
    if not apart:
        try:
            return outcome_under(program, profile, cost)
        except Unfold:
            if whole is None:
                raise
    assert whole is not None
    found = outcome_under(whole, profile, cost)
    if found.possible != ("completes",):
        raise Unfold
    return found


def _findings(
    subject: Subject, verdict: Verdict, outcomes: Mapping[str, ProfileOutcome], cost: CostModel | None, more: tuple[Finding, ...],
) -> tuple[Finding, ...]:  # fmt: skip
    program, layout, backend = subject.program, subject.layout, subject.program.backend
    profile, own = PROFILES[backend], outcomes[backend]
    clear = verdict.verdict not in _QUIET
    refused = backend_findings(program, profile, layout)
    stuck = verdict.standstill is not None and bool(verdict.standstill.blocked)
    explain = not (stuck or verdict.verdict == "invalid" or any(f.severity == "error" for f in refused))
    ran = _of_run(program, layout, profile, explain, cost) if own.outcome not in ("completes", "wrong-data") else ()
    said = (*(_with_sizes(f, outcomes) if f.code == "DS603" else f for f in verdict.findings), *more, *refused)
    found = (
        *fold_waits(said, ran),
        *(undefined_findings(program, layout, profile) if clear and _open(own) else ()),
        *(remarks(program, profile, layout) if subject.concerns("remarks") else ()),
        *(_elsewhere(program, layout, outcomes, backend) if clear else ()),
    )
    return untold(found)


def _of_run(
    program: Program, layout: Layout, profile: Profile, explain: bool, cost: CostModel | None = None
) -> tuple[Finding, ...]:
    """What a run under a back end tells: waits that outlast their timeout and, to ``explain``, who stands where in the end."""
    priced = cost or CostModel(default_cluster(profile.name), program.world_size, program.local_size, program.link_faults)
    left: Run = run(program, profile, priced)
    told = diagnose(program, left.standstill, layout) if explain else ()
    return (*left.findings, *with_host_waits(told, program, left.standstill, profile))


def _open(outcome: ProfileOutcome) -> bool:
    """The back end leaves open what comes of it."""
    return "undefined" in outcome.possible or (
        "completes" in outcome.possible and "hangs" in outcome.possible and bool(outcome.variants)
    )


def _swapped(outcome: ProfileOutcome, swaps: bool) -> ProfileOutcome:
    """Data that meet by order but not by name are wrong data wherever the program gets through."""
    if not swaps or outcome.outcome != "completes":
        return outcome
    possible = tuple(dict.fromkeys("wrong-data" if o == "completes" else o for o in outcome.possible))
    variants = outcome.variants and {init: "wrong-data" if o == "completes" else o for init, o in outcome.variants.items()}
    return replace(outcome, outcome="wrong-data", possible=possible, variants=variants)


def _with_sizes(finding: Finding, outcomes: Mapping[str, ProfileOutcome]) -> Finding:
    """DS603 with the buffer on which each back end's outcome hinges, and what it comes to with it."""
    words = {"undefined": "is undefined", "wrong-data": "gives wrong data"}
    hinge = {name: o for name, o in outcomes.items() if o.flips_at_nbytes}
    turns = [
        f"{name} buffers {show_bytes(o.flips_at_nbytes or 0)}, and it {words.get(o.outcome, o.outcome)}"
        for name, o in hinge.items()
    ]
    return replace(finding, message=f"{finding.message} ({'; '.join(turns)})") if turns else finding


def _elsewhere(program: Program, layout: Layout, outcomes: Mapping[str, ProfileOutcome], backend: str) -> tuple[Finding, ...]:
    """DS604: it completes under its own back end, and not, or not always, under others. A remark where mpi alone differs."""
    others = {name: o for name, o in outcomes.items() if name != backend and o.possible != ("completes",)}
    if outcomes[backend].outcome != "completes" or not others:
        return ()
    width = max(map(len, others))
    lines = [f"  {name.ljust(width)}  {_outcome_words(o)}: {_reason(program, layout, name, o)}" for name, o in others.items()]
    first = next(iter(others))
    return (
        Finding(
            "DS604", "warning" if any(PROFILES[name].built_in for name in others) else "note",
            "\n".join([f"it completes on {backend}, but not on {' and '.join(others)}", *lines]),
            tuple(sorted({r for o in others.values() for r in o.ranks})), (),
            (f"if it is meant for {first} as well, `distsim check --backend {first}` shows where and what to do",),
        ),
    )  # fmt: skip


def _outcome_words(outcome: ProfileOutcome) -> str:
    others = [word for word in outcome.possible if word != outcome.outcome]
    return f"{outcome.outcome}, or {' or '.join(others)}" if others else outcome.outcome


def _reason(program: Program, layout: Layout, name: str, outcome: ProfileOutcome) -> str:
    """The first line of what there is to say about an outcome."""
    profile = PROFILES[name]
    found = backend_findings(program, profile, layout)
    if not found and outcome.outcome in ("hangs", "raises", "crashes"):
        found = _of_run(program, layout, profile, True)
    if not found and _open(outcome):
        found = undefined_findings(program, layout, profile)
    return found[0].message.partition("\n")[0] if found else "its rules differ from the contract's"
