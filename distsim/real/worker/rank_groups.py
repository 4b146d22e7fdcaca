"""The process groups of one rank: creates torch's groups for those of the program.

Groups are created in the program's order, with explicit timeouts. The difficult part is a
`new_group` step: torch pairs such calls across ranks by a counter, so ranks may give one group
different names. `_numbered_groups` finds the program's group for the n-th call.
"""

from __future__ import annotations

import os
from collections import defaultdict
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
    """``of(group)`` is what torch takes as ``group``: None for the world.

    ``generation``: how often init_process_group was called. ``connected``: the world exists now.
    """

    def __init__(self, job: WorkerJob, rank: int) -> None:
        import torch.distributed

        self.dist: ModuleType = torch.distributed
        self.job = job
        self.rank = rank
        self.program = job.program
        self._groups: dict[int, ProcessGroup] = {}  # torch's groups by the program's ids
        self._ids_from_steps = group_ids_from_steps(job.program)
        self._used_ids: set[int] = set()  # groups that a new_group step has created
        self._new_group_count = 0  # as torch counts: without use_local_synchronization
        self.generation = 0
        self.connected = False
        self._store: TCPStore | None = None

    def of(self, group: RankGroup) -> ProcessGroup | None:
        """The process group of torch; None for the default group."""
        return None if group.id == 0 else self._groups.get(group.id)

    def start(self, call: ResolvedCall | None = None) -> None:
        """Call init_process_group, then create the scenario's groups in their order.

        ``call``: the init_process_group step of the program; None if the program has none.
        """
        startup = self.program.startup
        startup_fails = startup is not None and startup.failed and not self.generation
        if call is None:
            world = self.program.groups[0]
            call = ResolvedCall(op="init_process_group", rank=self.rank, group=world)
        given_timeout_ns = call.timeout_ns or self.program.options.get("timeout_ns")
        timeout_ns: int = given_timeout_ns or self.job.group_timeout_ns
        call = replace(
            call,
            timeout_ns=timeout_ns,
            backend=self.job.backend,
            init_method=self._init_method(call, startup_fails),
            device_id=self._device_of_init(call),
        )
        self.generation += 1
        if call.init_method is not None and not startup_fails:
            self._serve(call.init_method)
        store = None
        if startup_fails:
            store = rank_stores.serve_startup_store(self.dist, self.program, self.rank)
        if store is not None:
            call = replace(call, init_method=None)  # torch takes one of the two
        elif call.store is not None:
            store = rank_stores.create_store(self.dist, call, timeout_ns)
        if store is not None:
            rank, size = rank_stores.stated_rank_and_world(self.program, self.rank, call)
            call = replace(
                call, store=call.store or "tcp", rank_argument=rank, world_size_argument=size
            )
        OPERATIONS["init_process_group"].torch_call(self.dist, call, {}, store)
        self.connected = True
        for group in groups_from_file(self.program):
            self._create_group(group)

    def _device_of_init(self, call: ResolvedCall) -> int | None:
        """The device that the call names; under eager initialisation, the rank's GPU."""
        if self.job.backend == "nccl" and self.program.options.get("init") == "eager":
            return self.job.devices.gpu_of(self.job.local_rank(self.rank))
        return call.device_id

    def _init_method(self, call: ResolvedCall, startup_fails: bool) -> str | None:
        if self.generation:
            # A file of its own, because the store still has the keys of the last world.
            return Path(self.job.directory, f"again-{self.generation}").as_uri()
        if startup_fails:
            return self._init_method_in_file(call)
        if call.init_method or call.store:
            return call.init_method or None
        method: str = self.program.options.get("init_method") or self.job.init_method
        return method

    def _init_method_in_file(self, call: ResolvedCall) -> str | None:
        """The init_method of a start-up that fails: exactly that of the scenario."""
        startup = self.program.startup
        process = startup.entrance(self.rank) if startup is not None else None
        return process.init_method if process is not None else call.init_method

    def _serve(self, method: str) -> None:
        """Provide a store at a tcp:// address other than that of the launcher's store.

        At a loopback address rank 0 serves it itself, because torch would listen on every address
        of the machine.
        """
        url = urlsplit(method)
        launcher_url = urlsplit(f"//{self.job.master_addr}")
        is_launchers = (url.hostname, url.port) == (launcher_url.hostname, self.job.master_port)
        if url.scheme != "tcp" or is_launchers:
            return
        if url.hostname not in LOOPBACK or not url.port:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)  # torch serves it on rank 0
        elif self.rank == 0:
            listening, port = listen(url.hostname, url.port, allow_other_port=False)
            self._store = serve_store(listening, url.hostname, port)

    def _create_group(self, group: RankGroup, call: ResolvedCall | None = None) -> None:
        """Create a group; a rank that is no member gets torch's marker for non-members.

        The group's calls then refuse or ignore that marker.
        """
        # new_group does not inherit the timeout of the world.
        timeout_ns = group.timeout_ns or self.job.group_timeout_ns
        if call is None:
            world = self.program.groups[0]
            call = ResolvedCall(
                op="new_group", rank=self.rank, group=world, name=group.name, ranks=group.ranks
            )
        backend = group.backend or call.backend
        call = replace(call, timeout_ns=call.timeout_ns or timeout_ns, backend=backend)
        made: Any = OPERATIONS["new_group"].torch_call(self.dist, call, {}, None)
        self._groups[group.id] = made

    def step(self, call: ResolvedCall) -> None:
        """A new_group step: creates the group that later calls of this rank mean by its name."""
        candidates = self._candidates(call, self._number_of_new_group(call))
        group = next((g for g in candidates if g.id not in self._used_ids), None)
        if group is None and candidates:
            group = candidates[0]
        if group is None:
            # No valid group: torch itself has to refuse the call.
            call = replace(call, timeout_ns=self.job.group_timeout_ns)
            OPERATIONS["new_group"].torch_call(self.dist, call, {}, None)
            return
        self._used_ids.add(group.id)
        self._create_group(group, call)

    def _number_of_new_group(self, call: ResolvedCall) -> int | None:
        """The number of this new_group call, as torch counts them; None if torch does not."""
        if call.local_sync:
            return None
        number = self._new_group_count
        self._new_group_count += 1
        return number

    def _candidates(self, call: ResolvedCall, number: int | None) -> list[RankGroup]:
        """The program's groups that the new_group call with this number may create."""
        ranks = tuple(sorted(call.ranks))
        if number is not None:
            numbered = self._numbered_groups.get((number, ranks))
            if numbered is not None:
                return [numbered]
        return [g for g in self._groups_from_steps(ranks) if g.name == call.name]

    def _groups_from_steps(self, ranks: tuple[int, ...]) -> list[RankGroup]:
        groups = [g for g in self.program.groups if g.id in self._ids_from_steps]
        return [g for g in groups if g.ranks == ranks]

    @cached_property
    def _numbered_groups(self) -> dict[tuple[int, tuple[int, ...]], RankGroup]:
        """The group that the n-th new_group call of a rank creates, by (n, members).

        torch counts the calls, so ranks that give these groups other names, in another order, are
        still in one group.
        """
        found: dict[tuple[int, tuple[int, ...]], RankGroup] = {}
        for ranks, numbers in self._call_numbers().items():
            groups = self._groups_from_steps(ranks)
            # Otherwise some groups are created by their members alone, and are found by name.
            if len(groups) == len(numbers):
                for number, group in zip(sorted(numbers), groups, strict=True):
                    found[number, ranks] = group
        return found

    def _call_numbers(self) -> dict[tuple[int, ...], set[int]]:
        """For each set of members: at which numbers any rank calls new_group with it."""
        numbers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for code in self.program.codes:
            if not any(call.op == "new_group" for call in code.calls):
                continue
            for rank in code.ranks:
                new_groups = [
                    call for _, call in self.program.calls_of(rank) if call.op == "new_group"
                ]
                counted = [call for call in new_groups if not call.local_sync]
                for number, call in enumerate(counted):
                    numbers[tuple(sorted(call.ranks))].add(number)
        return numbers

    def destroy(self, call: ResolvedCall | None = None) -> None:
        """Destroy a group; by default the world, which destroys all groups."""
        call = call or ResolvedCall("destroy_process_group", self.rank, self.program.groups[0])
        OPERATIONS["destroy_process_group"].torch_call(self.dist, call, {}, self.of(call.group))
        if not call.group.id:
            self._groups.clear()
            self.connected = False
