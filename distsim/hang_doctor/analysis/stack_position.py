"""What a stack says about the position of a rank: in which torch call it is, and at which line.

A stack shows Python functions only. A wait on a handle (``work.wait()``) runs in C++ and therefore
looks the same as a slow line of the user's own code; ``model.phrases.may_hide_a_wait`` judges such
lines. Reading stacks from files is the job of ``readers.stacks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from distsim.hang_doctor.model.evidence_records import StackFrame, ThreadStack
from distsim.hang_doctor.model.operation_names import P2P_OPS, is_known_operation, operation_family

#: Calls of torch in which every rank of the job must take part, whichever ranks the new group has.
JOB_WIDE_CALLS: Final = (
    "new_group",
    "new_subgroups",
    "init_process_group",
    "init_device_mesh",
)
#: Further calls that wait for other ranks and are not in the table of operation names.
_OTHER_BLOCKING_CALLS: Final = ("batch_isend_irecv", "split_group")
_SYNCHRONIZE_CALLS: Final = ("synchronize", "_synchronize")

#: Where files lie that the user did not write. py-spy shortens some paths to the part after
#: site-packages or the standard library, hence the last two alternatives.
_LIBRARY_FILE: Final = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3[^/]*|multiprocessing|concurrent/futures)/"
    r"|^<|^torch/"
    r"|^(threading|selectors|socket|queue|subprocess|contextlib|runpy|ssl|functools|inspect)\.py$"
    r"|^(multiprocessing|concurrent|asyncio|importlib|numpy|accelerate|deepspeed|lightning"
    r"|pytorch_lightning|transformers|datasets)/"
)
_TORCH_DISTRIBUTED_FILE: Final = re.compile(r"(^|/)torch/distributed/")


class StackPosition(NamedTuple):
    """Where a thread is.

    ``op`` is the family of the communication call that the thread is in, "synchronize" for a wait
    for the device, and empty for host code. ``frame`` is the line of the user's code. ``peer`` and
    ``tag`` are known only if the stack has local variables.
    """

    op: str
    frame: StackFrame | None
    peer: int | None = None
    tag: int | None = None
    #: The call has no group argument, so it is on the default group.
    on_default_group: bool = True


def is_library_file(file: str) -> bool:
    """Whether a file belongs to torch, to Python or to an installed package."""
    return bool(_LIBRARY_FILE.search(file))


def user_frame(frames: Iterable[StackFrame]) -> StackFrame | None:
    """The innermost frame of the user's own code, or else the innermost frame of all."""
    innermost = None
    for frame in frames:
        if not is_library_file(frame.file):
            return frame
        innermost = innermost or frame
    return innermost


def stack_position(stack: ThreadStack) -> StackPosition:
    """Where a thread is, judged by the frames of torch inside the user's innermost frame."""
    user = user_frame(stack.frames)
    library_frames = stack.frames
    if user is not None:
        library_frames = stack.frames[: stack.frames.index(user)]

    blocking_calls = [frame for frame in library_frames if _is_blocking_call(frame)]
    if not blocking_calls:
        is_waiting_for_device = any(_is_device_synchronization(frame) for frame in library_frames)
        return StackPosition("synchronize" if is_waiting_for_device else "", user)

    # The outermost call is the one that the user made: barrier, say, and not the all_reduce
    # inside it.
    call = blocking_calls[-1]
    op = operation_family(call.name)
    return StackPosition(
        op,
        user,
        peer=_peer_argument(op, call.values),
        tag=_integer_argument(call.values, ("tag",)),
        on_default_group=call.values.get("group", "None") == "None",
    )


def _is_blocking_call(frame: StackFrame) -> bool:
    if not _TORCH_DISTRIBUTED_FILE.search(frame.file):
        return False
    if is_known_operation(frame.name):
        return True
    return frame.name in JOB_WIDE_CALLS or frame.name in _OTHER_BLOCKING_CALLS


def _is_device_synchronization(frame: StackFrame) -> bool:
    return frame.name in _SYNCHRONIZE_CALLS and "torch/" in frame.file


def _peer_argument(op: str, values: Mapping[str, str]) -> int | None:
    if op not in P2P_OPS:
        return None
    names = ("dst", "group_dst") if op == "send" else ("src", "group_src")
    return _integer_argument(values, names)


def _integer_argument(values: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of these local variables that holds a non-negative integer."""
    for name in names:
        text = str(values.get(name, ""))
        if re.fullmatch(r"\d{1,7}", text):
            return int(text)
    return None
