"""What the file says that a failing start-up meets: ports that something else has, files that an
earlier run has left.
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
from distsim.scenario.startup.init_method import rendezvous_info as address_of
from distsim.scenario.startup.records import RendezvousInfo, StartupResult

_EARLIER_RUN_TIMEOUT_S = 60


@contextmanager
def inject_startup_faults(
    scenario: Scenario, startup: StartupResult | None, address: str
) -> Iterator[None]:
    """Ports held and files written while the run lasts; files that ranks meet in are gone
    afterwards.

    Raises EnvironmentFault for what this machine does not let one do.
    """
    fresh = sorted(
        {
            Path(path)
            for path in _rendezvous_files(startup)
            if path not in scenario.launch.files_left
        }
    )
    for path in fresh:
        check_rendezvous_file(path.as_uri())
    doors: list[socket.socket] = []
    left: list[Path] = []
    try:
        doors.extend(
            listen(address, port, allow_other_port=False)[0] for port in scenario.launch.ports_taken
        )
        left.extend(
            _write_leftover_file(Path(name), scenario.world.size)
            for name in scenario.launch.files_left
        )
        yield
    finally:
        for door in doors:
            door.close()
        for path in (*left, *fresh):
            with suppress(OSError):
                path.unlink()


def _rendezvous_files(startup: StartupResult | None) -> Iterator[str]:
    """The files that ranks are told to meet in."""
    for entrance in startup.entrances if startup is not None else ():
        here = address_of(entrance)
        if isinstance(here, RendezvousInfo) and here.kind == "file":
            yield here.path


def _write_leftover_file(path: Path, world_size: int) -> Path:
    """A file as a run leaves it that was killed: its processes met there, and are gone."""
    if not path.parent.is_dir():
        raise EnvironmentFault(
            f"there is no folder {path.parent} for {path}", "name a file in a folder that exists"
        )
    if path.exists():
        raise EnvironmentFault(
            f"{path} is there already, and files_left would write it",
            "remove it, or name another one",
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
