"""How launchers on several machines act as one: boards, decisions and records travel through the
store that the ranks use too.
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

#: What one value of the store may hold.
_CHUNK_BYTES = 1 << 20
_ROUND_TRIPS = 20
#: A launcher that has not heard of the end after so long is gone.
_ACK_TIMEOUT_S = 10
ProgressByRank = dict[int, tuple[bytes, int | None]]  # rank -> (board, exit status)


class LaunchCoordinator:
    """One launcher for all ranks: nothing has to travel."""

    first = True
    hosts = 1
    gone: tuple[int, ...] = ()  # launchers that do not answer any more

    def ready(self, repetition: int, here: bool) -> bool:
        """Are all ranks ready to start a repetition?"""
        return here

    def share(self, boards: ProgressByRank) -> ProgressByRank:
        return boards

    def decide(self, reason: str) -> str:
        """Why the run ends; empty while it goes on."""
        return reason

    def offset(self, when: str) -> tuple[int, int]:
        """(what to add to this machine's clock, largest error), ns."""
        return 0, 0

    def gather(self, record: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        return [record]

    def agree_on(self, status: int) -> int:
        return status


class _SharedStore:
    """The ranks' store, in a corner of its own. Its loss is said as what it means: it lives in the
    first launcher.
    """

    def __init__(self, store: Store) -> None:
        import torch.distributed

        dist: ModuleType = torch.distributed
        self._store: Store = dist.PrefixStore("distsim", store)
        self._lost: type[Exception] = dist.DistError

    def _asked(self, ask: Callable[[Store], StoreAnswer]) -> StoreAnswer:
        try:
            return ask(self._store)
        except self._lost:
            raise EnvironmentFault(
                "the launcher of machine 0 is gone", "look there for what ended it"
            ) from None

    def has(self, key: str) -> bool:
        return self._asked(lambda store: store.check([key]))

    def get(self, key: str) -> bytes:
        return self._asked(lambda store: store.get(key))

    def set(self, key: str, value: str | bytes) -> None:
        self._asked(lambda store: store.set(key, value))  # type: ignore[arg-type]  # bytes are as good (TCPStore.hpp)

    def count(self, key: str, more: int = 0) -> int:
        """A counter, so much further."""
        return self._asked(lambda store: store.add(key, more))


class StoreCoordinator(LaunchCoordinator):
    """One of several launchers. ``number`` 0 decides and reports."""

    def __init__(self, store: Store, number: int, hosts: int, wait_s: float) -> None:
        self.store = _SharedStore(store)
        self.number, self.hosts, self.wait_s = number, hosts, wait_s
        self.first = number == 0
        self._announced = -1
        self._shared_at = 0.0
        self._known: ProgressByRank = {}
        self._heard = False

    @property
    def _others(self) -> list[int]:
        """The other launchers, those that are gone left out."""
        return [k for k in range(self.hosts) if k != self.number and k not in self.gone]

    def meet(self, ended: Callable[[], str]) -> None:
        """Wait until every launcher has come, or ``ended``. Raises EnvironmentFault with those that
        did not come.
        """
        self.store.set(f"here/{self.number}", b"1")
        late = self._missing([f"here/{k}" for k in range(self.hosts)], self.wait_s, ended)
        if late and ended():
            raise EnvironmentFault(f"ended by {ended()}; not all launchers had come yet")
        if late:
            names = ", ".join(key.partition("/")[2] for key in late)
            raise EnvironmentFault(
                f"{self.hosts - len(late)} of {self.hosts} launchers came within {self.wait_s:.0f} s; missing: {names}",
                "start the command on every machine, each with its own --node-rank",
            )

    def _missing(
        self, keys: Sequence[str], wait_s: float, ended: Callable[[], str] = str
    ) -> list[str]:
        end = time.monotonic() + wait_s
        while True:
            left = [key for key in keys if not self.store.has(key)]
            if not left or time.monotonic() >= end or ended():
                return left
            time.sleep(0.01)

    def ready(self, repetition: int, here: bool) -> bool:
        if here and self._announced < repetition:
            self._announced = repetition
            self.store.count(f"ready/{repetition}", 1)
        return here and self.store.count(f"ready/{repetition}") >= self.hosts

    def share(self, boards: ProgressByRank) -> ProgressByRank:
        """Show the boards of the ranks here; the first launcher gets everybody's, ten times a
        second.
        """
        if time.monotonic() - self._shared_at > 0.1:
            self._shared_at = time.monotonic()
            exits = {rank: code for rank, (_, code) in boards.items()}
            self._put(
                f"boards/{self.number}",
                pack_record(
                    {"exits": json.dumps(exits).encode()}
                    | {str(r): b for r, (b, _) in boards.items()}
                ),
            )
            for other in range(self.hosts) if self.first else ():
                if other != self.number and self.store.has(f"boards/{other}/size"):
                    self._known |= self._boards(unpack_record(self._get(f"boards/{other}")))
        return {**self._known, **boards}

    def _boards(self, record: Mapping[str, bytes]) -> ProgressByRank:
        exits = json.loads(record["exits"])
        return {int(rank): (record[rank], code) for rank, code in exits.items()}

    def decide(self, reason: str) -> str:
        if reason and (self.first or reason == "interrupted") and not self.store.has("end"):
            self.store.set("end", reason)
        said = self.store.get("end").decode() if self.store.has("end") else ""
        if said and not self._heard:
            self._heard = True
            self.store.set(f"heard/{self.number}", b"1")
        return said

    def offset(self, when: str) -> tuple[int, int]:
        """By round trips: half the shortest one is the error."""
        if self.first:
            if self._heard:
                late = self._missing([f"heard/{k}" for k in self._others], _ACK_TIMEOUT_S)
                self.gone = tuple(int(key.partition("/")[2]) for key in late)
            for other in self._others:
                self._answer(f"clock/{when}/{other}")
            return 0, 0
        best = (2**62, 0)
        for trip in range(_ROUND_TRIPS):
            asked = time.monotonic_ns()
            self.store.set(f"clock/{when}/{self.number}/{trip}", b"?")
            if self._missing_quick(f"clock/{when}/{self.number}/{trip}/answer"):
                return 0, 2**62
            there = int(self.store.get(f"clock/{when}/{self.number}/{trip}/answer"))
            back = time.monotonic_ns()
            best = min(best, (back - asked, there - (asked + back) // 2))
        return best[1], best[0] // 2

    def _answer(self, key: str) -> None:
        for trip in range(_ROUND_TRIPS):
            if self._missing_quick(f"{key}/{trip}"):
                return
            self.store.set(f"{key}/{trip}/answer", str(time.monotonic_ns()))

    def _missing_quick(self, key: str) -> bool:
        """Wait for a key without sleeping, so that a round trip is short."""
        end = time.monotonic() + self.wait_s
        while not self.store.has(key):
            if time.monotonic() > end:
                return True
        return False

    def gather(self, record: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        """Everybody's records at the first launcher; those of a machine that is gone are
        missing.
        """
        if not self.first:
            self._put(f"record/{self.number}", pack_record(record))
            return [record]
        keys = [f"record/{k}/size" for k in self._others]
        late = self._missing(keys, self.wait_s)
        return [
            record,
            *(
                unpack_record(self._get(key.removesuffix("/size")))
                for key in keys
                if key not in late
            ),
        ]

    def agree_on(self, status: int) -> int:
        """The first launcher's exit status, on all; it waits until the others have read it, since
        it serves the store.
        """
        if self.first:
            self.store.set("status", str(status))
            self._missing([f"bye/{k}" for k in self._others], 5)
            return status
        if self._missing(["status"], self.wait_s + 30):
            return 4
        status = int(self.store.get("status"))
        self.store.set(f"bye/{self.number}", b"1")
        return status

    def _put(self, key: str, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK_BYTES):
            self.store.set(f"{key}/{at}", data[at : at + _CHUNK_BYTES])
        self.store.set(f"{key}/size", str(len(data)))

    def _get(self, key: str) -> bytes:
        size = int(self.store.get(f"{key}/size"))
        return b"".join(self.store.get(f"{key}/{at}") for at in range(0, size, _CHUNK_BYTES))
