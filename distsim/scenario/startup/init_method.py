"""init_method, store, rank and world_size to where the store is and as whom one comes, and where a
name leads; with torch's refusals.

Every check and every text is torch's own, in torch's order (torch 2.13,
torch/distributed/rendezvous.py and `init_process_group` of distributed_c10d.py);
`tests/data/startup.json` has them from real processes.
"""

from __future__ import annotations

import posixpath
from typing import NamedTuple, NoReturn
from urllib.parse import ParseResult, urlparse

from distsim.common.message_text import did_you_mean
from distsim.scenario.startup.records import (
    InitFailure,
    RendezvousInfo,
    StartupEnvironment,
    StartupProcess,
)

INIT_METHOD_SCHEMES = ("env", "tcp", "file")
ENV_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ERROR_PREFIX = "Error initializing torch.distributed using"
_INIT_METHOD_FORMS = "env://, tcp://host:port or file:///path"


class _InvalidInit(Exception):
    def __init__(self, refusal: InitFailure) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def rendezvous_info(entrance: StartupProcess) -> RendezvousInfo | InitFailure:
    """Where a process goes, or why torch does not let it."""
    try:
        return _checked_rendezvous_info(entrance)
    except _InvalidInit as refused:
        return refused.refusal


def _reject(error: str, text: str, code: str, cause: str, help_text: str) -> NoReturn:
    raise _InvalidInit(InitFailure(error, text, code, cause, help_text))


def _checked_rendezvous_info(entrance: StartupProcess) -> RendezvousInfo:
    _check_arguments(entrance)
    if entrance.backend == "mpi":
        return RendezvousInfo("launcher", "", 0, "", entrance.rank, -1)
    if entrance.store is not None:
        return _from_store(entrance)
    method = entrance.init_method if entrance.init_method is not None else "env://"
    url = urlparse(method)
    ours = "rank" in url.query or "world_size" in url.query
    if ours and (entrance.rank_argument != -1 or entrance.world_size_argument != -1):
        _reject(
            "AssertionError",
            f"The url: {method} has node-specific arguments(rank, world_size) already.",
            "DS121",
            f"init_method {method!r} and the arguments both say who this is",
            "say it once, beside a plain URL",
        )
    if url.scheme not in INIT_METHOD_SCHEMES:
        meant = did_you_mean(url.scheme, INIT_METHOD_SCHEMES) if url.scheme else ""
        _reject(
            "RuntimeError",
            f"No rendezvous handler for {url.scheme}://",
            "DS121",
            f"init_method {method!r} has {f'the scheme {url.scheme}' if url.scheme else 'no scheme'}{meant}",
            f"write {_INIT_METHOD_FORMS}",
        )
    return {"env": _from_environment, "tcp": _from_tcp_url, "file": _from_file_url}[url.scheme](
        entrance, url, method
    )


def _check_arguments(entrance: StartupProcess) -> None:
    """What init_process_group itself checks."""
    if entrance.store is not None and entrance.init_method is not None:
        _reject(
            "AssertionError",
            "Cannot specify both init_method and store.",
            "DS129",
            "init_method and store are both given",
            "a store is where ranks meet, and so is an init_method: give one of the two",
        )
    if entrance.store is not None and entrance.world_size_argument <= 0:
        _reject(
            "AssertionError",
            "world_size must be positive if using store",
            "DS127",
            "a store is given without world_size",
            "a store does not know how many ranks there are: give world_size",
        )
    if entrance.store is not None and entrance.rank_argument < 0:
        _reject(
            "AssertionError",
            "rank must be non-negative if using store",
            "DS127",
            "a store is given without rank",
            "a store does not know who is who: give rank",
        )
    if entrance.device is not None and entrance.backend != "nccl":
        _reject(
            "ValueError",
            "device_id is an int, but no accelerator support is found from the current compilation. Please use a "
            "different compiled version that supports your accelerator.",
            "DS129",
            f"device_id is given, and {entrance.backend} runs on the CPU here",
            "device_id makes nccl's communicators at once; leave it out on a CPU",
        )


def _from_store(entrance: StartupProcess) -> RendezvousInfo:
    url = urlparse(entrance.store or "")
    if url.scheme == "tcp" and url.hostname and _port_of(url):
        return RendezvousInfo(
            "tcp",
            url.hostname,
            _port_of(url) or 0,
            "",
            entrance.rank_argument,
            entrance.world_size_argument,
        )
    if url.scheme == "file" and url.path:
        return RendezvousInfo(
            "file", "", 0, url.path, entrance.rank_argument, entrance.world_size_argument
        )
    if entrance.store == "hash":
        return RendezvousInfo(
            "hash",
            "",
            0,
            f"rank {entrance.rank}'s own memory",
            entrance.rank_argument,
            entrance.world_size_argument,
        )
    _reject(
        "ValueError",
        f"no store {entrance.store}",
        "DS121",
        f"store {entrance.store!r} is none that distsim knows",
        "write tcp://host:port (a TCPStore), file:///path (a FileStore) or hash (a HashStore)",
    )


def _port_of(url: ParseResult) -> int | None:
    try:
        return url.port
    except ValueError:
        return None


def _parse_number(text: str, variable: str) -> int:
    try:
        return int(text)
    except ValueError:
        _reject(
            "ValueError",
            f"invalid literal for int() with base 10: {text!r}",
            "DS127",
            f"{variable} is {text!r}, which is no number",
            f"set {variable} to a number",
        )


def _query_parameters(url: ParseResult) -> dict[str, str]:
    return {
        name: value
        for name, mark, value in (pair.partition("=") for pair in url.query.split("&"))
        if mark
    }


def _rank_and_world_size(
    entrance: StartupProcess, url: ParseResult, scheme: str
) -> tuple[int, int]:
    """Rank and world size of tcp:// and file://, which have no environment to look them up in."""
    query = _query_parameters(url)
    rank = (
        int(query.get("rank", entrance.rank_argument))
        if query.get("rank", "0").lstrip("-").isdigit()
        else -1
    )
    world = (
        int(query.get("world_size", entrance.world_size_argument))
        if query.get("world_size", "0").isdigit()
        else -1
    )
    for value, words, name in ((rank, "rank", "rank"), (world, "world size", "world_size")):
        if value == -1:
            _reject(
                "ValueError",
                f"{_ERROR_PREFIX} {scheme}:// rendezvous: {words} parameter missing",
                "DS127",
                f"{scheme}:// is given without {name}",
                f"{scheme}:// reads no variables: give both as arguments",
            )
    return rank, world


def _from_tcp_url(entrance: StartupProcess, url: ParseResult, method: str) -> RendezvousInfo:
    try:
        port = url.port
    except ValueError as error:
        _reject(
            "ValueError",
            str(error),
            "DS121",
            f"init_method {method!r} has no port from 1 to 65535",
            "write tcp://host:29500",
        )
    if port is None:
        _reject(
            "ValueError",
            f"{_ERROR_PREFIX} tcp:// rendezvous: port number missing",
            "DS121",
            f"init_method {method!r} names no port",
            f"write {method.rstrip('/:')}:29500; any port will do that is free there",
        )
    rank, world = _rank_and_world_size(entrance, url, "tcp")
    if url.hostname is None:
        _reject(
            "AssertionError",
            "hostname cannot be None",
            "DS121",
            f"init_method {method!r} names no host",
            "write tcp://host:29500",
        )
    if port == 0:
        _reject(
            "DistNetworkError",
            f"The client socket has timed out while trying to connect to ({url.hostname}, 0).",
            "DS121",
            f"init_method {method!r} has port 0: rank 0 would listen on a port that the others can't know",
            "write tcp://host:29500",
        )
    return RendezvousInfo("tcp", url.hostname, port, "", rank, world)


def _from_file_url(entrance: StartupProcess, url: ParseResult, method: str) -> RendezvousInfo:
    if not url.path:
        _reject(
            "ValueError",
            f"{_ERROR_PREFIX} file:// rendezvous: path missing",
            "DS121",
            f"init_method {method!r} names no file",
            "write file:///folder/name: three strokes, and a path that all share",
        )
    rank, world = _rank_and_world_size(entrance, url, "file")
    return RendezvousInfo("file", "", 0, posixpath.normpath(url.path), rank, world)


def _from_environment(entrance: StartupProcess, url: ParseResult, method: str) -> RendezvousInfo:
    query = _query_parameters(url)
    said = {
        "RANK": query.get("rank") or _argument_text(entrance.rank_argument),
        "WORLD_SIZE": query.get("world_size") or _argument_text(entrance.world_size_argument),
    }
    found = {name: said.get(name) or entrance.env.get(name, "") for name in ENV_VARIABLES}
    for name, value in found.items():
        if not value:
            _reject(
                "ValueError",
                f"{_ERROR_PREFIX} env:// rendezvous: environment variable {name} expected, but not set",
                "DS127",
                f"env:// reads {name}, which is not set",
                _how_to_set_variable(name, entrance.launcher),
            )
    rank, world, port = (
        _parse_number(found[name], name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if not 0 <= port < 2**16:
        _reject(
            "ValueError",
            f"port must have value from 0 to 65535 but was {port}.",
            "DS121",
            f"MASTER_PORT is {port}",
            "ports run from 1 to 65535",
        )
    return RendezvousInfo("tcp", found["MASTER_ADDR"], port, "", rank, world)


def _argument_text(number: int) -> str:
    return "" if number == -1 else str(number)


def _how_to_set_variable(name: str, launcher: str) -> str:
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


_LOOPBACK_PREFIXES = ("localhost", "127.", "::1")
#: Names that never resolve (RFC 6761), and addresses that no machine has (RFC 5737).
_UNRESOLVABLE_SUFFIXES = (".invalid",)
_TEST_NET_PREFIXES = ("192.0.2.", "198.51.100.", "203.0.113.")


class StoreAddress(NamedTuple):
    """A store's place: a port of a machine, or a file. ``node``: None where no machine of the job
    is meant.
    """

    kind: str
    node: int | None
    path: str
    port: int


def resolves(host: str, around: StartupEnvironment) -> bool:
    """Has the name an address? Where the file lists its hosts, no other name has."""
    return not host.endswith(_UNRESOLVABLE_SUFFIXES) and (
        host in around.hosts or not around.closed or host[:1].isdigit() or is_loopback(host)
    )


def is_loopback(host: str) -> bool:
    return host.startswith(_LOOPBACK_PREFIXES)


def store_address(address: RendezvousInfo, node: int, around: StartupEnvironment) -> StoreAddress:
    """Where a process on machine ``node`` comes to. A name that is not listed means the machine of
    rank 0.
    """
    if address.kind != "tcp":
        return StoreAddress(address.kind, 0, address.path, 0)
    host = address.host
    if is_loopback(host) and host not in around.hosts:
        return StoreAddress("tcp", node, "", address.port)
    if host in around.hosts:
        return StoreAddress("tcp", around.hosts[host], "", address.port)
    elsewhere = around.closed or not resolves(host, around) or host.startswith(_TEST_NET_PREFIXES)
    return StoreAddress("tcp", None if elsewhere else 0, "", address.port)
