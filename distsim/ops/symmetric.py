"""Collectives in which all ranks play the same part: all_reduce, and the gathering and reduce-scattering ones."""

from collections.abc import Hashable, Sequence
from types import ModuleType

from distsim.ops import colours
from distsim.ops.base import Binding, Effect, Source, Words
from distsim.ops.bindings import COMPLEX, GLOO_SHAPES
from distsim.ops.collective import Collective, InPlace, Reducing, everyone, op_of, torch_list
from distsim.ops.fields import TensorField, TensorList
from distsim.ops.records import Buffer, Call, first, misfit, not_a_list_of, part_sizes, unreducible
from distsim.ops.torch_types import Memory, Work
from distsim.schedules import algorithms_of

_ALL_WAIT = "Everybody waits for everybody: nobody can return before the last rank has come."


class AllReduce(Reducing, InPlace):
    op = "all_reduce"
    torch_name = "all_reduce"
    nccl_tests = "all_reduce_perf"
    first_field = "tensor"
    colour = colours.REDUCE
    words = Words(
        signature="all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False)",
        before="Every rank has a tensor of the same element count and dtype.",
        after="Every rank has the reduction of all tensors, element by element.",
        waits=_ALL_WAIT,
        example="- all_reduce: {tensor: x, op: sum}",
        notes=("avg on integers: gloo refuses it, nccl divides after the sum.",),
        torch="dist.all_reduce(x, op=dist.ReduceOp.SUM)",
    )
    algorithms = algorithms_of("all_reduce")
    bindings = {"gloo": Binding(), "nccl": Binding(), "mpi": Binding()}

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        return unreducible(call)

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """2(n - 1)/n: nccl-tests doc/PERFORMANCE.md, AllReduce."""
        return 2 * (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return ((everyone(n),),) * n

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        return dist.all_reduce(tensors[call.inputs[0]], op=op_of(dist, call), group=group, async_op=call.is_async)


class _Gathering(Collective):
    """Every rank's input, side by side, on every rank."""

    output_parts = "n"
    nccl_tests = "all_gather_perf"
    algorithms = algorithms_of("all_gather")

    @classmethod
    def nbytes(cls, call: Call) -> int:
        """The output: what all ranks give together."""
        return call.output_nbytes or call.input_nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests doc/PERFORMANCE.md, AllGather."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return (tuple((Source(k, 0),) for k in range(n)),) * n


class AllGather(_Gathering):
    op = "all_gather"
    torch_name = "all_gather"
    colour = colours.COLLECT
    words = Words(
        signature="all_gather(tensor_list, tensor, group=None, async_op=False)",
        before="Every rank has an input, and room for everybody's.",
        after="On every rank, part i of the output is the input of group rank i.",
        waits=_ALL_WAIT,
        example="- all_gather: {input: x, output: all_x}",
        notes=("The output is a list in torch: one tensor with a leading axis of the group's size, or a list of names.",
               "Parts of different sizes: nccl takes them, gloo does not."),
        torch="dist.all_gather(list(all_x), x)  # all_x: world_size times the shape of x",
    )  # fmt: skip
    bindings = {"gloo": Binding(), "nccl": Binding(), "mpi": Binding()}

    input: TensorField
    output: TensorList

    @classmethod
    def numel(cls, call: Call) -> Hashable:
        return _one_or_all(part_sizes(call.outputs, call.group.size))

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        n, one = call.group.size, call.inputs[0].numel
        if reason := not_a_list_of(call.outputs, n, "output"):
            return reason
        own = part_sizes(call.outputs, n)[call.group_rank]
        return misfit(f"part {call.group_rank} of the output", own, one, f"rank {call.rank} gives")

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        room = torch_list(tensors, call.outputs, call.group.size)
        return dist.all_gather(room, tensors[call.inputs[0]], group=group, async_op=call.is_async)


class AllGatherIntoTensor(_Gathering):
    op = "all_gather_into_tensor"
    aliases = ("all_gather_single",)
    torch_name = "all_gather_into_tensor"
    flat = True
    colour = colours.COLLECT
    words = Words(
        signature="all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False)",
        before="Every rank has an input of the same element count and dtype, and an output n times as large.",
        after="On every rank the output is the inputs of all ranks, one after the other in the group's order.",
        waits=_ALL_WAIT,
        example="- all_gather_into_tensor: {input: x, output: all_x}",
        notes=("torch 2.13 calls it all_gather_single; the name all_gather_into_tensor still works there.",),
        torch="dist.all_gather_into_tensor(all_x, x)",
    )
    bindings = {
        "gloo": Binding(slot="all_gather", shape_text=GLOO_SHAPES["all_gather"]),
        "nccl": Binding(),
        "mpi": Binding(),
    }

    input: TensorField
    output: TensorField

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        n, one = call.group.size, call.inputs[0].numel
        return misfit("output", call.outputs[0].numel, n * one, f"{n} ranks give {one} each, together")

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        torch_function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return torch_function(tensors[call.outputs[0]], tensors[call.inputs[0]], group=group, async_op=call.is_async)


class _ReduceScattering(Reducing):
    """Part i of all inputs, reduced, on group rank i."""

    input_parts = "n"
    nccl_tests = "reduce_scatter_perf"
    algorithms = algorithms_of("reduce_scatter")

    @classmethod
    def share(cls, call: Call) -> Buffer | None:
        return call.outputs[0]

    @classmethod
    def numel(cls, call: Call) -> Hashable:
        return call.outputs[0].numel

    @classmethod
    def nbytes(cls, call: Call) -> int:
        """The input: the parts for all ranks together."""
        return call.input_nbytes or call.output_nbytes * call.group.size

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests doc/PERFORMANCE.md, ReduceScatter."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return tuple((everyone(n, part=r),) for r in range(n))


class ReduceScatter(_ReduceScattering):
    op = "reduce_scatter"
    torch_name = "reduce_scatter"
    colour = colours.REDUCE
    words = Words(
        signature="reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False)",
        before="Every rank has one part for every rank.",
        after="The output of group rank i is the reduction of part i of all inputs.",
        waits=_ALL_WAIT,
        example="- reduce_scatter: {input: parts, output: x, op: sum}",
        notes=("The input is a list in torch: one tensor with a leading axis of the group's size, or a list of names.",
               "On gloo it is an all_reduce of each part and can meet a real all_reduce by mistake."),
        torch="dist.reduce_scatter(x, list(parts), op=dist.ReduceOp.SUM)",
    )  # fmt: skip
    #: Run: it meets an all_reduce of one part; reduce_scatter_tensor is one of the whole input, and ends right beside an all_reduce of it.
    bindings = {"gloo": Binding(slot="all_reduce", part_by_part=True), "nccl": Binding(), "mpi": Binding(gaps=COMPLEX)}

    input: TensorList
    output: TensorField

    @classmethod
    def numel(cls, call: Call) -> Hashable:
        return _one_or_all(part_sizes(call.inputs, call.group.size))

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        n = call.group.size
        if reason := not_a_list_of(call.inputs, n, "input") or unreducible(call):
            return reason
        own = part_sizes(call.inputs, n)[call.group_rank]
        return misfit("output", call.outputs[0].numel, own, f"part {call.group_rank} of the input has")

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        parts = torch_list(tensors, call.inputs, call.group.size)
        return dist.reduce_scatter(tensors[call.outputs[0]], parts, op=op_of(dist, call), group=group, async_op=call.is_async)


class ReduceScatterTensor(_ReduceScattering):
    op = "reduce_scatter_tensor"
    aliases = ("reduce_scatter_single",)
    torch_name = "reduce_scatter_tensor"
    flat = True
    colour = colours.REDUCE
    words = Words(
        signature="reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False)",
        before="Every rank has an input that is n outputs long, of the same element count and dtype everywhere.",
        after="The output of group rank i is the i-th n-th of the reduction of all inputs.",
        waits=_ALL_WAIT,
        example="- reduce_scatter_tensor: {input: all_x, output: x, op: sum}",
        notes=("torch 2.13 calls it reduce_scatter_single; the name reduce_scatter_tensor still works there.",),
        torch="dist.reduce_scatter_tensor(x, all_x, op=dist.ReduceOp.SUM)",
    )
    bindings = {
        "gloo": Binding(slot="all_reduce", shape_text=GLOO_SHAPES["reduce_scatter"]),
        "nccl": Binding(),
        "mpi": Binding(gaps=COMPLEX),
    }

    input: TensorField
    output: TensorField

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        n, one = call.group.size, call.outputs[0].numel
        found = misfit("input", call.inputs[0].numel, n * one, f"{n} ranks take {one} each, together")
        return first((found, unreducible(call)))

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        torch_function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        out, into = tensors[call.outputs[0]], tensors[call.inputs[0]]
        return torch_function(out, into, op=op_of(dist, call), group=group, async_op=call.is_async)


def _one_or_all(sizes: tuple[int, ...]) -> Hashable:
    """The size of a part where all are equal, else all of them."""
    return sizes[0] if len(set(sizes)) == 1 else sizes
