"""Stores of one rank's process: the one that a file's `store:` means, and the one that rank 0 of a failing start-up serves."""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from distsim.errors import EnvironmentFault
from distsim.ops.records import Call
from distsim.program.records import Program
from distsim.real.job import LOOPBACK
from distsim.real.rendezvous import listen
from distsim.startup.address import address
from distsim.startup.records import Address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def made(dist: ModuleType, call: Call, timeout_ns: int) -> Store | None:
    """The store that `store:` names; None for one that distsim does not know, which torch is to refuse."""
    url, limit = urlsplit(call.store or ""), timedelta(microseconds=timeout_ns // 1000)
    world = call.said_world or call.group.size
    found: Store | None = None
    if call.store == "hash":
        found = dist.HashStore()
    elif url.scheme == "file":
        found = dist.FileStore(url.path, world)
    elif url.scheme == "tcp" and url.hostname and url.port:
        found = _tcp(dist, url.hostname, url.port, world, call.said_rank == 0, limit)
    if found is not None:
        found.set_timeout(limit)
    return found


def served(dist: ModuleType, program: Program, rank: int) -> Store | None:
    """The store of the rank that serves it in a start-up that fails, at a loopback address there alone: torch itself would listen on
    every address of the machine. None where this rank serves none, or where the port is taken: torch is to say so."""
    entrance = program.startup.entrance(rank) if program.startup is not None else None
    here = address(entrance) if entrance is not None else None
    if entrance is None or not isinstance(here, Address) or here.kind != "tcp" or here.rank != 0 or entrance.agent:
        return None
    if here.host not in LOOPBACK or entrance.store is not None or here.world_size < 1:
        return None
    limit = timedelta(microseconds=entrance.timeout_ns // 1000)
    try:
        store = _tcp(dist, here.host, here.port, here.world_size, True, limit)
    except EnvironmentFault:
        return None
    prefixed: Store = dist.PrefixStore("default_pg", store)
    return prefixed


def _tcp(dist: ModuleType, host: str, port: int, world: int, serves: bool, limit: timedelta) -> Store:
    if not serves or host not in LOOPBACK:
        found: Store = dist.TCPStore(host, port, world, serves, timeout=limit)
        return found
    door, _ = listen(host, port, may_move=False)
    found = dist.TCPStore(host, port, world, True, timeout=limit, master_listen_fd=door.detach())
    return found


def said(program: Program, rank: int, call: Call) -> tuple[int, int]:
    """Rank and world size of a call that is given a store, as its init_method would have had them."""
    entrance = program.startup.entrance(rank) if program.startup is not None else None
    here = address(entrance) if entrance is not None else None
    if isinstance(here, Address):
        return here.rank, here.world_size
    return -1 if call.said_rank is None else call.said_rank, -1 if call.said_world is None else call.said_world
