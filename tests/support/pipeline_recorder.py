"""Records the calls of torch.distributed.pipelining: its schedules run on forked Gloo processes, and
every call of each rank is recorded.

``python -m tests.support.pipeline_recorder OUT.json [NAME …]`` runs the cases below, or the
named ones, and writes ``{name: {"case": …, "ranks": [[event, …], …]}}``. An event is a list whose first
item is its kind:

- ``["isend" | "irecv" | "send" | "recv", peer, bytes, dtype]``
- ``["batch", [[kind, peer, bytes, dtype], …]]``
- ``["wait", [number, …]]``: numbers of the awaited events in the list; waits directly after their batch are omitted
- ``["compute", words, stage, micro_batch]``
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 30


class Case(NamedTuple):
    """A schedule class of torch, and what `pipeline:` calls it. ``static``: stages are given their
    shapes.
    """

    torch_name: str
    schedule: str
    ranks: int
    micro_batches: int
    chunks: int = 1
    static: bool = False
    defer: bool = False


CASES = {
    "gpipe": Case("GPipe", "gpipe", 3, 4),
    "gpipe_two": Case("GPipe", "gpipe", 2, 2, static=True),
    "1f1b": Case("1F1B", "1f1b", 4, 6, static=True),
    "1f1b_even": Case("1F1B", "1f1b", 3, 3),
    "interleaved": Case("Interleaved1F1B", "interleaved_1f1b", 2, 4, 2),
    "interleaved_three": Case("Interleaved1F1B", "interleaved_1f1b", 3, 6, 3, static=True),
    "interleaved_deferred": Case(
        "Interleaved1F1B", "interleaved_1f1b", 2, 4, 2, static=True, defer=True
    ),
    "looped_bfs": Case("LoopedBFS", "looped_bfs", 2, 3, 2, static=True),
    "zb1p": Case("InterleavedZeroBubble", "zb1p", 3, 4, 1, static=True),
    "zb1p_chunks": Case("InterleavedZeroBubble", "zb1p", 2, 4, 2, static=True),
    "zbv": Case("ZBVZeroBubble", "zbv", 2, 4, 2),
    "dualpipe_v": Case("DualPipeV", "dualpipe_v", 2, 5, 2, static=True),
}
#: Rows and columns of one micro-batch's activation.
SHAPE = (2, 8)


class Tape:
    """The events of one rank."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []
        self.muted = 0

    def message(self, kind: str, tensor: Any, peer: int) -> list[Any]:
        return [
            kind,
            peer,
            tensor.numel() * tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
        ]

    def add(self, event: list[Any]) -> int:
        if not self.muted:
            self.events.append(event)
        return len(self.events) - 1

    def waited(self, numbers: list[int]) -> None:
        if self.events and self.events[-1][0] == "wait":
            self.events[-1][1] += numbers
        elif not (self.events[-1][0] == "batch" and numbers == [len(self.events) - 1]):
            self.events.append(["wait", list(numbers)])


class Handle:
    """A Work that notes when it is waited for."""

    def __init__(self, work: Any, tape: Tape, number: int) -> None:
        self.work, self.tape, self.number = work, tape, number

    def wait(self, *args: Any) -> Any:
        self.tape.waited([self.number])
        return self.work.wait(*args)


def wrap(tape: Tape) -> None:
    """Put the tape between torch.distributed and its callers. torch compares functions by identity,
    so every door gets the same one.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    real = {
        name: getattr(c10d, name)
        for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv")
    }

    def peer_of(peer: Any, group: Any, group_peer: Any) -> int:
        return (
            peer
            if peer is not None
            else dist.get_global_rank(group or dist.group.WORLD, group_peer)
        )

    def single(kind: str) -> Any:
        side = "dst" if kind.endswith("send") else "src"

        def call(
            tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, **more: Any
        ) -> Any:
            there = peer_of(more.pop(side, peer), group, more.get(f"group_{side}"))
            number = tape.add(tape.message(kind, tensor, there))
            tape.muted += 1
            try:
                work = real[kind](tensor, there, group=group, tag=tag)
            finally:
                tape.muted -= 1
            return Handle(work, tape, number) if kind.startswith("i") and not tape.muted else work

        return call

    def batch(ops: list[Any]) -> Any:
        names = {doors["isend"]: "isend", doors["irecv"]: "irecv"}
        number = tape.add(["batch", [tape.message(names[op.op], op.tensor, op.peer) for op in ops]])
        tape.muted += 1
        try:
            works = real["batch_isend_irecv"](ops)
        finally:
            tape.muted -= 1
        return [Handle(work, tape, number) for work in works]

    doors = {kind: single(kind) for kind in ("isend", "irecv", "send", "recv")} | {
        "batch_isend_irecv": batch
    }
    for module in (dist, c10d):
        for name, door in doors.items():
            setattr(module, name, door)


def note_computations(stage: Any, tape: Tape) -> None:
    forward, backward, weight = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def on_forward(chunk: int, *args: Any, **more: Any) -> Any:
        tape.add(["compute", "forward", stage.stage_index, chunk])
        return forward(chunk, *args, **more)

    def on_backward(chunk: int, *args: Any, full_backward: bool = True, **more: Any) -> Any:
        if full_backward or not stage.is_first:  # the first stage's input half does nothing
            tape.add(
                [
                    "compute",
                    "backward" if full_backward else "backward input",
                    stage.stage_index,
                    chunk,
                ]
            )
        return backward(chunk, *args, full_backward=full_backward, **more)

    def on_weight(chunk: int, *args: Any, **more: Any) -> Any:
        tape.add(
            [
                "compute",
                "backward" if stage.is_first else "backward weight",
                stage.stage_index,
                chunk,
            ]
        )
        return weight(chunk, *args, **more)

    stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk = (
        on_forward,
        on_backward,
        on_weight,
    )


def play(case: Case, rank: int, store: str) -> list[list[Any]]:
    """One training step of a rank; its events."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    torch.set_num_threads(1)
    tape = Tape()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    wrap(tape)
    rows, columns = SHAPE
    like = torch.zeros(SHAPE, requires_grad=True)
    given = {"input_args": like, "output_args": like} if case.static else {}
    count = case.ranks * case.chunks
    mine = [rank + c * case.ranks for c in range(case.chunks)]
    if case.schedule in ("zbv", "dualpipe_v"):
        mine = [rank, count - 1 - rank]
    stages = [
        PipelineStage(torch.nn.Linear(columns, columns), s, count, torch.device("cpu"), **given)
        for s in mine
    ]
    for stage in stages:
        note_computations(stage, tape)
    build = schedules.get_schedule_class(case.torch_name)
    more = {"defer_pp_recv": True} if case.defer else {}
    single = issubclass(build, schedules.PipelineScheduleSingle)
    made = build(
        stages[0] if single else stages,
        case.micro_batches,
        loss_fn=torch.nn.functional.mse_loss,
        **more,
    )
    batch = torch.ones(rows * case.micro_batches, columns)
    made.step(*((batch,) if 0 in mine else ()), **({"target": batch} if count - 1 in mine else {}))
    return tape.events


def record(case: Case) -> list[list[list[Any]]]:
    """The events of all ranks. Raises RuntimeError where a rank fails or is not done in time; no
    process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(case, rank, Path(folder)) for rank in range(case.ranks)]
        left, limit = set(pids), time.monotonic() + SECONDS
        failed = False
        while left and not failed and time.monotonic() < limit:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.discard(pid)
                    failed = failed or status != 0
            time.sleep(0.01)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if left or failed:
            raise RuntimeError(f"{case}: a rank {'failed' if failed else 'was not done in time'}")
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(case.ranks)
        ]


def _forked(case: Case, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        events = play(case, rank, str(folder / "store"))
        (folder / f"{rank}.json").write_text(json.dumps(events), encoding="utf-8")
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(out: str, names: list[str]) -> None:
    import torch.distributed.pipelining  # noqa: F401  once, before the forks

    found = {
        name: {"case": CASES[name]._asdict(), "ranks": record(CASES[name])}
        for name in names or CASES
    }
    Path(out).write_text(
        json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="The JSON file to write.")
    parser.add_argument("names", nargs="*", help="Cases to run. [default: all]")
    options = parser.parse_args()
    main(options.out, options.names)
