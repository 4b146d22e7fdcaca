"""The results of `distsim check` as text and as JSON, and those of `distsim test` as text.

The keys of the JSON are an interface: they keep their meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from distsim.checker.diagnosis.nondeterminism import EARLY_RETURN
from distsim.common.units import show_bytes, show_ns
from distsim.output.json.simulation_result import SCHEMA_VERSION, finding_json
from distsim.output.report_record import (
    Paragraph,
    Report,
    Section,
    Table,
    paragraphs,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text.finding_list import finding_sections, verdict_conflict_text, verdict_text
from distsim.output.text_layout import ranks_label, table_lines, wrapped_lines

if TYPE_CHECKING:
    from distsim.checker.verdict import Verdict
    from distsim.simulation.check_scenario import BackendOutcome, CheckResult
    from distsim.simulation.expectations import ScenarioTestResult


# --- text ---


def check_text(results: Sequence[CheckResult], not_covered: Sequence[str] = ()) -> str:
    """The whole report as text."""
    return write_text(check_report(results, not_covered))


def check_report(results: Sequence[CheckResult], not_covered: Sequence[str] = ()) -> Report:
    """Sections for each file, then what no check covers, if at least one file was checked."""
    sections = [section for result in results for section in _file_sections(result)]
    if not_covered and not all(result.errors for result in results):
        blocks = [Paragraph("Not covered:"), *paragraphs(not_covered, "  - ", "    ")]
        sections.append(Section(blocks))
    return Report(sections)


def _file_sections(result: CheckResult) -> list[Section]:
    """A line if nothing needs attention; else readings and backends, and the findings."""
    if result.verdict is None:
        problems = "1 problem" if len(result.errors) == 1 else f"{len(result.errors)} problems"
        return [_list_item(f"{result.file}: cannot be read ({problems})")]
    head = f"{result.file}: {_verdict_line(result.verdict)}"
    outcomes = {outcome.outcome for outcome in result.profiles.values()}
    if outcomes == {"completes"} and not result.findings and result.verdict.verdict == "ok":
        return [_list_item(f"{head}; completes on {', '.join(result.profiles)}")]

    doubt = result.inconclusive_reason()
    if doubt:
        doubt = f"Not a success: {doubt}. Raise the limit (--max-states), or name the sources"
    own = result.profiles.get(result.backend)
    conflict = ""
    if own is not None:
        conflict = verdict_conflict_text(
            result.verdict, own.outcome, result.backend, result.findings
        )
    blocks = [
        *paragraphs((head, doubt), further="  "),
        Paragraph(conflict),
        Paragraph(_readings_text(result.verdict), "  "),
        _backend_table(result),
    ]
    return [Section(blocks, is_list_item=True), *finding_sections(result.findings, result.file)]


def _list_item(text: str) -> Section:
    return Section([Paragraph(text, further="  ")], is_list_item=True)


def _verdict_line(verdict: Verdict) -> str:
    text = verdict_text(verdict)
    if not verdict.complete:
        text += " so far (the search is incomplete)"
    return text


_READING_CONDITION = {
    "rendezvous": "if no send is buffered",
    "early": "if ranks also return from rooted collectives early",
    "buffered": "if all sends are buffered",
    "mixed": "if only some sends are buffered",
}
#: The same if no send decides, but only whether ranks wait in a broadcast, gather, …
_EARLY_RETURN_CONDITION = {
    "rendezvous": "if every collective waits for all ranks",
    "early": "if ranks may return from rooted collectives early",
    "buffered": "if ranks return as early as possible",
    "mixed": "if only some ranks return early",
}


def _readings_text(verdict: Verdict) -> str:
    """How often the program deadlocks under each assumption about sends, unless all are equal."""
    frequencies = dict(verdict.readings)
    if len(set(frequencies.values())) < 2:
        return ""
    if frequencies.get("early") == frequencies.get("rendezvous"):
        frequencies.pop("early", None)
    words = _READING_CONDITION
    if any(finding.message == EARLY_RETURN for finding in verdict.findings):
        words = _EARLY_RETURN_CONDITION
    conditions = [f"{frequency} {words[reading]}" for reading, frequency in frequencies.items()]
    return f"Deadlocks: {', '.join(conditions)}."


#: How an outcome is named after "may" and "may also".
_MAY_ALSO = {
    "completes": "complete",
    "hangs": "hang",
    "raises": "raise",
    "crashes": "crash",
    "wrong-data": "compute wrong data",
    "undefined": "be undefined",
}
#: The two ways in which nccl creates communicators.
_INIT = {
    "lazy": "without device_id in init_process_group",
    "eager": "with device_id in init_process_group",
}
_DETAILS_WIDTH = 56
_BACKEND_COLUMNS = [text_column(key) for key in ("backend", "outcome", "details")]


def _backend_table(result: CheckResult) -> Table:
    rows: list[tuple[str, str, str]] = []
    for name, outcome in result.profiles.items():
        first, *further = wrap(_outcome_details(outcome), _DETAILS_WIDTH) or [""]
        rows.append((name, outcome.outcome, first))
        rows += [("", "", line) for line in further]
    return table_of(_BACKEND_COLUMNS, rows)._replace(has_header=False)


def _outcome_details(outcome: BackendOutcome) -> str:
    """Ranks, other possible outcomes, the buffer size that decides, and variants."""
    details = []
    if outcome.ranks:
        details.append(ranks_label(sorted(outcome.ranks)))
    may_also = _MAY_ALSO
    if outcome.outcome == "wrong-data":
        # A run with wrong data completes too: here, `completes` stands for correct data.
        may_also = {**_MAY_ALSO, "completes": "compute correct data"}
    others = [may_also[possible] for possible in outcome.possible if possible != outcome.outcome]
    if others:
        may = "may" if outcome.outcome == "undefined" else "may also"
        details.append(f"{may} {_alternatives(others)}")
    if outcome.flips_at_nbytes is not None:
        details.append(f"depends on the buffer size ({show_bytes(outcome.flips_at_nbytes)})")
    for name, result in (outcome.variants or {}).items():
        if result != outcome.outcome:
            details.append(f"{_INIT[name]}: {result}")
    return "; ".join(details)


def _alternatives(words: Sequence[str]) -> str:
    """`raise`, `raise or hang`, `raise, hang or complete`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def check_summary(results: Sequence[CheckResult]) -> str:
    """``12 files: 10 ok, 1 deadlock, 1 cannot be read``."""
    counts = Counter(_short_verdict(result.verdict) for result in results)
    by_frequency = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = ", ".join(f"{count} {verdict}" for verdict, count in by_frequency)
    return f"{len(results)} file{'' if len(results) == 1 else 's'}: {words}"


def _short_verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "cannot be read"
    return verdict.verdict if verdict.complete else f"{verdict.verdict} so far"


# --- JSON ---


def check_json(results: Sequence[CheckResult]) -> dict[str, object]:
    """The output of `distsim check FILE… --format json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "files": [check_file_json(result) for result in results],
    }


def check_file_json(result: CheckResult) -> dict[str, object]:
    """One file of `check --format json`: its verdict and findings, or the errors of the file."""
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


def _backend_outcome_json(name: str, outcome: BackendOutcome) -> dict[str, object]:
    record: dict[str, object] = {
        "outcome": outcome.outcome,
        "possible": list(outcome.possible) or [outcome.outcome],
        "ranks": sorted(outcome.ranks),
    }
    # Gloo never buffers, so no buffer size decides its outcome.
    if name != "gloo":
        record["flips_at_nbytes"] = outcome.flips_at_nbytes
    if outcome.variants:
        record["variants"] = dict(outcome.variants)
    return record


# --- scenarios as tests ---
#: Unmet expectations of one file that are printed; the others are counted.
MAX_DIFFERENCES = 8


def expectations_table(results: Sequence[ScenarioTestResult]) -> str:
    """A line per file, followed by the unmet expectations."""
    rows = [(result.status, result.file, *_result_cells(result)) for result in results]
    lines = table_lines(
        ("", "scenario", "verdict", "outcome", "makespan"), rows, left=(0, 1, 2, 3), indent=""
    )
    header, *result_lines = lines
    output = [header]
    for result, line in zip(results, result_lines, strict=True):
        output.append(line)
        for difference in result.differences[:MAX_DIFFERENCES]:
            output += wrapped_lines(str(difference), "    ", "      ")
        if len(result.differences) > MAX_DIFFERENCES:
            output.append(f"    … and {len(result.differences) - MAX_DIFFERENCES} more")
    return "\n".join(output)


def _result_cells(result: ScenarioTestResult) -> tuple[str, str, str]:
    simulation = result.simulation
    if simulation is None:
        return "", "", ""
    verdict = "-" if simulation.verdict is None else simulation.verdict.verdict
    return verdict, simulation.outcome, show_ns(simulation.makespan_ns)


def expectations_summary(results: Sequence[ScenarioTestResult]) -> str:
    """The counts, for example ``12 passed, 1 failed``."""
    counts = Counter(result.status for result in results)
    statuses = ("passed", "failed", "unreadable", "no expect")
    return ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])
