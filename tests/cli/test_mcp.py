"""`distsim mcp`: the tools as an agent's client sees them, over standard input and output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT, Cli

pytest.importorskip("mcp", reason="the extra [mcp] is not installed")

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult

from tests.support.command_json import checked_json

HANG = """\
name: ring
world: 2
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - send: {tensor: x, dst: 1 - rank}
  - recv: {tensor: x, src: 1 - rank}
"""
COMPLETES = """\
world: 2
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - all_reduce: {tensor: x}
"""
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("started", flush=True)
if dist.get_rank() == 0:
    dist.barrier()
dist.all_reduce(torch.ones(2))
"""


def with_client(folder: Path, talk: Callable[[Client], Awaitable[None]]) -> None:
    """Start the server in a folder, and talk to it."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "distsim", "mcp"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    async def run() -> None:
        async with Client(server) as client:
            await talk(client)

    anyio.run(run)


def checked_result(command: str, result: CallToolResult) -> Any:
    """The JSON of a result, which matches the schema of the command."""
    assert result.structured_content is not None, text_of(result)
    return checked_json(command, json.dumps(result.structured_content))


def text_of(result: CallToolResult) -> str:
    return "\n".join(getattr(block, "text", "") for block in result.content)


def test_check_answers_with_its_json_and_a_summary_and_refuses_other_folders(
    tmp_path: Path,
) -> None:
    (tmp_path / "ring.yaml").write_text(HANG)
    (tmp_path / "yaml.py").write_text("raise SystemExit('a file of the project was imported')")
    (tmp_path / "link").symlink_to(ROOT / "scenarios" / "hybrid.yaml")

    async def talk(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"check", "simulate", "doctor", "explain", "capture"}
        command = tools["capture"].input_schema["properties"]["command"]
        assert (command["type"], command["items"]) == ("array", {"type": "string"})
        assert tools["capture"].annotations.destructive_hint
        assert tools["check"].annotations.read_only_hint

        checked = await client.call_tool("check", {})
        assert checked_result("check", checked)["files"][0]["verdict"] == "deadlock"
        assert not checked.is_error
        assert "ring.yaml: verdict deadlock\nDS301 error: " in text_of(checked)
        assert "  help: " in text_of(checked)

        for path in ("../other.yaml", str(ROOT / "scenarios/hybrid.yaml"), "link"):
            outside = await client.call_tool("simulate", {"scenario": path})
            assert outside.is_error
            assert f"{path} is outside the folder of this server" in text_of(outside)
            assert "help: use a file in this folder" in text_of(outside)
        unknown = await client.call_tool("simulate", {"scenario": HANG, "backend": "ncll"})
        assert unknown.is_error
        assert "nccl" in text_of(unknown)

    with_client(tmp_path, talk)


@pytest.mark.slow
def test_every_tool_answers_and_names_place_cause_and_remedy_of_a_mistake(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    dumps = (ROOT / "tests/data/doctor/hangs/early_break.zip").read_bytes()
    (tmp_path / "dumps.zip").write_bytes(dumps)

    async def talk(client: Client) -> None:
        text = {"scenario": COMPLETES, "sets": ["world=4"]}
        simulated = checked_result("simulate", await client.call_tool("simulate", text))
        assert (simulated["verdict"], simulated["world_size"]) == ("ok", 4)

        diagnosed = await client.call_tool("doctor", {"paths": ["dumps.zip"]})
        assert checked_result("doctor", diagnosed)["culprits"] == [5]
        assert "does not match" in text_of(diagnosed)

        arguments = {"command": ["python", "train.py"], "nproc": 2}
        captured = await client.call_tool("capture", arguments)
        assert checked_result("capture", captured)["outcome"] != "completes"
        assert "train.py:7" in text_of(captured)

        wrong = await client.call_tool("check", {"scenario": HANG.replace("dst", "dest")})
        assert wrong.is_error
        assert checked_result("check", wrong)["files"][0]["errors"][0]["line"] == 6
        assert "did you mean dst?" in text_of(wrong)

        assert "DS301" in text_of(await client.call_tool("explain", {"name": "DS301"}))
        missing = await client.call_tool("explain", {"name": "--help"})
        assert missing.is_error
        assert "help: run `distsim explain` for a list" in text_of(missing)

    with_client(tmp_path, talk)


def test_without_the_extra_the_remedy_names_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distsim.cli.commands import mcp as command
    from distsim.common.errors import EnvironmentFault

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"pip install -e '\.\[mcp\]'"):
        command.command(tmp_path)
