"""The stores that scripts make: TCPStore, FileStore and PrefixStore, as classes over the hub's own
store.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.store_client import DEFAULT_TIMEOUT, INIT_KEY, StoreClientMethods

#: Ports that a TCPStore gets that asks for any (port 0) come behind this one: the dynamic ports of
#: RFC 6335.
_FIRST_DYNAMIC_PORT: Final = 49152


class _TCPStoreArguments(NamedTuple):
    """What a TCPStore is given, as torch names it."""

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
    """The classes of one process. ``kept``: torch keeps only the C++ half of a Python store, and
    dies without the other.
    """

    def __init__(self, client: HubClient, dist: Any) -> None:
        self.client = client
        self.kept: list[object] = []
        self.type: Any = type("HubStore", (StoreClientMethods, dist.Store), {})
        self.kinds: dict[str, Any] = {
            "TCPStore": self._class("TCPStore", self._tcp),
            "FileStore": self._class("FileStore", self._file),
            "PrefixStore": type(
                "PrefixStore",
                (_PrefixStoreMethods, dist.PrefixStore),
                {"__module__": "torch.distributed"},
            ),
        }

    def make(self, space: str) -> object:
        """A store of the hub."""
        store = self.type()
        self._begin(store, space, None)
        return store

    def _class(self, name: str, begin: Callable[..., None]) -> type:
        def __init__(store: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self.type.__init__(store)
            begin(store, *args, **kwargs)

        return type(name, (self.type,), {"__init__": __init__, "__module__": "torch.distributed"})

    def _begin(self, store: Any, space: str, limit: timedelta | None) -> None:
        store.client, store.space, store.limit = self.client, space, limit
        self.kept.append(store)

    def _file(self, store: Any, file_name: str, world_size: int = -1, *_: object) -> None:
        self._begin(store, f"FileStore {file_name}", None)
        store.path = file_name

    def _tcp(self, store: Any, *args: Any, **kwargs: Any) -> None:
        """Whoever is not the server waits for it, and the server for all (TCPStore.cpp,
        `waitForWorkers`).
        """
        given = _TCPStoreArguments(*args, **kwargs)
        self._begin(
            store,
            "servers of TCPStore",
            given.timeout if given.timeout != DEFAULT_TIMEOUT else None,
        )
        port = given.port or (_FIRST_DYNAMIC_PORT + store.add("ports", 1) if given.is_master else 0)
        store.host, store.port = given.host_name, port
        server = f"{given.host_name}:{port}"
        if given.is_master:
            store.set(f"the server of {server}", "")
        else:
            store.wait([f"the server of {server}"])
        store.space = f"TCPStore {server}"
        if given.world_size and given.wait_for_workers:
            self._gather(
                store,
                f"all {given.world_size} workers of {server}",
                given.world_size,
                given.is_master,
            )

    @staticmethod
    def _gather(store: Any, everybody: str, world_size: int, is_master: bool) -> None:
        """Count who has come. Only the server waits for all."""
        own, come = store.space, store.add(INIT_KEY, 1)
        store.space = "servers of TCPStore"
        if come >= world_size:
            store.set(everybody, "")
        if is_master:
            store.wait([everybody])
        store.space = own


class _PrefixStoreMethods:
    """What C++ does not hand on to a store that is written in Python. ``inner``: the store
    below.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)  # type: ignore[call-arg]
        self.prefix, self.inner = prefix, store

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
        return [
            key.removeprefix(self._key(""))
            for key in self.inner.list_keys()
            if key.startswith(self._key(""))
        ]

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.inner.timeout
        return found
