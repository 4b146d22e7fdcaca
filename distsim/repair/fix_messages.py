"""Repairs of messages: the other side of one that has none, and what a send and its receive say
differently.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    make_step,
    op_of,
    owner_ranks,
    ranks_of,
    step_list_of_rank,
    value_at,
    with_steps_replaced,
)

#: A message and its other side.
_COUNTERPART_OP: Final = {"send": "recv", "recv": "send", "isend": "recv", "irecv": "send"}
_BATCH_OP: Final = {"send": "isend", "recv": "irecv"}
_PEER_FIELD: Final = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
#: What both sides must say alike.
_SHARED_FIELDS: Final = ("tensor", "tag", "group")
#: Places of the other rank's steps that are tried, those nearest to where the message stands first.
_MAX_PLACES: Final = 12


def is_message(entry: object) -> bool:
    return op_of(entry) in _PEER_FIELD


def align_with_counterparts(
    data: ScenarioData, named: list[DataPath], others: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a message says what one that goes between the same two ranks, the other way
    round, says.
    """
    messages = [path for path in others if is_message(value_at(data, path))]
    for path in named if messages else ():
        for other in messages if is_message(value_at(data, path)) else ():
            if _may_match(data, path, other):
                yield from _with_equal_fields(data, path, other)


def _may_match(data: ScenarioData, path: DataPath, other: DataPath) -> bool:
    """Whether one may be the send that the other receives."""
    mine, theirs = value_at(data, path), value_at(data, other)
    if (_PEER_FIELD[op_of(mine)] == "dst") == (_PEER_FIELD[op_of(theirs)] == "dst"):
        return False
    whom, from_whom = owner_ranks(data, other), owner_ranks(data, path)
    peer, back = (
        fields_of(mine).get(_PEER_FIELD[op_of(mine)]),
        fields_of(theirs).get(_PEER_FIELD[op_of(theirs)]),
    )
    return not (isinstance(peer, int) and whom and peer not in whom) and not (
        isinstance(back, int) and from_whom and back not in from_whom
    )


def _with_equal_fields(
    data: ScenarioData, path: DataPath, other: DataPath
) -> Iterator[tuple[str, ScenarioData]]:
    mine, theirs = fields_of(value_at(data, path)), fields_of(value_at(data, other))
    differ = [key for key in _SHARED_FIELDS if mine.get(key) != theirs.get(key)]
    for keys in [[key] for key in differ] + ([differ] if len(differ) > 1 else []):
        fields = {k: v for k, v in mine.items() if k not in keys} | {
            k: theirs[k] for k in keys if k in theirs
        }
        changed = make_step(op_of(value_at(data, path)), fields, ranks_of(value_at(data, path)))
        yield (
            f"{op_of(value_at(data, path))}: the {' and '.join(keys)} of its other side",
            with_steps_replaced(data, path, [changed]),
        )


def change_peers(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a message goes to, or comes from, another rank."""
    world = data.get("world")
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry) or not isinstance(world, int):
            continue
        fields, key = fields_of(entry), _PEER_FIELD[op_of(entry)]
        for rank in range(min(world, 8)):
            if fields.get(key) != rank and rank not in owner_ranks(data, path):
                changed = make_step(op_of(entry), {**fields, key: rank}, ranks_of(entry))
                yield f"{op_of(entry)}: {key} {rank}", with_steps_replaced(data, path, [changed])


def add_counterparts(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): the rank that a message names makes the other side of it, in a batch that it
    has or between two of its steps.
    """
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry):
            continue
        fields, mine, op = fields_of(entry), owner_ranks(data, path), _COUNTERPART_OP[op_of(entry)]
        peer = fields.get(_PEER_FIELD[op_of(entry)])
        where = step_list_of_rank(data, peer) if isinstance(peer, int) else None
        if not isinstance(peer, int) or len(mine) != 1:
            continue
        said: ScenarioData = {key: fields[key] for key in _SHARED_FIELDS if key in fields}
        if where is None:  # no step of its own yet
            found = copy.deepcopy(data)
            found["program"].append(make_step(op, {_PEER_FIELD[op]: mine[0], **said}, peer))
            yield f"add the {op} on rank {peer}", found
        else:
            yield from _insertions(data, path, where, op, {_PEER_FIELD[op]: mine[0], **said}, peer)


def _insertions(
    data: ScenarioData, path: DataPath, where: DataPath, op: str, said: ScenarioData, peer: int
) -> Iterator[tuple[str, ScenarioData]]:
    steps = value_at(data, where)
    near = _relative_position(data, path) * len(steps)
    places = sorted(range(len(steps) + 1), key=lambda k: abs(k - near))[:_MAX_PLACES]
    for k in dict.fromkeys((*places, len(steps))):
        found = copy.deepcopy(data)
        value_at(found, where).insert(k, {op: said})
        yield f"add the {op} on rank {peer}", found
        if k < len(steps) and op_of(steps[k]) == "batch_isend_irecv":
            found = copy.deepcopy(data)
            value_at(found, (*where, k, "batch_isend_irecv", "ops")).append({_BATCH_OP[op]: said})
            yield f"add the {_BATCH_OP[op]} to the batch of rank {peer}", found


def _relative_position(data: ScenarioData, path: DataPath) -> float:
    """How far down its list of steps a call stands, from 0 to 1."""
    if "ops" in path:
        path = path[: path.index("ops") - 1]
    return int(path[-1]) / max(len(value_at(data, path[:-1])), 1)


__all__ = ["is_message", "add_counterparts", "align_with_counterparts", "change_peers"]
