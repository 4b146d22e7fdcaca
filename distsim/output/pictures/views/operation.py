"""The data of each rank before and after an operation. Everything follows from the operation's row
in the table of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean
from distsim.operations.core.operation_base import Operation, OutputEffect
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
)
from distsim.output.pictures.drawing.box_diagram import (
    NORMAL_SIZE,
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    TableCell,
    TextLine,
    plain_text,
    text_width,
)
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    PALE_FILL,
    WHITE,
    fill_colour,
    stroke_colour,
)

CellTable = tuple[tuple[TableCell, ...], ...]

_LETTERS = "abcdefgh"
_COLUMN_WIDTH, _GAP = 150.0, 24.0
#: More ranks than this make the sums too long to read.
MAX_RANKS = 8


def operation_diagram(
    row: type[Operation], n: int = 4, root: int = 0, members: Sequence[int] = ()
) -> BoxDiagram:
    """Before, the operation, after, for a row of the table and ``n`` ranks (at most MOST_RANKS), or
    for a group of these global ranks.
    """
    if row.kind == "collective":
        return _collective_diagram(row, len(members) or n, root, members)
    return (
        _message_diagram(row)
        if row.kind in ("p2p", "remote") and not row.signals
        else _local_diagram(row)
    )


def named_operation(subject: PictureInput, view: str = "operation") -> type[Operation]:
    """The operation that is to be drawn. Raises UsageError."""
    if subject.op is None:
        raise UsageError(
            f"the view {view} needs the name of an operation", "for example --op all_gather"
        )
    names = sorted((*OPERATIONS, *OPERATION_ALIASES))
    if subject.op not in names:
        raise UsageError(
            f"no operation `{subject.op}`{did_you_mean(subject.op, names)}",
            f"known: {', '.join(names)}",
        )
    return OPERATIONS[OPERATION_ALIASES.get(subject.op, subject.op)]


def shown_ranks(subject: PictureInput, view: str = "operation") -> tuple[int, ...]:
    """Global ranks of the group that is drawn: those that were named, or as many as were asked for.
    Raises UsageError.
    """
    ranks = subject.members or tuple(range(subject.ranks))
    if not 2 <= len(ranks) <= MAX_RANKS:
        raise UsageError(
            f"the view {view} draws 2 to {MAX_RANKS} ranks, not {len(ranks)}",
            "omit --ranks to draw 4 ranks",
        )
    return ranks


def _draw(subject: PictureInput) -> BoxDiagram:
    row, ranks = named_operation(subject), shown_ranks(subject)
    return operation_diagram(row, len(ranks), members=subject.members)


_EXAMPLE_OPS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
)
_EXAMPLES = tuple(
    GalleryExample(op, f"What each rank holds before and after {op}.") for op in _EXAMPLE_OPS
)
VIEW = PictureView(_draw, of="operation", examples=_EXAMPLES)


@dataclass(frozen=True, slots=True)
class _RankContents:
    """A rank, what it holds before and after, and whether it gives something and gets something."""

    name: str
    before: CellTable
    after: CellTable
    gives: bool = True
    gets: bool = True
    role: str = ""


# --- collectives ---
def _collective_diagram(
    row: type[Operation], n: int, root: int, members: Sequence[int] = ()
) -> BoxDiagram:
    effect = row.effect(n, root)
    moves = any(effect)
    holders: list[_RankContents] = []
    for r in range(n):
        name = f"rank {members[r] if members else r}"
        role = _role_text(row, r, root, bool(members))
        if not moves:  # a barrier: nothing but arrivals
            arrives = _single_cell_table(_plain_cell("arrives"))
            goes_on = _single_cell_table(_plain_cell("returns"))
            holders.append(_RankContents(name, arrives, goes_on, True, True, role))
            continue
        before = _repeated_per_tensor(row, _input_table(row, r, n, root))
        after = _repeated_per_tensor(row, _output_table(row, effect[r], r, n))
        gives = row.gives == "all" or r == root
        holders.append(_RankContents(name, before, after, gives, effect[r] is not None, role))
    about = f"all {n} ranks of the group call it"
    about += (
        f"; rank {members[root] if members else root} is the root ({row.root_field})"
        if row.root_field
        else ""
    )
    about += "; one colour per source rank" if moves else ""
    if moves and row.input_parts == "n":
        about += f", a1 is part 1 of the data of rank {members[0] if members else 0}"
    about += (
        "; it handles every tensor of its list the same way (here x and y)" if row.coalesces else ""
    )
    return _before_after_diagram(row, holders, about)


def _role_text(row: type[Operation], rank: int, root: int, grouped: bool) -> str:
    """What stands under a rank's name: its number in the group, and whether it is the root."""
    said = ["root"] if row.root_field and rank == root else []
    said += [f"group rank {rank}"] if grouped else []
    return ", ".join(said) or (" " if row.root_field else "")


def _repeated_per_tensor(row: type[Operation], table: CellTable) -> CellTable:
    """A coalesced launch does with each tensor of its list what its operation does with one."""
    if row.coalesces is None:
        return table
    return tuple(
        (_plain_cell(name if k == 0 else ""), *cells)
        for name in "xy"
        for k, cells in enumerate(table)
    )


def _piece_label(rank: int, part: int, many: bool) -> str:
    return f"{_LETTERS[rank]}{part}" if many else _LETTERS[rank]


def _piece_cell(rank: int, part: int, many: bool) -> TableCell:
    return TableCell(_piece_label(rank, part, many), fill_colour(rank), bold=True)


def _plain_cell(text: str) -> TableCell:
    return TableCell(text, WHITE, colour=GREY, border=False)


def _input_table(row: type[Operation], rank: int, n: int, root: int) -> CellTable:
    if row.gives == "root" and rank != root:
        return ((_plain_cell("empty buffer" if row.gets == "all" else "nothing"),),)
    many = row.input_parts == "n"
    return tuple((_piece_cell(rank, part, many),) for part in range(n if many else 1))


def _output_table(row: type[Operation], effect: OutputEffect, rank: int, n: int) -> CellTable:
    if effect is None and "tensor" in row.model_fields:
        return _input_table(row, rank, n, rank)  # in place: it keeps what it had
    if effect is None:
        return ((_plain_cell("nothing"),),)
    many = row.input_parts == "n"
    return tuple(
        (_sum_cell([_piece_cell(s.rank, s.part, many) for s in sources]),) for sources in effect
    )


def _sum_cell(pieces: list[TableCell]) -> TableCell:
    return pieces[0] if len(pieces) == 1 else TableCell(parts=tuple(pieces))


def _before_after_diagram(
    row: type[Operation], holders: list[_RankContents], about: str
) -> BoxDiagram:
    """Three rows of boxes: what ranks hold, the operation as a band, what they hold then."""
    width = max(
        _COLUMN_WIDTH,
        *(_cells_width(table) for one in holders for table in (one.before, one.after)),
    )
    xs = [i * (width + _GAP) for i in range(len(holders))]
    head = 58.0 if any(one.role for one in holders) else 42.0
    high_before = max(len(one.before) for one in holders) * 26.0 + head
    high_after = max(len(one.after) for one in holders) * 26.0 + head
    y_band = high_before / 2 + 74.0
    y_after = y_band + 74.0 + high_after / 2
    nodes, edges = [], []
    for rank, (x, one) in enumerate(zip(xs, holders, strict=True)):
        border = stroke_colour(rank)
        name: tuple[TextLine, ...] = (TextLine(one.name, bold=True),)
        name += (TextLine(one.role, colour=GREY, size=11),) if one.role else ()
        nodes.append(
            DiagramNode(
                f"before{rank}",
                name,
                one.before,
                WHITE,
                border,
                at=(x, 0.0),
                size=(width, high_before),
                width=1.6,
            )
        )
        nodes.append(
            DiagramNode(
                f"after{rank}",
                name,
                one.after,
                WHITE,
                border,
                at=(x, y_after),
                size=(width, high_after),
                width=1.6,
            )
        )
        nodes.append(DiagramNode(f"in{rank}", shape="point", at=(x, y_band - 22.0), part_of="op"))
        nodes.append(DiagramNode(f"out{rank}", shape="point", at=(x, y_band + 22.0), part_of="op"))
        edges += (
            [DiagramEdge(f"before{rank}", f"in{rank}", colour=border, width=2.4)]
            if one.gives
            else []
        )
        edges += (
            [DiagramEdge(f"out{rank}", f"after{rank}", colour=INK, width=2.4)] if one.gets else []
        )
    left = xs[0] - width / 2 - 52.0
    nodes += [_side_word("before", left, 0.0), _side_word("after", left, y_after)]
    band = DiagramNode(
        "op",
        (TextLine(row.op, bold=True, size=17),),
        fill=PALE_FILL,
        border=INK,
        at=((xs[0] + xs[-1]) / 2, y_band),
        size=(xs[-1] - xs[0] + width, 44.0),
    )
    return BoxDiagram(
        row.op, about, (*nodes, band), tuple(edges), notes=_wait_notes(row), engine="neato"
    )


def _side_word(word: str, x: float, y: float) -> DiagramNode:
    """The name of a row of boxes, on its left."""
    line = TextLine(word, bold=True, colour=GREY, size=14)
    return DiagramNode(f"side_{word}", (line,), shape="plain", at=(x, y))


def _cells_width(table: CellTable) -> float:
    def one(cell: TableCell) -> float:
        if cell.parts:
            return sum(text_width(p.text, p.size, True) + 20.0 for p in cell.parts)
        return text_width(cell.text, cell.size, cell.bold) + 16.0

    return max(sum(one(cell) for cell in row) for row in table) + 16.0


def _wait_notes(row: type[Operation]) -> tuple[str, ...]:
    """When the operation blocks, in the words of its row."""
    lines = _wrapped_lines(f"Blocking: {row.words.waits}", 92)
    return (
        tuple(_wrapped_lines(" ".join(lines), 92 // len(lines) + 24))
        if len(lines) > 1
        else tuple(lines)
    )


def _wrapped_lines(text: str, width: int) -> list[str]:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# --- messages ---
def _message_diagram(row: type[Operation]) -> BoxDiagram:
    """Rank 0 sends `a` to rank 1."""
    caller = 0 if row.direction == "send" or (row.kind == "remote" and row.gives == "all") else 1
    request: CellTable = _single_cell_table(_request_cell("open")) if row.nonblocking else ()
    a, late = (
        _single_cell_table(TableCell(text, fill_colour(0), bold=True))
        for text in ("a", "a, after the wait")
    )
    after = [a, late if row.nonblocking and caller == 1 else a]
    after[caller] += request
    other = "recv" if caller == 0 else "send"
    about = f"rank {caller} calls it; rank {1 - caller} must call {other} or i{other}"
    about = (
        f"rank {caller} calls it; rank {1 - caller} takes no part"
        if row.kind == "remote"
        else about
    )
    holders = [
        _RankContents("rank 0", a, after[0], gets=False),
        _RankContents(
            "rank 1", _single_cell_table(_plain_cell("empty buffer")), after[1], gives=False
        ),
    ]
    return _before_after_diagram(row, holders, about)


def _request_cell(state: str) -> TableCell:
    return TableCell(f"request: {state}", PALE_FILL, colour=INK)


# --- all others: in the row's words ---
def _local_diagram(row: type[Operation]) -> BoxDiagram:
    before: CellTable = _text_table(row.words.before)
    after: CellTable = _text_table(row.words.after)
    if row.kind == "wait":
        before = _single_cell_table(_request_cell("open")) + before
        after = _single_cell_table(_request_cell("done")) + after
    every = row.kind == "group"
    about = "every rank calls it" if every else "one rank calls it"
    return _before_after_diagram(
        row, [_RankContents("every rank" if every else "a rank", before, after)], about
    )


def _single_cell_table(cell: TableCell) -> CellTable:
    return ((cell,),)


def _text_table(text: str) -> CellTable:
    return tuple(
        (TableCell(line, WHITE, size=NORMAL_SIZE, border=False),)
        for line in _wrapped_lines(plain_text(text), 48)
    )
