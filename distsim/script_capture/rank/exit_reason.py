"""Why a process ends: an exception as a `ProcessExit`.

If torch rejected an argument of a call, the exit also names the finding for it, because such a call
raises before anything is sent: no rule of a backend would ever see it.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from distsim.script_capture.errors import SYMMETRIC_MEMORY_UNSUPPORTED
from distsim.script_capture.folders import PACKAGE_FOLDER
from distsim.script_capture.protocol.message_types import NO_CALL_SITE, ProcessExit
from distsim.script_capture.rank.client import HubClient

#: The address of an object in its default representation. It differs between processes and runs,
#: so one error would look like many.
_OBJECT_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
#: The text for an error of FakeTensorMode that a tensor's values were needed.
_NEEDS_VALUES: Final = "this line needs the values of a tensor, but --fake keeps only sizes"
_NEEDS_VALUES_ERRORS: Final = frozenset(
    {"DataDependentOutputException", "DynamicOutputShapeException"}
)


def exit_of_exception(client: HubClient, error: BaseException) -> ProcessExit:
    """How a process ends that is left by this exception."""
    if isinstance(error, SystemExit):
        return _exit_of_system_exit(client, error)
    text = fake_tensor_error(error) or symmetric_memory_error(error)
    if not text:
        text = traceback.format_exception_only(error)[-1].strip()
    # Before the frames of distsim are removed, which changes the error's own traceback.
    refused = argument_error_code(error)
    trace = "".join(traceback.format_exception(_without_internal_frames(error)))
    place = client.sites.of_traceback(error)
    return ProcessExit("raised", 1, _without_addresses(text), place, trace, refused)


def _exit_of_system_exit(client: HubClient, error: SystemExit) -> ProcessExit:
    """As Python does: a code that is neither None nor a number is printed, and the status is 1."""
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    text = _without_addresses(str(error.code or ""))
    if not code:
        return ProcessExit("ended", code, text, NO_CALL_SITE)
    return ProcessExit("exited", code, text, client.sites.of_traceback(error))


def _without_addresses(text: str) -> str:
    return _OBJECT_ADDRESS.sub("", text)


def fake_tensor_error(error: BaseException) -> str:
    """The text of an error of FakeTensorMode that values were needed; "" for any other."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "" if names.isdisjoint(_NEEDS_VALUES_ERRORS) else _NEEDS_VALUES


def symmetric_memory_error(error: BaseException) -> str:
    """The text of an error that torch has no kernel of symmetric memory; "" for any other."""
    is_missing = isinstance(error, NotImplementedError) and "'symm_mem::" in str(error)
    return SYMMETRIC_MEMORY_UNSUPPORTED if is_missing else ""


def _without_internal_frames(error: BaseException) -> BaseException:
    """The error without the frames of distsim and runpy above the script.

    For a script that cannot be read, nothing but the error is left. Otherwise an error that has
    only such frames keeps them.
    """
    trace = error.__traceback__
    while trace is not None and _is_internal_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError | OSError):
        return error
    return error.with_traceback(trace)


def _is_internal_frame(file: str) -> bool:
    if file.startswith(PACKAGE_FOLDER) or file == "<frozen runpy>":
        return True
    return os.path.basename(file) == "runpy.py"


# --- calls that torch rejects ---
#: Files whose own checks of arguments raise: torch's, and those of the hub's group, in place of a
#: backend's.
_ARGUMENT_CHECK_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "distsim/script_capture/rank/process_group.py",
    "distsim/script_capture/rank/hub_calls.py",
)
#: Texts of torch (torch/distributed/distributed_c10d.py) and the finding's code.
_ARGUMENT_ERRORS: Final = (
    (r"Invalid rank|is not part of group", "DS101"),
    (r"should not be the same as the rank of the current process", "DS102"),
    (r"Default process group has not been initialized", "DS108"),
    (r"trying to initialize the default process group twice", "DS109"),
    (
        r"new group's rank should be|[Rr]ank -?\d+ is out of range|the new group.*unique"
        r"|ranks list contains duplicate",
        "DS111",
    ),
    (r"same size as output size times world size", "DS110"),
    (r"No backend type associated with device type", "DS704"),
    (r"only (implemented|supported) for|not supported by|does not support", "DS704"),
    (r"[Ss]plits? .*(sum|match|add)|split.*(dim|size)", "DS107"),
)
_OTHER_ARGUMENT_ERROR: Final = "DS112"
_INVALID_PEER: Final = "DS101"
_INVALID_ROOT: Final = "DS103"
_ROOTED_COLLECTIVES: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})


def argument_error_code(error: BaseException) -> str:
    """The code of a finding if torch rejected an argument of a call, else "".

    What the script raises itself is not a rejection.
    """
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        return ""
    if "distsim capture does not" in str(error):
        return ""
    frames = list(_frames(error.__traceback__))
    if not frames or not _is_argument_check(frames[-1]):
        return ""
    code = _argument_error_of_text(str(error))
    functions = {frame.tb_frame.f_code.co_name for frame in frames}
    if code == _INVALID_PEER and not functions.isdisjoint(_ROOTED_COLLECTIVES):
        return _INVALID_ROOT
    return code


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _argument_error_of_text(text: str) -> str:
    for pattern, code in _ARGUMENT_ERRORS:
        if re.search(pattern, text):
            return code
    return _OTHER_ARGUMENT_ERROR


def _is_argument_check(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename.replace("\\", "/")
    return file.endswith(_ARGUMENT_CHECK_FILES)
