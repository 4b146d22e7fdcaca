"""Repairs of messages: missing counterparts, and sends and receives whose arguments differ.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    calling_ranks,
    declared_tensor,
    fields_of,
    make_step,
    names_in,
    op_of,
    owner_ranks,
    parenthesised_line,
    ranks_of,
    step_list_of_rank,
    value_at,
    value_by_rank,
    values_as_words,
    with_steps_replaced,
)

#: A message and its counterpart.
COUNTERPART_OP: Final = {"send": "recv", "recv": "send", "isend": "recv", "irecv": "send"}
_BATCH_OP: Final = {"send": "isend", "recv": "irecv"}
PEER_FIELD: Final = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
#: Fields in which both sides must agree.
_SHARED_FIELDS: Final = ("tensor", "tag", "group")
#: Peers that are tried for each message, besides the likely ones.
_MAX_PEERS: Final = 8
#: Places in the other rank's steps that are tried, nearest to the message's own place first.
_MAX_PLACES: Final = 12
#: Ranks that make one message together, and whose counterparts are tried.
_MAX_OWNERS: Final = 8


def is_message(entry: object) -> bool:
    """Whether a program entry is a send or a receive."""
    return op_of(entry) in PEER_FIELD


def align_with_counterparts(
    data: ScenarioData,
    named: list[DataPath],
    others: list[DataPath],
    lines: Mapping[DataPath, int],
) -> Iterator[tuple[str, ScenarioData]]:
    """A message gets the arguments of a message in the other direction between the same ranks."""
    messages = [path for path in others if is_message(value_at(data, path))]
    named_messages = [path for path in named if is_message(value_at(data, path))]
    # A receive follows its send: the sender knows what the message is.
    named_messages.sort(key=lambda path: PEER_FIELD[op_of(value_at(data, path))] == "dst")
    for path in named_messages:
        for other in messages:
            if _may_match(data, path, other):
                yield from _with_equal_fields(data, path, other, lines)


def _may_match(data: ScenarioData, path: DataPath, other: DataPath) -> bool:
    """Whether one of two messages may be the send that the other receives."""
    peer_field = PEER_FIELD[op_of(value_at(data, path))]
    if peer_field == PEER_FIELD[op_of(value_at(data, other))]:
        return False  # both send, or both receive
    return _may_name(data, path, other) and _may_name(data, other, path)


def _may_name(data: ScenarioData, path: DataPath, other: DataPath) -> bool:
    """Whether the peer of a message may be a rank that makes the other call."""
    entry, ranks = value_at(data, path), owner_ranks(data, other)
    peer = fields_of(entry).get(PEER_FIELD[op_of(entry)])
    return not isinstance(peer, int) or not ranks or peer in ranks


def _with_equal_fields(
    data: ScenarioData, path: DataPath, other: DataPath, lines: Mapping[DataPath, int]
) -> Iterator[tuple[str, ScenarioData]]:
    """Make the fields that differ equal: one at a time, then all together."""
    entry = value_at(data, path)
    own, theirs = fields_of(entry), fields_of(value_at(data, other))
    like = op_of(value_at(data, other)) + parenthesised_line(lines, other)
    differing = [key for key in _SHARED_FIELDS if own.get(key) != theirs.get(key)]
    choices = [[key] for key in differing]
    if len(differing) > 1:
        choices.append(differing)
    for keys in choices:
        fields = {key: value for key, value in own.items() if key not in keys}
        fields |= {key: theirs[key] for key in keys if key in theirs}
        changed = make_step(op_of(entry), fields, ranks_of(entry))
        yield (
            f"{op_of(entry)}: {values_as_words(keys, theirs)}, like {like}",
            with_steps_replaced(data, path, [changed]),
        )


def change_peers(
    data: ScenarioData, named: list[DataPath], program: Program | None = None
) -> Iterator[tuple[str, ScenarioData]]:
    """A message goes to, or comes from, another rank.

    The ranks come first with which the program has as many sends as receives afterwards.
    """
    world = data.get("world")
    missing = Counter[_Direction]() if program is None else _missing_receives(program)
    likely: list[_PeerChange] = []
    others: list[_PeerChange] = []
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry) or not isinstance(world, int):
            continue
        owners = owner_ranks(data, path)
        for rank in range(world):
            change = _PeerChange(path, fields_of(entry).get(PEER_FIELD[op_of(entry)]), rank)
            if change.peer == rank or rank in owners:
                continue
            if _evens_counts(op_of(entry), owners, change, missing):
                likely.append(change)
            elif rank < _MAX_PEERS:
                others.append(change)
    for path, _, rank in (*likely, *others):
        op, fields = op_of(value_at(data, path)), fields_of(value_at(data, path))
        changed = make_step(op, {**fields, PEER_FIELD[op]: rank}, ranks_of(value_at(data, path)))
        words = f"{op}: set {PEER_FIELD[op]} to {rank}"
        yield words, with_steps_replaced(data, path, [changed])


class _Direction(NamedTuple):
    """From one rank to another."""

    source: int
    target: int


class _PeerChange(NamedTuple):
    """The message at ``path`` gets ``new_peer`` instead of ``peer``."""

    path: DataPath
    peer: object
    new_peer: int


def _missing_receives(program: Program) -> Counter[_Direction]:
    """By direction, how many more sends than receives the ranks call."""
    missing = Counter[_Direction]()
    for rank in program.present:
        for _, call in program.calls_of(rank):
            for part in call.parts or (call,):
                if part.op in PEER_FIELD and part.peer is not None:
                    is_send = PEER_FIELD[part.op] == "dst"
                    ends = (rank, part.peer) if is_send else (part.peer, rank)
                    missing[_Direction(*ends)] += 1 if is_send else -1
    return missing


def _evens_counts(
    op: str, owners: Sequence[int], change: _PeerChange, missing: Counter[_Direction]
) -> bool:
    """Whether a message lacks its counterpart at its peer, and is the one missing at another.

    A receive from any source has no peer that could lack it.
    """
    if len(owners) != 1:
        return False
    is_send = PEER_FIELD[op] == "dst"

    def lacks_message_with(peer: int) -> bool:
        if is_send:
            return missing[_Direction(owners[0], peer)] < 0
        return missing[_Direction(peer, owners[0])] > 0

    def has_too_many_with(peer: int) -> bool:
        if is_send:
            return missing[_Direction(owners[0], peer)] > 0
        return missing[_Direction(peer, owners[0])] < 0

    if isinstance(change.peer, int):
        is_superfluous = has_too_many_with(change.peer)
    else:
        is_superfluous = not is_send and change.peer in (None, "any")
    return is_superfluous and lacks_message_with(change.new_peer)


def receive_into_awaited(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A receive goes into the tensor that its list of steps reads and never writes."""
    for path in named:
        entry = value_at(data, path)
        if PEER_FIELD.get(op_of(entry)) != "src" or not isinstance(path[-1], int):
            continue
        fields, within = fields_of(entry), path[: path.index("ops") - 2 if "ops" in path else -1]
        awaited = _unwritten_buffer(data, value_at(data, within), fields.get("tensor"))
        if awaited:
            step = make_step(op_of(entry), {**fields, "tensor": awaited}, ranks_of(entry))
            words = f"{op_of(entry)}: set tensor to {awaited}"
            yield words, with_steps_replaced(data, path, [step])


def invert_peers(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Ranks receive from the ranks that send to them, as in a ring or a pipeline.

    The peers of the receive become the inverse of those of the send, or the other way round.
    """
    messages = [path for path in named if is_message(value_at(data, path))]
    peers = {path: peers_by_rank(data, program, path) for path in messages}
    # A receive follows its send: the sender knows where the data belong.
    messages.sort(key=lambda path: PEER_FIELD[op_of(value_at(data, path))] == "dst")
    for path in messages:
        op = op_of(value_at(data, path))
        for other in messages:
            if PEER_FIELD[op] == PEER_FIELD[op_of(value_at(data, other))]:
                continue
            inverse = inverse_peers(peers[other], list(peers[path]))
            if not inverse or inverse == peers[path]:
                continue
            peer = peer_expression(inverse, program.world_size)
            fields = {**fields_of(value_at(data, path)), PEER_FIELD[op]: peer}
            changed = make_step(op, fields, ranks_of(value_at(data, path)))
            words = f"{op}: set {PEER_FIELD[op]} to {peer}"
            yield words, with_steps_replaced(data, path, [changed])


def peers_by_rank(data: ScenarioData, program: Program, path: DataPath) -> dict[int, int]:
    """The peer of a message on each rank that makes it; empty if it depends on a loop."""
    entry = value_at(data, path)
    values = value_by_rank(program, fields_of(entry).get(PEER_FIELD[op_of(entry)]))
    callers = calling_ranks(data, program, path)
    if len(values) != program.world_size or callers is None:
        return {}
    return {rank: values[rank] for rank in callers}


def inverse_peers(peers: dict[int, int], ranks: list[int]) -> dict[int, int]:
    """For each of ``ranks``, the rank whose peer it is; empty unless that is one rank for each."""
    inverse: dict[int, int] = {}
    for rank in ranks:
        others = [other for other, peer in peers.items() if peer == rank]
        if len(others) != 1:
            return {}
        inverse[rank] = others[0]
    return inverse


def shift_peers(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A peer that is counted in a loop is one more or one less."""
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry):
            continue
        fields, key = fields_of(entry), PEER_FIELD[op_of(entry)]
        peer = fields.get(key)
        if not isinstance(peer, str) or value_by_rank(program, peer):
            continue
        for shift in ("+ 1", "- 1"):
            shifted = f"{peer} {shift}" if peer.isidentifier() else f"({peer}) {shift}"
            changed = make_step(op_of(entry), {**fields, key: shifted}, ranks_of(entry))
            words = f"{op_of(entry)}: set {key} to {shifted}"
            yield words, with_steps_replaced(data, path, [changed])


def peer_expression(peers: dict[int, int], world_size: int) -> object:
    """The peers as a number, a distance or a shift in a ring; otherwise one number per rank."""
    if len(peers) == 1:
        return next(iter(peers.values()))
    distances = {peer - rank for rank, peer in peers.items()}
    if len(distances) == 1:
        distance = distances.pop()
        return f"rank + {distance}" if distance > 0 else f"rank - {-distance}"
    shifts = {distance % world_size for distance in distances}
    if len(shifts) > 1:
        return peers
    shift = shifts.pop()
    if 2 * shift > world_size:
        return f"(rank - {world_size - shift}) % world_size"
    return f"(rank + {shift}) % world_size"


def add_counterparts(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The rank that a message names makes the counterpart.

    It goes into a batch of that rank, or between two of its steps. If several ranks make the call
    of the message, the counterpart of each one is tried.
    """
    for path in named:
        entry = value_at(data, path)
        if not is_message(entry):
            continue
        peer = fields_of(entry).get(PEER_FIELD[op_of(entry)])
        if isinstance(peer, int):
            for owner in owner_ranks(data, path)[:_MAX_OWNERS]:
                yield from _counterparts(data, path, peer, owner)


def _counterparts(
    data: ScenarioData, path: DataPath, peer: int, owner: int
) -> Iterator[tuple[str, ScenarioData]]:
    """The counterpart on rank ``peer`` of a message that rank ``owner`` makes."""
    fields = fields_of(value_at(data, path))
    op = COUNTERPART_OP[op_of(value_at(data, path))]
    shared: ScenarioData = {key: fields[key] for key in _SHARED_FIELDS if key in fields}
    counterpart = {PEER_FIELD[op]: owner, **shared}
    list_path = step_list_of_rank(data, peer)
    if op == "recv":
        steps = [] if list_path is None else value_at(data, list_path)
        buffer = _receive_buffer(data, steps, fields.get("tensor"), owner)
        counterpart |= {"tensor": buffer} if buffer else {}
    if op == "send" and list_path is not None:
        for tensor in _computed_tensors(data, list_path, fields.get("tensor")):
            other = {**counterpart, "tensor": tensor}
            yield from _insertions(data, path, list_path, op, other, peer)
    if list_path is None:  # the peer has no list of steps of its own yet
        changed = copy.deepcopy(data)
        changed["program"].append(make_step(op, counterpart, peer))
        yield f"add {call_words(op, counterpart)} on rank {peer}", changed
    else:
        yield from _insertions(data, path, list_path, op, counterpart, peer)


def _computed_tensors(data: ScenarioData, list_path: DataPath, received: object) -> list[str]:
    """Other tensors that a rank computes, declared like the one that its peer receives."""
    like = declared_tensor(data, received)
    if like is None:
        return []
    found: dict[str, None] = {}
    for entry in value_at(data, list_path):
        fields = fields_of(entry)
        written = {"assign": [fields.get("tensor")], "compute": fields.get("writes") or []}
        for name in written.get(op_of(entry), ()):
            if name != received and _is_declared_like(declared_tensor(data, name), like):
                found[str(name)] = None
    return list(found)


def _is_declared_like(tensor: object, like: ScenarioData) -> bool:
    """Whether a tensor has the shape and the dtype of another."""
    if not isinstance(tensor, dict):
        return False
    return all(tensor.get(key) == like.get(key) for key in ("shape", "dtype"))


def _receive_buffer(data: ScenarioData, steps: list[object], sent: object, source: int) -> str:
    """Where a rank with these steps may receive a tensor; "" if nothing shows it."""
    return (
        _unwritten_buffer(data, steps, sent)
        or _free_buffer(data, sent)
        or _usual_buffer(steps, source)
    )


def _unwritten_buffer(data: ScenarioData, steps: list[object], sent: object) -> str:
    """A tensor that the steps read and never write, declared like the sent one; "" if none."""
    declared = data.get("tensors") or {}
    like = declared_tensor(data, sent)
    if like is None:
        return ""
    read: set[str] = set()
    written: set[str] = set()
    for entry in steps:
        fields = fields_of(entry)
        if op_of(entry) == "assign":
            read |= names_in(str(fields.get("value")))
        if op_of(entry) in ("assign", "recv", "irecv"):
            written.add(str(fields.get("tensor")))
        read.update(fields.get("reads") or [])
        written.update(fields.get("writes") or [])
    for name, tensor in declared.items():
        is_awaited = name in read and name not in written
        if is_awaited and _is_declared_like(tensor, like) and "value" not in tensor:
            return str(name)
    return ""


def _free_buffer(data: ScenarioData, sent: object) -> str:
    """A tensor that no call uses, declared like the sent one; "" if there is none."""
    declared = data.get("tensors") or {}
    like = declared_tensor(data, sent)
    if like is None:
        return ""
    used = names_in(json.dumps(data["program"]))
    for name, tensor in declared.items():
        if name not in used and _is_declared_like(tensor, like):
            return str(name)
    return ""


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
        yield f"add {call_words(op, counterpart)} on rank {peer}", changed
        if k < len(steps) and op_of(steps[k]) == "batch_isend_irecv":
            changed = copy.deepcopy(data)
            batch = value_at(changed, (*list_path, k, "batch_isend_irecv", "ops"))
            batch.append({_BATCH_OP[op]: counterpart})
            call = call_words(_BATCH_OP[op], counterpart)
            yield f"add {call} to the batch of rank {peer}", changed


def call_words(op: str, fields: ScenarioData) -> str:
    """A message as in findings: `send(x, dst=1)`."""
    arguments = [f"{key}={value}" for key, value in fields.items() if key != "tensor"]
    return f"{op}({', '.join([str(fields.get('tensor', '')), *arguments])})"


def _relative_position(data: ScenarioData, path: DataPath) -> float:
    """The position of a call in its list of steps, from 0 (first) to 1."""
    if "ops" in path:
        path = path[: path.index("ops") - 1]
    return int(path[-1]) / max(len(value_at(data, path[:-1])), 1)


__all__ = [
    "COUNTERPART_OP",
    "PEER_FIELD",
    "add_counterparts",
    "align_with_counterparts",
    "call_words",
    "change_peers",
    "inverse_peers",
    "invert_peers",
    "receive_into_awaited",
    "is_message",
    "peer_expression",
    "peers_by_rank",
    "shift_peers",
]
