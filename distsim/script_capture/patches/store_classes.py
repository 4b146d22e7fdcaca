"""The stores that scripts create: TCPStore, FileStore and PrefixStore over the hub's store.

A store of the hub has a ``space``; stores with the same space share their keys. So a TCPStore is
known by its host and port, and a FileStore by its file.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

from distsim.script_capture.protocol.message_types import SERVER_KEY_PREFIX, WORKERS_KEY_PREFIX
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.store_client import DEFAULT_TIMEOUT, INIT_KEY, StoreClientMethods

#: A TCPStore that asks for any port (port 0) gets one of the dynamic ports (RFC 6335), the first
#: behind this one.
_FIRST_DYNAMIC_PORT: Final = 49152
#: The space in which servers of TCPStores announce themselves.
_SERVERS_SPACE: Final = "servers of TCPStore"


class _TCPStoreArguments(NamedTuple):
    """The arguments of a TCPStore, with torch's names."""

    host_name: str
    port: int
    world_size: int | None = None
    is_master: bool = False
    timeout: timedelta = DEFAULT_TIMEOUT
    wait_for_workers: bool = True
    multi_tenant: bool = False
    master_listen_fd: int | None = None
    use_libuv: bool = True


class StoreClasses:
    """The classes of one process, by name.

    ``kept_stores``: torch keeps only the C++ half of a store that is written in Python, and crashes
    if Python has freed the other half.
    """

    def __init__(self, client: HubClient, dist: Any) -> None:
        self.client = client
        self.kept_stores: list[object] = []
        self.base: Any = type("HubStore", (StoreClientMethods, dist.Store), {})
        prefix_store = type(
            "PrefixStore",
            (_PrefixStoreMethods, dist.PrefixStore),
            {"__module__": "torch.distributed"},
        )
        self.classes: dict[str, Any] = {
            "TCPStore": self._store_class("TCPStore", self._init_tcp_store),
            "FileStore": self._store_class("FileStore", self._init_file_store),
            "PrefixStore": prefix_store,
        }

    def make(self, space: str) -> object:
        """A store of the hub."""
        store = self.base()
        self._init_store(store, space, None)
        return store

    def _store_class(self, name: str, init: Callable[..., None]) -> type:
        def __init__(store: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self.base.__init__(store)
            init(store, *args, **kwargs)

        return type(name, (self.base,), {"__init__": __init__, "__module__": "torch.distributed"})

    def _init_store(self, store: Any, space: str, timeout: timedelta | None) -> None:
        store.client = self.client
        store.space = space
        store.explicit_timeout = timeout
        self.kept_stores.append(store)

    def _init_file_store(
        self, store: Any, file_name: str, world_size: int = -1, *_: object
    ) -> None:
        self._init_store(store, f"FileStore {file_name}", None)
        store.path = file_name

    def _init_tcp_store(self, store: Any, *args: Any, **kwargs: Any) -> None:
        """Wait as torch does: clients for the server, and the server for all workers.

        (TCPStore.cpp, `waitForWorkers`.)
        """
        arguments = _TCPStoreArguments(*args, **kwargs)
        timeout = arguments.timeout if arguments.timeout != DEFAULT_TIMEOUT else None
        self._init_store(store, _SERVERS_SPACE, timeout)
        port = arguments.port
        if not port and arguments.is_master:
            port = _FIRST_DYNAMIC_PORT + store.add("ports", 1)
        store.host = arguments.host_name
        store.port = port
        server = f"{arguments.host_name}:{port}"
        server_key = f"{SERVER_KEY_PREFIX}{server}"
        if arguments.is_master:
            store.set(server_key, "")
        else:
            store.wait([server_key])
        store.space = f"TCPStore {server}"
        if arguments.world_size and arguments.wait_for_workers:
            all_workers = f"{WORKERS_KEY_PREFIX}{arguments.world_size} workers of {server}"
            self._wait_for_workers(store, all_workers, arguments.world_size, arguments.is_master)

    @staticmethod
    def _wait_for_workers(store: Any, all_workers: str, world_size: int, is_master: bool) -> None:
        """Count the workers; the last one sets the key ``all_workers``, for which the server waits.

        The key has a readable name because a finding names it if the server waits for ever.
        """
        space = store.space
        arrived = store.add(INIT_KEY, 1)
        store.space = _SERVERS_SPACE
        if arrived >= world_size:
            store.set(all_workers, "")
        if is_master:
            store.wait([all_workers])
        store.space = space


class _PrefixStoreMethods:
    """What torch's C++ PrefixStore does not forward to a store that is written in Python.

    ``inner`` is the store below.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)  # type: ignore[call-arg]
        self.prefix = prefix
        self.inner = store

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    @property
    def underlying_store(self) -> object:
        return self.inner

    def clone(self) -> object:
        return type(self)(self.prefix, self.inner.clone())

    def queue_push(self, key: str, value: object) -> None:
        self.inner.queue_push(self._key(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        found: bytes = self.inner.queue_pop(self._key(key), block)
        return found

    def queue_len(self, key: str) -> int:
        return int(self.inner.queue_len(self._key(key)))

    def list_keys(self) -> list[str]:
        prefix = self._key("")
        return [
            key.removeprefix(prefix) for key in self.inner.list_keys() if key.startswith(prefix)
        ]

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.inner.timeout
        return found
