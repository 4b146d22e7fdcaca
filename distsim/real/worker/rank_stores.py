"""The stores that one rank's process creates itself.

They are the store that a scenario's `store:` names, and the store that rank 0 serves in a start-up
that fails.
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
    """The store that `store:` names; None for an unknown kind, which torch itself has to refuse."""
    url = urlsplit(call.store or "")
    timeout = timedelta(microseconds=timeout_ns // 1000)
    world_size = call.world_size_argument or call.group.size
    store: Store | None = None
    if call.store == "hash":
        store = dist.HashStore()
    elif url.scheme == "file":
        store = dist.FileStore(url.path, world_size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        serves = call.rank_argument == 0
        store = _tcp_store(dist, url.hostname, url.port, world_size, serves, timeout)
    if store is not None:
        store.set_timeout(timeout)
    return store


def serve_startup_store(dist: ModuleType, program: Program, rank: int) -> Store | None:
    """The store of the rank that serves it in a start-up that fails.

    It listens at a loopback address only; torch itself would listen on every address of the
    machine. None if this rank serves no store, or if the port is taken: then torch itself has to
    report it.
    """
    process = program.startup.entrance(rank) if program.startup is not None else None
    if process is None or process.agent or process.store is not None:
        return None
    rendezvous = rendezvous_info(process)
    if not isinstance(rendezvous, RendezvousInfo):
        return None
    is_server = rendezvous.kind == "tcp" and rendezvous.rank == 0
    if not is_server or rendezvous.host not in LOOPBACK or rendezvous.world_size < 1:
        return None
    timeout = timedelta(microseconds=process.timeout_ns // 1000)
    host, port, world_size = rendezvous.host, rendezvous.port, rendezvous.world_size
    try:
        store = _tcp_store(dist, host, port, world_size, True, timeout)
    except EnvironmentFault:
        return None
    prefixed: Store = dist.PrefixStore("default_pg", store)
    return prefixed


def _tcp_store(
    dist: ModuleType, host: str, port: int, world_size: int, serves: bool, timeout: timedelta
) -> Store:
    if not serves or host not in LOOPBACK:
        store: Store = dist.TCPStore(host, port, world_size, serves, timeout=timeout)
        return store
    listening, _ = listen(host, port, allow_other_port=False)
    store = dist.TCPStore(
        host, port, world_size, True, timeout=timeout, master_listen_fd=listening.detach()
    )
    return store


def stated_rank_and_world(program: Program, rank: int, call: ResolvedCall) -> tuple[int, int]:
    """Rank and world size for a call that is given a store.

    They are those that its init_method would have supplied; -1 if they are not stated.
    """
    process = program.startup.entrance(rank) if program.startup is not None else None
    rendezvous = rendezvous_info(process) if process is not None else None
    if isinstance(rendezvous, RendezvousInfo):
        return rendezvous.rank, rendezvous.world_size
    return (
        -1 if call.rank_argument is None else call.rank_argument,
        -1 if call.world_size_argument is None else call.world_size_argument,
    )
