"""Every result prints what its command prints, and is short to look at.

The texts are the stored ones of the commands (`tests.support.command_outputs`), so no command runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import distsim
from distsim.analysis.slow_jobs.job_changes import JobChanges
from distsim.api.inputs import holds_profiles, is_trace
from distsim.api.job_changes import parse_changes
from distsim.api.recorded_calls import without_file_name
from distsim.api.reference import python_reference
from distsim.api.results import Answer, CaptureAnswer, HtmlReport, Picture, RealRunAnswer
from tests.support.command_json import checked_json
from tests.support.command_outputs import HANGS, ROOT, stored

TRACE = "traces/ring_gloo_4.jsonl"
RING = "scenarios/ring_of_four.yaml"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored outputs name files below this folder."""
    monkeypatch.chdir(ROOT)


#: Name of a stored output -> what asks the function for the same.
QUESTIONS: dict[str, Callable[[], Any]] = {
    "compare": lambda: distsim.compare(RING, "scenarios/head_to_head_sends.yaml"),
    "compare_traces": lambda: distsim.compare(TRACE, TRACE),
    "doctor_break": lambda: distsim.doctor(f"{HANGS}/early_break.zip", width=80),
    "replay": lambda: distsim.replay(TRACE),
    "slow": lambda: distsim.slow("sample"),
    "sweep": lambda: distsim.sweep(
        "scenarios/send_one.yaml",
        grid={"backend": ["gloo", "nccl"]},
        clusters=["cpu-10gbe", "dgx-h100"],
        jobs=1,
    ),
}


@cache
def answer_of(name: str) -> Any:
    return QUESTIONS[name]()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_text_of_an_answer_is_what_its_command_prints(name: str) -> None:
    printed, _, _ = stored(name).read_text(encoding="utf-8").rpartition("exit status")

    assert answer_of(name).to_text().strip() == printed.strip()


SUMMARIES = {
    "compare": "scenarios/ring_of_four.yaml and scenarios/head_to_head_sends.yaml differ>",
    "compare_traces": "agree>",
    "doctor_break": "<DoctorAnswer: 1 cause found>",
    "replay": "<ReplayAnswer: ",
    "slow": " of a step>",
    "sweep": "<SweepAnswer: 4 points>",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_an_answer_has_a_short_summary_valid_json_and_a_page_for_notebooks(name: str) -> None:
    answer = answer_of(name)

    assert SUMMARIES[name] in repr(answer)
    checked_json(name.partition("_")[0], json.dumps(answer.to_json()))
    page = answer._repr_html_()
    assert page.startswith('<div class="distsim">')
    ElementTree.fromstring(page)


def test_notebooks_show_a_timeline_of_a_run_that_takes_time_and_has_not_too_many_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes_time = distsim.simulate("scenarios/send_one.yaml")
    takes_none = distsim.simulate("world: 1\nprogram: [barrier]\n")

    svg, _, rest = takes_time._repr_html_().partition("</svg>")
    assert svg.startswith('<svg style="max-width: 100%; height: auto" ')
    assert rest.strip() == Answer._repr_html_(takes_time)
    assert ("<svg" in takes_none._repr_html_()) == bool(takes_none.makespan_ns)
    monkeypatch.setattr("distsim.api.results.MAX_CALLS_OF_NOTEBOOK_TIMELINE", 1)
    assert "<svg" not in takes_time._repr_html_()


def test_an_answer_gives_its_parts() -> None:
    run, checked = distsim.simulate(RING), distsim.check(RING)

    assert run.findings == run.raw.findings
    assert {one.code for one in run.findings} == {one.code for one in checked.findings}
    assert (run.scenario.name, len(run.trace)) == ("ring_of_four", len(run.raw.run.trace))
    assert run.values is run.raw.values
    assert checked.errors == ()
    assert "2 findings>" in repr(checked)
    assert "1 finding>" in repr(distsim.check("scenarios/tag_mismatch.yaml"))


def test_a_report_of_slow_ranks_has_tables_pictures_and_a_timeline() -> None:
    answer = answer_of("slow")

    assert not answer.ok
    assert answer.findings[0].kind == answer.verdict
    assert 0 < answer.cost_share < 1
    assert len(answer.to_pandas()) == len(answer.to_json()["ranks"])
    assert answer.to_svg().content.startswith("<svg")
    page = answer.to_html()
    assert page.html.startswith("<!doctype html>")
    assert answer.to_svg().content in page.html
    assert "traceEvents" in json.loads(answer.timeline())


def test_the_answer_of_doctor_writes_the_hang_as_a_scenario_and_as_a_graph() -> None:
    answer = distsim.doctor(f"{HANGS}/ring_receives_first.zip")

    assert distsim.check(answer.minimal_scenario()).verdict == "deadlock"
    graph = answer.picture("dot")
    assert graph.format == "dot"
    assert str(graph.content).strip() in stored("doctor_picture").read_text(encoding="utf-8")


def test_a_sweep_is_a_table_and_a_plot() -> None:
    answer = answer_of("sweep")

    assert list(answer.to_pandas()["backend"]) == [row["backend"] for row in answer.rows]
    assert answer.to_svg("my title").content.startswith("<svg")
    assert "my title" in answer.to_svg("my title").content


def test_a_smaller_scenario_fails_in_the_same_way_and_is_data_too() -> None:
    shrunk = distsim.shrink("scenarios/skipped_barrier.yaml")

    assert distsim.check(shrunk.text).verdict == "deadlock"
    assert shrunk.to_text() == shrunk.text
    assert shrunk.to_json() == {
        "text": shrunk.text,
        "calls": list(shrunk.raw.calls),
        "ranks": list(shrunk.raw.ranks),
    }
    before, after = shrunk.raw.calls
    assert repr(shrunk) == f"<ShrinkAnswer: {before} calls reduced to {after}>"


def test_a_scenario_that_cannot_be_repaired_has_no_repair_and_text_is_not_written() -> None:
    answer = distsim.fix("scenarios/send_one.yaml")

    assert (answer.to_text(), answer.to_json()) == ("no repair found", {"repairs": []})
    assert repr(answer) == "<FixAnswer: 0 repairs>"
    with pytest.raises(distsim.UsageError, match="only a file can be repaired in place"):
        distsim.fix(Path(RING).read_text(encoding="utf-8"), write=True)


def test_a_file_is_replaced_by_its_best_repair(tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text(Path(RING).read_text(encoding="utf-8"), encoding="utf-8")

    answer = distsim.fix(file, write=True)

    assert answer.written
    assert file.read_text(encoding="utf-8") == answer.texts[0]
    assert all(distsim.check(text).verdict == "ok" for text in answer.texts)
    assert answer.to_text() == "\n".join(answer.patches)
    assert answer.patches[0].startswith("---")
    assert [one["patch"] for one in answer.to_json()["repairs"]] == list(answer.patches)


def test_a_capture_is_shown_by_its_outcome_and_verdict() -> None:
    raw = {"outcome": "hangs", "verdict": "deadlock", "findings": [{"code": "DS301"}]}
    answer = CaptureAnswer(raw)

    assert repr(answer) == "<CaptureAnswer: hangs, verdict deadlock>"
    assert json.loads(answer.to_text()) == answer.to_json() == raw
    assert list(answer.to_pandas()["code"]) == ["DS301"]


def test_pictures_and_pages_show_themselves_in_notebooks(tmp_path: Path) -> None:
    svg, png = Picture("<svg/>", "svg"), Picture(b"\x89PNG", "png")
    page = HtmlReport('<p class="a">1 & 2</p>')

    assert (repr(svg), repr(png)) == ("<Picture: svg, 6 characters>", "<Picture: png, 4 bytes>")
    assert (svg._repr_svg_(), svg._repr_png_()) == ("<svg/>", None)
    assert (png._repr_svg_(), png._repr_png_()) == (None, b"\x89PNG")
    assert png.save(tmp_path / "a.png").read_bytes() == b"\x89PNG"
    assert repr(page) == "<HtmlReport: 22 characters>"
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;1 &amp; 2&lt;/p&gt;"' in page._repr_html_()
    assert page.save(tmp_path / "a.html").read_text(encoding="utf-8") == page.html


def test_the_summary_of_a_real_run_is_the_first_line_of_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RealRunAnswer, "to_text", lambda self: "all is well\nand more")

    assert repr(RealRunAnswer(None)) == "<RealRunAnswer: all is well>"


# --- inputs ---


def test_files_of_other_tools_are_distinguished_from_scenarios(tmp_path: Path) -> None:
    profile, scenario = tmp_path / "a.json", tmp_path / "b.json"
    profile.write_text('{"traceEvents": []}', encoding="utf-8")
    scenario.write_text('{"world": 2}', encoding="utf-8")
    scenarios, profiles, empty = (tmp_path / name for name in ("scenarios", "profiles", "empty"))
    for folder in (scenarios, profiles, empty):
        folder.mkdir()
    (scenarios / "x.yaml").touch()
    (profiles / "rank0.json").write_text('{"schemaVersion": 1}', encoding="utf-8")
    (profiles / "notes.txt").touch()

    yes = (profile, profiles, "x.jsonl", "x.jsonl.gz.partial", "x.et", "x.sqlite", "sample")
    no = (scenario, scenarios, "", tmp_path / "missing.json", "x.yaml", "world: 2\n.jsonl", 7)
    assert [one for one in yes if not is_trace(one)] == []
    assert [one for one in no if is_trace(one)] == []
    assert (holds_profiles(profiles), holds_profiles(scenarios)) == (True, False)


def test_a_file_named_like_the_sample_is_not_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample").touch()

    assert not is_trace("sample")


def test_what_ifs_add_up() -> None:
    changes = parse_changes(["like-peers=2,5-6", "compute@1-2=0.5", "compute@2=3", "cluster=x"])

    assert changes == JobChanges((2, 5, 6), {1: 0.5, 2: 3.0}, "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("like-peers", "unknown change"),
        ("cluster=", "unknown change"),
        ("speed=2", "unknown change"),
        ("compute@1=fast", "has no factor"),
        ("compute@1=-1", "has no factor"),
        ("compute@1=nan", "has no factor"),
        ("compute@1=1e9", "has no factor"),
    ],
)
def test_a_what_if_that_names_no_change_is_refused(text: str, reason: str) -> None:
    with pytest.raises(distsim.UsageError, match=f"what-if: .*{reason}"):
        parse_changes([text])


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda: distsim.slow(), "no input was given"),
        (lambda: distsim.slow("sample", ideal="best"), "ideal: unknown value 'best'"),
        (lambda: distsim.replay(TRACE, what_if=["like-peers=1"]), "change a replay as recorded"),
        (
            lambda: distsim.replay(TRACE, as_recorded=True, backend="nccl"),
            "keeps the rules of the recorded backend",
        ),
        (
            lambda: distsim.replay(TRACE, as_recorded=True, what_if=["like-peers=77"]),
            "rank 77 is not in",
        ),
        (lambda: distsim.report(), "one or two runs, but 0 were given"),
        (lambda: distsim.report(RING, RING, RING), "one or two runs, but 3 were given"),
        (lambda: distsim.render(view="timeline"), "the view timeline needs a scenario"),
        (
            lambda: distsim.plan(
                "llama3-8b", gpus=8, cluster="dgx-h100", global_batch=8, memory_reserve=80 << 30
            ),
            "memory reserve of 80 GiB is not less than the memory of",
        ),
    ],
)
def test_a_question_without_an_answer_says_why(ask: Any, reason: str) -> None:
    with pytest.raises(distsim.UsageError, match=reason):
        ask()


def test_a_trace_of_an_unknown_backend_needs_a_known_one(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = Path(TRACE).read_text(encoding="utf-8").replace('"backend":"gloo"', '"backend":"ucc"')
    file.write_text(lines.replace('"backend": "gloo"', '"backend": "ucc"'), encoding="utf-8")

    with pytest.raises(distsim.UsageError, match="does not know the backend `ucc`"):
        distsim.check(file)
    assert distsim.check(TRACE).verdict == "ok"
    assert distsim.check(file, backend="gloo").verdict == "ok"


def test_a_message_loses_the_file_name_that_it_begins_with() -> None:
    assert without_file_name("a+b.yaml: line 3 is wrong", "a+b.yaml") == "line 3 is wrong"
    assert without_file_name("line 3 of a+b.yaml", "a+b.yaml") == "line 3 of a+b.yaml"


def test_a_report_shows_a_trace_as_recorded_and_names_both_runs() -> None:
    one, two = distsim.report(TRACE), distsim.report(TRACE, RING)

    assert one.ok
    assert not two.ok
    assert all(name in two.html for name in ("<bdi>ring</bdi>", "<bdi>ring_of_four</bdi>"))


def test_the_picture_of_a_trace_shows_recorded_times_unless_backend_or_cluster_change() -> None:
    recorded = distsim.render(TRACE, view="timeline").content
    elsewhere = distsim.render(TRACE, view="timeline", cluster="dgx-h100").content

    assert recorded != elsewhere
    assert distsim.render(TRACE, view="timeline").content == recorded


def test_measured_times_come_from_bench_or_from_nccl_tests(tmp_path: Path) -> None:
    from distsim.real.bench.measurement import BenchResult, BenchRow, bench_to_json

    file = tmp_path / "bench.json"
    row = BenchRow("all_reduce", 2, 2, 1 << 20, 300_000, 250_000, 400_000, 9)
    file.write_text(bench_to_json(BenchResult((row,), {}, 1.0)), encoding="utf-8")
    text = "world: 2\ntensors: {x: {shape: [262144]}}\nprogram: [all_reduce: {tensor: x}]\n"

    predicted = distsim.render(text, view="bandwidth").content
    measured = distsim.render(text, view="bandwidth", measured=file).content

    assert predicted != measured
    with pytest.raises(distsim.UsageError):
        distsim.render(text, view="bandwidth", measured=RING)


def test_the_python_reference_is_made_from_the_interface() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")

    assert python_reference().split() == _without_comments(page).split()


def _without_comments(page: str) -> str:
    return "\n".join(line for line in page.splitlines() if not line.startswith("<!--"))
