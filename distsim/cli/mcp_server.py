"""The server of `distsim mcp`: tools for coding agents, by the Model Context Protocol.

Key idea: a tool runs the command of the same name with `--format json` in a process of its own. So
it has the command's JSON, its error messages, and its limits of time and memory for files from
strangers, which end the process (`distsim.common.reading_limits`). The server survives.

The paths that a tool takes must lie in one folder. This prevents mistakes of an agent; it does not
confine the program that `capture` runs.

Protocol: https://modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from distsim import __version__
from distsim.api.printed_json import printed_json
from distsim.cli.shared.backend_names import BackendName
from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters
from distsim.common.units import show_ns

_INSTRUCTIONS = """\
distsim simulates torch.distributed programs and finds hangs, crashes, wrong results and step times.
`capture` runs an unmodified script on emulated ranks. `check` and `simulate` read scenarios (YAML).
`doctor` reads the Flight Recorder dumps, logs and stacks of a job that hung. `explain` describes
operations, findings (such as DS301) and the scenario format.
"""
_MAX_FINDINGS = 8
_MAX_NOTE_LINES = 30
#: The exit status from which on a command has failed itself; 1 reports a hang or another error.
_BAD_INPUT = 2
_FILE_SUFFIXES = (".yaml", ".yml")
_READS_FILES = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_RUNS_PROGRAMS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=True)

Scenario = Annotated[
    str, Field(description="Path of a scenario or a trace, or the YAML text of a scenario.")
]
Backend = Annotated[
    BackendName | None, Field(description="Backend semantics; overrides the scenario or script.")
]
ClusterName = Annotated[
    str | None, Field(description="Hardware model: a preset such as dgx-h100, or a file.")
]


def build_server(folder: Path) -> MCPServer:
    """A server whose tools read files in ``folder`` and run scripts there."""
    server = MCPServer(
        "distsim", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING"
    )
    tools = _Tools(folder.resolve())
    for tool in (tools.check, tools.simulate, tools.doctor, tools.explain):
        server.tool(annotations=_READS_FILES)(tool)
    server.tool(annotations=_RUNS_PROGRAMS)(tools.capture)
    return server


class _Tools:
    """The tools; the SDK makes their descriptions and schemas from docstrings and annotations."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def check(
        self, scenario: Scenario = "", backend: Backend = None, strict: bool = False
    ) -> CallToolResult:
        """Check a scenario in all event orders and on all backends: verdict and findings.

        Without a scenario, check all scenarios of the working folder. `strict`: a leak is an error.
        """
        options = [*_option("--backend", backend), *(["--strict"] if strict else [])]
        words, text = self._scenario_words(scenario) if scenario else ([], "")
        return await self._run_json("check", options, words, text)

    async def simulate(
        self,
        scenario: Scenario,
        backend: Backend = None,
        cluster: ClusterName = None,
        sets: Annotated[
            list[str] | None, Field(description="Changes of the scenario, such as iterations=2.")
        ] = None,
    ) -> CallToolResult:
        """Simulate a scenario once: outcome, step time, critical path, memory and findings."""
        options = [*_option("--backend", backend), *self._cluster_option(cluster)]
        for change in sets or ():
            options += _option("--set", change)
        words, text = self._scenario_words(scenario)
        return await self._run_json("simulate", options, words, text)

    async def doctor(
        self,
        paths: Annotated[
            list[str],
            Field(description="Files or folders: dumps, logs, stacks, traces.", min_length=1),
        ],
    ) -> CallToolResult:
        """Find why a real job hangs, from the files that it left."""
        return await self._run_json("doctor", [], [self._inside(path) for path in paths])

    async def explain(
        self,
        name: Annotated[
            str, Field(description="An operation, a finding such as DS301, a term or a key.")
        ],
    ) -> CallToolResult:
        """Explain an operation, a finding, a term or a key of the scenario format."""
        done = await self._run(["explain", "--", name])
        if done.returncode:
            raise ToolError(_text(done.stderr).strip())
        return _result(_text(done.stdout))

    async def capture(
        self,
        command: Annotated[
            list[str],
            Field(description='The command, as in ["python", "train.py", "--tiny"].', min_length=1),
        ],
        nproc: Annotated[int | None, Field(description="Ranks per node.", ge=1)] = None,
        backend: Backend = None,
        cluster: ClusterName = None,
        timeout_s: Annotated[float, Field(description="Stop the script after.", gt=0)] = 120.0,
    ) -> CallToolResult:
        """Run an unmodified script on emulated ranks of this machine, and check its calls.

        The script runs with the rights of the user, without a GPU or a cluster. A hang is found at
        once.
        """
        options = [*_option("--backend", backend), *self._cluster_option(cluster)]
        options += [*_option("--nproc", nproc), *_option("--timeout", f"{timeout_s} s")]
        return await self._run_json("capture", options, command)

    # --- input ---

    def _scenario_words(self, scenario: str) -> tuple[list[str], str]:
        """The argument for a scenario, and what the command reads from standard input."""
        if "\n" in scenario:
            return ["-"], scenario
        return [self._inside(scenario)], ""

    def _cluster_option(self, cluster: str | None) -> list[str]:
        if cluster is not None and Path(cluster).suffix in _FILE_SUFFIXES:
            cluster = self._inside(cluster)
        return _option("--cluster", cluster)

    def _inside(self, path: str) -> str:
        """The path, relative to the folder. Raises ToolError if its target lies outside."""
        target = (self._folder / path).resolve()
        if target.is_relative_to(self._folder):
            return os.path.relpath(target, self._folder)
        error = UsageError(
            f"{path} is outside the folder of this server, {self._folder}",
            "use a file in this folder, or start the server with another one: `distsim mcp FOLDER`",
        )
        raise ToolError(str(error))

    # --- processes ---

    async def _run_json(
        self, command: str, options: Sequence[str], words: Sequence[str], text: str = ""
    ) -> CallToolResult:
        """Run a command. Raises ToolError with its message if it prints no result."""
        done = await self._run([command, "--format", "json", *options, "--", *words], text)
        notes = _text(done.stderr).strip()
        data = printed_json(_text(done.stdout))
        if data is None:
            raise ToolError(notes or f"`distsim {command}` printed nothing")
        lines = [*_summary_lines(command, data), *notes.splitlines()[-_MAX_NOTE_LINES:]]
        return _result("\n".join(lines), data, is_error=done.returncode >= _BAD_INPUT)

    async def _run(
        self, words: Sequence[str], text: str = ""
    ) -> subprocess.CompletedProcess[bytes]:
        # -P: a file of the folder, such as yaml.py, must not replace a module of distsim.
        start = [sys.executable, "-P", "-m", "distsim"]
        return await anyio.run_process(
            [*start, *words], input=text.encode(), check=False, cwd=self._folder
        )


def _option(name: str, value: object) -> list[str]:
    """An option in one word, so that a value cannot become an option of its own."""
    return [] if value is None else [f"{name}={value}"]


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


# --- results ---


def _result(
    text: str, data: dict[str, Any] | None = None, *, is_error: bool = False
) -> CallToolResult:
    content = TextContent(type="text", text=escape_control_characters(text))
    return CallToolResult(content=[content], structured_content=data, is_error=is_error)


def _summary_lines(command: str, data: Mapping[str, Any]) -> Iterator[str]:
    """The answer in a few lines; the JSON has all of it."""
    if command == "doctor":
        yield from _diagnosis_lines(data)
    elif command == "check":
        for file in data["files"]:
            yield from _checked_file_lines(file)
    else:
        yield (
            f"{data['name']}: {data['outcome']} after {show_ns(data['makespan_ns'])}, "
            f"verdict {data['verdict']}"
        )
        yield from _finding_lines(data["findings"])


def _checked_file_lines(file: Mapping[str, Any]) -> Iterator[str]:
    if "errors" in file:
        for error in file["errors"]:
            yield f"{file['file']}:{error['line']}:{error['column']}: {error['message']}"
        return
    yield f"{file['file']}: verdict {file['verdict']}"
    yield from _finding_lines(file["findings"])


def _finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for finding in findings[:_MAX_FINDINGS]:
        yield f"{finding['code']} {finding['severity']}: {finding['message']}"
        for remedy in finding["help"]:
            yield f"  help: {remedy}"
    hidden = len(findings) - _MAX_FINDINGS
    if hidden > 0:
        yield f"… {hidden} more findings"


def _diagnosis_lines(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["causes"]:
        yield "no cause of a hang was found"
    for cause in data["causes"]:
        yield f"{cause['title']} [{cause['grade']}]"
        yield from (f"  {detail}" for detail in cause["details"])
    yield from (f"next: {step}" for step in data["collect"])
