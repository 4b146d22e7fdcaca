"""Why a start-up fails, in words: one cause per kind of mistake, without those that follow from it.

The simulation (`distsim.scenario.startup.rendezvous`) decides which processes fail or wait; this
module only compares what the processes passed, and names the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distsim.scenario.startup.init_method import StoreAddress, is_loopback, resolves
from distsim.scenario.startup.records import (
    NOT_PASSED,
    InitFailure,
    RendezvousInfo,
    StartupCause,
    StartupEnvironment,
    StartupOutcome,
    StartupProcess,
)

_MAX_RANKS_SHOWN = 8
_MAX_WAITS_SHOWN = 4


class StartupFacts(NamedTuple):
    """A simulated start-up; mappings are by rank.

    ``refused``: processes whose arguments torch rejects. ``addresses``: what all others look for;
    ``places``: where that leads. ``port_conflicts``: ranks that could not listen at their port.
    """

    processes: Mapping[int, StartupProcess]
    environment: StartupEnvironment
    refused: Mapping[int, InitFailure]
    addresses: Mapping[int, RendezvousInfo]
    places: Mapping[int, StoreAddress]
    port_conflicts: Sequence[int]
    outcomes: Mapping[int, StartupOutcome]


class StartupDiagnosis(NamedTuple):
    """The causes of a failure, and which processes wait for what, in lines."""

    causes: tuple[StartupCause, ...]
    waits: tuple[str, ...]


def startup_causes(facts: StartupFacts) -> StartupDiagnosis:
    """The causes, the plainest first; empty if every process that takes part gets through."""
    finder = _StartupCauseFinder(facts)
    waits = finder.waits()
    causes = [
        *finder.refusals(),
        *finder.taken_ports(),
        *finder.unresolvable_hosts(),
        *finder.missing_stores(),
        *finder.stale_files(),
        *finder.hash_stores(),
        *finder.different_stores(),
        *finder.duplicate_ranks(),
        *finder.ranks_out_of_range(),
        *finder.world_sizes(),
        *finder.mpi_singletons(),
    ]
    with_waits = [cause._replace(message="\n".join((cause.message, *waits))) for cause in causes]
    return StartupDiagnosis(tuple(with_waits), waits)


def startup_warnings(processes: Iterable[StartupProcess]) -> tuple[StartupCause, ...]:
    """Arguments that MPI ignores (DS706)."""
    mpi_processes = [process for process in processes if process.backend == "mpi"]
    ranks = tuple(process.rank for process in mpi_processes if _passes_numbers(process))
    if not ranks:
        return ()
    message = "mpi ignores `rank` and `world_size`, because the MPI launcher sets both"
    remedy = "remove both arguments, and start the ranks with mpirun or srun"
    return (StartupCause("DS706", ranks, message, remedy),)


def _passes_numbers(process: StartupProcess) -> bool:
    return process.rank_argument != NOT_PASSED or process.world_size_argument != NOT_PASSED


def is_mpi_singleton(process: StartupProcess) -> bool:
    """MPI without its launcher: MPI_Init makes a world of one."""
    if process.backend != "mpi" or process.absent:
        return False
    return process.launcher not in ("", "mpirun", "srun")


class _StartupCauseFinder:
    def __init__(self, facts: StartupFacts) -> None:
        self.facts = facts
        self.processes = facts.processes
        self.environment = facts.environment
        self.addresses = facts.addresses
        self.places = facts.places
        self.outcomes = facts.outcomes

    # --- waits ---
    def waits(self) -> tuple[str, ...]:
        """Which ranks wait for what, and the error by which torch ends the wait."""
        ranks_by_wait: dict[StartupOutcome, list[int]] = {}
        for rank, outcome in self.outcomes.items():
            if outcome.status == "waits":
                # Ranks that wait for the same thing share a line, whichever ranks could help them.
                ranks_by_wait.setdefault(outcome._replace(needs=()), []).append(rank)
        lines = [_wait_line(outcome, ranks) for outcome, ranks in ranks_by_wait.items()]
        lines = lines[:_MAX_WAITS_SHOWN]
        apart = [rank for rank, outcome in self.outcomes.items() if outcome.status == "apart"]
        if apart:
            lines.append(
                f"  {_ranks_text(apart)} may pass the rendezvous, but then "
                f"block{_verb_s(apart)} in the first communication"
            )
        return tuple(lines)

    # --- causes ---
    def refusals(self) -> list[StartupCause]:
        """Arguments that torch rejects."""
        ranks_by_refusal: dict[InitFailure, list[int]] = {}
        for rank, refusal in self.facts.refused.items():
            ranks_by_refusal.setdefault(refusal, []).append(rank)
        found = []
        for refusal, ranks in ranks_by_refusal.items():
            raised = f"  {_ranks_text(ranks)} raise{_verb_s(ranks)} {refusal.error}: {refusal.text}"
            message = f"{refusal.cause}\n{raised}"
            found.append(StartupCause(refusal.code, tuple(ranks), message, refusal.help))
        return found

    def taken_ports(self) -> list[StartupCause]:
        """A port that another program uses.

        Two ranks that both pass rank 0 conflict too; `duplicate_ranks` reports that.
        """
        taken = [
            rank
            for rank in self.facts.port_conflicts
            if self.addresses[rank].port in self.environment.ports_taken
        ]
        if not taken:
            return []
        first, outcome = taken[0], self.outcomes[taken[0]]
        message = (
            f"port {self.addresses[first].port} is already in use on the node of rank {first}, "
            "where the store would listen\n"
            f"  {_ranks_text(taken)} raise{_verb_s(taken)} {outcome.error}: {outcome.text}"
        )
        port = self.addresses[first].port
        remedy = (
            f"use another port; `ss -ltnp` shows which process uses port {port} (often a previous "
            "run)"
        )
        return [StartupCause("DS123", tuple(taken), message, remedy)]

    def unresolvable_hosts(self) -> list[StartupCause]:
        ranks = [rank for rank in self.addresses if self._is_unresolvable(rank)]
        if not ranks:
            return []
        hosts = sorted({self.addresses[rank].host for rank in ranks})
        names = f"host name {hosts[0]} does" if len(hosts) == 1 else f"host names {hosts} do"
        message = (
            f"the {names} not resolve, but {_ranks_text(ranks)} look{_verb_s(ranks)} for the "
            "store there"
        )
        remedy = (
            f"check that `getent hosts {hosts[0]}` works on rank {ranks[0]}'s node, or use an IP "
            "address"
        )
        return [StartupCause("DS122", tuple(ranks), message, remedy)]

    def _is_unresolvable(self, rank: int) -> bool:
        address = self.addresses[rank]
        return address.kind == "tcp" and not resolves(address.host, self.environment)

    def missing_stores(self) -> list[StartupCause]:
        """Ranks that look for the store at an address where no process serves it."""
        tcp = {rank: info for rank, info in self.addresses.items() if info.kind == "tcp"}
        servers = [rank for rank, info in tcp.items() if info.rank == 0]
        served = {self.places[rank] for rank in self.addresses if self._serves_its_address(rank)}
        astray = [rank for rank in self.outcomes if self._is_astray(rank, served)]
        return [self._missing_store(astray, servers[0])] if astray and servers else []

    def _serves_its_address(self, rank: int) -> bool:
        """Whether a process, or its launcher's agent, is to serve the store on its own node."""
        address, process = self.addresses[rank], self.processes[rank]
        if address.kind != "tcp" or not (address.rank == 0 or process.agent):
            return False
        return self.places[rank].node in (None, process.node)

    def _is_astray(self, rank: int, served: set[StoreAddress]) -> bool:
        outcome = self.outcomes[rank]
        if outcome.status != "waits" or outcome.error != "DistNetworkError":
            return False
        if self._is_unresolvable(rank):
            return False
        return self.places[rank] not in served or self.places[rank].node is None

    def _missing_store(self, astray: list[int], server: int) -> StartupCause:
        searched = sorted({self.addresses[rank].text for rank in astray})
        reason = self._reason_for_missing_store(astray, server, searched)
        message = (
            f"{_ranks_text(astray)} look{_verb_s(astray)} for the store at "
            f"{', '.join(searched)}, where no store exists: {reason}"
        )
        remedy = (
            "set MASTER_ADDR and MASTER_PORT to the node of rank 0 and its port, the same on "
            "every rank"
        )
        return StartupCause("DS122", tuple(astray), message, remedy)

    def _reason_for_missing_store(self, astray: list[int], server: int, searched: list[str]) -> str:
        server_node = self.processes[server].node
        host = self.addresses[astray[0]].host
        if is_loopback(host) and any(self.processes[rank].node != server_node for rank in astray):
            return f"on every node, {host} is that node itself; the store is on node {server_node}"
        if self.addresses[server].text in searched:
            return f"rank {server}, which serves the store, is on another node"
        return f"rank {server} serves the store at {self.addresses[server].text}"

    def stale_files(self) -> list[StartupCause]:
        """A FileStore that an earlier run left."""
        files = {rank: info.path for rank, info in self.addresses.items() if info.kind == "file"}
        stale = [rank for rank, path in files.items() if path in self.environment.files_left]
        if not stale:
            return []
        path = self.addresses[stale[0]].path
        message = (
            f"{path} remains from an earlier run, so ranks find the addresses of processes that "
            "have exited"
        )
        remedy = f"delete {path} before each run (a killed run leaves the file), or use a new path"
        return [StartupCause("DS126", tuple(stale), message, remedy)]

    def hash_stores(self) -> list[StartupCause]:
        """A HashStore, which no other process can reach."""
        hashes = {rank: info for rank, info in self.addresses.items() if info.kind == "hash"}
        ranks = tuple(rank for rank, info in hashes.items() if info.world_size > 1)
        if not ranks:
            return []
        message = "a HashStore exists only inside one process, so ranks cannot find each other"
        remedy = "use a TCPStore or a FileStore; a HashStore is for threads of one process"
        return [StartupCause("DS129", ranks, message, remedy)]

    def different_stores(self) -> list[StartupCause]:
        """Ranks that use different kinds of stores, or different files."""
        ranks_by_store: dict[str, list[int]] = {}
        for rank, address in self.addresses.items():
            store = address.path if address.kind == "file" else address.kind
            ranks_by_store.setdefault(store, []).append(rank)
        if len(ranks_by_store) < 2:
            return []
        counts = Counter({store: len(ranks) for store, ranks in ranks_by_store.items()})
        rarest, _ = counts.most_common()[-1]
        odd = tuple(
            rank
            for rank, address in self.addresses.items()
            if rarest in (address.kind, address.path)
        )
        message = (
            f"ranks use different addresses: {_ranks_text(odd)} use "
            f"{self.addresses[odd[0]].text}, the others another one"
        )
        return [StartupCause("DS122", odd, message, "give all ranks the same init_method")]

    # --- ranks and world sizes ---
    def _numbered(self) -> dict[int, RendezvousInfo]:
        """The processes that pass their rank and world size; MPI's come from its launcher."""
        return {rank: info for rank, info in self.addresses.items() if info.kind != "launcher"}

    def duplicate_ranks(self) -> list[StartupCause]:
        processes_by_number: dict[int, list[int]] = {}
        for rank, info in self._numbered().items():
            processes_by_number.setdefault(info.rank, []).append(rank)
        found = []
        for number, ranks in processes_by_number.items():
            if len(ranks) < 2:
                continue
            both = "both" if len(ranks) == 2 else "all"
            message = f"{_ranks_text(ranks)} of the scenario {both} have the rank number {number}"
            remedy = "give every process its own rank, from 0 to world_size - 1"
            found.append(self._cause_with_errors("DS124", ranks, message, remedy))
        return found

    def ranks_out_of_range(self) -> list[StartupCause]:
        found = []
        for rank, info in self._numbered().items():
            if 0 <= info.rank < max(info.world_size, 1):
                continue
            message = (
                f"rank {rank} claims to be rank {info.rank} of {info.world_size}; ranks go from "
                f"0 to {info.world_size - 1}"
            )
            remedy = "count ranks from 0; RANK counts over all nodes"
            found.append(self._cause_with_errors("DS124", [rank], message, remedy))
        return found

    def world_sizes(self) -> list[StartupCause]:
        """World sizes that differ, or that are not the number of processes."""
        numbered = self._numbered()
        sizes = Counter(info.world_size for info in numbered.values())
        if not sizes:
            return []
        usual, _ = sizes.most_common(1)[0]
        if len(sizes) > 1:
            odd = [rank for rank, info in numbered.items() if info.world_size != usual]
            odd_sizes = sorted({numbered[rank].world_size for rank in odd})
            message = (
                f"{_ranks_text(odd)} use{_verb_s(odd)} world_size "
                f"{', '.join(map(str, odd_sizes))}, all other ranks use {usual}"
            )
            remedy = "give every process the same world_size"
            return [self._cause_with_errors("DS125", odd, message, remedy)]
        if usual == self.environment.world_size:
            return []
        message = (
            f"every rank expects a world of {usual} ranks, but {self.environment.world_size} "
            "processes start"
        )
        remedy = "set world_size to nnodes times the processes per node"
        return [StartupCause("DS125", tuple(self.addresses), message, remedy)]

    def _cause_with_errors(
        self, code: str, ranks: Sequence[int], message: str, remedy: str
    ) -> StartupCause:
        """A cause with the errors that its ranks raise."""
        lines = [message]
        for rank in ranks:
            outcome = self.outcomes[rank]
            if outcome.status == "raises":
                lines.append(f"  rank {rank} raises {outcome.error}: {outcome.text}")
        return StartupCause(code, tuple(ranks), "\n".join(lines), remedy)

    def mpi_singletons(self) -> list[StartupCause]:
        """MPI without its launcher: a world of one in each process."""
        ranks = tuple(rank for rank, process in self.processes.items() if is_mpi_singleton(process))
        if not ranks or self.environment.world_size == 1:
            return []
        message = (
            "mpi gets rank and world size from its own launcher; under "
            f"{self.processes[ranks[0]].launcher}, each process is rank 0 of a world of one"
        )
        remedy = "start the ranks with mpirun, or with srun --mpi=pmix"
        return [StartupCause("DS125", ranks, message, remedy)]


# --- texts ---
def _wait_line(outcome: StartupOutcome, ranks: Sequence[int]) -> str:
    line = f"  {_ranks_text(ranks)} wait{_verb_s(ranks)} for {outcome.missing}"
    if outcome.after_ns:
        seconds = outcome.after_ns / 1e9
        line += f"; after {seconds:g} s torch raises {outcome.error}: {outcome.text}"
    return line


def _ranks_text(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {_numbers_text(ranks)}"


def _numbers_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 3 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks[:_MAX_RANKS_SHOWN]]
    if len(ranks) > _MAX_RANKS_SHOWN:
        return f"{', '.join(shown)} and {len(ranks) - _MAX_RANKS_SHOWN} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _verb_s(ranks: Sequence[int]) -> str:
    """The ending of a verb whose subject is these ranks."""
    return "s" if len(ranks) == 1 else ""
