"""Simulates init_process_group: which process opens the store, which keys are set and awaited.

The order is torch's. The process that passes rank 0 listens (unless a launcher's agent does), all
processes connect, and each registers; the server waits until as many as its own world size have
registered (timeout plus 1 s). Then each process sets its key and gets the keys of all others
(TCPStore.cpp `waitForWorkers`, gloo's `connectFullMesh`). `tests/data/startup.json` records the
outcomes of real processes.

Times are not simulated: the result says who waits in vain, and after how long torch raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.scenario.startup.failure_causes import (
    StartupFacts,
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
#: gloo tries a connection five times, each as long as the timeout (gloo/transport/tcp/pair.cc,
#: `connect`).
_GLOO_CONNECT_ATTEMPTS = 5
_PORT_IN_USE_TEXT = (
    "The server socket has failed to listen on any local network address. port: {port}, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
#: What serves a store that is no TCPStore.
_SERVERS = {"file": "a file", "hash": "each process", "launcher": "MPI's launcher"}


def simulate_startup(
    processes: Sequence[StartupProcess], environment: StartupEnvironment
) -> StartupResult:
    """The result when these processes call init_process_group."""
    return _StartupSimulation(processes, environment).result()


class _StartupStore(NamedTuple):
    """A store that processes can reach.

    ``owner``: the process that serves it, None if an agent or a file does.
    """

    where: StoreAddress
    owner: int | None


class _StoreSummary(NamedTuple):
    """The store in words, as `StartupResult` holds it."""

    kind: StoreKind
    where: str
    server: str


class _StartupSimulation:
    """Stages of a start-up, one after the other, for all processes.

    A process is pending until ``outcomes`` holds its outcome.
    """

    def __init__(
        self, processes: Sequence[StartupProcess], environment: StartupEnvironment
    ) -> None:
        self.processes = {process.rank: process for process in processes}
        self.environment = environment
        self.refused: dict[int, InitFailure] = {}
        self.addresses: dict[int, RendezvousInfo] = {}
        self.outcomes: dict[int, StartupOutcome] = {}
        for process in processes:
            if process.absent:
                self.outcomes[process.rank] = StartupOutcome("absent")
                continue
            info = rendezvous_info(process)
            if isinstance(info, InitFailure):
                self.refused[process.rank] = info
            else:
                self.addresses[process.rank] = info
        self.places = {
            rank: store_address(address, self.processes[rank].node, environment)
            for rank, address in self.addresses.items()
        }
        self.events: list[StartupEvent] = []
        self.stores: dict[StoreAddress, _StartupStore] = {}
        self.port_conflicts: list[int] = []  # processes that find their port in use
        self.registered: dict[StoreAddress, list[int]] = {}

    def result(self) -> StartupResult:
        self._raise_refusals()
        self._open_stores()
        self._connect()
        self._exchange_keys()
        outcomes = dict(sorted(self.outcomes.items()))
        diagnosis = startup_causes(
            StartupFacts(
                self.processes,
                self.environment,
                self.refused,
                self.addresses,
                self.places,
                self.port_conflicts,
                outcomes,
            )
        )
        return StartupResult(
            *self._store_summary(),
            outcomes,
            tuple(self.events),
            diagnosis.causes,
            startup_warnings(self.processes.values()),
            tuple(self.processes.values()),
            diagnosis.waits,
            self.environment,
        )

    def _store_summary(self) -> _StoreSummary:
        """The store that most processes name; the first one of several."""
        if not self.addresses:
            return _StoreSummary("tcp", "nowhere", "nobody")
        counts = Counter(address.text for address in self.addresses.values())
        most_named, _ = counts.most_common(1)[0]
        rank = next(r for r, address in self.addresses.items() if address.text == most_named)
        kind = self.addresses[rank].kind
        return _StoreSummary(kind, most_named, self._server_text(rank))

    def _server_text(self, rank: int) -> str:
        """What serves the store that a rank names."""
        kind = self.addresses[rank].kind
        if kind != "tcp":
            return _SERVERS[kind]
        store = self.stores.get(self.places[rank])
        if store is None:
            return "nobody"
        return "the launcher's agent" if store.owner is None else f"rank {store.owner}"

    def _add_event(self, rank: int, kind: str, text: str) -> None:
        self.events.append(StartupEvent(rank, kind, text))

    def _pending(self) -> list[int]:
        """Processes whose outcome is not known yet."""
        return [rank for rank in self.addresses if rank not in self.outcomes]

    def _pending_with_store(self) -> list[int]:
        """Those that exchange keys; MPI's launcher makes a store unnecessary."""
        return [rank for rank in self._pending() if self.addresses[rank].kind != "launcher"]

    # --- refused arguments and stores ---
    def _raise_refusals(self) -> None:
        for rank, refusal in self.refused.items():
            self.outcomes[rank] = StartupOutcome("raises", refusal.error, refusal.text)
            self._add_event(rank, "raises", refusal.cause)

    def _open_stores(self) -> None:
        """The processes that pass rank 0 listen, on their own machine at the port they pass."""
        for rank, address in self.addresses.items():
            process, place = self.processes[rank], self.places[rank]
            if address.kind != "tcp":
                if place not in self.stores:
                    self.stores[place] = _StartupStore(place, None)
                    text = f"makes {address.text}" if address.kind == "file" else ""
                    self._add_event(rank, "opens", text)
            elif process.agent and address.port not in self.environment.ports_taken:
                self.stores.setdefault(place, _StartupStore(place, None))
            elif address.rank == 0 or process.agent:
                self._listen(rank, address.port)

    def _listen(self, rank: int, port: int) -> None:
        place = StoreAddress("tcp", self.processes[rank].node, "", port)
        if place in self.stores or port in self.environment.ports_taken:
            self.port_conflicts.append(rank)
            text = _PORT_IN_USE_TEXT.format(port=port)
            self.outcomes[rank] = StartupOutcome("raises", "DistNetworkError", text)
            self._add_event(rank, "raises", f"port {port} is taken")
            return
        self.stores[place] = _StartupStore(place, rank)
        self._add_event(rank, "opens", f"listens at port {port}")

    # --- connecting ---
    def _connect(self) -> None:
        """Each process connects to its address; servers count the processes that register."""
        for rank in self._pending():
            place = self.places[rank]
            if self.addresses[rank].kind == "tcp" and place not in self.stores:
                self.outcomes[rank] = self._outcome_without_store(rank)
                self._add_event(rank, "waits", f"no answer at {self.addresses[rank].text}")
                continue
            self.registered.setdefault(place, []).append(rank)
            self._add_event(rank, "registers", "is here")
        for place, ranks in self.registered.items():
            self._count_registrations(self.stores[place], ranks)

    def _outcome_without_store(self, rank: int) -> StartupOutcome:
        """A process connects to an address where no store is."""
        address, place = self.addresses[rank], self.places[rank]
        if address.port in self.environment.ports_taken and place.node is not None:
            missing = "an answer from the program on this port; no torch timeout ends this wait"
            return StartupOutcome("waits", missing=missing)
        timeout_ns = self.processes[rank].timeout_ns
        text = (
            f"The client socket has timed out after {timeout_ns // 10**6}ms "
            f"while trying to connect to ({address.host}, {address.port})."
        )
        return StartupOutcome(
            "waits",
            "DistNetworkError",
            text,
            timeout_ns,
            self._missing_servers(place),
            f"a store at {address.text}",
        )

    def _missing_servers(self, place: StoreAddress) -> tuple[int, ...]:
        """Processes that would have opened the store, and are absent or raised."""
        if place.node is None:
            return ()
        return tuple(rank for rank in self._failed() if rank == 0 and rank not in self.addresses)

    def _failed(self) -> tuple[int, ...]:
        """Processes that are absent or raised, so that the others wait for them in vain."""
        statuses = {rank: outcome.status for rank, outcome in self.outcomes.items()}
        return tuple(sorted(r for r, status in statuses.items() if status in ("absent", "raises")))

    def _count_registrations(self, store: _StartupStore, ranks: list[int]) -> None:
        """The server waits for as many as its own world has; the other processes go on."""
        owner = store.owner
        if owner is None or owner not in ranks or store.where.kind != "tcp":
            return
        world_size = self.addresses[owner].world_size
        timeout_ns = self.processes[owner].timeout_ns
        if world_size == 0:
            text = "TCPStore world size cannot be 0"
            self.outcomes[owner] = StartupOutcome("raises", "ValueError", text)
            return
        if len(ranks) >= world_size:
            return
        text = (
            f"Timed out after {timeout_ns // _SECOND_NS + 1} seconds waiting for clients. "
            f"{len(ranks)}/{world_size} clients joined."
        )
        missing = world_size - len(ranks)
        missing_text = f"{missing} missing rank{'s' if missing > 1 else ''} (of {world_size})"
        self.outcomes[owner] = StartupOutcome(
            "waits",
            "DistStoreError",
            text,
            timeout_ns + _SECOND_NS,
            self._failed(),
            missing_text,
        )
        self._add_event(owner, "waits", f"{len(ranks)} of {world_size} ranks have arrived")

    # --- keys ---
    def _exchange_keys(self) -> None:
        """Each process sets its key and gets those of its world; a missing key is awaited."""
        set_keys: dict[StoreAddress, set[int]] = {}
        for rank in self._pending_with_store():
            if self._sets_key(rank):
                set_keys.setdefault(self.places[rank], set()).add(self.addresses[rank].rank)
        failed = self._failed()
        missing_keys: dict[tuple[StoreAddress, int], int | None] = {}
        for rank in self._pending_with_store():
            place, world_size = self.places[rank], self.addresses[rank].world_size
            if (place, world_size) not in missing_keys:
                missing = (key for key in range(world_size) if key not in set_keys[place])
                missing_keys[place, world_size] = next(missing, None)
            self._get_keys(rank, missing_keys[place, world_size], failed)
        for rank in self._pending():
            self.outcomes[rank] = StartupOutcome("passes")
        self._mark_separate_groups()

    def _publishes_communicator_id(self, rank: int) -> bool:
        """Whether the processes connect like those of NCCL, at the first use of a communicator."""
        return BACKEND_PROFILES[self.processes[rank].backend].publishes_communicator_id

    def _sets_key(self, rank: int) -> bool:
        """Whether a process sets its key; gloo refuses a rank outside the world."""
        address = self.addresses[rank]
        if self._publishes_communicator_id(rank):
            # Only the registration counts here: the one key that is exchanged, rank 0's id, is set
            # when a communicator is used first.
            return True
        if 0 <= address.rank < address.world_size:
            self._add_event(rank, "sets", f"key {address.rank}: my address")
            return True
        if address.rank < 0:
            comparison = f"rank >= 0. {address.rank} vs 0"
        else:
            comparison = f"rank < size. {address.rank} vs {address.world_size}"
        text = f"enforce fail: {comparison}"
        self.outcomes[rank] = StartupOutcome("raises", "RuntimeError", text)
        self._add_event(rank, "raises", f"says rank {address.rank} of {address.world_size}")
        return False

    def _get_keys(self, rank: int, missing_key: int | None, failed: tuple[int, ...]) -> None:
        """``missing_key``: the first key of its world that no process sets."""
        address, process = self.addresses[rank], self.processes[rank]
        if address.kind == "file" and address.path in self.environment.files_left:
            self.outcomes[rank] = StartupOutcome(
                "waits",
                "RuntimeError",
                "Gloo connectFullMesh failed with Connect timeout",
                _GLOO_CONNECT_ATTEMPTS * process.timeout_ns,
                (),
                f"ranks of the earlier run, whose addresses are still in {address.path}",
            )
            self._add_event(rank, "waits", "gets an address of the earlier run")
            return
        if self._publishes_communicator_id(rank):
            is_outside = not 0 <= address.rank < address.world_size
            if missing_key is not None or is_outside:
                missing = "a communicator that is never created"
                self.outcomes[rank] = StartupOutcome("apart", missing=missing)
            return
        if missing_key is None:
            self._add_event(rank, "gets", f"keys 0 to {address.world_size - 1}")
            return
        self.outcomes[rank] = self._outcome_without_key(rank, missing_key, failed)
        self._add_event(rank, "waits", f"for key {missing_key}")

    def _outcome_without_key(
        self, rank: int, missing_key: int, failed: tuple[int, ...]
    ) -> StartupOutcome:
        """The timeout of ``get``, which each kind of store words differently."""
        kind, timeout_ns = self.addresses[rank].kind, self.processes[rank].timeout_ns
        missing = f"the store key of rank {missing_key}"
        if kind == "file":
            after_ns = timeout_ns + _SECOND_NS
            return StartupOutcome(
                "waits", "RuntimeError", "Wait timeout", after_ns, failed, missing
            )
        text = "Wait timeout"
        if kind != "hash":
            key = f"/default_pg/0//cpu//0/{missing_key}"
            text = f"wait timeout after {timeout_ns // 10**6}ms, keys: {key}"
        return StartupOutcome("waits", "DistStoreError", text, timeout_ns, failed, missing)

    def _mark_separate_groups(self) -> None:
        """A process that gets through where others do not has a group without other members.

        The same holds where world sizes differ, and for MPI without its launcher.
        """
        world_sizes = {
            address.world_size for address in self.addresses.values() if address.kind != "launcher"
        }
        statuses = {outcome.status for outcome in self.outcomes.values()}
        is_separate = (
            not statuses <= {"passes", "absent"}
            or len(world_sizes) > 1
            or any(map(is_mpi_singleton, self.processes.values()))
        )
        if not is_separate:
            return
        for rank, outcome in self.outcomes.items():
            if outcome.status == "passes":
                missing = "ranks that are not in its group"
                self.outcomes[rank] = StartupOutcome("apart", missing=missing)
