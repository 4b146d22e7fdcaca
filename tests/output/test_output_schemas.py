"""What every command prints with `--format json` matches its schema, for success and failure.

`capture`, `bench`, `run --real` and `replay --real` start processes; their own tests call
`checked_json`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.core import TyperGroup
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.cli.commands.schema import SchemaKind
from distsim.output.json.output_schemas import COMMAND_OUTPUTS, output_schema
from distsim.output.json.schema_notation import json_schema_of
from tests.support.command_json import checked_json
from tests.support.harness import ROOT

#: Rank 2 takes any message first; if it takes that of rank 0, it waits forever for another one.
HANGS_IN_ONE_ORDER = """\
world: 3
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - send: {tensor: x, dst: 2}
    ranks: [0, 1]
  - recv: {tensor: x}
    ranks: 2
  - recv: {tensor: x, src: 0}
    ranks: 2
"""
HANG = "scenarios/ring_of_four.yaml"
MODEL = "{layers: 2, hidden: 256, heads: 8, ffn: 512, vocabulary: 1000}"
TRACE = "traces/hybrid_gloo_4.jsonl"
#: (exit status, command line). FILES/ is a folder of the test.
LINES = [
    (0, "simulate scenarios/hybrid.yaml"),
    (1, f"simulate {HANG}"),
    (0, "simulate scenarios/strategies/llama3_8b.yaml --no-values"),
    (0, f"simulate {TRACE}"),
    (0, "check scenarios/hybrid.yaml"),
    (2, f"check {HANG} FILES/order.yaml FILES/broken.yaml"),
    (0, f"check {TRACE}"),
    (0, f"plan '{MODEL}' --sequence 128 --gpus 8 --cluster dgx1-v100 --global-batch 16 --jobs 1"),
    (1, "plan llama3-70b --gpus 1 --cluster dgx-h100 --global-batch 8 --restrict recompute=none --jobs 1"),
    (1, f"sweep {HANG} --grid backend=gloo,mpi --jobs 1"),
    (1, "sweep FILES/order.yaml --grid world=1,3 --jobs 1"),
    (0, "run scenarios/hybrid.yaml"),
    (0, f"replay {TRACE}"),
    (0, f"replay {TRACE} --as-recorded --scale compute=0.5"),
    (1, "replay FILES/cut.jsonl"),
    (0, "compare scenarios/hybrid.yaml scenarios/hybrid.yaml"),
    (1, f"compare {TRACE} scenarios/hybrid.yaml"),
    (1, "compare FILES/cut.jsonl scenarios/hybrid.yaml"),
    (1, "doctor tests/data/doctor/hangs/early_break.zip"),
    (1, "doctor tests/data/doctor/hangs/forgotten_send.zip tests/data/doctor/hangs/monitored.zip"),
    (0, f"doctor {TRACE}"),
    (1, "slow sample"),
    (0, f"slow {TRACE}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "order.yaml").write_text(HANGS_IN_ONE_ORDER)
    (folder / "broken.yaml").write_text("world: [")
    lines = (ROOT / TRACE).read_text().splitlines(keepends=True)
    (folder / "cut.jsonl").write_text("".join(lines[: len(lines) // 2]))
    return folder


def commands_with_json() -> list[str]:
    """The commands whose help lists `json` as a value of --format."""
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    return [
        name
        for name, command in group.commands.items()
        if any(
            "json" in str(option.metavar) for option in command.params if option.name == "format"
        )
    ]


def test_every_command_with_json_has_a_schema_and_no_other_thing_has() -> None:
    assert list(COMMAND_OUTPUTS) == commands_with_json()
    assert [kind.value for kind in SchemaKind] == ["scenario", *COMMAND_OUTPUTS]


@pytest.mark.parametrize(("status", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_output_matches_the_schema_of_its_command(
    status: int, line: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.replace("FILES", str(files)))
    done = CliRunner().invoke(application(words), [*words, "--format", "json"])

    assert done.exit_code == status, done.output + repr(done.exception)
    assert checked_json(words[0], done.stdout)["schema_version"] == 1


def test_a_published_schema_allows_new_keys_and_a_closed_one_does_not() -> None:
    data: dict[str, Any] = {"schema_version": 1, "files": [], "new": 1}
    assert Draft202012Validator(output_schema("check")).is_valid(data)
    assert not Draft202012Validator(output_schema("check", closed=True)).is_valid(data)
    assert Draft202012Validator(output_schema("bench")).is_valid(data) is False


def test_the_notation_means_what_its_description_says() -> None:
    notation = {"a": "int?", "b*": ["text"], "c?": {"{}": ("flag", "=x")}}
    closed = Draft202012Validator(json_schema_of(notation, closed=True))

    assert closed.is_valid({"a": None, "c": None})
    assert closed.is_valid({"a": 1, "b": ["x"], "c": {"any": "x", "key": True}})
    assert not closed.is_valid({"a": 1})
    assert not closed.is_valid({"a": 1, "c": {"any": "y"}})
    assert not closed.is_valid({"a": 1, "b": None, "c": None})
    assert not closed.is_valid({"a": 1, "c": None, "d": 1})


def test_the_command_prints_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(application(["schema"]), ["schema", "--of", "doctor"])
    assert json.loads(done.stdout) == output_schema("doctor")

    mistaken = CliRunner().invoke(application(["schema"]), ["schema", "doctor"])
    assert "use `distsim schema --of doctor`" in str(mistaken.exception)
