"""How a job comes to life: ranks register at the store, meet, and the groups come into being."""

from __future__ import annotations

from distsim.program.records import Program
from distsim.views.drawing.palette import BLUE, GREY, INK, PALE, RED, RED_FILL, WHITE, fill
from distsim.views.drawing.records import SMALL, Key, Text, clipped
from distsim.views.drawing.sequence import Anchor, Arrow, Band, Item, Participant, SequenceDiagram
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import who

_MOST_RANKS, _MOST_GROUPS = 8, 10


def startup_diagram(program: Program, master: str = "MASTER_ADDR:MASTER_PORT") -> SequenceDiagram:
    """A sequence diagram of ``init_process_group``; ``master`` is where the store listens."""
    return _Startup(program, master).diagram()


class _Startup:
    def __init__(self, program: Program, master: str) -> None:
        self.program, self.master = program, clipped(master, 48)
        self.absent = tuple(sorted({f.rank for f in program.faults if f.kind == "absent"}))
        self.shown = _shown(program.world_size, self.absent)
        self.items: list[Item] = []
        self.bands: list[Band] = []
        self.arrows: list[Arrow] = []
        self.row = 0

    def diagram(self) -> SequenceDiagram:
        self._launch()
        self._register()
        if self.absent:
            self._stuck()
        else:
            self._met()
        hidden = self.program.world_size - len(self.shown)
        notes = (f"and {hidden} more ranks, not drawn: they do the same",) if hidden else ()
        legend = (Key(RED, "missing, and those who wait for it"),) if self.absent else ()
        title = f"{clipped(self.program.name, 50)}: start-up" + (f", {who(self.absent)} missing" if self.absent else "")
        return SequenceDiagram(title, "time runs down; init_process_group returns only when every rank has come", self._columns(),
                     tuple(self.items), tuple(self.bands), tuple(self.arrows), legend, notes)  # fmt: skip

    def _columns(self) -> tuple[Participant, ...]:
        about = (Text("store", bold=True), Text(self.master, size=SMALL), Text("a key-value table on rank 0", size=SMALL))
        store = Participant(about, "store", PALE)
        ranks = [
            Participant((Text(f"rank {r}", bold=True), Text(f"machine {self.program.node(r)}", size=SMALL)), f"rank {r}",
                 RED_FILL if r in self.absent else PALE, r in self.absent)
            for r in self.shown
        ]  # fmt: skip
        return (store, *ranks)

    def _item(self, column: int, lines: tuple[Text, ...], colour: str = WHITE, border: str = INK, **more: bool) -> str:
        name = f"i{len(self.items)}"
        self.items.append(Item(name, column, self.row, lines, colour, border, **more))
        return name

    def _launch(self) -> None:
        """The launcher starts the processes and tells each who it is."""
        for column, rank in enumerate(self.shown, 1):
            if rank in self.absent:
                self._item(column, (Text("never starts", bold=True, colour=RED),), RED_FILL, RED, dashed=True)
            else:
                local = rank % self.program.local_size
                self._item(column, (Text("starts", bold=True), Text(f"RANK={rank} LOCAL_RANK={local}", size=SMALL),
                                  Text(f"WORLD_SIZE={self.program.world_size}", size=SMALL)), PALE, GREY)  # fmt: skip
        self.row += 1

    def _register(self) -> None:
        """Rank 0 opens the store; one rank after the other says that it is there."""
        came = 0
        for column, rank in enumerate(self.shown, 1):
            if rank in self.absent:
                continue
            caller = self._item(column, (Text("init_process_group", bold=True),), in_arrow=True)
            came += 1
            said = "opens the store" if rank == 0 else f"rank {rank} is here" if 0 not in self.absent else "no answer"
            lost = 0 in self.absent
            words = f"init_process_group: {said}"
            self.arrows.append(Arrow(caller, Anchor(0, self.row), said, RED if lost else BLUE, dashed=lost, words=words))
            self.row += 1

    def _stuck(self) -> None:
        missing, world = who(self.absent), self.program.world_size
        if 0 in self.absent:
            told = (Text("no store", bold=True, colour=RED), Text("rank 0 would have opened it", colour=RED, size=SMALL))
        else:
            here = f"{world - len(self.absent)} of {world} are here"
            told = (Text(here, bold=True, colour=RED), Text(f"missing: {missing}", colour=RED, size=SMALL))
        self._item(0, told, RED_FILL, RED)
        for column, rank in enumerate(self.shown, 1):
            if rank not in self.absent:
                self._item(column, (Text("waits", bold=True, colour=RED), Text(f"for {missing}", colour=RED, size=SMALL),
                                  Text("until its timeout", colour=RED, size=SMALL)), RED_FILL, RED)  # fmt: skip
        self.row += 1

    def _met(self) -> None:
        everyone = tuple(range(len(self.shown) + 1))
        ranks = everyone[1:]
        world = self.program.world_size
        self._band(everyone, f"all {world} ranks are here: each reads the others' addresses and goes on", PALE, GREY)
        self._band(ranks, f"group world: all {world} ranks ({clipped(self.program.backend, 12)})", "#DCE9F5")
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
        if self.program.backend == "nccl":
            eager = self.program.options.get("init") == "eager"
            when = "at once (init: eager)" if eager else "at first use, of a group or of a pair (init: lazy)"
            self._band(ranks, f"NCCL communicators are made {when}", WHITE, GREY, dashed=True)

    def _band(self, columns: tuple[int, ...], text: str, colour: str, border: str = INK, dashed: bool = False) -> None:
        title = (Text(text, bold=not dashed),)
        self.bands.append(Band(f"b{len(self.bands)}", columns, self.row, title, {}, colour, border, dashed))
        self.row += 1


def _shown(world_size: int, absent: tuple[int, ...]) -> tuple[int, ...]:
    """The first ranks, and room for some that never come."""
    if world_size <= _MOST_RANKS:
        return tuple(range(world_size))
    late = [r for r in absent if r >= _MOST_RANKS - 2][:2]
    return (*range(_MOST_RANKS - len(late)), *late) if late else tuple(range(_MOST_RANKS))


def _drawn(subject: Subject) -> SequenceDiagram:
    return startup_diagram(given(subject.program, "program"), subject.master)


VIEW = View(_drawn, examples=(
    Example("hybrid", "How a job starts: ranks register at the store, meet, and the groups come into being."),
    Example("never_starts", "The first hang everybody meets: one rank never starts."),
))  # fmt: skip
