"""A rank's half of torch's key-value stores.

The hub keeps all keys, so a wait for a key is seen like any other wait: it can be part of a hang,
and its timeout expires like that of a collective. The hub's half is
`distsim.script_capture.hub.store_server`; the classes that scripts create are in
`distsim.script_capture.patches.store_classes`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from distsim.script_capture.folders import CAPTURE_FOLDER
from distsim.script_capture.protocol.message_types import timeout_in_ns
from distsim.script_capture.rank.client import HubClient

#: torch's timeout of a store that is created without one (c10d::Store::kDefaultTimeout).
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
#: The key under which a TCPStore counts its workers (TCPStore.hpp, `initKey_`); no key of the
#: script's.
INIT_KEY: Final = "init/"


def _encoded_value(value: Any) -> str:
    """A value as a text with one character per byte.

    Raises TypeError if it is neither text nor bytes, as torch does.
    """
    if isinstance(value, int):  # `bytes(value)` would be that many zeros
        raise TypeError(f"a value of a store is str or bytes, not {type(value).__name__}: {value}")
    data = value.encode() if isinstance(value, str) else bytes(value)
    return data.decode("latin-1")


def _decoded_value(text: str) -> bytes:
    return text.encode("latin-1")


class StoreClientMethods:
    """Methods of the hub's `Store`; `distsim.script_capture.patches.store_classes` adds torch's.

    Stores with the same ``space`` share their keys. ``explicit_timeout`` is the timeout that the
    script set, None if it set none: then waits never expire.
    """

    client: HubClient
    space: str
    explicit_timeout: timedelta | None = None
    host: str = "127.0.0.1"
    port: int = 29500

    def _request(self, verb: str, *arguments: object) -> Any:
        """The result of an operation of the store."""
        client = self.client
        if not client.joined:
            client.join(-1, -1)
        number = client.next_number()
        message = ["store", number, client.site(4), verb, self.space, *arguments]
        reply, _ = client.request(message)
        return reply[1]

    def set(self, key: str, value: object) -> None:
        """Set a key."""
        self._request("set", key, _encoded_value(value))

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it exists."""
        values = self._request("wait", [key], timeout_in_ns(self.explicit_timeout))
        return _decoded_value(values[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        limit = timeout if timeout is not None else self.explicit_timeout
        self._request("wait", list(keys), timeout_in_ns(limit))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._request("add", key, int(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return bool(self._request("check", list(keys)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Replace a value if it is the expected one; return the value afterwards."""
        texts = _encoded_value(expected), _encoded_value(desired)
        return _decoded_value(self._request("compare_set", key, *texts))

    compareSet = compare_set  # noqa: N815

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._request("delete", key))

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self._request("count"))

    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: object) -> None:
        """Append to the value of a key."""
        self._request("append", key, _encoded_value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until all exist."""
        values = self._request("wait", list(keys), timeout_in_ns(self.explicit_timeout))
        return [_decoded_value(text) for text in values]

    multiGet = multi_get  # noqa: N815

    def multi_set(self, keys: Sequence[str], values: Sequence[object]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    multiSet = multi_set  # noqa: N815

    def list_keys(self) -> list[str]:
        """All keys, without torch's own."""
        return [key for key in self._request("keys") if key != INIT_KEY]

    # --- queues ---
    def queue_push(self, key: str, value: object) -> None:
        """Append a value to the queue of a key."""
        self._request("push", key, _encoded_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The oldest value. Raises QueueEmptyError if there is none and ``block`` is false."""
        if block:
            values = self._request("pop", [key], timeout_in_ns(self.explicit_timeout))
            return _decoded_value(values[0])
        found = self._request("take", key)
        if found is None:
            from torch.distributed import QueueEmptyError

            raise QueueEmptyError("queue is empty")
        return _decoded_value(found)

    def queue_len(self, key: str) -> int:
        """The length of the queue of a key."""
        return int(self._request("length", key))

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set work."""
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Note a timeout that the script sets.

        torch's own code sets the group's timeout on every store, which the script did not ask for.
        """
        frame = sys._getframe(1)
        # Skip distsim's own frames: a PrefixStore forwards this call.
        while frame.f_back is not None and frame.f_code.co_filename.startswith(CAPTURE_FOLDER):
            frame = frame.f_back
        if self.client.sites.is_own(frame.f_code.co_filename):
            self.explicit_timeout = timeout

    setTimeout = set_timeout  # noqa: N815

    @property
    def timeout(self) -> timedelta:
        """How long a wait may take."""
        return self.explicit_timeout or DEFAULT_TIMEOUT

    def clone(self) -> object:
        """The store itself: it has no connection of its own."""
        return self
