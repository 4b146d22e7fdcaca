"""The key-value store of a program: one for all ranks, kept by the hub, so that a wait for a key is seen like any other wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from distsim.capture.client import Client


def _text(value: Any) -> str:
    """Bytes as a text of one character a byte."""
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _value(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


class StoreMethods:
    """What a `Store` of the hub does. `patches` lays it over torch's class. ``space``: stores of one name share their keys."""

    client: Client
    space: str
    limit: timedelta | None = None

    def _ask(self, verb: str, *given: object) -> Any:
        if not self.client.joined:
            self.client.join(-1, -1)
        return self.client.ask(["store", self.client.number(), self.client.site(4), verb, self.space, *given])[0]

    def set(self, key: str, value: object) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        return _value(self._ask("wait", [key], _ns(self.limit))[1][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), _ns(timeout if timeout is not None else self.limit))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, int(value))[1])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys))[1])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return _value(self._ask("compare_set", key, _text(expected), _text(desired))[1])

    compareSet = compare_set  # noqa: N815

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key)[1])

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return int(self._ask("count")[1])

    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: object) -> None:
        self._ask("append", key, _text(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_value(text) for text in self._ask("wait", list(keys), _ns(self.limit))[1]]

    multiGet = multi_get  # noqa: N815

    def multi_set(self, keys: Sequence[str], values: Sequence[object]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    multiSet = multi_set  # noqa: N815

    def list_keys(self) -> list[str]:
        return list(self._ask("keys")[1])

    def has_extended_api(self) -> bool:
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """A store's own time-out is torch's default unless somebody sets it; waits with it are no wish of the script."""

    setTimeout = set_timeout  # noqa: N815

    @property
    def timeout(self) -> timedelta:
        return self.limit or timedelta(minutes=5)

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return 29500

    def clone(self) -> object:
        return self


def _ns(timeout: timedelta | None) -> int | None:
    return None if timeout is None else round(timeout.total_seconds() * 1e9)


class Shelf:
    """The hub's half: keys and values of every store."""

    def __init__(self) -> None:
        self.spaces: dict[str, dict[str, str]] = {}

    def do(self, verb: str, space: str, given: Sequence[Any]) -> object:
        """Carry out what needs nobody."""
        held = self.spaces.setdefault(space, {})
        key = given[0] if given else ""
        if verb == "set":
            held[key] = given[1]
        elif verb == "append":
            held[key] = held.get(key, "") + given[1]
        elif verb == "add":
            held[key] = str(int(held.get(key, "0")) + given[1])
            return int(held[key])
        elif verb == "check":
            return all(k in held for k in key)
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
        return None

    def found(self, space: str, keys: Sequence[str]) -> list[str] | None:
        """The values of keys, once all are there."""
        held = self.spaces.get(space, {})
        return [held[k] for k in keys] if all(k in held for k in keys) else None
