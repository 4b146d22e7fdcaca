"""A process of the program: the script runs in it as Python would run it, and how it ends is told
to the hub.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Final, NamedTuple

from distsim.script_capture.hub.state import ProcessExit
from distsim.script_capture.launch.preload import preload_lazy_torch_modules
from distsim.script_capture.patches.backward_origin import ForwardLineRecorder
from distsim.script_capture.patches.dynamo import exclude_from_dynamo
from distsim.script_capture.patches.fake_tensors import fake_tensor_error
from distsim.script_capture.patches.unsupported import (
    refuse_subprocess_ranks,
    symmetric_memory_error,
)
from distsim.script_capture.protocol.wire import SharedMemoryRegions
from distsim.script_capture.rank.call_sites import NO_CALL_SITE, CallSiteFinder
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.tensor_payloads import UnsupportedError

#: prctl(2): the signal that a process gets when its parent ends.
_PDEATHSIG = 1
#: Files of distsim itself; a script may lie in a folder of that name.
_PACKAGE_FOLDER = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), ""
)
#: Where an object lies, in Python's plain text of it: another number in each process and each run,
#: so one error would read as many.
_OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


@dataclass(frozen=True)
class CaptureTarget:
    """What runs: a file, or with ``module`` a module's name; or a function of Python."""

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    function: Callable[[], object] | None = None
    home: str = ""


def function_target(
    function: Callable[..., object],
    backend: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    init: bool,
) -> CaptureTarget:
    """What the ranks run: the function, with ``init`` between the making of the world and its end.
    Loads torch, which they share.
    """
    import torch.distributed as dist

    def work() -> None:
        if init:
            dist.init_process_group(backend)
        function(*args, **kwargs)
        if init and dist.is_initialized():
            dist.destroy_process_group()

    code = getattr(function, "__code__", None)
    home = code.co_filename if code is not None else ""
    preload_lazy_torch_modules(home)
    return CaptureTarget(getattr(function, "__qualname__", "function"), function=work, home=home)


class ChildOptions(NamedTuple):
    """``counts``: what a rank computes is told too. ``fakes``: its tensors have sizes alone."""

    counts: bool = False
    fakes: bool = False


def die_with_parent(parent: int) -> None:
    """A process that nobody is there for any more ends: with its parent, or now where that one has
    ended before it could say so.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _end_forks_with_parent() -> None:
    """What a rank forks ends with the rank."""
    forking = [os.getpid()]
    os.register_at_fork(
        before=lambda: forking.__setitem__(0, os.getpid()),
        after_in_child=lambda: die_with_parent(forking[0]),
    )


def run_rank_process(
    target: CaptureTarget,
    environment: Mapping[str, str],
    address: str,
    regions: SharedMemoryRegions,
    child_options: ChildOptions = ChildOptions(),
) -> int:  # noqa: B008 - frozen
    """The life of a rank. Returns its exit status."""
    _end_forks_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
    os.environ.update(environment)
    client = HubClient(
        address, regions, CallSiteFinder(target.home or ("" if target.module else target.name))
    )
    _limit_torch_threads()
    _flush_before_exit(client)

    def work() -> None:
        _install_patches(client)
        _run_with_options(child_options, client, target)

    return run_and_report_exit(client, work)


def _install_patches(client: HubClient) -> None:
    """Make this process's torch.distributed the hub's. Raises Unsupported for a torch of another
    build than those that are known.
    """
    import torch

    try:
        from distsim.script_capture.patches.install import install_patches
        from distsim.script_capture.patches.start_methods import patch_start_methods

        install_patches(client)
        patch_start_methods(client)
        refuse_subprocess_ranks()
        forward = ForwardLineRecorder(client.sites)
        forward.lay()
        client.sites.forward = forward.line
        exclude_from_dynamo()
    except (AttributeError, ImportError, TypeError) as error:
        raise UnsupportedError(
            f"distsim capture does not know torch {torch.__version__}: try torch 2.13, and report: {error}"
        ) from error


def _flush_before_exit(client: HubClient) -> None:
    """A process that ends itself, or becomes another program, says before what it has called."""
    for module, names in (
        (os, ("_exit", "abort", "kill", "execv", "execve")),
        (signal, ("raise_signal",)),
    ):
        for name in names:
            setattr(module, name, _after_flush(client, getattr(module, name)))


def _after_flush(client: HubClient, original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        client.flush()
        return original(*args, **kwargs)

    return run


def _limit_torch_threads() -> None:
    """As torchrun has it for several ranks. A fork has none of its parent's workers, and would wait
    for them for ever in the first operation that is shared out.

    What this process forks sets its own count at once: after a fork the first to do so lays the
    parent's pool aside, and autograd's threads, which do it when they begin, may find none
    meanwhile and abort ("Invalid thread pool!", caffe2/utils/threadpool).
    """
    import torch

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def _run_with_options(
    child_options: ChildOptions, client: HubClient, target: CaptureTarget
) -> object:
    """Run the target with what was asked for around it."""
    with ExitStack() as around:
        if child_options.fakes:
            from distsim.script_capture.patches.fake_tensors import fake_tensor_mode

            around.enter_context(fake_tensor_mode())
        if child_options.counts:
            from distsim.script_capture.compute.kernel_counter import count_kernels

            client.counted = around.enter_context(count_kernels())
        return _run_target(target)


def run_and_report_exit(client: HubClient, work: Callable[[], object]) -> int:
    """Run it, tell the hub how it ended, return the status."""
    end = ProcessExit("ended")
    try:
        work()
    except BaseException as error:
        end = exit_of_exception(client, error)
        _print_traceback(client, error, end)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if (
        end.how != "ended" and not client.joined
    ):  # before it was a rank; why must be known all the same
        client.join(-1, -1)
    if client.joined:
        client.report_computed(at_end=True)
        client.ask(["end", *end])
    return end.code


def exit_of_exception(client: HubClient, error: BaseException) -> ProcessExit:
    """How a process ends that leaves by this exception."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        place = client.sites.of_traceback(error) if code else NO_CALL_SITE
        return ProcessExit(
            "exited" if code else "ended",
            code,
            _OBJECT_ADDRESS.sub("", str(error.code or "")),
            place,
        )
    first = _OBJECT_ADDRESS.sub(
        "",
        fake_tensor_error(error)
        or symmetric_memory_error(error)
        or traceback.format_exception_only(error)[-1].strip(),
    )
    refused = argument_error_code(error)
    trace = "".join(traceback.format_exception(_without_internal_frames(error)))
    return ProcessExit("raised", 1, first, client.sites.of_traceback(error), trace, refused)


def _print_traceback(client: HubClient, error: BaseException, end: ProcessExit) -> None:
    """What Python prints of it, with the rank before each line as torch does."""
    text = end.trace
    if isinstance(error, SystemExit):
        text = (
            f"{error.code}\n" if error.code is not None and not isinstance(error.code, int) else ""
        )
    rank = f"[rank{client.rank}]: " if client.rank >= 0 and end.trace else ""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{rank}{line}" for line in text.splitlines(keepends=True)))


def _without_internal_frames(error: BaseException) -> BaseException:
    """Without the frames of distsim and runpy above the script; of a script that can't be read
    nothing is left but the error.
    """
    trace = error.__traceback__
    while trace is not None and _is_internal_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return (
        error.with_traceback(trace)
        if trace is not None or isinstance(error, SyntaxError | OSError)
        else error
    )


def _is_internal_frame(file: str) -> bool:
    return (
        file.startswith(_PACKAGE_FOLDER)
        or file == "<frozen runpy>"
        or os.path.basename(file) == "runpy.py"
    )


def _run_target(target: CaptureTarget) -> object:
    import runpy

    if target.function is not None:
        return target.function()
    sys.argv = [target.name, *target.args]
    if target.module:
        sys.path.insert(0, os.getcwd())
        return runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(target.name)))
    return runpy.run_path(target.name, run_name="__main__")


def torchrun_environment(rank: int, ranks: int, local: int, nodes: int) -> dict[str, str]:
    """What torchrun sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    named: Sequence[tuple[str, object]] = (
        ("RANK", rank),
        ("LOCAL_RANK", rank % local),
        ("GROUP_RANK", rank // local),
        ("ROLE_RANK", rank),
        ("ROLE_NAME", "default"),
        ("WORLD_SIZE", ranks),
        ("LOCAL_WORLD_SIZE", local),
        ("GROUP_WORLD_SIZE", nodes),
        ("ROLE_WORLD_SIZE", ranks),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", 29500),
        ("TORCHELASTIC_RESTART_COUNT", 0),
        ("TORCHELASTIC_MAX_RESTARTS", 0),
        ("TORCHELASTIC_RUN_ID", "distsim"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    )
    return {name: str(value) for name, value in named}


# --- calls that torch does not take: it raises before anything is sent ---
#: Files whose own checks of arguments raise: torch's, and the hub's group in the place of a back
#: end's.
_ARGUMENT_CHECK_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "distsim/script_capture/rank/process_group.py",
)
#: What torch says (torch/distributed/distributed_c10d.py) and the finding's code; of what is not
#: here, DS112.
_ARGUMENT_ERRORS: Final = (
    (r"Invalid rank|is not part of group", "DS101"),
    (r"should not be the same as the rank of the current process", "DS102"),
    (r"Default process group has not been initialized", "DS108"),
    (r"trying to initialize the default process group twice", "DS109"),
    (
        r"new group's rank should be|[Rr]ank -?\d+ is out of range|the new group.*unique|ranks list contains duplicate",
        "DS111",
    ),
    (r"only (implemented|supported) for|not supported by|does not support", "DS704"),
    (r"[Ss]plits? .*(sum|match|add)|split.*(dim|size)", "DS107"),
)
_ROOTED_COLLECTIVES: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})


def argument_error_code(error: BaseException) -> str:
    """The code of a finding where torch took exception to an argument of a call, else "". What the
    script raises is no refusal.
    """
    trace = error.__traceback__
    names: list[str] = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        if trace.tb_next is None and not _is_argument_check(trace):
            return ""
        trace = trace.tb_next
    if (
        not names
        or not isinstance(error, ValueError | TypeError | RuntimeError)
        or "distsim capture does not" in str(error)
    ):
        return ""
    code = next((code for words, code in _ARGUMENT_ERRORS if re.search(words, str(error))), "DS112")
    return "DS103" if code == "DS101" and not _ROOTED_COLLECTIVES.isdisjoint(names) else code


def _is_argument_check(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_ARGUMENT_CHECK_FILES)
