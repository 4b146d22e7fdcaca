"""Enter what ``doctor --live`` saw, directly or from its bundle, into the evidence.

The format is that of ``live_job``. A bundle may come from anybody, so every value is checked.
"""

from __future__ import annotations

from typing import Any, Final

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    ProcessState,
    StackFrame,
    ThreadStack,
    non_negative_int,
)
from distsim.hang_doctor.model.phrases import process_state_text
from distsim.hang_doctor.readers.live_job import FORMAT

_MAX_PROCESSES: Final = 20_000
_MAX_STACKS: Final = 512
_MAX_FRAMES: Final = 256
_MAX_TEXT: Final = 200


def is_live_job(data: object) -> bool:
    """Whether this is the description of a live job."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_live_job(evidence: Evidence, job: dict[str, Any], source: str) -> set[int]:
    """Enter all processes; return their ranks."""
    ranks: set[int] = set()
    host = _text(job.get("host"))
    for given in _list(job.get("processes"))[:_MAX_PROCESSES]:
        if not isinstance(given, dict):
            continue
        is_child = given.get("is_child") is True
        stacks = _stacks(given, source)
        if "rank" in given and given["rank"] is None:
            if not is_child:
                _enter_process_of_unknown_rank(evidence, _process(given, host, stacks, is_child))
            continue
        rank = non_negative_int(given.get("rank"), UNKNOWN_NUMBER)
        if not 0 <= rank < MAX_RANKS:
            continue
        ranks.add(rank)
        evidence.records_of(rank, source).processes.append(_process(given, host, stacks, is_child))
        if not is_child:
            for stack in stacks:
                evidence.add_stack(rank, stack)
            _read_world(evidence, given.get("environment"))
            _read_memory_events(evidence, given.get("memory_events"), rank)
    if job.get("has_stacks") is False:
        evidence.live_without_stacks = True
        evidence.add_note(
            "py-spy is not installed, so only the state of each process was read from /proc, and "
            "no stacks"
        )
    return ranks


def _stacks(given: dict[str, Any], source: str) -> list[ThreadStack]:
    stacks = (_stack(one, source) for one in _list(given.get("stacks"))[:_MAX_STACKS])
    return [stack for stack in stacks if stack is not None]


def _enter_process_of_unknown_rank(evidence: Evidence, process: ProcessState) -> None:
    evidence.add_note(
        f"the rank of process {process.pid} is unknown, because RANK in its environment is not a "
        f"number; the process {process_state_text(process)}"
    )
    evidence.orphan_processes.append(process)
    for stack in process.stacks:
        evidence.add_stack(None, stack)


def _process(
    given: dict[str, Any], host: str, stacks: list[ThreadStack], is_child: bool
) -> ProcessState:
    share = given.get("cpu_share")
    return ProcessState(
        pid=non_negative_int(given.get("pid")),
        host=host,
        is_child=is_child,
        command=_text(given.get("command")),
        state=_text(given.get("state"))[:8],
        wait_channel=_text(given.get("wait_channel")),
        moved=given.get("moved") is True,
        cpu_share=float(share) if isinstance(share, (int, float)) else 0.0,
        native=tuple(_text(name) for name in _list(given.get("native"))[:12]),
        stacks=tuple(stacks),
    )


def _stack(given: object, source: str) -> ThreadStack | None:
    if not isinstance(given, dict):
        return None
    frames = []
    for frame in _list(given.get("frames"))[:_MAX_FRAMES]:
        if isinstance(frame, dict) and isinstance(frame.get("line"), int):
            values = frame.get("values")
            frames.append(
                StackFrame(
                    _text(frame.get("name")),
                    str(frame.get("file", ""))[:400],
                    frame["line"],
                    _values(values),
                )
            )
    if not frames:
        return None
    return ThreadStack(_text(given.get("thread")), given.get("main") is True, tuple(frames), source)


def _values(given: object) -> dict[str, str]:
    if not isinstance(given, dict):
        return {}
    return {_text(name): _text(value) for name, value in list(given.items())[:16]}


def _read_world(evidence: Evidence, environment: object) -> None:
    text = environment.get("WORLD_SIZE") if isinstance(environment, dict) else None
    if isinstance(text, str) and text.isdigit() and int(text) <= MAX_RANKS:
        evidence.world = max(evidence.world, int(text))


def _read_memory_events(evidence: Evidence, events: object, rank: int) -> None:
    kills = non_negative_int(events.get("oom_kill")) if isinstance(events, dict) else 0
    if kills:
        evidence.add_note(
            f"the memory limit of rank {rank}'s control group caused {kills} OOM kills: a worker "
            "process or a rank may have been killed"
        )


def _list(given: object) -> list[Any]:
    return given if isinstance(given, list) else []


def _text(given: object) -> str:
    return given[:_MAX_TEXT] if isinstance(given, str) else ""
