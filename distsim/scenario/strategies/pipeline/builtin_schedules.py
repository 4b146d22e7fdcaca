"""PyTorch's pipeline schedules as pure functions of the numbers of ranks, micro-batches and chunks.

Each function returns the rows of computations; messages are added by
`distsim.scenario.strategies.pipeline.send_recv`. The rows follow torch.distributed.pipelining 2.13
(schedules.py) action by action. Its pauses are omitted, because a rank pauses by itself while its
input is not there yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from distsim.scenario.strategies.pipeline.actions import (
    NO_MICRO_BATCH,
    NO_STAGE,
    OVERLAP,
    PipelineAction,
    PipelineSchedule,
)


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s is on rank s % ranks: chunk after chunk around the ring."""
    return tuple(s % ranks for s in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two chunks per rank: down the ranks and up again.

    So the first and the last stage are both on rank 0.
    """
    return (*range(ranks), *reversed(range(ranks)))


# --- one stage per rank ---
def gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    batches = range(micro_batches)
    rows = []
    for r in range(ranks):
        forward = [PipelineAction(r, "F", m) for m in batches]
        backward = [PipelineAction(r, "B", m) for m in batches]
        rows.append((*forward, *backward))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, 1), micro_batches, "fill_drain")


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """One forward, one backward (PipeDream-flush).

    First as many forwards as there are ranks from this one on, then a backward and a forward in
    turn.
    """
    rows = []
    for r in range(ranks):
        ahead = min(micro_batches, ranks - r)
        row = [PipelineAction(r, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            row.append(PipelineAction(r, "B", m))
            if m + ahead < micro_batches:
                row.append(PipelineAction(r, "F", m + ahead))
        rows.append(tuple(row))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, 1), micro_batches, "one_f_one_b")


# --- several stages per rank ---
def looped_bfs(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Breadth first: all micro-batches of a chunk before the next chunk.

    Lamy-Poirier 2022, arXiv:2211.05953.
    """
    rows = []
    for r in range(ranks):
        stages = [r + c * ranks for c in range(chunks)]
        forward = [(s, m) for s in stages for m in range(micro_batches)]
        forwards = [PipelineAction(s, "F", m) for s, m in forward]
        backwards = [PipelineAction(s, "B", m) for s, m in reversed(forward)]
        rows.append((*forwards, *backwards))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def micro_batches_per_round(ranks: int, micro_batches: int) -> int:
    """The number of micro-batches that a chunk runs before the next chunk; 0 if it is not whole."""
    rounds = max(1, micro_batches // ranks)
    return 0 if micro_batches % rounds else micro_batches // rounds


def interleaved_1f1b(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Interleaved 1F1B: chunks take turns, one forward and one backward at a time.

    Narayanan et al. 2021, arXiv:2104.04473.
    """
    rows = []
    other_chunks = (chunks - 1) * micro_batches_per_round(ranks, micro_batches)
    for r in range(ranks):
        forward, backward = _chunk_order(r, ranks, micro_batches, chunks, "B")
        ahead = min(other_chunks + 2 * (ranks - 1 - r), len(forward))
        rows.append(tuple(_alternate(forward, backward, ahead)))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def zb1p(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Zero bubble with the memory of 1F1B: weight gradients fill the pauses of the end.

    Qi et al. 2023, arXiv:2401.10241. On rank r the weights' half (W) of a backward follows its
    input's half (I) r micro-batches later.
    """
    rows = []
    other_chunks = (chunks - 1) * micro_batches_per_round(ranks, micro_batches)
    for r in range(ranks):
        forward, backward = _chunk_order(r, ranks, micro_batches, chunks, "I")
        ahead = min(other_chunks + ranks - 1 - r, len(forward))
        row: list[PipelineAction] = []
        pending_weights = deque(action._replace(kind="W") for action in backward)
        inputs = 0
        for action in _alternate(forward, backward, ahead):
            row.append(action)
            if action.kind == "I":
                inputs += 1
                if inputs > r:
                    row.append(pending_weights.popleft())
        rows.append((*row, *pending_weights))
    return PipelineSchedule(tuple(rows), loop_placement(ranks, chunks), micro_batches, "runtime")


def _chunk_order(
    r: int, ranks: int, micro_batches: int, chunks: int, kind: str
) -> tuple[list[PipelineAction], list[PipelineAction]]:
    """All forwards and all backwards of a rank in the order in which chunks take turns."""
    size = micro_batches_per_round(ranks, micro_batches)
    order: list[tuple[int, int]] = []
    for first in range(0, micro_batches, size):
        for chunk in range(chunks):
            order += [(chunk, m) for m in range(first, first + size)]
    forward = [PipelineAction(c * ranks + r, "F", m) for c, m in order]
    backward = [PipelineAction((chunks - 1 - c) * ranks + r, kind, m) for c, m in order]
    return forward, backward


def _alternate(
    forward: list[PipelineAction], backward: list[PipelineAction], ahead: int
) -> list[PipelineAction]:
    """``ahead`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    row = forward[:ahead]
    for k, action in enumerate(backward):
        row += forward[ahead + k : ahead + k + 1]
        row.append(action)
    return row


# --- V: two stages per rank, the first and the last on one rank ---
class _ScheduleRowBuilder:
    """A row that is being built.

    It counts micro-batches per stage and kind, and queues the weights' halves (W) of the backwards
    whose input's half (I) is done.
    """

    def __init__(self) -> None:
        self.actions: list[PipelineAction] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self.pending_weights: deque[PipelineAction] = deque()

    def next(self, stage: int, kind: str) -> PipelineAction:
        key = (stage, "F" if kind == "F" else "B")
        self.count[key] += 1
        return PipelineAction(stage, kind, self.count[key] - 1)

    def add(self, stage: int, kind: str) -> None:
        action = self.next(stage, kind)
        self.actions.append(action)
        if kind == "I":
            self.pending_weights.append(action._replace(kind="W"))

    def weights(self) -> None:
        """The oldest weights' half, if one is pending."""
        if self.pending_weights:
            self.actions.append(self.pending_weights.popleft())

    def overlap(self, forward: int, backward: int) -> None:
        parts = self.next(forward, "F"), self.next(backward, "B")
        self.actions.append(PipelineAction(NO_STAGE, OVERLAP, NO_MICRO_BATCH, parts))


def zbv(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Zero bubble in V shape (arXiv:2401.10241, section 6).

    It is made for at least 2 * ranks - 1 micro-batches; with fewer, the rows are those of that many
    without the surplus actions.
    """
    count = max(2 * ranks - 1, micro_batches)
    rows = []
    for r in range(ranks):
        row = _zbv_row(r, ranks, count)
        rows.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return PipelineSchedule(tuple(rows), v_placement(ranks), micro_batches, "runtime")


def _zbv_row(r: int, ranks: int, count: int) -> list[PipelineAction]:
    """Warm-up, steady state and cool-down of rank r; ``down`` and ``up`` are its two stages."""
    down = r
    up = 2 * ranks - 1 - r
    row = _ScheduleRowBuilder()

    def both_halves(stage: int) -> None:
        row.add(stage, "I")
        row.weights()

    for _ in range(2 * (ranks - r) - 1):
        row.add(down, "F")
    for _ in range(r):
        row.add(up, "F")
        row.add(down, "F")
    for _ in range(ranks - r):
        row.add(up, "F")
        both_halves(up)
    while row.count[up, "F"] < row.count[down, "F"] or row.count[down, "F"] < count:
        if row.count[down, "F"] < count:
            row.add(down, "F")
        both_halves(down)
        row.add(up, "F")
        both_halves(up)
    for _ in range(r):
        row.add(down, "I")
        row.add(up, "I")
    return _zbv_cooldown(row, down, up, ranks - r)


def _zbv_cooldown(
    row: _ScheduleRowBuilder, down: int, up: int, remaining: int
) -> list[PipelineAction]:
    """The remaining input halves of ``down``, each with a weights' half of that stage.

    Then all weights' halves that are still pending.
    """
    for _ in range(remaining):
        row.add(down, "I")
        oldest = next(action for action in row.pending_weights if action.stage == down)
        row.pending_weights.remove(oldest)
        row.actions.append(oldest)
    up_weights = [action for action in row.pending_weights if action.stage == up]
    down_weights = [action for action in row.pending_weights if action.stage == down]
    return row.actions + up_weights + down_weights


def dualpipe_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """DualPipeV: forwards of one direction overlap backwards of the other.

    DeepSeek-V3, arXiv:2412.19437; github deepseek-ai/DualPipe.
    """
    rows = tuple(tuple(_dualpipe_v_row(r, ranks, micro_batches)) for r in range(ranks))
    return PipelineSchedule(rows, v_placement(ranks), micro_batches, "runtime")


def _dualpipe_v_row(r: int, ranks: int, micro_batches: int) -> list[PipelineAction]:
    """Rank r's row, step by step as in DualPipe; ``after`` ranks are behind it in the V."""
    down = r
    up = 2 * ranks - 1 - r
    row = _ScheduleRowBuilder()
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
    """The backwards that overlap no forward: whole ones first, halves from the middle on."""
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
    """DualPipe: half of the micro-batches start at rank 0, the other half at the last rank.

    Each half has its own copy of the model; stages ``ranks`` to ``2 * ranks - 1`` are the second
    copy. The number of ranks must be even, that of micro-batches even and at least twice as large.
    Source: DeepSeek-V3 (arXiv:2412.19437, figure 5); call by call as in github
    deepseek-ai/DualPipe, dualpipe.py (`DualPipe.step`).
    """
    rows = tuple(_DualPipeRowBuilder(r, ranks).row(micro_batches // 2) for r in range(ranks))
    return PipelineSchedule(rows, v_placement(ranks), micro_batches // 2, "batched", 2)


class _DualPipeRowBuilder(_ScheduleRowBuilder):
    """A rank's row of DualPipe that is being built.

    Micro-batches of direction 0 come from the nearer end of the pipeline. ``before`` and ``after``
    are the numbers of ranks between this one and that end, or the middle.
    """

    def __init__(self, r: int, ranks: int) -> None:
        super().__init__()
        self.after = ranks // 2 - 1 - min(r, ranks - 1 - r)
        self.before = min(r, ranks - 1 - r)
        self.ranks = ranks
        self.is_middle = self.after == 0
        first_copy = r
        second_copy = 2 * ranks - 1 - r
        is_first_half = r < ranks // 2
        #: The stages of direction 0 and 1.
        self.stages = (first_copy, second_copy) if is_first_half else (second_copy, first_copy)

    def row(self, each: int) -> tuple[PipelineAction, ...]:
        """The whole row, for ``each`` micro-batches per direction."""
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
        """The backwards that overlap no forward: whole ones, then halves."""
        for k in range(2 * (self.before + 1)):
            self.backward(1 - k % 2, "B" if k <= self.before else "I")
        for _ in range(self.after):
            self.weights()
            self.backward(0, "I")
        for _ in range(self.before + 1):
            self.weights()

    # --- parts ---
    def message(self, kind: str, direction: int) -> None:
        """The next message of its kind; it is dropped later if the stage has no such neighbour."""
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
        """A forward of either direction.

        The two ranks in the middle send the last result of direction 1 later.
        """
        self.forward(0, receive=False, send=self.is_middle)
        self.receive("F", 0)
        self.forward(1, send=not (self.is_middle and last))
        if not self.is_middle:
            self.send("F", 0)

    def pair(self, forward: int, backward: int, first: bool = False) -> None:
        """A forward of one direction that overlaps a backward of the other.

        In the ``first`` pair the forward's input was asked for before; the ranks in the middle run
        the two one after the other.
        """
        if first and self.is_middle:
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


#: Schedules by the names that `schedule:` takes, as functions of (ranks, micro_batches, chunks).
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
