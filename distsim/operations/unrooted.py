"""Collectives in which all ranks play the same part: all_reduce, and the gathering and
reduce-scattering ones.
"""

from collections.abc import Hashable, Sequence
from types import ModuleType

from pydantic import Field

from distsim.operations.core import colours
from distsim.operations.core.algorithms import algorithms_of
from distsim.operations.core.backend_bindings import GLOO_SHAPE_ERRORS
from distsim.operations.core.collective import (
    CollectiveOperation,
    InPlaceCollective,
    ReducingCollective,
    part_of_every_rank,
    torch_reduce_op,
    torch_tensor_list,
)
from distsim.operations.core.field_types import TensorField, TensorListField
from distsim.operations.core.operation_base import (
    BackendBinding,
    InputPart,
    OperationHelp,
    OutputEffect,
)
from distsim.operations.core.resolved_call import (
    COMPLEX_DTYPES,
    ResolvedCall,
    TensorBuffer,
    first_reason,
    part_sizes,
    unsupported_reduction,
    wrong_element_count,
    wrong_part_count,
)
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork

_FULL_SYNCHRONIZATION = (
    "Every rank waits for every other rank: no rank returns before the last one has arrived."
)


class AllReduceOperation(ReducingCollective, InPlaceCollective):
    """The reduction of all tensors, on every rank."""

    op = "all_reduce"
    torch_name = "all_reduce"
    nccl_tests = "all_reduce_perf"
    first_field = "tensor"
    colour = colours.REDUCE
    words = OperationHelp(
        signature="all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False)",
        before="Every rank has a tensor of the same element count and dtype.",
        after="Every rank has the element-wise reduction of all tensors.",
        waits=_FULL_SYNCHRONIZATION,
        example="- all_reduce: {tensor: x, op: sum}",
        notes=("For avg on integers, gloo raises an error and nccl divides after the sum.",),
        torch="dist.all_reduce(x, op=dist.ReduceOp.SUM)",
    )
    algorithms = algorithms_of("all_reduce")
    bindings = {"gloo": BackendBinding(), "nccl": BackendBinding(), "mpi": BackendBinding()}

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        return unsupported_reduction(call)

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """2(n - 1)/n: nccl-tests doc/PERFORMANCE.md, AllReduce."""
        return 2 * (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return ((part_of_every_rank(n),),) * n

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        return dist.all_reduce(
            tensors[call.inputs[0]],
            op=torch_reduce_op(dist, call),
            group=group,
            async_op=call.is_async,
        )


class _AllGatherCollective(CollectiveOperation):
    """Every rank's input, side by side, on every rank."""

    output_parts = "n"
    nccl_tests = "all_gather_perf"
    algorithms = algorithms_of("all_gather")

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """The output: what all ranks give together."""
        return call.output_nbytes or call.input_nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests doc/PERFORMANCE.md, AllGather."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        return (tuple((InputPart(k, 0),) for k in range(n)),) * n


class AllGatherOperation(_AllGatherCollective):
    """The inputs of all ranks, on every rank, as a list."""

    op = "all_gather"
    torch_name = "all_gather"
    colour = colours.COLLECT
    words = OperationHelp(
        signature="all_gather(tensor_list, tensor, group=None, async_op=False)",
        before="Every rank has an input, and space for the inputs of all ranks.",
        after="On every rank, part i of the output is the input of group rank i.",
        waits=_FULL_SYNCHRONIZATION,
        example="- all_gather: {input: x, output: all_x}",
        notes=(
            (
                "torch takes a list of output tensors. In a scenario, `output` is one tensor whose "
                "first dimension has the size of the group, or a list of tensor names."
            ),
            "Parts of different sizes: nccl supports them, gloo does not.",
        ),
        torch="dist.all_gather(list(all_x), x)  # all_x: world_size times the shape of x",
    )
    bindings = {"gloo": BackendBinding(), "nccl": BackendBinding(), "mpi": BackendBinding()}

    input: TensorField = Field(
        description="Tensor that this rank contributes.",
        examples=["x"],
    )
    output: TensorListField = Field(
        description=(
            "Space for the inputs of all ranks: a tensor whose first dimension has the size of the "
            "group, or a list of names."
        ),
        examples=["all_x"],
    )

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        """The element count on which all members must agree."""
        return _common_size_or_all(part_sizes(call.outputs, call.group.size))

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        n, one = call.group.size, call.inputs[0].numel
        if reason := wrong_part_count(call.outputs, n, "output"):
            return reason
        own = part_sizes(call.outputs, n)[call.group_rank]
        return wrong_element_count(
            f"part {call.group_rank} of the output", own, one, f"rank {call.rank} gives"
        )

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        room = torch_tensor_list(tensors, call.outputs, call.group.size)
        return dist.all_gather(room, tensors[call.inputs[0]], group=group, async_op=call.is_async)


class AllGatherIntoTensorOperation(_AllGatherCollective):
    """The inputs of all ranks, on every rank, in one tensor."""

    op = "all_gather_into_tensor"
    aliases = ("all_gather_single",)
    torch_name = "all_gather_into_tensor"
    flat = True
    colour = colours.COLLECT
    words = OperationHelp(
        signature="all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False)",
        before=(
            "Every rank has an input of the same element count and dtype, and an output n times "
            "as large."
        ),
        after="On every rank, the output contains the inputs of all ranks, in group order.",
        waits=_FULL_SYNCHRONIZATION,
        example="- all_gather_into_tensor: {input: x, output: all_x}",
        notes=("In torch 2.13 the name is all_gather_single; all_gather_into_tensor still works.",),
        torch="dist.all_gather_into_tensor(all_x, x)",
    )
    bindings = {
        "gloo": BackendBinding(slot="all_gather", shape_text=GLOO_SHAPE_ERRORS["all_gather"]),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(),
    }

    input: TensorField = Field(
        description="Tensor that this rank contributes.",
        examples=["x"],
    )
    output: TensorField = Field(
        description="Tensor for the inputs of all ranks, one after the other.",
        examples=["all_x"],
    )

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        n, one = call.group.size, call.inputs[0].numel
        return wrong_element_count(
            "output", call.outputs[0].numel, n * one, f"{n} ranks contribute {one} each, in total"
        )

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        torch_function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return torch_function(
            tensors[call.outputs[0]], tensors[call.inputs[0]], group=group, async_op=call.is_async
        )


class _ReduceScatterCollective(ReducingCollective):
    """Part i of all inputs, reduced, on group rank i."""

    input_parts = "n"
    nccl_tests = "reduce_scatter_perf"
    algorithms = algorithms_of("reduce_scatter")

    @classmethod
    def share(cls, call: ResolvedCall) -> TensorBuffer | None:
        return call.outputs[0]

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        return call.outputs[0].numel

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """The input: the parts for all ranks together."""
        return call.input_nbytes or call.output_nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests doc/PERFORMANCE.md, ReduceScatter."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        return tuple((part_of_every_rank(n, part=r),) for r in range(n))


class ReduceScatterOperation(_ReduceScatterCollective):
    """The reduction of part i of all inputs, on group rank i; the input is a list."""

    op = "reduce_scatter"
    torch_name = "reduce_scatter"
    colour = colours.REDUCE
    words = OperationHelp(
        signature="reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False)",
        before="Every rank has one part for each rank.",
        after="The output of group rank i is the reduction of part i of all inputs.",
        waits=_FULL_SYNCHRONIZATION,
        example="- reduce_scatter: {input: parts, output: x, op: sum}",
        notes=(
            (
                "For torch's input list, give one tensor whose first dimension has the size of the "
                "group, or a list of names."
            ),
            "gloo runs an all_reduce of each part, which can match a real all_reduce by mistake.",
        ),
        torch="dist.reduce_scatter(x, list(parts), op=dist.ReduceOp.SUM)",
    )
    #: Run: it meets an all_reduce of one part; reduce_scatter_tensor is one of the whole input, and
    #: completes correctly with an all_reduce of it.
    bindings = {
        "gloo": BackendBinding(slot="all_reduce", part_by_part=True),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(gaps=COMPLEX_DTYPES),
    }

    input: TensorListField = Field(
        description=(
            "One part for each rank: a tensor whose first dimension has the size of the group, or "
            "a list of names."
        ),
        examples=["parts"],
    )
    output: TensorField = Field(
        description="Tensor for this rank's reduced part.",
        examples=["all_x"],
    )

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        """The element count on which all members must agree."""
        return _common_size_or_all(part_sizes(call.inputs, call.group.size))

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        n = call.group.size
        if reason := wrong_part_count(call.inputs, n, "input") or unsupported_reduction(call):
            return reason
        own = part_sizes(call.inputs, n)[call.group_rank]
        return wrong_element_count(
            "output", call.outputs[0].numel, own, f"part {call.group_rank} of the input has"
        )

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        parts = torch_tensor_list(tensors, call.inputs, call.group.size)
        return dist.reduce_scatter(
            tensors[call.outputs[0]],
            parts,
            op=torch_reduce_op(dist, call),
            group=group,
            async_op=call.is_async,
        )


class ReduceScatterTensorOperation(_ReduceScatterCollective):
    """The reduction of part i of all inputs, on group rank i; the input is one tensor."""

    op = "reduce_scatter_tensor"
    aliases = ("reduce_scatter_single",)
    torch_name = "reduce_scatter_tensor"
    flat = True
    colour = colours.REDUCE
    words = OperationHelp(
        signature=(
            "reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False)"
        ),
        before=(
            "Every rank has an input that is n times as long as its output. Element counts and "
            "dtypes are the same on all ranks."
        ),
        after="The output of group rank i is part i (of n) of the reduced inputs.",
        waits=_FULL_SYNCHRONIZATION,
        example="- reduce_scatter_tensor: {input: all_x, output: x, op: sum}",
        notes=(
            "In torch 2.13 the name is reduce_scatter_single; reduce_scatter_tensor still works.",
        ),
        torch="dist.reduce_scatter_tensor(x, all_x, op=dist.ReduceOp.SUM)",
    )
    bindings = {
        "gloo": BackendBinding(slot="all_reduce", shape_text=GLOO_SHAPE_ERRORS["reduce_scatter"]),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(gaps=COMPLEX_DTYPES),
    }

    input: TensorField = Field(
        description="Tensor with one part for each rank, one after the other.",
        examples=["x"],
    )
    output: TensorField = Field(
        description="Tensor for this rank's reduced part.",
        examples=["all_x"],
    )

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        n, one = call.group.size, call.outputs[0].numel
        found = wrong_element_count(
            "input", call.inputs[0].numel, n * one, f"{n} ranks receive {one} each, in total"
        )
        return first_reason((found, unsupported_reduction(call)))

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        torch_function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        out, into = tensors[call.outputs[0]], tensors[call.inputs[0]]
        return torch_function(
            out, into, op=torch_reduce_op(dist, call), group=group, async_op=call.is_async
        )


def _common_size_or_all(sizes: tuple[int, ...]) -> Hashable:
    """The size of a part where all are equal, else all of them."""
    return sizes[0] if len(set(sizes)) == 1 else sizes
