"""Keys of caches: equal keys mean that a call is valid, and costs and agrees, in the same way.

Reading a vector of 10 000 ranks is slow, so a vector that occurs again is read only once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from distsim.program.code import BufferVector


def vector_key(value: object) -> Hashable:
    """Equal vectors have equal keys."""
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


class VectorKeys:
    """Like `vector_key`, for vectors that occur repeatedly: each object is read once, and kept.

    Keeping the vector keeps its id from being given to another one.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[object, Hashable]] = {}  # by id: the vector, and its key

    def __call__(self, value: object) -> Hashable:
        """The key of a value."""
        if not isinstance(value, np.ndarray):
            return value
        known = self._known.get(id(value))
        if known is None:
            number = self._numbers.setdefault(vector_key(value), len(self._numbers))
            known = self._known[id(value)] = (value, ("vector", number))
        _, key = known
        return key


def arguments_key(fields: Mapping[str, object]) -> Hashable:
    """Equal for arguments that an operation's rules treat the same.

    The rules read the sizes of buffers, not their names; but they compare buffers, so the key shows
    which ones are the same copy.
    """
    single = _only_buffer(fields)
    if single is not None:
        # The common case, an in-place collective or a message, is worth a shorter way.
        others = tuple(
            [
                (name, _value_key(value))
                for name, value in fields.items()
                if name not in ("inputs", "outputs")
            ]
        )
        return ("one buffer", bool(single.name), single.shape, single.dtype, others)
    buffers = [*_flat_buffers(fields.get("inputs")), *_flat_buffers(fields.get("outputs"))]
    values = ((name, _value_key(value)) for name, value in fields.items())
    return (_copies_key(buffers), *values)


def _only_buffer(fields: Mapping[str, object]) -> BufferVector | None:
    """The buffer of a call with one input that is also its one output, if it is uniform."""
    inputs, outputs = fields.get("inputs"), fields.get("outputs")
    if not (type(inputs) is tuple and type(outputs) is tuple):
        return None
    if not (len(inputs) == len(outputs) == 1 and inputs[0] is outputs[0]):
        return None
    buffer = inputs[0]
    return buffer if isinstance(buffer, BufferVector) and _is_uniform(buffer) else None


def _is_uniform(buffer: BufferVector) -> bool:
    """Whether a buffer is the same copy, of the same size, on all ranks."""
    return type(buffer.index) is int and all(type(size) is int for size in buffer.shape)


def _copies_key(buffers: list[BufferVector]) -> Hashable:
    """Shows which buffers are the same copy, by name only if the copies differ by rank."""
    copies = [(buffer.name, vector_key(buffer.index)) for buffer in buffers]
    if any(isinstance(buffer.index, np.ndarray) for buffer in buffers):
        return tuple(copies)
    first_use: dict[Hashable, int] = {}
    for position, copy in enumerate(copies):
        first_use.setdefault(copy, position)
    return tuple((bool(copy[0]), first_use[copy]) for copy in copies)


def _flat_buffers(value: object) -> Iterator[BufferVector]:
    if isinstance(value, BufferVector):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _flat_buffers(item)


def _value_key(value: object) -> Hashable:
    if isinstance(value, np.ndarray):
        return vector_key(value)
    if isinstance(value, BufferVector):
        return (tuple(map(vector_key, value.shape)), value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_value_key, value))
    return (type(value), value)
