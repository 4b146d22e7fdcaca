"""Collectives with a root: broadcast, reduce, gather, scatter."""

from collections.abc import Hashable, Sequence
from types import ModuleType

from pydantic import Field

from distsim.operations.core import colours
from distsim.operations.core.algorithms import algorithms_of, binomial_path_and_children
from distsim.operations.core.backend_bindings import (
    NCCL_DTYPE_ERROR,
    gather_route,
    needs_only_root,
    reduce_route,
    scatter_route,
    tree_route,
)
from distsim.operations.core.collective import (
    FromRootCollective,
    InPlaceCollective,
    ReducingCollective,
    ToRootCollective,
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


class BroadcastOperation(FromRootCollective, InPlaceCollective):
    """The data of one rank, copied to all."""

    op = "broadcast"
    torch_name = "broadcast"
    nccl_tests = "broadcast_perf"
    colour = colours.SPREAD
    words = OperationHelp(
        signature="broadcast(tensor, src=None, group=None, async_op=False, group_src=None)",
        before=(
            "The rank src has the data. The tensor of every other rank has the same element count "
            "and dtype."
        ),
        after="Every rank of the group has the data of src.",
        waits=(
            "A backend may make every rank wait for every other rank. No rank returns before src "
            "has arrived."
        ),
        example="- broadcast: {tensor: x, src: 0}",
        notes=(
            (
                "gloo sends along a binomial tree: a rank returns when the ranks above it and its "
                "own children have arrived."
            ),
        ),
        torch="dist.broadcast(x, src=0)",
    )
    algorithms = algorithms_of("broadcast")
    bindings = {
        "gloo": BackendBinding(needs=binomial_path_and_children, route=tree_route),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(),
    }

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """1: nccl-tests doc/PERFORMANCE.md, broadcast."""
        return 1.0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return (((InputPart(root, 0),),),) * n

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
        return dist.broadcast(
            tensors[call.outputs[0]], src=call.root, group=group, async_op=call.is_async
        )


class ReduceOperation(ToRootCollective, ReducingCollective, InPlaceCollective):
    """The reduction of all tensors, on one rank."""

    op = "reduce"
    torch_name = "reduce"
    nccl_tests = "reduce_perf"
    colour = colours.REDUCE
    words = OperationHelp(
        signature=(
            "reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None)"
        ),
        before="Every rank has a tensor of the same element count and dtype.",
        after=(
            "The rank dst has the element-wise reduction of all tensors; the other tensors are "
            "undefined."
        ),
        waits=(
            "A backend may make every rank wait for every other rank. dst returns after all "
            "ranks have arrived."
        ),
        example="- reduce: {tensor: x, dst: 0, op: sum}",
        notes=(
            (
                "gloo overwrites the tensors of the other ranks with partial results; do not read "
                "them afterwards."
            ),
        ),
        torch="dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)",
    )
    algorithms = algorithms_of("reduce")
    bindings = {
        "gloo": BackendBinding(route=reduce_route),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(gaps=COMPLEX_DTYPES),
    }

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        return unsupported_reduction(call)

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """1: nccl-tests doc/PERFORMANCE.md, reduce."""
        return 1.0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return tuple((part_of_every_rank(n),) if r == root else None for r in range(n))

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
        tensor = tensors[call.inputs[0]]
        return dist.reduce(
            tensor,
            dst=call.root,
            op=torch_reduce_op(dist, call),
            group=group,
            async_op=call.is_async,
        )


def _root_list_mismatch(
    call: ResolvedCall,
    parts: Sequence[TensorBuffer],
    ones: Sequence[TensorBuffer],
    names: tuple[str, str, str],
) -> str | None:
    """What is wrong with the root's list, a part for each rank as large as what every rank has on
    the other side. ``names``: of the root in torch, of the list, of the other side."""
    if call.rank != call.root:
        return None
    root, list_name, one_name = names
    if not parts:
        return f"rank {call.rank} is {root}, so it needs an {list_name}"
    n, one = call.group.size, ones[0].numel
    fits = (
        wrong_element_count(f"part {k} of the {list_name}", size, one, f"an {one_name} has")
        for k, size in enumerate(part_sizes(parts, n))
    )
    return first_reason((wrong_part_count(parts, n, list_name), *fits))


class GatherOperation(ToRootCollective):
    """The inputs of all ranks, on one rank."""

    op = "gather"
    torch_name = "gather"
    nccl_tests = "gather_perf"
    output_parts = "n"
    root_optional = True
    colour = colours.COLLECT
    words = OperationHelp(
        signature=(
            "gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None)"
        ),
        before=(
            "Every rank has an input of the same element count and dtype; dst has space for all "
            "inputs."
        ),
        after=(
            "On dst, part i of the output is the input of group rank i. The other ranks get "
            "nothing."
        ),
        waits=(
            "A backend may make every rank wait for every other rank. dst returns after all "
            "ranks have arrived."
        ),
        example="- gather: {input: x, output: all_x, dst: 0}",
        notes=(
            "Only dst uses the output.",
            "The default of dst is global rank 0.",
            "On gloo, the other ranks wait only for dst.",
        ),
        torch="dist.gather(x, list(all_x) if rank == 0 else None, dst=0)",
    )
    algorithms = algorithms_of("gather")
    bindings = {
        "gloo": BackendBinding(needs=needs_only_root, route=gather_route, gaps=COMPLEX_DTYPES),
        "nccl": BackendBinding(dtype_text=NCCL_DTYPE_ERROR),
        "mpi": BackendBinding(gaps=COMPLEX_DTYPES),
    }

    input: TensorField = Field(
        description="Tensor that this rank contributes.",
        examples=["x"],
    )
    output: TensorListField = Field(
        default=None,
        description="Space on `dst` for the inputs of all ranks; the other ranks do not need it.",
        examples=["all_x"],
    )

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        return _root_list_mismatch(call, call.outputs, call.inputs, ("dst", "output", "input"))

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        return call.inputs[0].nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests src/gather.cu."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return tuple(
            tuple((InputPart(k, 0),) for k in range(n)) if r == root else None for r in range(n)
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
        room = (
            torch_tensor_list(tensors, call.outputs, call.group.size)
            if call.rank == call.root
            else None
        )
        return dist.gather(
            tensors[call.inputs[0]], room, dst=call.root, group=group, async_op=call.is_async
        )


class ScatterOperation(FromRootCollective):
    """The parts of one rank, one for each rank."""

    op = "scatter"
    torch_name = "scatter"
    nccl_tests = "scatter_perf"
    input_parts = "n"
    root_optional = True
    colour = colours.SPREAD
    words = OperationHelp(
        signature=(
            "scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, "
            "group_src=None)"
        ),
        before="The rank src has one part for each rank; every rank has space for its own part.",
        after="The output of group rank i is part i of src's input.",
        waits=(
            "A backend may make every rank wait for every other rank. No rank returns before src "
            "has arrived."
        ),
        example="- scatter: {input: parts, output: x, src: 0}",
        notes=(
            "Only src uses the input.",
            "The default of src is global rank 0.",
            "On gloo, src waits for all other ranks, and they wait for src.",
        ),
        torch="dist.scatter(x, list(parts) if rank == 0 else None, src=0)",
    )
    algorithms = algorithms_of("scatter")
    bindings = {
        "gloo": BackendBinding(needs=needs_only_root, route=scatter_route),
        "nccl": BackendBinding(dtype_text=NCCL_DTYPE_ERROR),
        "mpi": BackendBinding(),
    }

    output: TensorField = Field(
        description="Tensor for this rank's part.",
        examples=["all_x"],
    )
    input: TensorListField = Field(
        default=None,
        description="One part for each rank, on `src`; the other ranks do not need it.",
        examples=["parts"],
    )

    @classmethod
    def share(cls, call: ResolvedCall) -> TensorBuffer | None:
        """The buffer whose size all members must agree on."""
        return call.outputs[0]

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        """The element count on which all members must agree."""
        return call.outputs[0].numel

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        return _root_list_mismatch(call, call.inputs, call.outputs, ("src", "input", "output"))

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        return call.outputs[0].nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests src/scatter.cu."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return tuple(((InputPart(root, r),),) for r in range(n))

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
        parts = (
            torch_tensor_list(tensors, call.inputs, call.group.size)
            if call.rank == call.root
            else None
        )
        return dist.scatter(
            tensors[call.outputs[0]], parts, src=call.root, group=group, async_op=call.is_async
        )
