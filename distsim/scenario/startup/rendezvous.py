"""Who opens the store, who registers, which keys are set and waited for, and what becomes of those
who wait in vain.

The order is torch's: the process that says rank 0 listens (unless a launcher's agent does), all
connect, each registers, the server counts them up to its own world size (time-out and 1 s), then
each sets its key and gets those of all others (TCPStore.cpp `waitForWorkers`, gloo's
`connectFullMesh`). `tests/data/startup.json` has what real processes came to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distsim.scenario.startup.failure_causes import (
    is_mpi_singleton,
    startup_causes,
    startup_warnings,
)
from distsim.scenario.startup.init_method import StoreAddress, rendezvous_info, store_address
from distsim.scenario.startup.records import (
    InitFailure,
    RendezvousInfo,
    StartupEnvironment,
    StartupEvent,
    StartupOutcome,
    StartupProcess,
    StartupResult,
    StoreKind,
)

_SECOND_NS = 10**9
#: gloo tries a connection five times, each as long as the time-out (gloo/transport/tcp/pair.cc,
#: `connect`).
_GLOO_CONNECT_ATTEMPTS = 5
_PORT_IN_USE_TEXT = (
    "The server socket has failed to listen on any local network address. port: {port}, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)


def simulate_startup(
    entrances: Sequence[StartupProcess], around: StartupEnvironment
) -> StartupResult:
    """What comes of it when these processes call init_process_group."""
    return _StartupSimulation(entrances, around).result()


class _StartupStore(NamedTuple):
    """A store that processes reach. ``owner``: the process that serves it, None where an agent or a
    file does.
    """

    where: StoreAddress
    owner: int | None


class _StartupSimulation:
    def __init__(self, entrances: Sequence[StartupProcess], around: StartupEnvironment) -> None:
        self.entrances, self.around = {e.rank: e for e in entrances}, around
        found = {e.rank: rendezvous_info(e) for e in entrances if not e.absent}
        self.refused = {r: f for r, f in found.items() if isinstance(f, InitFailure)}
        self.addresses = {r: f for r, f in found.items() if isinstance(f, RendezvousInfo)}
        self.places = {
            r: store_address(a, self.entrances[r].node, around) for r, a in self.addresses.items()
        }
        self.endings: dict[int, StartupOutcome] = {
            e.rank: StartupOutcome("absent") for e in entrances if e.absent
        }
        self.events: list[StartupEvent] = []
        self.stores: dict[StoreAddress, _StartupStore] = {}
        self.clashing: list[int] = []  # processes that find their port taken
        self.joined: dict[StoreAddress, list[int]] = {}

    def result(self) -> StartupResult:
        self._refuse()
        self._open()
        self._connect()
        self._exchange()
        endings = dict(sorted(self.endings.items()))
        kind, where, server = self._store()
        causes, waits = startup_causes(
            self.entrances,
            self.around,
            self.refused,
            self.addresses,
            self.places,
            self.clashing,
            endings,
        )
        remarks = startup_warnings(self.entrances.values())
        return StartupResult(
            kind,
            where,
            server,
            endings,
            tuple(self.events),
            causes,
            remarks,
            tuple(self.entrances.values()),
            waits,
        )

    def _store(self) -> tuple[StoreKind, str, str]:
        """(kind, where, who serves it) of the store that most name first."""
        if not self.addresses:
            return "tcp", "nowhere", "nobody"
        named = Counter(a.text for a in self.addresses.values())
        most = named.most_common(1)[0][0]
        rank, first = next((r, a) for r, a in self.addresses.items() if a.text == most)
        store = self.stores.get(self.places[rank])
        if first.kind != "tcp":
            server = {"file": "a file", "hash": "each process", "launcher": "MPI's launcher"}[
                first.kind
            ]
        else:
            server = (
                "nobody"
                if store is None
                else "the launcher's agent"
                if store.owner is None
                else f"rank {store.owner}"
            )
        return first.kind, first.text, server

    def _say(self, rank: int, kind: str, text: str) -> None:
        self.events.append(StartupEvent(rank, kind, text))

    # --- one stage after the other ---
    def _refuse(self) -> None:
        for rank, refusal in self.refused.items():
            self.endings[rank] = StartupOutcome("raises", refusal.error, refusal.text)
            self._say(rank, "raises", refusal.cause)

    def _open(self) -> None:
        """The processes that say rank 0 listen, on their own machine at the port they were
        given.
        """
        for rank, here in self.addresses.items():
            entrance, place = self.entrances[rank], self.places[rank]
            if here.kind != "tcp":
                if place not in self.stores:
                    self.stores[place] = _StartupStore(place, None)
                    self._say(rank, "opens", f"makes {here.text}" if here.kind == "file" else "")
                continue
            if entrance.agent and here.port not in self.around.ports_taken:
                self.stores.setdefault(place, _StartupStore(place, None))
            elif here.rank == 0 or entrance.agent:
                self._listen(rank, here, entrance)

    def _listen(self, rank: int, here: RendezvousInfo, entrance: StartupProcess) -> None:
        mine = StoreAddress("tcp", entrance.node, "", here.port)
        if mine in self.stores or here.port in self.around.ports_taken:
            self.clashing.append(rank)
            self.endings[rank] = StartupOutcome(
                "raises", "DistNetworkError", _PORT_IN_USE_TEXT.format(port=here.port)
            )
            self._say(rank, "raises", f"port {here.port} is taken")
            return
        self.stores[mine] = _StartupStore(mine, rank)
        self._say(rank, "opens", f"listens at port {here.port}")

    def _connect(self) -> None:
        """Each process goes to its address; the server counts who registers."""
        for rank in self._left():
            here, place, limit = (
                self.addresses[rank],
                self.places[rank],
                self.entrances[rank].timeout_ns,
            )
            if here.kind == "tcp" and place not in self.stores:
                if here.port in self.around.ports_taken and place.node is not None:
                    missing = (
                        "an answer of the port's program; none of torch's time-outs ends this wait"
                    )
                    self.endings[rank] = StartupOutcome("waits", "", "", 0, (), missing)
                else:
                    text = f"The client socket has timed out after {limit // 10**6}ms while trying to connect to"
                    text, missing = f"{text} ({here.host}, {here.port}).", f"a store at {here.text}"
                    self.endings[rank] = StartupOutcome(
                        "waits", "DistNetworkError", text, limit, self._servers(place), missing
                    )
                self._say(rank, "waits", f"no answer at {here.text}")
                continue
            self.joined.setdefault(place, []).append(rank)
            self._say(rank, "registers", "is here")
        for place, ranks in self.joined.items():
            self._count(self.stores[place], ranks)

    def _servers(self, place: StoreAddress) -> tuple[int, ...]:
        """Those who would have opened the store and do not come."""
        absent = [
            r
            for r, e in self.entrances.items()
            if self.endings.get(r, StartupOutcome("passes")).status in ("absent", "raises")
            and r not in self.addresses
            and e.rank == 0
        ]
        return tuple(absent) if place.node is not None else ()

    def _count(self, store: _StartupStore, ranks: list[int]) -> None:
        """The server waits for as many as its own world has; the others go on."""
        owner = store.owner
        if owner is None or owner not in ranks or store.where.kind != "tcp":
            return
        world, limit = self.addresses[owner].world_size, self.entrances[owner].timeout_ns
        if world == 0:
            self.endings[owner] = StartupOutcome(
                "raises", "ValueError", "TCPStore world size cannot be 0"
            )
        elif len(ranks) < world:
            text = f"Timed out after {limit // _SECOND_NS + 1} seconds waiting for clients. {len(ranks)}/{world} clients joined."
            missing = f"{world - len(ranks)} more of {world} to register"
            self.endings[owner] = StartupOutcome(
                "waits", "DistStoreError", text, limit + _SECOND_NS, self._gone(), missing
            )
            self._say(owner, "waits", f"{len(ranks)} of {world} are here")

    def _gone(self) -> tuple[int, ...]:
        """Processes that never come, or that raised."""
        return tuple(sorted(r for r, e in self.endings.items() if e.status in ("absent", "raises")))

    def _exchange(self) -> None:
        """Each sets its key and gets those of its world; a key that nobody sets is waited for."""
        keys: dict[StoreAddress, dict[int, int]] = {}
        left = [r for r in self._left() if self.addresses[r].kind != "launcher"]
        for rank in left:
            here = self.addresses[rank]
            if (
                self.entrances[rank].backend == "nccl"
            ):  # at first use of a communicator, rank 0's id is the only key
                keys.setdefault(self.places[rank], {})[here.rank] = rank
            elif not 0 <= here.rank < here.world_size:
                which = (
                    f"rank >= 0. {here.rank} vs 0"
                    if here.rank < 0
                    else f"rank < size. {here.rank} vs {here.world_size}"
                )
                self.endings[rank] = StartupOutcome(
                    "raises", "RuntimeError", f"enforce fail: {which}"
                )
                self._say(rank, "raises", f"says rank {here.rank} of {here.world_size}")
            else:
                keys.setdefault(self.places[rank], {})[here.rank] = rank
                self._say(rank, "sets", f"key {here.rank}: my address")
        gone, lacking = self._gone(), dict[tuple[StoreAddress, int], int | None]()
        for rank in self._left():
            if self.addresses[rank].kind != "launcher":
                place, world = self.places[rank], self.addresses[rank].world_size
                if (place, world) not in lacking:
                    lacking[place, world] = next(
                        (number for number in range(world) if number not in keys[place]), None
                    )
                self._get(rank, lacking[place, world], gone)
        for rank in self._left():
            self.endings[rank] = StartupOutcome("passes")
        self._apart()

    def _get(self, rank: int, lacking: int | None, gone: tuple[int, ...]) -> None:
        """``lacking``: the first key of its world that nobody sets."""
        here, limit = self.addresses[rank], self.entrances[rank].timeout_ns
        if here.kind == "file" and here.path in self.around.files_left:
            text = "Gloo connectFullMesh failed with Connect timeout"
            missing = f"ranks of the earlier run, whose addresses {here.path} still holds"
            self.endings[rank] = StartupOutcome(
                "waits", "RuntimeError", text, _GLOO_CONNECT_ATTEMPTS * limit, (), missing
            )
            self._say(rank, "waits", "gets an address of the earlier run")
            return
        if self.entrances[rank].backend == "nccl":
            outside = not 0 <= here.rank < here.world_size
            if lacking is not None or outside:
                self.endings[rank] = StartupOutcome(
                    "apart", missing="a communicator that never comes about"
                )
            return
        if lacking is None:
            self._say(rank, "gets", f"keys 0 to {here.world_size - 1}")
            return
        key = f"/default_pg/0//cpu//0/{lacking}"
        error, text, after = (
            "DistStoreError",
            f"wait timeout after {limit // 10**6}ms, keys: {key}",
            limit,
        )
        if here.kind == "file":
            error, text, after = "RuntimeError", "Wait timeout", limit + _SECOND_NS
        elif here.kind == "hash":
            text = "Wait timeout"
        self.endings[rank] = StartupOutcome(
            "waits", error, text, after, gone, f"the key of rank {lacking}"
        )
        self._say(rank, "waits", f"for key {lacking}")

    def _apart(self) -> None:
        """Who came through where others did not, or in a world of another size, has a group that
        fits nobody's.
        """
        sizes = {
            self.addresses[r].world_size
            for r in self.addresses
            if self.addresses[r].kind != "launcher"
        }
        failed = (
            any(e.status not in ("passes", "absent") for e in self.endings.values())
            or len(sizes) > 1
        )
        failed = failed or any(map(is_mpi_singleton, self.entrances.values()))
        for rank, ending in self.endings.items():
            if ending.status == "passes" and failed:
                self.endings[rank] = StartupOutcome(
                    "apart", missing="ranks that are not in its group"
                )

    def _left(self) -> list[int]:
        """Processes that are neither out nor through."""
        return [r for r in self.addresses if r not in self.endings]
