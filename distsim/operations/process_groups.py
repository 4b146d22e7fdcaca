"""Groups and the life of the world: init_process_group, new_group, destroy_process_group."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

from pydantic import StrictBool

from distsim.operations.core import colours
from distsim.operations.core.field_types import (
    ExpressionField,
    ExpressionListField,
    GroupField,
    TextField,
    TimeoutField,
)
from distsim.operations.core.operation_base import Operation, OperationHelp
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork


class InitProcessGroupOperation(Operation):
    op = "init_process_group"
    kind = "group"
    torch_name = "init_process_group"
    first_field = "backend"
    colour = colours.COLLECT
    words = OperationHelp(
        signature=(
            "init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, "
            "rank=-1, store=None, …, device_id=None)"
        ),
        before="Every rank knows its number, the world size and where the store is: from RANK, "
        "WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT (env://), or from its arguments (tcp://, file://, store).",
        after="All ranks have met at the store; the group world exists.",
        waits="Everybody for everybody: a rank that never starts makes all others hang here.",
        example=(
            "- init_process_group: {init_method: 'tcp://127.0.0.1:29500', rank: rank, "
            "world_size: world_size, timeout: 30 s}"
        ),
        notes=(
            "It is implied at the start of a program.",
            "Default timeouts: 30 min, under nccl 10 min.",
            "What goes wrong here: docs/reference/startup.md.",
        ),
        torch=(
            "dist.init_process_group(\n"
            '    "gloo", init_method="tcp://127.0.0.1:29500", rank=rank, '
            "world_size=world_size, timeout=timedelta(seconds=30)\n"
            ")"
        ),
    )

    backend: str | None = None
    #: env:// (also where it is left out), tcp://host:port, file:///path; alone or per rank.
    init_method: TextField = None
    #: In place of init_method: tcp://host:port (a TCPStore), file:///path (a FileStore), hash (a
    #: HashStore).
    store: TextField = None
    #: Which number the process says it has; left out, env:// reads RANK.
    rank: ExpressionField = None
    #: How many it says there are; left out, env:// reads WORLD_SIZE.
    world_size: ExpressionField = None
    timeout: TimeoutField = None
    #: The accelerator of an eager start, as `local_rank`.
    device_id: ExpressionField = None

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        return call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        return {"op": cls.op, "backend": call.backend}

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Rank and world size as the call says them; where it says none, from the environment, or
        for an init_method other than env:// those of the rank. ``group`` is the store, where one is
        given.
        """
        explicit: dict[str, object] = {}
        said = call.rank_argument is not None or call.world_size_argument is not None
        if said or call.init_method not in (None, "env://"):
            explicit = {"rank": call.rank, "world_size": call.group.size}
        if said or call.store is not None:
            explicit = {
                "rank": -1 if call.rank_argument is None else call.rank_argument,
                "world_size": -1 if call.world_size_argument is None else call.world_size_argument,
            }
        if call.store is not None:
            explicit["store"] = group
        if call.device_id is not None:
            explicit["device_id"] = call.device_id
        return dist.init_process_group(
            call.backend, call.init_method, timeout=_timedelta_of_ns(call.timeout_ns), **explicit
        )


class NewGroupOperation(Operation):
    op = "new_group"
    kind = "group"
    torch_name = "new_group"
    first_field = "name"
    colour = colours.COLLECT
    words = OperationHelp(
        signature=(
            "new_group(ranks=None, timeout=None, backend=None, use_local_synchronization=False, "
            "…) -> ProcessGroup"
        ),
        before=(
            "The world exists. All ranks of it make the call, members or not, in the same order."
        ),
        after=(
            "A further group of these ranks exists; other ranks hold a handle that they can't use."
        ),
        waits="All ranks of the world; with use_local_synchronization the members alone.",
        example="- new_group: {name: pair, ranks: [0, 1]}",
        notes=(
            "It does not inherit the world's timeout.",
            "torch sorts the ranks.",
            (
                "Made by the members alone it shifts torch's count of groups, and the next "
                "new_group fails."
            ),
            (
                "With use_local_synchronization members find each other only if they are in "
                "equally many groups: torch hashes that."
            ),
            "So a group that is destroyed and made again has the name of before, and members "
            "may find each other's addresses of"
            " before: it hangs, where they don't come at one time.",
            (
                "`store` is not torch's: the members meet under this prefix of the store, "
                "whatever groups they are in."
            ),
        ),
        torch="pair = dist.new_group([0, 1])",
    )

    name: str
    ranks: ExpressionListField = None
    timeout: TimeoutField = None
    backend: str | None = None
    use_local_synchronization: StrictBool = False
    #: Not torch's: a prefix of the world's store, for a group that its members make by themselves,
    #: whatever groups they are in.
    store: str | None = None

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        return call.ranks if call.local_sync else call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        return {"op": cls.op, "ranks": tuple(sorted(call.ranks)), "backend": call.backend}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        if not call.ranks:
            return f"the new group {call.name} has no ranks"
        if len(set(call.ranks)) < len(call.ranks):
            return f"ranks {list(call.ranks)} of the new group {call.name} name a rank twice"
        strange = [r for r in call.ranks if r not in call.group.ranks]
        return (
            f"rank {strange[0]} of the new group {call.name} is outside the world"
            if strange
            else None
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
        """Returns torch's group."""
        timeout = _timedelta_of_ns(call.timeout_ns)
        if call.store is not None:
            return _new_group_with_store(dist, call, timeout) if call.rank in call.ranks else None
        return dist.new_group(
            list(call.ranks), timeout, call.backend, use_local_synchronization=call.local_sync
        )


def _new_group_with_store(
    dist: ModuleType, call: ResolvedCall, timeout: timedelta | None
) -> object:
    """torch's own helper, for it has no public call: what torchft's `configure` and the custom
    groups of RL trainers come down to.
    """
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    members = sorted(call.ranks)
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    kind = c10d.Backend(call.backend or backend)
    timeout = timeout or c10d._get_default_timeout(kind)
    prefixed = dist.PrefixStore(call.store, store)
    name = f"{call.store}/{'_'.join(map(str, members))}"
    group, _ = c10d._new_process_group_helper(
        len(members), members.index(call.rank), members, kind, prefixed, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(members)}
    return group


class DestroyProcessGroupOperation(Operation):
    op = "destroy_process_group"
    kind = "group"
    torch_name = "destroy_process_group"
    first_field = "group"
    colour = colours.END
    words = OperationHelp(
        signature="destroy_process_group(group=None)",
        before="The group exists on this rank.",
        after="The group is gone on this rank; without group: all groups.",
        waits="Nobody; pending work of the group is ended or waited out, as the back end likes.",
        example="- destroy_process_group",
        notes=("It is implied at the end of a program.",),
        torch="dist.destroy_process_group()",
    )

    group: GroupField = None

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        return dist.destroy_process_group(group)


def _timedelta_of_ns(ns: int | None) -> timedelta | None:
    return None if ns is None else timedelta(microseconds=ns // 1000)
