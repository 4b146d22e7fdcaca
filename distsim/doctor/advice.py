"""What to collect next: for whom, and with which words of the shell."""

from __future__ import annotations

from distsim.doctor.causes import Cause
from distsim.doctor.evidence import Evidence
from distsim.doctor.standing import Standing
from distsim.doctor.words import ranges, verb, who


def advice(evidence: Evidence, whole: Standing, absent: tuple[int, ...], main: Cause | None) -> list[str]:
    """Commands and variables, those that would settle the most first; none where all is told."""
    found = []
    recorded = any(e.recorded for e in evidence.ranks.values())
    settled = (
        main is not None
        and main.grade == "proved"
        and (main.culprits or main.kind in ("clash", "tags", "communication", "parted"))
    )
    if absent:
        found.append(f"the files of {who(absent)}: nothing of {verb(absent, 'it', 'them')} was given (lost, or never written?)")
    unplaced = [r for r, s in whole.ranks.items() if s.place is None and s.end is None]
    wanted = [r for r in (main.ranks if main else ()) if r in unplaced] or ([] if settled else unplaced)
    if wanted and not settled:
        found.append(f"while it hangs, the stack of {who(wanted)}: `distsim doctor --pid PID` there, or `py-spy dump --locals --pid PID > "
                     f"rank_{ranges(wanted[:1])}.txt`")  # fmt: skip
    if not recorded and not settled:
        found.append("Flight Recorder dumps of all ranks, from the next run: TORCH_FR_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
                     "TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_ (before torch 2.9: TORCH_NCCL_TRACE_BUFFER_SIZE, "
                     "TORCH_NCCL_DEBUG_INFO_TEMP_FILE); then `distsim doctor /shared`")  # fmt: skip
    if recorded and not settled and not any(e.messages for e in evidence.ranks.values()):
        found.append(
            "Gloo records no messages: the stacks of all ranks with locals (`py-spy dump --locals`) tell who sends to whom"
        )
    if any(not g.sure for g in evidence.groups.values()) and not settled:
        found.append("lines that name groups by GUID: torch 2.5 or newer, or Flight Recorder dumps")
    return found
