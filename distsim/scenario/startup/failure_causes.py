"""Why a start-up fails, in words: one cause per kind of mistake, those that follow from it left
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from distsim.scenario.startup.init_method import StoreAddress, is_loopback, resolves
from distsim.scenario.startup.records import (
    InitFailure,
    RendezvousInfo,
    StartupCause,
    StartupEnvironment,
    StartupOutcome,
    StartupProcess,
)

_MAX_RANKS_SHOWN = 8


def startup_causes(
    entrances: Mapping[int, StartupProcess],
    around: StartupEnvironment,
    refused: Mapping[int, InitFailure],
    addresses: Mapping[int, RendezvousInfo],
    places: Mapping[int, StoreAddress],
    clashing: Sequence[int],
    endings: Mapping[int, StartupOutcome],
) -> tuple[tuple[StartupCause, ...], tuple[str, ...]]:
    """The causes, the plainest first, empty where every process that comes gets through; and who
    waits for what, in lines.
    """
    told = _StartupCauseFinder(entrances, around, addresses, places, endings)
    lines = told.waiting()
    found = [
        *told.refusals(refused),
        *told.ports(clashing),
        *told.hosts(),
        *told.files(),
        *told.numbers(),
        *told.worlds(),
        *told.apart(),
    ]
    return tuple(
        cause._replace(message="\n".join((cause.message, *lines))) for cause in found
    ), lines


def startup_warnings(entrances: Iterable[StartupProcess]) -> tuple[StartupCause, ...]:
    """What MPI ignores (DS706)."""
    said = tuple(
        e.rank
        for e in entrances
        if e.backend == "mpi" and (e.rank_argument != -1 or e.world_size_argument != -1)
    )
    if not said:
        return ()
    text = "rank and world_size are given, and mpi ignores them: both come from its launcher"
    return (
        StartupCause(
            "DS706", said, text, "leave them out, and start the ranks with mpirun or srun"
        ),
    )


def is_mpi_singleton(entrance: StartupProcess) -> bool:
    """MPI outside its launcher: MPI_Init makes a world of one."""
    return (
        entrance.backend == "mpi"
        and entrance.launcher not in ("", "mpirun", "srun")
        and not entrance.absent
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_numbers_text(ranks)}"


def _numbers_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 3 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(r) for r in ranks[:_MAX_RANKS_SHOWN]]
    if len(ranks) > _MAX_RANKS_SHOWN:
        return f"{', '.join(shown)} and {len(ranks) - _MAX_RANKS_SHOWN} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _raise_verb(ranks: Sequence[int]) -> str:
    return "raises" if len(ranks) == 1 else "raise"


class _StartupCauseFinder:
    def __init__(
        self,
        entrances: Mapping[int, StartupProcess],
        around: StartupEnvironment,
        addresses: Mapping[int, RendezvousInfo],
        places: Mapping[int, StoreAddress],
        endings: Mapping[int, StartupOutcome],
    ) -> None:
        self.entrances, self.around, self.addresses, self.places, self.endings = (
            entrances,
            around,
            addresses,
            places,
            endings,
        )

    def waiting(self) -> tuple[str, ...]:
        """Who waits for what, and by which time-out torch ends that."""
        lines = []
        waiting = [rank for rank, ending in self.endings.items() if ending.status == "waits"]
        groups: dict[tuple[str, str, str, int], list[int]] = {}
        for rank in waiting:
            ending = self.endings[rank]
            groups.setdefault(
                (ending.missing, ending.error, ending.text, ending.after_ns), []
            ).append(rank)
        for (missing, error, text, after_ns), ranks in list(groups.items())[:4]:
            after = f"; after {after_ns / 1e9:g} s torch raises {error}: {text}" if after_ns else ""
            wait = "wait" if len(ranks) > 1 else "waits"
            lines.append(f"  {_ranks_text(ranks)} {wait} for {missing}{after}")
        apart = [rank for rank, ending in self.endings.items() if ending.status == "apart"]
        if apart:
            lines.append(
                f"  {_ranks_text(apart)} may come through, and then stand{'s' * (len(apart) == 1)} still in the first communication"
            )
        return tuple(lines)

    def refusals(self, refused: Mapping[int, InitFailure]) -> list[StartupCause]:
        groups: dict[InitFailure, list[int]] = {}
        for rank, refusal in refused.items():
            groups.setdefault(refusal, []).append(rank)
        return [
            StartupCause(
                r.code,
                tuple(ranks),
                f"{r.cause}\n  {_ranks_text(ranks)} {_raise_verb(ranks)} {r.error}: {r.text}",
                r.help,
            )
            for r, ranks in groups.items()
        ]

    def ports(self, clashing: Sequence[int]) -> list[StartupCause]:
        """A taken port. Two ranks that both say 0 clash too: that is told of their number."""
        taken = [r for r in clashing if self.addresses[r].port in self.around.ports_taken]
        if not taken:
            return []
        port, error = self.addresses[taken[0]].port, self.endings[taken[0]]
        text = (
            f"port {port} is taken on the machine of rank {taken[0]}, where the store would listen"
        )
        raised = f"  {_ranks_text(taken)} {_raise_verb(taken)} {error.error}: {error.text}"
        return [
            StartupCause(
                "DS123",
                tuple(taken),
                f"{text}\n{raised}",
                "give another port; `ss -ltnp` says who has this one, often a run that was not ended",
            )
        ]

    def hosts(self) -> list[StartupCause]:
        """Hosts that don't resolve, and addresses where nobody serves though somebody would
        elsewhere.
        """
        lost = [
            r
            for r, a in self.addresses.items()
            if a.kind == "tcp" and not resolves(a.host, self.around)
        ]
        found = []
        if lost:
            hosts = ", ".join(sorted({self.addresses[r].host for r in lost}))
            found.append(
                StartupCause(
                    "DS122",
                    tuple(lost),
                    f"{hosts} does not resolve, and {_ranks_text(lost)} look for the store there",
                    "`getent hosts NAME` on that machine must answer; else give an address in numbers",
                )
            )
        served = {
            self.places[r]
            for r, a in self.addresses.items()
            if a.kind == "tcp"
            and (a.rank == 0 or self.entrances[r].agent)
            and self.places[r].node in (None, self.entrances[r].node)
        }
        astray = [
            r
            for r, e in self.endings.items()
            if e.status == "waits"
            and e.error == "DistNetworkError"
            and r not in lost
            and (self.places[r] not in served or self.places[r].node is None)
        ]
        zeros = [r for r, a in self.addresses.items() if a.rank == 0 and a.kind == "tcp"]
        if astray and zeros:
            found.append(self._astray(astray, zeros[0]))
        return found

    def _astray(self, astray: list[int], zero: int) -> StartupCause:
        there = sorted({self.addresses[r].text for r in astray})
        theirs = self.addresses[zero]
        host = self.addresses[astray[0]].host
        if is_loopback(host) and any(
            self.entrances[r].node != self.entrances[zero].node for r in astray
        ):
            why = f"{host} is each machine itself, and the store is on machine {self.entrances[zero].node}"
        elif theirs.text in there:
            why = f"rank {zero}, which serves it, is on another machine"
        else:
            why = f"rank {zero} serves it at {theirs.text}"
        text = f"{_ranks_text(astray)} look{'s' * (len(astray) == 1)} for the store at {', '.join(there)}, where none is: {why}"
        return StartupCause(
            "DS122",
            tuple(astray),
            text,
            "MASTER_ADDR and MASTER_PORT name the machine of rank 0, the same on every rank",
        )

    def files(self) -> list[StartupCause]:
        """A file that an earlier run left; ranks that meet at different stores."""
        found = []
        stale = [
            r
            for r, a in self.addresses.items()
            if a.kind == "file" and a.path in self.around.files_left
        ]
        if stale:
            path = self.addresses[stale[0]].path
            found.append(
                StartupCause(
                    "DS126",
                    tuple(stale),
                    f"{path} was left by an earlier run: ranks find addresses of processes that are gone",
                    "remove it before each run, or name a fresh one: a run that is killed does not remove it",
                )
            )
        mine = [r for r, a in self.addresses.items() if a.kind == "hash" and a.world_size > 1]
        if mine:
            found.append(
                StartupCause(
                    "DS129",
                    tuple(mine),
                    "a HashStore lives in one process, so no rank ever finds another there",
                    "use a TCPStore or a FileStore; a HashStore is for threads of one process",
                )
            )
        kinds = {a.kind if a.kind != "file" else a.path for a in self.addresses.values()}
        if len(kinds) > 1:
            few = Counter(
                a.kind if a.kind != "file" else a.path for a in self.addresses.values()
            ).most_common()[-1][0]
            odd = tuple(r for r, a in self.addresses.items() if few in (a.kind, a.path))
            text = f"ranks don't look in one place: {_ranks_text(odd)} at {self.addresses[odd[0]].text}, the others elsewhere"
            found.append(StartupCause("DS122", odd, text, "give all ranks the same init_method"))
        return found

    def numbers(self) -> list[StartupCause]:
        """Ranks that are said twice, and ranks beyond the world."""
        found = []
        said: dict[int, list[int]] = {}
        for rank, here in self.addresses.items():
            if here.kind != "launcher":
                said.setdefault(here.rank, []).append(rank)
        for number, ranks in said.items():
            if len(ranks) > 1:
                text = f"{len(ranks)} processes say that they are rank {number} (the file counts them as {_numbers_text(ranks)})"
                advice = "every process needs a number of its own, 0 to world_size - 1"
                found.append(
                    StartupCause("DS124", tuple(ranks), text + self._raised(ranks), advice)
                )
        for rank, here in self.addresses.items():
            if here.kind != "launcher" and not 0 <= here.rank < max(here.world_size, 1):
                text = f"rank {rank} says that it is rank {here.rank} of {here.world_size}; numbers run from 0 to {here.world_size - 1}"
                advice = "count ranks from 0; RANK is the number over all machines"
                found.append(StartupCause("DS124", (rank,), text + self._raised([rank]), advice))
        return found

    def _raised(self, ranks: Sequence[int]) -> str:
        return "".join(
            f"\n  rank {r} raises {self.endings[r].error}: {self.endings[r].text}"
            for r in ranks
            if self.endings[r].status == "raises"
        )

    def worlds(self) -> list[StartupCause]:
        """World sizes that differ, or that are not the number of processes."""
        sizes = Counter(a.world_size for a in self.addresses.values() if a.kind != "launcher")
        if len(sizes) > 1:
            usual = sizes.most_common()[0][0]
            odd = tuple(
                r
                for r, a in self.addresses.items()
                if a.world_size != usual and a.kind != "launcher"
            )
            theirs = ", ".join(str(n) for n in sorted({self.addresses[r].world_size for r in odd}))
            text = f"world sizes differ: {_ranks_text(odd)} say{'s' * (len(odd) == 1)} {theirs}, the others {usual}"
            return [
                StartupCause(
                    "DS125",
                    odd,
                    text + self._raised(odd),
                    "give every process one and the same world_size",
                )
            ]
        size = next(iter(sizes), self.around.world_size)
        if size != self.around.world_size and sizes:
            text = f"every rank says that the world has {size} ranks, and {self.around.world_size} processes are started"
            return [
                StartupCause(
                    "DS125",
                    tuple(self.addresses),
                    text,
                    "world_size is nnodes times the processes of each machine",
                )
            ]
        return []

    def apart(self) -> list[StartupCause]:
        """MPI outside its launcher: a world of one in each process."""
        alone = tuple(r for r, e in self.entrances.items() if is_mpi_singleton(e))
        if not alone or self.around.world_size == 1:
            return []
        who = self.entrances[alone[0]].launcher
        text = f"mpi takes rank and world size from its own launcher; started by {who}, each process is rank 0 of a world of one"
        return [
            StartupCause(
                "DS125", alone, text, "start the ranks with mpirun, or with srun --mpi=pmix"
            )
        ]
