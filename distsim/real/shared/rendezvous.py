"""Where ranks find each other: a port that is free, the store on it, a file for file://."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from distsim.common.errors import EnvironmentFault

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def listen(address: str, port: int, allow_other_port: bool) -> tuple[socket.socket, int]:
    """A listening socket on the port; where that is taken and ``may_move``, on another one. Raises
    EnvironmentFault.
    """
    for wanted in (port, 0) if allow_other_port else (port,):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.socket(family, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((address, wanted))
            door.listen(128)
        except OSError as fault:
            door.close()
            number, reason = fault.errno, fault.strerror
            continue
        return door, int(door.getsockname()[1])
    if number == errno.EADDRNOTAVAIL:
        raise EnvironmentFault(
            f"{address} is no address of this machine, so ranks can't meet at it here",
            "give one with --master-addr",
        )
    raise EnvironmentFault(
        f"port {port} of {address} can't be used: {reason}", "give another one with --master-port"
    )


def _torch_distributed() -> ModuleType:
    import torch.distributed

    return torch.distributed


def serve_store(door: socket.socket, address: str, port: int, shared: bool = False) -> TCPStore:
    """The store, served from this process on a socket that already listens. The socket belongs to
    the store from now on.

    ``shared``: further stores of this process on the same port use its server.
    """
    store: TCPStore = _torch_distributed().TCPStore(
        address,
        port,
        None,
        True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        multi_tenant=shared,
        master_listen_fd=door.detach(),
    )
    return store


def connect_store(
    address: str, port: int, timeout_s: float, ended: Callable[[], str] = str
) -> TCPStore:
    """The store that another process serves. Raises EnvironmentFault when nobody answers in time,
    or once ``ended``, which names the signal."""
    dist, why = _torch_distributed(), ""
    with suppress(dist.DistError, RuntimeError):
        why = _wait_for_listener(address, port, timeout_s, ended)
        if not why:  # torch itself can't be interrupted while it waits
            store: TCPStore = dist.TCPStore(
                address,
                port,
                None,
                False,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
            return store
    if ended():
        raise EnvironmentFault(f"ended by {ended()}; nobody had answered at {address}:{port} yet")
    raise EnvironmentFault(
        f"nobody answered at {address}:{port} within {timeout_s:.0f} s{why and f' ({why})'}",
        "start the machine of rank 0 too; --master-addr and --master-port must name it",
    )


def _wait_for_listener(address: str, port: int, timeout_s: float, ended: Callable[[], str]) -> str:
    """Wait until somebody listens there, and give nothing; else the last reason why nobody was
    reached.
    """
    limit, why = time.monotonic() + timeout_s, "ended"
    while time.monotonic() < limit and not ended():
        try:
            with socket.create_connection((address, port), timeout=1):
                return ""
        except OSError as fault:
            why = fault.strerror or str(fault)
        time.sleep(0.05)
    return why


def check_host(host: str, option: str) -> None:
    """Raises EnvironmentFault where nobody knows the host that ranks are to meet at."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as fault:  # gaierror
        raise EnvironmentFault(
            f"the host {host} is not known here: {fault.strerror}", f"correct it in {option}"
        ) from None


def check_rendezvous_file(init_method: str) -> None:
    """A file that an earlier run left would make this one hang or mix with it. Raises
    EnvironmentFault naming it.
    """
    url = urlparse(init_method)
    if url.scheme != "file":
        return
    path = Path(unquote(url.path))
    if path.exists() and path.stat().st_size:
        raise EnvironmentFault(
            f"{path} is left from an earlier run, so ranks would meet its ranks there", "remove it"
        )
    if not path.parent.is_dir():
        raise EnvironmentFault(
            f"there is no folder {path.parent} for {init_method}",
            "name a file in a folder that exists",
        )
