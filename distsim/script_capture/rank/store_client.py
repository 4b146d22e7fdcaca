"""The key-value store of a program: one for all ranks, kept by the hub, so that a wait for a key is
seen like any other wait.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from distsim.script_capture.rank.client import HubClient

#: torch's, of a store for which nobody says one (c10d::Store::kDefaultTimeout).
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
#: The key under which a TCPStore counts who has come (TCPStore.hpp, `initKey_`); it is no key of
#: the script's.
INIT_KEY: Final = "init/"
_CAPTURE_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class StoreValueError(Exception):
    """`add` to a value that is no number."""


def _encoded_value(value: Any) -> str:
    """A value as a text of one character a byte. Raises TypeError where it is neither text nor
    bytes, as torch does.
    """
    if isinstance(value, int):
        raise TypeError(f"a value of a store is str or bytes, not {type(value).__name__}: {value}")
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _decoded_value(text: str) -> bytes:
    return text.encode("latin-1")


class StoreClientMethods:
    """What a `Store` of the hub does. `patches` lays it over torch's class. ``space``: stores of
    one name share their keys.
    """

    client: HubClient
    space: str
    limit: timedelta | None = None
    host: str = "127.0.0.1"
    port: int = 29500

    def _ask(self, verb: str, *given: object) -> Any:
        if not self.client.joined:
            self.client.join(-1, -1)
        return self.client.ask(
            ["store", self.client.number(), self.client.site(4), verb, self.space, *given]
        )[0]

    def set(self, key: str, value: object) -> None:
        self._ask("set", key, _encoded_value(value))

    def get(self, key: str) -> bytes:
        return _decoded_value(self._ask("wait", [key], _timeout_ns(self.limit))[1][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), _timeout_ns(timeout if timeout is not None else self.limit))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, int(value))[1])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys))[1])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return _decoded_value(
            self._ask("compare_set", key, _encoded_value(expected), _encoded_value(desired))[1]
        )

    compareSet = compare_set  # noqa: N815

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key)[1])

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return int(self._ask("count")[1])

    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: object) -> None:
        self._ask("append", key, _encoded_value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [
            _decoded_value(text)
            for text in self._ask("wait", list(keys), _timeout_ns(self.limit))[1]
        ]

    multiGet = multi_get  # noqa: N815

    def multi_set(self, keys: Sequence[str], values: Sequence[object]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    multiSet = multi_set  # noqa: N815

    def list_keys(self) -> list[str]:
        return [key for key in self._ask("keys")[1] if key != INIT_KEY]

    # --- queues ---
    def queue_push(self, key: str, value: object) -> None:
        self._ask("push", key, _encoded_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The oldest value. Raises QueueEmptyError where there is none and ``block`` is false."""
        if block:
            return _decoded_value(self._ask("pop", [key], _timeout_ns(self.limit))[1][0])
        found = self._ask("take", key)[1]
        if found is None:
            from torch.distributed import QueueEmptyError

            raise QueueEmptyError("queue is empty")
        return _decoded_value(found)

    def queue_len(self, key: str) -> int:
        return int(self._ask("length", key)[1])

    def has_extended_api(self) -> bool:
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Of what the script says. torch's own code says the group's to every store, which is no
        wish of the script.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_CAPTURE_FOLDER):
            frame = frame.f_back
        if self.client.sites.is_own(frame.f_code.co_filename):
            self.limit = timeout

    setTimeout = set_timeout  # noqa: N815

    @property
    def timeout(self) -> timedelta:
        return self.limit or DEFAULT_TIMEOUT

    def clone(self) -> object:
        return self


def _timeout_ns(timeout: timedelta | None) -> int | None:
    return None if timeout is None else round(timeout.total_seconds() * 1e9)


class StoreServer:
    """The hub's half: keys and values of every store, and its queues."""

    def __init__(self) -> None:
        self.spaces: dict[str, dict[str, str]] = {}
        self.queues: dict[tuple[str, str], deque[str]] = {}

    def do(self, verb: str, space: str, given: Sequence[Any]) -> object:
        """Carry out what needs nobody. Raises NoNumber."""
        held = self.spaces.setdefault(space, {})
        key = given[0] if given else ""
        if verb == "set":
            held[key] = given[1]
        elif verb == "append":
            held[key] = held.get(key, "") + given[1]
        elif verb == "add":
            held[key] = str(_leading_number(key, held.get(key, "0")) + given[1])
            return int(held[key])
        elif verb == "check":
            return all(self._has(space, k) for k in key)
        elif verb == "delete":
            return held.pop(key, None) is not None
        elif verb == "count":
            return len(held)
        elif verb == "keys":
            return sorted(held)
        elif verb == "compare_set":
            if held.get(key) == given[1] or (key not in held and not given[1]):
                held[key] = given[2]
            return held.get(key, given[1])
        return self._queued(verb, (space, key), given)

    def _queued(self, verb: str, name: tuple[str, str], given: Sequence[Any]) -> object:
        if verb == "push":
            self.queues.setdefault(name, deque()).append(given[1])
        elif verb == "length":
            return len(self.queues.get(name, ()))
        elif verb == "take":
            found = self.found(name[0], [name[1]], pops=True)
            return found[0] if found else None
        return None

    def _has(self, space: str, key: str) -> bool:
        """Is there a value, or something in the queue of this name?"""
        return key in self.spaces.get(space, ()) or bool(self.queues.get((space, key)))

    def found(self, space: str, keys: Sequence[str], pops: bool = False) -> list[str] | None:
        """The values of keys, once all are there; of those of queues alone "". ``pops``: what comes
        next out of the queues.
        """
        if pops:
            queues = [self.queues.get((space, k)) for k in keys]
            return [q.popleft() for q in queues if q] if all(queues) else None
        held = self.spaces.get(space, {})
        return [held.get(k, "") for k in keys] if all(self._has(space, k) for k in keys) else None


def _leading_number(key: str, text: str) -> int:
    """The number that a value begins with, as the server of a TCPStore reads it (std::stoll)."""
    found = re.match(r"\s*[+-]?\d+", text)
    if found is None:
        raise StoreValueError(f"add: what the store has under {key} is no number")
    return int(found[0])
