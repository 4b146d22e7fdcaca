"""What each rank holds before an operation and after it. Everything follows from the operation's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.errors import UsageError
from distsim.names import near
from distsim.ops.base import Effect, Op
from distsim.ops.table import ALIASES, OPS
from distsim.views.drawing.palette import GREY, INK, PALE, WHITE, fill, stroke
from distsim.views.drawing.records import NORMAL, Cell, Edge, Node, Picture, Text, plain_text, text_width
from distsim.views.drawing.view import Example, Subject, View

Table = tuple[tuple[Cell, ...], ...]

_LETTERS = "abcdefgh"
_COLUMN, _GAP = 150.0, 24.0
#: More ranks than this make the sums too long to read.
MOST_RANKS = 8


def op_picture(row: type[Op], n: int = 4, root: int = 0, members: Sequence[int] = ()) -> Picture:
    """Before, the operation, after, for a row of the table and ``n`` ranks (at most MOST_RANKS), or for a group of these global ranks."""
    if row.kind == "collective":
        return _collective(row, len(members) or n, root, members)
    return _message(row) if row.kind in ("p2p", "remote") and not row.signals else _plain(row)


def named_row(subject: Subject, view: str = "op") -> type[Op]:
    """The operation that is to be drawn. Raises UsageError."""
    if subject.op is None:
        raise UsageError(f"the view {view} draws one operation and none was named", "name one, as all_gather")
    names = sorted((*OPS, *ALIASES))
    if subject.op not in names:
        raise UsageError(f"there is no operation {subject.op}{near(subject.op, names)}", f"there is {', '.join(names)}")
    return OPS[ALIASES.get(subject.op, subject.op)]


def shown_ranks(subject: Subject, view: str = "op") -> tuple[int, ...]:
    """Global ranks of the group that is drawn: those that were named, or as many as were asked for. Raises UsageError."""
    ranks = subject.members or tuple(range(subject.ranks))
    if not 2 <= len(ranks) <= MOST_RANKS:
        raise UsageError(f"the view {view} draws 2 to {MOST_RANKS} ranks, not {len(ranks)}", "leave the number out: it draws 4")
    return ranks


def _drawn(subject: Subject) -> Picture:
    row, ranks = named_row(subject), shown_ranks(subject)
    return op_picture(row, len(ranks), members=subject.members)


_DRAWN = ("broadcast", "reduce", "all_reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send")
_EXAMPLES = tuple(Example(op, f"What each rank holds before and after {op}.") for op in _DRAWN)
VIEW = View(_drawn, of="operation", examples=_EXAMPLES)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A rank, what it holds before and after, and whether it gives something and gets something."""

    name: str
    before: Table
    after: Table
    gives: bool = True
    gets: bool = True
    role: str = ""


# --- collectives ---
def _collective(row: type[Op], n: int, root: int, members: Sequence[int] = ()) -> Picture:
    effect = row.effect(n, root)
    moves = any(effect)
    holders = [
        _Holder(
            f"rank {members[r] if members else r}",
            _listed(row, _input(row, r, n, root)) if moves else _one(_told("arrives")),
            _listed(row, _output(row, effect[r], r, n)) if moves else _one(_told("goes on")),
            not moves or row.gives == "all" or r == root,
            not moves or effect[r] is not None,
            _role(row, r, root, bool(members)),
        )
        for r in range(n)
    ]
    about = f"all {n} ranks of the group call it"
    about += f"; rank {members[root] if members else root} is the root ({row.root_field})" if row.root_field else ""
    about += "; one colour for each rank's data" if moves else ""
    about += f", a1 is part 1 of rank {members[0] if members else 0}'s" if moves and row.input_parts == "n" else ""
    about += "; the same happens to every tensor of its list, x and y here" if row.coalesces else ""
    return _before_after(row, holders, about)


def _role(row: type[Op], rank: int, root: int, grouped: bool) -> str:
    """What stands under a rank's name: its number in the group, and whether it is the root."""
    said = ["root"] if row.root_field and rank == root else []
    said += [f"group rank {rank}"] if grouped else []
    return ", ".join(said) or (" " if row.root_field else "")


def _listed(row: type[Op], table: Table) -> Table:
    """A coalesced launch does with each tensor of its list what its operation does with one."""
    if row.coalesces is None:
        return table
    return tuple((_told(name if k == 0 else ""), *cells) for name in "xy" for k, cells in enumerate(table))


def _letter(rank: int, part: int, many: bool) -> str:
    return f"{_LETTERS[rank]}{part}" if many else _LETTERS[rank]


def _piece(rank: int, part: int, many: bool) -> Cell:
    return Cell(_letter(rank, part, many), fill(rank), bold=True)


def _told(text: str) -> Cell:
    return Cell(text, WHITE, colour=GREY, border=False)


def _input(row: type[Op], rank: int, n: int, root: int) -> Table:
    if row.gives == "root" and rank != root:
        return ((_told("room for it" if row.gets == "all" else "nothing"),),)
    many = row.input_parts == "n"
    return tuple((_piece(rank, part, many),) for part in range(n if many else 1))


def _output(row: type[Op], effect: Effect, rank: int, n: int) -> Table:
    if effect is None and "tensor" in row.model_fields:
        return _input(row, rank, n, rank)  # in place: it keeps what it had
    if effect is None:
        return ((_told("nothing"),),)
    many = row.input_parts == "n"
    return tuple((_sum([_piece(s.rank, s.part, many) for s in sources]),) for sources in effect)


def _sum(pieces: list[Cell]) -> Cell:
    return pieces[0] if len(pieces) == 1 else Cell(parts=tuple(pieces))


def _before_after(row: type[Op], holders: list[_Holder], about: str) -> Picture:
    """Three rows of boxes: what ranks hold, the operation as a band, what they hold then."""
    width = max(_COLUMN, *(_cells_width(table) for one in holders for table in (one.before, one.after)))
    xs = [i * (width + _GAP) for i in range(len(holders))]
    head = 58.0 if any(one.role for one in holders) else 42.0
    high_before = max(len(one.before) for one in holders) * 26.0 + head
    high_after = max(len(one.after) for one in holders) * 26.0 + head
    y_band = high_before / 2 + 74.0
    y_after = y_band + 74.0 + high_after / 2
    nodes, edges = [], []
    for rank, (x, one) in enumerate(zip(xs, holders, strict=True)):
        border = stroke(rank)
        name: tuple[Text, ...] = (Text(one.name, bold=True),)
        name += (Text(one.role, colour=GREY, size=11),) if one.role else ()
        nodes.append(Node(f"before{rank}", name, one.before, WHITE, border, at=(x, 0.0), size=(width, high_before), width=1.6))
        nodes.append(Node(f"after{rank}", name, one.after, WHITE, border, at=(x, y_after), size=(width, high_after), width=1.6))
        nodes.append(Node(f"in{rank}", shape="point", at=(x, y_band - 22.0), part_of="op"))
        nodes.append(Node(f"out{rank}", shape="point", at=(x, y_band + 22.0), part_of="op"))
        edges += [Edge(f"before{rank}", f"in{rank}", colour=border, width=2.4)] if one.gives else []
        edges += [Edge(f"out{rank}", f"after{rank}", colour=INK, width=2.4)] if one.gets else []
    left = xs[0] - width / 2 - 52.0
    for y, word in ((0.0, "before"), (y_after, "after")):
        nodes.append(Node(f"side_{word}", (Text(word, bold=True, colour=GREY, size=14),), shape="plain", at=(left, y)))
    band = Node("op", (Text(row.op, bold=True, size=17),), fill=PALE, border=INK,
                at=((xs[0] + xs[-1]) / 2, y_band), size=(xs[-1] - xs[0] + width, 44.0))  # fmt: skip
    return Picture(row.op, about, (*nodes, band), tuple(edges), notes=_notes(row), engine="neato")


def _cells_width(table: Table) -> float:
    def one(cell: Cell) -> float:
        if cell.parts:
            return sum(text_width(p.text, p.size, True) + 20.0 for p in cell.parts)
        return text_width(cell.text, cell.size, cell.bold) + 16.0

    return max(sum(one(cell) for cell in row) for row in table) + 16.0


def _notes(row: type[Op]) -> tuple[str, ...]:
    """Who waits for whom, in the row's own words."""
    lines = _wrapped(f"Who waits? {row.words.waits}", 92)
    return tuple(_wrapped(" ".join(lines), 92 // len(lines) + 24)) if len(lines) > 1 else tuple(lines)


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# --- messages ---
def _message(row: type[Op]) -> Picture:
    """Rank 0 sends `a` to rank 1."""
    caller = 0 if row.direction == "send" or (row.kind == "remote" and row.gives == "all") else 1
    request: Table = _one(_request("open")) if row.nonblocking else ()
    a, late = (_one(Cell(text, fill(0), bold=True)) for text in ("a", "a, after the wait"))
    after = [a, late if row.nonblocking and caller == 1 else a]
    after[caller] += request
    other = "recv" if caller == 0 else "send"
    about = f"rank {caller} calls it; rank {1 - caller} must call {other} or i{other}"
    about = f"rank {caller} calls it; rank {1 - caller} takes no part" if row.kind == "remote" else about
    holders = [_Holder("rank 0", a, after[0], gets=False), _Holder("rank 1", _one(_told("room for it")), after[1], gives=False)]
    return _before_after(row, holders, about)


def _request(state: str) -> Cell:
    return Cell(f"request: {state}", PALE, colour=INK)


# --- all others: in the row's words ---
def _plain(row: type[Op]) -> Picture:
    before: Table = _words_table(row.words.before)
    after: Table = _words_table(row.words.after)
    if row.kind == "wait":
        before = _one(_request("open")) + before
        after = _one(_request("done")) + after
    every = row.kind == "group"
    about = "every rank calls it" if every else "one rank calls it"
    return _before_after(row, [_Holder("every rank" if every else "a rank", before, after)], about)


def _one(cell: Cell) -> Table:
    return ((cell,),)


def _words_table(text: str) -> Table:
    return tuple((Cell(line, WHITE, size=NORMAL, border=False),) for line in _wrapped(plain_text(text), 48))
