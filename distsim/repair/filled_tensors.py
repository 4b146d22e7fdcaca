"""Which tensors the calls of a program fill, use and leave unused.

Key idea: a repair may check ok because it throws data away. It removes the call that fills a
tensor, takes a root whose tensor holds nothing, or makes a tensor larger although the program
declares another tensor of the right size. Values are not computed here; a write in program order is
enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from distsim.common.expressions import Expression
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.program.step_traits import expression_names
from distsim.repair.scenario_data import value_by_rank

#: Operation, members and root of a collective.
Root = tuple[str, tuple[int, ...], int]


class TensorChange(NamedTuple):
    """How the tensors of a changed program differ; less is better.

    ``unfilled``: tensors that calls of correct ranks filled and that none fills any more, beyond
    those that are filled in their place. ``invented``: ranks on which a tensor with a declared
    value has more elements, while another tensor with a value is used by no call.
    """

    unfilled: int
    invented: int


NO_TENSOR_CHANGE = TensorChange(0, 0)


class FilledTensors:
    """The tensors of a program that its calls fill and use.

    ``empty_roots``: roots whose tensor no call of the root wrote before, if other ranks name a root
    that did write it. A rank whose declared value differs from that of all other ranks, or which
    alone does work that the tensor's name describes, such as `read weights`, holds the tensor.
    """

    def __init__(self, program: Program) -> None:
        self._filled: dict[int, set[str]] = {}
        self._used: set[str] = set()
        self._sizes = _sizes_of_valued_tensors(program)
        root_has_data: dict[Root, bool] = {}
        for rank in program.present:
            filled = self._filled.setdefault(rank, _held_alone(program, rank))
            for call in _single_calls(program, rank):
                self._used.update(_used_names(call))
                if call.root == rank and OPERATIONS[call.op].gives == "root":
                    key = (call.op, call.group.ranks, rank)
                    written = any(buffer.name in filled for buffer in call.inputs)
                    root_has_data[key] = root_has_data.get(key, False) or written
                filled.update(buffer.name for buffer in _filled_buffers(call))
        with_data = {key[:2] for key, has_data in root_has_data.items() if has_data}
        self.empty_roots = frozenset(
            key for key, has_data in root_has_data.items() if not has_data and key[:2] in with_data
        )

    def change_in(self, changed: FilledTensors, outliers: frozenset[int]) -> TensorChange:
        """How ``changed`` differs. ``outliers``: ranks that may have filled a wrong tensor."""
        unfilled = 0
        for rank, before in self._filled.items():
            after = changed._filled.get(rank, set())
            if rank not in outliers:
                unfilled += max(0, len(before - after) - len(after - before))
        return TensorChange(unfilled, self._invented(changed))

    def _invented(self, changed: FilledTensors) -> int:
        if not changed._sizes.keys() - changed._used:
            return 0
        return sum(
            new > old
            for name, sizes in self._sizes.items()
            for old, new in zip(sizes, changed._sizes.get(name, sizes), strict=True)
        )

    def substitutes_in(self, changed: FilledTensors) -> dict[str, str]:
        """The replaced tensor, by the name of the tensor that no call used before.

        Empty unless one tensor with a value takes the place of one other.
        """
        taken = self._sizes.keys() & (changed._used - self._used)
        left = self._used - changed._used
        return {taken.pop(): left.pop()} if len(taken) == len(left) == 1 else {}


def _held_alone(program: Program, rank: int) -> set[str]:
    """The tensors of which this rank alone has the content before any exchange."""
    values = {
        name: value_by_rank(program, spec.value.source)
        for name, spec in program.tensors.items()
        if isinstance(spec.value, Expression)
    }
    held = {name for name, by_rank in values.items() if _is_odd_one(by_rank, rank)}
    works = [_work_words(program, each) for each in program.present if each != rank]
    own = _work_words(program, rank).difference(*works)
    return held | {name for name in program.tensors if name.lower() in own}


def _is_odd_one(values: list[int], rank: int) -> bool:
    """Whether one rank has another value than all others, which have the same value."""
    others = {value for each, value in enumerate(values) if each != rank}
    return len(values) > 2 and len(others) == 1 and values[rank] not in others


def _work_words(program: Program, rank: int) -> set[str]:
    """The words in the names of a rank's computations."""
    calls = _single_calls(program, rank)
    return {word for call in calls if call.op == "compute" for word in call.name.lower().split()}


def _single_calls(program: Program, rank: int) -> Iterator[ResolvedCall]:
    for _, call in program.calls_of(rank):
        yield from call.parts or (call,)


def _used_names(call: ResolvedCall) -> set[str]:
    buffers = (*call.inputs, *call.outputs, *call.reads, *call.writes, *call.adds)
    names = {buffer.name for buffer in buffers}
    return names | set(expression_names(call.value)) if call.op == "assign" else names


def _filled_buffers(call: ResolvedCall) -> tuple[TensorBuffer, ...]:
    """The tensors that get new content; a root's own tensor and a send buffer do not."""
    if OPERATIONS[call.op].kind == "p2p" and call.op not in ("recv", "irecv"):
        return ()
    gives_alone = OPERATIONS[call.op].gives == "root"
    if gives_alone and call.root != call.rank:
        return call.outputs
    new = tuple(buffer for buffer in call.outputs if buffer not in call.inputs)
    return (*new, *call.writes, *call.adds)


def _sizes_of_valued_tensors(program: Program) -> dict[str, list[int]]:
    """The elements on each rank of every tensor that is declared with a value."""
    found: dict[str, list[int]] = {}
    for name, spec in program.tensors.items():
        if spec.value is None or spec.shape is None:
            continue
        sizes = [1] * program.world_size
        for dimension in spec.shape:
            for rank in range(program.world_size):
                by_rank = dimension if isinstance(dimension, int) else dimension[rank]
                sizes[rank] *= int(by_rank)
        found[name] = sizes
    return found


__all__ = ["NO_TENSOR_CHANGE", "FilledTensors", "TensorChange"]
