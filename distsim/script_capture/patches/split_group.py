"""`torch.distributed.split_group` for groups of the hub.

All ranks of the parent group call it, and each becomes a member of at most one new group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

#: Backends of torch whose groups can be split (`supportsSplitting` in their headers, torch 2.13).
_SPLITTABLE_BACKENDS: Final = frozenset({"nccl", "gloo"})


class GroupSplitter:
    """Splits groups. ``new_group`` is torch's, which creates groups of the hub.

    ``device`` is the one given to init_process_group, without which torch splits no group.
    """

    def __init__(self, new_group: Callable[..., object]) -> None:
        self.new_group = new_group
        self.device: object = None

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: object = None,
        group_desc: str | None = None,
        backend: object = None,
    ) -> Any:
        """The new group of this rank, or None if it is in none.

        Raises ValueError and RuntimeError as torch does, with its texts. All ranks of the parent
        meet in a barrier first, since NCCL's split of a communicator needs them all
        (ncclCommSplit). Then the members of each part create their group.
        """
        c10d = import_module("torch.distributed.distributed_c10d")
        parent = parent_pg or c10d._get_default_group()
        parts = self._global_ranks(c10d, parent, split_ranks)
        self._check_can_split(parent)
        options = c10d.BarrierOptions()
        options.asyncOp = False
        parent.barrier(options)
        rank = c10d._get_default_group().rank()
        own_part = next((part for part in parts if rank in part), None)
        if own_part is None:
            return None
        return self.new_group(
            own_part,
            timeout,
            str(backend) if backend is not None else parent.name(),
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    def _check_can_split(self, parent: Any) -> None:
        if self.device is None:
            raise RuntimeError(
                "No device associated with the default pg, not safe to split any process groups"
            )
        # "nccl", or "cpu:gloo,cuda:nccl"
        backends = {part.rpartition(":")[2] for part in parent.name().split(",")}
        has_accelerator = import_module("torch").accelerator.is_available()
        if not has_accelerator or not backends <= _SPLITTABLE_BACKENDS:
            raise RuntimeError(
                "No backend for the parent process group or its backend does not support splitting"
            )

    def _global_ranks(
        self, c10d: Any, parent: Any, parts: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        """The global ranks of each part; the caller names group ranks of the parent."""
        if not parts:
            raise ValueError("split_ranks cannot be None or empty")
        if parent not in c10d._world.pg_group_ranks:
            raise ValueError(f"Group {parent} is not registered")
        group_rank_of = c10d._world.pg_group_ranks[parent]
        rank_of = {group_rank: rank for rank, group_rank in group_rank_of.items()}
        for part in parts:
            if not part:
                raise ValueError("the split group cannot be empty")
            if len(part) != len(set(part)):
                raise ValueError("the split group cannot have duplicate ranks")
            if not set(part) <= set(rank_of):
                raise ValueError(
                    f"split_ranks {list(part)} are not all ranks of the parent group, which has"
                    f" 0 to {len(rank_of) - 1}"
                )
        return [sorted(rank_of[group_rank] for group_rank in part) for part in parts]
