"""Lets the launchers on several nodes act as one.

The first launcher (number 0) decides when the run ends, and reports it. Progress files, decisions,
clock offsets and records travel through the store that the ranks use too, under a prefix of their
own. `LaunchCoordinator` is the trivial case of a single launcher.

Keys in the store:

- here/N: launcher N has arrived
- ready/R: how many launchers are ready for repetition R
- boards/N: the progress files of launcher N
- end: the reason for the end of the run
- heard/N: launcher N knows that the run ended
- clock/WHEN/N/TRIP, record/N, status, bye/N

Large values are cut into chunks, see `_put`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from distsim.common.errors import EnvironmentFault
from distsim.real.shared.job import pack_record, unpack_record

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

StoreAnswer = TypeVar("StoreAnswer")

#: The largest value that is put into the store.
_CHUNK_BYTES = 1 << 20
#: Round trips of which the shortest gives the clock offset.
_ROUND_TRIPS = 20
#: A launcher that has not acknowledged the end after this time counts as dead.
_ACK_TIMEOUT_S = 10
#: How often the launchers exchange the progress of their ranks.
_SHARE_INTERVAL_S = 0.1
#: Exit status if the first launcher does not answer.
_EXIT_ENVIRONMENT_FAILED = 4
#: In place of the error of a clock offset: the offset is unknown.
_UNKNOWN_ERROR_NS = 2**62
#: rank -> (contents of its progress file, exit status)
ProgressByRank = dict[int, tuple[bytes, int | None]]


class LaunchCoordinator:
    """A single launcher for all ranks: nothing has to travel."""

    first = True
    hosts = 1
    gone: tuple[int, ...] = ()  # launchers that no longer answer

    def ready(self, repetition: int, local_ready: bool) -> bool:
        """Whether all ranks are ready to start a repetition, given those of this machine."""
        return local_ready

    def share(self, progress: ProgressByRank) -> ProgressByRank:
        """Give the progress of the local ranks, get that of all known ranks."""
        return progress

    def decide(self, reason: str) -> str:
        """The reason why the run ends, given the local reason; empty while it continues."""
        return reason

    def offset(self, when: str) -> tuple[int, int]:
        """(what to add to this machine's clock, largest error) in ns; ``when``: start or end."""
        return 0, 0

    def gather(self, record: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        """The records of all machines, on the first launcher."""
        return [record]

    def agree_on(self, status: int) -> int:
        """The exit status of the first launcher."""
        return status


class _SharedStore:
    """The ranks' store, under a prefix of its own.

    The store lives in the first launcher, so the loss of the connection means that this launcher
    ended, and is reported so.
    """

    def __init__(self, store: Store) -> None:
        import torch.distributed

        dist: ModuleType = torch.distributed
        self._store: Store = dist.PrefixStore("distsim", store)
        self._lost: type[Exception] = dist.DistError

    def _ask(self, request: Callable[[Store], StoreAnswer]) -> StoreAnswer:
        try:
            return request(self._store)
        except self._lost:
            raise EnvironmentFault(
                "the launcher of node 0 has exited", "look at its output"
            ) from None

    def has(self, key: str) -> bool:
        return self._ask(lambda store: store.check([key]))

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key))

    def set(self, key: str, value: str | bytes) -> None:
        # TCPStore accepts bytes too (TCPStore.hpp); its Python annotation does not say so.
        self._ask(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def add(self, key: str, amount: int = 0) -> int:
        """Increase a counter, and return its new value."""
        return self._ask(lambda store: store.add(key, amount))


class StoreCoordinator(LaunchCoordinator):
    """One of several launchers; ``number`` 0 decides and reports."""

    def __init__(self, store: Store, number: int, hosts: int, wait_s: float) -> None:
        self.store = _SharedStore(store)
        self.number, self.hosts, self.wait_s = number, hosts, wait_s
        self.first = number == 0
        self._announced = -1  # the last repetition for which this launcher was ready
        self._shared_at_s = 0.0
        self._remote_progress: ProgressByRank = {}
        self._knows_end = False

    @property
    def _others(self) -> list[int]:
        """The other launchers, without those that no longer answer."""
        return [k for k in range(self.hosts) if k != self.number and k not in self.gone]

    def meet(self, ended: Callable[[], str]) -> None:
        """Wait until every launcher has arrived, or until ``ended`` names a signal.

        Raises EnvironmentFault with the launchers that did not arrive.
        """
        self.store.set(f"here/{self.number}", b"1")
        late = self._missing([f"here/{k}" for k in range(self.hosts)], self.wait_s, ended)
        if late and ended():
            raise EnvironmentFault(f"ended by {ended()}; not all launchers had arrived")
        if late:
            names = ", ".join(key.partition("/")[2] for key in late)
            raise EnvironmentFault(
                f"{self.hosts - len(late)} of {self.hosts} launchers arrived "
                f"within {self.wait_s:.0f} s; missing: {names}",
                "start the command on every node, each with its own --node-rank",
            )

    def _missing(
        self, keys: Sequence[str], wait_s: float, ended: Callable[[], str] = str
    ) -> list[str]:
        """Wait for keys; return those that are still missing in the end."""
        deadline = time.monotonic() + wait_s
        while True:
            missing = [key for key in keys if not self.store.has(key)]
            if not missing or time.monotonic() >= deadline or ended():
                return missing
            time.sleep(0.01)

    def ready(self, repetition: int, local_ready: bool) -> bool:
        """Whether the ranks of all launchers are ready to start a repetition."""
        if not local_ready:
            return False
        if self._announced < repetition:
            self._announced = repetition
            self.store.add(f"ready/{repetition}", 1)
        return self.store.add(f"ready/{repetition}") >= self.hosts

    def share(self, progress: ProgressByRank) -> ProgressByRank:
        """Publish the progress of the local ranks; the first launcher gets that of all ranks.

        This happens ten times a second at most; in between, the last known state is returned.
        """
        if time.monotonic() - self._shared_at_s > _SHARE_INTERVAL_S:
            self._shared_at_s = time.monotonic()
            self._put(f"boards/{self.number}", _pack_progress(progress))
            if self.first:
                self._read_remote_progress()
        return {**self._remote_progress, **progress}

    def _read_remote_progress(self) -> None:
        for other in range(self.hosts):
            if other != self.number and self.store.has(f"boards/{other}/size"):
                self._remote_progress |= _unpack_progress(self._get(f"boards/{other}"))

    def decide(self, reason: str) -> str:
        """The reason for the end of the run, once it is decided; else empty."""
        may_end_run = self.first or reason == "interrupted"
        if reason and may_end_run and not self.store.has("end"):
            self.store.set("end", reason)
        if not self.store.has("end"):
            return ""
        decided = self.store.get("end").decode()
        if decided and not self._knows_end:
            self._knows_end = True
            self.store.set(f"heard/{self.number}", b"1")
        return decided

    def offset(self, when: str) -> tuple[int, int]:
        """Measured by round trips to the first launcher: half the shortest one is the error."""
        if self.first:
            if self._knows_end:
                self._find_dead_launchers()
            for other in self._others:
                self._answer(f"clock/{when}/{other}")
            return 0, 0
        shortest_ns, best_offset_ns = _UNKNOWN_ERROR_NS, 0
        for trip in range(_ROUND_TRIPS):
            key = f"clock/{when}/{self.number}/{trip}"
            sent_ns = time.monotonic_ns()
            self.store.set(key, b"?")
            if self._is_missing(f"{key}/answer"):
                return 0, _UNKNOWN_ERROR_NS
            answer_ns = int(self.store.get(f"{key}/answer"))
            received_ns = time.monotonic_ns()
            offset_ns = answer_ns - (sent_ns + received_ns) // 2
            # Compared as pairs: of two equally short trips, the smaller offset counts.
            shortest_ns, best_offset_ns = min(
                (shortest_ns, best_offset_ns), (received_ns - sent_ns, offset_ns)
            )
        return best_offset_ns, shortest_ns // 2

    def _find_dead_launchers(self) -> None:
        keys = [f"heard/{number}" for number in self._others]
        late = self._missing(keys, _ACK_TIMEOUT_S)
        self.gone = tuple(int(key.partition("/")[2]) for key in late)

    def _answer(self, key: str) -> None:
        """Answer the round trips of another launcher with this machine's time."""
        for trip in range(_ROUND_TRIPS):
            if self._is_missing(f"{key}/{trip}"):
                return
            self.store.set(f"{key}/{trip}/answer", str(time.monotonic_ns()))

    def _is_missing(self, key: str) -> bool:
        """Wait for a key without sleeping, so that a round trip is short."""
        deadline = time.monotonic() + self.wait_s
        while not self.store.has(key):
            if time.monotonic() > deadline:
                return True
        return False

    def gather(self, record: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        """All records on the first launcher, without those of launchers that no longer answer."""
        if not self.first:
            self._put(f"record/{self.number}", pack_record(record))
            return [record]
        sizes = [f"record/{number}/size" for number in self._others]
        late = self._missing(sizes, self.wait_s)
        arrived = [key.removesuffix("/size") for key in sizes if key not in late]
        return [record, *(unpack_record(self._get(key)) for key in arrived)]

    def agree_on(self, status: int) -> int:
        """The first launcher's exit status, on all launchers.

        The first launcher waits until the others have read it, because it serves the store.
        """
        if self.first:
            self.store.set("status", str(status))
            self._missing([f"bye/{number}" for number in self._others], 5)
            return status
        if self._missing(["status"], self.wait_s + 30):
            return _EXIT_ENVIRONMENT_FAILED
        status = int(self.store.get("status"))
        self.store.set(f"bye/{self.number}", b"1")
        return status

    def _put(self, key: str, data: bytes) -> None:
        """Store data in chunks; the size comes last and shows that the data are complete."""
        for start in range(0, len(data), _CHUNK_BYTES):
            self.store.set(f"{key}/{start}", data[start : start + _CHUNK_BYTES])
        self.store.set(f"{key}/size", str(len(data)))

    def _get(self, key: str) -> bytes:
        size = int(self.store.get(f"{key}/size"))
        return b"".join(self.store.get(f"{key}/{start}") for start in range(0, size, _CHUNK_BYTES))


def _pack_progress(progress: ProgressByRank) -> bytes:
    record = {"exits": json.dumps({rank: code for rank, (_, code) in progress.items()}).encode()}
    record |= {str(rank): contents for rank, (contents, _) in progress.items()}
    return pack_record(record)


def _unpack_progress(data: bytes) -> ProgressByRank:
    record = unpack_record(data)
    exit_codes = json.loads(record["exits"])
    return {int(rank): (record[rank], code) for rank, code in exit_codes.items()}
