"""Inspect a live job: its ranks and their child processes, twice, some seconds apart.

The result is one JSON object, which ``read_live_job`` enters into the evidence and which a bundle
contains. So doctor says the same about a live job and about its bundle. The object has no
environment values except rank numbers, no options of command lines, and no local variables except
the arguments of communication calls.

Flight Recorder dumps are requested as torch 2.13 offers it: a byte in the pipe
``TORCH_NCCL_DEBUG_INFO_PIPE_FILE`` + rank + ``.pipe`` (``DumpPipe`` in ``ProcessGroupNCCL.hpp``),
or the handler ``fr_trace_json`` at the socket ``TORCH_WORKER_SERVER_SOCKET``
(``torch/distributed/elastic/control_plane.py``). py-spy pauses a process while it reads
its stacks; doctor ends no process, and leaves none stopped.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any, Final

from distsim.hang_doctor.model.evidence_records import StackFrame, ThreadStack
from distsim.hang_doctor.readers.process_tree import (
    ProcessSample,
    TreeProcess,
    command_name,
    environment,
    memory_events,
    processes_of_job,
    redacted_environment,
    sample,
)
from distsim.hang_doctor.readers.stacks import StackReader

FORMAT: Final = "distsim-live"
_PY_SPY_TIMEOUT_S: Final = 20.0
_SOCKET_TIMEOUT_S: Final = 10.0
_DUMP_WAIT_S: Final = 10.0
_MAX_DUMP_BYTES: Final = 32 << 20
#: Stacks of more child processes than this are not taken; a rank may have hundreds of workers.
_MAX_CHILDREN_PER_RANK: Final = 32
#: The arguments of communication calls, which show a message's peer and tag.
_KEPT_VALUES: Final = ("src", "dst", "group_src", "group_dst", "tag", "group")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Dumps = dict[int, bytes]


def inspect_live_job(root: int, interval_s: float) -> tuple[dict[str, Any], Dumps]:
    """The state of all processes below ``root``, and the Flight Recorder dumps by rank.

    Raises UsageError if there is no rank.
    """
    processes = _with_few_children(processes_of_job(root))
    tool = py_spy_path()
    first = [_observation(process, tool) for process in processes]
    time.sleep(interval_s)
    second = [_observation(process, tool) for process in processes]
    described = [
        _process_json(process, before, after, interval_s, tool)
        for process, before, after in zip(processes, first, second, strict=True)
    ]
    job = {
        "format": FORMAT,
        "version": 1,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "interval_s": interval_s,
        "has_stacks": tool is not None,
        "processes": described,
    }
    ranks = {process.rank: process.pid for process in processes if process.child_of is None}
    return job, _flight_recorder_dumps(ranks)


def _with_few_children(processes: list[TreeProcess]) -> list[TreeProcess]:
    kept = []
    counts: dict[int, int] = {}
    for process in processes:
        if process.child_of is not None:
            counts[process.child_of] = counts.get(process.child_of, 0) + 1
            if counts[process.child_of] > _MAX_CHILDREN_PER_RANK:
                continue
        kept.append(process)
    return kept


class _Observation:
    """A process at one moment: its state and the stacks of its threads."""

    def __init__(self, state: ProcessSample | None, stacks: list[ThreadStack]) -> None:
        self.state = state
        self.stacks = stacks


def _observation(process: TreeProcess, tool: str | None) -> _Observation:
    state = sample(process.pid)
    if state is None or tool is None or state.state in "ZX":
        return _Observation(state, [])
    return _Observation(state, _py_spy_stacks(tool, process.pid, state.state, "--locals"))


# --- stacks ---


def py_spy_path() -> str | None:
    """The program py-spy next to this Python, or on the path."""
    here = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(here) if here.is_file() else shutil.which("py-spy")


def _py_spy_stacks(tool: str, pid: int, state: str, option: str) -> list[ThreadStack]:
    """The stacks of a process; empty if py-spy cannot read it.

    A stopped process stays stopped with ``--nonblocking``; otherwise py-spy would resume it.
    """
    command = [tool, "dump", option, "--pid", str(pid)]
    if state in "tT":
        command.append("--nonblocking")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PY_SPY_TIMEOUT_S,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    reader = StackReader("")
    stacks = []
    for line in [*done.stdout.split("\n"), ""]:
        _, ended = reader.take(line)
        if ended is not None:
            stacks.append(ended)
    last = reader.close()
    return [*stacks, last] if last is not None else stacks


def _stack_json(stack: ThreadStack) -> dict[str, Any]:
    frames = [
        {
            "name": frame.name,
            "file": frame.file,
            "line": frame.line,
            "values": {k: v for k, v in frame.values.items() if k in _KEPT_VALUES},
        }
        for frame in stack.frames
    ]
    return {"thread": stack.thread, "main": stack.main, "frames": frames}


def _places(stacks: list[ThreadStack]) -> list[list[tuple[str, int]]]:
    """Where the main threads are, to compare two moments."""
    return [[(frame.file, frame.line) for frame in stack.frames] for stack in stacks if stack.main]


# --- one process ---


def _process_json(
    process: TreeProcess,
    before: _Observation,
    after: _Observation,
    interval_s: float,
    tool: str | None,
) -> dict[str, Any]:
    state = after.state
    found: dict[str, Any] = {
        "pid": process.pid,
        "rank": process.rank,
        "is_child": process.child_of is not None,
        "command": command_name(process.pid),
        "state": state.state if state is not None else "gone",
        "wait_channel": state.wait_channel if state is not None else "",
        "moved": False,
        "cpu_share": 0.0,
        "stacks": [_stack_json(stack) for stack in after.stacks],
        "native": [],
    }
    if before.state is not None and state is not None:
        ticks = state.cpu_ticks - before.state.cpu_ticks
        found["cpu_share"] = round(ticks / _TICKS_PER_S / max(interval_s, 0.1), 2)
        found["moved"] = _places(before.stacks) != _places(after.stacks)
    if process.child_of is None:
        found["memory_events"] = memory_events(process.pid)
        found["environment"] = redacted_environment(process.pid)
    if tool is not None and state is not None and state.state == "S" and not found["moved"]:
        found["native"] = _native_frames(tool, process.pid, state.state)
    return found


def _native_frames(tool: str, pid: int, state: str) -> list[str]:
    """The functions in C and C++ that the main thread is in, innermost first."""
    for stack in _py_spy_stacks(tool, pid, state, "--native"):
        if stack.main:
            return _names_before_python(stack.frames)
    return []


def _names_before_python(frames: tuple[StackFrame, ...]) -> list[str]:
    names: list[str] = []
    for frame in frames:
        if frame.file.endswith(".py") or len(names) == 12:
            break
        if frame.name.startswith("0x"):
            continue  # a function without a symbol
        names.append(f"{frame.name[:120]} ({os.path.basename(frame.file)[:60]})")
    return names


# --- Flight Recorder dumps on request ---


def _flight_recorder_dumps(pids: dict[int | None, int]) -> Dumps:
    found: Dumps = {}
    for rank, pid in pids.items():
        if rank is None:
            continue
        variables = environment(pid)
        dump = _dump_from_socket(variables.get("TORCH_WORKER_SERVER_SOCKET", ""))
        if not dump:
            dump = _dump_by_pipe(variables, rank)
        if dump:
            found[rank] = dump
    return found


def _dump_from_socket(path: str) -> bytes:
    """What torch's worker server answers; empty if there is none."""
    if not path or not os.path.exists(path):
        return b""
    connection = http.client.HTTPConnection("localhost", timeout=_SOCKET_TIMEOUT_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(_SOCKET_TIMEOUT_S)
        connection.sock.connect(path)
        connection.request("POST", "/handler/fr_trace_json")
        answer = connection.getresponse()
        return answer.read(_MAX_DUMP_BYTES) if answer.status == 200 else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def _dump_by_pipe(variables: dict[str, str], rank: int) -> bytes:
    """Ask torch's watchdog for a dump through its pipe, and read the file that it writes."""
    stem = variables.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    target = next((variables[name] for name in names if variables.get(name)), "")
    if not stem or not target:
        return b""
    pipe, dump = f"{stem}{rank}.pipe", Path(f"{target}{rank}")
    before = _modified_ns(dump)
    if not _write_byte(pipe):
        return b""
    until = time.monotonic() + _DUMP_WAIT_S
    size = -1
    while time.monotonic() < until:
        time.sleep(0.2)
        is_new = _modified_ns(dump) > before
        # The file is complete when it no longer grows.
        if is_new and dump.stat().st_size == size:
            return dump.read_bytes()[:_MAX_DUMP_BYTES]
        size = dump.stat().st_size if is_new else -1
    return b""


def _write_byte(pipe: str) -> bool:
    """Write to a named pipe that a process reads; False if there is no such pipe or reader."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ENXIO, errno.EACCES):
            return False
        raise
    try:
        os.write(descriptor, b"1")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


# --- the bundle ---


def bundle_bytes(job: dict[str, Any], dumps: Dumps) -> bytes:
    """One zip file with everything, to attach to a bug report."""
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("live.json", json.dumps(job, indent=1))
        for rank, dump in sorted(dumps.items()):
            archive.writestr(f"fr_rank_{rank}", dump)
    return buffer.getvalue()
