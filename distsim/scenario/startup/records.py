"""The input of a simulated start-up (processes and machines) and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: How init_process_group ends for a process. "waits": nothing that may still happen frees it;
#: torch raises after the timeout. "apart": it returns, in another group than the others', and hangs
#: in its first communication.
StartupStatus = Literal["passes", "raises", "waits", "apart", "absent"]
StoreKind = Literal["tcp", "file", "hash", "launcher"]

#: An argument of init_process_group that is not passed (torch's own default).
NOT_PASSED = -1


@dataclass(frozen=True)
class StartupProcess:
    """What one process passes to init_process_group.

    ``rank`` is its number in the scenario, ``rank_argument`` the number that it passes. ``env``:
    its environment variables, as far as start-up reads them. ``agent``: its launcher serves the
    store at MASTER_ADDR:MASTER_PORT, so no rank does. ``device``: the index of an accelerator.
    ``launcher``: the value of `launch.by`.
    """

    rank: int
    node: int
    backend: str
    timeout_ns: int
    init_method: str | None = None
    store: str | None = None
    rank_argument: int = NOT_PASSED
    world_size_argument: int = NOT_PASSED
    device: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    agent: bool = False
    launcher: str = ""
    absent: bool = False


@dataclass(frozen=True)
class StartupEnvironment:
    """The machines before the run.

    ``hosts``: the machine of each name or address; ``closed``: no other name resolves.
    ``ports_taken``: on every machine. ``files_left``: rendezvous files of an earlier run.
    """

    world_size: int
    hosts: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False
    ports_taken: tuple[int, ...] = ()
    files_left: tuple[str, ...] = ()


class RendezvousInfo(NamedTuple):
    """Where a process looks for the store, and the rank and world size that it passes.

    For a file, ``host`` is "" and ``port`` 0.
    """

    kind: StoreKind
    host: str
    port: int
    path: str
    rank: int
    world_size: int

    @property
    def text(self) -> str:
        """``host:port``, or the path."""
        if self.path:
            return self.path
        return f"{self.host}:{self.port}" if self.host else self.kind


class InitFailure(NamedTuple):
    """torch raises at once.

    ``error`` and ``text`` are the class and text of torch's error, ``code`` is the finding's code,
    ``cause`` says in a clause what is wrong.
    """

    error: str
    text: str
    code: str
    cause: str
    help: str


class StartupOutcome(NamedTuple):
    """How init_process_group ends for a process.

    ``error`` and ``text``: the class and text of torch's error, raised ``after_ns`` after the call
    (0: at once). ``needs``: the processes that it waits for, if some could still arrive.
    ``missing``: what it waits for, in words.
    """

    status: StartupStatus
    error: str = ""
    text: str = ""
    after_ns: int = 0
    needs: tuple[int, ...] = ()
    missing: str = ""


class StartupEvent(NamedTuple):
    """One step of a process, in the order in which a picture shows them.

    ``kind``: opens, connects, registers, sets, gets, waits or raises.
    """

    rank: int
    kind: str
    text: str


class StartupCause(NamedTuple):
    """Why a start-up fails: a finding's code, the ranks, a sentence and the remedy."""

    code: str
    ranks: tuple[int, ...]
    message: str
    help: str


@dataclass(frozen=True)
class StartupResult:
    """A simulated start-up.

    ``where``: the store's address in words; ``server``: what serves it. ``causes``: empty if all
    ranks get through. ``remarks``: warnings. ``entrances``: the processes, by rank. ``endings``:
    their outcomes, by rank. ``waits``: which ranks wait for what, in lines. ``environment``: the
    machines, to simulate the same start-up under another backend.
    """

    kind: StoreKind
    where: str
    server: str
    endings: Mapping[int, StartupOutcome]
    events: tuple[StartupEvent, ...]
    causes: tuple[StartupCause, ...] = ()
    remarks: tuple[StartupCause, ...] = ()
    entrances: tuple[StartupProcess, ...] = ()
    waits: tuple[str, ...] = ()
    environment: StartupEnvironment | None = None

    @property
    def failed(self) -> bool:
        """Whether the start-up failed on any rank."""
        return bool(self.causes)

    def entrance(self, rank: int) -> StartupProcess | None:
        """What a rank passes in a start-up that fails; None if it succeeds."""
        return self.entrances[rank] if self.failed else None

    def ending(self, rank: int) -> StartupOutcome | None:
        """The outcome of a rank in a start-up that fails; None if it succeeds."""
        return self.endings.get(rank) if self.failed else None
