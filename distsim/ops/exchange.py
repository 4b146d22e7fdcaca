"""Everybody to everybody (all_to_all, all_to_all_single), and the collectives that move no data: the barriers."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import ClassVar

from pydantic import StrictBool

from distsim.ops import colours
from distsim.ops.base import Binding, Effect, Op, Share, Source, Words
from distsim.ops.bindings import NCCL_MOVES, ONLY_GLOO
from distsim.ops.collective import Collective, torch_list
from distsim.ops.fields import ExprList, GroupField, TensorField, TensorList, TimeoutField
from distsim.ops.records import Buffer, Call, first, misfit, not_a_list_of, part_sizes, stranger
from distsim.ops.torch_types import Memory, Work
from distsim.schedules import algorithms_of

_ALL_WAIT = "Everybody waits for everybody: nobody can return before the last rank has come."


class Exchange(Collective):
    """Part j of rank i's input becomes part i of rank j's output."""

    pairwise = True
    input_parts = "n"
    output_parts = "n"
    nccl_tests = "alltoall_perf"
    algorithms = algorithms_of("all_to_all")

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        """Even parts: one element count for all. Uneven ones have none in common; `cross_faults` compares them pair by pair."""
        agreed: dict[str, Hashable] = {"op": cls.op, "dtype": call.inputs[0].dtype}
        sizes = {*cls.sent(call), *cls.received(call)}
        return agreed | ({"numel": call.inputs[0].numel * len(call.inputs)} if len(sizes) == 1 else {"splits": "uneven"})

    @classmethod
    def sent(cls, call: Call) -> tuple[int, ...]:
        """Elements for each group rank."""
        return part_sizes(call.inputs, call.group.size, call.input_splits)

    @classmethod
    def received(cls, call: Call) -> tuple[int, ...]:
        """Elements expected from each group rank."""
        return part_sizes(call.outputs, call.group.size, call.output_splits)

    @classmethod
    def cross_faults(cls, calls: Sequence[Call]) -> list[tuple[int, int, str]]:
        sent, received = [cls.sent(c) for c in calls], [cls.received(c) for c in calls]
        return [
            (a.rank, b.rank, f"rank {a.rank} sends {out[b.group_rank]} elements to rank {b.rank}, which expects {into[a.group_rank]}")
            for a, out in zip(calls, sent, strict=True) for b, into in zip(calls, received, strict=True)
            if out[b.group_rank] != into[a.group_rank]
        ]  # fmt: skip

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        me = call.group_rank
        for word, buffers, splits in cls._sides(call):
            if reason := cls.bad_cut(word, buffers, splits, call.group.size):
                return reason
        return misfit(f"part {me} of the output", cls.received(call)[me], cls.sent(call)[me], f"part {me} of the input has")

    @classmethod
    def _sides(cls, call: Call) -> tuple[tuple[str, tuple[Buffer, ...], tuple[int, ...] | None], ...]:
        return (("input", call.inputs, call.input_splits), ("output", call.outputs, call.output_splits))

    @classmethod
    def bad_cut(cls, word: str, buffers: tuple[Buffer, ...], splits: tuple[int, ...] | None, n: int) -> str | None:
        """Why one side can't be cut into n parts."""
        return bad_splits(word, buffers[0].shape, splits, n) if splits is not None else not_a_list_of(buffers, n, word)

    @classmethod
    def nbytes(cls, call: Call) -> int:
        """The whole send buffer, as nccl-tests counts it."""
        return call.input_nbytes

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """(n - 1)/n: nccl-tests src/alltoall.cu."""
        return (n - 1) / n

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return tuple(tuple((Source(k, r),) for k in range(n)) for r in range(n))


class AllToAll(Exchange):
    op = "all_to_all"
    torch_name = "all_to_all"
    colour = colours.EXCHANGE
    words = Words(
        signature="all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False)",
        before="Every rank has one part for every rank, and room for one part of every rank.",
        after="Part i of the output of group rank j is part j of the input of group rank i: the transpose.",
        waits=_ALL_WAIT,
        example="- all_to_all: {input: parts, output: got}",
        notes=("Parts may differ in size if sender and receiver agree on each; gloo refuses that in a list.",),
        torch="dist.all_to_all(list(got), list(parts))",
    )
    bindings = {"gloo": Binding(), "nccl": Binding(dtype_text=NCCL_MOVES), "mpi": Binding()}

    input: TensorList
    output: TensorList

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        n = call.group.size
        room = torch_list(tensors, call.outputs, n, call.output_splits)
        parts = torch_list(tensors, call.inputs, n, call.input_splits)
        return dist.all_to_all(room, parts, group=group, async_op=call.is_async)


class AllToAllSingle(Exchange):
    op = "all_to_all_single"
    torch_name = "all_to_all_single"
    flat = True
    colour = colours.EXCHANGE
    words = Words(
        signature="all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False)",
        before="Every rank has an input, cut along its first axis into a part for every rank: evenly, or by input_splits.",
        after="The output of group rank j is part j of all inputs, one after the other in the group's order.",
        waits=_ALL_WAIT,
        example="- all_to_all_single: {input: all_x, output: got}",
        notes=("output_splits left out is the transpose of the input_splits. What i sends to j must be what j expects from i.",
               "gloo hangs where the first axis can't be divided; nccl may take the wrong rows."),
        torch="dist.all_to_all_single(got, all_x)",
    )  # fmt: skip
    bindings = {"gloo": Binding(slot="all_to_all"), "nccl": Binding(dtype_text=NCCL_MOVES), "mpi": Binding()}

    input: TensorField
    output: TensorField
    input_splits: ExprList = None
    output_splits: ExprList = None

    @classmethod
    def bad_cut(cls, word: str, buffers: tuple[Buffer, ...], splits: tuple[int, ...] | None, n: int) -> str | None:
        return bad_splits(word, buffers[0].shape, splits, n)

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        out_splits, in_splits = (None if s is None else list(s) for s in (call.output_splits, call.input_splits))
        out, into = tensors[call.outputs[0]], tensors[call.inputs[0]]
        return dist.all_to_all_single(out, into, out_splits, in_splits, group=group, async_op=call.is_async)


def bad_splits(word: str, shape: tuple[int, ...], splits: tuple[int, ...] | None, n: int) -> str | None:
    """Why a tensor can't be cut along its first axis: by ``splits``, or evenly where there are none."""
    rows = shape[0] if shape else 1
    if splits is None:
        return None if rows % n == 0 else f"the first axis of {word} has {rows} rows, which {n} ranks can't share evenly"
    if len(splits) != n:
        return f"{word}_splits has {len(splits)} numbers, but the group has {n} ranks"
    if min(splits) < 0:
        return f"{word}_splits holds {min(splits)}; a part can't be negative"
    if sum(splits) != rows:
        return f"{word}_splits {list(splits)} add up to {sum(splits)}, but the first axis of {word} has {rows} rows"
    return None


class Barrier(Collective):
    op = "barrier"
    torch_name = "barrier"
    first_field = "group"
    gives: ClassVar[Share] = "none"
    gets: ClassVar[Share] = "none"
    colour = colours.WAIT
    words = Words(
        signature="barrier(group=None, async_op=False, device_ids=None, timeout=None)",
        before="Ranks come at different times.",
        after="Every rank of the group has come. No data moved.",
        waits=_ALL_WAIT,
        example="- barrier",
        notes=("nccl makes it an all_reduce of one number, then lets the host wait for the device.",),
        torch="dist.barrier()",
    )
    algorithms = algorithms_of("barrier")
    bindings = {"gloo": Binding(gpu=False), "nccl": Binding(), "mpi": Binding()}

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return (None,) * n

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        return dist.barrier(group=group, async_op=call.is_async)


class MonitoredBarrier(Op):
    op = "monitored_barrier"
    kind = "collective"
    torch_name = "monitored_barrier"
    first_field = "group"
    colour = colours.WAIT
    words = Words(
        signature="monitored_barrier(group=None, timeout=None, wait_all_ranks=False)",
        before="Ranks come at different times; group rank 0 keeps the list.",
        after="Every rank of the group has come. If not in time, group rank 0 raises and names the first rank that is missing.",
        waits="Group rank 0 waits for all others, they wait for its answer.",
        example="- monitored_barrier: {timeout: 10 s}",
        notes=("gloo alone has it.", "With wait_all_ranks the error names every rank that is missing."),
        torch="dist.monitored_barrier(timeout=timedelta(seconds=10))",
    )
    algorithms = algorithms_of("monitored_barrier")
    bindings = {"gloo": Binding(gpu=False), "nccl": Binding(refused=ONLY_GLOO), "mpi": Binding(refused=ONLY_GLOO)}

    group: GroupField = None
    timeout: TimeoutField = None
    wait_all_ranks: StrictBool = False

    @classmethod
    def parties(cls, call: Call) -> tuple[int, ...]:
        return call.group.ranks

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        return {"op": cls.op}

    @classmethod
    def faults(cls, call: Call) -> str | None:
        return first((stranger(call),))

    @classmethod
    def chunk_nbytes(cls, n: int, nbytes: int) -> int:
        return 0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[Effect, ...]:
        return (None,) * n

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        timeout = None if call.timeout_ns is None else timedelta(microseconds=call.timeout_ns // 1000)
        return dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=call.wait_all_ranks)
