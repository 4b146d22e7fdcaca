"""Where scenarios and clusters are read from, and the error for any other file."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.common.errors import EnvironmentFault, ScenarioErrors, UsageError
from distsim.hardware.cluster import Cluster, cluster_from
from distsim.scenario import Scenario, load, load_mapping, loads
from distsim.scenario.lessons import LESSONS, find_lesson, lesson_page, lesson_scenario_text
from distsim.scenario.loading import load_raw, read_text
from distsim.scenario.packaged import packaged_names, packaged_scenario
from distsim.simulation.simulate_scenario import simulate
from tests.support.source_trees import ROOT

HEAD = "world: 4\ntensors: {x: {shape: [4]}}\nprogram: [all_reduce: {tensor: x}]\n"


def problem(text: str, *sets: str) -> str:
    with pytest.raises(ScenarioErrors) as refused:
        loads(text, "f.yaml", sets)
    return str(refused.value)


# --- files ---


def test_an_installed_scenario_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert load("ring_of_four").name == "ring_of_four"
    assert load("strategies/ddp").name == "ddp"
    assert read_text("send_one") == (ROOT / "scenarios" / "send_one.yaml").read_text("utf-8")
    assert {"ring_of_four", "strategies/ddp"} <= set(packaged_names())
    assert packaged_names() == sorted(packaged_names())


@pytest.mark.parametrize("name", ["", "../scenarios/ring_of_four", "/ring_of_four", "x" * 400])
def test_a_name_cannot_leave_the_folder_of_installed_scenarios(name: str) -> None:
    assert packaged_scenario(name) is None


def test_a_file_of_the_user_comes_before_an_installed_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring_of_four").write_text(f"name: mine\n{HEAD}", encoding="utf-8")

    assert load("ring_of_four").name == "mine"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ring_of_for", "did you mean ring_of_four, a scenario that is installed"),
        ("scenarios/unheard_of.yaml", "distsim learn -o scenarios"),
        ("mien.yaml", "did you mean mine.yaml?"),
    ],
)
def test_a_missing_file_gets_a_hint(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()

    with pytest.raises(ScenarioErrors) as refused:
        load(name)
    assert hint in str(refused.value)


@pytest.mark.parametrize("name", ["train.py", "train.txt"])
def test_a_python_program_is_to_be_captured(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("import torch\n", encoding="utf-8")

    with pytest.raises(ScenarioErrors, match=r"Python program") as refused:
        load(file)
    assert "distsim capture" in str(refused.value)


def test_data_as_written_are_neither_expanded_nor_checked() -> None:
    raw = load_raw("world: 4\nprogram: [ddp: {layers: many}]\n", sets=["world=8"])

    assert raw == {"world": 8, "program": [{"ddp": {"layers": "many"}}]}
    assert load_raw("- a list\n") == {}


def test_every_lesson_has_a_page_and_its_scenarios() -> None:
    for lesson in LESSONS:
        assert find_lesson(lesson.name) is lesson
        assert lesson_page(lesson.name).startswith("# ")
        assert all("program" in lesson_scenario_text(file) for file in lesson.files)


def test_an_unknown_lesson_page_or_scenario_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"unknown lesson 'rank'; did you mean ranks\?"):
        find_lesson("rank")
    with pytest.raises(EnvironmentFault, match="page of lesson none is missing"):
        lesson_page("none")
    with pytest.raises(EnvironmentFault, match="scenario none is not in this installation"):
        lesson_scenario_text("none")


# --- clusters ---


def cluster_of(text: str, *sets: str) -> Cluster:
    return simulate(loads(HEAD + text, "f.yaml", sets), with_verdict=False).cost.cluster


def test_quantities_of_an_inline_cluster_may_be_expressions_of_vars() -> None:
    found = cluster_of(
        "vars: {lanes: 3, hop: 4 us}\n"
        "cluster: {preset: cpu-10gbe, intra: {bandwidth: lanes * 2 GB/s, latency: 2 * hop},"
        " call_overhead: world_size * 1 us}\n"
    )

    assert found.intra.bytes_per_ns == 6.0
    assert found.intra.latency_ns == 8_000
    assert found.call_overhead_ns == 4_000


def test_an_expression_in_a_cluster_that_means_nothing_is_refused_at_its_place() -> None:
    text = problem(HEAD + "cluster: {preset: cpu-10gbe, intra: {bandwidth: lanse * 2 GB/s}}\n")

    assert text.startswith("f.yaml:4:")
    assert "lanse" in text


def test_a_cluster_file_may_use_numbers_and_units_but_no_names(tmp_path: Path) -> None:
    good, bad, empty = (tmp_path / name for name in ("good.yaml", "bad.yaml", "empty.yaml"))
    good.write_text("preset: cpu-10gbe\nintra: {bandwidth: 4 * 25 GB/s}\n", encoding="utf-8")
    bad.write_text("preset: cpu-10gbe\nintra: {bandwidth: lanes * 25 GB/s}\n", encoding="utf-8")
    empty.write_text("- a list\n", encoding="utf-8")

    assert cluster_from(load_mapping(good)).intra.bytes_per_ns == 100.0
    with pytest.raises(ScenarioErrors) as refused:
        load_mapping(bad)
    assert "bad.yaml:2:" in str(refused.value)
    assert "a cluster file may use only numbers and units" in str(refused.value)
    with pytest.raises(ScenarioErrors, match="expected a mapping of keys to values"):
        load_mapping(empty)


def test_a_key_of_a_preset_can_be_set() -> None:
    found = cluster_of("cluster: cpu-10gbe\n", "cluster.call_overhead=7 us")

    assert found.call_overhead_ns == 7_000
    assert found.name.startswith("cpu-10gbe")


# --- sets that are refused ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluter.name=x", "unknown key cluter"),
        ("tensors.y.dtype=int8", "tensors has no key y (has: x)"),
        ("world.nodes=2", "give both numbers: `--set 'world={nodes: 2, ranks_per_node: 8}'`"),
        ("seed.a.b=2", "--set seed.a.b"),
    ],
)
def test_a_set_of_a_key_that_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        loads(HEAD + "seed: 1\n", "f.yaml", (text,))
    assert message in str(refused.value)


def test_a_set_whose_value_is_no_yaml_is_refused_at_its_column() -> None:
    text = problem(HEAD, "tensors={x: [")

    assert "tensors={x: [" in text


def test_an_item_of_a_list_can_be_set() -> None:
    found: Scenario = loads(HEAD, "f.yaml", ("program.0=barrier",))

    assert "barrier" in found.to_yaml()
    assert "all_reduce" not in found.to_yaml()


# --- faults and expectations ---


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{kind: kill}", "expected one of `rank`, `ranks` and `link`"),
        ("{rank: 0, ranks: [1], kind: kill}", "expected one of `rank`, `ranks` and `link`"),
        ("{link: network, kind: kill}", "a link can only be slow"),
        ("{rank: 0, nodes: [0], kind: slow, factor: 2}", "`nodes` is only valid with `link`"),
        ("{rank: 0, kind: kill, factor: 2}", "`factor` is only valid with the kind slow"),
        ("{rank: 0, kind: late}", "the kind late needs its `delay`"),
        ("{rank: 0, kind: slow, factor: 2, at: 1 ms}", "applies from the start"),
        (
            "{rank: 0, kind: kill, at: 1 ms, before_call: 1}",
            "expected either `at` or a call",
        ),
        ("{rank: 0, kind: slow, factor: 0}", "a factor above 0"),
        ("{rank: 0, kind: slow, factor: true}", "a factor above 0"),
        ("{rank: 0, kind: slow, factor: 1.0e7}", "a factor above 0"),
    ],
)
def test_a_fault_that_contradicts_itself_is_refused(fault: str, message: str) -> None:
    assert message in problem(f"{HEAD}faults: [{fault}]\n")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("groups: {g: {ranks: []}}", "expected at least one rank"),
        ("mesh: {a: 2, b: 2}\ngroups: {g: {axes: [a, a]}}", "expected axes of the mesh, each once"),
        ("mesh: {a: 2, b: 2}\ngroups: {g: {axes: []}}", "expected axes of the mesh, each once"),
    ],
)
def test_a_group_without_members_or_with_an_axis_twice_is_refused(keys: str, message: str) -> None:
    assert message in problem(f"{HEAD}{keys}\n")


def test_a_world_has_a_limit() -> None:
    assert "is too large; the limit is" in problem(
        "world: {nodes: 1000000, ranks_per_node: 8}\nprogram: [barrier]\n"
    )


# --- strategies ---


def test_fields_of_a_strategy_must_be_a_mapping_and_parts_have_a_limit() -> None:
    listed = problem("world: 2\nprogram: [pipeline: [1, 2]]\n")
    many = problem(
        "world: 2\nprogram: [ddp: {layers: {params: 4, forward: 1 ms, backward: 1 ms, count: 10000000}}]\n"
    )

    assert "pipeline" in listed
    assert "the limit is" in many


@pytest.mark.parametrize("ranks", ["0", "[0, 1]"])
def test_a_strategy_in_a_block_of_steps_or_of_some_ranks_is_expanded(ranks: str) -> None:
    fields = "{layers: {params: 1048576, forward: 1 ms, backward: 2 ms, count: 2}}"
    text = (
        "world: 2\nbackend: gloo\nprogram:\n"
        f"  - {{ddp: {fields}, ranks: {ranks}}}\n"
        f"  - repeat: {{times: 2, steps: [ddp: {fields}]}}\n"
        f"  - steps: [ddp: {fields}]\n"
    )
    ops = str(loads(text).to_yaml())

    assert "ddp:" not in ops
    assert ops.count("all_reduce") >= 3
