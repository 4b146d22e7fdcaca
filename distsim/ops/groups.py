"""Groups and the life of the world: init_process_group, new_group, destroy_process_group."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import ModuleType

from pydantic import StrictBool

from distsim.ops import colours
from distsim.ops.base import Drawing, Op, Words
from distsim.ops.fields import ExprList, GroupField, TimeoutField
from distsim.ops.records import Call
from distsim.ops.torch_types import Memory, Work


class InitProcessGroup(Op):
    op = "init_process_group"
    kind = "group"
    torch_name = "init_process_group"
    first_field = "backend"
    drawing = Drawing(colours.COLLECT, "component", "init")
    words = Words(
        signature="init_process_group(backend=None, init_method=None, timeout=None, …)",
        before="Every rank knows RANK, WORLD_SIZE and where the store is (MASTER_ADDR, MASTER_PORT).",
        after="All ranks have met at the store; the group world exists.",
        waits="Everybody for everybody: a rank that never starts makes all others hang here.",
        example="- init_process_group: {backend: gloo, timeout: 30 s}",
        notes=("It is implied at the start of a program.", "Default timeouts: 30 min, under nccl 10 min."),
    )

    backend: str | None = None
    init_method: str | None = None
    timeout: TimeoutField = None

    @classmethod
    def parties(cls, call: Call) -> tuple[int, ...]:
        return call.group.ranks

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        return {"op": cls.op, "backend": call.backend}

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        """Rank and world size come from the environment, unless an init_method other than env:// needs them."""
        explicit: dict[str, int] = {}
        if call.init_method not in (None, "env://"):
            explicit = {"rank": call.rank, "world_size": call.group.size}
        if call.device_id is not None:
            explicit["device_id"] = call.device_id
        return dist.init_process_group(call.backend, call.init_method, timeout=_timedelta(call.timeout_ns), **explicit)


class NewGroup(Op):
    op = "new_group"
    kind = "group"
    torch_name = "new_group"
    first_field = "name"
    drawing = Drawing(colours.COLLECT, "component", "new")
    words = Words(
        signature="new_group(ranks=None, timeout=None, backend=None, use_local_synchronization=False, …) -> ProcessGroup",
        before="The world exists. All ranks of it make the call, members or not, in the same order.",
        after="A further group of these ranks exists; other ranks hold a handle that they can't use.",
        waits="All ranks of the world; with use_local_synchronization the members alone.",
        example="- new_group: {name: pair, ranks: [0, 1]}",
        notes=("It does not inherit the world's timeout.", "torch sorts the ranks.",
               "Made by the members alone it shifts torch's count of groups, and the next new_group fails."),
    )  # fmt: skip

    name: str
    ranks: ExprList = None
    timeout: TimeoutField = None
    backend: str | None = None
    use_local_synchronization: StrictBool = False

    @classmethod
    def parties(cls, call: Call) -> tuple[int, ...]:
        return call.ranks if call.local_sync else call.group.ranks

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        return {"op": cls.op, "ranks": tuple(sorted(call.ranks)), "backend": call.backend}

    @classmethod
    def faults(cls, call: Call) -> str | None:
        if not call.ranks:
            return f"the new group {call.name} has no ranks"
        if len(set(call.ranks)) < len(call.ranks):
            return f"ranks {list(call.ranks)} of the new group {call.name} name a rank twice"
        strange = [r for r in call.ranks if r not in call.group.ranks]
        return f"rank {strange[0]} of the new group {call.name} is outside the world" if strange else None

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        """Returns torch's group."""
        timeout = _timedelta(call.timeout_ns)
        return dist.new_group(list(call.ranks), timeout, call.backend, use_local_synchronization=call.local_sync)


class DestroyProcessGroup(Op):
    op = "destroy_process_group"
    kind = "group"
    torch_name = "destroy_process_group"
    first_field = "group"
    drawing = Drawing(colours.END, "component", "destroy")
    words = Words(
        signature="destroy_process_group(group=None)",
        before="The group exists on this rank.",
        after="The group is gone on this rank; without group: all groups.",
        waits="Nobody; pending work of the group is ended or waited out, as the back end likes.",
        example="- destroy_process_group",
        notes=("It is implied at the end of a program.",),
    )

    group: GroupField = None

    @classmethod
    def torch_call(cls, dist: ModuleType, call: Call, tensors: Memory, group: object, works: Sequence[Work] = ()) -> object:
        return dist.destroy_process_group(group)


def _timedelta(ns: int | None) -> timedelta | None:
    return None if ns is None else timedelta(microseconds=ns // 1000)
