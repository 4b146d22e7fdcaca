"""What `distsim check` found, as text in 80 columns and as JSON (an interface: keys keep their
meaning); and how tests did, as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.common.units import show_bytes, show_ns
from distsim.output.json.simulation_result import SCHEMA_VERSION, finding_json
from distsim.output.text.finding_list import findings_lines, verdict_conflict_lines, verdict_text
from distsim.output.text_layout import ranks_label, table_lines, truncated, wrapped_lines

if TYPE_CHECKING:
    from distsim.checker.verdict import Verdict
    from distsim.simulation.check_scenario import BackendOutcome, CheckResult
    from distsim.simulation.expectations import ScenarioTestResult


# --- text ---
def check_text(results: Sequence[CheckResult], not_covered: Sequence[str] = ()) -> str:
    """A section per file, then what no check covers, where one was checked."""
    sections = [_file_section(result) for result in results]
    if not_covered and not all(result.errors for result in results):
        sections.append(wrapped_lines(f"Not covered: {'; '.join(not_covered)}."))
    out: list[str] = []
    for i, lines in enumerate(sections):
        alone = len(lines) == 1 and i > 0 and len(sections[i - 1]) == 1 and i < len(results)
        out += [*([] if not out or alone else [""]), *lines]
    return "\n".join(out)


def _file_section(result: CheckResult) -> list[str]:
    if result.verdict is None:
        problems = "1 problem" if len(result.errors) == 1 else f"{len(result.errors)} problems"
        return wrapped_lines(f"{result.file}: can't be read ({problems})", "", "  ")
    outcomes = {o.outcome for o in result.profiles.values()}
    head = f"{result.file}: {_verdict_line(result.verdict)}"
    if outcomes == {"completes"} and not result.findings and result.verdict.verdict == "ok":
        return wrapped_lines(f"{head}; completes on {', '.join(result.profiles)}", "", "  ")
    own = result.profiles.get(result.backend)
    said = (
        verdict_conflict_lines(result.verdict, own.outcome, result.backend, result.findings)
        if own is not None
        else []
    )
    doubt = result.inconclusive_reason()
    note = (
        wrapped_lines(
            f"Not a success: {doubt}: raise it (--max-states), or name the sources", "", "  "
        )
        if doubt
        else []
    )
    lines = [
        *wrapped_lines(head, "", "  "),
        *note,
        *said,
        *_reading_lines(result.verdict),
        *_backend_table(result),
    ]
    found = findings_lines(result.findings, result.file)
    return [*lines, *(["", *found] if found else [])]


def _verdict_line(verdict: Verdict) -> str:
    text = verdict_text(verdict)
    states = f", {verdict.explored} states" if verdict.explored else ""
    return (
        f"{text}{states}"
        if verdict.complete
        else f"{text} so far: the search is not complete{states}"
    )


def _reading_lines(verdict: Verdict) -> list[str]:
    """Where the verdict shows up, when that is not everywhere."""
    if len(set(verdict.readings.values())) < 2:
        return []
    return wrapped_lines(
        "; ".join(f"{reading}: {how}" for reading, how in verdict.readings.items()), "  ", "  "
    )


def _backend_table(result: CheckResult) -> list[str]:
    rows = [
        (name, o.outcome, truncated(_outcome_details(o), 56)) for name, o in result.profiles.items()
    ]
    return table_lines(("", "", ""), rows, left=(0, 1, 2))[1:]


def _outcome_details(o: BackendOutcome) -> str:
    """What else there is to say of an outcome: other ones, the size at which it turns, the
    ranks.
    """
    words = []
    others = [p for p in o.possible if p != o.outcome]
    if others:
        words.append(f"or {', '.join(others)}")
    if o.flips_at_nbytes is not None:
        words.append(f"hinges on a buffer of {show_bytes(o.flips_at_nbytes)}")
    if o.variants and len(set(o.variants.values())) > 1:
        words.append(", ".join(f"{name}: {outcome}" for name, outcome in o.variants.items()))
    if o.ranks:
        words.append(ranks_label(sorted(o.ranks)))
    return "; ".join(words)


def check_summary(results: Sequence[CheckResult]) -> str:
    """``12 files: 10 ok, 1 deadlock, 1 can't be read``."""
    counts = Counter(
        _short_verdict(r.verdict) if r.verdict is not None else "can't be read" for r in results
    )
    words = ", ".join(
        f"{n} {word}" for word, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"{len(results)} file{'' if len(results) == 1 else 's'}: {words}"


def _short_verdict(verdict: Verdict) -> str:
    return verdict.verdict if verdict.complete else f"{verdict.verdict} so far"


# --- JSON ---
def check_json(results: Sequence[CheckResult]) -> dict[str, object]:
    """What `distsim check FILE… --format json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "files": [check_file_json(result) for result in results],
    }


def check_file_json(result: CheckResult) -> dict[str, object]:
    verdict = result.verdict
    if verdict is None:
        return {
            "file": result.file,
            "errors": [
                {"line": e.line, "column": e.column, "message": e.message} for e in result.errors
            ],
        }
    return {
        "file": result.file,
        "verdict": verdict.verdict,
        "complete": verdict.complete,
        "explored": verdict.explored,
        "depends_on": verdict.depends_on,
        "ranks": sorted(verdict.ranks),
        "core": sorted(verdict.core),
        "readings": {
            reading: verdict.readings.get(reading, "never")
            for reading in ("rendezvous", "early", "buffered", "mixed")
        },
        "stuck_sets": [sorted(ranks) for ranks in verdict.stuck_sets],
        "schedule": result.schedule,
        "culprits": sorted(verdict.culprits),
        "profiles": {
            name: _backend_outcome_json(name, outcome) for name, outcome in result.profiles.items()
        },
        "findings": [finding_json(finding) for finding in result.findings],
    }


def _backend_outcome_json(name: str, o: BackendOutcome) -> dict[str, object]:
    found: dict[str, object] = {
        "outcome": o.outcome,
        "possible": list(o.possible) or [o.outcome],
        "ranks": sorted(o.ranks),
    }
    if name != "gloo":  # gloo never buffers
        found["flips_at_nbytes"] = o.flips_at_nbytes
    if o.variants:
        found["variants"] = dict(o.variants)
    return found


# --- scenarios as tests ---
#: Differences of one file that are printed; the rest is counted.
MAX_DIFFERENCES = 8


def expectations_table(checked: Sequence[ScenarioTestResult]) -> str:
    """A line per file, and under it what differs."""
    rows = [(one.status, one.file, *_result_cells(one)) for one in checked]
    lines = table_lines(
        ("", "scenario", "verdict", "outcome", "makespan"), rows, left=(0, 1, 2, 3), indent=""
    )
    out = [lines[0]]
    for one, line in zip(checked, lines[1:], strict=True):
        out.append(line)
        for difference in one.differences[:MAX_DIFFERENCES]:
            out += wrapped_lines(str(difference), "    ", "      ")
        if len(one.differences) > MAX_DIFFERENCES:
            out.append(f"    … and {len(one.differences) - MAX_DIFFERENCES} more")
    return "\n".join(out)


def _result_cells(one: ScenarioTestResult) -> tuple[str, str, str]:
    if one.simulation is None:
        return "", "", ""
    verdict = one.simulation.verdict
    return (
        verdict.verdict if verdict is not None else "-",
        one.simulation.outcome,
        show_ns(one.simulation.makespan_ns),
    )


def expectations_summary(checked: Sequence[ScenarioTestResult]) -> str:
    """``12 passed, 1 failed`` and the like."""
    counts = Counter(one.status for one in checked)
    return ", ".join(
        f"{counts[s]} {s}" for s in ("passed", "failed", "unreadable", "no expect") if counts[s]
    )
