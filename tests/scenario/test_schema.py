"""The JSON Schema takes what the loader takes, and refuses what an editor can see is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.operations.core.torch_arguments import torch_argument_names
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario import json_schema, load, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.scenario.strategies import STRATEGIES
from tests.support.json_schema import Schema
from tests.support.spoilt_files import as_json, data_of, files, from_json, mutants

SCHEMA = json_schema()
VALIDATOR = Schema(as_json(SCHEMA))
#: What is wrong with names, which a schema does not know.
_NAMES = re.compile(
    r"unknown (tensor|group|handle|name|axis)|is defined further down|no call defines|outside the world"
    r"|does not give the world|known (beside|in)"
    r"|is already|like itself|not in the mesh|is not a number with one value"
)


def fits(value: Any, schema: Any = None) -> bool:
    return VALIDATOR.fits(value)


def test_every_scenario_of_the_project_matches_the_schema() -> None:
    found = {file.stem: next(VALIDATOR.faults(data_of(file)), "") for file in files()}

    assert len(found) > 100
    assert {name: fault for name, fault in found.items() if fault} == {}


def test_a_written_scenario_matches_the_schema() -> None:
    names = (
        "hybrid",
        "two_machines",
        "uneven_all_to_all",
        "killed_at_iteration_3",
        "pipeline_1f1b",
    )

    assert [
        name
        for name in names
        if not fits(as_json(load(files()[0].parent / f"{name}.yaml").to_data()))
    ] == []


def judged(data: Any) -> bool | None:
    """Does distsim take the file? None: it refuses nothing but names."""
    try:
        loads(dump_yaml(from_json(data)))
    except ScenarioErrors as errors:
        return None if all(_NAMES.search(p.message) for p in errors.problems) else False
    return True


def agreement(count: int, seed: int) -> tuple[int, int, list[str]]:
    """(mutants that are judged by their form, those on which schema and distsim agree, what the
    schema refuses alone).
    """
    judgements = [(name, judged(data), data) for name, data in mutants(count, seed)]
    formed = [(name, taken, data) for name, taken, data in judgements if taken is not None]
    same = sum(taken == fits(data) for _, taken, data in formed)
    return (
        len(formed),
        same,
        [
            f"{name}: {next(VALIDATOR.faults(data))}"
            for name, taken, data in formed
            if taken and not fits(data)
        ],
    )


def test_the_schema_and_distsim_agree_on_mutated_files() -> None:
    """95 in a hundred, and nothing that distsim takes is refused."""
    formed, same, alone = agreement(150, seed=11)

    assert formed > 120
    assert same >= 0.95 * formed
    assert alone == []


@pytest.mark.slow
def test_the_schema_and_distsim_agree_on_many_mutated_files() -> None:
    formed, same, alone = agreement(1000, seed=12)

    assert same >= 0.95 * formed
    assert alone == []


def test_an_editor_reports_the_wrong_field() -> None:
    """An entry is told apart by its key: one fault, in the operation's own fields, with the file's
    word for torch's.
    """
    data = {"world": 4, "program": [{"all_reduce": {"tensor": "x", "async_op": True}}]}

    assert list(VALIDATOR.faults(data)) == [
        "unknown field async_op in all_reduce; did you mean async?"
    ]
    data = {"world": 4, "program": [{"all_reduce": {"tensor": "x", "opp": "sum"}}]}
    assert list(VALIDATOR.faults(data)) == ["$.program[0].all_reduce: opp is not allowed"]


def test_torch_names_are_in_the_schema_with_their_equivalent() -> None:
    for row in OPERATIONS.values():
        properties = SCHEMA["$defs"][f"{row.op}_fields"]["then"]["properties"]
        fields = {info.alias or key for key, info in row.model_fields.items()}
        for name, field in torch_argument_names(row.op, fields).items():
            assert properties[name]["not"] == {}
            assert field in properties[name]["errorMessage"]


@pytest.mark.parametrize(
    "text",
    [
        "program: [barrier]",
        "program: [{sleep: 3 ms}]",
        "program: [{barrier: null, ranks: rank == 0}]",
        "program: [{ranks: [0, 1], steps: [{repeat: {times: 3, index: i, steps: [{wait: all}]}}]}]",
        "program: []\noptions: {init: eager, timeout: 3 s}",
        "program: []\nfaults: [{rank: 1, kind: kill, at: 3 ms}]",
        "program: []\nexpect: {verdict: ok, depends_on: null, makespan: {at_most: 3 ms}}",
    ],
)
def test_every_file_that_loads_matches_the_schema(text: str) -> None:
    data = loads("world: 4\n" + text)._document.root

    assert fits(as_json(data), SCHEMA)


@pytest.mark.parametrize(
    "data",
    [
        {"world": 4},
        {"world": 4, "program": [], "programm": []},
        {"world": "four", "program": []},
        {"world": 4, "program": [{"sned": {}}]},
        {"world": 4, "program": [{"send": {"tensr": "x"}}]},
        {"world": 4, "program": [{"send": {"dst": 1}}]},
        {"world": 4, "program": [{"sleep": 3}]},
        {"world": 4, "program": [{"all_reduce": {"tensor": "x", "op": "mean"}}]},
        {"world": 4, "program": [{"send": {"tensor": "x"}, "recv": {"tensor": "x"}}]},
        {"world": 4, "program": [], "expect": {"verdict": "fine"}},
        {"world": 4, "program": [], "options": {"init": "lzy"}},
    ],
)
def test_clearly_wrong_files_do_not_match_the_schema(data: Any) -> None:
    assert not fits(data, SCHEMA)


def test_the_schema_is_json_with_its_own_identifier() -> None:
    assert as_json(SCHEMA) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["$id"].startswith("urn:distsim:scenario:")


def test_every_operation_has_its_entry() -> None:
    entries = SCHEMA["$defs"]["entry"]["else"]["properties"]

    assert [
        name for name in (*OPERATIONS, *OPERATION_ALIASES, *STRATEGIES) if name not in entries
    ] == []


def test_editor_settings_are_added_to_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distsim.cli.commands.schema import SchemaKind, command

    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode" / "settings.json").write_text('{"editor.tabSize": 2}', encoding="utf-8")
    command(str(tmp_path), SchemaKind.scenario, install=True)
    settings = json.loads((tmp_path / ".vscode" / "settings.json").read_text(encoding="utf-8"))

    assert settings["editor.tabSize"] == 2
    assert "./.distsim/scenario.schema.json" in settings["yaml.schemas"]
    assert json.loads(
        (tmp_path / ".distsim" / "scenario.schema.json").read_text(encoding="utf-8")
    ) == as_json(SCHEMA)
