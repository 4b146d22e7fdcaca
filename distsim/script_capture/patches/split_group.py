"""`torch.distributed.split_group`: a group's ranks fall apart into groups, each called for by all
of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

#: Back ends of torch whose groups can be split (`supportsSplitting` in their headers, torch 2.13).
_SPLITTABLE_BACKENDS: Final = ("nccl", "gloo")


class GroupSplitter:
    """``new_group``: torch's, as the hub has it. ``device``: was one given to init_process_group,
    without which torch splits nothing?
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
        """The group of this rank among those that ``parent_pg`` is split into; None where it is in
        none.

        Raises ValueError and RuntimeError as torch does, in its words. All ranks of the parent meet
        first, as NCCL's split of a communicator needs them all (ncclCommSplit); then the members of
        each part make their group.
        """
        c10d = import_module("torch.distributed.distributed_c10d")
        parent = parent_pg or c10d._get_default_group()
        members = self._members(c10d, parent, split_ranks)
        self._refuse(parent)
        options = c10d.BarrierOptions()
        options.asyncOp = False
        parent.barrier(options)
        mine = next((part for part in members if c10d._get_default_group().rank() in part), None)
        if mine is None:
            return None
        return self.new_group(
            mine,
            timeout,
            str(backend) if backend is not None else parent.name(),
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    def _refuse(self, parent: Any) -> None:
        if self.device is None:
            raise RuntimeError(
                "No device associated with the default pg, not safe to split any process groups"
            )
        named = {part.rpartition(":")[2] for part in parent.name().split(",")}
        if not import_module("torch").accelerator.is_available() or not named <= set(
            _SPLITTABLE_BACKENDS
        ):
            raise RuntimeError(
                "No backend for the parent process group or its backend does not support splitting"
            )

    def _members(
        self, c10d: Any, parent: Any, parts: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        """The global ranks of each part, which is told in ranks of the parent."""
        if not parts:
            raise ValueError("split_ranks cannot be None or empty")
        if parent not in c10d._world.pg_group_ranks:
            raise ValueError(f"Group {parent} is not registered")
        ranks = {
            group_rank: rank for rank, group_rank in c10d._world.pg_group_ranks[parent].items()
        }
        for part in parts:
            if not part:
                raise ValueError("the split group cannot be empty")
            if len(part) != len(set(part)):
                raise ValueError("the split group cannot have duplicate ranks")
            if not set(part) <= set(ranks):
                raise ValueError(
                    f"split_ranks {list(part)} are not all ranks of the parent group, which has 0 to {len(ranks) - 1}"
                )
        return [sorted(ranks[k] for k in part) for part in parts]
