"""Scripts that start their ranks themselves, with `mp.spawn` or `mp.Process`.

Whatever start method the script asks for, the processes are forked: a new Python would not have the
patches of this one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from distsim.script_capture.protocol.message_types import ProcessExit, exit_of_status
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.exit_reason import exit_of_exception


def patch_start_methods(client: HubClient) -> None:
    """Replace the start methods of `multiprocessing` and of torch's in this process."""
    import multiprocessing
    from multiprocessing import context

    torch_mp: Any = import_module("torch.multiprocessing")
    fork = multiprocessing.get_context("fork")

    class ForkedProcess(fork.Process):  # type: ignore[name-defined,misc]
        """A process that reports to the hub how it ends."""

        def run(self) -> None:
            try:
                super().run()
            except BaseException as error:
                if client.joined:
                    # torch's wrapper reports an error to its parent and leaves by sys.exit.
                    hidden = error.__context__ if isinstance(error, SystemExit) else None
                    client.request(["end", *exit_of_exception(client, hidden or error)])
                raise
            if client.joined:
                client.request(["end", *ProcessExit("ended")])

    class SpawnedProcess(ForkedProcess):
        """A process that would be a new Python: it has none of the groups of its parent."""

        def run(self) -> None:
            import_module("torch.distributed.distributed_c10d").GroupMember.WORLD = None
            super().run()

    forking: list[Any] = [multiprocessing, torch_mp, context.ForkContext]
    for owner in forking:
        owner.Process = ForkedProcess
    spawning: list[Any] = [context.SpawnContext, context.ForkServerContext]
    for owner in spawning:
        owner.Process = SpawnedProcess
    _report_killed_children(client)
    torch_spawn: Any = sys.modules["torch.multiprocessing.spawn"]
    torch_mp.spawn = torch_spawn.spawn = _spawn_replacement(client)
    start_processes = _start_by_fork(torch_spawn.start_processes)
    torch_mp.start_processes = torch_spawn.start_processes = start_processes


def _report_killed_children(client: HubClient) -> None:
    """Report that a signal ended a child: the hub did not start it, so only its parent learns this.

    Except SIGTERM, by which `mp.spawn` ends the others once one has failed.
    """
    popen: Any = import_module("multiprocessing.popen_fork").Popen
    original = popen.poll

    def poll(self: Any, flag: int = os.WNOHANG) -> int | None:
        was_running = self.returncode is None
        code: int | None = original(self, flag)
        if was_running and code is not None and code < 0 and code != -signal.SIGTERM:
            client.join(-1, -1)
            client.send(["killed", self.pid, *exit_of_status(code)])
        return code

    popen.poll = poll


def _start_by_fork(original: Callable[..., object]) -> Callable[..., object]:
    """torch's start_processes, which forks whatever start method is asked for."""

    def start_processes(
        fn: object,
        args: object = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "fork",
        **_: object,
    ) -> object:
        return original(fn, args, nprocs, join, daemon, "fork")

    return start_processes


def _spawn_replacement(client: HubClient) -> Callable[..., object]:
    """The replacement for `torch.multiprocessing.spawn`."""

    def spawn(
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        """In a process that was started as a rank, run its share; otherwise fork the ranks."""
        started_ranks = os.environ.get("DISTSIM_RANKS")
        if started_ranks is None or client.joined:
            torch_spawn = sys.modules["torch.multiprocessing.spawn"]
            return torch_spawn.start_processes(fn, args, nprocs, join, daemon)
        if int(started_ranks) != nprocs:
            raise SystemExit(
                f"the script spawns {nprocs} processes itself: omit --nproc, or give"
                f" --nproc {nprocs}"
            )
        fn(int(os.environ["DISTSIM_RANK"]), *args)
        return None

    return spawn
