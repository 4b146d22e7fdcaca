"""Groups and the life of the world: init_process_group, new_group, destroy_process_group."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

from pydantic import Field, StrictBool

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
    """The rendezvous of all ranks, which creates the world."""

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
        before=(
            "Every rank knows its rank, the world size and the address of the store: from RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (env://), or from the arguments (tcp://, "
            "file://, store)."
        ),
        after="All ranks have connected through the store; the group `world` exists.",
        waits="Every rank waits for all ranks: if one rank never starts, all others hang here.",
        example=(
            "- init_process_group: {init_method: 'tcp://127.0.0.1:29500', rank: rank, "
            "world_size: world_size, timeout: 30 s}"
        ),
        notes=(
            "A program without this call starts with an implied init_process_group.",
            "Default timeout: 10 min on nccl, otherwise 30 min.",
            "For failures at start-up, see docs/reference/startup.md.",
        ),
        torch=(
            "dist.init_process_group(\n"
            '    "gloo", init_method="tcp://127.0.0.1:29500", rank=rank, '
            "world_size=world_size, timeout=timedelta(seconds=30)\n"
            ")"
        ),
    )

    backend: str | None = Field(
        default=None,
        description="Backend of the world: gloo, nccl or mpi [default: the scenario's backend].",
        examples=["gloo"],
    )
    init_method: TextField = Field(
        default=None,
        description=(
            "Address of the rendezvous: `env://`, `tcp://host:port` or `file:///path` [default: "
            "`env://`]."
        ),
        examples=["env://"],
    )
    store: TextField = Field(
        default=None,
        description=(
            "Store instead of an init_method: `tcp://host:port`, `file:///path`, or `hash` (only "
            "inside this process)."
        ),
        examples=["hash"],
    )
    rank: ExpressionField = Field(
        default=None,
        description="Rank that the process passes [default: RANK, for env://].",
        examples=["rank"],
    )
    world_size: ExpressionField = Field(
        default=None,
        description="World size that the process passes [default: WORLD_SIZE, for env://].",
        examples=["world_size"],
    )
    timeout: TimeoutField = Field(
        default=None,
        description="Timeout of the call and of later calls on the world.",
        examples=["30 s"],
    )
    device_id: ExpressionField = Field(
        default=None,
        description="Index of the rank's GPU; nccl then creates its communicators at once.",
        examples=["local_rank"],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part (`Operation.parties`)."""
        return call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common (`Operation.agreement`)."""
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
    """Create a group of some ranks."""

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
        before="The world exists. All its ranks make the call, members or not, in the same order.",
        after="A group of these ranks exists. Other ranks get a handle that they cannot use.",
        waits=(
            "All ranks of the world wait for each other; with use_local_synchronization, only the "
            "members."
        ),
        example="- new_group: {name: pair, ranks: [0, 1]}",
        notes=(
            "The group does not inherit the timeout of the world.",
            "torch sorts the ranks.",
            (
                "If only the members call it, torch's count of groups differs between ranks, and "
                "the next new_group fails."
            ),
            (
                "With use_local_synchronization, members find each other only if they belong to "
                "the same number of groups, because torch hashes that number."
            ),
            (
                "A group that is destroyed and created again therefore gets its old name. Members "
                "that arrive at different times may find outdated addresses and hang."
            ),
            (
                "`store` is not an argument of torch: the members connect under this prefix of "
                "the store, whatever groups they belong to."
            ),
        ),
        torch="pair = dist.new_group([0, 1])",
    )

    name: str = Field(description="Name of the group for later steps.", examples=["pair"])
    ranks: ExpressionListField = Field(
        default=None,
        description="Global ranks of the members [default: all]. torch sorts them.",
        examples=[[0, 1]],
    )
    timeout: TimeoutField = Field(
        default=None, description="Timeout of calls on the group.", examples=["30 s"]
    )
    backend: str | None = Field(
        default=None,
        description="Backend of the group: gloo, nccl or mpi [default: the scenario's backend].",
        examples=["gloo"],
    )
    use_local_synchronization: StrictBool = Field(
        default=False,
        description="Let only the members make the call and wait for each other.",
        examples=[True],
    )
    store: str | None = Field(
        default=None,
        description=(
            "Store prefix that only the members use to connect, such as torchft's prefix for "
            "each quorum."
        ),
        examples=["torchft/3"],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part (`Operation.parties`)."""
        return call.ranks if call.local_sync else call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common (`Operation.agreement`)."""
        return {"op": cls.op, "ranks": tuple(sorted(call.ranks)), "backend": call.backend}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no backend accepts this call, or None (`Operation.faults`)."""
        if not call.ranks:
            return f"the new group {call.name} has no ranks"
        if len(set(call.ranks)) < len(call.ranks):
            return f"ranks {list(call.ranks)} of the new group {call.name} list a rank twice"
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
    """Destroy one group, or all groups."""

    op = "destroy_process_group"
    kind = "group"
    torch_name = "destroy_process_group"
    first_field = "group"
    colour = colours.END
    words = OperationHelp(
        signature="destroy_process_group(group=None)",
        before="The group exists on this rank.",
        after="The group no longer exists on this rank; without `group`, no group exists.",
        waits=(
            "Waits for no rank. The backend decides whether pending work of the group is aborted "
            "or completed."
        ),
        example="- destroy_process_group",
        notes=("A program without this call ends with an implied destroy_process_group.",),
        torch="dist.destroy_process_group()",
    )

    group: GroupField = Field(
        default=None,
        description="Group to destroy [default: all groups].",
        examples=["dp"],
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
        return dist.destroy_process_group(group)


def _timedelta_of_ns(ns: int | None) -> timedelta | None:
    return None if ns is None else timedelta(microseconds=ns // 1000)
