"""Stores of one rank's process: the one that a file's `store:` means, and the one that rank 0 of a
failing start-up serves.
"""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from distsim.common.errors import EnvironmentFault
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.model import Program
from distsim.real.shared.job import LOOPBACK
from distsim.real.shared.rendezvous import listen
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.scenario.startup.records import RendezvousInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def create_store(dist: ModuleType, call: ResolvedCall, timeout_ns: int) -> Store | None:
    """The store that `store:` names; None for one that distsim does not know, which torch is to
    refuse.
    """
    url, limit = urlsplit(call.store or ""), timedelta(microseconds=timeout_ns // 1000)
    world = call.world_size_argument or call.group.size
    found: Store | None = None
    if call.store == "hash":
        found = dist.HashStore()
    elif url.scheme == "file":
        found = dist.FileStore(url.path, world)
    elif url.scheme == "tcp" and url.hostname and url.port:
        found = _tcp_store(dist, url.hostname, url.port, world, call.rank_argument == 0, limit)
    if found is not None:
        found.set_timeout(limit)
    return found


def serve_startup_store(dist: ModuleType, program: Program, rank: int) -> Store | None:
    """The store of the rank that serves it in a start-up that fails, at a loopback address there
    alone: torch itself would listen on every address of the machine. None where this rank serves
    none, or where the port is taken: torch is to say so."""
    entrance = program.startup.entrance(rank) if program.startup is not None else None
    here = rendezvous_info(entrance) if entrance is not None else None
    if (
        entrance is None
        or not isinstance(here, RendezvousInfo)
        or here.kind != "tcp"
        or here.rank != 0
        or entrance.agent
    ):
        return None
    if here.host not in LOOPBACK or entrance.store is not None or here.world_size < 1:
        return None
    limit = timedelta(microseconds=entrance.timeout_ns // 1000)
    try:
        store = _tcp_store(dist, here.host, here.port, here.world_size, True, limit)
    except EnvironmentFault:
        return None
    prefixed: Store = dist.PrefixStore("default_pg", store)
    return prefixed


def _tcp_store(
    dist: ModuleType, host: str, port: int, world: int, serves: bool, limit: timedelta
) -> Store:
    if not serves or host not in LOOPBACK:
        found: Store = dist.TCPStore(host, port, world, serves, timeout=limit)
        return found
    door, _ = listen(host, port, allow_other_port=False)
    found = dist.TCPStore(host, port, world, True, timeout=limit, master_listen_fd=door.detach())
    return found


def stated_rank_and_world(program: Program, rank: int, call: ResolvedCall) -> tuple[int, int]:
    """Rank and world size of a call that is given a store, as its init_method would have had
    them.
    """
    entrance = program.startup.entrance(rank) if program.startup is not None else None
    here = rendezvous_info(entrance) if entrance is not None else None
    if isinstance(here, RendezvousInfo):
        return here.rank, here.world_size
    return (
        -1 if call.rank_argument is None else call.rank_argument,
        -1 if call.world_size_argument is None else call.world_size_argument,
    )
