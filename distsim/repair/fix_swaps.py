"""Repairs of what two calls, or two ends of a message, confuse with each other.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from distsim.repair.fix_messages import COUNTERPART_OP, PEER_FIELD, is_message
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    batch_part_paths,
    call_name,
    fields_of,
    make_step,
    op_of,
    owner_ranks,
    paths_by_list,
    ranks_of,
    step_paths,
    value_at,
)


def swap_tensors(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """Two neighbouring calls of the same operation exchange their tensors."""
    for list_path, paths in paths_by_list(sorted(named, key=repr)).items():
        positions = {path[-1] for path in paths}
        for first in paths:
            second = int(first[-1]) + 1
            if second not in positions:
                continue
            here, there = value_at(data, first), value_at(data, (*list_path, second))
            own, other = fields_of(here), fields_of(there)
            names = own.get("tensor"), other.get("tensor")
            if op_of(here) != op_of(there) or None in names or names[0] == names[1]:
                continue
            changed = copy.deepcopy(data)
            steps = value_at(changed, list_path)
            steps[first[-1]] = _with_tensor(here, names[1])
            steps[second] = _with_tensor(there, names[0])
            yield f"{op_of(here)}: exchange {names[0]} and {names[1]} in these two calls", changed


def _with_tensor(entry: object, tensor: object) -> ScenarioData:
    return make_step(op_of(entry), {**fields_of(entry), "tensor": tensor}, ranks_of(entry))


def turn_round(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Of two ranks that both send to each other, or both receive, one does the opposite.

    Only for a message that no call of the other rank could match.
    """
    steps = step_paths(data)
    messages = [
        path
        for path in (*steps, *batch_part_paths(data, steps))
        if is_message(value_at(data, path))
    ]
    for path in messages:
        entry = value_at(data, path)
        op, fields = call_name(entry), fields_of(entry)
        peer, owners = fields.get(PEER_FIELD[op]), owner_ranks(data, path)
        if not isinstance(peer, int) or len(owners) != 1:
            continue
        found = _balance(data, messages, owners[0], peer)
        surplus = found if PEER_FIELD[op] == "dst" else -found
        if surplus < 2:
            continue
        turned = _opposite_of(op)
        kept = {key: value for key, value in fields.items() if key != PEER_FIELD[op]}
        changed = copy.deepcopy(data)
        step = make_step(turned, {**kept, PEER_FIELD[turned]: peer}, ranks_of(entry))
        value_at(changed, path[:-1])[int(path[-1])] = step
        yield (
            f"{op}: make it an {turned}" if turned[0] == "i" else f"{op}: make it a {turned}",
            changed,
        )


def _opposite_of(op: str) -> str:
    opposite = COUNTERPART_OP[op]
    return f"i{opposite}" if op.startswith("i") else opposite


def _balance(data: ScenarioData, messages: list[DataPath], rank: int, peer: int) -> int:
    """Sends minus receives of the messages from a rank to its peer, minus those the other way.

    With two more sends than receives in one direction, one message turned round makes both even.
    """
    balance = 0
    for path in messages:
        entry = value_at(data, path)
        other = fields_of(entry).get(PEER_FIELD[op_of(entry)])
        sends = PEER_FIELD[op_of(entry)] == "dst"
        if (owner_ranks(data, path), other) in (((rank,), peer), ((peer,), rank)):
            balance += 1 if sends else -1
    return balance


__all__ = ["swap_tensors", "turn_round"]
