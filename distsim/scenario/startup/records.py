"""What start-up is told about, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: How a process comes out of init_process_group. "waits": nothing that may still happen frees it;
#: torch raises once its time-out is over. "apart": it returns, in a group that is not that of the
#: others, and stands still in its first communication.
StartupStatus = Literal["passes", "raises", "waits", "apart", "absent"]
StoreKind = Literal["tcp", "file", "hash", "launcher"]


@dataclass(frozen=True)
class StartupProcess:
    """What one process brings to init_process_group. ``rank`` counts processes as the scenario
    does, ``rank_argument`` is what it says.

    ``env``: its variables, as far as start-up reads them. ``agent``: its launcher serves a store at
    MASTER_ADDR:MASTER_PORT, so no rank does. ``device``: the index of an accelerator. ``launcher``:
    who started it, as `launch.by` says.
    """

    rank: int
    node: int
    backend: str
    timeout_ns: int
    init_method: str | None = None
    store: str | None = None
    rank_argument: int = -1
    world_size_argument: int = -1
    device: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    agent: bool = False
    launcher: str = ""
    absent: bool = False


@dataclass(frozen=True)
class StartupEnvironment:
    """What the machines hold before the run. ``hosts``: a machine by name or address; ``closed``:
    all others don't resolve.

    ``ports_taken``: on every machine. ``files_left``: rendezvous files of an earlier run.
    ``folders_missing``: no file can be made there.
    """

    world_size: int
    hosts: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False
    ports_taken: tuple[int, ...] = ()
    files_left: tuple[str, ...] = ()


class RendezvousInfo(NamedTuple):
    """Where a process looks for the store, and as whom it comes. ``host`` is "" of a file, ``port``
    0.
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
        return self.path or (f"{self.host}:{self.port}" if self.host else self.kind)


class InitFailure(NamedTuple):
    """torch raises at once: the error's class and text as torch has them, the finding's code, and
    what is wrong in a clause.
    """

    error: str
    text: str
    code: str
    cause: str
    help: str


class StartupOutcome(NamedTuple):
    """How a process comes out. ``error`` and ``text`` as torch has them, ``after_ns`` from the call
    on (0: at once).

    ``needs``: the processes that it waits for, if anybody could come. ``missing``: what it waits
    for, in words.
    """

    status: StartupStatus
    error: str = ""
    text: str = ""
    after_ns: int = 0
    needs: tuple[int, ...] = ()
    missing: str = ""


class StartupEvent(NamedTuple):
    """One step of a process, in the order that a picture shows: opens, connects, registers, sets,
    gets, waits, raises.
    """

    rank: int
    kind: str
    text: str


class StartupCause(NamedTuple):
    """Why a start-up fails: a finding's code, whom it is about, a sentence and what to do."""

    code: str
    ranks: tuple[int, ...]
    message: str
    help: str


@dataclass(frozen=True)
class StartupResult:
    """A start-up. ``where``: the store's address in words; ``server``: who opens it. ``causes``:
    empty where all come through.

    ``remarks``: what torch warns about. ``entrances``: what it was made of, by rank. ``waits``: who
    waits for what, in lines.
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

    @property
    def failed(self) -> bool:
        return bool(self.causes)

    def entrance(self, rank: int) -> StartupProcess | None:
        """What a rank of a failed start-up brings; None in one that all come through."""
        return self.entrances[rank] if self.failed else None

    def ending(self, rank: int) -> StartupOutcome | None:
        """How a rank of a failed start-up comes out; None in one that all come through."""
        return self.endings.get(rank) if self.failed else None
