"""Lines in which other programs report on a job: launchers, schedulers, the kernel, analyzers.

Each becomes a ``ToolReport``, a conclusion in the name of its program. The formats are those of:

- torch's Flight Recorder analyzer: ``torch/distributed/flight_recorder/components/types.py``
  (``EntryState.log``) and ``utils.py`` (``error_analysis``) of torch 2.13; the heads
  "Collective N at entry M errors" and "Not all ranks joining collective N at entry M" are torch
  2.5's.
- Ray Train: ``train/v2/_internal/execution/checkpoint/sync_actor.py``
  (BROADCAST_PERIODIC_WARNING); Ray core: the text of ActorDiedError (OpenRLHF issue 970).
- NCCL's warnings: ``init.cc`` of 2.4 (nccl issue 296), ``net_ib.cc`` (nccl issues 615 and 969).
- SLURM: pytorch-lightning, nextflow issue 5932, zetta_utils issue 671, submitit issue 1708.
- the kernel: ``mm/oom_kill.c``, ``kernel/hung_task.c``, NVIDIA's "Xid Errors".
- torch's stores: ``TCPStore.cpp`` and ``distributed_c10d.py`` (``_store_based_barrier``).

Every pattern has bounded repetitions, so a line takes time linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS
from distsim.hang_doctor.model.operation_names import operation_family
from distsim.hang_doctor.model.phrases import verb_form
from distsim.hang_doctor.readers.log_context import LogContext

ANALYZER: Final = "torch's Flight Recorder analyzer"
RAY: Final = "Ray"
SLURM: Final = "SLURM"
KERNEL: Final = "the kernel"
NCCL_WARNING: Final = "NCCL's log"
STORE: Final = "torch's store"
TORCHRUN: Final = "torchrun"

#: Ranks that a report lists at most.
_MAX_LISTED: Final = 4096
_MAX_TEXT: Final = 200


def _numbers(text: str) -> list[int]:
    found = (int(number) for number in re.findall(r"\d{1,7}", text)[:_MAX_LISTED])
    return [number for number in found if number < MAX_RANKS]


# --- one line, one report ---


class _LineReport(NamedTuple):
    """A line that is a report by itself. ``word``: a text that every such line contains."""

    tool: str
    word: str
    pattern: re.Pattern[str]
    text: Callable[[re.Match[str]], str]
    #: The group of the pattern that lists ranks, 0 if there is none.
    ranks: int = 0


def _report(
    tool: str, word: str, pattern: str, text: str | Callable[[re.Match[str]], str], ranks: int = 0
) -> _LineReport:
    make = text if callable(text) else _constant(text)
    return _LineReport(tool, word, re.compile(pattern), make, ranks)


def _constant(text: str) -> Callable[[re.Match[str]], str]:
    def make(match: re.Match[str]) -> str:
        return match.expand(text)

    return make


def _slurm_reason(match: re.Match[str]) -> str:
    reason = match[1].lower() if match[1] else "somebody or the scheduler ended it"
    return f"the job was cancelled ({reason}); this ended it and did not cause the hang"


_LINE_REPORTS: Final = (
    # Ray
    _report(
        RAY,
        "for the following ranks",
        r"for the following ranks to join the `([^`]{1,80})` call: \[([\d, ]{1,40000})\]",
        r"did not call \1, which the other workers wait in",
        ranks=2,
    ),
    _report(
        RAY,
        "call: [",
        r"^\s{0,8}to join the `([^`]{1,80})` call: \[([\d, ]{1,40000})\]",
        r"did not call \1, which the other workers wait in",
        ranks=2,
    ),
    _report(
        RAY,
        "StreamSplitDataIterator",
        r"StreamSplitDataIterator\(epoch=-?\d+, split=(\d{1,7})\) blocked waiting on other clients",
        "is blocked in its data iterator until the other workers read a batch",
        ranks=1,
    ),
    _report(
        RAY,
        "worker process has died",
        r"The actor is dead because its worker process has died\.",
        "an actor's process died before the others hung or lost it; see its log and dmesg",
    ),
    _report(
        RAY,
        "running low on memory",
        r"(?:Task was|Workers? \(tasks / actors\)) killed due to (?:the )?(?:node|memory)",
        "a worker was killed because its node ran low on memory",
    ),
    # vLLM
    _report(
        "vLLM",
        "shared memory broadcast block",
        r"No available shared memory broadcast block found in (\d{1,6}) second",
        r"no worker took a message for \1 s: a worker process hangs or has died",
    ),
    # NCCL
    _report(
        NCCL_WARNING,
        "Mismatched collective",
        r"Mismatched collective detected, please check your collective calls at and around rank "
        r"(\d{1,7})",
        "got a collective that does not match that of a neighbour: sizes or order differ",
        ranks=1,
    ),
    _report(
        NCCL_WARNING,
        "collective mismatch error",
        r"collective mismatch error,? local size (\d{1,20}) remote size (\d{1,20})",
        r"two ranks transfer different sizes: \1 bytes here, \2 bytes on the other side",
    ),
    _report(
        NCCL_WARNING,
        "Got completion",
        r"Got completion (?:from peer (\S{1,80}) )?with (?:status=|error )(\d{1,4})",
        r"the network failed: a transfer ended with error \2; check the links of both hosts",
    ),
    _report(
        NCCL_WARNING,
        "Connection closed by remote peer",
        r"Connection closed by remote peer (\S{1,120})",
        r"the process at \1 closed its connection: its log has the cause",
    ),
    # SLURM
    _report(
        SLURM,
        "CANCELLED AT",
        r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,200} CANCELLED AT \S{1,40}"
        r"(?: DUE TO ([A-Z ]{1,60}))? \*\*\*",
        _slurm_reason,
    ),
    _report(
        SLURM,
        "oom",
        r"slurmstepd: error: Detected (\d{1,6}) oom[-_]kill event",
        "the kernel killed a process of this step for lack of memory",
    ),
    _report(
        SLURM,
        "task",
        r"srun: error: (\S{1,80}): tasks? ([\d,-]{1,400}): Out Of Memory",
        r"task \2 on \1 was killed for lack of memory",
    ),
    _report(
        SLURM,
        "task",
        r"srun: error: (\S{1,80}): tasks? ([\d,-]{1,400}): (Killed|Segmentation fault|Bus error)",
        r"task \2 on \1 ended: \3",
    ),
    _report(
        SLURM, "ode failure", r"(?:srun: error: )?[Nn]ode failure on (\S{1,200})", r"\1 failed"
    ),
    # the kernel
    _report(
        KERNEL,
        "blocked for more than",
        r"INFO: task ([^\s:]{1,40}):(\d{1,9}) blocked for more than (\d{1,6}) seconds",
        r"process \2 (\1) has waited for the disk, a file system or a driver for over \3 s",
    ),
    _report(
        KERNEL,
        "NVRM: Xid",
        r"NVRM: Xid \(PCI:([\w:.]{1,24})\): (\d{1,4}),? ?(?:pid=(\d{1,9}))?",
        r"the GPU at \1 reports error Xid \2",
    ),
    _report(
        KERNEL,
        "segfault at",
        r"(\S{1,40})\[(\d{1,9})\]: segfault at ",
        r"process \2 (\1) had a segmentation fault",
    ),
    # torch
    _report(
        STORE,
        "joined",
        r"Timed out after (\d{1,9}) seconds waiting for (?:clients|workers)\. (\d{1,7})/(\d{1,7}) "
        r"(?:clients|workers) joined",
        r"only \2 of \3 processes joined in \1 s: the others never started, died or cannot reach "
        r"the store",
    ),
    _report(
        STORE,
        "store based barrier",
        r"Timed out initializing process group in store based barrier on rank:? (\d{1,7}),.{0,120}?"
        r"world_size=(\d{1,7}), worker_count=(\d{1,7})",
        r"waited in init_process_group, where \3 of \2 processes arrived",
        ranks=1,
    ),
    _report(
        STORE,
        "trying to connect",
        r"client socket has timed out after (\d{1,12})(?:ms|s) while trying to connect to "
        r"\((\S{1,200}), (\d{1,6})\)",
        r"a process could not reach the store at \2:\3: rank 0 did not start there, or the address "
        r"or a firewall is wrong",
    ),
    _report(
        TORCHRUN,
        "death signal",
        r"Received (\d{1,3}) death signal, shutting down workers",
        r"it received signal \1: the job was ended from outside, which did not cause the hang",
    ),
    _report(
        "torch's heartbeat monitor",
        "watchdog got stuck",
        r"Rank (\d{1,7})\][^\[]{0,40}watchdog got stuck for (\d{1,9}) seconds",
        r"made no progress for \2 s: a CUDA call, or the GIL held by another thread, blocks it",
        ranks=1,
    ),
)

#: ``Killed process`` since Linux 4.19, ``Kill process … or sacrifice child`` before.
_OOM_KILL: Final = re.compile(
    r"(?:Out of memory|[Mm]emory cgroup out of memory):? (?:OOM, )?Kill(?:ed)? process "
    r"(\d{1,9}) \(([^)]{1,64})\)"
)


class ToolLineReader:
    """Takes lines one by one and enters the reports in them."""

    def __init__(self, log: LogContext) -> None:
        self._log = log
        self._analyzer = _AnalyzerReader(log)

    def take(self, line: str) -> None:
        """Take the next line, without its prefix."""
        self._analyzer.take(line)
        for report in _LINE_REPORTS:
            if report.word not in line:
                continue
            match = report.pattern.search(line)
            if match is not None:
                ranks = _numbers(match[report.ranks]) if report.ranks else []
                self._log.ranks.update(ranks)
                self._log.add_report(report.tool, ranks, report.text(match)[:_MAX_TEXT])
        if "ut of memory" in line:
            self._take_oom_kill(line)

    def _take_oom_kill(self, line: str) -> None:
        match = _OOM_KILL.search(line)
        if match is None:
            return
        pid = int(match[1])
        self._log.evidence.oom_killed_pids.add(pid)
        self._log.add_report(KERNEL, (), f"process {pid} ({match[2]}) was killed: out of memory")

    def close(self) -> None:
        """End what is open at the end of the file."""
        self._analyzer.close()


# --- torch's Flight Recorder analyzer ---

_HEAD: Final = re.compile(
    r"(Not all ranks joining collective|Input/output mismatch in the collective|Collective)"
    r"(?:,? sequence number:)? (\d{1,15})"
    r"(?: at entry \d{1,15})?( has errors| errors|$)"
)
_FIELD: Final = re.compile(r"^\s{0,8}(group info|collective|missing ranks|error msg): (.*)$")
_CULPRIT: Final = re.compile(r"Culprit rank (\d{1,7}); Error type: (\w{1,60})(?:, ([^,]{0,300}))?")


@dataclass
class _Finding:
    """A finding of the analyzer that is being read."""

    kind: str
    number: str
    fields: dict[str, str] = field(default_factory=dict)


class _AnalyzerReader:
    """Takes the lines of ``torchfrtrace``: a head, then one field per line."""

    def __init__(self, log: LogContext) -> None:
        self._log = log
        self._open: _Finding | None = None

    def take(self, line: str) -> None:
        if "ollective" in line:
            head = _HEAD.search(line)
            is_finding = head is not None and (head[1] != "Collective" or head[3])
            if head is not None and is_finding:
                self.close()
                self._open = _Finding(head[1], head[2])
                return
        if self._open is None:
            return
        match = _FIELD.match(line)
        if match is not None:
            self._open.fields.setdefault(match[1], match[2])

    def close(self) -> None:
        """Enter the finding that is open, if it names a group or a rank."""
        finding, self._open = self._open, None
        if finding is None or not finding.fields:
            return
        fields = finding.fields
        op = operation_family(fields.get("collective", "").rpartition(":")[2].strip()[:60])
        call = f"{op or 'collective'} (call {finding.number}"
        if "group info" in fields:
            call += f" of group {fields['group info'].strip()[:60]}"
        call += ")"
        missing = _numbers(fields.get("missing ranks", ""))
        culprits = list(_CULPRIT.finditer(fields.get("error msg", "")))
        if missing:
            self._enter(missing, f"did not join {call}")
        for error in dict.fromkeys(culprit[2] for culprit in culprits):
            ranks = [int(culprit[1]) for culprit in culprits if culprit[2] == error]
            details = next(culprit[3] for culprit in culprits if culprit[2] == error)
            verb = verb_form(ranks, "differs", "differ")
            text = f"{verb} from the other ranks in {call}: {error}"
            self._enter(ranks, f"{text}, {details.strip()}" if details else text)
        if not missing and not culprits:
            self._enter([], f"an input or output that does not match in {call}")

    def _enter(self, ranks: list[int], text: str) -> None:
        known = [rank for rank in ranks if rank < MAX_RANKS]
        self._log.ranks.update(known)
        self._log.add_report(ANALYZER, known, text[:_MAX_TEXT])
