"""Load pickles of plain data, without the dangers of Python's own unpickler.

No class is looked up, no function is called, and no size is trusted. The module interprets the few
opcodes that write lists, dicts, tuples, texts and numbers (protocols 0 to 5, as listed in the
standard library's pickletools). Any other opcode, above all GLOBAL, is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

#: Limit of executed opcodes.
MAX_OPCODES: Final = 8_000_000
#: Limit of values that are on the stacks at a time, not yet part of a list or dict.
_MAX_PENDING: Final = 200_000
_MAX_NUMBER_BYTES: Final = 16
#: Opcodes between two checks of that limit.
_CHECK_INTERVAL: Final = 50_000
#: Integers from here on can have equal hashes (CPython computes them modulo 2**61 - 1).
_MAX_INT_KEY: Final = 1 << 60
#: Operands of EMPTY_LIST, MARK, BINGET…, APPENDS: a list of values that occurred before. Torch
#: writes the stack of each call like this.
_LIST_OF_KNOWN: Final = re.compile(rb"\(((?:h.){1,64})e", re.DOTALL)
#: NONE, NEWTRUE and NEWFALSE.
_CONSTANTS: Final = {0x4E: None, 0x88: True, 0x89: False}
_CUT_SHORT: Final = "it is cut short: a length goes beyond its end"
_TOO_MANY_DIGITS: Final = "a number of too many digits"
#: Readers may compute the hash of a tuple, which can take for ever if tuples share tuples.
_NESTED_TUPLE: Final = "it has a tuple in a tuple, which no Flight Recorder dump contains"
_U16: Final = struct.Struct("<H").unpack_from
_U32: Final = struct.Struct("<I").unpack_from
_I32: Final = struct.Struct("<i").unpack_from


class UnsafePickle(ValueError):
    """The pickle is cut, damaged, too large, or contains something other than plain data."""


def loads_plain(data: bytes) -> Any:
    """The plain data in a pickle. Raises UnsafePickle for anything else."""
    try:
        return _PickleMachine(data).run()
    except UnsafePickle:
        raise
    except (IndexError, struct.error):
        raise UnsafePickle("it is cut short or damaged") from None
    except (TypeError, ValueError, KeyError, OverflowError):
        raise UnsafePickle("it is damaged") from None


class _PickleMachine:
    """``stack`` holds the values since the last mark, ``below`` the stacks under it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:  # noqa: PLR0912, PLR0915  (hot loop, see below)
        """Execute opcodes up to STOP.

        Hot loop: the frequent opcodes are executed here, on local variables and in the order of
        their frequency in dumps of torch; the others by the table, for which the position and the
        stack are copied back. A dump of 2000 calls has 160 000 opcodes.
        """
        data, end = self.data, len(self.data)
        at = 0
        stack, below, memo = self.stack, self.below, self.memo
        for _ in range(MAX_OPCODES // _CHECK_INTERVAL):
            for _ in range(_CHECK_INTERVAL):
                code = data[at]
                at += 1
                if code == 0x68:  # BINGET
                    stack.append(memo[data[at]])
                    at += 1
                elif code == 0x5D:  # EMPTY_LIST
                    known = _LIST_OF_KNOWN.match(data, at) if data[at : at + 2] == b"(h" else None
                    if known is None:
                        stack.append([])
                    else:
                        stack.append([memo[key] for key in known[1][1::2]])
                        at = known.end()
                elif code == 0x28:  # MARK
                    below.append(stack)
                    stack = []
                elif code == 0x65:  # APPENDS
                    items, stack = stack, below.pop()
                    target = stack[-1]
                    if type(target) is not list:
                        raise UnsafePickle("it is damaged")
                    target += items
                elif code == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif code == 0x4D:  # BININT2
                    stack.append(_U16(data, at)[0])
                    at += 2
                elif code in _CONSTANTS:
                    stack.append(_CONSTANTS[code])
                elif code == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == 0x58:  # BINUNICODE
                    start, at = at + 4, at + 4 + _U32(data, at)[0]
                    if at > end:
                        raise UnsafePickle(_CUT_SHORT)
                    stack.append(data[start:at].decode("utf-8", "replace"))
                elif code == 0x6A:  # LONG_BINGET
                    stack.append(memo[_U32(data, at)[0]])
                    at += 4
                elif code == 0x72:  # LONG_BINPUT
                    memo[_U32(data, at)[0]] = stack[-1]
                    at += 4
                elif code == 0x4A:  # BININT
                    stack.append(_I32(data, at)[0])
                    at += 4
                elif code == 0x75:  # SETITEMS
                    items, stack = stack, below.pop()
                    self.set_items(stack[-1], items)
                elif code == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif code == 0x2E:  # STOP
                    return stack[-1]
                else:
                    step = _OPCODE_TABLE[code]
                    if step is None:
                        raise UnsafePickle(_refusal(code))
                    self.at, self.stack = at, stack
                    step(self)
                    at, stack = self.at, self.stack
            if len(stack) + len(below) > _MAX_PENDING:
                raise UnsafePickle("it builds more values than any dump contains")
        raise UnsafePickle(f"it takes more than {MAX_OPCODES:,} steps")

    def pop(self) -> object:
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise UnsafePickle(_CUT_SHORT)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0])

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        self.at, start = end + 1, self.at
        return self.data[start:end]

    def since_mark(self) -> list[object]:
        """Pop the values since the last mark, and the mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def push(self, value: object) -> None:
        self.stack.append(value)

    def set_items(self, target: object, items: list[object]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise UnsafePickle("it is damaged")
        keys = items[::2]
        # The keys of a dump are texts, which are checked fastest by their type alone.
        if set(map(type, keys)) != {str} and not all(map(_is_safe_key, keys)):
            raise UnsafePickle("it has a key that is neither a text nor a small integer")
        target.update(zip(keys, items[1::2], strict=True))

    def extend(self, target: object, items: Sequence[object]) -> None:
        if not isinstance(target, list):
            raise UnsafePickle("it is damaged")
        target.extend(items)

    def long(self, length: int) -> int:
        if length > _MAX_NUMBER_BYTES:
            raise UnsafePickle(_TOO_MANY_DIGITS)
        return int.from_bytes(self.take(length), "little", signed=True)

    def digits(self, text: bytes) -> int:
        if len(text) > 40:
            raise UnsafePickle(_TOO_MANY_DIGITS)
        return int(text.rstrip(b"L"))


def _is_safe_key(key: object) -> bool:
    """Whether a hostile file cannot make the hash of this key slow, or equal to that of others.

    Python computes the hash of a tuple again at each use, along all paths to its elements: a pickle
    of 400 bytes can build a tuple whose hash never ends.
    """
    return type(key) is str or (type(key) is int and -_MAX_INT_KEY < key < _MAX_INT_KEY)


def _refusal(code: int) -> str:
    names = {
        0x63: "GLOBAL",
        0x93: "STACK_GLOBAL",
        0x52: "REDUCE",
        0x62: "BUILD",
        0x69: "INST",
        0x6F: "OBJ",
        0x81: "NEWOBJ",
        0x92: "NEWOBJ_EX",
        0x50: "PERSID",
        0x51: "BINPERSID",
        0x82: "EXT1",
        0x83: "EXT2",
        0x84: "EXT4",
    }
    if code in names:
        return (
            f"it would load or call Python code ({names[code]}); a Flight Recorder dump contains "
            "plain data only"
        )
    return f"it has an opcode that no Flight Recorder dump contains (0x{code:02x})"


def _push_text(m: _PickleMachine, length: int) -> None:
    m.push(m.take(length).decode("utf-8", "replace"))


def _int_line(m: _PickleMachine) -> None:
    text = m.line()
    m.push({b"00": False, b"01": True}[text] if text in (b"00", b"01") else m.digits(text))


def _store_memo(m: _PickleMachine, key: int) -> None:
    m.memo[key] = m.stack[-1]


def _push_tuple(m: _PickleMachine, count: int) -> None:
    if count > len(m.stack):
        raise UnsafePickle("it is damaged")
    items = [m.pop() for _ in range(count)]
    _push_flat_tuple(m, items[::-1])


def _push_flat_tuple(m: _PickleMachine, items: list[object]) -> None:
    """Push a tuple. Tuples in tuples are refused, because readers may compute a tuple's hash."""
    if any(isinstance(item, tuple) for item in items):
        raise UnsafePickle(_NESTED_TUPLE)
    m.push(tuple(items))


def _push_pair(m: _PickleMachine) -> None:
    second, first = m.stack.pop(), m.stack.pop()
    if isinstance(first, tuple) or isinstance(second, tuple):
        raise UnsafePickle(_NESTED_TUPLE)
    m.stack.append((first, second))


def _push_long(m: _PickleMachine) -> None:
    length = m.data[m.at]
    m.at += 1
    m.stack.append(m.long(length))


def _append(m: _PickleMachine) -> None:
    value = m.stack.pop()
    m.extend(m.stack[-1], (value,))


def _skip_frame(m: _PickleMachine) -> None:
    m.take(8)


def _check_protocol(m: _PickleMachine) -> None:
    if m.take(1)[0] > 5:
        raise UnsafePickle("its protocol is newer than 5")


def _set_item(m: _PickleMachine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.stack[-1], [key, value])


def _new_dict(m: _PickleMachine) -> None:
    made: dict[object, object] = {}
    m.set_items(made, m.since_mark())
    m.push(made)


#: The opcodes that ``run`` does not execute itself.
_OPCODES: dict[int, Callable[[_PickleMachine], None]] = {
    0x80: _check_protocol,
    0x95: _skip_frame,
    0x49: _int_line,
    0x4C: lambda m: m.push(m.digits(m.line())),
    0x46: lambda m: m.push(float(m.line())),
    0x61: _append,
    0x86: _push_pair,
    0x8A: _push_long,
    0x8B: lambda m: m.push(m.long(m.number("i"))),
    0x47: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: _push_text(m, m.number("B")),
    0x8D: lambda m: _push_text(m, m.number("Q")),
    0x55: lambda m: _push_text(m, m.number("B")),
    0x54: lambda m: _push_text(m, m.number("i")),
    0x56: lambda m: m.push(m.line().decode("raw-unicode-escape")),
    0x42: lambda m: m.push(m.take(m.number("I"))),
    0x43: lambda m: m.push(m.take(m.number("B"))),
    0x8E: lambda m: m.push(m.take(m.number("Q"))),
    0x29: lambda m: m.push(()),
    0x6C: lambda m: m.push(m.since_mark()),
    0x64: _new_dict,
    0x74: lambda m: _push_flat_tuple(m, m.since_mark()),
    0x85: lambda m: _push_tuple(m, 1),
    0x87: lambda m: _push_tuple(m, 3),
    0x73: _set_item,
    0x70: lambda m: _store_memo(m, m.digits(m.line())),
    0x94: lambda m: _store_memo(m, len(m.memo)),
    0x67: lambda m: m.push(m.memo[m.digits(m.line())]),
}
_OPCODE_TABLE: tuple[Callable[[_PickleMachine], None] | None, ...] = tuple(
    _OPCODES.get(code) for code in range(256)
)
