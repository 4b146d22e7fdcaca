"""Several collectives of one kind on one group, issued together: one launch, one request.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (`_coalescing_manager`): all_reduce,
all_gather_single and reduce_scatter_single are collected inside the context and become one call of
the backend at its end (`allreduce_coalesced`, `all_gather_single_coalesced`,
`reduce_scatter_single_coalesced`). ProcessGroupNCCL makes it one ncclGroup; ProcessGroupGloo (run)
lays the parts of all_reduce and all_gather end to end in one operation, and reduces those of
reduce_scatter one after the other.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import ClassVar

from pydantic import Field, model_validator

from distsim.operations.core import colours
from distsim.operations.core.backend_bindings import GLOO_SHAPE_ERRORS
from distsim.operations.core.collective import CollectiveOperation, ReducingCollective
from distsim.operations.core.field_types import TensorListField
from distsim.operations.core.operation_base import (
    BackendBinding,
    Operation,
    OperationHelp,
    OutputEffect,
)
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    TensorBuffer,
    caller_not_in_group,
    differing_part_dtypes,
    first_reason,
    tensor_in_two_parts,
)
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork
from distsim.operations.unrooted import (
    AllGatherIntoTensorOperation,
    AllReduceOperation,
    ReduceScatterTensorOperation,
)

_WAITS_FOR_ALL_PARTS = (
    "Every rank waits for every other rank and for all parts: the launch completes with its last "
    "part."
)
_ONE_LAUNCH = (
    "All parts are one launch: its latency counts once, and its size is the sum of the parts."
)
_ERROR_INSIDE_CONTEXT = (
    "After an error inside the context, the group keeps collecting calls and never issues the "
    "later ones."
)


class _CoalescedCollective(CollectiveOperation):
    """A launch of several collectives. The parts of all ranks match in list order."""

    #: The operation that each part is.
    coalesces: ClassVar[type[Operation]]
    torch_name = "_coalescing_manager"

    @classmethod
    def separate(cls, call: ResolvedCall) -> tuple[ResolvedCall, ...]:
        one = replace(call, op=cls.coalesces.op, is_async=False)
        pairs = zip(call.inputs, call.outputs, strict=False)
        return tuple(replace(one, inputs=(given,), outputs=(got,)) for given, got in pairs)

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        """The element counts of the parts, in order."""
        return tuple(
            shared.numel
            for part in cls.separate(call)
            if (shared := _compared_buffer(cls.coalesces, part)) is not None
        )

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """The list itself: how many parts, and the element count of each."""
        agreed: dict[str, Hashable] = {"op": cls.op, "numel": cls.numel(call)}
        if call.inputs:
            agreed["dtype"] = call.inputs[0].dtype
        return agreed | ({"reduce_op": call.reduce_op} if cls.reduces else {})

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        return first_reason(
            (
                caller_not_in_group(call),
                differing_part_dtypes((*call.inputs, *call.outputs)),
                cls.misfits(call),
            )
        )

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        if not call.inputs or len(call.inputs) != len(call.outputs):
            return (
                "a launch needs at least one input and an output for each input; it has "
                f"{len(call.inputs)} and {len(call.outputs)}"
            )
        parts = cls.separate(call)
        found = ((k, cls.coalesces.faults(part)) for k, part in enumerate(parts, 1))
        return first_reason(
            (
                tensor_in_two_parts(call.inputs, call.outputs),
                *(f"part {k}: {fault}" for k, fault in found if fault),
            )
        )

    @classmethod
    def mismatched_pairs(cls, calls: Sequence[ResolvedCall]) -> list[tuple[int, int, str]]:
        """Compare the first member with every other one, and name the part that differs."""
        pairs = [(calls[0], other, _first_difference(cls, calls[0], other)) for other in calls[1:]]
        return [(a.rank, b.rank, why) for a, b, why in pairs if why]

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """All parts together."""
        return sum(cls.coalesces.nbytes(part) for part in cls.separate(call))

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """As each of its parts."""
        return cls.coalesces.busbw_factor(n)

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """Of each part."""
        return cls.coalesces.effect(n, root)

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """The context returns no request of its own: its one `TorchWork` is in the manager's
        list.
        """
        with dist._coalescing_manager(group=group, async_ops=call.is_async) as manager:
            for part in cls.separate(call):
                cls.coalesces.torch_call(dist, part, tensors, group)
        return manager.works[0] if call.is_async else None


class AllReduceCoalescedOperation(ReducingCollective, _CoalescedCollective):
    """Several all_reduce calls as one launch."""

    op = "all_reduce_coalesced"
    coalesces = AllReduceOperation
    nccl_tests = AllReduceOperation.nccl_tests
    algorithms = AllReduceOperation.algorithms
    #: gloo concatenates the parts in one operation in host memory, and raises if they have several
    #: dtypes.
    bindings = {
        "gloo": BackendBinding(gpu=False, slot="all_reduce", one_dtype=True),
        "nccl": BackendBinding(one_dtype=True),
        "mpi": BackendBinding(refused="allreduce_coalesced is currently not supported with MPI"),
    }
    first_field = "tensor"
    colour = colours.REDUCE
    words = OperationHelp(
        signature=(
            "with _coalescing_manager(group=None, async_ops=False): all_reduce(tensor, "
            "op=ReduceOp.SUM, group=None), …"
        ),
        before=(
            "Every rank has a list of tensors of one dtype. The k-th tensor has the same element "
            "count on every rank."
        ),
        after=(
            "Each tensor of the list contains its reduction over all ranks, as after a separate "
            "all_reduce."
        ),
        waits=_WAITS_FOR_ALL_PARTS,
        example="- all_reduce_coalesced: {tensor: [weight_grad, bias_grad], op: avg}",
        notes=(
            _ONE_LAUNCH,
            "The reduce op of the first part applies to all parts.",
            (
                "gloo concatenates the parts into one all_reduce and does not compare the lists. "
                "If ranks use different orders, the values are mixed up."
            ),
            "torch has deprecated the function `all_reduce_coalesced`, which makes the same call.",
            _ERROR_INSIDE_CONTEXT,
        ),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.all_reduce(weight_grad, op=dist.ReduceOp.AVG)\n"
            "    dist.all_reduce(bias_grad, op=dist.ReduceOp.AVG)"
        ),
    )

    tensor: TensorListField = Field(
        description="Tensors to reduce in place: a name or a list of names.",
        examples=["x"],
    )

    @model_validator(mode="after")
    def _some_tensors(self) -> "AllReduceCoalescedOperation":
        if not _as_tuple(self.tensor):
            raise ValueError("expected at least one tensor in the list")
        return self


class _CoalescedOutOfPlace(_CoalescedCollective):
    """Part k takes the k-th input to the k-th output."""

    input: TensorListField = Field(
        description="Inputs, one for each part of the launch: a name or a list of names.",
        examples=["x"],
    )
    output: TensorListField = Field(
        description="Outputs, one for each input: a name or a list of names.",
        examples=["all_x"],
    )

    @model_validator(mode="after")
    def _as_many_outputs(self) -> "_CoalescedOutOfPlace":
        given, got = len(_as_tuple(self.input)), len(_as_tuple(self.output))
        if given != got or not given:
            raise ValueError(f"expected an output for each input, found {given} and {got}")
        return self


class AllGatherIntoTensorCoalescedOperation(_CoalescedOutOfPlace):
    """Several all_gather_into_tensor calls as one launch."""

    op = "all_gather_into_tensor_coalesced"
    coalesces = AllGatherIntoTensorOperation
    aliases = ("all_gather_single_coalesced",)
    nccl_tests = AllGatherIntoTensorOperation.nccl_tests
    algorithms = AllGatherIntoTensorOperation.algorithms
    #: If the parts have several dtypes, gloo mixes up the bytes.
    bindings = {
        "gloo": BackendBinding(
            gpu=False, slot="all_gather", shape_text=GLOO_SHAPE_ERRORS["all_gather_coalesced"]
        ),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(
            refused="Backend mpi does not support allgather_into_tensor_coalesced"
        ),
    }
    output_parts = AllGatherIntoTensorOperation.output_parts
    colour = colours.COLLECT
    words = OperationHelp(
        signature=(
            "with _coalescing_manager(group=None, async_ops=False): "
            "all_gather_single(output_tensor, input_tensor), …"
        ),
        before=(
            "Every rank has a list of inputs of one dtype, and for each input an output n times "
            "as large."
        ),
        after="On every rank, output k contains the k-th input of every rank, in group order.",
        waits=_WAITS_FOR_ALL_PARTS,
        example="- all_gather_into_tensor_coalesced: {input: [w, b], output: [all_w, all_b]}",
        notes=(
            _ONE_LAUNCH,
            (
                "Parts of different dtypes: nccl supports them; gloo mixes up their bytes without "
                "an error."
            ),
            (
                "gloo requires that each output has the shape of its input, with the first "
                "dimension n times as long."
            ),
            _ERROR_INSIDE_CONTEXT,
        ),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.all_gather_into_tensor(all_w, w)\n"
            "    dist.all_gather_into_tensor(all_b, b)"
        ),
    )


class ReduceScatterTensorCoalescedOperation(ReducingCollective, _CoalescedOutOfPlace):
    """Several reduce_scatter_tensor calls as one launch."""

    op = "reduce_scatter_tensor_coalesced"
    coalesces = ReduceScatterTensorOperation
    aliases = ("reduce_scatter_single_coalesced",)
    nccl_tests = ReduceScatterTensorOperation.nccl_tests
    algorithms = ReduceScatterTensorOperation.algorithms
    bindings = {
        "gloo": BackendBinding(
            slot="all_reduce", shape_text=GLOO_SHAPE_ERRORS["reduce_scatter"], part_by_part=True
        ),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(
            refused="Backend mpi does not support reduce_scatter_tensor_coalesced"
        ),
    }
    input_parts = ReduceScatterTensorOperation.input_parts
    colour = colours.REDUCE
    words = OperationHelp(
        signature=(
            "with _coalescing_manager(group=None, async_ops=False): "
            "reduce_scatter_single(output, input, op=ReduceOp.SUM), …"
        ),
        before=(
            "Every rank has a list of inputs of one dtype, each n times as long as its output. "
            "The lists have the same sizes on all ranks."
        ),
        after="Output k of group rank i is part i (of n) of the reduced k-th inputs.",
        waits=_WAITS_FOR_ALL_PARTS,
        example="- reduce_scatter_tensor_coalesced: {input: [all_w, all_b], output: [w, b]}",
        notes=(
            _ONE_LAUNCH,
            "The reduce op of the first part applies to all parts.",
            "gloo runs one all_reduce for each part, one after the other.",
            _ERROR_INSIDE_CONTEXT,
        ),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.reduce_scatter_tensor(w, all_w)\n"
            "    dist.reduce_scatter_tensor(b, all_b)"
        ),
    )


def _compared_buffer(row: type[Operation], part: ResolvedCall) -> TensorBuffer | None:
    return row.share(part) if issubclass(row, CollectiveOperation) else None


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _first_difference(
    row: type[_CoalescedCollective], one: ResolvedCall, other: ResolvedCall
) -> str:
    """The first difference between two lists as a clause, or an empty text."""
    here, there = _labelled_parts(row, one), _labelled_parts(row, other)
    sizes = [[numel for _, numel in parts] for parts in (here, there)]
    if sizes[0] == sizes[1]:
        return ""
    if sorted(here) == sorted(there):
        order = ", ".join(label for label, _ in there)
        return f"rank {other.rank} has the parts of rank {one.rank} in a different order: {order}"
    if len(here) != len(there):
        (short, few), (long, many) = sorted(
            ((one, here), (other, there)), key=lambda side: len(side[1])
        )
        extra = [label for label, numel in many if (label, numel) not in few]
        which = (
            f": {', '.join(extra)} {'is' if len(extra) == 1 else 'are'} missing"
            if len(extra) == len(many) - len(few)
            else ""
        )
        fewer = f"rank {short.rank} only {len(few)}"
        return f"rank {long.rank} coalesces {len(many)} parts, {fewer}{which}"
    k = next(k for k, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b)
    (a, m), (b, n) = here[k], there[k]
    return (
        f"part {k + 1} is {a} of {m} elements on rank {one.rank}, {b} of {n} on rank {other.rank}"
    )


def _labelled_parts(row: type[_CoalescedCollective], call: ResolvedCall) -> list[tuple[str, int]]:
    """(label, element count) of each part."""
    shared = [_compared_buffer(row.coalesces, part) for part in row.separate(call)]
    return [(s.label or "a tensor", s.numel) for s in shared if s is not None]
