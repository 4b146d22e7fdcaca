"""Propose changes that might repair a failing scenario, the least intrusive kinds first.

A proposal changes the scenario's data (the parsed YAML) and is not checked here; `search` does
that. The calls that the findings name, and those of outlier ranks, are changed first. A search has
a limited number of checks, so each kind of change first proposes its best few, and then the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.fix_arguments import (
    batch_requests,
    copy_of_composite_calls,
    drop_invalid_tags,
    name_expected_sources,
    unify_shapes,
    use_group_ranks,
    use_unused_tensors,
)
from distsim.repair.fix_conditions import (
    complement_conditions,
    copy_sibling_conditions,
    decide_on_all_ranks,
    drop_conjuncts,
)
from distsim.repair.fix_counterparts import add_relative_counterparts
from distsim.repair.fix_counts import (
    exchange_splits,
    fit_parts,
    inputs_as_received,
    pad_rows,
    transpose_splits,
    unify_counts,
)
from distsim.repair.fix_expressions import change_conditions, change_expressions, change_vars
from distsim.repair.fix_groups import (
    call_in_group_of_callers,
    call_on_members,
    call_where_valid,
    create_among_members,
    create_on_all_ranks,
    destroy_after_block,
    destroy_later,
    drop_destroy,
    exit_after_block,
    exit_on_all_ranks,
    initialise_eagerly,
    list_members_once,
)
from distsim.repair.fix_members import divide_world, list_callers
from distsim.repair.fix_messages import (
    add_counterparts,
    align_with_counterparts,
    change_peers,
    invert_peers,
    receive_into_awaited,
    shift_peers,
)
from distsim.repair.fix_missing import (
    add_skipped_calls,
    complete_early_exits,
    copy_to_other_ranks,
    extend_blocks,
    extend_to_all_ranks,
    make_same_call,
)
from distsim.repair.fix_names import (
    shift_copies,
    use_other_vars,
    use_peers_nearby,
    use_unused_groups,
)
from distsim.repair.fix_numbers import (
    equal_iterations,
    fewer_iterations,
    more_iterations,
    outputs_as_sent,
    root_of_other_ranks,
    roots_as_numbers,
    splits_as_numbers,
)
from distsim.repair.fix_order import (
    batch_messages,
    make_nonblocking,
    move_steps,
    move_waits_last,
    reverse_loops,
    wait_before_use,
)
from distsim.repair.fix_remote import same_channel, synchronise_accesses
from distsim.repair.fix_requests import (
    wait_for_all_before_use,
    wait_for_other_request,
    wait_for_requests,
)
from distsim.repair.fix_streams import wait_for_streams
from distsim.repair.fix_swaps import swap_tensors, turn_round
from distsim.repair.fix_timeouts import raise_timeout
from distsim.repair.fix_training_steps import (
    find_unused_parameters,
    same_settings_on_all_ranks,
)
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    batch_part_paths,
    call_name,
    fields_of,
    is_block,
    make_step,
    object_collective_of,
    op_of,
    owner_ranks,
    parenthesised_line,
    ranks_of,
    step_paths,
    tensor_names,
    value_at,
    values_as_words,
    with_steps_replaced,
)
from distsim.repair.shared_decisions import SharedDecisions

#: Fields in which both sides, or all members, must agree.
_SHARED_FIELDS: Final = (
    "tag",
    "group",
    "op",
    "src",
    "dst",
    "group_src",
    "group_dst",
    "tensor",
    "input",
    "output",
    "input_splits",
    "output_splits",
    "objects",
)
#: Kinds of proposals, from the least to the most intrusive. No repair removes calls twice.
CHANGES_ORDER: Final = 0
CHANGES_ARGUMENTS: Final = 1
ADDS_CALLS: Final = 2
REMOVES_CALLS: Final = 3
_INIT: Final = "init_process_group"
#: Calls that stay where they are: they end or delay a rank.
_FIXED_OPS: Final = ("sleep", "exit", "fail")
#: In a program of at most this many steps all of them are changed, those that the findings name
#: first.
_FEW_STEPS: Final = 24
#: In each round, the number of changes of one kind that are proposed before those of the next kind.
_ROUNDS: Final = (4, 16, 130)
#: Limit for changes of several rare kinds together.
_MAX_RARE_CHANGES: Final = 30

#: What a change does, in words, and the changed data.
_Change = tuple[str, ScenarioData]


class RepairProposal(NamedTuple):
    """A change of a scenario. ``kind``: one of the constants above; ``words``: what it does."""

    kind: int
    words: str
    data: ScenarioData


class FailureHints(NamedTuple):
    """What the findings say about a failure.

    ``lines``: the line of each call, by its path. ``user_lines``: its line in the file that is
    repaired, 0 for calls that an earlier proposal added; words name these lines. ``places``: the
    lines that the findings name. ``odd``: outlier ranks. ``mismatch``: calls have wrong or
    different arguments, so arguments are changed before the order of calls. ``program``: the
    lowered scenario. ``is_first``: the data are those of the file itself, without an earlier
    proposal. ``decisions``: the steps of the file that all ranks skip together.
    """

    lines: dict[DataPath, int]
    user_lines: dict[DataPath, int]
    places: frozenset[int]
    odd: frozenset[int] = frozenset()
    mismatch: bool = False
    program: Program | None = None
    is_first: bool = True
    decisions: SharedDecisions | None = None


class _Calls(NamedTuple):
    """The calls of a scenario.

    ``steps``: all steps that are calls. ``parts``: the messages in batches. ``named_steps``: the
    steps to change first. ``named``: these, and the messages in batches to change first.
    ``with_objects``: the named steps, and the object collectives. ``blocks``: all blocks and loops.
    """

    steps: list[DataPath]
    parts: list[DataPath]
    named_steps: list[DataPath]
    named: list[DataPath]
    with_objects: list[DataPath]
    blocks: list[DataPath]


def propose_repairs(data: ScenarioData, hints: FailureHints) -> Iterator[RepairProposal]:
    """The changes to try, in this order."""
    calls = _calls_to_change(data, hints)
    kinds = list(_kinds_of_changes(data, hints, calls))
    for number in _ROUNDS:
        for kind in kinds:
            yield from islice(kind, number)


_Proposals = Iterator[RepairProposal]


def _kinds_of_changes(
    data: ScenarioData, hints: FailureHints, calls: _Calls
) -> Iterator[_Proposals]:
    """The changes of each kind."""
    yield from _group_changes(data, hints, calls)
    if hints.mismatch:
        yield from _argument_changes(data, hints, calls)
        yield _order_changes(data, calls)
    else:
        yield _order_changes(data, calls)
        yield _alignments(data, hints, calls)
    yield _of_kind(CHANGES_ARGUMENTS, unify_counts(data))
    movable = [path for path in calls.with_objects if op_of(value_at(data, path)) not in _FIXED_OPS]
    named_parts = [path for path in calls.named if path in calls.parts]
    for moved in (movable, named_parts, calls.blocks):
        yield _of_kind(CHANGES_ORDER, move_steps(data, moved, hints.user_lines))
    if not hints.mismatch:
        yield _of_kind(CHANGES_ARGUMENTS, _copy_arguments(data, calls, hints))
    yield _of_kind(CHANGES_ARGUMENTS, change_peers(data, calls.named, hints.program))
    if hints.program is not None:
        yield _of_kind(CHANGES_ARGUMENTS, more_iterations(data, hints.program))
        yield _of_kind(REMOVES_CALLS, fewer_iterations(data, hints.program))
        yield _of_kind(CHANGES_ARGUMENTS, raise_timeout(data, hints.program))
        yield _of_kind(CHANGES_ARGUMENTS, change_conditions(data, hints.program, calls.named))
        yield _of_kind(CHANGES_ARGUMENTS, change_expressions(data, hints.program, calls.named))
        yield _of_kind(CHANGES_ARGUMENTS, change_vars(data, hints.program))
    for additions in (
        make_same_call(data, calls.with_objects),
        complete_early_exits(data),
        extend_to_all_ranks(
            data,
            hints.program,
            list(dict.fromkeys((*calls.steps, *calls.parts, *calls.with_objects))),
        ),
        copy_to_other_ranks(data, calls.with_objects),
        add_counterparts(data, calls.named),
        ()
        if hints.program is None
        else add_relative_counterparts(data, hints.program, calls.named),
    ):
        yield _of_kind(ADDS_CALLS, additions)
    yield _of_kind(
        REMOVES_CALLS, _removals(data, list(dict.fromkeys((*calls.named, *calls.with_objects))))
    )


def _of_kind(kind: int, changes: Iterable[_Change]) -> Iterator[RepairProposal]:
    for words, changed in changes:
        yield RepairProposal(kind, words, changed)


def _removals(data: ScenarioData, named: list[DataPath]) -> Iterator[_Change]:
    """One call is removed; never local work, whose absence only hides a failure."""
    for path in named:
        op = op_of(value_at(data, path))
        if op and OPERATIONS[op].kind == "local":
            continue
        if op == _INIT and not _is_initialised_elsewhere(data, path):
            continue
        yield f"remove {call_name(value_at(data, path))}", with_steps_replaced(data, path, [])


def _is_initialised_elsewhere(data: ScenarioData, path: DataPath) -> bool:
    """Whether the ranks of an init_process_group call it at another place too."""
    owners = set(owner_ranks(data, path))
    for other in step_paths(data):
        if other != path and op_of(value_at(data, other)) == _INIT:
            others = owner_ranks(data, other)
            if not others or (owners and owners <= set(others)):
                return True
    return False


def _calls_to_change(data: ScenarioData, hints: FailureHints) -> _Calls:
    """Which calls to change, those that the findings name and those of outlier ranks first."""
    entries = step_paths(data)
    steps = [path for path in entries if op_of(value_at(data, path))]
    objects = [path for path in entries if object_collective_of(value_at(data, path))]
    blocks = [path for path in entries if is_block(value_at(data, path))]
    has_few_steps = len(steps) <= _FEW_STEPS
    named_steps = [path for path in steps if hints.lines[path] in hints.places]
    awaited = _calls_awaited_by(data, steps, named_steps)
    named_steps += [path for path in awaited if path not in named_steps]
    if has_few_steps or not named_steps:
        named_steps += [path for path in steps if path not in named_steps][:_FEW_STEPS]
    parts = batch_part_paths(data, steps)
    named_parts = [
        path for path in parts if has_few_steps or hints.lines.get(path, 0) in hints.places
    ]
    named = named_steps + named_parts
    if hints.odd:
        # Sorting is stable: the calls of outlier ranks come first.
        named_steps = sorted(named_steps, key=lambda path: _is_of_others(data, path, hints))
        named.sort(key=lambda path: _is_of_others(data, path, hints))
    named_objects = [path for path in objects if hints.lines[path] in hints.places]
    other_objects = [path for path in objects if path not in named_objects]
    with_objects = [*named_objects, *named_steps, *other_objects]
    return _Calls(steps, parts, named_steps, named, with_objects, blocks)


def _is_of_others(data: ScenarioData, path: DataPath, hints: FailureHints) -> bool:
    return hints.odd.isdisjoint(owner_ranks(data, path))


def _calls_awaited_by(
    data: ScenarioData, steps: list[DataPath], named: list[DataPath]
) -> list[DataPath]:
    """The calls whose requests the named waits wait for."""
    awaited: set[tuple[DataPath, str]] = set()
    for path in named:
        handles = None
        if op_of(value_at(data, path)) == "wait":
            handles = fields_of(value_at(data, path)).get("handles")
        for handle in handles if isinstance(handles, list) else [handles]:
            awaited.add((path[:-1], str(handle)))
    return [path for path in steps if (path[:-1], _handle_of(data, path)) in awaited]


def _handle_of(data: ScenarioData, path: DataPath) -> str:
    return str(fields_of(value_at(data, path)).get("as", ""))


# --- groups and numbers ---
def _group_changes(data: ScenarioData, hints: FailureHints, calls: _Calls) -> Iterator[_Proposals]:
    """Changes that apply to few programs, and repair most of those in one step."""
    program = hints.program
    if program is None:
        return
    yield _of_kind(CHANGES_ARGUMENTS, same_settings_on_all_ranks(data))
    waits = chain(
        wait_for_all_before_use(data),
        wait_before_use(data, calls.steps),
        wait_for_streams(data, calls.steps),
    )
    yield _of_kind(CHANGES_ORDER, waits)
    swaps = chain(
        find_unused_parameters(data),
        wait_for_other_request(data),
        turn_round(data),
        swap_tensors(data, calls.named_steps),
        drop_conjuncts(data, program),
    )
    yield _of_kind(CHANGES_ARGUMENTS, islice(swaps, _MAX_RARE_CHANGES))
    arguments = chain(
        divide_world(data, program),
        list_callers(data, program),
        receive_into_awaited(data, calls.named),
        equal_iterations(data, program, hints.user_lines),
        root_of_other_ranks(data, program, calls.named_steps, hints.lines, hints.user_lines),
        roots_as_numbers(data, program, calls.named_steps),
        splits_as_numbers(data, program, calls.named_steps, hints.lines),
        outputs_as_sent(data, program, calls.named_steps),
        invert_peers(data, program, calls.named),
        shift_peers(data, program, calls.named),
        same_channel(data, calls.steps),
        copy_of_composite_calls(data),
        list_members_once(data, program),
        name_expected_sources(data),
        drop_invalid_tags(data, calls.named),
        use_unused_groups(data, program, calls.with_objects),
        call_in_group_of_callers(data, program, calls.with_objects),
        call_on_members(data, calls.named_steps),
        call_where_valid(data, program, calls.named_steps, hints.lines) if hints.is_first else (),
    )
    yield _of_kind(CHANGES_ARGUMENTS, islice(arguments, _MAX_RARE_CHANGES))
    conditions = chain(
        copy_sibling_conditions(data, program),
        () if hints.decisions is None else decide_on_all_ranks(data, hints.decisions),
        complement_conditions(data, program),
    )
    yield _of_kind(CHANGES_ARGUMENTS, conditions)
    names = chain(
        use_peers_nearby(data, calls.named),
        shift_copies(data, calls.named),
        use_other_vars(data, program, calls.named),
    )
    yield _of_kind(CHANGES_ARGUMENTS, names)
    yield _of_kind(ADDS_CALLS, extend_blocks(data, program, calls.with_objects))
    yield _of_kind(ADDS_CALLS, add_skipped_calls(data))
    yield _of_kind(ADDS_CALLS, synchronise_accesses(data, calls.steps))
    yield _of_kind(CHANGES_ORDER, chain(destroy_later(data), destroy_after_block(data)))
    yield _of_kind(CHANGES_ORDER, wait_for_requests(data, calls.named_steps))
    yield _of_kind(
        ADDS_CALLS,
        chain(exit_after_block(data), exit_on_all_ranks(data, program), drop_destroy(data)),
    )
    yield _of_kind(ADDS_CALLS, create_on_all_ranks(data))
    yield _of_kind(CHANGES_ARGUMENTS, create_among_members(data))
    if BACKEND_PROFILES[program.backend].device:
        yield _of_kind(CHANGES_ARGUMENTS, initialise_eagerly(data))


# --- order ---
def _order_changes(data: ScenarioData, calls: _Calls) -> _Proposals:
    changes = chain(
        batch_messages(data, calls.steps),
        batch_requests(data, calls.steps),
        make_nonblocking(data, calls.steps, calls.named_steps),
        move_waits_last(data, calls.steps),
        reverse_loops(data),
    )
    return _of_kind(CHANGES_ORDER, changes)


# --- arguments ---
def _alignments(data: ScenarioData, hints: FailureHints, calls: _Calls) -> _Proposals:
    messages = calls.steps + calls.parts
    changes = align_with_counterparts(data, calls.named, messages, hints.user_lines)
    return _of_kind(CHANGES_ARGUMENTS, changes)


def _argument_changes(
    data: ScenarioData, hints: FailureHints, calls: _Calls
) -> Iterator[_Proposals]:
    yield _alignments(data, hints, calls)
    declarations = chain(
        use_group_ranks(data, calls.named_steps),
        () if hints.program is None else unify_shapes(data, hints.program),
        use_unused_tensors(data, calls.named_steps),
        exchange_splits(data, calls.named_steps),
        transpose_splits(data, calls.named_steps),
        () if hints.program is None else inputs_as_received(data, hints.program, calls.named_steps),
        () if hints.program is None else fit_parts(data, hints.program, calls.named_steps),
        pad_rows(data, calls.named_steps),
    )
    if hints.program is not None:
        yield _of_kind(CHANGES_ARGUMENTS, change_vars(data, hints.program))
    yield _of_kind(CHANGES_ARGUMENTS, _copy_arguments(data, calls, hints))
    yield _of_kind(CHANGES_ARGUMENTS, declarations)
    yield _of_kind(CHANGES_ARGUMENTS, _copy_declarations(data, calls.named_steps))


def _copy_arguments(data: ScenarioData, calls: _Calls, hints: FailureHints) -> Iterator[_Change]:
    """A step gets an argument of another one: tag, group, root, reduction or tensor."""
    named = calls.named_steps
    for path in named:
        entry = value_at(data, path)
        op, fields = op_of(entry), fields_of(entry)
        own_keys = [key for key in _SHARED_FIELDS if _has_field(op, key)]
        for other in named:
            if other == path:
                continue
            other_op, other_fields = op_of(value_at(data, other)), fields_of(value_at(data, other))
            like = other_op + parenthesised_line(hints.user_lines, other)
            for key in (key for key in own_keys if _has_field(other_op, key)):
                if fields.get(key) != other_fields.get(key):
                    copied = _with_value_of(fields, key, other_fields)
                    step = make_step(op, copied, ranks_of(entry))
                    words = f"{op}: {values_as_words([key], other_fields)}, like {like}"
                    yield words, with_steps_replaced(data, path, [step])
        if not OPERATIONS[op].root_field:
            continue
        for key in ("src", "dst"):
            if isinstance(fields.get(key), str | dict):
                step = make_step(op, {**fields, key: 0}, ranks_of(entry))
                words = f"{op}: use one root on all ranks: set {key} to 0"
                yield words, with_steps_replaced(data, path, [step])


def _has_field(op: str, key: str) -> bool:
    """Whether an operation has a field of this name in a scenario."""
    fields = OPERATIONS[op].model_fields
    return key in (info.alias or name for name, info in fields.items())


def _copy_declarations(data: ScenarioData, named: list[DataPath]) -> Iterator[_Change]:
    """A tensor is declared with the shape or dtype of one that it meets."""
    declared = data.get("tensors") or {}
    used: dict[str, None] = {}
    for path in named:
        for name in sorted(tensor_names(value_at(data, path))):
            if name in declared:
                used[name] = None
    for name in used:
        for key in ("shape", "dtype"):
            for other in used:
                tensor, other_tensor = declared[name], declared[other]
                if not isinstance(tensor, dict) or not isinstance(other_tensor, dict):
                    continue
                if key == "dtype" and _bytes_of(other_tensor) < _bytes_of(tensor):
                    continue  # the values of this tensor would lose precision
                if tensor.get(key) != other_tensor.get(key):
                    copied = _with_value_of(tensor, key, other_tensor)
                    words = f"give the tensor {name} the {key} of {other}"
                    yield words, {**data, "tensors": {**declared, name: copied}}


def _bytes_of(tensor: ScenarioData) -> int:
    """The bytes of an element; 0 for an unknown dtype."""
    return DTYPE_BYTES.get(str(tensor.get("dtype", "float32")), 0)


def _with_value_of(fields: dict[str, Any], key: str, other: dict[str, Any]) -> dict[str, Any]:
    """The fields with one of them as in ``other``; without it, if ``other`` lacks it."""
    changed = {name: value for name, value in fields.items() if name != key}
    if key in other:
        changed[key] = other[key]
    return changed


__all__ = ["ADDS_CALLS", "REMOVES_CALLS", "FailureHints", "RepairProposal", "propose_repairs"]
