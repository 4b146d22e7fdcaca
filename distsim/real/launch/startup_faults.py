"""Creates the conditions under which a scenario's start-up fails.

These are ports that another process has taken, and rendezvous files of an earlier run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

from distsim.common.errors import EnvironmentFault
from distsim.real.shared.rendezvous import check_rendezvous_file, listen
from distsim.scenario import Scenario
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.scenario.startup.records import RendezvousInfo, StartupResult

_EARLIER_RUN_TIMEOUT_S = 60


@contextmanager
def inject_startup_faults(
    scenario: Scenario, startup: StartupResult | None, address: str
) -> Iterator[None]:
    """Occupy ports and write files while the block runs; remove all rendezvous files afterwards.

    Raises EnvironmentFault if this machine does not allow that.
    """
    launch = scenario.launch
    leftover_names = launch.files_left
    fresh = sorted(
        {Path(path) for path in _rendezvous_files(startup) if path not in leftover_names}
    )
    for path in fresh:
        check_rendezvous_file(path.as_uri())
    sockets: list[socket.socket] = []
    leftover: list[Path] = []
    try:
        # Generators, so that a failure in the middle still cleans up the earlier ones.
        sockets.extend(
            listen(address, port, allow_other_port=False)[0] for port in launch.ports_taken
        )
        leftover.extend(
            _write_leftover_file(Path(name), scenario.world.size) for name in leftover_names
        )
        yield
    finally:
        for listening in sockets:
            listening.close()
        for path in (*leftover, *fresh):
            with suppress(OSError):
                path.unlink()


def _rendezvous_files(startup: StartupResult | None) -> Iterator[str]:
    """The files that ranks use as their rendezvous."""
    for process in startup.entrances if startup is not None else ():
        rendezvous = rendezvous_info(process)
        if isinstance(rendezvous, RendezvousInfo) and rendezvous.kind == "file":
            yield rendezvous.path


def _write_leftover_file(path: Path, world_size: int) -> Path:
    """Write a rendezvous file as a killed run leaves it, by letting processes meet in it."""
    if not path.parent.is_dir():
        raise EnvironmentFault(
            f"there is no folder {path.parent} for {path}", "name a file in a folder that exists"
        )
    if path.exists():
        raise EnvironmentFault(
            f"{path} exists already, and files_left would overwrite it",
            "remove it, or name another file",
        )
    earlier = [
        get_context("fork").Process(
            target=_run_earlier_rank, args=(str(path), rank, world_size), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in earlier:
        process.start()
    for process in earlier:
        process.join(_EARLIER_RUN_TIMEOUT_S)
        if process.is_alive():
            process.kill()
    return path


def _run_earlier_rank(path: str, rank: int, world_size: int) -> None:
    import torch.distributed

    dist: ModuleType = torch.distributed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(path, world_size)
    limit = timedelta(seconds=_EARLIER_RUN_TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    os._exit(0)
