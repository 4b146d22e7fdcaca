"""What ``/proc`` shows about the ranks of a job on this node, and about their child processes.

A rank is the topmost process below the launcher that has a rank in its environment. DataLoader
workers inherit that environment, so they are its children and no ranks. See proc(5) for ``stat``,
``wchan`` and ``cgroup``, and the kernel's cgroup-v2 documentation for ``memory.events``. Processes
are only read, never changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from distsim.common.errors import UsageError
from distsim.hang_doctor.model.evidence import MAX_RANKS

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MAX_PROCESSES: Final = 4096
#: The names under which launchers put the rank: torchrun, Open MPI, MPICH, SLURM.
_RANK_NAMES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
#: Variables whose values are kept. All others may contain secrets.
_KEPT_VARIABLES: Final = (*_RANK_NAMES, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
REDACTED: Final = "(redacted)"


class TreeProcess(NamedTuple):
    """A process of the job.

    ``rank``: None if its environment has RANK, but no rank number in it. ``child_of``: the process
    of the rank that it is a child of, None for a rank.
    """

    pid: int
    rank: int | None
    child_of: int | None


class ProcessSample(NamedTuple):
    """The state of a process at one moment.

    ``state``: the letter of ``/proc/PID/stat``. ``wait_channel``: the kernel function in which it
    sleeps. ``cpu_ticks``: the CPU time that it has used.
    """

    state: str
    wait_channel: str
    cpu_ticks: int


def processes_of_job(root: int) -> list[TreeProcess]:
    """The ranks below a launcher and their children. ``root`` may be a rank itself.

    Processes whose RANK is not a number are included, with an unknown rank. Raises UsageError if
    there is no rank.
    """
    if not (_PROC / str(root)).is_dir():
        raise UsageError(
            f"process {root} does not exist on this node",
            "give the PID of torchrun or of a rank on this node: `pgrep -f torchrun`",
        )
    children = _children_by_parent()
    for name in _RANK_NAMES:
        found = list(_ranks_below(root, children, name))
        if found:
            return [*found, *_unknown_ranks_below(root, children, found)]
    unknown = list(_unknown_ranks_below(root, children, []))
    if unknown:
        return unknown
    raise UsageError(
        f"neither process {root} nor a child of it has RANK in its environment",
        "give the PID of the launcher or of a rank, on the node of the ranks",
    )


def _ranks_below(root: int, children: dict[int, list[int]], variable: str) -> Iterator[TreeProcess]:
    queue = [root]
    for pid in queue:
        rank = _rank(environment(pid).get(variable, ""))
        if rank is None:
            queue += children.get(pid, [])
        else:
            yield TreeProcess(pid, rank, None)
            for child in _descendants(pid, children):
                yield TreeProcess(child, rank, pid)
        if len(queue) > _MAX_PROCESSES:
            return


def _unknown_ranks_below(
    root: int, children: dict[int, list[int]], known: list[TreeProcess]
) -> Iterator[TreeProcess]:
    """Processes whose RANK is not a number, and that are neither a rank nor the parent of one."""
    known_pids = {process.pid for process in known}
    queue = [root]
    for pid in queue:
        if pid in known_pids:
            continue
        descendants = _descendants(pid, children)
        is_parent_of_rank = not known_pids.isdisjoint(descendants)
        if has_damaged_rank(pid) and not is_parent_of_rank:
            yield TreeProcess(pid, None, None)
            for child in descendants:
                yield TreeProcess(child, None, pid)
        else:
            queue += children.get(pid, [])
        if len(queue) > _MAX_PROCESSES:
            return


def has_damaged_rank(pid: int) -> bool:
    """Whether the environment of a process has a RANK that is not a rank number."""
    text = environment(pid).get("RANK", "")
    return bool(text) and _rank(text) is None


def _descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
        if len(found) > _MAX_PROCESSES:
            break
    return found


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in sorted(os.listdir(_PROC)):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if len(fields) > 1 and fields[1].isdigit():
                children.setdefault(int(fields[1]), []).append(int(name))
    return children


def _rank(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < MAX_RANKS else None


def environment(pid: int) -> dict[str, str]:
    """The environment with which a process started; empty if it cannot be read."""
    text = _read(_PROC / str(pid) / "environ")
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)


def redacted_environment(pid: int) -> dict[str, str]:
    """The names of all variables, and the values of those that only number the ranks."""
    return {
        name: value if name in _KEPT_VARIABLES and value.isdigit() else REDACTED
        for name, value in sorted(environment(pid).items())
    }


def command_name(pid: int) -> str:
    """The program and its first argument, without options, which may contain secrets."""
    words = _read(_PROC / str(pid) / "cmdline").split("\0")
    shown = [os.path.basename(word) for word in words if word and not word.startswith("-")]
    return " ".join(shown[:2])[:200]


def sample(pid: int) -> ProcessSample | None:
    """The state of a process now; None if it has exited."""
    fields = _stat_fields(pid)
    if len(fields) < 13:
        return None
    wait_channel = _read(_PROC / str(pid) / "wchan").strip()
    ticks = [int(text) for text in fields[11:13] if text.isdigit()]
    return ProcessSample(fields[0], "" if wait_channel == "0" else wait_channel[:80], sum(ticks))


def _stat_fields(pid: int) -> list[str]:
    """The fields after the name of the program, which may contain spaces and brackets."""
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()


def memory_events(pid: int) -> dict[str, int]:
    """How often the memory limit of the process's control group was hit, and the OOM kills."""
    for line in _read(_PROC / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            file = _CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        events = _counts(_read(file))
        if events:
            return events
    return {}


def _counts(text: str) -> dict[str, int]:
    pairs = [line.split() for line in text.splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
