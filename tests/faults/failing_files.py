"""Make the n-th operation on files fail, for every command that writes files.

Key idea: a command runs in a forked process in which the functions that create, write, sync and
rename files are replaced. The n-th call of one of them fails as the operating system would let it
fail. n grows until the command no longer makes so many calls, so that every call fails once. After
each run, each file must be as it was before, or as a run without a fault writes it.
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: `learn` and `demo` write many files in the same way.
MOST_PER_KIND: Final = 12
OPERATIONS: Final = ("create", "write", "sync", "rename")
_ERRORS: Final = {
    "create": errno.EACCES,
    "write": errno.ENOSPC,
    "sync": errno.EIO,
    "rename": errno.EIO,
}
_SCENARIO: Final = """\
world: 2
tensors: {x: {shape: [64]}}
program:
  - repeat: {times: 20, steps: [{compute: {time: (1 + rank) * 1 ms}}, {all_reduce: x}]}
"""
_HANG: Final = """\
world: 2
tensors: {x: {shape: [64]}}
program:
  - all_reduce: x
  - send: {tensor: x, dst: 1 - rank}
  - recv: {tensor: x, src: 1 - rank}
"""


class Command(NamedTuple):
    words: str
    #: Files that exist before the run, with the text "before".
    overwrites: tuple[str, ...] = ()


#: Every command that writes, apart from those that start processes (`tests.faults.kills`).
COMMANDS: Final = (
    Command("simulate s.yaml --trace out.jsonl", ("out.jsonl",)),
    Command("simulate s.yaml --trace out.jsonl.gz"),
    Command("simulate s.yaml --report out.html", ("out.html",)),
    Command("check s.yaml --report out.html"),
    Command("render s.yaml --view timeline -o out.svg", ("out.svg",)),
    Command("render s.yaml --view dataflow -o out.dot"),
    Command("report s.yaml -o out.html", ("out.html",)),
    Command("shrink hang.yaml -o out.yaml", ("out.yaml",)),
    Command("replay t.jsonl --trace out.jsonl", ("out.jsonl",)),
    Command("compare t.jsonl t.jsonl -o out.svg", ("out.svg",)),
    Command("doctor hang.jsonl -o out.yaml", ("out.yaml",)),
    Command("doctor hang.jsonl -o out.svg"),
    Command("slow t.jsonl -o out.html --trace perfetto.json", ("out.html",)),
    Command("sweep s.yaml --grid seed=1,2,3 -j 1 -o out.csv"),
    Command("sweep s.yaml --grid seed=1,2,3 -j 1 -o out.parquet"),
    Command("calibrate t.jsonl -o out.yaml"),
    Command("new out.yaml --kind ring"),
    Command("learn -o lessons"),
    Command("demo"),
)


class Outcome(NamedTuple):
    status: int
    errors: str
    #: Whether the fault took place.
    has_failed: bool
    files: dict[str, bytes]


class Count(NamedTuple):
    """Runs of a command with a fault, and what was wrong after them."""

    runs: int
    problems: tuple[str, ...]


class _Fault:
    """Fails at the n-th operation of one kind; ``report`` gets a byte when it does."""

    def __init__(self, operation: str, n: int, report: int) -> None:
        self.operation, self.left, self.report = operation, n, report

    def pass_or_fail(self, operation: str) -> None:
        if operation != self.operation:
            return
        self.left -= 1
        if self.left == 0:
            os.write(self.report, b"x")
            code = _ERRORS[operation]
            raise OSError(code, os.strerror(code))


class _FailingFile:
    """An open file whose writes are counted."""

    def __init__(self, file: Any, fault: _Fault) -> None:
        self._file, self._fault = file, fault

    def write(self, data: Any) -> int:
        self._fault.pass_or_fail("write")
        return int(self._file.write(data))

    def writelines(self, pieces: Any) -> None:
        for piece in pieces:
            self.write(piece)

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _install(fault: _Fault) -> None:
    """Replace the functions by which Python writes files."""

    def counted(operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fault.pass_or_fail(operation)
            return real(*args, **kwargs)

        return call

    def opened(real: Callable[..., Any], creates: bool) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, *args, **kwargs)
            if creates:
                fault.pass_or_fail("create")
            return _FailingFile(real(file, mode, *args, **kwargs), fault)

        return call

    tempfile.mkstemp = counted("create", tempfile.mkstemp)  # type: ignore[assignment]
    os.mkdir = counted("create", os.mkdir)
    os.fsync = counted("sync", os.fsync)
    os.replace = counted("rename", os.replace)
    os.rename = counted("rename", os.rename)
    os.fdopen = opened(os.fdopen, creates=False)  # type: ignore[assignment]
    io.open = opened(io.open, creates=True)  # type: ignore[assignment]
    builtins.open = io.open


# --- one run ---


def prepare(folder: Path, command: Command) -> None:
    """Write the inputs of the commands, and the files that the command overwrites."""
    for name, content in _inputs().items():
        (folder / name).write_bytes(content)
    for name in command.overwrites:
        (folder / name).write_text("before")


_INPUTS: dict[str, bytes] = {}


def _inputs() -> Mapping[str, bytes]:
    if not _INPUTS:
        import distsim
        from distsim.trace.jsonl import trace_lines

        _INPUTS["s.yaml"], _INPUTS["hang.yaml"] = _SCENARIO.encode(), _HANG.encode()
        for name, text in (("t.jsonl", _SCENARIO), ("hang.jsonl", _HANG)):
            trace = distsim.simulate(distsim.load(text), backend="nccl").trace
            _INPUTS[name] = "".join(trace_lines(trace)).encode()
    return _INPUTS


def run(
    command: Command,
    folder: Path,
    fault: tuple[str, int] | None = None,
    limits: Mapping[int, int] | None = None,
) -> Outcome:
    """Run a command in a forked process in a folder.

    ``fault``: the operation, and which call of it fails. ``limits``: resource -> limit.
    """
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as faults:
        child = os.fork()
        if child == 0:
            _run_in_child(command, folder, fault, limits or {}, errors.fileno(), faults.fileno())
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        has_failed = os.fstat(faults.fileno()).st_size > 0
    return Outcome(os.waitstatus_to_exitcode(status), text, has_failed, files_of(folder))


def _run_in_child(
    command: Command,
    folder: Path,
    fault: tuple[str, int] | None,
    limits: Mapping[int, int],
    errors: int,
    faults: int,
) -> None:
    status = 99
    try:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for number, handle in ((0, null), (1, null), (2, errors)):
            os.dup2(handle, number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["distsim", *command.words.split()]
        from distsim.cli.process import _run_command

        gc.disable()  # else every child copies the pages of the parent's objects
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
        if fault is not None:
            _install(_Fault(*fault, faults))
        found = _run_command()
        status = found if isinstance(found, int) else 0
        sys.stderr.flush()
    finally:
        os._exit(status)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def wrong_after(before: Mapping[str, bytes], complete: Mapping[str, bytes], end: Outcome) -> str:
    """What a failed run did wrong, or an empty text."""
    if end.status not in (0, 1, 2, 4):
        return f"exit status {end.status}: {end.errors[-300:]}"
    if "Traceback" in end.errors:
        return f"a traceback: {end.errors[-300:]}"
    for name, content in end.files.items():
        if content in (before.get(name), complete.get(name)) or _is_growing_table(name, content):
            continue
        return f"{name} is neither as before nor complete ({len(content)} bytes)"
    lost = sorted(before.keys() - end.files.keys())
    return f"lost {', '.join(lost)}" if lost else ""


def _is_growing_table(name: str, content: bytes) -> bool:
    """Whether this is the table of an unfinished sweep, which the next run goes on with."""
    is_table = name.endswith(".csv")
    return is_table and (not content or content.startswith(b"key,"))


def failing_operations(command: Command, kinds: tuple[str, ...] = OPERATIONS) -> Count:
    """Let every operation of a command fail once, or the first `MOST_PER_KIND` of each kind."""
    complete = _files_after(command)
    runs, problems = 0, []
    for kind in kinds:
        for n in range(1, MOST_PER_KIND + 1):
            with _folder(command) as folder:
                before = files_of(folder)
                end = run(command, folder, (kind, n))
            if not end.has_failed:
                break
            runs += 1
            wrong = wrong_after(before, complete, end)
            if wrong:
                problems.append(f"{command.words}: {kind} {n}: {wrong}")
    return Count(runs, tuple(problems))


def limited_resources(command: Command, limits: list[tuple[int, int]]) -> Count:
    """Run a command under each of some limits: (resource, limit)."""
    complete = _files_after(command)
    problems = []
    for kind, limit in limits:
        with _folder(command) as folder:
            before = files_of(folder)
            end = run(command, folder, limits={kind: limit})
        wrong = wrong_after(before, complete, end)
        if wrong:
            problems.append(f"{command.words}: limit {limit}: {wrong}")
    return Count(len(limits), tuple(problems))


@cache
def _files_after(command: Command) -> dict[str, bytes]:
    """The files after a run without a fault."""
    with _folder(command) as folder:
        end = run(command, folder)
        assert end.status in (0, 1), f"{command.words}: {end.errors}"
        return end.files


class _folder:  # noqa: N801
    """A folder with the inputs of a command, removed at the end."""

    def __init__(self, command: Command) -> None:
        self.command = command

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="distsim-faults-"))
        prepare(self.path, self.command)
        return self.path

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path)
