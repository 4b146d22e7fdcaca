"""Several collectives of one kind on one group, handed over together: one launch, one request.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (`_coalescing_manager`): all_reduce, all_gather_single and
reduce_scatter_single are collected inside the context and become one call of the back end at its end
(`allreduce_coalesced`, `all_gather_single_coalesced`, `reduce_scatter_single_coalesced`). ProcessGroupNCCL makes it one ncclGroup;
ProcessGroupGloo (run) lays the parts of all_reduce and all_gather end to end in one operation, and reduces those of
reduce_scatter one after the other.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import ClassVar

from pydantic import model_validator

from distsim.ops import colours
from distsim.ops.base import Binding, Effect, Op, Words
from distsim.ops.bindings import GLOO_SHAPES
from distsim.ops.collective import Collective, Reducing
from distsim.ops.fields import TensorList
from distsim.ops.records import Buffer, Call, first, mixed_parts, shared_part, stranger
from distsim.ops.symmetric import AllGatherIntoTensor, AllReduce, ReduceScatterTensor
from distsim.ops.torch_types import Memory, Work

_WAITS = "Everybody waits for everybody, and for all parts: the launch is done when the last part is."
_ONE_LAUNCH = "One launch: the latency is paid once, for the bytes of all parts together."
_LEFT_OPEN = "An error inside the context leaves the group collecting: what is called on it later is never issued."


class _Coalesced(Collective):
    """A launch of several collectives. The parts of every rank meet in the order of its list."""

    #: The operation that each part is.
    coalesces: ClassVar[type[Op]]
    torch_name = "_coalescing_manager"

    @classmethod
    def separate(cls, call: Call) -> tuple[Call, ...]:
        one = replace(call, op=cls.coalesces.op, is_async=False)
        pairs = zip(call.inputs, call.outputs, strict=False)
        return tuple(replace(one, inputs=(given,), outputs=(got,)) for given, got in pairs)

    @classmethod
    def numel(cls, call: Call) -> Hashable:
        """The element counts of the parts, in order."""
        return tuple(shared.numel for part in cls.separate(call) if (shared := _shared(cls.coalesces, part)) is not None)

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        """The list itself: how many parts, and the element count of each."""
        agreed: dict[str, Hashable] = {"op": cls.op, "numel": cls.numel(call)}
        if call.inputs:
            agreed["dtype"] = call.inputs[0].dtype
        return agreed | ({"reduce_op": call.reduce_op} if cls.reduces else {})

    @classmethod
    def faults(cls, call: Call) -> str | None:
        return first((stranger(call), mixed_parts((*call.inputs, *call.outputs)), cls.misfits(call)))

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        if not call.inputs or len(call.inputs) != len(call.outputs):
            return f"a launch needs a tensor, and an output for each input; it has {len(call.inputs)} and {len(call.outputs)}"
        parts = cls.separate(call)
        found = ((k, cls.coalesces.faults(part)) for k, part in enumerate(parts, 1))
        return first((shared_part(call.inputs, call.outputs), *(f"part {k}: {fault}" for k, fault in found if fault)))

    @classmethod
    def cross_faults(cls, calls: Sequence[Call]) -> list[tuple[int, int, str]]:
        """The first member against each other: which part of the list differs."""
        pairs = [(calls[0], other, _difference(cls, calls[0], other)) for other in calls[1:]]
        return [(a.rank, b.rank, why) for a, b, why in pairs if why]

    @classmethod
    def nbytes(cls, call: Call) -> int:
        """All parts together."""
        return sum(cls.coalesces.nbytes(part) for part in cls.separate(call))

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """As each of its parts."""
        return cls.coalesces.busbw_factor(n)

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        """Of each part."""
        return cls.coalesces.effect(n, root)

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        """The context returns no request of its own: its one `Work` is in the manager's list."""
        with dist._coalescing_manager(group=group, async_ops=call.is_async) as manager:
            for part in cls.separate(call):
                cls.coalesces.torch_call(dist, part, tensors, group)
        return manager.works[0] if call.is_async else None


class AllReduceCoalesced(Reducing, _Coalesced):
    op = "all_reduce_coalesced"
    coalesces = AllReduce
    nccl_tests = AllReduce.nccl_tests
    algorithms = AllReduce.algorithms
    #: gloo lays the parts end to end in one operation in the host's memory; of several dtypes it refuses them here.
    bindings = {
        "gloo": Binding(gpu=False, slot="all_reduce", one_dtype=True),
        "nccl": Binding(one_dtype=True),
        "mpi": Binding(refused="allreduce_coalesced is currently not supported with MPI"),
    }
    first_field = "tensor"
    colour = colours.REDUCE
    words = Words(
        signature="with _coalescing_manager(group=None, async_ops=False): all_reduce(tensor, op=ReduceOp.SUM, group=None), …",
        before="Every rank has a list of tensors of one dtype; the k-th of all ranks have the same element count.",
        after="Every tensor of the list holds the reduction of its namesakes in place, as after an all_reduce of its own.",
        waits=_WAITS,
        example="- all_reduce_coalesced: {tensor: [weight_grad, bias_grad], op: avg}",
        notes=(_ONE_LAUNCH,
               "The reduce op of the first part is taken for all of them.",
               "gloo lays the parts end to end in one all_reduce and compares no lists: another order mixes up the numbers.",
               "`all_reduce_coalesced` is the same call by a name that torch has deprecated.", _LEFT_OPEN),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.all_reduce(weight_grad, op=dist.ReduceOp.AVG)\n"
            "    dist.all_reduce(bias_grad, op=dist.ReduceOp.AVG)"
        ),
    )  # fmt: skip

    tensor: TensorList

    @model_validator(mode="after")
    def _some_tensors(self) -> "AllReduceCoalesced":
        if not _listed(self.tensor):
            raise ValueError("expected at least one tensor in the list")
        return self


class _InAndOut(_Coalesced):
    """Part k takes the k-th input to the k-th output."""

    input: TensorList
    output: TensorList

    @model_validator(mode="after")
    def _as_many_outputs(self) -> "_InAndOut":
        given, got = len(_listed(self.input)), len(_listed(self.output))
        if given != got or not given:
            raise ValueError(f"expected an output for each input, found {given} and {got}")
        return self


class AllGatherIntoTensorCoalesced(_InAndOut):
    op = "all_gather_into_tensor_coalesced"
    coalesces = AllGatherIntoTensor
    aliases = ("all_gather_single_coalesced",)
    nccl_tests = AllGatherIntoTensor.nccl_tests
    algorithms = AllGatherIntoTensor.algorithms
    #: Of several dtypes gloo mixes up the bytes.
    bindings = {
        "gloo": Binding(gpu=False, slot="all_gather", shape_text=GLOO_SHAPES["all_gather_coalesced"]),
        "nccl": Binding(),
        "mpi": Binding(refused="Backend mpi does not support allgather_into_tensor_coalesced"),
    }
    output_parts = AllGatherIntoTensor.output_parts
    colour = colours.COLLECT
    words = Words(
        signature="with _coalescing_manager(group=None, async_ops=False): all_gather_single(output_tensor, input_tensor), …",
        before="Every rank has a list of inputs of one dtype, and for each an output n times as large.",
        after="On every rank output k is the k-th inputs of all ranks, one after the other in the group's order.",
        waits=_WAITS,
        example="- all_gather_into_tensor_coalesced: {input: [w, b], output: [all_w, all_b]}",
        notes=(_ONE_LAUNCH,
               "Parts of several dtypes: nccl takes them, gloo mixes up their bytes without a word.",
               "gloo asks that an output has the input's shape with the first axis n times as long.", _LEFT_OPEN),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.all_gather_into_tensor(all_w, w)\n"
            "    dist.all_gather_into_tensor(all_b, b)"
        ),
    )  # fmt: skip


class ReduceScatterTensorCoalesced(Reducing, _InAndOut):
    op = "reduce_scatter_tensor_coalesced"
    coalesces = ReduceScatterTensor
    aliases = ("reduce_scatter_single_coalesced",)
    nccl_tests = ReduceScatterTensor.nccl_tests
    algorithms = ReduceScatterTensor.algorithms
    bindings = {
        "gloo": Binding(slot="all_reduce", shape_text=GLOO_SHAPES["reduce_scatter"], part_by_part=True),
        "nccl": Binding(),
        "mpi": Binding(refused="Backend mpi does not support reduce_scatter_tensor_coalesced"),
    }
    input_parts = ReduceScatterTensor.input_parts
    colour = colours.REDUCE
    words = Words(
        signature="with _coalescing_manager(group=None, async_ops=False): reduce_scatter_single(output, input, op=ReduceOp.SUM), …",
        before="Every rank has a list of inputs of one dtype, each n outputs long; the lists are alike on all ranks.",
        after="Output k of group rank i is the i-th n-th of the reduction of the k-th inputs.",
        waits=_WAITS,
        example="- reduce_scatter_tensor_coalesced: {input: [all_w, all_b], output: [w, b]}",
        notes=(_ONE_LAUNCH,
               "The reduce op of the first part is taken for all of them.",
               "On gloo it is an all_reduce for each part, one after the other.", _LEFT_OPEN),
        torch=(
            "with dist._coalescing_manager():\n"
            "    dist.reduce_scatter_tensor(w, all_w)\n"
            "    dist.reduce_scatter_tensor(b, all_b)"
        ),
    )  # fmt: skip


def _shared(row: type[Op], part: Call) -> Buffer | None:
    return row.share(part) if issubclass(row, Collective) else None


def _listed(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _difference(row: type[_Coalesced], one: Call, other: Call) -> str:
    """In which part two lists differ, in a clause; empty where they do not."""
    here, there = _parts(row, one), _parts(row, other)
    sizes = [[numel for _, numel in parts] for parts in (here, there)]
    if sizes[0] == sizes[1]:
        return ""
    if sorted(here) == sorted(there):
        order = ", ".join(label for label, _ in there)
        return f"rank {other.rank} has the parts of rank {one.rank} in another order: {order}"
    if len(here) != len(there):
        (short, few), (long, many) = sorted(((one, here), (other, there)), key=lambda side: len(side[1]))
        extra = [label for label, numel in many if (label, numel) not in few]
        which = f": {', '.join(extra)} {'is' if len(extra) == 1 else 'are'} missing" if len(extra) == len(many) - len(few) else ""
        return f"rank {long.rank} coalesces {len(many)} parts, rank {short.rank} {len(few)}{which}"
    k = next(k for k, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b)
    (a, m), (b, n) = here[k], there[k]
    return f"part {k + 1} is {a} of {m} elements on rank {one.rank}, {b} of {n} on rank {other.rank}"


def _parts(row: type[_Coalesced], call: Call) -> list[tuple[str, int]]:
    """(label, element count) of each part."""
    shared = [_shared(row.coalesces, part) for part in row.separate(call)]
    return [(s.label or "a tensor", s.numel) for s in shared if s is not None]
