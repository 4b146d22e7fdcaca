"""Take the stacks of live ranks on this node by py-spy.

The rank of a process is read from its environment. No process is ended, stopped or changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.installation import install_command
from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import InputFile
from distsim.hang_doctor.readers.log_lines import LogReader

_PY_SPY_TIMEOUT_S: Final = 20.0
_MAX_PROCESSES: Final = 1024


def add_live_processes(evidence: Evidence, pids: Sequence[int], torchrun: int | None) -> None:
    """Take the stacks of live ranks into the evidence.

    Raises UsageError if a process does not exist, and EnvironmentFault if py-spy is missing or
    lacks the permission.
    """
    wanted = list(dict.fromkeys(pids))
    if torchrun is not None:
        wanted += [p for p in rank_pids_of_launcher(torchrun) if p not in wanted]
    for pid in wanted:
        if not os.path.isdir(f"/proc/{pid}"):
            raise UsageError(
                f"process {pid} does not exist on this node",
                "list them with `pgrep -f train.py`; run doctor on the node of the rank",
            )
    tool = _py_spy_path()
    for pid in wanted:
        _add_process(evidence, tool, pid)


def rank_pids_of_launcher(launcher: int) -> list[int]:
    """The processes of ranks among the descendants of a launcher, found by their environment.

    Raises UsageError if there are none.
    """
    if not os.path.isdir(f"/proc/{launcher}"):
        raise UsageError(
            f"process {launcher} does not exist on this node",
            "give the PID of torchrun on this node: `pgrep -f torchrun`",
        )
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent_pid(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [launcher]
    at = 0
    while at < len(queue) and len(queue) < _MAX_PROCESSES:
        for child in sorted(children.get(queue[at], [])):
            (found if rank_of_pid(child) is not None else queue).append(child)
        at += 1
    if not found:
        raise UsageError(
            f"no child of process {launcher} has RANK in its environment",
            "name the ranks: --pid PID --pid PID",
        )
    return found


def _parent_pid(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rsplit(")", 1)[-1].split()
    return int(fields[1]) if len(fields) > 1 else None


def rank_of_pid(pid: int) -> int | None:
    """The rank of a process, by what its launcher put into its environment."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    given = dict(part.split(b"=", 1) for part in data.split(b"\0") if b"=" in part)
    for name in (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID"):
        text = given.get(name, b"")
        if text.isdigit() and int(text) < MAX_RANKS:
            return int(text)
    return None


def _py_spy_path() -> str:
    here = Path(sysconfig.get_path("scripts")) / "py-spy"
    found = str(here) if here.is_file() else shutil.which("py-spy")
    if found is None:
        raise EnvironmentFault(
            "py-spy is not installed; distsim needs it for the stacks of live processes",
            f"{install_command('doctor')}, or pip install py-spy",
        )
    return found


def _add_process(evidence: Evidence, tool: str, pid: int) -> None:
    rank = rank_of_pid(pid)
    shown = f"process {pid}"
    try:
        done = subprocess.run(
            [tool, "dump", "--locals", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_TIMEOUT_S,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        evidence.files.append(
            InputFile(
                shown, "live process", (), f"py-spy gave no stack in {_PY_SPY_TIMEOUT_S:.0f} s"
            )
        )
        return
    except OSError as fault:
        raise EnvironmentFault(
            f"cannot run {tool}: {fault.strerror}", "`pip install py-spy`"
        ) from None
    if done.returncode:
        _report_refusal(evidence, shown, done.stderr)
        return
    reader = LogReader(evidence, shown, rank)
    reader.read(iter(done.stdout.split("\n")))
    evidence.files.append(
        InputFile(
            shown,
            "live process",
            tuple(sorted(reader.ranks)),
            "" if reader.ranks else "unknown rank: its environment has no RANK",
        )
    )


def _report_refusal(evidence: Evidence, shown: str, said: str) -> None:
    text = " ".join(said.split())[:200]
    if "ermission" in text or "ptrace" in text:
        raise EnvironmentFault(
            f"the system does not permit access to {shown}: {text}",
            "run it as the user of the ranks, or as root; in a "
            "container add --cap-add SYS_PTRACE; on macOS use sudo",
        )
    evidence.files.append(InputFile(shown, "live process", (), f"py-spy reports: {text}"))
