"""Repairs of what a call or a tensor says of itself: a root counted in the wrong list, one rank's
own shape, requests unbatched.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    make_step,
    op_of,
    paths_by_list,
    ranks_of,
    value_at,
    with_steps_replaced,
)

_BATCH_OP: Final = {"isend": "isend", "irecv": "irecv", "send": "isend", "recv": "irecv"}


def use_group_ranks(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a root or peer of a group's call counts inside the group."""
    for path in named:
        fields = fields_of(value_at(data, path))
        for key in ("src", "dst"):
            if key in fields and "group" in fields:
                changed = {
                    (f"group_{key}" if name == key else name): value
                    for name, value in fields.items()
                }
                entry = make_step(
                    op_of(value_at(data, path)), changed, ranks_of(value_at(data, path))
                )
                yield (
                    f"{op_of(entry)}: group_{key}, which counts inside the group, in place of {key}",
                    with_steps_replaced(data, path, [entry]),
                )


def unify_shapes(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a tensor has one shape on all ranks, that of most."""
    declared = data.get("tensors") or {}
    for name, tensor in declared.items():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if shape is not None and (alike := _common_shape(shape)) != shape:
            yield (
                f"the tensor {name} with one shape on all ranks",
                {**data, "tensors": {**declared, name: {**tensor, "shape": alike}}},
            )


def _common_shape(shape: object) -> object:
    if isinstance(shape, list):
        return [_common_shape(item) for item in shape]
    if not isinstance(shape, dict) or not all(str(key).isdigit() or key == "else" for key in shape):
        return shape
    if "else" in shape:
        return shape["else"]
    most, _ = Counter(map(repr, shape.values())).most_common(1)[0]
    return next(value for value in shape.values() if repr(value) == most)


def batch_requests(data: ScenarioData, paths: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): messages in a row, some of them requests, and the waits for them behind,
    become one batch: everywhere at once.
    """
    found, any_one = copy.deepcopy(data), False
    for where, mine in sorted(
        paths_by_list(paths).items(), key=lambda item: len(item[0]), reverse=True
    ):
        within = value_at(found, where)
        for first, last in reversed(
            list(_batchable_ranges(within, sorted(int(path[-1]) for path in mine)))
        ):
            messages = [entry for entry in within[first:last] if op_of(entry) in _BATCH_OP]
            ops = [
                {_BATCH_OP[op_of(entry)]: {k: v for k, v in fields_of(entry).items() if k != "as"}}
                for entry in messages
            ]
            within[first:last] = [
                make_step("batch_isend_irecv", {"ops": ops}, ranks_of(messages[0]))
            ]
            any_one = True
    if any_one:
        yield "post the messages together with batch_isend_irecv", found


def _batchable_ranges(within: list[Any], at_: list[int]) -> Iterator[tuple[int, int]]:
    """From where to where messages of the same ranks and the waits for all of their requests
    stand.
    """
    k = 0
    while k < len(at_):
        first = end = at_[k]
        open_: set[str] = set()
        waits = False
        while end in at_ and (
            op_of(within[end]) == "wait" or (op_of(within[end]) in _BATCH_OP and not waits)
        ):
            if ranks_of(within[end]) != ranks_of(within[first]):
                break
            waits = op_of(within[end]) == "wait"
            open_ = (
                open_ - _awaited_handles(within[end])
                if waits
                else open_ | {str(fields_of(within[end]).get("as", ""))} - {""}
            )
            end += 1
        messages = sum(op_of(entry) in _BATCH_OP for entry in within[first:end])
        requests = any("as" in fields_of(entry) for entry in within[first:end])
        if messages > 1 and requests and not open_:
            yield first, end
        k = next((i for i, place in enumerate(at_) if place >= max(end, first + 1)), len(at_))


def _awaited_handles(entry: object) -> set[str]:
    handles = fields_of(entry).get("handles")
    return {str(handle) for handle in (handles if isinstance(handles, list) else [handles])}
