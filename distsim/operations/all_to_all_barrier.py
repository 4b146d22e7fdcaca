"""Everybody to everybody (all_to_all, all_to_all_single), and the collectives that move no data:
the barriers.
"""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import ClassVar

from pydantic import Field, StrictBool

from distsim.operations.core import colours
from distsim.operations.core.algorithms import algorithms_of
from distsim.operations.core.backend_bindings import MONITORED_BARRIER_ERROR, NCCL_DTYPE_ERROR
from distsim.operations.core.collective import CollectiveOperation, torch_tensor_list
from distsim.operations.core.field_types import (
    ExpressionListField,
    GroupField,
    TensorField,
    TensorListField,
    TimeoutField,
)
from distsim.operations.core.operation_base import (
    BackendBinding,
    InputPart,
    Operation,
    OperationHelp,
    OutputEffect,
    RankScope,
)
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    TensorBuffer,
    caller_not_in_group,
    first_reason,
    part_sizes,
    wrong_element_count,
    wrong_part_count,
)
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork

_FULL_SYNCHRONIZATION = (
    "Every rank waits for every other rank: no rank returns before the last one has arrived."
)


class AllToAllCollective(CollectiveOperation):
    """Part j of rank i's input becomes part i of rank j's output."""

    pairwise = True
    input_parts = "n"
    output_parts = "n"
    nccl_tests = "alltoall_perf"
    algorithms = algorithms_of("all_to_all")

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """Even parts: one element count for all. Uneven ones have none in common; `cross_faults`
        compares them pair by pair.
        """
        agreed: dict[str, Hashable] = {"op": cls.op, "dtype": call.inputs[0].dtype}
        sizes = {*cls.sent(call), *cls.received(call)}
        return agreed | (
            {"numel": call.inputs[0].numel * len(call.inputs)}
            if len(sizes) == 1
            else {"splits": "uneven"}
        )

    @classmethod
    def sent(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Elements for each group rank."""
        return part_sizes(call.inputs, call.group.size, call.input_splits)

    @classmethod
    def received(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Elements expected from each group rank."""
        return part_sizes(call.outputs, call.group.size, call.output_splits)

    @classmethod
    def mismatched_pairs(cls, calls: Sequence[ResolvedCall]) -> list[tuple[int, int, str]]:
        """Pairs of members that expect different sizes (`Operation.mismatched_pairs`)."""
        sent_by_call = [cls.sent(call) for call in calls]
        received_by_call = [cls.received(call) for call in calls]
        found = []
        for sender, sent in zip(calls, sent_by_call, strict=True):
            for receiver, expected in zip(calls, received_by_call, strict=True):
                n_sent = sent[receiver.group_rank]
                n_expected = expected[sender.group_rank]
                if n_sent != n_expected:
                    text = (
                        f"rank {sender.rank} sends {n_sent} elements to rank {receiver.rank}, "
                        f"which expects {n_expected}"
                    )
                    found.append((sender.rank, receiver.rank, text))
        return found

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of this call do not fit each other, or None."""
        me = call.group_rank
        for word, buffers, splits in cls._sides(call):
            if reason := cls.bad_cut(word, buffers, splits, call.group.size):
                return reason
        reason = wrong_element_count(
            f"part {me} of the output",
            cls.received(call)[me],
            cls.sent(call)[me],
            f"part {me} of the input has",
        )
        if reason is None or call.input_splits is None:
            return reason
        return (
            f"{reason}\n"
            f"set input_splits[{me}] and output_splits[{me}] of rank {call.rank} to the same "
            "number: this part stays on the rank"
        )

    @classmethod
    def _sides(
        cls, call: ResolvedCall
    ) -> tuple[tuple[str, tuple[TensorBuffer, ...], tuple[int, ...] | None], ...]:
        return (
            ("input", call.inputs, call.input_splits),
            ("output", call.outputs, call.output_splits),
        )

    @classmethod
    def bad_cut(
        cls, word: str, buffers: tuple[TensorBuffer, ...], splits: tuple[int, ...] | None, n: int
    ) -> str | None:
        """Why one side cannot be cut into n parts."""
        return (
            splits_error(word, buffers[0].shape, splits, n)
            if splits is not None
            else wrong_part_count(buffers, n, word)
        )

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """The whole send buffer, as nccl-tests counts it."""
        return call.input_nbytes

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests src/alltoall.cu."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return tuple(tuple((InputPart(k, r),) for k in range(n)) for r in range(n))


class AllToAllOperation(AllToAllCollective):
    """A list of parts, one for each rank, against a list of parts, one from each rank."""

    op = "all_to_all"
    torch_name = "all_to_all"
    colour = colours.EXCHANGE
    words = OperationHelp(
        signature="all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False)",
        before="Every rank has one part for each rank, and space for one part from each rank.",
        after=(
            "Part i of the output of group rank j is part j of the input of group rank i (a "
            "transpose)."
        ),
        waits=_FULL_SYNCHRONIZATION,
        example="- all_to_all: {input: parts, output: got}",
        notes=(
            (
                "Parts may differ in size if sender and receiver agree on each size. gloo does "
                "not support this for lists."
            ),
        ),
        torch="dist.all_to_all(list(got), list(parts))",
    )
    bindings = {
        "gloo": BackendBinding(),
        "nccl": BackendBinding(dtype_text=NCCL_DTYPE_ERROR),
        "mpi": BackendBinding(),
    }

    input: TensorListField = Field(
        description=(
            "One part for each rank: a tensor whose first dimension has the size of the group, or "
            "a list of names."
        ),
        examples=["parts"],
    )
    output: TensorListField = Field(
        description=(
            "Space for one part from each rank: a tensor whose first dimension has the size of the "
            "group, or a list of names."
        ),
        examples=["got"],
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
        n = call.group.size
        room = torch_tensor_list(tensors, call.outputs, n, call.output_splits)
        parts = torch_tensor_list(tensors, call.inputs, n, call.input_splits)
        return dist.all_to_all(room, parts, group=group, async_op=call.is_async)


class AllToAllSingleOperation(AllToAllCollective):
    """Like all_to_all, with all parts in one tensor along its first dimension."""

    op = "all_to_all_single"
    torch_name = "all_to_all_single"
    flat = True
    colour = colours.EXCHANGE
    words = OperationHelp(
        signature=(
            "all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, "
            "group=None, async_op=False)"
        ),
        before=(
            "Every rank has an input that is split along its first dimension into one part for "
            "each rank, equally or by input_splits."
        ),
        after="The output of group rank j contains part j of every input, in group order.",
        waits=_FULL_SYNCHRONIZATION,
        example="- all_to_all_single: {input: all_x, output: got}",
        notes=(
            (
                "Rank j expects as many rows from rank i as rank i sends to it: output_splits[i] "
                "of rank j must equal input_splits[j] of rank i. If you omit output_splits, "
                "distsim uses these numbers."
            ),
            (
                "If the first dimension is not divisible by the size of the group, gloo computes "
                "wrong data, and nccl may use the wrong rows."
            ),
        ),
        torch="dist.all_to_all_single(got, all_x)",
    )
    bindings = {
        "gloo": BackendBinding(slot="all_to_all"),
        "nccl": BackendBinding(dtype_text=NCCL_DTYPE_ERROR),
        "mpi": BackendBinding(),
    }

    input: TensorField = Field(
        description="Tensor to split among the ranks.",
        examples=["x"],
    )
    output: TensorField = Field(
        description="Tensor for the parts from all ranks.",
        examples=["all_x"],
    )
    input_splits: ExpressionListField = Field(
        default=None,
        description=(
            "Rows of the input for each rank of the group, in group order [default: equal parts]."
        ),
        examples=[[1, 3]],
    )
    output_splits: ExpressionListField = Field(
        default=None,
        description=(
            "Rows of the output from each rank of the group [default: derived from the "
            "`input_splits` of the other ranks]."
        ),
        examples=[[1, 3]],
    )

    @classmethod
    def bad_cut(
        cls, word: str, buffers: tuple[TensorBuffer, ...], splits: tuple[int, ...] | None, n: int
    ) -> str | None:
        """Why an input cannot be split, or None."""
        return splits_error(word, buffers[0].shape, splits, n)

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
        out_splits, in_splits = (
            None if s is None else list(s) for s in (call.output_splits, call.input_splits)
        )
        out, into = tensors[call.outputs[0]], tensors[call.inputs[0]]
        return dist.all_to_all_single(
            out, into, out_splits, in_splits, group=group, async_op=call.is_async
        )


def splits_error(
    word: str, shape: tuple[int, ...], splits: tuple[int, ...] | None, n: int
) -> str | None:
    """Why a tensor cannot be cut along its first dimension: by ``splits``, or evenly where there
    are none.
    """
    rows = shape[0] if shape else 1
    if splits is None:
        return (
            None
            if rows % n == 0
            else f"the first dimension of {word}, {rows}, is not divisible by {n} ranks"
        )
    if len(splits) != n:
        return f"{word}_splits has {len(splits)} numbers, but the group has {n} ranks"
    if min(splits) < 0:
        return f"{word}_splits contains {min(splits)}; a part cannot be negative"
    if sum(splits) != rows:
        return (
            f"{word}_splits {list(splits)} add up to {sum(splits)}, but the first dimension of "
            f"{word} is {rows}"
        )
    return None


class BarrierOperation(CollectiveOperation):
    """A collective without data: no rank returns before all have arrived."""

    op = "barrier"
    torch_name = "barrier"
    first_field = "group"
    gives: ClassVar[RankScope] = "none"
    gets: ClassVar[RankScope] = "none"
    colour = colours.WAIT
    words = OperationHelp(
        signature="barrier(group=None, async_op=False, device_ids=None, timeout=None)",
        before="Ranks arrive at different times.",
        after="Every rank of the group has arrived. No data moves.",
        waits=_FULL_SYNCHRONIZATION,
        example="- barrier",
        notes=("nccl runs an all_reduce of one number; then the host waits for the device.",),
        torch="dist.barrier()",
    )
    algorithms = algorithms_of("barrier")
    bindings = {
        "gloo": BackendBinding(gpu=False),
        "nccl": BackendBinding(),
        "mpi": BackendBinding(),
    }

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return (None,) * n

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
        return dist.barrier(group=group, async_op=call.is_async)


class MonitoredBarrierOperation(Operation):
    """A barrier (gloo only) in which group rank 0 reports missing ranks."""

    op = "monitored_barrier"
    kind = "collective"
    torch_name = "monitored_barrier"
    first_field = "group"
    colour = colours.WAIT
    words = OperationHelp(
        signature="monitored_barrier(group=None, timeout=None, wait_all_ranks=False)",
        before="Ranks arrive at different times; group rank 0 collects their arrivals.",
        after=(
            "Every rank of the group has arrived. After the timeout, group rank 0 raises an error "
            "that names the first missing rank."
        ),
        waits="Group rank 0 waits for all other ranks; they wait for its answer.",
        example="- monitored_barrier: {timeout: 10 s}",
        notes=(
            "Only gloo supports it.",
            "With wait_all_ranks, the error names every missing rank.",
        ),
        torch="dist.monitored_barrier(timeout=timedelta(seconds=10))",
    )
    algorithms = algorithms_of("monitored_barrier")
    bindings = {
        "gloo": BackendBinding(gpu=False),
        "nccl": BackendBinding(refused=MONITORED_BARRIER_ERROR),
        "mpi": BackendBinding(refused=MONITORED_BARRIER_ERROR),
    }

    group: GroupField = Field(
        default=None,
        description=(
            "Group that makes the call: `world`, an axis of the mesh, a list of axes, or a name "
            "from `groups` or new_group [default: `world`]."
        ),
        examples=["dp"],
    )
    timeout: TimeoutField = Field(
        default=None, description="Timeout of the barrier.", examples=["30 s"]
    )
    wait_all_ranks: StrictBool = Field(
        default=False,
        description="Wait for all ranks and report every missing rank, not only the first.",
        examples=[True],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part (`Operation.parties`)."""
        return call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common (`Operation.agreement`)."""
        return {"op": cls.op}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no backend accepts this call, or None (`Operation.faults`)."""
        return first_reason((caller_not_in_group(call),))

    @classmethod
    def chunk_nbytes(cls, n: int, nbytes: int) -> int:
        """Bytes of one chunk of the schedule."""
        return 0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return (None,) * n

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
        timeout = (
            None if call.timeout_ns is None else timedelta(microseconds=call.timeout_ns // 1000)
        )
        return dist.monitored_barrier(
            group=group, timeout=timeout, wait_all_ranks=call.wait_all_ranks
        )
