"""Stacks of threads: py-spy (text and JSON), faulthandler, torch's dump_traceback; and what a stack
says of where a rank is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distsim.hang_doctor.model.evidence_records import StackFrame, ThreadStack
from distsim.hang_doctor.model.operation_names import P2P_OPS, is_known_operation, operation_family

_PYSPY_THREAD = re.compile(r'^Thread (0x[0-9a-fA-F]+|\d+) \(([^)]*)\)(?:: "(.*)")?\s*$')
_PYSPY_FRAME = re.compile(r"^ {2,8}(\S.*?) \(([^()]*?)(?::(\d+))?\)\s*$")
_PYSPY_VALUE = re.compile(r"^\s{8,}(\w+): (.*)$")
_PYSPY_HEAD = re.compile(r"^Process (\d+): (.*)$")
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*?)\])? \(most recent call first\):\s*$"
)
_FAULT_FRAME = re.compile(r'^\s*File "(.*?)", line (\d+) in (.*?)\s*$')
_COMMAND_RANK = re.compile(r"--(?:node_)?rank[= ](\d{1,7})\b")
_THREAD_BOOTSTRAP = (
    "_bootstrap",
    "_bootstrap_inner",
    "Thread._bootstrap",
    "Thread._bootstrap_inner",
)
#: Where files lie that no user wrote.
_LIBRARY_FILE = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3[^/]*|multiprocessing|concurrent/futures)/|^<|^torch/|^(threading|selectors|socket|"
    r"queue|subprocess|contextlib|runpy|ssl|functools|inspect)\.py$|^(multiprocessing|concurrent|asyncio|importlib|numpy|accelerate|"
    r"deepspeed|lightning|pytorch_lightning|transformers|datasets)/"
)
_TORCH_DISTRIBUTED_FILE = re.compile(r"(^|/)torch/distributed/")
#: Calls that are no collectives of a group and wait for ranks all the same.
_JOB_WIDE_CALLS = (
    "batch_isend_irecv",
    "new_group",
    "new_subgroups",
    "init_process_group",
    "init_device_mesh",
    "split_group",
)
_SYNCHRONIZE = ("synchronize", "_synchronize")


class StackPosition(NamedTuple):
    """Where a main thread is: in ``op`` (of family, with peer and tag where locals say them), or in
    host code; ``frame`` is the user's.
    """

    op: str
    frame: StackFrame | None
    inner: StackFrame | None
    peer: int | None = None
    tag: int | None = None
    whole_group: bool = True  # no group argument was given


@dataclass
class _OpenThread:
    """A thread whose frames are being read."""

    name: str
    frames: list[tuple[str, str, int, dict[str, str]]] = field(default_factory=list)

    def stack(self, source: str) -> ThreadStack | None:
        if not self.frames:
            return None
        frames = tuple(StackFrame(*f) for f in self.frames)
        return ThreadStack(
            self.name,
            self.name == "MainThread" or not any(f.name in _THREAD_BOOTSTRAP for f in frames),
            frames,
            source,
        )


class StackReader:
    """Takes lines one by one and gives stacks as they end. ``command_rank``: what the process's
    command line said of its rank.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.command_rank: int | None = None
        self._open: _OpenThread | None = None
        self._fault = False

    def take(self, line: str) -> tuple[bool, ThreadStack | None]:
        """(did the line belong to a stack?, the stack that ended before it)"""
        head = _PYSPY_HEAD.match(line)
        if head is not None:
            found = _COMMAND_RANK.search(head[2])
            ended = self.close()
            self.command_rank = int(found[1]) if found else None
            return True, ended
        thread = _FAULT_THREAD.match(line) or _PYSPY_THREAD.match(line)
        if thread is not None:
            ended = self.close()
            fault = thread.re is _FAULT_THREAD
            self._open, self._fault = (
                _OpenThread((thread[2] or thread[1]) if fault else (thread[3] or thread[1])),
                fault,
            )
            return True, ended
        if self._open is None:
            return False, None
        if self._frame(line):
            return True, None
        return (True, None) if not line.strip() and not self._open.frames else (False, self.close())

    def _frame(self, line: str) -> bool:
        assert self._open is not None
        if self._fault:
            fault = _FAULT_FRAME.match(line)
            if fault is not None:
                self._open.frames.append((fault[3], fault[1], int(fault[2]), {}))
            return fault is not None or line.strip() in ("<no Python frame>", "...")
        if line.strip() in ("Arguments:", "Locals:", "Arguments::", "Locals::"):
            return True
        value = _PYSPY_VALUE.match(line)
        if value is not None and self._open.frames:
            self._open.frames[-1][3].setdefault(value[1], value[2][:200])
            return True
        frame = _PYSPY_FRAME.match(line)
        if frame is not None:
            self._open.frames.append((frame[1].split(".")[-1], frame[2], int(frame[3] or 0), {}))
        return frame is not None

    def close(self) -> ThreadStack | None:
        opened, self._open = self._open, None
        return opened.stack(self.source) if opened else None


def read_pyspy_json(threads: list[Any], source: str) -> Iterator[ThreadStack]:
    """The stacks of ``py-spy dump --json``."""
    for thread in threads:
        given = thread.get("frames") if isinstance(thread, dict) else None
        frames = [
            StackFrame(
                f["name"].split(".")[-1],
                str(f.get("filename", "")),
                f["line"],
                _frame_locals(f.get("locals")),
            )
            for f in (given if isinstance(given, list) else ())
            if isinstance(f, dict)
            and isinstance(f.get("name"), str)
            and isinstance(f.get("line"), int)
        ]
        if frames:
            name = str(thread.get("thread_name") or thread.get("thread_id"))
            yield ThreadStack(
                name,
                name == "MainThread" or not any(f.name in _THREAD_BOOTSTRAP for f in frames),
                tuple(frames),
                source,
            )


def is_pyspy_json(data: object) -> bool:
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(t, dict) and "frames" in t and "thread_id" in t for t in data[:4])
    )


def _frame_locals(given: object) -> dict[str, str]:
    if not isinstance(given, list):
        return {}
    return {str(v.get("name")): str(v.get("repr"))[:200] for v in given if isinstance(v, dict)}


def is_library_file(file: str) -> bool:
    """A file that no user wrote: of torch, of Python, of site-packages."""
    return bool(_LIBRARY_FILE.search(file))


def user_frame(frames: Iterable[StackFrame]) -> StackFrame | None:
    """The innermost frame of the user's own code; the innermost of all where there is none."""
    first = None
    for frame in frames:
        first = first or frame
        if not is_library_file(frame.file):
            return frame
    return first


def stack_position(stack: ThreadStack) -> StackPosition:
    """Where a thread is. Functions in C do not show: a wait on a handle looks like the line that
    calls it.
    """
    user = user_frame(stack.frames)
    inside = stack.frames[: stack.frames.index(user)] if user is not None else stack.frames
    calls = [
        f
        for f in inside
        if _TORCH_DISTRIBUTED_FILE.search(f.file)
        and (is_known_operation(f.name) or f.name in _JOB_WIDE_CALLS)
    ]
    if not calls:
        device = next((f for f in inside if f.name in _SYNCHRONIZE and "torch/" in f.file), None)
        return StackPosition(
            "synchronize" if device else "", user, stack.frames[0] if stack.frames else None
        )
    outer = calls[-1]
    op = operation_family(outer.name)
    values = outer.values
    peer = (
        _integer_local(values, ("dst", "group_dst") if op == "send" else ("src", "group_src"))
        if op in P2P_OPS
        else None
    )
    return StackPosition(
        op,
        user,
        stack.frames[0],
        peer,
        _integer_local(values, ("tag",)),
        values.get("group", "None") == "None",
    )


def _integer_local(values: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        text = str(values.get(name, ""))
        if re.fullmatch(r"\d{1,7}", text):
            return int(text)
    return None
