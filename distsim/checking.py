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
from distsim.check.layout import Layout, build_layout
from distsim.check.names import name_swaps
from distsim.check.remarks import remarks
from distsim.check.undefined import undefined_findings
from distsim.check.verdict import Verdict, verdict_of
from distsim.cluster import default_cluster
from distsim.collection import no_collection
from distsim.cost import CostModel
from distsim.engine import Run, run
from distsim.errors import Problem, ScenarioErrors, UsageError
from distsim.findings.record import Finding
from distsim.profiles import PROFILES, Profile
from distsim.program.lower import lower
from distsim.program.records import Program
from distsim.scenario import Scenario, load
from distsim.standstill import Standstill
from distsim.units import show_bytes

#: States that a search may store before it gives up, unless told otherwise.
MAX_STATES = 200_000
#: What `check` does not see, whatever it says.
NOT_COVERED = (
    "kernels of several communicators that need one GPU at once",
    "NCCL splitting a very large batch differently on each rank",
    "faults of networks, switches and proxies",
)
#: Findings on these verdicts already say why another back end stands still.
_QUIET = ("invalid", "mismatch", "deadlock")


@dataclass(frozen=True)
class ProfileOutcome:
    """What one back end does. ``possible`` lists every outcome, ``ranks`` are those left standing or ended by an error.

    ``flips_at_nbytes``: the size of message beyond which the outcome is another, None where size does not matter. ``variants``: the
    outcome per way of making communicators (nccl: lazy, eager).
    """

    outcome: str
    possible: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    flips_at_nbytes: int | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    standstill: Standstill | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """What is known of one file. ``errors`` is empty unless it can't be read; then ``verdict`` is None.

    ``backend``: whose outcome decides the exit status, the file's own or the one asked for. ``profiles``: name -> outcome.
    """

    file: str
    errors: tuple[Problem, ...] = ()
    backend: str = ""
    verdict: Verdict | None = None
    profiles: Mapping[str, ProfileOutcome] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    name: str = ""

    def status(self) -> int:
        """2: can't be read; 1: an error among the findings, or an outcome other than `completes` under ``backend``; else 0."""
        if self.verdict is None:
            return 2
        bad = any(f.severity == "error" for f in self.findings) or self.profiles[self.backend].outcome != "completes"
        return int(bad)


def check_file(
    path: str | Path, *, sets: Sequence[str] = (), backend: str | None = None, max_states: int = MAX_STATES, strict: bool = False
) -> CheckResult:
    """Check a scenario file. A file that can't be read is no exception but a result with ``errors``."""
    try:
        return check(load(str(path), sets=tuple(sets)), backend=backend, max_states=max_states, strict=strict)
    except ScenarioErrors as error:
        return CheckResult(str(path), error.problems)
    except UsageError as error:
        return CheckResult(str(path), (Problem(str(path), 0, 0, error.message, hint=error.remedy),))


def check(scenario: Scenario, *, backend: str | None = None, max_states: int = MAX_STATES, strict: bool = False) -> CheckResult:
    """Check a scenario. ``backend`` takes the place of the file's; ``max_states`` bounds the search over orders of events;
    ``strict`` makes leaks errors. Raises ScenarioErrors."""
    with no_collection():
        return _check(scenario, str(backend or scenario.backend), max_states, strict)


def _check(scenario: Scenario, backend: str, max_states: int, strict: bool) -> CheckResult:
    if backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": backend})
    program = lower(scenario)
    layout = build_layout(program)
    verdict = verdict_of(program)
    outcomes = {name: outcome_under(program, profile) for name, profile in PROFILES.items()}
    found = _findings(program, layout, verdict, outcomes, backend)
    if strict:
        found = tuple(replace(f, severity="error") if f.code.startswith("DS5") else f for f in found)
    return CheckResult(scenario.file, (), backend, verdict, outcomes, found, scenario.name)


def outcome_under(program: Program, profile: Profile) -> ProfileOutcome:
    """A back end's outcome, in the order of events that its default cluster's prices give."""
    inits = ("lazy", "eager") if profile.device else ("",)
    runs = {init: _run(program, profile, init) for init in inits}
    mine = str(program.options.get("init", "lazy")) if profile.device else ""
    chosen = runs[mine]
    out = chosen.standstill
    ranks = tuple(end.rank for end in out.ends if end.status != "ended")
    return ProfileOutcome(
        chosen.outcome, chosen.possible or (chosen.outcome,), ranks, None,
        {init: r.outcome for init, r in runs.items() if init}, out, chosen.findings,
    )  # fmt: skip


def _run(program: Program, profile: Profile, init: str) -> Run:
    options = {**program.options, "init": init} if init else program.options
    cost = CostModel(default_cluster(profile.name), program.world_size, program.local_size, program.link_faults)
    return run(replace(program, options=options), profile, cost)


def _findings(
    program: Program, layout: Layout, verdict: Verdict, outcomes: Mapping[str, ProfileOutcome], backend: str
) -> tuple[Finding, ...]:
    profile, own = PROFILES[backend], outcomes[backend]
    stuck = verdict.standstill is not None and verdict.standstill.blocked
    alone = own.standstill if not stuck else None
    found = (
        *(_with_sizes(f, outcomes) if f.code == "DS603" else f for f in verdict.findings),
        *name_swaps(program, None, layout),
        *backend_findings(program, profile, layout),
        *own.findings,
        *(diagnose(program, alone, layout) if alone is not None and alone.blocked else ()),
        *(undefined_findings(program, layout, profile) if "undefined" in (own.outcome, *own.possible) else ()),
        *remarks(program, profile, layout),
        *(() if verdict.verdict in _QUIET else _elsewhere(program, layout, outcomes, backend)),
    )
    return tuple(dict.fromkeys(found))


def _with_sizes(finding: Finding, outcomes: Mapping[str, ProfileOutcome]) -> Finding:
    """DS603 with the sizes at which each back end's outcome turns."""
    turns = [f"{name} up to messages of {show_bytes(o.flips_at_nbytes)}" for name, o in outcomes.items() if o.flips_at_nbytes]
    return replace(finding, message=f"{finding.message}; here {' and '.join(turns)}") if turns else finding


def _elsewhere(
    program: Program, layout: Layout, outcomes: Mapping[str, ProfileOutcome], backend: str
) -> tuple[Finding, ...]:
    """DS604: it completes under its own back end, and not under others."""
    others = {name: o for name, o in outcomes.items() if name != backend and o.outcome != "completes"}
    if outcomes[backend].outcome != "completes" or not others:
        return ()
    width = max(map(len, others))
    lines = [f"  {name.ljust(width)}  {o.outcome}: {_reason(program, layout, name, o)}" for name, o in others.items()]
    names = " and ".join(others)
    first = next(iter(others))
    return (
        Finding(
            "DS604", "warning", "\n".join([f"it completes on {backend}, but not on {names}", *lines]),
            tuple(sorted({r for o in others.values() for r in o.ranks})), (),
            (f"if it is meant for {first} as well, `distsim check --backend {first}` shows where and what to do",),
        ),
    )  # fmt: skip


def _reason(program: Program, layout: Layout, name: str, outcome: ProfileOutcome) -> str:
    """The first line of what there is to say about an outcome."""
    found: list[Finding] = [*backend_findings(program, PROFILES[name], layout), *outcome.findings]
    if outcome.standstill is not None and outcome.standstill.blocked:
        found += diagnose(program, outcome.standstill, layout)
    if outcome.outcome == "undefined":
        found += undefined_findings(program, layout, PROFILES[name])
    return found[0].message.partition("\n")[0] if found else "its rules differ from the contract's"
