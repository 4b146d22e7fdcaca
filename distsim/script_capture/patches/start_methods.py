"""Scripts that start their ranks themselves: `mp.spawn` and `mp.Process` leave by fork, so that
their processes stay patched.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from distsim.script_capture.hub.state import ProcessExit, exit_of_status
from distsim.script_capture.rank.client import HubClient


def patch_start_methods(client: HubClient) -> None:
    """Replace the start methods of `multiprocessing` and of torch's in this process."""
    import multiprocessing
    import multiprocessing.context as context

    torch_mp: Any = import_module("torch.multiprocessing")
    fork = multiprocessing.get_context("fork")

    class Forked(fork.Process):  # type: ignore[name-defined,misc]
        """A process that tells the hub how it ended."""

        def run(self) -> None:
            from distsim.script_capture.launch.rank_process import exit_of_exception

            try:
                super().run()
            except BaseException as error:
                if client.joined:
                    hidden = (
                        error.__context__ if isinstance(error, SystemExit) else None
                    )  # torch's wrapper leaves by sys.exit
                    client.ask(["end", *exit_of_exception(client, hidden or error)])
                raise
            if client.joined:
                client.ask(["end", *ProcessExit("ended")])

    class Spawned(Forked):
        """One that would be a new Python: the groups of who starts it are none of its own."""

        def run(self) -> None:
            import_module("torch.distributed.distributed_c10d").GroupMember.WORLD = None
            super().run()

    places: list[Any] = [multiprocessing, torch_mp, context.ForkContext]
    for place in places:
        place.Process = Forked
    for place in (context.SpawnContext, context.ForkServerContext):
        place.Process = Spawned
    _report_killed_children(client)
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]
    torch_mp.spawn = spawning.spawn = _spawn_replacement(client)
    torch_mp.start_processes = spawning.start_processes = _start_by_fork(spawning.start_processes)


def _report_killed_children(client: HubClient) -> None:
    """Whoever started a process hears that a signal ended it; the hub, which did not start it, is
    told. Not of SIGTERM: `mp.spawn` ends the others by it once one has failed."""
    popen: Any = import_module("multiprocessing.popen_fork").Popen
    original = popen.poll

    def poll(self: Any, flag: int = os.WNOHANG) -> int | None:
        before = self.returncode
        code: int | None = original(self, flag)
        if before is None and code is not None and code < 0 and code != -signal.SIGTERM:
            client.join(-1, -1)
            client.say(["killed", self.pid, *exit_of_status(code)])
        return code

    popen.poll = poll


def _start_by_fork(original: Callable[..., object]) -> Callable[..., object]:
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
    def spawn(
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        """In a rank that was started as one, run its share; else fork the ranks."""
        ranks = os.environ.get("DISTSIM_RANKS")
        if ranks is None or client.joined:
            return sys.modules["torch.multiprocessing.spawn"].start_processes(
                fn, args, nprocs, join, daemon
            )
        if int(ranks) != nprocs:
            raise SystemExit(
                f"the script spawns {nprocs} processes itself: leave --nproc out, or give --nproc {nprocs}"
            )
        fn(int(os.environ["RANK"]), *args)
        return None

    return spawn
