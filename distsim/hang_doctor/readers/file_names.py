"""The rank in the name of a file or folder, by patterns that tools really use.

Any other number in a name is no rank: a date, a process id (``NCCL_DEBUG_FILE`` with ``%p``), a job
id, a node (``node_rank_1``) or a local rank.

=====================================  =======================================================
``…rank_3``, ``rank3.log``,            torch's Flight Recorder, Megatron, DeepSpeed
``…rank-3.txt``, ``rank=3``            (``enable_each_rank_log``), Lightning, by hand
``rank.3/stderr``                      Open MPI's ``--output-filename``
``attempt_0/3/stderr.log``             torchrun's ``--log-dir`` (the local rank: one node)
``3.log``, ``3.out``                   SLURM's ``--output=%t.out``
``stack.3.txt``                        one stack per rank, as the documentation suggests
``trace_3`` (dumps only)               ``TORCH_FR_DUMP_TEMP_FILE=trace_``: torch appends the rank
=====================================  =======================================================
"""

from __future__ import annotations

import os
import re

from distsim.hang_doctor.model.evidence import MAX_RANKS

_RANK = re.compile(r"(?<![a-z])(?:global_?)?rank[_\-.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
#: What "rank" must not follow: these numbers count something else.
_OTHER_RANK = re.compile(r"(?:node|local|group|role|machine)[_\-.]?$", re.IGNORECASE)
_SUFFIX = r"(?:\.(?:txt|log|json|gz|err|out|jsonl))*"
_TASK = re.compile(rf"(\d{{1,6}}){_SUFFIX}")
_STACK = re.compile(rf"(?:stack|stacks|pyspy|py-spy)[._-](\d{{1,6}}){_SUFFIX}")
_END = re.compile(r"(?<!\d)(\d{1,7})(?:\.(?:pickle|pkl|dump|json|gz))*$")
_TORCHRUN_LOGS = ("stdout.log", "stderr.log")
_MPI_LOGS = ("stdout", "stderr")
#: Longer names cannot be on a disk, but an archive may contain them; their start is ignored.
_MAX_NAME = 255


def rank_of_file_name(path: str, is_dump: bool = False) -> int | None:
    """The rank in the name of a file; None if no known pattern finds one.

    ``is_dump``: a Flight Recorder dump, to whose name torch appends the rank.
    """
    folder, name = os.path.split(path)
    name = name[-_MAX_NAME:]
    parent = os.path.basename(folder)[-_MAX_NAME:]
    text = _rank_after_word(name)
    if text is None and (name in _TORCHRUN_LOGS or name in _MPI_LOGS):
        number = re.fullmatch(r"\d{1,7}", parent) if name in _TORCHRUN_LOGS else None
        text = parent if number is not None else _rank_after_word(parent)
    if text is None:
        match = _TASK.fullmatch(name) or _STACK.fullmatch(name)
        if match is None and is_dump:
            match = _END.search(name)
        text = match[1] if match is not None else None
    if text is None or int(text) >= MAX_RANKS:
        return None
    return int(text)


def _rank_after_word(name: str) -> str | None:
    """The number after the word "rank", unless the word before it gives it another meaning."""
    for match in _RANK.finditer(name):
        if _OTHER_RANK.search(name[max(match.start() - 8, 0) : match.start()]) is None:
            return match[1]
    return None
