"""Repairs that write numbers in place of values that differ by rank.

Iterations of loops, roots of collectives, splits of exchanges. Each function yields (words, changed
data).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    declared_tensor,
    fields_of,
    make_step,
    op_of,
    owner_ranks,
    ranks_of,
    step_paths,
    times_of,
    value_at,
    value_by_rank,
    with_steps_replaced,
)
from distsim.repair.written_numbers import written_number

_ROOT_FIELDS: Final = ("src", "dst", "group_src", "group_dst")


def equal_iterations(
    data: ScenarioData, program: Program, lines: Mapping[DataPath, int]
) -> Iterator[tuple[str, ScenarioData]]:
    """A loop runs equally often on all ranks, or as often as another loop."""
    loops = _loop_paths(data)
    numbers = {path: value_by_rank(program, times_of(value_at(data, path))) for path in loops}
    used = {number for values in numbers.values() for number in values}
    for path in loops:
        values = numbers[path]
        if not values:
            continue
        for number in sorted(used, reverse=True):
            if number <= 0 or set(values) == {number}:
                continue
            times = _written_times(data, program, path, number)
            words = _iterations_words(number, times, values)
            if len(set(values)) == 1:
                like = next(lines[other] for other in loops if number in numbers[other])
                words = f"{_repeat_words(number, times, values[0])}, as at line {like}"
            yield words, _with_times(data, path, times)


def _loop_paths(data: ScenarioData) -> list[DataPath]:
    return [path for path in step_paths(data) if times_of(value_at(data, path)) is not None]


def _written_times(data: ScenarioData, program: Program, path: DataPath, number: int) -> str | int:
    """A number of iterations as the loop itself, or another one, writes it."""
    others = [times_of(value_at(data, other)) for other in _loop_paths(data) if other != path]
    return written_number(data, program, number, times_of(value_at(data, path)), others)


def _repeat_words(number: int, times: str | int, before: int) -> str:
    return f"repeat {number} times instead of {before} (`times: {times}`)"


def more_iterations(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A loop runs a little more often, or once for each other rank.

    Ranks may need equally many messages without having equal loops: a loop over the workers on one
    rank, and one message on each worker.
    """
    for path, before in _loops_with_equal_times(data, program):
        for number in (before + 1, program.world_size - 1, program.world_size, before + 2):
            if number > before:
                times = _written_times(data, program, path, number)
                yield _repeat_words(number, times, before), _with_times(data, path, times)


def fewer_iterations(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A loop runs a little less often, or once for each other rank."""
    for path, before in _loops_with_equal_times(data, program):
        for number in (before - 1, program.world_size - 1, program.world_size, before - 2):
            if 0 < number < before:
                times = _written_times(data, program, path, number)
                yield _repeat_words(number, times, before), _with_times(data, path, times)


def _loops_with_equal_times(data: ScenarioData, program: Program) -> Iterator[tuple[DataPath, int]]:
    """The loops that run equally often on all ranks, and how often."""
    for path in _loop_paths(data):
        values = set(value_by_rank(program, times_of(value_at(data, path))))
        if len(values) == 1:
            yield path, values.pop()


def _with_times(data: ScenarioData, path: DataPath, times: str | int) -> ScenarioData:
    changed = copy.deepcopy(data)
    value_at(changed, path)["repeat"]["times"] = times
    return changed


def _iterations_words(number: int, times: str | int, values: list[int]) -> str:
    words = f"set `times: {times}` on all ranks"
    if number == min(values):
        return f"{words}, which drops the extra iterations (drop_last=True)"
    if number == max(values):
        return f"{words}; ranks with fewer batches use Join or repeat samples (drop_last=False)"
    return words


def roots_as_numbers(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A root that differs by rank becomes one number, the most common one first."""
    for path in named:
        entry = value_at(data, path)
        op, fields = op_of(entry), fields_of(entry)
        if not OPERATIONS[op].root_field:
            continue
        for key in _ROOT_FIELDS:
            if not isinstance(fields.get(key), str | dict):
                continue
            for number, _ in Counter(value_by_rank(program, fields[key])).most_common():
                step = make_step(op, {**fields, key: number}, ranks_of(entry))
                words = f"{op}: use one root on all ranks: set {key} to {number}"
                yield words, with_steps_replaced(data, path, [step])


def root_of_other_ranks(
    data: ScenarioData,
    program: Program,
    named: list[DataPath],
    lines: Mapping[DataPath, int],
    user_lines: Mapping[DataPath, int],
) -> Iterator[tuple[str, ScenarioData]]:
    """A root becomes the one that other ranks name for this operation, as a number.

    The expression itself cannot be copied: `src: rank` names another rank on each of them.
    """
    for path in named:
        entry = value_at(data, path)
        op, fields = op_of(entry), fields_of(entry)
        key = next((key for key in ("src", "dst") if key in fields), None)
        if key is None or not OPERATIONS[op].root_field:
            continue
        own_roots = _roots_at(program, op, lines[path])
        for other in named:
            if other == path or op_of(value_at(data, other)) != op:
                continue
            selectors = _selectors_around(data, other)
            for number in sorted(_roots_at(program, op, lines[other]) - own_roots):
                root = written_number(data, program, number, fields[key], selectors)
                step = make_step(op, {**fields, key: root}, ranks_of(entry))
                words = f"{op}: set {key} to {root}, the root that line {user_lines[other]} names"
                yield words, with_steps_replaced(data, path, [step])


def _selectors_around(data: ScenarioData, path: DataPath) -> list[object]:
    """The `ranks` of a step and of the blocks around it."""
    entries = (value_at(data, path[:length]) for length in range(1, len(path) + 1))
    return [entry["ranks"] for entry in entries if isinstance(entry, dict) and "ranks" in entry]


def _roots_at(program: Program, op: str, line: int) -> set[int]:
    """The roots that calls of an operation on this line name, as global ranks."""
    return {
        call.root
        for rank in program.present
        for position, call in program.calls_of(rank)
        if call.op == op and call.root is not None and program.place(rank, position).line == line
    }


def splits_as_numbers(
    data: ScenarioData, program: Program, named: list[DataPath], lines: Mapping[DataPath, int]
) -> Iterator[tuple[str, ScenarioData]]:
    """The output splits of an exchange become the rows that the other ranks send."""
    exchanges = _exchanges_by_group(program)
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        if "output_splits" not in fields:
            continue
        received = _received_rows(exchanges, lines.get(path, 0))
        if not received:
            continue
        by_rank: object = received
        if len(received) == 1:
            by_rank = next(iter(received.values()))
        step = make_step(op_of(entry), {**fields, "output_splits": by_rank}, ranks_of(entry))
        changed = with_steps_replaced(data, path, [step])
        words = f"{op_of(entry)}: set output_splits to the rows that the other ranks send"
        yield words, changed
        resized = _with_output_rows(changed, fields.get("output"), received)
        if resized is not None:
            yield f"{words}, and give the output as many rows", resized


def outputs_as_sent(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The outputs of an all_to_all get the sizes of what the other ranks send.

    Only of the first one of a rank: the calls of the ranks correspond by their order.
    """
    inputs: dict[int, list[int]] = {}
    for rank in program.present:
        calls = (call for _, call in program.calls_of(rank) if call.op == "all_to_all")
        first = next(calls, None)
        if first is not None and len(first.inputs) == program.world_size:
            inputs[rank] = [part.numel for part in first.inputs]
    for path in named:
        entry = value_at(data, path)
        fields, owners = fields_of(entry), owner_ranks(data, path)
        outputs = fields.get("output")
        if op_of(entry) != "all_to_all" or not isinstance(outputs, list) or len(owners) != 1:
            continue
        if len(inputs) != program.world_size or not all(isinstance(x, dict) for x in outputs):
            continue
        resized = [{**x, "shape": [inputs[k][owners[0]]]} for k, x in enumerate(outputs)]
        step = make_step("all_to_all", {**fields, "output": resized}, ranks_of(entry))
        words = "all_to_all: give the outputs the sizes that the other ranks send"
        yield words, with_steps_replaced(data, path, [step])


_Exchanges = dict[tuple[int, ...], dict[int, list[tuple[int, ResolvedCall]]]]


def _exchanges_by_group(program: Program) -> _Exchanges:
    """(line, call) of each rank's all_to_all_single calls, by the members of the group."""
    found: _Exchanges = {}
    for rank in program.present:
        for position, call in program.calls_of(rank):
            if call.op == "all_to_all_single" and call.input_splits is not None:
                line = program.place(rank, position).line
                by_rank = found.setdefault(call.group.ranks, {})
                by_rank.setdefault(rank, []).append((line, call))
    return found


def _received_rows(exchanges: _Exchanges, line: int) -> dict[int, list[int]]:
    """By rank with an exchange on the line, the rows that every member sends it."""
    received: dict[int, list[int]] = {}
    for members, by_rank in exchanges.items():
        for rank, calls in by_rank.items():
            at_line = [k for k, (place, _) in enumerate(calls) if place == line]
            if not at_line or any(len(by_rank.get(each, ())) <= at_line[0] for each in members):
                continue
            sent = [by_rank[each][at_line[0]][1].input_splits or () for each in members]
            index = members.index(rank)
            if all(len(splits) == len(members) for splits in sent):
                received[rank] = [splits[index] for splits in sent]
    return received


def _with_output_rows(
    data: ScenarioData, output: object, received: dict[int, list[int]]
) -> ScenarioData | None:
    declared = data.get("tensors") or {}
    tensor = declared_tensor(data, output)
    shape = None if tensor is None else tensor.get("shape")
    if tensor is None or not isinstance(shape, list) or not shape:
        return None
    if len(received) != data.get("world"):
        return None
    rows = {rank: sum(splits) for rank, splits in received.items()}
    return {**data, "tensors": {**declared, output: {**tensor, "shape": [rows, *shape[1:]]}}}


__all__ = [
    "equal_iterations",
    "fewer_iterations",
    "more_iterations",
    "outputs_as_sent",
    "root_of_other_ranks",
    "roots_as_numbers",
    "splits_as_numbers",
]
