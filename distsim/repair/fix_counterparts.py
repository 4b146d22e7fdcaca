"""Repairs that add the counterpart of a message whose peer is an expression.

The missing call goes into a block of the ranks that the message names: in a pipeline or a ring, the
inverse of the peers; in a loop of a server, the worker of the other messages in that loop. Each
function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final, NamedTuple

from distsim.checker.wording import rank_list
from distsim.program.model import Program
from distsim.repair.fix_messages import (
    COUNTERPART_OP,
    PEER_FIELD,
    call_words,
    inverse_peers,
    is_message,
    peer_expression,
    peers_by_rank,
)
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    calling_ranks,
    fields_of,
    make_step,
    op_of,
    ranks_of,
    selected_ranks,
    step_paths,
    value_at,
    value_by_rank,
)

#: Places and tensors that are tried in each list of steps.
_MAX_PLACES: Final = 6
_MAX_TENSORS: Final = 3


class _Counterpart(NamedTuple):
    """The peer of a missing call, and the selector of its ranks; None for all of its list."""

    peer: object
    ranks: object


def add_relative_counterparts(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The ranks that a message names make its counterpart."""
    lists = dict.fromkeys(path[:-1] for path in step_paths(data))
    for path in named:
        if not is_message(value_at(data, path)):
            continue
        peers = peers_by_rank(data, program, path)
        if not peers:
            yield from _counterparts_of_server(data, program, path, list(lists))
        # The lists around the message come first.
        nearest = sorted(lists, key=lambda found: found != path[:-1])
        for list_path in nearest if peers else ():
            counterpart = _counterpart_in(data, program, peers, list_path)
            if counterpart is not None:
                yield from _insertions(data, path, list_path, counterpart)


def _counterparts_of_server(
    data: ScenarioData, program: Program, path: DataPath, lists: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """All other ranks answer one rank, which names each of them in a loop."""
    servers = calling_ranks(data, program, path)
    if servers is None or len(servers) != 1:
        return
    others = set(program.present) - set(servers)
    for list_path in lists:
        if set(calling_ranks(data, program, list_path) or ()) == others:
            yield from _insertions(data, path, list_path, _Counterpart(servers[0], None))


def _counterpart_in(
    data: ScenarioData, program: Program, peers: dict[int, int], list_path: DataPath
) -> _Counterpart | None:
    """The counterpart in a list of steps; None if it does not belong there."""
    callers, wanted = calling_ranks(data, program, list_path), sorted(set(peers.values()))
    if not callers or not set(wanted) <= set(callers):
        return None
    inverse = inverse_peers(peers, wanted)
    if inverse:
        ranks = None if wanted == sorted(callers) else _selector_of(data, wanted)
        return _Counterpart(peer_expression(inverse, program.world_size), ranks)
    if len(callers) > 1:
        return None
    in_loop = (
        fields_of(entry).get(PEER_FIELD[op_of(entry)])
        for entry in value_at(data, list_path)
        if is_message(entry)
    )
    counted = (peer for peer in in_loop if isinstance(peer, str))
    peer = next((peer for peer in counted if not value_by_rank(program, peer)), None)
    return None if peer is None else _Counterpart(peer, None)


def _selector_of(data: ScenarioData, ranks: list[int]) -> object:
    """The ranks as the file selects them elsewhere, or as numbers."""
    selectors = (ranks_of(value_at(data, path)) for path in step_paths(data))
    same = (each for each in selectors if selected_ranks(each) == ranks)
    return next(same, ranks[0] if len(ranks) == 1 else ranks)


def _insertions(
    data: ScenarioData, path: DataPath, list_path: DataPath, counterpart: _Counterpart
) -> Iterator[tuple[str, ScenarioData]]:
    """The counterpart at each place of a list, with the tensors that the list names."""
    fields = fields_of(value_at(data, path))
    op = COUNTERPART_OP[op_of(value_at(data, path))]
    steps = value_at(data, list_path)
    shared: ScenarioData = {key: fields[key] for key in ("tag", "group") if key in fields}
    named = (fields_of(entry).get("tensor") for entry in steps if op_of(entry))
    tensors = [str(tensor) for tensor in (fields.get("tensor"), *named) if tensor]
    for tensor in list(dict.fromkeys(tensors))[:_MAX_TENSORS]:
        call: ScenarioData = {"tensor": tensor, PEER_FIELD[op]: counterpart.peer, **shared}
        step = make_step(op, call, counterpart.ranks)
        for place in reversed(range(len(steps) + 1)[-_MAX_PLACES:]):
            changed = copy.deepcopy(data)
            value_at(changed, list_path).insert(place, step)
            yield f"add {call_words(op, call)}{_ranks_words(counterpart.ranks)}", changed


def _ranks_words(selector: object) -> str:
    if selector is None:
        return ""
    if isinstance(selector, str):
        return f" on the ranks where {selector}"
    return f" on {rank_list(selected_ranks(selector) or [])}"


__all__ = ["add_relative_counterparts"]
