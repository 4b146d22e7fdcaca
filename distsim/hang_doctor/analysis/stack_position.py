"""What a stack says about the position of a rank: in which torch call it is, and at which line.

A stack shows Python functions only. A wait on a handle (``work.wait()``) runs in C++ and therefore
looks the same as a slow line of the user's own code; ``model.phrases.may_hide_a_wait`` judges such
lines. Frames of torch, DeepSpeed and Megatron in which ranks wait are listed in ``_WAITING_FRAMES``
by their source file and function (torch 2.13, DeepSpeed 0.16, Megatron Core 0.11). Reading stacks
from files is the job of ``readers.stacks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
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
_OTHER_BLOCKING_CALLS: Final = ("batch_isend_irecv", "split_group", "destroy_process_group")
#: Positions in which a rank certainly waits for other ranks.
PIPELINE_MESSAGE: Final = "a message between pipeline stages"
HANDLE_WAIT: Final = "a wait for a collective"
STORE_WAIT: Final = "a wait at the rendezvous store"
#: Positions in which a rank waits for other ranks, or computes: a stack does not show which.
BACKWARD: Final = "backward"
FSDP: Final = "an FSDP all_gather or reduce_scatter"
DDP: Final = "DDP's synchronisation"
DEEPSPEED: Final = "a DeepSpeed collective"
MEGATRON: Final = "Megatron's gradient or parameter synchronisation"
#: Positions in which a rank waits for something on its own node.
DATA_LOADER: Final = "its DataLoader"
SYNCHRONIZE: Final = "synchronize"
PROGRAM_END: Final = "the end of its program"

CERTAIN_WAITS: Final = (PIPELINE_MESSAGE, HANDLE_WAIT, STORE_WAIT)
POSSIBLE_WAITS: Final = (BACKWARD, FSDP, DDP, DEEPSPEED, MEGATRON)
_SYNCHRONIZE_CALLS: Final = ("synchronize", "_synchronize")

#: Where files lie that the user did not write. py-spy shortens some paths to the part after
#: site-packages or the standard library, hence the last two alternatives.
_LIBRARY_FILE: Final = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3[^/]*|multiprocessing|concurrent/futures)/"
    r"|^<|^torch/"
    r"|^(threading|selectors|socket|queue|subprocess|contextlib|runpy|ssl|functools|inspect)\.py$"
    r"|^(distributed_c10d|c10d_logger|dataloader)\.py$|(^|/)megatron/core/"
    r"|^(multiprocessing|concurrent|asyncio|importlib|numpy|accelerate|deepspeed|lightning"
    r"|pytorch_lightning|transformers|datasets)/"
)
#: DeepSpeed's ``comm`` has a function of the same name for each call of torch.distributed.
_COMMUNICATION_FILE: Final = re.compile(
    r"(^|/)torch/distributed/|(^|/)deepspeed/comm/|(^|/)deepspeed/runtime/pipe/p2p\.py$"
)


class _WaitingFrame(NamedTuple):
    """Functions of a source file in which a rank waits. No names: all functions of the file."""

    position: str
    file: re.Pattern[str]
    names: frozenset[str] = frozenset()


def _frame(position: str, file: str, names: str = "") -> _WaitingFrame:
    return _WaitingFrame(position, re.compile(f"(^|/){file}"), frozenset(names.split()))


#: The more specific first: the first that any frame of the stack matches is the position.
_WAITING_FRAMES: Final = (
    _frame(PIPELINE_MESSAGE, r"torch/distributed/pipelining/schedules\.py$", "_wait_batch_p2p"),
    _frame(PIPELINE_MESSAGE, r"megatron/core/pipeline_parallel/p2p_communication\.py$"),
    _frame(PIPELINE_MESSAGE, r"deepspeed/runtime/pipe/p2p\.py$", "send recv wait _send _recv"),
    _frame(HANDLE_WAIT, r"torch/distributed/_functional_collectives\.py$", "wait_tensor wait"),
    _frame(
        STORE_WAIT,
        r"torch/distributed/elastic/utils/store\.py$",
        "barrier synchronize get_all _barrier_nonblocking",
    ),
    _frame(
        FSDP,
        r"torch/distributed/fsdp/",
        "wait_for_unshard unshard post_backward "
        "foreach_all_gather foreach_all_gather_copy_out foreach_reduce finalize_backward "
        "_unshard _wait_for_computation_stream _all_gather_flat_param _reduce_grad "
        "_post_backward_hook _post_backward_final_callback _root_pre_forward _pre_forward_unshard",
    ),
    _frame(
        DEEPSPEED,
        r"deepspeed/runtime/",
        "fetch_sub_module __all_gather_params "
        "_all_gather_params all_gather_coalesced average_tensor allreduce_bucket "
        "allreduce_gradients reduce_gradients buffered_allreduce_fallback "
        "reduce_independent_p_g_buckets_and_remove_grads independent_gradient_partition_epilogue",
    ),
    _frame(
        MEGATRON,
        r"megatron/core/distributed/",
        "start_grad_sync finish_grad_sync start_param_sync finish_param_sync finalize_model_grads",
    ),
    _frame(
        DDP,
        r"torch/nn/parallel/distributed\.py$",
        "_sync_module_states _sync_buffers "
        "_sync_params_and_buffers _pre_forward _verify_model_across_ranks",
    ),
    _frame(
        DATA_LOADER,
        r"(torch/utils/data/)?dataloader\.py$",
        "_try_get_data _get_data _next_data _shutdown_workers",
    ),
    # Python waits there for the threads that are not daemons.
    _frame(PROGRAM_END, r"threading\.py$", "_shutdown"),
    _frame(BACKWARD, r"torch/autograd/(graph|__init__)\.py$", "_engine_run_backward backward grad"),
)


class StackPosition(NamedTuple):
    """Where a thread is.

    ``op`` is the family of the communication call that the thread is in, or one of the positions
    above, and empty for host code. ``frame`` is the line of the user's code. ``peer`` and ``tag``
    are known only if the stack has local variables.
    """

    op: str
    frame: StackFrame | None
    peer: int | None = None
    tag: int | None = None
    #: The call has no group argument, so it is on the default group.
    on_default_group: bool = True

    @property
    def is_local_wait(self) -> bool:
        """Whether the thread waits for something on its own node, not for other ranks."""
        return self.op in (DATA_LOADER, SYNCHRONIZE, PROGRAM_END)

    @property
    def may_wait_for_ranks(self) -> bool:
        """Whether the thread is, or may be, in a wait for other ranks."""
        return bool(self.op) and not self.is_local_wait


@lru_cache(4096)
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
    if user is not None and not is_library_file(user.file):
        library_frames = stack.frames[: stack.frames.index(user)]

    blocking_calls = [frame for frame in library_frames if _is_blocking_call(frame)]
    if not blocking_calls:
        return StackPosition(_library_position(library_frames), user)

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


def _library_position(frames: Sequence[StackFrame]) -> str:
    """The position that frames of libraries show without a communication call."""
    if any(_is_device_synchronization(frame) for frame in frames):
        return SYNCHRONIZE
    for waiting in _WAITING_FRAMES:
        if any(_matches(waiting, frame) for frame in frames):
            return waiting.position
    return ""


def _matches(waiting: _WaitingFrame, frame: StackFrame) -> bool:
    if waiting.names and frame.name not in waiting.names:
        return False
    return waiting.file.search(frame.file) is not None


def _is_blocking_call(frame: StackFrame) -> bool:
    if not _COMMUNICATION_FILE.search(frame.file):
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
