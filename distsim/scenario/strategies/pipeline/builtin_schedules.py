"""The pipeline schedules that PyTorch has, as data: pure functions of the number of ranks,
micro-batches and chunks per rank.

Each gives the rows of computations; messages are added by `pipeline_messages`. They follow
torch.distributed.pipelining 2.13 (schedules.py) action by action; its pauses are left out, for a
rank pauses by itself where what it needs is not there yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from distsim.scenario.strategies.pipeline.actions import OVERLAP, PipelineAction, PipelineSchedule


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s is on rank s % ranks: chunk after chunk around the ring."""
    return tuple(s % ranks for s in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two chunks per rank: down the ranks and up again, so that the first and the last stage share
    rank 0.
    """
    return (*range(ranks), *reversed(range(ranks)))


# --- one stage per rank ---
def gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    batches = range(micro_batches)
    rows = tuple(
        (
            *(PipelineAction(r, "F", m) for m in batches),
            *(PipelineAction(r, "B", m) for m in batches),
        )
        for r in range(ranks)
    )
    return PipelineSchedule(rows, loop_placement(ranks, 1), micro_batches, "fill_drain")


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """As many forwards first as there are ranks from here on, then one backward and one forward in
    turn (PipeDream-flush).
    """
    rows = []
    for r in range(ranks):
        ahead = min(micro_batches, ranks - r)
        row = [PipelineAction(r, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            row.append(PipelineAction(r, "B", m))
            row += [PipelineAction(r, "F", m + ahead)] if m + ahead < micro_batches else []
        rows.append(tuple(row))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, 1), micro_batches, "one_f_one_b")


# --- several stages per rank ---
def looped_bfs(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Breadth first: all micro-batches of a chunk before the next chunk (Lamy-Poirier 2022,
    arXiv:2211.05953).
    """
    rows = []
    for r in range(ranks):
        mine = [r + c * ranks for c in range(chunks)]
        forward = [PipelineAction(s, "F", m) for s in mine for m in range(micro_batches)]
        rows.append(
            (
                *forward,
                *(
                    PipelineAction(s, "B", m)
                    for s in reversed(mine)
                    for m in reversed(range(micro_batches))
                ),
            )
        )
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def micro_batches_per_round(ranks: int, micro_batches: int) -> int:
    """How many micro-batches a chunk takes in a row before the next chunk has its turn; 0 where it
    does not come out even.
    """
    rounds = max(1, micro_batches // ranks)
    return 0 if micro_batches % rounds else micro_batches // rounds


def interleaved_1f1b(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): chunks take turns, one forward
    and one backward at a time.
    """
    rows = []
    for r in range(ranks):
        forward, backward = _chunk_order(r, ranks, micro_batches, chunks, "B")
        ahead = min(
            (chunks - 1) * micro_batches_per_round(ranks, micro_batches) + 2 * (ranks - 1 - r),
            len(forward),
        )
        rows.append(tuple(_alternate(forward, backward, ahead)))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def zb1p(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Zero bubble with the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241): weight gradients fill
    the pauses of the end.

    The weights' half follows its input's half r micro-batches later on rank r.
    """
    rows = []
    for r in range(ranks):
        forward, backward = _chunk_order(r, ranks, micro_batches, chunks, "I")
        ahead = min(
            (chunks - 1) * micro_batches_per_round(ranks, micro_batches) + ranks - 1 - r,
            len(forward),
        )
        row: list[PipelineAction] = []
        due = deque(a._replace(kind="W") for a in backward)
        inputs = 0
        for action in _alternate(forward, backward, ahead):
            row.append(action)
            if action.kind == "I":
                inputs += 1
                if inputs > r:
                    row.append(due.popleft())
        rows.append((*row, *due))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def _chunk_order(
    r: int, ranks: int, micro_batches: int, chunks: int, kind: str
) -> tuple[list[PipelineAction], list[PipelineAction]]:
    """All forwards and all backwards of a rank in the order in which chunks take turns."""
    size = micro_batches_per_round(ranks, micro_batches)
    order = [
        (c, m + k)
        for m in range(0, micro_batches, size)
        for c in range(chunks)
        for k in range(size)
    ]
    forward = [PipelineAction(c * ranks + r, "F", m) for c, m in order]
    return forward, [PipelineAction((chunks - 1 - c) * ranks + r, kind, m) for c, m in order]


def _alternate(
    forward: list[PipelineAction], backward: list[PipelineAction], ahead: int
) -> list[PipelineAction]:
    """So many forwards ahead, then a forward and a backward in turn, then the other backwards."""
    row = forward[:ahead]
    for k, action in enumerate(backward):
        row += forward[ahead + k : ahead + k + 1]
        row.append(action)
    return row


# --- V: two stages per rank, the last beside the first ---
class _ScheduleRowBuilder:
    """A row under way: counts micro-batches per stage and kind, and keeps the weights' halves that
    are due.
    """

    def __init__(self) -> None:
        self.actions: list[PipelineAction] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self.due: deque[PipelineAction] = deque()

    def next(self, stage: int, kind: str) -> PipelineAction:
        key = (stage, "F" if kind == "F" else "B")
        self.count[key] += 1
        return PipelineAction(stage, kind, self.count[key] - 1)

    def add(self, stage: int, kind: str) -> None:
        action = self.next(stage, kind)
        self.actions.append(action)
        if kind == "I":
            self.due.append(action._replace(kind="W"))

    def weights(self) -> None:
        if self.due:
            self.actions.append(self.due.popleft())

    def overlap(self, forward: int, backward: int) -> None:
        self.actions.append(
            PipelineAction(-1, OVERLAP, -1, (self.next(forward, "F"), self.next(backward, "B")))
        )


def zbv(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Zero bubble in V shape (arXiv:2401.10241, section 6). Meant for at least 2 * ranks - 1
    micro-batches; fewer leave gaps.
    """
    count = max(2 * ranks - 1, micro_batches)
    rows = (_zbv_row(r, ranks, count) for r in range(ranks))
    kept = tuple(tuple(a for a in row if a.micro_batch < micro_batches) for row in rows)
    return PipelineSchedule(kept, v_placement(ranks), micro_batches, "runtime")


def _zbv_row(r: int, ranks: int, count: int) -> list[PipelineAction]:
    down, up, row = r, 2 * ranks - 1 - r, _ScheduleRowBuilder()

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
    return _zbv_cooldown(row, down, up, ranks - r)


def _zbv_cooldown(row: _ScheduleRowBuilder, down: int, up: int, left: int) -> list[PipelineAction]:
    """The rest of the way down's input halves, each with a weights' half of that stage; then all
    weights' halves left.
    """
    for _ in range(left):
        row.add(down, "I")
        oldest = next(a for a in row.due if a.stage == down)
        row.due.remove(oldest)
        row.actions.append(oldest)
    return row.actions + [a for stage in (up, down) for a in row.due if a.stage == stage]


def dualpipe_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """DualPipeV: forwards of one direction overlap backwards of the other (DeepSeek-V3,
    arXiv:2412.19437; github deepseek-ai/DualPipe).
    """
    rows = tuple(tuple(_dualpipe_v_row(r, ranks, micro_batches)) for r in range(ranks))
    return PipelineSchedule(rows, v_placement(ranks), micro_batches, "runtime")


def _dualpipe_v_row(r: int, ranks: int, micro_batches: int) -> list[PipelineAction]:
    down, up, row = r, 2 * ranks - 1 - r, _ScheduleRowBuilder()
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
    return _dualpipe_v_cooldown(row, down, up, r, after)


def _dualpipe_v_cooldown(
    row: _ScheduleRowBuilder, down: int, up: int, r: int, after: int
) -> list[PipelineAction]:
    """The backwards without forwards beside them: whole ones first, halves from the middle on."""
    for k in range(2 * (r + 1)):
        row.add(up if k % 2 == 0 else down, "B" if k <= r else "I")
    for _ in range(after):
        row.weights()
        row.add(down, "I")
    for _ in range(r + 1):
        row.weights()
    return row.actions


# --- both directions: each rank has a stage of either ---
def dualpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """DualPipe: half of the micro-batches start at rank 0, half at the last rank, each half with
    its own copy of the model.

    DeepSeek-V3 (arXiv:2412.19437, figure 5); call by call as github deepseek-ai/DualPipe,
    dualpipe.py (`DualPipe.step`), has it. Stages ``ranks`` to ``2 * ranks - 1`` are those of the
    way back. Ranks must be even, micro-batches even and at least twice as many.
    """
    rows = tuple(_DualPipeRowBuilder(r, ranks).row(micro_batches // 2) for r in range(ranks))
    return PipelineSchedule(rows, v_placement(ranks), micro_batches // 2, "batched", 2)


class _DualPipeRowBuilder(_ScheduleRowBuilder):
    """A rank's row under way. Micro-batches of direction 0 are those that come from the nearer end
    of the pipeline.
    """

    def __init__(self, r: int, ranks: int) -> None:
        super().__init__()
        self.after = ranks // 2 - 1 - min(r, ranks - 1 - r)
        self.before = min(r, ranks - 1 - r)
        self.ranks, self.middle = ranks, self.after == 0
        near, far = r, 2 * ranks - 1 - r
        self.stages = (near, far) if r < ranks // 2 else (far, near)

    def row(self, each: int) -> tuple[PipelineAction, ...]:
        """``each``: micro-batches of a direction."""
        for _ in range(2 * self.after):
            self.forward(0)
        self.receive("F", 0)
        for k in range(self.before + 1):
            self.begin_both(last=k == self.before)
        for _ in range(self.after):
            self.backward(1, "I")
            self.receive("F", 1)
            self.weights()
            self.forward(1, receive=False)
        for k in range(each - self.ranks + self.before + 1):
            self.pair(0, 1, first=k == 0)
            self.pair(1, 0)
        for _ in range(self.after):
            self.backward(1, "B")
            self.pair(1, 0)
        self.drain()
        return tuple(self.actions)

    def drain(self) -> None:
        """The backwards that have no forwards beside them: whole ones, then halves."""
        for k in range(2 * (self.before + 1)):
            self.backward(1 - k % 2, "B" if k <= self.before else "I")
        for _ in range(self.after):
            self.weights()
            self.backward(0, "I")
        for _ in range(self.before + 1):
            self.weights()

    # --- parts ---
    def message(self, kind: str, direction: int) -> None:
        """The next of its kind; a stage that has no neighbour there drops it later."""
        key = (self.stages[direction], kind)
        self.count[key] += 1
        self.actions.append(PipelineAction(*key, self.count[key] - 1))

    def receive(self, way: str, direction: int) -> None:
        self.message(f"RECV_{way}", direction)

    def send(self, way: str, direction: int) -> None:
        self.message(f"SEND_{way}", direction)

    def forward(self, direction: int, receive: bool = True, send: bool = True) -> None:
        if receive:
            self.receive("F", direction)
        self.add(self.stages[direction], "F")
        if send:
            self.send("F", direction)

    def backward(self, direction: int, kind: str, send: bool = True) -> None:
        self.receive("B", direction)
        self.add(self.stages[direction], kind)
        if send:
            self.send("B", direction)

    def begin_both(self, last: bool) -> None:
        """A forward of either direction; the two ranks in the middle keep the last result of
        direction 1 back.
        """
        self.forward(0, receive=False, send=self.middle)
        self.receive("F", 0)
        self.forward(1, send=not (self.middle and last))
        if not self.middle:
            self.send("F", 0)

    def pair(self, forward: int, backward: int, first: bool = False) -> None:
        """A forward of one direction beside a backward of the other. ``first``: what the forward
        needs is asked for before; the ranks in the middle take the two apart."""
        if first and self.middle:
            self.forward(0, receive=False, send=False)
            self.send("F", 1)
            self.backward(1, "B", send=False)
        else:
            if not first:
                self.receive("F", forward)
            self.receive("B", backward)
            self.overlap(self.stages[forward], self.stages[backward])
        self.send("F", forward)
        self.send("B", backward)


#: Schedules by the names that `schedule:` takes; all of (ranks, micro_batches, chunks).
SCHEDULE_BUILDERS: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "gpipe": lambda p, m, v: gpipe(p, m),
    "1f1b": lambda p, m, v: one_f_one_b(p, m),
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved_1f1b,
    "zb1p": zb1p,
    "zbv": lambda p, m, v: zbv(p, m),
    "dualpipe_v": lambda p, m, v: dualpipe_v(p, m),
    "dualpipe": lambda p, m, v: dualpipe(p, m),
}
