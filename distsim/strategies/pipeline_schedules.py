"""The pipeline schedules that PyTorch has, as data: pure functions of the number of ranks, micro-batches and chunks per rank.

Each gives the rows of computations; messages are added by `pipeline_messages`. They follow torch.distributed.pipelining 2.13
(schedules.py) action by action; its pauses are left out, for a rank pauses by itself where what it needs is not there yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from distsim.strategies.pipeline_actions import OVERLAP, Action, Schedule


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s is on rank s % ranks: chunk after chunk around the ring."""
    return tuple(s % ranks for s in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two chunks per rank: down the ranks and up again, so that the first and the last stage share rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


# --- one stage per rank ---
def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    batches = range(micro_batches)
    rows = tuple((*(Action(r, "F", m) for m in batches), *(Action(r, "B", m) for m in batches)) for r in range(ranks))
    return Schedule(rows, loop_placement(ranks, 1), micro_batches, "fill_drain")


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """As many forwards first as there are ranks from here on, then one backward and one forward in turn (PipeDream-flush)."""
    rows = []
    for r in range(ranks):
        ahead = min(micro_batches, ranks - r)
        row = [Action(r, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            row.append(Action(r, "B", m))
            row += [Action(r, "F", m + ahead)] if m + ahead < micro_batches else []
        rows.append(tuple(row))
    return Schedule(tuple(rows), loop_placement(ranks, 1), micro_batches, "one_f_one_b")


# --- several stages per rank ---
def looped_bfs(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Breadth first: all micro-batches of a chunk before the next chunk (Lamy-Poirier 2022, arXiv:2211.05953)."""
    rows = []
    for r in range(ranks):
        mine = [r + c * ranks for c in range(chunks)]
        forward = [Action(s, "F", m) for s in mine for m in range(micro_batches)]
        rows.append((*forward, *(Action(s, "B", m) for s in reversed(mine) for m in reversed(range(micro_batches)))))
    return Schedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def per_round(ranks: int, micro_batches: int) -> int:
    """How many micro-batches a chunk takes in a row before the next chunk has its turn; 0 where it does not come out even."""
    rounds = max(1, micro_batches // ranks)
    return 0 if micro_batches % rounds else micro_batches // rounds


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): chunks take turns, one forward and one backward at a time."""
    rows = []
    for r in range(ranks):
        forward, backward = _turns(r, ranks, micro_batches, chunks, "B")
        ahead = min((chunks - 1) * per_round(ranks, micro_batches) + 2 * (ranks - 1 - r), len(forward))
        rows.append(tuple(_alternate(forward, backward, ahead)))
    return Schedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def zb1p(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Zero bubble with the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241): weight gradients fill the pauses of the end.

    The weights' half follows its input's half r micro-batches later on rank r.
    """
    rows = []
    for r in range(ranks):
        forward, backward = _turns(r, ranks, micro_batches, chunks, "I")
        ahead = min((chunks - 1) * per_round(ranks, micro_batches) + ranks - 1 - r, len(forward))
        row: list[Action] = []
        due = deque(a._replace(kind="W") for a in backward)
        inputs = 0
        for action in _alternate(forward, backward, ahead):
            row.append(action)
            if action.kind == "I":
                inputs += 1
                if inputs > r:
                    row.append(due.popleft())
        rows.append((*row, *due))
    return Schedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def _turns(r: int, ranks: int, micro_batches: int, chunks: int, kind: str) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards of a rank in the order in which chunks take turns."""
    size = per_round(ranks, micro_batches)
    order = [(c, m + k) for m in range(0, micro_batches, size) for c in range(chunks) for k in range(size)]
    forward = [Action(c * ranks + r, "F", m) for c, m in order]
    return forward, [Action((chunks - 1 - c) * ranks + r, kind, m) for c, m in order]


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """So many forwards ahead, then a forward and a backward in turn, then the other backwards."""
    row = forward[:ahead]
    for k, action in enumerate(backward):
        row += forward[ahead + k : ahead + k + 1]
        row.append(action)
    return row


# --- V: two stages per rank, the last beside the first ---
class _RowBuilder:
    """A row under way: counts micro-batches per stage and kind, and keeps the weights' halves that are due."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self.due: deque[Action] = deque()

    def next(self, stage: int, kind: str) -> Action:
        key = (stage, "F" if kind == "F" else "B")
        self.count[key] += 1
        return Action(stage, kind, self.count[key] - 1)

    def add(self, stage: int, kind: str) -> None:
        action = self.next(stage, kind)
        self.actions.append(action)
        if kind == "I":
            self.due.append(action._replace(kind="W"))

    def weights(self) -> None:
        if self.due:
            self.actions.append(self.due.popleft())

    def overlap(self, forward: int, backward: int) -> None:
        self.actions.append(Action(-1, OVERLAP, -1, (self.next(forward, "F"), self.next(backward, "B"))))


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """Zero bubble in V shape (arXiv:2401.10241, section 6). Meant for at least 2 * ranks - 1 micro-batches; fewer leave gaps."""
    count = max(2 * ranks - 1, micro_batches)
    rows = (_zbv_row(r, ranks, count) for r in range(ranks))
    kept = tuple(tuple(a for a in row if a.micro_batch < micro_batches) for row in rows)
    return Schedule(kept, v_placement(ranks), micro_batches, "runtime")


def _zbv_row(r: int, ranks: int, count: int) -> list[Action]:
    down, up, row = r, 2 * ranks - 1 - r, _RowBuilder()

    def both(stage: int) -> None:
        row.add(stage, "I")
        row.weights()

    for _ in range(2 * (ranks - r) - 1):
        row.add(down, "F")
    for _ in range(r):
        row.add(up, "F")
        row.add(down, "F")
    for _ in range(ranks - r):
        row.add(up, "F")
        both(up)
    while row.count[up, "F"] < row.count[down, "F"] or row.count[down, "F"] < count:
        if row.count[down, "F"] < count:
            row.add(down, "F")
        both(down)
        row.add(up, "F")
        both(up)
    for _ in range(r):
        row.add(down, "I")
        row.add(up, "I")
    return _zbv_end(row, down, up, ranks - r)


def _zbv_end(row: _RowBuilder, down: int, up: int, left: int) -> list[Action]:
    """The rest of the way down's input halves, each with a weights' half of that stage; then all weights' halves left."""
    for _ in range(left):
        row.add(down, "I")
        oldest = next(a for a in row.due if a.stage == down)
        row.due.remove(oldest)
        row.actions.append(oldest)
    return row.actions + [a for stage in (up, down) for a in row.due if a.stage == stage]


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """DualPipeV: forwards of one direction overlap backwards of the other (DeepSeek-V3, arXiv:2412.19437; github deepseek-ai/DualPipe)."""
    rows = tuple(tuple(_dualpipe_row(r, ranks, micro_batches)) for r in range(ranks))
    return Schedule(rows, v_placement(ranks), micro_batches, "runtime")


def _dualpipe_row(r: int, ranks: int, micro_batches: int) -> list[Action]:
    down, up, row = r, 2 * ranks - 1 - r, _RowBuilder()
    after = ranks - 1 - r
    for _ in range(2 * after):
        row.add(down, "F")
    for _ in range(r + 1):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(after):
        row.add(up, "I")
        row.weights()
        row.add(up, "F")
    for k in range(micro_batches - 2 * ranks + r + 1):
        if k == 0 and after == 0:
            row.add(down, "F")
            row.add(up, "B")
        else:
            row.overlap(down, up)
        row.overlap(up, down)
    for _ in range(after):
        row.add(up, "B")
        row.overlap(up, down)
    return _dualpipe_end(row, down, up, r, after)


def _dualpipe_end(row: _RowBuilder, down: int, up: int, r: int, after: int) -> list[Action]:
    """The backwards without forwards beside them: whole ones first, halves from the middle on."""
    for k in range(2 * (r + 1)):
        row.add(up if k % 2 == 0 else down, "B" if k <= r else "I")
    for _ in range(after):
        row.weights()
        row.add(down, "I")
    for _ in range(r + 1):
        row.weights()
    return row.actions


#: Schedules by the names that `schedule:` takes; all of (ranks, micro_batches, chunks).
BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, v: gpipe(p, m),
    "1f1b": lambda p, m, v: one_f_one_b(p, m),
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved,
    "zb1p": zb1p,
    "zbv": lambda p, m, v: zbv(p, m),
    "dualpipe_v": lambda p, m, v: dualpipe_v(p, m),
}
