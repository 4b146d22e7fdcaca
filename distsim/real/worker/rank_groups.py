"""Process groups of one rank: torch's groups for the program's, made in the program's order with
explicit timeouts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.groups import group_ids_from_steps, groups_from_file
from distsim.real.shared.job import LOOPBACK, WorkerJob
from distsim.real.shared.rendezvous import listen, serve_store
from distsim.real.worker import rank_stores

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup


class RankProcessGroups:
    """``of(group)`` is what torch takes as ``group``: None for the world."""

    def __init__(self, job: WorkerJob, rank: int) -> None:
        import torch.distributed

        self.dist: ModuleType = torch.distributed
        self.job, self.rank, self.program = job, rank, job.program
        self._made: dict[int, ProcessGroup] = {}
        self._by_step = group_ids_from_steps(job.program)
        self._bound: set[int] = set()
        self._count = 0
        self.generation = 0
        self.connected = False
        self._store: TCPStore | None = None

    def of(self, group: RankGroup) -> ProcessGroup | None:
        return None if group.id == 0 else self._made.get(group.id)

    def start(self, call: ResolvedCall | None = None) -> None:
        """init_process_group, as the file writes it or implied, then the file's groups in their
        order.
        """
        options, world = self.program.options, self.program.groups[0]
        call = call or ResolvedCall(op="init_process_group", rank=self.rank, group=world)
        timeout_ns = call.timeout_ns or options.get("timeout_ns") or self.job.group_timeout_ns
        failing = (
            self.program.startup is not None and self.program.startup.failed and not self.generation
        )
        method = call.init_method or (
            None if call.store else options.get("init_method") or self.job.init_method
        )
        if failing:
            method = self._as_written(call)
        if self.generation:  # the store still has the last world's keys
            method = Path(self.job.directory, f"again-{self.generation}").as_uri()
        self.generation += 1
        if method is not None and not failing:
            self._serve(method)
        store = (
            rank_stores.serve_startup_store(self.dist, self.program, self.rank) if failing else None
        )
        if store is not None:
            method = None
        elif call.store is not None:
            store = rank_stores.create_store(self.dist, call, timeout_ns)
        backend = self.job.backend
        eager = self.job.backend == "nccl" and options.get("init") == "eager"
        device = self.job.devices.of(self.job.local_rank(self.rank)) if eager else call.device_id
        call = replace(
            call, timeout_ns=timeout_ns, backend=backend, init_method=method, device_id=device
        )
        if store is not None:
            rank, size = rank_stores.stated_rank_and_world(self.program, self.rank, call)
            call = replace(
                call, store=call.store or "tcp", rank_argument=rank, world_size_argument=size
            )
        OPERATIONS["init_process_group"].torch_call(self.dist, call, {}, store)
        self.connected = True
        for group in groups_from_file(self.program):
            self._new(group)

    def _as_written(self, call: ResolvedCall) -> str | None:
        """The init_method of a start-up that fails: as the file says it, nothing else."""
        entrance = (
            self.program.startup.entrance(self.rank) if self.program.startup is not None else None
        )
        return entrance.init_method if entrance is not None else call.init_method

    def _serve(self, method: str) -> None:
        """A store for the ranks at a tcp:// address where the launcher's is not. Rank 0 serves it,
        on a machine's loopback by itself: torch would listen on every address of the machine.
        """
        url, launchers = urlsplit(method), urlsplit(f"//{self.job.master_addr}")
        if url.scheme != "tcp" or (url.hostname, url.port) == (
            launchers.hostname,
            self.job.master_port,
        ):
            return
        if url.hostname not in LOOPBACK or not url.port:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)  # as torch does it
        elif self.rank == 0:
            door, port = listen(url.hostname, url.port, allow_other_port=False)
            self._store = serve_store(door, url.hostname, port)

    def _new(self, group: RankGroup, call: ResolvedCall | None = None) -> None:
        """Make a group; who is no member gets torch's sign for that, which its calls then refuse or
        ignore.
        """
        timeout_ns = (
            group.timeout_ns or self.job.group_timeout_ns
        )  # new_group does not inherit the world's
        call = call or ResolvedCall(
            op="new_group",
            rank=self.rank,
            group=self.program.groups[0],
            name=group.name,
            ranks=group.ranks,
        )
        backend = group.backend or call.backend
        call = replace(call, timeout_ns=call.timeout_ns or timeout_ns, backend=backend)
        made: Any = OPERATIONS["new_group"].torch_call(self.dist, call, {}, None)
        self._made[group.id] = made

    def step(self, call: ResolvedCall) -> None:
        """A new_group step: the group that later calls of this rank mean by its name."""
        ranks = tuple(sorted(call.ranks))
        numbered = None if call.local_sync else self._numbered.get((self._count, ranks))
        self._count += not call.local_sync
        found = (
            [numbered]
            if numbered is not None
            else [
                g
                for g in self.program.groups
                if g.id in self._by_step and (g.name, g.ranks) == (call.name, ranks)
            ]
        )
        group = next((g for g in found if g.id not in self._bound), found[0] if found else None)
        if group is None:  # no valid group: torch is to say so
            OPERATIONS["new_group"].torch_call(
                self.dist, replace(call, timeout_ns=self.job.group_timeout_ns), {}, None
            )
            return
        self._bound.add(group.id)
        self._new(group, call)

    @cached_property
    def _numbered(self) -> dict[tuple[int, tuple[int, ...]], RankGroup]:
        """What the how-manieth new_group of a rank makes, by its members: torch counts, and ranks
        that give these groups other names, in another order, are still in one."""
        numbers: dict[tuple[int, ...], set[int]] = {}
        for code in self.program.codes:
            for rank in code.ranks if any(call.op == "new_group" for call in code.calls) else ():
                made = [
                    call
                    for _, call in self.program.calls_of(rank)
                    if call.op == "new_group" and not call.local_sync
                ]
                for number, one in enumerate(made):
                    numbers.setdefault(tuple(sorted(one.ranks)), set()).add(number)
        found = dict[tuple[int, tuple[int, ...]], RankGroup]()
        for ranks, those in numbers.items():
            groups = [g for g in self.program.groups if g.id in self._by_step and g.ranks == ranks]
            if len(groups) == len(
                those
            ):  # else some are made by their members alone, and go by name
                found |= {
                    (number, ranks): group
                    for number, group in zip(sorted(those), groups, strict=True)
                }
        return found

    def destroy(self, call: ResolvedCall | None = None) -> None:
        call = call or ResolvedCall("destroy_process_group", self.rank, self.program.groups[0])
        OPERATIONS["destroy_process_group"].torch_call(self.dist, call, {}, self.of(call.group))
        if not call.group.id:
            self._made.clear()
            self.connected = False
