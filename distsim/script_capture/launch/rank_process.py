"""The process of a rank: the script runs in it as Python would run it.

The process installs the patches, runs the script, and reports to the hub how it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Final, NamedTuple

from distsim.script_capture.cuda.emulation import CPU_ALIASED, CudaEmulation, stream_log
from distsim.script_capture.cuda.graphs import set_graph_hooks
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.elastic_ranks import patch_elastic_agent
from distsim.script_capture.launch.rank_environment import RANK_VARIABLE
from distsim.script_capture.launch.rank_output import write_whole_lines
from distsim.script_capture.patches.backward_origin import ForwardLineRecorder
from distsim.script_capture.patches.dynamo import exclude_from_dynamo
from distsim.script_capture.patches.unsupported import refuse_subprocess_ranks
from distsim.script_capture.protocol.message_types import ProcessExit
from distsim.script_capture.protocol.wire import HubAddress, SharedMemoryRegions
from distsim.script_capture.rank.call_sites import CallSiteFinder
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.exit_reason import exit_of_exception
from distsim.script_capture.rank.graph_calls import ClientGraphHooks
from distsim.script_capture.rank.line_trace import LineTrace

#: prctl(2): set the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG: Final = 1
#: Frames between the script and `HubClient.report_streams`, if C++ calls it.
_DIRECT_DEPTH: Final = 3
#: Functions that end a process, or replace it by another program, without running Python's exit.
_ENDING_FUNCTIONS: Final = (
    (os, ("_exit", "abort", "kill", "execv", "execve")),
    (signal, ("raise_signal",)),
)


class ChildOptions(NamedTuple):
    """``counts``: report what a rank computes. ``fakes``: its tensors have sizes only.

    ``alias_devices``: so many GPUs that are the CPU by another name, 0 for what the parent has.
    ``prefixes``: begin each line of output with the rank. ``checks_values``: report checksums of
    values that must be equal on several ranks.
    """

    counts: bool = False
    fakes: bool = False
    alias_devices: int = 0
    prefixes: bool = False
    checks_values: bool = False


_DEFAULT_OPTIONS: Final = ChildOptions()


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends; now, if the parent has ended already."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _end_forks_with_parent() -> None:
    """Let what a rank forks end with the rank."""
    parent = [os.getpid()]

    def before_fork() -> None:
        parent[0] = os.getpid()

    os.register_at_fork(before=before_fork, after_in_child=lambda: die_with_parent(parent[0]))


def run_rank_process(
    target: CaptureTarget,
    environment: Mapping[str, str],
    address: HubAddress,
    regions: SharedMemoryRegions,
    child_options: ChildOptions = _DEFAULT_OPTIONS,
    line_trace: LineTrace | None = None,
) -> int:
    """Run a rank. Returns its exit status.

    ``line_trace``: where it writes the lines that it executes; None if they are not traced.
    """
    _end_forks_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all ranks
    os.environ.update(environment)
    write_whole_lines(_output_prefix() if child_options.prefixes else "")
    if child_options.alias_devices:
        CudaEmulation(CPU_ALIASED, "").install(child_options.alias_devices)
    client = HubClient(address, regions, CallSiteFinder(target.file))
    client.streams = stream_log()
    if client.streams is not None:
        client.streams.call_on_host_wait(partial(client.report_streams, _DIRECT_DEPTH))
    set_graph_hooks(ClientGraphHooks(client))
    _limit_torch_threads()
    _flush_before_exit(client)

    def work() -> None:
        _install_patches(client)
        if child_options.checks_values:
            from distsim.script_capture.patches.value_probes import ValueProbes

            ValueProbes(client).install()
        if line_trace is not None:
            line_trace.start(client.sites.is_own, client.sites.shown)
            client.sites.on_call = line_trace.write_stack
        _run_with_options(child_options, client, target)

    return run_and_report_exit(client, work)


def _output_prefix() -> str:
    rank = os.environ.get(RANK_VARIABLE)
    return f"[rank{rank}] " if rank is not None else ""


def _install_patches(client: HubClient) -> None:
    """Patch torch. Raises UnsupportedError if this torch lacks a name that the patches need."""
    import torch

    try:
        from distsim.script_capture.patches.install import install_patches
        from distsim.script_capture.patches.start_methods import patch_start_methods

        install_patches(client)
        patch_start_methods(client)
        patch_elastic_agent(client)
        refuse_subprocess_ranks()
        recorder = ForwardLineRecorder(client.sites)
        recorder.install()
        client.sites.forward_line = recorder.line
        exclude_from_dynamo()
    except (AttributeError, ImportError, TypeError) as error:
        raise UnsupportedError(
            f"distsim capture does not support torch {torch.__version__}: use torch 2.13,"
            f" and report this error: {error}"
        ) from error


def _flush_before_exit(client: HubClient) -> None:
    """Let a process that ends itself, or becomes another program, first send its calls."""
    for module, names in _ENDING_FUNCTIONS:
        for name in names:
            setattr(module, name, _after_flush(client, getattr(module, name)))


def _after_flush(client: HubClient, original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        client.flush()
        return original(*args, **kwargs)

    return run


def _limit_torch_threads() -> None:
    """One thread for each rank, as torchrun sets it for several ranks.

    A fork has none of its parent's worker threads, and would wait for them for ever in the first
    operation that uses several.

    What this process forks sets its own number at once. After a fork, the first thread to do so
    abandons the parent's pool. autograd's threads do it when they start, may find no pool
    meanwhile, and abort ("Invalid thread pool!", caffe2/utils/threadpool).
    """
    import torch

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def _run_with_options(
    child_options: ChildOptions, client: HubClient, target: CaptureTarget
) -> object:
    """Run the target inside the modes that were asked for."""
    with ExitStack() as modes:
        if child_options.fakes:
            from distsim.script_capture.patches.fake_tensors import fake_tensor_mode

            modes.enter_context(fake_tensor_mode())
        if child_options.checks_values and not child_options.fakes:
            from distsim.script_capture.patches.race_probes import RaceProbes

            modes.enter_context(RaceProbes(client).install())
        if child_options.counts:
            from distsim.script_capture.compute.kernel_counter import count_kernels

            client.counter = modes.enter_context(count_kernels())
            if client.streams is not None:
                client.counter.before_kernel = client.report_streams
        return target.run()


def run_and_report_exit(client: HubClient, work: Callable[[], object]) -> int:
    """Run ``work``, report to the hub how it ended, and return the exit status."""
    end = ProcessExit("ended")
    try:
        work()
    except BaseException as error:
        end = exit_of_exception(client, error)
        _print_traceback(client, error, end)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if end.how != "ended" and not client.joined:
        client.join(-1, -1)  # it failed before it became a rank, and the hub must know why
    if client.joined:
        client.report_computed(at_end=True)
        client.request(["end", *end])
    return end.code


def _print_traceback(client: HubClient, error: BaseException, end: ProcessExit) -> None:
    """Print what Python prints, with the rank before each line as torch does."""
    text = end.trace
    if isinstance(error, SystemExit):
        is_message = error.code is not None and not isinstance(error.code, int)
        text = f"{error.code}\n" if is_message else ""
    prefix = f"[rank{client.rank}]: " if client.rank >= 0 and end.trace else ""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{prefix}{line}" for line in text.splitlines(keepends=True)))
