"""Repairs of ranks that skip collectives which other ranks make.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple

from distsim.checker.wording import rank_list
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    condition_for_all_ranks,
    fields_of,
    group_members,
    is_block,
    is_collective,
    make_step,
    op_of,
    owner_ranks,
    ranks_of,
    selected_ranks,
    step_list_of_ranks,
    step_paths,
    value_at,
    with_steps_replaced,
)

#: Fields that say how a call is waited for, not what it does.
_REQUEST_FIELDS: Final = ("async", "as")
#: Fields that name tensors of the calling rank.
_BUFFER_FIELDS: Final = ("input", "output", "tensor")


def extend_to_all_ranks(
    data: ScenarioData, program: Program | None, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A collective, new_group or message that only some ranks call is called by all.

    The part of its condition that is the same on all ranks, such as one on the iteration, stays.
    """
    for path in paths:
        entry = value_at(data, path)
        if ranks_of(entry) is not None and (_needs_all_ranks(entry) or _is_message(entry)):
            found = copy.deepcopy(data)
            del value_at(found, path)["ranks"]
            condition = "" if program is None else condition_for_all_ranks(program, ranks_of(entry))
            if condition:
                value_at(found, path)["ranks"] = condition
            where = f" where {condition}" if condition else ""
            yield f"call {call_name(entry)} on all ranks{where}", found


def _needs_all_ranks(entry: object) -> bool:
    return is_collective(entry) or op_of(entry) == "new_group"


def extend_blocks(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The collectives in a block of some ranks are made by all ranks.

    If most ranks run the block, all ranks run it. Otherwise the local work in it, such as writing a
    log on rank 0, stays where it is, and only its collectives leave the block.
    """
    for path in _blocks_around(data, named):
        block = value_at(data, path)
        steps = block["steps"]
        collectives = [entry for entry in steps if is_collective(entry)]
        if not collectives or any(_is_message(entry) for entry in steps):
            continue
        names = " and ".join(dict.fromkeys(call_name(entry) for entry in collectives))
        if len(collectives) == len(steps) or _is_for_most(program, block["ranks"]):
            changed = copy.deepcopy(data)
            del value_at(changed, path)["ranks"]
            condition = condition_for_all_ranks(program, block["ranks"])
            if condition:
                changed_block = value_at(changed, path)
                changed_block.update({"ranks": condition, "steps": changed_block.pop("steps")})
            where = f" where {condition}" if condition else ""
            yield f"run this block on all ranks{where}, so that all call {names}", changed
        elif not any(is_block(entry) for entry in steps):
            parts = _split_block(block)
            yield (
                f"call {names} on all ranks, outside of this block",
                with_steps_replaced(data, path, parts),
            )


def _blocks_around(data: ScenarioData, named: list[DataPath]) -> list[DataPath]:
    """The blocks with a selector that contain the named steps, the innermost first."""
    found: dict[DataPath, None] = {}
    for path in named:
        for end in range(len(path) - 1, 1, -1):
            entry = value_at(data, path[:end]) if isinstance(path[end - 1], int) else None
            if isinstance(entry, dict) and "steps" in entry and "ranks" in entry:
                found[path[:end]] = None
    return list(found)


def _is_message(entry: object) -> bool:
    op = op_of(entry)
    return bool(op) and OPERATIONS[op].kind in ("p2p", "batch", "remote")


def _is_for_most(program: Program, ranks: Any) -> bool:
    """Whether a selector chooses most ranks; True if that depends on more than the rank."""
    chosen = selected_ranks(ranks)
    return chosen is None or 2 * len(chosen) > program.world_size


def _split_block(block: ScenarioData) -> list[ScenarioData]:
    """The collectives of a block, and between them blocks with its other steps."""
    parts: list[ScenarioData] = []
    for entry in block["steps"]:
        if is_collective(entry):
            parts.append({call_name(entry): fields_of(entry)})
        elif parts and "steps" in parts[-1]:
            parts[-1]["steps"].append(copy.deepcopy(entry))
        else:
            parts.append({"ranks": block["ranks"], "steps": [copy.deepcopy(entry)]})
    return parts


def add_skipped_calls(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Ranks with steps of their own make all collectives that most other ranks make.

    Their calls are aligned with those, and the ones that they skip are inserted at their places.
    """
    made = _placed_collectives(data)
    keys = {rank: tuple(call.key for call in calls) for rank, calls in made.items()}
    if not keys:
        return
    common, count = Counter(keys.values()).most_common(1)[0]
    outliers = [rank for rank, calls in keys.items() if calls != common]
    if 2 * count <= len(keys) or not outliers:
        return
    reference = next(calls for rank, calls in made.items() if keys[rank] == common)
    changed, words = copy.deepcopy(data), []
    units = _ranks_with_common_steps(data, outliers)
    for ranks in units:
        own = made[ranks[0]]
        skipped = _skipped_runs(own, reference)
        if not skipped:
            return
        # From the end, so that the places of the other runs stay valid.
        for place, calls in sorted(skipped, key=lambda run: run[0], reverse=True):
            added = [copy.deepcopy(value_at(data, call.path)) for call in calls]
            if not _insert_for_ranks(changed, ranks, own[place:], added):
                return
        names = " and ".join(
            call_name(value_at(data, call.path)) for _, run in skipped for call in run
        )
        words.append(f"call {names} on {rank_list(ranks)} too, as the other ranks do")
        if len(units) > 1 and step_list_of_ranks(data, ranks) is None:
            return  # the first insertion would move the places of the second
    yield "; ".join(words), changed


def _ranks_with_common_steps(data: ScenarioData, ranks: list[int]) -> list[list[int]]:
    """The ranks together if they share a list of steps; otherwise each by itself."""
    if step_list_of_ranks(data, ranks) is not None:
        return [ranks]
    return [[rank] for rank in ranks]


def _insert_for_ranks(
    changed: ScenarioData, ranks: list[int], following: list[_PlacedCollective], calls: list[Any]
) -> bool:
    """Insert calls of some ranks before their next collective, or at the end; False if it cannot.

    The ranks are one rank, or all those that share a list of steps.
    """
    own_list = step_list_of_ranks(changed, ranks)
    selector = ranks[0] if len(ranks) == 1 else ranks
    if following and following[0].path[:-1] != own_list:
        next_path = following[0].path
        if len(next_path) != 2:
            return False
        steps = value_at(changed, next_path[:-1])
        steps.insert(int(next_path[-1]), {"ranks": selector, "steps": calls})
        return True
    if own_list is None:
        changed["program"].append({"ranks": selector, "steps": calls})
        return True
    steps = value_at(changed, own_list)
    at = int(following[0].path[-1]) if following else len(steps)
    steps[at:at] = calls
    return True


class _PlacedCollective(NamedTuple):
    """A collective of a rank: its arguments as text, and its path."""

    key: str
    path: DataPath


def _placed_collectives(data: ScenarioData) -> dict[int, list[_PlacedCollective]]:
    """Each rank's collectives, if none is in a loop and all ranks are written as numbers."""
    world = data.get("world")
    if not isinstance(world, int):
        return {}
    made: dict[int, list[_PlacedCollective]] = {rank: [] for rank in range(world)}
    for path in step_paths(data):
        entry = value_at(data, path)
        if not is_collective(entry):
            continue
        if "repeat" in path or _has_expression(data, path):
            return {}
        key = json.dumps([call_name(entry), fields_of(entry)], sort_keys=True)
        for rank in owner_ranks(data, path) or made:
            if rank in made:
                made[rank].append(_PlacedCollective(key, path))
    return made


def _has_expression(data: ScenarioData, path: DataPath) -> bool:
    """Whether a selector of a step, or of a block around it, depends on more than the rank."""
    for end in range(2, len(path) + 1):
        entry = value_at(data, path[:end])
        if not isinstance(path[end - 1], int) or ranks_of(entry) is None:
            continue
        if selected_ranks(ranks_of(entry)) is None:
            return True
    return False


_SkippedRun = tuple[int, list[_PlacedCollective]]


def _skipped_runs(
    own: list[_PlacedCollective], reference: list[_PlacedCollective]
) -> list[_SkippedRun]:
    """(place in ``own``, calls) of the calls that only ``reference`` has.

    Empty if ``own`` has calls that the reference lacks.
    """
    matcher = SequenceMatcher(
        None, [call.key for call in own], [call.key for call in reference], autojunk=False
    )
    runs: list[_SkippedRun] = []
    for tag, start, _, first, end in matcher.get_opcodes():
        if tag == "insert":
            runs.append((start, reference[first:end]))
        elif tag != "equal":
            return []
    return runs


def make_same_call(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """A rank calls the collective of the other ranks in place of another one."""
    collectives = [path for path in named if is_collective(value_at(data, path))]
    for path in collectives:
        for other in collectives:
            entry, other_entry = value_at(data, path), value_at(data, other)
            name, other_name = call_name(entry), call_name(other_entry)
            if name == other_name:
                continue
            words = f"call {other_name}, as the other ranks do, instead of {name}"
            fields = fields_of(other_entry)
            # The rank may be the root, which alone has an output or an input.
            own = {key: value for key, value in fields_of(entry).items() if key in _BUFFER_FIELDS}
            for given in (fields, {**fields, **own}):
                step = make_step(other_name, given, ranks_of(entry))
                yield words, with_steps_replaced(data, path, [step])


def copy_to_other_ranks(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A collective, or new_group, in one list of steps is copied into another list."""
    lists = [path[:-1] for path in step_paths(data)]
    for path in named:
        entry = value_at(data, path)
        if not _needs_all_ranks(entry):
            continue
        for list_path in dict.fromkeys(lists):
            if list_path == path[:-1]:
                continue
            for k in reversed(range(len(value_at(data, list_path)) + 1)):
                found = copy.deepcopy(data)
                value_at(found, list_path).insert(k, copy.deepcopy(entry))
                yield f"call {call_name(entry)} on the other ranks as well", found


def complete_early_exits(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Ranks that exit early make the collectives that others make after that.

    These are added at the end of the program.
    """
    made = _collectives_by_rank(data)
    tails: dict[str, list[int]] = {}
    for rank in made:
        longest = max((_missing_tail(data, made, rank, other) for other in made), key=len)
        if longest:
            tails.setdefault(json.dumps(longest), []).append(rank)
    if tails:
        found = copy.deepcopy(data)
        found["program"] += [
            {"ranks": ranks, "steps": json.loads(tail)} for tail, ranks in tails.items()
        ]
        who = sorted(rank for ranks in tails.values() for rank in ranks)
        yield (
            f"call the remaining collectives of the other ranks on {rank_list(who)} too",
            found,
        )


def _collectives_by_rank(data: ScenarioData) -> dict[int, list[ScenarioData]]:
    """Each rank's collectives outside of loops, if the file writes ranks as numbers."""
    world = data.get("world")
    made: dict[int, list[ScenarioData]] = (
        {rank: [] for rank in range(world)} if isinstance(world, int) else {}
    )
    for path in step_paths(data):
        entry = value_at(data, path)
        if is_collective(entry) and "repeat" not in path:
            fields = {
                key: value for key, value in fields_of(entry).items() if key not in _REQUEST_FIELDS
            }
            for rank in owner_ranks(data, path) or made:
                if rank in made:
                    made[rank].append({call_name(entry): fields})
    return made


def _missing_tail(
    data: ScenarioData, made: dict[int, list[ScenarioData]], rank: int, other: int
) -> list[ScenarioData]:
    """The collectives on shared groups that another rank makes after all those of the rank.

    Empty if their collectives differ before that.
    """
    own = _shared_collectives(data, made[rank], rank, other)
    theirs = _shared_collectives(data, made[other], rank, other)
    return theirs[len(own) :] if theirs[: len(own)] == own else []


def _shared_collectives(
    data: ScenarioData, calls: list[ScenarioData], rank: int, other: int
) -> list[ScenarioData]:
    """The calls on groups that contain both ranks."""
    found = []
    for call in calls:
        name = next(iter(call.values())).get("group")
        members = (rank, other) if name is None else group_members(data, name)
        if isinstance(members, list | tuple) and rank in members and other in members:
            found.append(call)
    return found


__all__ = [
    "add_skipped_calls",
    "complete_early_exits",
    "copy_to_other_ranks",
    "extend_blocks",
    "extend_to_all_ranks",
    "make_same_call",
]
