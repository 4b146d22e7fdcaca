"""Repairs of messages: missing counterparts, and sends and receives whose arguments differ.

Each function yields (words, changed data).
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

#: A message and its counterpart.
_COUNTERPART_OP: Final = {"send": "recv", "recv": "send", "isend": "recv", "irecv": "send"}
_BATCH_OP: Final = {"send": "isend", "recv": "irecv"}
_PEER_FIELD: Final = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
#: Fields in which both sides must agree.
_SHARED_FIELDS: Final = ("tensor", "tag", "group")
#: Places in the other rank's steps that are tried, nearest to the message's own place first.
_MAX_PLACES: Final = 12


def is_message(entry: object) -> bool:
    """Whether a program entry is a send or a receive."""
    return op_of(entry) in _PEER_FIELD


def align_with_counterparts(
    data: ScenarioData, named: list[DataPath], others: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A message gets the arguments of a message in the other direction between the same ranks."""
    messages = [path for path in others if is_message(value_at(data, path))]
    named_messages = [path for path in named if is_message(value_at(data, path))]
    for path in named_messages:
        for other in messages:
            if _may_match(data, path, other):
                yield from _with_equal_fields(data, path, other)


def _may_match(data: ScenarioData, path: DataPath, other: DataPath) -> bool:
    """Whether one of two messages may be the send that the other receives."""
    peer_field = _PEER_FIELD[op_of(value_at(data, path))]
    if peer_field == _PEER_FIELD[op_of(value_at(data, other))]:
        return False  # both send, or both receive
    return _may_name(data, path, other) and _may_name(data, other, path)


def _may_name(data: ScenarioData, path: DataPath, other: DataPath) -> bool:
    """Whether the peer of a message may be a rank that makes the other call."""
    entry, ranks = value_at(data, path), owner_ranks(data, other)
    peer = fields_of(entry).get(_PEER_FIELD[op_of(entry)])
    return not isinstance(peer, int) or not ranks or peer in ranks


def _with_equal_fields(
    data: ScenarioData, path: DataPath, other: DataPath
) -> Iterator[tuple[str, ScenarioData]]:
    """Make the fields that differ equal: one at a time, then all together."""
    entry = value_at(data, path)
    own, theirs = fields_of(entry), fields_of(value_at(data, other))
    differing = [key for key in _SHARED_FIELDS if own.get(key) != theirs.get(key)]
    choices = [[key] for key in differing]
    if len(differing) > 1:
        choices.append(differing)
    for keys in choices:
        fields = {key: value for key, value in own.items() if key not in keys}
        fields |= {key: theirs[key] for key in keys if key in theirs}
        changed = make_step(op_of(entry), fields, ranks_of(entry))
        yield (
            f"{op_of(entry)}: use the {' and '.join(keys)} of the other side",
            with_steps_replaced(data, path, [changed]),
        )


def change_peers(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """A message goes to, or comes from, another rank."""
    world = data.get("world")
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry) or not isinstance(world, int):
            continue
        fields, key = fields_of(entry), _PEER_FIELD[op_of(entry)]
        for rank in range(min(world, 8)):
            if fields.get(key) != rank and rank not in owner_ranks(data, path):
                changed = make_step(op_of(entry), {**fields, key: rank}, ranks_of(entry))
                yield (
                    f"{op_of(entry)}: set {key} to {rank}",
                    with_steps_replaced(data, path, [changed]),
                )


def add_counterparts(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The rank that a message names makes the counterpart.

    It goes into a batch of that rank, or between two of its steps.
    """
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry):
            continue
        fields, owners = fields_of(entry), owner_ranks(data, path)
        peer = fields.get(_PEER_FIELD[op_of(entry)])
        if not isinstance(peer, int) or len(owners) != 1:
            continue
        op = _COUNTERPART_OP[op_of(entry)]
        shared: ScenarioData = {key: fields[key] for key in _SHARED_FIELDS if key in fields}
        counterpart = {_PEER_FIELD[op]: owners[0], **shared}
        list_path = step_list_of_rank(data, peer)
        if op == "recv" and list_path is not None:
            buffer = _usual_buffer(value_at(data, list_path), owners[0])
            counterpart |= {"tensor": buffer} if buffer else {}
        if list_path is None:  # the peer has no list of steps of its own yet
            changed = copy.deepcopy(data)
            changed["program"].append(make_step(op, counterpart, peer))
            yield f"add the {op} on rank {peer}", changed
        else:
            yield from _insertions(data, path, list_path, op, counterpart, peer)


def _usual_buffer(steps: list[object], source: int) -> str:
    """The tensor into which a rank receives from this source elsewhere; "" if it does not."""
    for entry in steps:
        is_receive = op_of(entry) in ("recv", "irecv")
        if is_receive and fields_of(entry).get("src") == source:
            return str(fields_of(entry).get("tensor", ""))
    return ""


def _insertions(
    data: ScenarioData,
    path: DataPath,
    list_path: DataPath,
    op: str,
    counterpart: ScenarioData,
    peer: int,
) -> Iterator[tuple[str, ScenarioData]]:
    """The counterpart of the message at ``path``, at several places of the peer's steps."""
    steps = value_at(data, list_path)
    near = _relative_position(data, path) * len(steps)
    places = sorted(range(len(steps) + 1), key=lambda k: abs(k - near))[:_MAX_PLACES]
    for k in dict.fromkeys((*places, len(steps))):
        changed = copy.deepcopy(data)
        value_at(changed, list_path).insert(k, {op: counterpart})
        yield f"add the {op} on rank {peer}", changed
        if k < len(steps) and op_of(steps[k]) == "batch_isend_irecv":
            changed = copy.deepcopy(data)
            batch = value_at(changed, (*list_path, k, "batch_isend_irecv", "ops"))
            batch.append({_BATCH_OP[op]: counterpart})
            yield f"add the {_BATCH_OP[op]} to the batch of rank {peer}", changed


def _relative_position(data: ScenarioData, path: DataPath) -> float:
    """The position of a call in its list of steps, from 0 (first) to 1."""
    if "ops" in path:
        path = path[: path.index("ops") - 1]
    return int(path[-1]) / max(len(value_at(data, path[:-1])), 1)


__all__ = ["is_message", "add_counterparts", "align_with_counterparts", "change_peers"]
