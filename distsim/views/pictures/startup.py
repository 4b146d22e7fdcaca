"""How a job comes to life: the store opens, ranks register, exchange addresses by its keys, and the groups come into being."""

from __future__ import annotations

from distsim.program.records import Program
from distsim.startup.address import address
from distsim.startup.meeting import start_up
from distsim.startup.records import Address, Ending, Entrance, StartUp, Surroundings
from distsim.views.drawing.palette import BLUE, GREY, INK, PALE, RED, RED_FILL, WHITE, fill
from distsim.views.drawing.records import SMALL, Key, Text, clipped
from distsim.views.drawing.sequence import Anchor, Arrow, Band, Item, Participant, SequenceDiagram
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import who

_MOST_RANKS, _MOST_GROUPS = 8, 10
#: Larger worlds that say nothing of their start-up are drawn as one that goes well.
_MOST_JUDGED = 4096
_WORDS = 24


def startup_diagram(program: Program, master: str = "MASTER_ADDR:MASTER_PORT") -> SequenceDiagram:
    """A sequence diagram of ``init_process_group``; ``master`` is where the store listens, unless the file says it otherwise."""
    return _Startup(program, master).diagram()


def _plain(program: Program, absent: tuple[int, ...]) -> StartUp:
    """The start-up of a program that says nothing of it: env:// with all that it needs."""
    size = program.world_size if program.world_size <= _MOST_JUDGED else _MOST_RANKS
    found = [
        Entrance(r, program.node(r), "gloo", 30 * 60 * 10**9, env=_variables(r, size), absent=r in absent) for r in range(size)
    ]
    return start_up(found, Surroundings(size, {"MASTER_ADDR": 0}))


def _variables(rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "MASTER_ADDR", "MASTER_PORT": "29500"}


class _Startup:
    def __init__(self, program: Program, master: str) -> None:
        self.program = program
        self.absent = tuple(sorted({f.rank for f in program.faults if f.kind == "absent"}))
        self.found = program.startup or _plain(program, self.absent)
        self.kind = self.found.kind
        self.master = clipped(self.found.where if program.startup else master, 48)
        causes = tuple(sorted({rank for cause in self.found.causes for rank in cause.ranks}))
        self.bad = tuple(dict.fromkeys((*self.absent, *causes)))
        self.shown = _shown(program.world_size, self.bad)
        self.wrong = bool(self.absent) or self.found.failed
        self.items: list[Item] = []
        self.bands: list[Band] = []
        self.arrows: list[Arrow] = []
        self.row = 0

    def diagram(self) -> SequenceDiagram:
        self._launch()
        self._register()
        self._exchange()
        if self.wrong:
            self._stuck()
        else:
            self._met()
        hidden = self.program.world_size - len(self.shown)
        notes = tuple(clipped(cause.message.partition("\n")[0], 110) for cause in self.found.causes[:3])
        notes += (f"and {hidden} more ranks, not drawn",) if hidden else ()
        legend = (Key(RED, "what fails, and those who wait for it"),) if self.wrong else ()
        title = f"{clipped(self.program.name, 50)}: start-up" + (f", {who(self.absent)} missing" if self.absent else "")
        return SequenceDiagram(title, "time runs down; init_process_group returns only when every rank has come", self._columns(),
                     tuple(self.items), tuple(self.bands), tuple(self.arrows), legend, notes)  # fmt: skip

    def _columns(self) -> tuple[Participant, ...]:
        server = {"rank 0": "on rank 0", "nobody": "that nobody serves"}.get(self.found.server, f"of {self.found.server}")
        about = {
            "tcp": ("TCP store", f"a key-value table {server}"), "file": ("file store", "ranks append keys, all read them"),
            "hash": ("hash store", "a table in each process"), "launcher": ("MPI", "its launcher knows all ranks"),
        }[self.kind]  # fmt: skip
        lines = (Text(about[0], bold=True), Text(self.master, size=SMALL), Text(about[1], size=SMALL))
        store = Participant(lines, "store", RED_FILL if self.found.server == "nobody" else PALE, self.found.server == "nobody")
        ranks = [
            Participant((Text(f"rank {r}", bold=True), Text(f"machine {self.program.node(r)}", size=SMALL)), f"rank {r}",
                 RED_FILL if r in self.bad else PALE, r in self.absent)
            for r in self.shown
        ]  # fmt: skip
        return (store, *ranks)

    def _item(self, column: int, lines: tuple[Text, ...], colour: str = WHITE, border: str = INK, **more: bool) -> str:
        name = f"i{len(self.items)}"
        self.items.append(Item(name, column, self.row, lines, colour, border, **more))
        return name

    def _red(self, column: int, *words: str) -> None:
        lines = (Text(words[0], bold=True, colour=RED), *(Text(clipped(w, 40), colour=RED, size=SMALL) for w in words[1:]))
        self._item(column, lines, RED_FILL, RED)

    def _ending(self, rank: int) -> Ending:
        return self.found.endings.get(rank, Ending("passes"))

    def _address(self, rank: int) -> Address | None:
        brought = self.found.entrances
        here = address(brought[rank]) if rank < len(brought) else None
        return here if isinstance(here, Address) else None

    # --- one stage after the other ---
    def _launch(self) -> None:
        """The launcher starts the processes; each knows who it is from its variables or its arguments."""
        for column, rank in enumerate(self.shown, 1):
            if rank in self.absent:
                self._item(column, (Text("never starts", bold=True, colour=RED),), RED_FILL, RED, dashed=True)
                continue
            said = [Text(clipped(words, _WORDS), size=SMALL) for words in self._told(rank)]
            self._item(column, (Text("starts", bold=True), *said), PALE, GREY)
        self.row += 1

    def _told(self, rank: int) -> tuple[str, ...]:
        brought = self.found.entrances[rank] if rank < len(self.found.entrances) else None
        local = rank % self.program.local_size
        if brought is None or (brought.env.get("RANK") and brought.said_rank == -1):
            number = brought.env["RANK"] if brought is not None else str(rank)
            size = brought.env.get("WORLD_SIZE", "not set") if brought is not None else str(self.program.world_size)
            return f"RANK={number} LOCAL_RANK={local}", f"WORLD_SIZE={size if self.program.startup else self.program.world_size}"
        if brought.said_rank == -1 and brought.said_world == -1:
            return ("RANK not set",)
        said = [f"{name}={n}" for name, n in (("rank", brought.said_rank), ("world_size", brought.said_world)) if n != -1]
        return tuple(said)

    def _register(self) -> None:
        """Who refuses stops here; who serves the store opens it; one rank after the other says that it is there."""
        if self.kind in ("launcher", "hash"):
            return
        registered = {event.rank for event in self.found.events if event.kind == "registers"}
        opened = {event.rank for event in self.found.events if event.kind == "opens"}
        row_of_refusals = self.row
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if ending.status == "raises" and rank not in registered:
                self._red(column, "raises at once", ending.error, *self._why(rank))
        self.row += any(item.row == row_of_refusals for item in self.items)
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if rank in self.absent or (ending.status == "raises" and rank not in registered):
                continue
            lost = rank not in registered and rank < len(self.found.entrances)
            if self.kind == "file":
                said = "opens the file" if not lost else "goes elsewhere"
            else:
                opens = "opens the store" if rank in opened else f"rank {self._said(rank)} is here"
                said = "no answer" if lost and rank not in opened else "opens it, goes elsewhere" if lost else opens
            caller = self._item(column, (Text("init_process_group", bold=True),), in_arrow=True)
            words = f"init_process_group: {said}"
            self.arrows.append(Arrow(caller, Anchor(0, self.row), said, RED if lost else BLUE, dashed=lost, words=words))
            self.row += 1

    def _why(self, rank: int) -> tuple[str, ...]:
        return _short(next((e.text for e in self.found.events if e.rank == rank and e.kind == "raises"), ""))

    def _said(self, rank: int) -> int:
        here = self._address(rank)
        return here.rank if here is not None else rank

    def _exchange(self) -> None:
        """set: each rank's address under its number; get waits until the key is there."""
        setters = [rank for rank in self.shown if any(e.rank == rank and e.kind == "sets" for e in self.found.events)]
        if not setters or self.kind in ("launcher", "hash") or self.program.backend == "nccl":  # nccl has one key, at first use
            return
        for column, rank in enumerate(self.shown, 1):
            if rank in setters:
                said = f"set key {self._said(rank)}"
                caller = self._item(column, (Text(said, bold=True),), WHITE, GREY)
                self.arrows.append(Arrow(caller, Anchor(0, self.row), "its address", BLUE, words=f"{said}: its address"))
                self.row += 1

    def _fetch(self) -> None:
        """get: each rank takes the others' addresses from the store, which waits until they are there."""
        if self.kind in ("launcher", "hash") or self.program.backend == "nccl":
            return
        world = self.program.world_size
        for column, rank in enumerate(self.shown, 1):
            others = [r for r in range(world) if r != rank]
            if not others:
                continue
            said = f"get key {others[0]}" if len(others) == 1 else f"get keys {who(others, 2).partition(' ')[2]}"
            self._item(column, (Text(clipped(said, _WORDS), bold=True),), WHITE, GREY)
            store = self._item(0, (Text("the others' addresses", size=SMALL),), WHITE, GREY)
            self.arrows.append(
                Arrow(store, f"i{len(self.items) - 2}", "", BLUE, words=f"{clipped(said, _WORDS)}: their addresses")
            )
            self.row += 1

    def _stuck(self) -> None:
        """The red end: what the store lacks, and what each rank that is left waits for or raises."""
        if self.kind == "tcp":
            self._red(0, *self._lacks())
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if ending.status == "waits" or (rank not in self.absent and not self.found.failed):
                missing = clipped(ending.missing.partition(";")[0], 34) if ending.missing else who(self.absent)
                until = f"torch raises after {ending.after_ns / 1e9:g} s" if ending.after_ns else "for ever"
                self._red(column, "waits", f"for {missing}", until if self.program.startup else "until its timeout")
            elif ending.status == "apart":
                self._red(column, "in a group apart", "its first communication", "never ends")
            elif ending.status == "raises" and any(e.rank == rank and e.kind == "registers" for e in self.found.events):
                self._red(column, "raises", ending.error, *self._why(rank))
        self.row += 1

    def _lacks(self) -> tuple[str, ...]:
        """What the store's own column says in the end."""
        world = self.program.world_size
        here = len({event.rank for event in self.found.events if event.kind == "registers"})
        if self.found.server == "nobody":
            return "no store", "rank 0 would have opened it" if 0 in self.absent else "nobody serves it"
        if here < world:
            missing = f"missing: {who(self.absent)}" if self.absent else f"{world - here} did not register"
            return f"{here} of {world} are here", missing
        return f"all {world} are here", "and do not find each other"

    def _met(self) -> None:
        everyone = tuple(range(len(self.shown) + 1))
        ranks = everyone[1:]
        world = self.program.world_size
        met = {
            "tcp": f"all {world} ranks are here (get waits for a key that is not set yet)",
            "file": f"all {world} ranks are here (each reads the file until it has the keys)",
            "launcher": f"all {world} ranks are here: mpirun started them together, no store is needed",
        }.get(self.kind, f"all {world} ranks are here")
        self._band(everyone, met if self.program.backend != "nccl" else f"all {world} ranks are here", PALE, GREY)
        self._fetch()
        eager = self.program.options.get("init") == "eager"
        if self.program.backend == "gloo":
            self._band(ranks, "every pair of ranks connects, at once", WHITE, GREY, dashed=True)
        self._band(ranks, f"group world: all {world} ranks ({clipped(self.program.backend, 12)})", "#DCE9F5")
        self._groups(ranks)
        if self.program.backend == "nccl":
            when = "at once (init: eager)" if eager else "at first use, of a group or of a pair (init: lazy)"
            self._band(ranks, f"NCCL communicators are made {when}", WHITE, GREY, dashed=True)
            self._band(everyone, "for each, its rank 0 sets an id as a key, and its other ranks get it", WHITE, GREY, dashed=True)

    def _groups(self, ranks: tuple[int, ...]) -> None:
        groups = self.program.groups[1:]
        drawn = 0
        for group in groups:
            members = tuple(i for i, r in enumerate(self.shown, 1) if r in group.ranks)
            if drawn == _MOST_GROUPS:
                self._band(ranks, f"and {len(groups) - drawn} more groups", WHITE, GREY)
                break
            if members:
                self._band(members, f"group {clipped(group.name, 30)}", fill(group.id - 1))
                drawn += 1

    def _band(self, columns: tuple[int, ...], text: str, colour: str, border: str = INK, dashed: bool = False) -> None:
        title = (Text(text, bold=not dashed),)
        self.bands.append(Band(f"b{len(self.bands)}", columns, self.row, title, {}, colour, border, dashed))
        self.row += 1


def _short(text: str) -> tuple[str, ...]:
    """A sentence in two short lines."""
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > _WORDS and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return (lines[0], clipped(" ".join(lines[1:]), _WORDS + 4)) if len(lines) > 1 else (lines[0],)


def _shown(world_size: int, special: tuple[int, ...]) -> tuple[int, ...]:
    """The first ranks, and room for some that never come or fail."""
    if world_size <= _MOST_RANKS:
        return tuple(range(world_size))
    late = sorted(r for r in special if r >= _MOST_RANKS - 2)[:2]
    return (*range(_MOST_RANKS - len(late)), *late) if late else tuple(range(_MOST_RANKS))


def _drawn(subject: Subject) -> SequenceDiagram:
    return startup_diagram(given(subject.program, "program"), subject.master)


VIEW = View(_drawn, examples=(
    Example("hybrid", "How a job starts: ranks register at the store, exchange addresses, and the groups come into being."),
    Example("never_starts", "The first hang everybody meets: one rank never starts."),
    Example("startup/file", "The same without a port: addresses are exchanged in a file."),
    Example("startup/rank_twice", "Two processes with one number: all wait for the key of the rank that nobody is."),
    Example("startup/variable_missing", "env:// with a variable missing: one rank raises at once, the others wait."),
))  # fmt: skip
