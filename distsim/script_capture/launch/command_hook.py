"""Run a command that starts the program itself (``bash run.sh``), and take over the program.

Python processes of the command report to this process when they start
(`distsim.script_capture.launch.python_start.sitecustomize`). Programs that do not use torch run as
they are: a script may prepare data first. The first program that uses torch waits, while capture
runs its command line on forked ranks. It then exits with their status, so the command goes on.
Later programs that use torch do not run; a note says so.

Processes that find no answer, because capture has ended, run as they are.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from distsim.common.errors import UsageError
from distsim.script_capture.cuda.script_scan import GPU_PACKAGES
from distsim.script_capture.launch.command_line import LaunchCommand, parse_command
from distsim.script_capture.launch.preload import external_imports
from distsim.script_capture.launch.python_start.sitecustomize import SOCKET_VARIABLE

#: How often to check whether the command has ended.
_POLL_S: Final = 0.2


class StartedProgram(NamedTuple):
    """A Python program that the command has started and that waits: what it would run."""

    command: LaunchCommand
    words: Sequence[str]
    folder: str
    environment: Mapping[str, str]


class WrappedCommand:
    """A running command, and the program in it that is captured."""

    def __init__(self, command: LaunchCommand) -> None:
        self._command = command
        self._address = f"distsim-command-{os.getpid()}-{os.urandom(4).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self._address)
        self._listener.listen(64)
        self._listener.settimeout(_POLL_S)
        self._waiting: socket.socket | None = None
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = str(Path(__file__).with_name("python_start"))
        path = os.environ.get("PYTHONPATH")
        hooks = {
            SOCKET_VARIABLE: self._address,
            "PYTHONPATH": folder + (os.pathsep + path if path else ""),
        }
        environment = {**os.environ, **self._command.environment, **hooks}
        return subprocess.Popen(list(self._command.wrapper), env=environment)

    def program(self) -> StartedProgram:
        """Wait for the program. Raises UsageError if the command ends without starting one."""
        while True:
            connection, question = self._next_question()
            if connection is None:
                words = " ".join(self._command.wrapper)
                raise UsageError(
                    f"`{words}` started no Python program that uses torch",
                    "name the program: distsim capture --nproc 4 -- python train.py",
                )
            command = _torch_program(question["words"], question["folder"])
            if command is None:
                _answer(connection, None)
                continue
            self._waiting = connection
            environment = _own_variables(question)
            command = self._on_ranks_of_wrapper(command, environment)
            return StartedProgram(command, question["words"], question["folder"], environment)

    def _on_ranks_of_wrapper(
        self, command: LaunchCommand, environment: Mapping[str, str]
    ) -> LaunchCommand:
        """The program, on the ranks that srun or a loop in the shell start."""
        outer = self._command
        if command.is_launched:
            return command
        if outer.is_launched:
            return replace(command, ranks=outer.ranks, nodes=outer.nodes, launcher=outer.launcher)
        world_size = environment.get("WORLD_SIZE", "")
        if "RANK" in environment and world_size.isdigit():
            return replace(command, ranks=int(world_size))
        return command

    def _next_question(self) -> tuple[socket.socket | None, dict[str, Any]]:
        """The next process that reports; None once the command has ended."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    return None, {}
                continue
            connection.settimeout(None)
            line = connection.makefile("r").readline()
            if line:
                return connection, json.loads(line)

    def finish(self, status: int, note: Callable[[str], None]) -> None:
        """Let the program exit with this status, and wait for the command to end."""
        if self._waiting is None:
            self.close()
            return
        _answer(self._waiting, status)
        later = threading.Thread(target=self._refuse_later_programs, args=(note,), daemon=True)
        later.start()
        self._process.wait()
        later.join()
        self.close()

    def _refuse_later_programs(self, note: Callable[[str], None]) -> None:
        while True:
            connection, question = self._next_question()
            if connection is None:
                return
            command = _torch_program(question["words"], question["folder"])
            if command is not None:
                note(f"not run, because one program is captured: {' '.join(question['words'])}")
            _answer(connection, None if command is None else 0)

    def close(self) -> None:
        """End the command if it still runs."""
        self._listener.close()
        if self._process.poll() is None:
            self._process.terminate()


def _answer(connection: socket.socket, status: int | None) -> None:
    with suppress(OSError):  # the process has ended
        connection.sendall(json.dumps(status).encode() + b"\n")
    connection.close()


def _own_variables(question: Mapping[str, Any]) -> dict[str, str]:
    """The environment of the program without what the hook added."""
    found = dict(question["environment"])
    found.pop(SOCKET_VARIABLE, None)
    folder = str(Path(__file__).with_name("python_start"))
    entries = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in entries if entry != folder]
    if kept:
        found["PYTHONPATH"] = os.pathsep.join(kept)
    return found


def _torch_program(words: Sequence[str], folder: str) -> LaunchCommand | None:
    """The program if it is a launcher, or may use torch; else None."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        command = parse_command(words)
        target = command.target
        if target is None or command.is_launched:
            return command if target is not None else None
        packages = {name.partition(".")[0] for name in external_imports(target.file)}
    except UsageError:  # ``python -c``, or an interactive Python
        return None
    finally:
        os.chdir(before)
    uses_torch = "torch" in packages or bool(packages & GPU_PACKAGES)
    return command if uses_torch else None


__all__ = ["StartedProgram", "WrappedCommand"]
