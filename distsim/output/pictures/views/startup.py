"""The start-up of a job: the store opens, ranks register, exchange addresses through its keys, and
create the groups.
"""

from __future__ import annotations

from distsim.output.pictures.components.call_labels import ranks_in_words
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import SMALL_SIZE, LegendKey, TextLine, clipped
from distsim.output.pictures.drawing.palette import (
    BLUE,
    GREY,
    INK,
    PALE_FILL,
    RED,
    RED_FILL,
    WHITE,
    fill_colour,
)
from distsim.output.pictures.drawing.sequence_diagram import (
    LifelinePoint,
    SequenceArrow,
    SequenceBand,
    SequenceBox,
    SequenceDiagram,
    SequenceParticipant,
)
from distsim.program.model import Program
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.scenario.startup.records import (
    RendezvousInfo,
    StartupEnvironment,
    StartupOutcome,
    StartupProcess,
    StartupResult,
)
from distsim.scenario.startup.rendezvous import simulate_startup

_MAX_RANKS, _MAX_GROUPS = 8, 10
#: The number of ranks that are drawn of a larger world. They stand for the others, so that few
#: columns suffice and the picture is not mostly empty.
_RANKS_OF_LARGE_WORLDS = 4
#: For larger worlds without start-up settings, a successful start-up of a few ranks is drawn.
_MAX_SIMULATED_RANKS = 4096
_MAX_LINE_LENGTH = 24


def startup_diagram(program: Program, master: str = "MASTER_ADDR:MASTER_PORT") -> SequenceDiagram:
    """A sequence diagram of ``init_process_group``.

    ``master``: the address of the store, unless the file sets another one.
    """
    return _StartupDrawing(program, master).diagram()


def _default_startup(program: Program, absent: tuple[int, ...]) -> StartupResult:
    """The start-up of a program without settings for it: env:// with all its variables."""
    size = program.world_size if program.world_size <= _MAX_SIMULATED_RANKS else _MAX_RANKS
    found = [
        StartupProcess(
            r,
            program.node(r),
            "gloo",
            30 * 60 * 10**9,
            env=_environment(r, size),
            absent=r in absent,
        )
        for r in range(size)
    ]
    return simulate_startup(found, StartupEnvironment(size, {"MASTER_ADDR": 0}))


def _environment(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "MASTER_ADDR",
        "MASTER_PORT": "29500",
    }


class _StartupDrawing:
    """One diagram, built stage by stage; ``row`` is the row of the next element."""

    def __init__(self, program: Program, master: str) -> None:
        self.program = program
        self.absent = tuple(sorted({f.rank for f in program.faults if f.kind == "absent"}))
        self.found = program.startup or _default_startup(program, self.absent)
        self.kind = self.found.kind
        self.master = clipped(self.found.where if program.startup else master, 48)
        causes = tuple(sorted({rank for cause in self.found.causes for rank in cause.ranks}))
        self.bad = tuple(dict.fromkeys((*self.absent, *causes)))
        self.shown = _shown_ranks(program.world_size, self.bad)
        self.wrong = bool(self.absent) or self.found.failed
        self.items: list[SequenceBox] = []
        self.bands: list[SequenceBand] = []
        self.arrows: list[SequenceArrow] = []
        self.row = 0

    def diagram(self) -> SequenceDiagram:
        self._launch()
        self._register()
        self._exchange()
        if self.wrong:
            self._stuck()
        else:
            self._ready()
        hidden = self.program.world_size - len(self.shown)
        notes = tuple(
            clipped(cause.message.partition("\n")[0], 110) for cause in self.found.causes[:3]
        )
        notes += (f"{hidden} more ranks are not drawn; they start like rank 1",) if hidden else ()
        legend = (
            (LegendKey(RED, "failure, and ranks that wait because of it"),) if self.wrong else ()
        )
        title = f"{clipped(self.program.name, 50)}: start-up" + (
            f", {ranks_in_words(self.absent)} missing" if self.absent else ""
        )
        return SequenceDiagram(
            title,
            "time runs downwards; init_process_group returns when all ranks have arrived",
            self._columns(),
            tuple(self.items),
            tuple(self.bands),
            tuple(self.arrows),
            legend,
            notes,
        )

    def _columns(self) -> tuple[SequenceParticipant, ...]:
        server = {"rank 0": "on rank 0", "nobody": "without a server"}.get(
            self.found.server, f"of {self.found.server}"
        )
        about = {
            "tcp": ("TCP store", f"a key-value table {server}"),
            "file": ("file store", "ranks append keys, all ranks read them"),
            "hash": ("hash store", "a table in each process"),
            "launcher": ("MPI", "the launcher knows all ranks"),
        }[self.kind]
        lines = (
            TextLine(about[0], bold=True),
            TextLine(self.master, size=SMALL_SIZE),
            TextLine(about[1], size=SMALL_SIZE),
        )
        store = SequenceParticipant(
            lines,
            "store",
            RED_FILL if self.found.server == "nobody" else PALE_FILL,
            self.found.server == "nobody",
        )
        ranks = [
            SequenceParticipant(
                (
                    TextLine(f"rank {r}", bold=True),
                    TextLine(f"node {self.program.node(r)}", size=SMALL_SIZE),
                ),
                f"rank {r}",
                RED_FILL if r in self.bad else PALE_FILL,
                r in self.absent,
            )
            for r in self.shown
        ]
        return (store, *ranks)

    def _item(
        self,
        column: int,
        lines: tuple[TextLine, ...],
        colour: str = WHITE,
        border: str = INK,
        **more: bool,
    ) -> str:
        name = f"i{len(self.items)}"
        self.items.append(SequenceBox(name, column, self.row, lines, colour, border, **more))
        return name

    def _red(self, column: int, *words: str) -> None:
        lines = (
            TextLine(words[0], bold=True, colour=RED),
            *(TextLine(clipped(w, 40), colour=RED, size=SMALL_SIZE) for w in words[1:]),
        )
        self._item(column, lines, RED_FILL, RED)

    def _ending(self, rank: int) -> StartupOutcome:
        return self.found.endings.get(rank, StartupOutcome("passes"))

    def _address(self, rank: int) -> RendezvousInfo | None:
        brought = self.found.entrances
        here = rendezvous_info(brought[rank]) if rank < len(brought) else None
        return here if isinstance(here, RendezvousInfo) else None

    # --- one stage after the other ---
    def _launch(self) -> None:
        """The launcher starts the processes; variables or arguments give each process its rank."""
        for column, rank in enumerate(self.shown, 1):
            if rank in self.absent:
                self._item(
                    column,
                    (TextLine("never starts", bold=True, colour=RED),),
                    RED_FILL,
                    RED,
                    dashed=True,
                )
                continue
            said = [
                TextLine(clipped(words, _MAX_LINE_LENGTH), size=SMALL_SIZE)
                for words in self._rank_settings(rank)
            ]
            self._item(column, (TextLine("starts", bold=True), *said), PALE_FILL, GREY)
        self.row += 1

    def _rank_settings(self, rank: int) -> tuple[str, ...]:
        brought = self.found.entrances[rank] if rank < len(self.found.entrances) else None
        local = rank % self.program.local_size
        if brought is None or (brought.env.get("RANK") and brought.rank_argument == -1):
            number = brought.env["RANK"] if brought is not None else str(rank)
            size = (
                brought.env.get("WORLD_SIZE", "not set")
                if brought is not None
                else str(self.program.world_size)
            )
            return (
                f"RANK={number} LOCAL_RANK={local}",
                f"WORLD_SIZE={size if self.program.startup else self.program.world_size}",
            )
        if brought.rank_argument == -1 and brought.world_size_argument == -1:
            return ("RANK not set",)
        said = [
            f"{name}={n}"
            for name, n in (
                ("rank", brought.rank_argument),
                ("world_size", brought.world_size_argument),
            )
            if n != -1
        ]
        return tuple(said)

    def _register(self) -> None:
        """The ranks open the store or connect to it, one after the other.

        A rank whose settings are invalid raises here.
        """
        if self.kind in ("launcher", "hash"):
            return
        registered = {event.rank for event in self.found.events if event.kind == "registers"}
        opened = {event.rank for event in self.found.events if event.kind == "opens"}
        row_of_refusals = self.row
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if ending.status == "raises" and rank not in registered:
                self._red(column, "raises immediately", ending.error, *self._why(rank))
        self.row += any(item.row == row_of_refusals for item in self.items)
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if rank in self.absent or (ending.status == "raises" and rank not in registered):
                continue
            lost = rank not in registered and rank < len(self.found.entrances)
            if self.kind == "file":
                said = "opens the file" if not lost else "uses another file"
            else:
                opens = (
                    "opens the store"
                    if rank in opened
                    else f"registers as rank {self._claimed_rank(rank)}"
                )
                said = opens
                if lost:
                    said = "opens another store" if rank in opened else "no answer"
            caller = self._item(column, (TextLine("init_process_group", bold=True),), in_arrow=True)
            words = f"init_process_group: {said}"
            self.arrows.append(
                SequenceArrow(
                    caller,
                    LifelinePoint(0, self.row),
                    said,
                    RED if lost else BLUE,
                    dashed=lost,
                    words=words,
                )
            )
            self.row += 1

    def _why(self, rank: int) -> tuple[str, ...]:
        texts = [
            event.text
            for event in self.found.events
            if (event.rank, event.kind) == (rank, "raises")
        ]
        return _two_lines(texts[0] if texts else "")

    def _has_event(self, rank: int, kind: str) -> bool:
        return any((event.rank, event.kind) == (rank, kind) for event in self.found.events)

    def _claimed_rank(self, rank: int) -> int:
        here = self._address(rank)
        return here.rank if here is not None else rank

    def _exchange(self) -> None:
        """set: each rank stores its address under its rank; get waits until the key exists."""
        setters = [rank for rank in self.shown if self._has_event(rank, "sets")]
        if not setters or self.kind in ("launcher", "hash"):
            return
        # nccl has one key, set at first use.
        if self.program.backend == "nccl":
            return
        for column, rank in enumerate(self.shown, 1):
            if rank in setters:
                said = f"set key {self._claimed_rank(rank)}"
                caller = self._item(column, (TextLine(said, bold=True),), WHITE, GREY)
                self.arrows.append(
                    SequenceArrow(
                        caller,
                        LifelinePoint(0, self.row),
                        "its address",
                        BLUE,
                        words=f"{said}: its address",
                    )
                )
                self.row += 1

    def _fetch(self) -> None:
        """get: each rank reads the others' addresses; the store answers once they exist."""
        if self.kind in ("launcher", "hash") or self.program.backend == "nccl":
            return
        world = self.program.world_size
        for column, rank in enumerate(self.shown, 1):
            others = [r for r in range(world) if r != rank]
            if not others:
                continue
            said = (
                f"get key {others[0]}"
                if len(others) == 1
                else f"get keys {ranks_in_words(others, 2).partition(' ')[2]}"
            )
            self._item(column, (TextLine(clipped(said, _MAX_LINE_LENGTH), bold=True),), WHITE, GREY)
            store = self._item(
                0, (TextLine("addresses of the others", size=SMALL_SIZE),), WHITE, GREY
            )
            self.arrows.append(
                SequenceArrow(
                    store,
                    f"i{len(self.items) - 2}",
                    "",
                    BLUE,
                    words=f"{clipped(said, _MAX_LINE_LENGTH)}: their addresses",
                )
            )
            self.row += 1

    def _stuck(self) -> None:
        """The red end: what the store lacks, and what each remaining rank waits for or raises."""
        if self.kind == "tcp":
            self._red(0, *self._lacks())
        for column, rank in enumerate(self.shown, 1):
            ending = self._ending(rank)
            if ending.status == "waits" or (rank not in self.absent and not self.found.failed):
                missing = (
                    clipped(ending.missing.partition(";")[0], 34)
                    if ending.missing
                    else ranks_in_words(self.absent)
                )
                until = (
                    f"timeout after {ending.after_ns / 1e9:g} s" if ending.after_ns else "forever"
                )
                self._red(
                    column,
                    "waits",
                    f"for {missing}",
                    until if self.program.startup else "until its timeout",
                )
            elif ending.status == "apart":
                self._red(column, "in a separate group", "its first collective", "never completes")
            elif ending.status == "raises" and self._has_event(rank, "registers"):
                self._red(column, "raises", ending.error, *self._why(rank))
        self.row += 1

    def _lacks(self) -> tuple[str, ...]:
        """The final state in the column of the store."""
        world = self.program.world_size
        here = len({event.rank for event in self.found.events if event.kind == "registers"})
        if self.found.server == "nobody":
            return (
                "no store",
                "rank 0 would open it" if 0 in self.absent else "no rank serves it",
            )
        if here < world:
            missing = (
                f"missing: {ranks_in_words(self.absent)}"
                if self.absent
                else f"{world - here} did not register"
            )
            return f"{here} of {world} ranks arrived", missing
        return f"all {world} ranks arrived", "but do not find each other"

    def _ready(self) -> None:
        everyone = tuple(range(len(self.shown) + 1))
        ranks = everyone[1:]
        world = self.program.world_size
        met = {
            "tcp": f"all {world} ranks have arrived (get waits until its key is set)",
            "file": f"all {world} ranks have arrived (each rank reads the file for all keys)",
            "launcher": f"all {world} ranks have arrived: "
            "mpirun started them together, so no store is needed",
        }.get(self.kind, f"all {world} ranks have arrived")
        self._band(
            everyone,
            met if self.program.backend != "nccl" else f"all {world} ranks have arrived",
            PALE_FILL,
            GREY,
        )
        self._fetch()
        eager = self.program.options.get("init") == "eager"
        if self.program.backend == "gloo":
            self._band(ranks, "every pair of ranks connects immediately", WHITE, GREY, dashed=True)
        self._band(
            ranks,
            f"default group: all {world} ranks ({clipped(self.program.backend, 12)})",
            "#DCE9F5",
        )
        self._groups(ranks)
        if self.program.backend == "nccl":
            when = (
                "immediately (init: eager)"
                if eager
                else "at the first use of a group or pair (init: lazy)"
            )
            self._band(ranks, f"NCCL creates communicators {when}", WHITE, GREY, dashed=True)
            self._band(
                everyone,
                "for each communicator, its rank 0 sets an id as a key, and the other ranks get it",
                WHITE,
                GREY,
                dashed=True,
            )

    def _groups(self, ranks: tuple[int, ...]) -> None:
        groups = self.program.groups[1:]
        if len(groups) > _MAX_GROUPS or len(self.shown) < self.program.world_size:
            self._axes(ranks)
            return
        for group in groups:
            members = tuple(i for i, r in enumerate(self.shown, 1) if r in group.ranks)
            if members:
                self._band(members, f"group {clipped(group.name, 30)}", fill_colour(group.id - 1))

    def _axes(self, ranks: tuple[int, ...]) -> None:
        """A band for the groups of each axis, such as ``dp[pp=0]`` and ``dp[pp=1]``."""
        sizes_by_axis: dict[str, list[int]] = {}
        for group in self.program.groups[1:]:
            sizes_by_axis.setdefault(group.name.partition("[")[0], []).append(group.size)
        for number, (axis, sizes) in enumerate(sizes_by_axis.items()):
            if number == _MAX_GROUPS:
                self._band(ranks, f"{len(sizes_by_axis) - number} more groups", WHITE, GREY)
                return
            count = f"{len(sizes)} groups" if len(sizes) > 1 else "1 group"
            size = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
            self._band(ranks, f"{clipped(axis, 24)}: {count} of {size} ranks", fill_colour(number))

    def _band(
        self,
        columns: tuple[int, ...],
        text: str,
        colour: str,
        border: str = INK,
        dashed: bool = False,
    ) -> None:
        title = (TextLine(text, bold=not dashed),)
        self.bands.append(
            SequenceBand(
                f"b{len(self.bands)}", columns, self.row, title, {}, colour, border, dashed
            )
        )
        self.row += 1


def _two_lines(text: str) -> tuple[str, ...]:
    """A sentence in two short lines."""
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > _MAX_LINE_LENGTH and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return (
        (lines[0], clipped(" ".join(lines[1:]), _MAX_LINE_LENGTH + 4))
        if len(lines) > 1
        else (lines[0],)
    )


def _shown_ranks(world_size: int, special: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks of a small world. Of a large one, the first ranks, and either up to two later
    ranks that fail or never start, or the last rank.
    """
    if world_size <= _MAX_RANKS:
        return tuple(range(world_size))
    late = sorted(rank for rank in special if rank >= _RANKS_OF_LARGE_WORLDS - 1)[:2]
    last = late or [world_size - 1]
    return (*range(_RANKS_OF_LARGE_WORLDS - len(last)), *last)


def _draw(subject: PictureInput) -> SequenceDiagram:
    return startup_diagram(require_input(subject.program, "program"), subject.master)


VIEW = PictureView(
    _draw,
    examples=(
        GalleryExample(
            "hybrid",
            "How a job starts: ranks register at the store, exchange addresses, "
            "and create the groups.",
        ),
        GalleryExample("never_starts", "The most common start-up hang: one rank never starts."),
        GalleryExample(
            "startup/file", "Start-up without a port: ranks exchange addresses through a file."
        ),
        GalleryExample(
            "startup/rank_twice",
            "Two processes with the same rank: all ranks wait for the key of the missing rank.",
        ),
        GalleryExample(
            "startup/variable_missing",
            "env:// with a missing variable: one rank raises immediately, the others wait.",
        ),
    ),
)
