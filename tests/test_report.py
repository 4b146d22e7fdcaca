"""The report of a simulation: what the text says first, that it fits 80 columns, and that the JSON keeps its keys."""

from __future__ import annotations

import json

import pytest

from distsim.scenario import load, loads
from distsim.simulation import simulate
from distsim.views.jsonview import simulation_json
from distsim.views.tables import cut, ranks_text, table
from distsim.views.text import report

RING = """
name: ring
world: {world}
backend: gloo
tensors: {{x: {{shape: [{size}], value: rank}}, y: {{shape: [{size}]}}}}
program:
  - send: {{tensor: x, dst: (rank + 1) % world_size}}
  - recv: {{tensor: y, src: (rank - 1) % world_size}}
"""
SUM = "name: sum\nworld: 4\nbackend: gloo\ntensors: {x: {shape: [1], value: rank}}\nprogram:\n  - all_reduce: {tensor: x}\n"
KEYS = [
    "schema_version",
    "file",
    "outcome",
    "verdict",
    "complete",
    "profile",
    "world_size",
    "makespan_ns",
    "iteration_ns",
    "ranks",
    "critical_path",
    "collectives",
    "values",
    "findings",
    "cost_model",
]  # design: `distsim simulate F --format json`


def test_outcome_and_verdict_come_first():
    assert report(simulate(loads(SUM))).startswith("sum: completes in 110 us; verdict ok\n")


def test_a_hang_names_cause_place_and_remedy_before_any_table():
    text = report(simulate(loads(RING.format(world=4, size=4), file="ring.yaml")))
    before_tables = text.partition("\nRanks\n")[0]

    assert text.startswith("ring: hangs at once; verdict deadlock")
    assert "error DS301: ranks 0 → 1 → 2 → 3 → 0 wait for each other" in before_tables
    assert "at ring.yaml:7:5  send  ranks 0-3" in before_tables
    assert "help: " in before_tables


@pytest.mark.parametrize("world", [2, 4, 17, 256, 1024])
def test_the_report_fits_80_columns_and_a_screen_or_two_whatever_the_world(world):
    lines = report(simulate(loads(RING.format(world=world, size=4)))).splitlines()

    assert max(map(len, lines)) <= 80
    assert len(lines) < 70


def test_every_scenario_of_the_project_reports_in_80_columns(root):
    too_wide = []
    for file in sorted((root / "scenarios").glob("*.yaml")):
        lines = report(simulate(load(str(file.relative_to(root))))).splitlines()
        too_wide += [(file.name, line) for line in lines if len(line) > 80]

    assert too_wide == []


def test_ranks_with_equal_times_share_a_line_in_a_large_world():
    lines = report(simulate(loads(SUM.replace("world: 4", "world: 64")))).splitlines()
    ranks = lines[lines.index("Ranks") + 2 :][:2]

    assert ranks[0].split()[0] == "0-63"
    assert ranks[1].strip().startswith("exposed:")


def test_the_groups_of_an_axis_share_a_line_where_their_collectives_are_equal():
    text = report(
        simulate(loads(SUM.replace("world: 4", "world: 4\nmesh: {a: 2, b: 2}").replace("tensor: x", "tensor: x, group: a")))
    )

    assert "all_reduce  2 × a" in text


def test_the_json_has_every_key_and_survives_a_round_trip():
    data = simulation_json(simulate(loads(SUM, file="sum.yaml")))

    assert [key for key in KEYS if key not in data] == []
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema_version"] == 1
    assert data["values"] == {"x": {"0": 6.0, "1": 6.0, "2": 6.0, "3": 6.0}}
    assert set(data["collectives"][0]) >= {"op", "group", "nbytes", "duration_ns", "algbw", "busbw"}
    assert set(data["cost_model"]) == {"name", "source", "error_band"}


def test_the_four_shares_of_every_rank_add_up_to_the_makespan(root):
    for file in sorted((root / "scenarios").glob("*.yaml")):
        data = simulation_json(simulate(load(str(file))))
        shares = ("compute_ns", "exposed_comm_ns", "waiting_ns", "idle_ns")

        assert {sum(rank[s] for s in shares) for rank in data["ranks"]} == {data["makespan_ns"]}, file.name


def test_json_says_null_for_a_verdict_that_was_not_asked_for_and_for_unknown_numbers():
    unknown = "world: 2\nbackend: gloo\ntensors: {x: {shape: [2]}}\nprogram:\n  - all_reduce: {tensor: x}\n"
    data = simulation_json(simulate(loads(unknown), with_verdict=False))

    assert (data["verdict"], data["complete"]) == (None, None)
    assert data["values"] == {"x": {"0": None, "1": None}}


def test_what_json_has_no_number_for_is_text():
    tensors = "tensors: {x: {shape: [2], value: 1e300, dtype: float64}}"
    text = f"world: 2\nbackend: gloo\n{tensors}\nprogram:\n  - all_reduce: {{tensor: x, op: product}}\n"

    assert simulation_json(simulate(loads(text)))["values"]["x"]["0"] == "inf"


@pytest.mark.parametrize("name", ["hybrid", "ring_of_four", "pipeline_1f1b"])
def test_the_same_file_gives_the_same_bytes_whatever_the_hash_seed(cli, name):
    seeds = ("0", "1", "2")
    for form in ("text", "json"):
        runs = {cli("simulate", f"scenarios/{name}.yaml", "--format", form, env={"PYTHONHASHSEED": s}).stdout for s in seeds}

        assert len(runs) == 1


def test_a_world_of_many_findings_is_cut_and_says_so():
    steps = "".join(f"  - send: {{tensor: x, dst: {k}}}\n" for k in range(10, 60))
    text = report(simulate(loads("world: 2\nbackend: gloo\ntensors: {x: {shape: [1]}}\nprogram:\n" + steps)))

    assert "more findings; --format json has all" in text


def test_ranks_in_few_characters():
    assert ranks_text([3]) == "3"
    assert ranks_text([1, 3]) == "1, 3"
    assert ranks_text([0, 1, 2, 3]) == "0-3"
    assert ranks_text([0, 4, 8, 12, 16]) == "0, 4 … 16"
    assert ranks_text([0, 1, 2, 8, 9, 10, 11]) == "0-2, 8-11"
    assert len(ranks_text([n for n in range(1024) if n % 7 and n % 3])) < 40


def test_a_table_is_aligned_and_leaves_no_blank_at_the_end():
    assert table(("name", "n"), [("a", "1"), ("bcdef", "10")], indent="") == ["name    n", "a       1", "bcdef  10"]
    assert cut("abcdef", 4) == "abc…"
