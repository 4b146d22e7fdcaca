"""Results of the public functions.

Every result has a short ``repr``, ``to_text()`` (what the command prints), ``to_json()`` (what the
command prints with ``--format json``), and ``_repr_html_()`` for notebooks. Results with rows also
have ``to_pandas()``. A result wraps the record that the library computed (``raw``); the record's
fields are not part of the public interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from distsim.analysis.run_comparison import RunComparison
    from distsim.analysis.slow_jobs.slow_job import SlowJob
    from distsim.findings.finding_types import Finding
    from distsim.hang_doctor import Diagnosis
    from distsim.output.page import ReportRun
    from distsim.output.report_record import Report
    from distsim.planning.ranking import LayoutPlan
    from distsim.planning.sweep.run_sweep import SweepResult
    from distsim.real.results.real_run import RealRun
    from distsim.repair.search import ScenarioRepair
    from distsim.repair.shrink import ShrinkResult
    from distsim.scenario import Scenario
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.simulation.trace_replay import ReplayResult
    from distsim.simulation.trace_replay.as_recorded import RecordedReplay
    from distsim.trace.model import Trace
    from distsim.values import BufferValues

Json = dict[str, Any]

#: A notebook shows the timeline of runs with at most this many calls.
MAX_CALLS_OF_NOTEBOOK_TIMELINE = 3_000


class Answer:
    """Base of all results. Subclasses hold ``raw`` and define the three methods that raise here.

    Neither dataclasses nor abstract methods: to create thirteen such classes would take a tenth of
    the time of a short command.
    """

    raw: Any
    notes: tuple[str, ...]

    def __init__(self, raw: Any, notes: tuple[str, ...] = ()) -> None:
        self.raw = raw
        self.notes = notes

    def to_text(self) -> str:
        """The report that the command prints."""
        raise AttributeError("to_text")

    def to_json(self) -> Json:
        """The report as JSON-compatible data."""
        raise AttributeError("to_json")

    def _summary(self) -> str:
        """One line for the ``repr``."""
        raise AttributeError("_summary")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary()}>"

    def _repr_html_(self) -> str:
        from distsim.output.report_html import write_html

        return write_html(self._report())

    def _report(self) -> Report:
        """The report before its layout; by default the lines of the text."""
        from distsim.output.report_record import Report, Section, Verbatim

        return Report([Section([Verbatim(self.to_text().splitlines())])])


class SimulationAnswer(Answer):
    """One simulated run. Times are in nanoseconds."""

    raw: Simulation

    def __init__(self, raw: Simulation, notes: tuple[str, ...] = (), *, strict: bool = False):
        super().__init__(raw, notes)
        self._strict = strict

    @property
    def ok(self) -> bool:
        """Whether the command would end with exit status 0."""
        return self.raw.status(self._strict) == 0

    @property
    def outcome(self) -> str:
        """``completes``, ``hangs``, ``crashes``, …: what this run does."""
        return self.raw.outcome

    @property
    def verdict(self) -> str | None:
        """``ok``, ``deadlock``, ``mismatch``, … over all event orders; None if not requested."""
        return None if self.raw.verdict is None else self.raw.verdict.verdict

    @property
    def makespan_ns(self) -> int:
        """Time from the start to the end of the last call."""
        return self.raw.makespan_ns

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.raw.findings

    @property
    def scenario(self) -> Scenario:
        return self.raw.scenario

    @property
    def trace(self) -> Trace:
        """The simulated calls as a table."""
        return self.raw.run.trace

    @property
    def values(self) -> BufferValues | None:
        """What the tensors hold at the end; None if not computed."""
        return self.raw.values

    def to_text(self) -> str:
        from distsim.output.text.simulation_report import simulation_report_text

        return simulation_report_text(self.raw)

    def to_json(self) -> Json:
        from distsim.output.json.simulation_result import simulation_json

        return dict(simulation_json(self.raw))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per rank: compute, exposed communication, waiting, idle and finish, in ns."""
        return _data_frame([rank._asdict() for rank in self.raw.timeline.ranks])

    def _report(self) -> Report:
        from distsim.output.text.simulation_report import simulation_report

        return simulation_report(self.raw)

    def _repr_html_(self) -> str:
        return self._timeline_html() + super()._repr_html_()

    def _timeline_html(self) -> str:
        """A small timeline; empty for a run that takes no time, or has too many calls."""
        program = self.raw.program
        if not self.makespan_ns or program.call_count > MAX_CALLS_OF_NOTEBOOK_TIMELINE:
            return ""
        from distsim.output.pictures.views.timeline import timeline_svg

        blocked = [blocked.rank for blocked in self.raw.run.final_state.blocked]
        svg = timeline_svg(self.trace, name=program.name, stuck=blocked)
        return svg.replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)

    def _summary(self) -> str:
        from distsim.common.units import show_ns

        ranks = f"{self.raw.program.world_size:,} ranks"
        ending = f"{self.outcome} in {show_ns(self.makespan_ns)}"
        verdict = "" if self.verdict is None else f", verdict {self.verdict}"
        return f"{self.raw.program.name}, {ranks}, {ending}{verdict}"


class CheckAnswer(Answer):
    """The verdict on one scenario over all event orders, and its outcome on each backend."""

    raw: CheckResult

    @property
    def verdict(self) -> str | None:
        """None if the file cannot be read; `errors` says why."""
        return None if self.raw.verdict is None else self.raw.verdict.verdict

    @property
    def ok(self) -> bool:
        """Whether the command would end with exit status 0."""
        return self.raw.status() == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.raw.findings

    @property
    def errors(self) -> tuple[object, ...]:
        """Problems of the file itself."""
        return self.raw.errors

    def to_text(self) -> str:
        from distsim.output.text.check_results import check_text

        return check_text([self.raw])

    def to_json(self) -> Json:
        from distsim.output.text.check_results import check_file_json

        return dict(check_file_json(self.raw))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per finding."""
        return _data_frame(_finding_rows(self.findings))

    def _report(self) -> Report:
        from distsim.output.text.check_results import check_report

        return check_report([self.raw])

    def _summary(self) -> str:
        count = len(self.findings)
        findings = f"{count} finding{'' if count == 1 else 's'}"
        return f"{self.raw.file}, verdict {self.verdict}, {findings}"


class PlanAnswer(Answer):
    """Layouts of a training step, the fastest first."""

    raw: LayoutPlan

    def __init__(self, raw: LayoutPlan, preset_of: Mapping[str, str], shown_rows: int = 15) -> None:
        """``preset_of``: the preset or file that was given, by the name of the cluster."""
        super().__init__(raw)
        self._preset_of = preset_of
        self._shown_rows = shown_rows

    def to_text(self) -> str:
        from distsim.output.text.layout_plan import layout_plan_text

        return layout_plan_text(self.raw, self._shown_rows)

    def to_json(self) -> Json:
        from distsim.output.text.layout_plan import layout_plan_json

        return dict(layout_plan_json(self.raw))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per layout that fits, the fastest first."""
        return _data_frame(self.to_json()["layouts"])

    def _report(self) -> Report:
        from distsim.output.text.layout_plan import layout_plan_report

        return layout_plan_report(self.raw, self._shown_rows)

    def best_scenario(self) -> str | None:
        """The fastest layout as the text of a scenario file; None if no layout fits."""
        from distsim.scenario.format.source.yaml_nodes import dump_yaml

        best = self.raw.best
        if best is None:
            return None
        cluster = self._preset_of.get(best.cluster, best.cluster)
        return dump_yaml(self.raw.request_of(best).scenario(best.layout, cluster))

    def best_torchtitan_config(self) -> str | None:
        """torchtitan's TOML of its fastest layout; None without one."""
        from distsim.output.text.framework_arguments import torchtitan_config

        best = self.raw.best_for("torchtitan")
        return None if best is None else torchtitan_config(self.raw.request_of(best), best.layout)

    def best_megatron_arguments(self) -> str | None:
        """Megatron-LM's arguments for its fastest layout; None without one."""
        from distsim.output.text.framework_arguments import megatron_arguments

        best = self.raw.best_for("megatron")
        return None if best is None else megatron_arguments(self.raw.request_of(best), best.layout)

    def to_svg(self) -> Picture:
        """A plot of step time and memory of the layouts."""
        from distsim.output.text.layout_plan import layout_plan_svg

        return Picture(layout_plan_svg(self.raw), "svg")

    def _summary(self) -> str:
        best = self.raw.best
        if best is None:
            return "no layout fits"
        return f"{len(self.raw.ranked)} layouts fit, fastest {best.layout.label()}"


class SweepAnswer(Answer):
    """One row per simulated grid point, the fastest first."""

    raw: SweepResult

    def __init__(self, raw: SweepResult, shown_rows: int = 15) -> None:
        super().__init__(raw)
        self._shown_rows = shown_rows

    @property
    def ok(self) -> bool:
        """Whether some point completes."""
        return any(row["outcome"] == "completes" for row in self.raw.rows)

    @property
    def rows(self) -> Sequence[Mapping[str, str]]:
        return self.raw.rows

    def to_text(self) -> str:
        from distsim.output.text.sweep_table import sweep_text

        return sweep_text(self.raw, self._shown_rows)

    def to_json(self) -> Json:
        from distsim.output.text.sweep_table import sweep_json

        return dict(sweep_json(self.raw))

    def to_svg(self, title: str = "") -> Picture:
        """A plot of the times over the swept values, and over memory."""
        from distsim.output.pictures.sweep_plot import sweep_svg

        return Picture(sweep_svg(self.raw, title), "svg")

    def to_pandas(self) -> pandas.DataFrame:
        """One row per grid point."""
        return _data_frame([dict(row) for row in self.rows])

    def _report(self) -> Report:
        from distsim.output.text.sweep_table import sweep_report

        return sweep_report(self.raw, self._shown_rows)

    def _summary(self) -> str:
        return f"{len(self.rows)} points"


class DoctorAnswer(Answer):
    """Why a job hangs, as far as its files prove it."""

    raw: Diagnosis

    def __init__(self, raw: Diagnosis, width: int | None = None, bundle: bytes = b"") -> None:
        super().__init__(raw)
        self._width = width
        #: For a live job: a zip file with all that was seen, to attach to a bug report.
        self.bundle = bundle

    @property
    def causes(self) -> tuple[Any, ...]:
        return tuple(self.raw.causes)

    def to_text(self) -> str:
        from distsim.common.file_io import escape_control_characters
        from distsim.output.text.diagnosis import doctor_text
        from distsim.output.text_layout import page_width

        # Names of groups and functions come from files of strangers.
        return escape_control_characters(doctor_text(self.raw, self._width or page_width()))

    def to_json(self) -> Json:
        from distsim.output.json.diagnosis import doctor_json

        return dict(doctor_json(self.raw))

    def _report(self) -> Report:
        from distsim.output.text.diagnosis import doctor_report

        return doctor_report(self.raw)

    def minimal_scenario(self) -> str:
        """The smallest scenario that hangs in the same way, as YAML. Raises UsageError."""
        from distsim.hang_doctor.minimal_scenario import minimal_scenario_text

        return minimal_scenario_text(self.raw)

    def picture(self, format: str = "svg") -> Picture:
        """The graph of which rank waits for which: svg, png, pdf or dot."""
        from distsim.output.pictures.drawing.dot import dot_text, render_dot
        from distsim.output.pictures.hang_graph import doctor_picture

        graph = doctor_picture(self.raw)
        text = dot_text(graph)
        if format == "dot":
            return Picture(text, format)
        image = render_dot(text, format, graph.engine)
        return Picture(image.decode() if format == "svg" else image, format)

    def _summary(self) -> str:
        count = len(self.causes)
        return f"{count} cause{'' if count == 1 else 's'} found"


class SlowAnswer(Answer):
    """Why a job is slow: findings, costs of all ranks, and the breakdown of a step."""

    raw: SlowJob

    @property
    def ok(self) -> bool:
        """Whether nothing was found, and the job does not hang."""
        return not self.raw.findings and not self.raw.hangs

    @property
    def verdict(self) -> str:
        """The kind of the costliest finding; ``none`` or ``not sure`` without any."""
        return self.raw.verdict

    @property
    def findings(self) -> tuple[Any, ...]:
        return self.raw.findings

    @property
    def cost_share(self) -> float:
        """The share of a step that the costliest finding costs."""
        return self.raw.finding_share

    def to_text(self) -> str:
        from distsim.output.text.slow_job import slow_text

        return slow_text(self.raw)

    def to_json(self) -> Json:
        from distsim.output.json.slow_job import slow_json

        return slow_json(self.raw)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per rank: its cost and its slowdown."""
        from distsim.output.json.slow_job import rank_rows

        return _data_frame(rank_rows(self.raw))

    def to_svg(self) -> Picture:
        """Extra time by rank and step, the breakdown, and one step recorded above its ideal."""
        from distsim.output.pictures.slow_job import slow_svg

        return Picture(slow_svg(self.raw), "svg")

    def to_html(self) -> HtmlReport:
        """The report and the pictures as a page that loads nothing."""
        from distsim.output.report_html import write_html

        body = f"{write_html(self._report())}\n{self.to_svg().content!s}"
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>distsim slow</title>'
        return HtmlReport(f"{head}<body>{body}</body></html>", ok=self.ok)

    def timeline(self) -> str:
        """The recorded job, and the job without slow ranks and communication, for Perfetto."""
        from distsim.output.json.slow_timeline import slow_timeline

        return slow_timeline(self.raw)

    def _report(self) -> Report:
        from distsim.output.text.slow_job import slow_report

        return slow_report(self.raw)

    def _summary(self) -> str:
        return f"{self.verdict}, {self.cost_share:.0%} of a step"


class RealRunAnswer(Answer):
    """A run on torch.distributed."""

    raw: RealRun

    @property
    def trace(self) -> Trace:
        """The recorded calls as a table."""
        return self.raw.trace

    def to_text(self) -> str:
        from distsim.output.text.real_run import real_run_text

        return real_run_text(self.raw)

    def to_json(self) -> Json:
        from distsim.output.text.real_run import real_run_json

        return dict(real_run_json(self.raw))

    def _report(self) -> Report:
        from distsim.output.text.real_run import real_run_report

        return real_run_report(self.raw)

    def _summary(self) -> str:
        return self.to_text().partition("\n")[0]


class ReplayAnswer(Answer):
    """The calls of a trace, simulated again or evaluated with their recorded times."""

    raw: ReplayResult | RecordedReplay

    def __init__(self, raw: ReplayResult | RecordedReplay, file: str = "trace") -> None:
        super().__init__(raw)
        self.file = file

    @property
    def outcome(self) -> str:
        return self.raw.outcome

    @property
    def trace(self) -> Trace:
        return self.raw.trace

    def to_text(self) -> str:
        from distsim.output.text.replay_report import replay_text

        return replay_text(self.raw, self.file)

    def to_json(self) -> Json:
        from distsim.output.text.replay_report import replay_json

        return dict(replay_json(self.raw, self.file))

    def _report(self) -> Report:
        from distsim.output.text.replay_report import replay_report

        return replay_report(self.raw, self.file)

    def _summary(self) -> str:
        return self.to_text().partition("\n")[0]


class ComparisonAnswer(Answer):
    """Two runs compared: calls, values, order and times."""

    raw: RunComparison

    def __init__(
        self,
        raw: RunComparison,
        runs: tuple[ReportRun, ReportRun],
        names: tuple[str, str] = ("first", "second"),
    ) -> None:
        super().__init__(raw)
        self._runs = runs
        self.names = names

    @property
    def same(self) -> bool:
        """Whether calls, values and order agree, and times within the tolerance."""
        return self.raw.same

    def to_text(self) -> str:
        from distsim.output.text.comparison import compare_text

        return compare_text(self.raw, self.names)

    def to_json(self) -> Json:
        from distsim.output.text.comparison import compare_json

        return dict(compare_json(self.raw, self.names))

    def _report(self) -> Report:
        from distsim.output.text.comparison import compare_report

        return compare_report(self.raw, self.names)

    def to_svg(self) -> Picture:
        """Both runs over one time axis."""
        from distsim.output.pictures.run_overlay import overlay_svg

        return Picture(overlay_svg(self.raw, self.names), "svg")

    def report(self) -> HtmlReport:
        """Both runs as a self-contained HTML page."""
        from distsim.output.page import report_html

        return HtmlReport(report_html(self._runs, self.raw), ok=self.same)

    def _summary(self) -> str:
        first, second = self.names
        return f"{first} and {second} {'agree' if self.same else 'differ'}"


class ShrinkAnswer(Answer):
    """The smallest scenario found that fails in the same way."""

    raw: ShrinkResult

    @property
    def text(self) -> str:
        """The scenario file."""
        return self.raw.text

    def to_text(self) -> str:
        return self.text

    def to_json(self) -> Json:
        return {"text": self.text, "calls": list(self.raw.calls), "ranks": list(self.raw.ranks)}

    def _summary(self) -> str:
        before, after = self.raw.calls
        return f"{before:,} calls reduced to {after:,}"


class FixAnswer(Answer):
    """Repairs of a failing scenario, the best first. With each of them, the scenario has verdict
    ok."""

    raw: tuple[ScenarioRepair, ...]

    def __init__(self, raw: tuple[ScenarioRepair, ...], *, written: bool = False) -> None:
        super().__init__(raw)
        self._written = written

    @property
    def written(self) -> bool:
        """Whether the file was replaced by the best repair."""
        return self._written

    @property
    def patches(self) -> tuple[str, ...]:
        """Unified diffs."""
        return tuple(repair.patch for repair in self.raw)

    @property
    def texts(self) -> tuple[str, ...]:
        """The repaired scenario files."""
        return tuple(repair.text for repair in self.raw)

    def to_text(self) -> str:
        return "\n".join(self.patches) or "no repair found"

    def to_json(self) -> Json:
        repairs = [
            {
                "steps": list(repair.words),
                "completes": list(repair.completes),
                "patch": repair.patch,
            }
            for repair in self.raw
        ]
        return {"repairs": repairs}

    def _summary(self) -> str:
        return f"{len(self.raw)} repair{'' if len(self.raw) == 1 else 's'}"


class CaptureAnswer(Answer):
    """A script's calls on all ranks and their verdict; ``raw`` is the JSON of the command."""

    raw: Json

    @property
    def outcome(self) -> str:
        return str(self.raw["outcome"])

    @property
    def verdict(self) -> str | None:
        verdict = self.raw.get("verdict")
        return None if verdict is None else str(verdict)

    def to_text(self) -> str:
        import json

        return json.dumps(self.raw, indent=2, ensure_ascii=False)

    def to_json(self) -> Json:
        return dict(self.raw)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per finding."""
        return _data_frame(list(self.raw.get("findings", ())))

    def _summary(self) -> str:
        return f"{self.outcome}, verdict {self.verdict}"


class Picture:
    """A drawing. ``content`` is text for svg, dot and mermaid, and bytes for png and pdf."""

    def __init__(self, content: str | bytes, format: str, notes: tuple[str, ...] = ()) -> None:
        self.content = content
        self.format = format
        self.notes = notes

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file, whole or not at all. Raises UsageError if it cannot."""
        from distsim.common.file_io import write_file

        content = self.content
        write_file(Path(path), [content.encode() if isinstance(content, str) else content])
        return Path(path)

    def __repr__(self) -> str:
        return f"<Picture: {self.format}, {len(self.content):,} {self._unit}>"

    @property
    def _unit(self) -> str:
        return "characters" if isinstance(self.content, str) else "bytes"

    def _repr_svg_(self) -> str | None:
        return str(self.content) if self.format == "svg" else None

    def _repr_png_(self) -> bytes | None:
        return self.content if isinstance(self.content, bytes) and self.format == "png" else None


class HtmlReport:
    """One run, or two compared runs, as a self-contained HTML page."""

    def __init__(self, html: str, *, ok: bool = True, notes: tuple[str, ...] = ()) -> None:
        self.html = html
        self.ok = ok
        self.notes = notes

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, whole or not at all. Raises UsageError if it cannot."""
        from distsim.common.file_io import write_file

        write_file(Path(path), [self.html])
        return Path(path)

    def __repr__(self) -> str:
        return f"<HtmlReport: {len(self.html):,} characters>"

    def _repr_html_(self) -> str:
        from html import escape

        # An iframe keeps the page's style and script apart from the notebook's.
        source = escape(self.html, quote=True)
        return f'<iframe srcdoc="{source}" width="100%" height="600"></iframe>'


def _finding_rows(findings: Sequence[Finding]) -> list[Json]:
    return [
        {
            "code": finding.code,
            "severity": finding.severity,
            "message": finding.message,
            "ranks": tuple(finding.ranks),
        }
        for finding in findings
    ]


def _data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Raises EnvironmentFault if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        from distsim.common.errors import EnvironmentFault

        raise EnvironmentFault(
            "to_pandas() needs pandas, which is not installed", "pip install pandas"
        ) from None
    return pandas.DataFrame(list(rows))
