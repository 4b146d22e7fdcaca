"""Repairs of process groups: who creates, uses and destroys them, and when.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from distsim.checker.wording import rank_list
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    calling_ranks,
    condition_for_all_ranks,
    fields_of,
    group_members,
    is_collective,
    make_step,
    op_of,
    owner_ranks,
    ranks_of,
    step_paths,
    value_at,
    with_steps_replaced,
)

_DESTROY: Final = "destroy_process_group"
_LOCAL: Final = "use_local_synchronization"


def destroy_later(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A destroy moves behind the last use of the group.

    Calls after the destroy that only some members make are made by all.
    """
    for path in _paths_of(data, _DESTROY):
        entry = value_at(data, path)
        group = fields_of(entry).get("group")
        uses = [
            other
            for other in step_paths(data)
            if _is_use(value_at(data, other), group) and other[:-1] == path[:-1]
        ]
        later = [other for other in uses if int(other[-1]) > int(path[-1])]
        if later:
            yield "move destroy_process_group after the last call", _moved(data, path, later, False)
            yield (
                "move destroy_process_group after the last call, and make the calls before it "
                "on all ranks",
                _moved(data, path, later, True),
            )


def destroy_after_block(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A destroy at the end of a block moves behind the last use of the group after the block."""
    for path in _paths_of(data, _DESTROY):
        group = fields_of(value_at(data, path)).get("group")
        yield from _moved_out_of_block(data, path, group)


def exit_after_block(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A rank exits after the last communication that follows its block, or not at all."""
    for path in _paths_of(data, "exit"):
        yield from _moved_out_of_block(data, path, None)
        yield "remove exit, so that the process goes on", with_steps_replaced(data, path, [])


def exit_on_all_ranks(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """All ranks exit where one does, for example at the end of training in an iteration."""
    for path in _paths_of(data, "exit"):
        for end in (len(path), len(path) - 2):
            chooser = value_at(data, path[:end]) if end > 1 else None
            if ranks_of(chooser) is None or not isinstance(path[end - 1], int):
                continue
            condition = condition_for_all_ranks(program, ranks_of(chooser))
            step = make_step("exit", fields_of(value_at(data, path)), condition or None)
            changed = copy.deepcopy(data)
            value_at(changed, path[: end - 1]).insert(int(path[end - 1]) + 1, step)
            where = f" where {condition}" if condition else ""
            yield f"exit on all ranks{where}", with_steps_replaced(changed, path, [])
            break


def _moved_out_of_block(
    data: ScenarioData, path: DataPath, group: object
) -> Iterator[tuple[str, ScenarioData]]:
    """The last call of a block moves behind the last use of a group after the block."""
    if len(path) < 4 or path[-2] != "steps" or path[-3] == "repeat":
        return
    entry, block_path = value_at(data, path), path[:-2]
    within, start = value_at(data, block_path[:-1]), int(block_path[-1])
    later = [k for k in range(start + 1, len(within)) if _contains_use(within[k], group)]
    if not later:
        return
    moved = make_step(op_of(entry), fields_of(entry), ranks_of(entry))
    if ranks_of(entry) is None:
        moved["ranks"] = ranks_of(within[start])
    changed = copy.deepcopy(data)
    value_at(changed, block_path[:-1]).insert(later[-1] + 1, moved)
    words = f"move {op_of(entry)} out of this block, after the last call"
    yield words, with_steps_replaced(changed, path, [])


def _contains_use(entry: Any, group: object) -> bool:
    """Whether a step, or a step within it, uses a group."""
    if not isinstance(entry, dict):
        return _is_use(entry, group)
    inner = entry.get("steps") or (entry.get("repeat") or {}).get("steps") or []
    return _is_use(entry, group) or any(_contains_use(step, group) for step in inner)


def drop_destroy(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A group stays until the end of the program."""
    for path in _paths_of(data, _DESTROY):
        yield "remove destroy_process_group", with_steps_replaced(data, path, [])


def _moved(
    data: ScenarioData, path: DataPath, later: list[DataPath], on_all_ranks: bool
) -> ScenarioData:
    changed = copy.deepcopy(data)
    if on_all_ranks:
        for other in later:
            entry = value_at(changed, other)
            if isinstance(entry, dict):
                entry.pop("ranks", None)
    steps = value_at(changed, path[:-1])
    destroy = steps.pop(int(path[-1]))
    # The list is one item shorter, so the position of the last use is now that behind it.
    steps.insert(int(later[-1][-1]), destroy)
    return changed


def _is_use(entry: Any, group: object) -> bool:
    op = op_of(entry)
    if not op or op == _DESTROY:
        return False
    if OPERATIONS[op].kind not in ("collective", "p2p", "batch"):
        return False
    return group is None or fields_of(entry).get("group") == group


def create_on_all_ranks(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """All ranks create all groups first, in one order."""
    paths = _paths_of(data, "new_group")
    if not paths or any("repeat" in path for path in paths):
        return
    created: dict[str, ScenarioData] = {}
    changed = data
    for path in reversed(paths):
        fields = fields_of(value_at(data, path))
        kept = {key: value for key, value in fields.items() if key != "use_local_synchronization"}
        created[str(fields.get("name"))] = make_step("new_group", kept, None)
        changed = with_steps_replaced(changed, path, [])
    steps = [created[name] for name in sorted(created)]
    program = changed["program"]
    # A group can be created only after init_process_group.
    inits = [k for k, entry in enumerate(program) if op_of(entry) == "init_process_group"]
    start = inits[-1] + 1 if inits else 0
    reordered = [*program[:start], *steps, *program[start:]]
    if reordered != data["program"]:
        words = "call new_group on all ranks, in the same order, before all other calls"
        if data.get("iterations"):
            words += ", in every iteration"
        yield words, {**changed, "program": reordered}


def list_members_once(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A new group lists each rank of the world once."""
    for path in _paths_of(data, "new_group"):
        fields = fields_of(value_at(data, path))
        ranks = fields.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            continue
        members = sorted({rank for rank in ranks if 0 <= rank < program.world_size})
        if members and members != sorted(ranks):
            step = make_step(
                "new_group", {**fields, "ranks": members}, ranks_of(value_at(data, path))
            )
            words = f"new_group: list each rank once: {members}"
            yield words, with_steps_replaced(data, path, [step])


def create_among_members(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Groups are created by their members alone, who find each other by the list of members."""
    changed = copy.deepcopy(data)
    creations = [
        fields_of(value_at(data, path)) | {_LOCAL: True} for path in _paths_of(data, "new_group")
    ]
    for path, fields in zip(_paths_of(data, "new_group"), creations, strict=True):
        ranks = ranks_of(value_at(data, path))
        value_at(changed, path[:-1])[int(path[-1])] = make_step("new_group", fields, ranks)
    if creations:
        yield f"create each group on its members alone: set {_LOCAL}", changed


def call_where_valid(
    data: ScenarioData, program: Program, named: list[DataPath], lines: Mapping[DataPath, int]
) -> Iterator[tuple[str, ScenarioData]]:
    """A call is made only by the ranks on which its arguments are valid.

    For example a collective by the members of its group, or a send to the next stage by all stages
    but the last.
    """
    invalid = _ranks_with_invalid_call(program)
    for path in named:
        entry = value_at(data, path)
        outside = invalid.get(lines.get(path, 0), set())
        owners = owner_ranks(data, path) or tuple(program.present)
        callers = [rank for rank in owners if rank not in outside]
        if callers and len(callers) < len(owners):
            step = make_step(op_of(entry), fields_of(entry), _selector(callers))
            words = f"call {op_of(entry)} on {rank_list(callers)} only"
            if fields_of(entry).get("group") and OPERATIONS[op_of(entry)].kind == "collective":
                words = f"call {op_of(entry)} on the members of the group only"
            yield words, with_steps_replaced(data, path, [step])


def call_in_group_of_callers(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A collective of some ranks is called on the group, or the groups, of exactly these ranks."""
    members: dict[str, set[tuple[int, ...]]] = {}
    for each in program.groups:
        members.setdefault(each.name.partition("[")[0], set()).add(each.ranks)
    for path in named:
        entry = value_at(data, path)
        callers = calling_ranks(data, program, path)
        if not is_collective(entry) or not callers:
            continue
        fields = fields_of(entry)
        for name, groups in members.items():
            of_callers = [ranks for ranks in groups if set(ranks) <= set(callers)]
            is_whole = set().union(*of_callers) == set(callers)
            if name == fields.get("group", "world") or not is_whole or len(of_callers[0]) < 2:
                continue
            rest = {key: value for key, value in fields.items() if key != "group"}
            changed = rest if name == "world" else {**rest, "group": name}
            step = make_step(call_name(entry), changed, ranks_of(entry))
            words = f"{call_name(entry)}: set group to {name}, the group of these ranks"
            yield words, with_steps_replaced(data, path, [step])


def call_on_members(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The members of a group, and no other ranks, run a block with collectives of this group."""
    for path in named:
        entry = value_at(data, path)
        group = fields_of(entry).get("group")
        members = group_members(data, group)
        if OPERATIONS[op_of(entry)].kind != "collective" or not isinstance(members, list):
            continue
        for end in (len(path), len(path) - 2):
            block = value_at(data, path[:end]) if end > 1 else None
            if ranks_of(block) is None or not _calls_only_on(block, group):
                continue
            changed = copy.deepcopy(data)
            value_at(changed, path[:end])["ranks"] = members
            yield f"call {op_of(entry)} on the members of {group}, {rank_list(members)}", changed


def _calls_only_on(block: Any, group: object) -> bool:
    """Whether all calls of a step, or of a block without inner blocks, are on this group."""
    calls = block.get("steps", [block])
    return all(op_of(call) and fields_of(call).get("group") == group for call in calls)


def _ranks_with_invalid_call(program: Program) -> dict[int, set[int]]:
    """By line, the ranks on which a call has invalid arguments."""
    found: dict[int, set[int]] = {}
    for code in program.codes:
        for call in code.distinct_calls():
            if call.invalid is not None:
                line = program.sites[call.site].line
                invalid = (rank for rank, no in zip(code.ranks, call.invalid[0], strict=True) if no)
                found.setdefault(line, set()).update(invalid)
    return found


def _selector(ranks: list[int]) -> object:
    return ranks[0] if len(ranks) == 1 else ranks


def initialise_eagerly(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """NCCL creates the communicators before the first call, as with `device_id`."""
    options = data.get("options") or {}
    if options.get("init") != "eager":
        words = "set `init: eager`: pass device_id to init_process_group on all ranks"
        yield words, {**data, "options": {**options, "init": "eager"}}


def _paths_of(data: ScenarioData, op: str) -> list[DataPath]:
    return [path for path in step_paths(data) if op_of(value_at(data, path)) == op]


__all__ = [
    "call_in_group_of_callers",
    "call_on_members",
    "call_where_valid",
    "create_among_members",
    "create_on_all_ranks",
    "destroy_after_block",
    "destroy_later",
    "drop_destroy",
    "exit_after_block",
    "exit_on_all_ranks",
    "initialise_eagerly",
    "list_members_once",
]
