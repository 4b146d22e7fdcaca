"""The arguments of init_process_group: where a process looks for the store, and as which rank.

Every check and every error text is torch's own, in torch's order (torch 2.13,
torch/distributed/rendezvous.py and `init_process_group` of distributed_c10d.py);
`tests/data/startup.json` has them from real processes. Files and sockets are not touched.
"""

from __future__ import annotations

import posixpath
from typing import NamedTuple, NoReturn
from urllib.parse import ParseResult, urlparse

from distsim.backends import BACKEND_PROFILES
from distsim.common.message_text import did_you_mean
from distsim.scenario.startup.records import (
    NOT_PASSED,
    InitFailure,
    RendezvousInfo,
    StartupEnvironment,
    StartupProcess,
)

INIT_METHOD_SCHEMES = ("env", "tcp", "file")
ENV_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ERROR_PREFIX = "Error initializing torch.distributed using"
_INIT_METHOD_FORMS = "env://, tcp://host:port or file:///path"
#: Variables of launchers that hold the value of torch's own.
_VARIABLES_OF_LAUNCHERS = {
    "srun": {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"},
    "mpirun": {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"},
}

_LOOPBACK_PREFIXES = ("localhost", "127.", "::1")
#: Names that never resolve (RFC 6761), and addresses that no machine has (RFC 5737).
_UNRESOLVABLE_SUFFIXES = (".invalid",)
_TEST_NET_PREFIXES = ("192.0.2.", "198.51.100.", "203.0.113.")


class _InvalidInit(Exception):
    """Carries an `InitFailure` out of nested checks."""

    def __init__(self, refusal: InitFailure) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def rendezvous_info(process: StartupProcess) -> RendezvousInfo | InitFailure:
    """Where a process looks for the store, or the error that torch raises."""
    try:
        return _checked_rendezvous_info(process)
    except _InvalidInit as refused:
        return refused.refusal


def _reject(error: str, text: str, code: str, cause: str, help_text: str) -> NoReturn:
    raise _InvalidInit(InitFailure(error, text, code, cause, help_text))


def _checked_rendezvous_info(process: StartupProcess) -> RendezvousInfo:
    _check_arguments(process)
    if process.backend == "mpi":
        return RendezvousInfo("launcher", "", 0, "", process.rank, -1)
    if process.store is not None:
        return _from_store(process)
    method = process.init_method if process.init_method is not None else "env://"
    url = urlparse(method)
    url_has_numbers = "rank" in url.query or "world_size" in url.query
    passes_numbers = (
        process.rank_argument != NOT_PASSED or process.world_size_argument != NOT_PASSED
    )
    if url_has_numbers and passes_numbers:
        _reject(
            "AssertionError",
            f"The url: {method} has node-specific arguments(rank, world_size) already.",
            "DS121",
            f"init_method {method!r} and the arguments both give the rank or the world size",
            "give them once, with a plain URL",
        )
    if url.scheme not in INIT_METHOD_SCHEMES:
        scheme = "no scheme"
        if url.scheme:
            scheme = f"the scheme {url.scheme}{did_you_mean(url.scheme, INIT_METHOD_SCHEMES)}"
        _reject(
            "RuntimeError",
            f"No rendezvous handler for {url.scheme}://",
            "DS121",
            f"init_method {method!r} has {scheme}",
            f"write {_INIT_METHOD_FORMS}",
        )
    if url.scheme == "env":
        return _from_environment(process, url)
    from_url = _from_tcp_url if url.scheme == "tcp" else _from_file_url
    return from_url(process, url, method)


def _check_arguments(process: StartupProcess) -> None:
    """The checks of init_process_group itself, before the rendezvous."""
    has_store = process.store is not None
    if has_store and process.init_method is not None:
        _reject(
            "AssertionError",
            "Cannot specify both init_method and store.",
            "DS129",
            "init_method and store are both given",
            "give either a store or an init_method",
        )
    if has_store and process.world_size_argument <= 0:
        _reject(
            "AssertionError",
            "world_size must be positive if using store",
            "DS127",
            "a store is given without world_size",
            "add world_size: a store does not know the number of ranks",
        )
    if has_store and process.rank_argument < 0:
        _reject(
            "AssertionError",
            "rank must be non-negative if using store",
            "DS127",
            "a store is given without rank",
            "add rank: a store does not know the rank of the process",
        )
    if process.device is not None and not BACKEND_PROFILES[process.backend].device:
        _reject(
            "ValueError",
            "device_id is an int, but no accelerator support is found from the current "
            "compilation. Please use a different compiled version that supports your accelerator.",
            "DS129",
            f"device_id is given, but {process.backend} runs on the CPU here",
            "remove device_id: only nccl uses it, to create its communicators at once",
        )


def _from_store(process: StartupProcess) -> RendezvousInfo:
    rank, world_size = process.rank_argument, process.world_size_argument
    url = urlparse(process.store or "")
    port = _port_of(url)
    if url.scheme == "tcp" and url.hostname and port:
        return RendezvousInfo("tcp", url.hostname, port, "", rank, world_size)
    if url.scheme == "file" and url.path:
        return RendezvousInfo("file", "", 0, url.path, rank, world_size)
    if process.store == "hash":
        own_memory = f"rank {process.rank}'s own memory"
        return RendezvousInfo("hash", "", 0, own_memory, rank, world_size)
    _reject(
        "ValueError",
        f"no store {process.store}",
        "DS121",
        f"store {process.store!r} is not a store that distsim knows",
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
            f"{variable} is {text!r}, which is not a number",
            f"set {variable} to a number",
        )


def _query_parameters(url: ParseResult) -> dict[str, str]:
    parameters = {}
    for pair in url.query.split("&"):
        name, equals, value = pair.partition("=")
        if equals:
            parameters[name] = value
    return parameters


def _rank_and_world_size(process: StartupProcess, url: ParseResult, scheme: str) -> tuple[int, int]:
    """Rank and world size of tcp:// and file://, which do not read the environment."""
    query = _query_parameters(url)
    rank = world_size = NOT_PASSED
    if query.get("rank", "0").lstrip("-").isdigit():
        rank = int(query.get("rank", process.rank_argument))
    if query.get("world_size", "0").isdigit():
        world_size = int(query.get("world_size", process.world_size_argument))
    for value, words, name in ((rank, "rank", "rank"), (world_size, "world size", "world_size")):
        if value == NOT_PASSED:
            _reject(
                "ValueError",
                f"{_ERROR_PREFIX} {scheme}:// rendezvous: {words} parameter missing",
                "DS127",
                f"{scheme}:// is given without {name}",
                f"pass both arguments: {scheme}:// reads no environment variables",
            )
    return rank, world_size


def _from_tcp_url(process: StartupProcess, url: ParseResult, method: str) -> RendezvousInfo:
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
            f"init_method {method!r} has no port",
            f"write {method.rstrip('/:')}:29500, or any other free port",
        )
    rank, world_size = _rank_and_world_size(process, url, "tcp")
    if url.hostname is None:
        _reject(
            "AssertionError",
            "hostname cannot be None",
            "DS121",
            f"init_method {method!r} has no host",
            "write tcp://host:29500",
        )
    if port == 0:
        _reject(
            "DistNetworkError",
            f"The client socket has timed out while trying to connect to ({url.hostname}, 0).",
            "DS121",
            (
                f"init_method {method!r} has port 0: rank 0 would listen on a port that the "
                "other ranks do not know"
            ),
            "write tcp://host:29500",
        )
    return RendezvousInfo("tcp", url.hostname, port, "", rank, world_size)


def _from_file_url(process: StartupProcess, url: ParseResult, method: str) -> RendezvousInfo:
    if not url.path:
        _reject(
            "ValueError",
            f"{_ERROR_PREFIX} file:// rendezvous: path missing",
            "DS121",
            f"init_method {method!r} has no path",
            "write file:///folder/name: three slashes, and a path that all nodes share",
        )
    rank, world_size = _rank_and_world_size(process, url, "file")
    return RendezvousInfo("file", "", 0, posixpath.normpath(url.path), rank, world_size)


def _from_environment(process: StartupProcess, url: ParseResult) -> RendezvousInfo:
    """env://: arguments and the URL's parameters first, environment variables for the rest."""
    query = _query_parameters(url)
    passed = {
        "RANK": query.get("rank") or _argument_text(process.rank_argument),
        "WORLD_SIZE": query.get("world_size") or _argument_text(process.world_size_argument),
    }
    found = {name: passed.get(name) or process.env.get(name, "") for name in ENV_VARIABLES}
    for name, value in found.items():
        if not value:
            _reject(
                "ValueError",
                f"{_ERROR_PREFIX} env:// rendezvous: environment variable {name} expected, "
                "but not set",
                "DS127",
                f"env:// reads {name}, which is not set",
                _how_to_set_variable(name, process.launcher),
            )
    rank = _parse_number(found["RANK"], "RANK")
    world_size = _parse_number(found["WORLD_SIZE"], "WORLD_SIZE")
    port = _parse_number(found["MASTER_PORT"], "MASTER_PORT")
    if not 0 <= port < 2**16:
        _reject(
            "ValueError",
            f"port must have value from 0 to 65535 but was {port}.",
            "DS121",
            f"MASTER_PORT is {port}",
            "use a port from 1 to 65535",
        )
    return RendezvousInfo("tcp", found["MASTER_ADDR"], port, "", rank, world_size)


def _argument_text(number: int) -> str:
    return "" if number == NOT_PASSED else str(number)


def _how_to_set_variable(name: str, launcher: str) -> str:
    """The remedy for a missing variable under a launcher."""
    if launcher in ("mp.spawn", "mp.Process"):
        return (
            "pass rank and world_size to init_process_group. Also set MASTER_ADDR and MASTER_PORT, "
            f"or use a tcp:// init_method ({launcher} sets no environment variables)"
        )
    own_variables = _VARIABLES_OF_LAUNCHERS.get(launcher)
    if own_variables is None:
        return f"start with torchrun or `distsim run --real`, which set {name}, or export it"
    if name in own_variables:
        export = f"export {name}=${own_variables[name]} in each task"
    else:
        export = f"export {name} before {launcher}: one value for all"
    return f"{launcher} does not set {name}; {export}"


class StoreAddress(NamedTuple):
    """A store's place: a port of a machine, or a file.

    ``node``: None if the address belongs to no machine of the job.
    """

    kind: str
    node: int | None
    path: str
    port: int


def resolves(host: str, environment: StartupEnvironment) -> bool:
    """Whether a name has an address. If the file lists its hosts, no other name has one."""
    if host.endswith(_UNRESOLVABLE_SUFFIXES):
        return False
    if host in environment.hosts or not environment.closed:
        return True
    return host[:1].isdigit() or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether a host name means the local node."""
    return host.startswith(_LOOPBACK_PREFIXES)


def store_address(
    address: RendezvousInfo, node: int, environment: StartupEnvironment
) -> StoreAddress:
    """The store that a process on machine ``node`` reaches at an address.

    A name that is not listed is taken for the machine of rank 0.
    """
    if address.kind != "tcp":
        return StoreAddress(address.kind, 0, address.path, 0)
    host = address.host
    if host in environment.hosts:
        store_node: int | None = environment.hosts[host]
    elif is_loopback(host):
        store_node = node
    elif environment.closed or not resolves(host, environment):
        store_node = None
    else:
        store_node = None if host.startswith(_TEST_NET_PREFIXES) else 0
    return StoreAddress("tcp", store_node, "", address.port)
