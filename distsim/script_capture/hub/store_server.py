"""The hub's half of torch's key-value stores: keys, values and queues.

Values are texts with one character per byte. The rank's half, which encodes them and waits, is
`distsim.script_capture.rank.store_client`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from distsim.script_capture.protocol.message_types import SERVER_KEY_PREFIX, WORKERS_KEY_PREFIX

#: Keys of the start-up of a TCPStore (`distsim.script_capture.patches.store_classes`).
_TORCH_KEY_PREFIXES: Final = (SERVER_KEY_PREFIX, WORKERS_KEY_PREFIX, "init/", "ports")


class StoreValueError(Exception):
    """`add` to a value that is not a number."""


class StoreServer:
    """The keys and queues of every store, by the store's name (its ``space``)."""

    def __init__(self) -> None:
        self.spaces: dict[str, dict[str, str]] = {}
        self.queues: dict[tuple[str, str], deque[str]] = {}

    def has_keys_of_the_script(self) -> bool:
        """Whether the script stored anything: ranks may have communicated through it."""
        stored = {key for keys in self.spaces.values() for key in keys}
        stored.update(key for _, key in self.queues)
        return not all(key.startswith(_TORCH_KEY_PREFIXES) for key in stored)

    def execute(self, verb: str, space: str, arguments: Sequence[Any]) -> object:
        """Execute an operation that never waits. Raises StoreValueError."""
        values = self.spaces.setdefault(space, {})
        key = arguments[0] if arguments else ""
        if verb == "set":
            values[key] = arguments[1]
        elif verb == "append":
            values[key] = values.get(key, "") + arguments[1]
        elif verb == "add":
            values[key] = str(_leading_number(key, values.get(key, "0")) + arguments[1])
            return int(values[key])
        elif verb == "check":
            return all(self._exists(space, k) for k in key)  # here, `key` is a list of keys
        elif verb == "delete":
            return values.pop(key, None) is not None
        elif verb == "count":
            return len(values)
        elif verb == "keys":
            return sorted(values)
        elif verb == "compare_set":
            return _compare_set(values, *arguments)
        return self._execute_on_queue(verb, space, arguments)

    def _execute_on_queue(self, verb: str, space: str, arguments: Sequence[Any]) -> object:
        if verb == "push":
            key, value = arguments
            self.queues.setdefault((space, key), deque()).append(value)
        elif verb == "length":
            return len(self.queues.get((space, arguments[0]), ()))
        elif verb == "take":
            found = self.pop(space, [arguments[0]])
            return found[0] if found else None
        return None

    def _exists(self, space: str, key: str) -> bool:
        """Whether the key has a value, or its queue an element."""
        return key in self.spaces.get(space, ()) or bool(self.queues.get((space, key)))

    def values(self, space: str, keys: Sequence[str]) -> list[str] | None:
        """The values of keys, once all exist. A key that only has a queue has the value ""."""
        if not all(self._exists(space, key) for key in keys):
            return None
        values = self.spaces.get(space, {})
        return [values.get(key, "") for key in keys]

    def pop(self, space: str, keys: Sequence[str]) -> list[str] | None:
        """The oldest element of each queue, once none is empty."""
        queues = [self.queues.get((space, key)) for key in keys]
        if not all(queues):
            return None
        return [queue.popleft() for queue in queues if queue]


def _compare_set(values: dict[str, str], key: str, expected: str, desired: str) -> str:
    """Set a key that has the expected value, or has none if none is expected."""
    is_expected_absent = key not in values and not expected
    if values.get(key) == expected or is_expected_absent:
        values[key] = desired
    return values.get(key, expected)


def _leading_number(key: str, text: str) -> int:
    """The number that a value starts with, as the server of a TCPStore reads it (std::stoll)."""
    found = re.match(r"\s*[+-]?\d+", text)
    if found is None:
        raise StoreValueError(f"add: the store's value of {key} is not a number")
    return int(found[0])
