"""Repairs of messages: the other side of one that has none, and what a send and its receive say differently."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

from distsim.repair.steps import Data, Path, at, fields_of, list_of, op_of, owners, ranks_of, step, with_entries

#: A message and its other side.
_OTHER: Final = {"send": "recv", "recv": "send", "isend": "recv", "irecv": "send"}
_AS_PART: Final = {"send": "isend", "recv": "irecv"}
_PEER: Final = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
#: What both sides must say alike.
_SAME: Final = ("tensor", "tag", "group")
#: Places of the other rank's steps that are tried, those nearest to where the message stands first.
_PLACES: Final = 12


def is_message(entry: object) -> bool:
    return op_of(entry) in _PEER


def pairs(data: Data, named: list[Path], others: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): a message says what one that goes between the same two ranks, the other way round, says."""
    messages = [path for path in others if is_message(at(data, path))]
    for path in named if messages else ():
        for other in messages if is_message(at(data, path)) else ():
            if _sides(data, path, other):
                yield from _said_alike(data, path, other)


def _sides(data: Data, path: Path, other: Path) -> bool:
    """Whether one may be the send that the other receives."""
    mine, theirs = at(data, path), at(data, other)
    if (_PEER[op_of(mine)] == "dst") == (_PEER[op_of(theirs)] == "dst"):
        return False
    whom, from_whom = owners(data, other), owners(data, path)
    peer, back = fields_of(mine).get(_PEER[op_of(mine)]), fields_of(theirs).get(_PEER[op_of(theirs)])
    return not (isinstance(peer, int) and whom and peer not in whom) and not (
        isinstance(back, int) and from_whom and back not in from_whom
    )


def _said_alike(data: Data, path: Path, other: Path) -> Iterator[tuple[str, Data]]:
    mine, theirs = fields_of(at(data, path)), fields_of(at(data, other))
    differ = [key for key in _SAME if mine.get(key) != theirs.get(key)]
    for keys in [[key] for key in differ] + ([differ] if len(differ) > 1 else []):
        fields = {k: v for k, v in mine.items() if k not in keys} | {k: theirs[k] for k in keys if k in theirs}
        changed = step(op_of(at(data, path)), fields, ranks_of(at(data, path)))
        yield f"{op_of(at(data, path))}: the {' and '.join(keys)} of its other side", with_entries(data, path, [changed])


def peers(data: Data, named: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): a message goes to, or comes from, another rank."""
    world = data.get("world")
    for path in named:
        entry = at(data, path)
        if not is_message(entry) or not isinstance(world, int):
            continue
        fields, key = fields_of(entry), _PEER[op_of(entry)]
        for rank in range(min(world, 8)):
            if fields.get(key) != rank and rank not in owners(data, path):
                changed = step(op_of(entry), {**fields, key: rank}, ranks_of(entry))
                yield f"{op_of(entry)}: {key} {rank}", with_entries(data, path, [changed])


def other_sides(data: Data, named: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): the rank that a message names makes the other side of it, in a batch that it has or between two of its steps."""
    for path in named:
        entry = at(data, path)
        if not is_message(entry):
            continue
        fields, mine, op = fields_of(entry), owners(data, path), _OTHER[op_of(entry)]
        peer = fields.get(_PEER[op_of(entry)])
        where = list_of(data, peer) if isinstance(peer, int) else None
        if not isinstance(peer, int) or len(mine) != 1:
            continue
        said: Data = {key: fields[key] for key in _SAME if key in fields}
        if where is None:  # no step of its own yet
            found = copy.deepcopy(data)
            found["program"].append(step(op, {_PEER[op]: mine[0], **said}, peer))
            yield f"add the {op} on rank {peer}", found
        else:
            yield from _inserted(data, path, where, op, {_PEER[op]: mine[0], **said}, peer)


def _inserted(data: Data, path: Path, where: Path, op: str, said: Data, peer: int) -> Iterator[tuple[str, Data]]:
    steps = at(data, where)
    near = _share(data, path) * len(steps)
    places = sorted(range(len(steps) + 1), key=lambda k: abs(k - near))[:_PLACES]
    for k in dict.fromkeys((*places, len(steps))):
        found = copy.deepcopy(data)
        at(found, where).insert(k, {op: said})
        yield f"add the {op} on rank {peer}", found
        if k < len(steps) and op_of(steps[k]) == "batch_isend_irecv":
            found = copy.deepcopy(data)
            at(found, (*where, k, "batch_isend_irecv", "ops")).append({_AS_PART[op]: said})
            yield f"add the {_AS_PART[op]} to the batch of rank {peer}", found


def _share(data: Data, path: Path) -> float:
    """How far down its list of steps a call stands, from 0 to 1."""
    if "ops" in path:
        path = path[: path.index("ops") - 1]
    return int(path[-1]) / max(len(at(data, path[:-1])), 1)


__all__ = ["is_message", "other_sides", "pairs", "peers"]
