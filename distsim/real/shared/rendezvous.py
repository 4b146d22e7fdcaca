"""Where ranks find each other: a free port, the store on it, a file for file://.

torch's own rendezvous would listen on every address of the machine. Here the socket is bound first,
to one address, and handed over to torch's store.
"""

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
    """A listening socket on the port, and the port.

    If the port is taken and ``allow_other_port``, another one is used. Raises EnvironmentFault.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in (port, 0) if allow_other_port else (port,):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, wanted))
            listening.listen(128)
        except OSError as fault:
            listening.close()
            error_number, reason = fault.errno, fault.strerror
            continue
        return listening, int(listening.getsockname()[1])
    if error_number == errno.EADDRNOTAVAIL:
        raise EnvironmentFault(
            f"{address} is not an address of this node, so ranks cannot connect to it here",
            "give an address of this node with --master-addr",
        )
    raise EnvironmentFault(
        f"port {port} of {address} cannot be used: {reason}", "give another one with --master-port"
    )


def _torch_distributed() -> ModuleType:
    import torch.distributed

    return torch.distributed


def serve_store(
    listening: socket.socket, address: str, port: int, shared: bool = False
) -> TCPStore:
    """The store, served from this process on a socket that already listens.

    The store owns the socket from now on. ``shared``: further stores of this process on the same
    port use its server.
    """
    store: TCPStore = _torch_distributed().TCPStore(
        address,
        port,
        None,
        True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        multi_tenant=shared,
        master_listen_fd=listening.detach(),
    )
    return store


def connect_store(
    address: str, port: int, timeout_s: float, ended: Callable[[], str] = str
) -> TCPStore:
    """The store that another process serves.

    Raises EnvironmentFault if it cannot be reached in time, or once ``ended`` returns the name of a
    signal.
    """
    dist = _torch_distributed()
    reason = ""
    with suppress(dist.DistError, RuntimeError):
        # torch itself cannot be interrupted while it waits, so it connects only to a listener.
        reason = _wait_for_listener(address, port, timeout_s, ended)
        if not reason:
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
        raise EnvironmentFault(
            f"ended by {ended()}; no rank 0 had answered at {address}:{port} yet"
        )
    detail = f" ({reason})" if reason else ""
    raise EnvironmentFault(
        f"no rank 0 answered at {address}:{port} within {timeout_s:.0f} s{detail}",
        "start the node of rank 0 too; --master-addr and --master-port must name it",
    )


def _wait_for_listener(address: str, port: int, timeout_s: float, ended: Callable[[], str]) -> str:
    """Wait for a listener and return ""; otherwise return the last reason of the failure."""
    deadline = time.monotonic() + timeout_s
    reason = "ended"
    while time.monotonic() < deadline and not ended():
        try:
            with socket.create_connection((address, port), timeout=1):
                return ""
        except OSError as fault:
            reason = fault.strerror or str(fault)
        time.sleep(0.05)
    return reason


def check_host(host: str, option: str) -> None:
    """Raise EnvironmentFault if the host at which ranks are to meet cannot be resolved."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as fault:  # gaierror
        raise EnvironmentFault(
            f"the host {host} is unknown here: {fault.strerror}", f"correct it in {option}"
        ) from None


def check_rendezvous_file(init_method: str) -> None:
    """Raise EnvironmentFault for a rendezvous file of an earlier run.

    With such a file, ranks would hang or mix with those of the earlier run.
    """
    url = urlparse(init_method)
    if url.scheme != "file":
        return
    path = Path(unquote(url.path))
    if path.exists() and path.stat().st_size:
        raise EnvironmentFault(
            f"{path} is left from an earlier run, so ranks would read its addresses", "remove it"
        )
    if not path.parent.is_dir():
        raise EnvironmentFault(
            f"there is no folder {path.parent} for {init_method}",
            "name a file in a folder that exists",
        )
