"""init_method, store, rank and world_size to where the store is and as whom one comes, and where a name leads; with torch's refusals.

Every check and every text is torch's own, in torch's order (torch 2.13, torch/distributed/rendezvous.py and `init_process_group` of
distributed_c10d.py); `tests/data/startup.json` has them from real processes.
"""

from __future__ import annotations

import posixpath
from typing import NamedTuple, NoReturn
from urllib.parse import ParseResult, urlparse

from distsim.names import near
from distsim.startup.records import Address, Entrance, Refusal, Surroundings

SCHEMES = ("env", "tcp", "file")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INITIALIZING = "Error initializing torch.distributed using"
_METHODS = "env://, tcp://host:port or file:///path"


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def address(entrance: Entrance) -> Address | Refusal:
    """Where a process goes, or why torch does not let it."""
    try:
        return _address(entrance)
    except _Refused as refused:
        return refused.refusal


def _no(error: str, text: str, code: str, cause: str, help_text: str) -> NoReturn:
    raise _Refused(Refusal(error, text, code, cause, help_text))


def _address(entrance: Entrance) -> Address:
    _arguments(entrance)
    if entrance.backend == "mpi":
        return Address("launcher", "", 0, "", entrance.rank, -1)
    if entrance.store is not None:
        return _of_store(entrance)
    method = entrance.init_method if entrance.init_method is not None else "env://"
    url = urlparse(method)
    ours = "rank" in url.query or "world_size" in url.query
    if ours and (entrance.said_rank != -1 or entrance.said_world != -1):
        _no("AssertionError", f"The url: {method} has node-specific arguments(rank, world_size) already.", "DS121",
            f"init_method {method!r} and the arguments both say who this is", "say it once, beside a plain URL")  # fmt: skip
    if url.scheme not in SCHEMES:
        meant = near(url.scheme, SCHEMES) if url.scheme else ""
        _no("RuntimeError", f"No rendezvous handler for {url.scheme}://", "DS121",
            f"init_method {method!r} has {f'the scheme {url.scheme}' if url.scheme else 'no scheme'}{meant}",
            f"write {_METHODS}")  # fmt: skip
    return {"env": _of_env, "tcp": _of_tcp, "file": _of_file}[url.scheme](entrance, url, method)


def _arguments(entrance: Entrance) -> None:
    """What init_process_group itself checks."""
    if entrance.store is not None and entrance.init_method is not None:
        _no("AssertionError", "Cannot specify both init_method and store.", "DS129", "init_method and store are both given",
            "a store is where ranks meet, and so is an init_method: give one of the two")  # fmt: skip
    if entrance.store is not None and entrance.said_world <= 0:
        _no("AssertionError", "world_size must be positive if using store", "DS127", "a store is given without world_size",
            "a store does not know how many ranks there are: give world_size")  # fmt: skip
    if entrance.store is not None and entrance.said_rank < 0:
        _no("AssertionError", "rank must be non-negative if using store", "DS127", "a store is given without rank",
            "a store does not know who is who: give rank")  # fmt: skip
    if entrance.device is not None and entrance.backend != "nccl":
        _no("ValueError", "device_id is an int, but no accelerator support is found from the current compilation. Please use a "
            "different compiled version that supports your accelerator.", "DS129",
            f"device_id is given, and {entrance.backend} runs on the CPU here",
            "device_id makes nccl's communicators at once; leave it out on a CPU")  # fmt: skip


def _of_store(entrance: Entrance) -> Address:
    url = urlparse(entrance.store or "")
    if url.scheme == "tcp" and url.hostname and _port(url):
        return Address("tcp", url.hostname, _port(url) or 0, "", entrance.said_rank, entrance.said_world)
    if url.scheme == "file" and url.path:
        return Address("file", "", 0, url.path, entrance.said_rank, entrance.said_world)
    if entrance.store == "hash":
        return Address("hash", "", 0, f"rank {entrance.rank}'s own memory", entrance.said_rank, entrance.said_world)
    _no("ValueError", f"no store {entrance.store}", "DS121", f"store {entrance.store!r} is none that distsim knows",
        "write tcp://host:port (a TCPStore), file:///path (a FileStore) or hash (a HashStore)")  # fmt: skip


def _port(url: ParseResult) -> int | None:
    try:
        return url.port
    except ValueError:
        return None


def _number(text: str, variable: str) -> int:
    try:
        return int(text)
    except ValueError:
        _no("ValueError", f"invalid literal for int() with base 10: {text!r}", "DS127", f"{variable} is {text!r}, which is no number",
            f"set {variable} to a number")  # fmt: skip


def _query(url: ParseResult) -> dict[str, str]:
    return {name: value for name, mark, value in (pair.partition("=") for pair in url.query.split("&")) if mark}


def _who(entrance: Entrance, url: ParseResult, scheme: str) -> tuple[int, int]:
    """Rank and world size of tcp:// and file://, which have no environment to look them up in."""
    query = _query(url)
    rank = int(query.get("rank", entrance.said_rank)) if query.get("rank", "0").lstrip("-").isdigit() else -1
    world = int(query.get("world_size", entrance.said_world)) if query.get("world_size", "0").isdigit() else -1
    for value, words, name in ((rank, "rank", "rank"), (world, "world size", "world_size")):
        if value == -1:
            _no("ValueError", f"{_INITIALIZING} {scheme}:// rendezvous: {words} parameter missing", "DS127",
                f"{scheme}:// is given without {name}", f"{scheme}:// reads no variables: give both as arguments")  # fmt: skip
    return rank, world


def _of_tcp(entrance: Entrance, url: ParseResult, method: str) -> Address:
    try:
        port = url.port
    except ValueError as error:
        _no("ValueError", str(error), "DS121", f"init_method {method!r} has no port from 1 to 65535", "write tcp://host:29500")
    if port is None:
        _no("ValueError", f"{_INITIALIZING} tcp:// rendezvous: port number missing", "DS121",
            f"init_method {method!r} names no port", f"write {method.rstrip('/:')}:29500; any port will do that is free there")  # fmt: skip
    rank, world = _who(entrance, url, "tcp")
    if url.hostname is None:
        _no(
            "AssertionError",
            "hostname cannot be None",
            "DS121",
            f"init_method {method!r} names no host",
            "write tcp://host:29500",
        )
    if port == 0:
        _no("DistNetworkError", f"The client socket has timed out while trying to connect to ({url.hostname}, 0).", "DS121",
            f"init_method {method!r} has port 0: rank 0 would listen on a port that the others can't know",
            "write tcp://host:29500")  # fmt: skip
    return Address("tcp", url.hostname, port, "", rank, world)


def _of_file(entrance: Entrance, url: ParseResult, method: str) -> Address:
    if not url.path:
        _no("ValueError", f"{_INITIALIZING} file:// rendezvous: path missing", "DS121",
            f"init_method {method!r} names no file", "write file:///folder/name: three strokes, and a path that all share")  # fmt: skip
    rank, world = _who(entrance, url, "file")
    return Address("file", "", 0, posixpath.normpath(url.path), rank, world)


def _of_env(entrance: Entrance, url: ParseResult, method: str) -> Address:
    query = _query(url)
    said = {
        "RANK": query.get("rank") or _said(entrance.said_rank),
        "WORLD_SIZE": query.get("world_size") or _said(entrance.said_world),
    }
    found = {name: said.get(name) or entrance.env.get(name, "") for name in VARIABLES}
    for name, value in found.items():
        if not value:
            _no("ValueError", f"{_INITIALIZING} env:// rendezvous: environment variable {name} expected, but not set", "DS127",
                f"env:// reads {name}, which is not set", _who_sets(name, entrance.launcher))  # fmt: skip
    rank, world, port = (_number(found[name], name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= port < 2**16:
        _no("ValueError", f"port must have value from 0 to 65535 but was {port}.", "DS121", f"MASTER_PORT is {port}",
            "ports run from 1 to 65535")  # fmt: skip
    return Address("tcp", found["MASTER_ADDR"], port, "", rank, world)


def _said(number: int) -> str:
    return "" if number == -1 else str(number)


def _who_sets(name: str, launcher: str) -> str:
    """What sets a variable under a launcher."""
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"}
    mpi = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}
    if launcher in ("mp.spawn", "mp.Process"):
        return f"{launcher} sets no variables: give rank and world_size as arguments, and set MASTER_ADDR and MASTER_PORT, or use tcp://"
    for known, names in (("srun", slurm), ("mpirun", mpi)):
        if launcher == known:
            how = (
                f"export {name}=${names[name]} in each task"
                if name in names
                else f"export {name} before {known}: one value for all"
            )
            return f"{known} sets no {name}; {how}"
    return f"torchrun sets {name}; else export it, or start with `distsim run --real`"


_LOOPBACK = ("localhost", "127.", "::1")
#: Names that never resolve (RFC 6761), and addresses that no machine has (RFC 5737).
_NEVER = (".invalid",)
_NOBODY = ("192.0.2.", "198.51.100.", "203.0.113.")


class Place(NamedTuple):
    """A store's place: a port of a machine, or a file. ``node``: None where no machine of the job is meant."""

    kind: str
    node: int | None
    path: str
    port: int


def resolves(host: str, around: Surroundings) -> bool:
    """Has the name an address? Where the file lists its hosts, no other name has."""
    return not host.endswith(_NEVER) and (host in around.hosts or not around.closed or host[:1].isdigit() or is_loopback(host))


def is_loopback(host: str) -> bool:
    return host.startswith(_LOOPBACK)


def leads_to(address: Address, node: int, around: Surroundings) -> Place:
    """Where a process on machine ``node`` comes to. A name that is not listed means the machine of rank 0."""
    if address.kind != "tcp":
        return Place(address.kind, 0, address.path, 0)
    host = address.host
    if is_loopback(host) and host not in around.hosts:
        return Place("tcp", node, "", address.port)
    if host in around.hosts:
        return Place("tcp", around.hosts[host], "", address.port)
    elsewhere = around.closed or not resolves(host, around) or host.startswith(_NOBODY)
    return Place("tcp", None if elsewhere else 0, "", address.port)
