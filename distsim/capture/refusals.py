"""Calls that torch does not take: it raises before anything is sent. Which finding says so."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Final

#: Files whose own checks of arguments raise: torch's, and the hub's group in the place of a back end's.
_CHECKS: Final = ("torch/distributed/distributed_c10d.py", "distsim/capture/group.py")
#: What torch says (torch/distributed/distributed_c10d.py) and the finding's code; of what is not here, DS112.
_WORDS: Final = (
    (r"Invalid rank|is not part of group", "DS101"),
    (r"should not be the same as the rank of the current process", "DS102"),
    (r"Default process group has not been initialized", "DS108"),
    (r"trying to initialize the default process group twice", "DS109"),
    (r"new group's rank should be|is out of range|the new group.*unique|ranks list contains duplicate", "DS111"),
    (r"only (implemented|supported) for|not supported by|does not support", "DS704"),
    (r"[Ss]plits? .*(sum|match|add)|split.*(dim|size)", "DS107"),
)  # fmt: skip
_ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})


def refusal(error: BaseException) -> str:
    """The code of a finding where torch took exception to an argument of a call, else "". What the script raises is no refusal."""
    trace = error.__traceback__
    names: list[str] = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        if trace.tb_next is None and not _checks(trace):
            return ""
        trace = trace.tb_next
    if not names or not isinstance(error, ValueError | TypeError | RuntimeError) or "distsim capture does not" in str(error):
        return ""
    code = next((code for words, code in _WORDS if re.search(words, str(error))), "DS112")
    return "DS103" if code == "DS101" and not _ROOTED.isdisjoint(names) else code


def _checks(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_CHECKS)
