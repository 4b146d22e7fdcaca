"""Random jobs over NCCL of which one rank does something wrong, run by a small model of streams,
and the dumps that they would leave.

The model: a host enqueues and goes on, or waits for each call; a device takes the calls of a group,
and its batches of messages, in order; a message alone runs on the stream of its two ranks. A
collective ends where all members are in calls of one number, kind and size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.doctor_dumps import batch, dump, entry


class Op(NamedTuple):
    """A call that several ranks make: a collective of a group, or a hop of messages along its
    ranks.
    """

    group: str
    kind: str
    size: int
    line: int


@dataclass
class Job:
    """``faulty`` does what ``fault`` says at its ``at``-th call: stop (its host hangs), skip
    (leaves it out), or extra (makes it twice).
    """

    groups: dict[str, list[int]]
    ops: list[Op]
    faulty: int
    fault: str
    at: int
    blocking: bool
    calls: dict[int, list[Op]] = field(default_factory=dict)


def random_job(seed: int) -> Job:
    draw = random.Random(seed)
    world = draw.randint(3, 6)
    groups = {"0": list(range(world))}
    for number in range(1, draw.randint(1, 3)):
        groups[str(number)] = sorted(draw.sample(range(world), draw.randint(2, world)))
    body = [
        Op(
            draw.choice(list(groups)),
            draw.choice(["all_reduce", "all_gather", "hop", "single"]),
            draw.choice([8, 16]),
            10 + n,
        )
        for n in range(draw.randint(1, 4))
    ]
    ops = [op for _ in range(draw.randint(2, 4)) for op in body]
    faulty = draw.randrange(world)
    own = [op for op in ops if faulty in groups[op.group]]
    job = Job(
        groups,
        ops,
        faulty,
        draw.choice(["stop", "skip", "extra"]),
        draw.randrange(max(len(own), 1)),
        draw.random() < 0.5,
    )
    for rank in range(world):
        calls = [op for op in ops if rank in groups[op.group]]
        if rank == faulty and calls:
            changed = {
                "stop": [],
                "skip": calls[job.at + 1 :],
                "extra": [calls[job.at], *calls[job.at :]],
            }[job.fault]
            calls = [*calls[: job.at], *changed]
        job.calls[rank] = calls
    return job


def messages(job: Job, rank: int, op: Op) -> list[tuple[str, int]]:
    """What a rank does in a hop: receive from the one before, send to the next (places in the
    group).
    """
    members = job.groups[op.group]
    place = members.index(rank)
    return [
        *([("recv", place - 1)] if place else []),
        *([("send", place + 1)] if place + 1 < len(members) else []),
    ]


@dataclass
class _Posted:
    """A call on a rank's device. ``needs``: what has to be there on other ranks, as keys that they
    post.
    """

    rank: int
    op: Op
    stream: str
    key: tuple[Any, ...]
    needs: list[tuple[int, tuple[Any, ...]]]
    numbers: tuple[int, int]
    done: bool = False


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.posted: dict[int, list[_Posted]] = {rank: [] for rank in job.calls}
        self.counts: dict[tuple[Any, ...], int] = {}

    def run(self) -> None:
        moved = True
        while moved:
            moves = [self._post(rank) for rank in self.posted] + [
                self._end(rank) for rank in self.posted
            ]
            moved = any(moves)

    def _post(self, rank: int) -> bool:
        mine = self.posted[rank]
        made = sum(1 for p in mine if p.key[0] != "part" or p.key[-1] == "last")
        if made == len(self.job.calls[rank]) or (
            self.job.blocking and any(not p.done for p in mine)
        ):
            return False
        op = self.job.calls[rank][made]
        if op.kind == "single":
            parts = messages(self.job, rank, op)
            for n, part in enumerate(parts):
                self._message(rank, op, [part], self._pair(rank, op, part), n == len(parts) - 1)
        elif op.kind == "hop":
            self._message(rank, op, messages(self.job, rank, op), op.group, True)
        else:
            number = self._count(rank, op.group)
            others = [
                (r, ("all", op.group, number, op.kind, op.size)) for r in self.job.groups[op.group]
            ]
            mine.append(
                _Posted(
                    rank,
                    op,
                    op.group,
                    others[0][1],
                    others,
                    (number, self.counts.get((rank, op.group, "p2p"), 0)),
                )
            )
        return True

    def _pair(self, rank: int, op: Op, part: tuple[str, int]) -> str:
        return f"{op.group} of {sorted((rank, self.job.groups[op.group][part[1]]))}"

    def _count(self, *key: Any) -> int:
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def _message(
        self, rank: int, op: Op, parts: list[tuple[str, int]], stream: str, last: bool
    ) -> None:
        number = self._count(rank, op.group, "p2p")
        needs, gives = [], []
        for kind, place in parts:
            peer = self.job.groups[op.group][place]
            ends = (rank, peer) if kind == "send" else (peer, rank)
            nth = self._count(rank, op.group, kind, peer, stream)
            gives.append((kind, ends, op.group, stream, nth))
            needs.append(
                (peer, ("recv" if kind == "send" else "send", ends, op.group, stream, nth))
            )
        key = ("part", tuple(gives), "last" if last else "more")
        self.posted[rank].append(
            _Posted(rank, op, stream, key, needs, (self.counts.get((rank, op.group), 0), number))
        )

    def _heads(self, rank: int) -> list[_Posted]:
        """Of each stream the first that is not done: these are on the device."""
        found: dict[str, _Posted] = {}
        for posted in self.posted[rank]:
            if not posted.done:
                found.setdefault(posted.stream, posted)
        return list(found.values())

    def _there(self, rank: int, key: tuple[Any, ...]) -> bool:
        done_or_head = [p for p in self.posted[rank] if p.done] + self._heads(rank)
        return any(key == p.key or (p.key[0] == "part" and key in p.key[1]) for p in done_or_head)

    def _end(self, rank: int) -> bool:
        moved = False
        for posted in self._heads(rank):
            if all(self._there(other, key) for other, key in posted.needs):
                posted.done = moved = True
        return moved


def hung(job: Job) -> tuple[bool, dict[int, dict[str, Any]]]:
    """Does anything wait once nothing moves any more, and what do the ranks' recorders hold
    then?
    """
    run = _Run(job)
    run.run()
    config = {
        name: ("default_pg" if name == "0" else f"group {name}", members)
        for name, members in job.groups.items()
    }
    dumps = {
        rank: dump(
            _entries(job, posted), {name: said for name, said in config.items() if rank in said[1]}
        )
        for rank, posted in run.posted.items()
    }
    return any(not one.done for posted in run.posted.values() for one in posted), dumps


def _entries(job: Job, posted: list[_Posted]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in posted:
        op, state = one.op, "completed" if one.done else "scheduled"
        group = (op.group, f"group {op.group}" if op.group != "0" else "default_pg")
        place = job.groups[op.group].index(one.rank)
        if one.key[0] != "part":
            found.append(
                entry(
                    one.numbers[0],
                    op.kind,
                    op.line,
                    state,
                    group,
                    size=op.size,
                    p2p_seq_id=one.numbers[1],
                )
            )
            continue
        titles = [
            f"{kind} {place}{'->' if kind == 'send' else '<-'}{job.groups[op.group].index(ends[kind == 'send'])}"
            for kind, ends, *_ in one.key[1]
        ]
        if op.kind == "hop":
            found += batch(titles, one.numbers, op.line, state, group=group, size=op.size)
        else:
            both = {"collective_seq_id": one.numbers[0], "p2p_seq_id": one.numbers[1]}
            found += [
                entry(one.numbers[1], title, op.line, state, group, size=op.size, **both)
                for title in titles
            ]
    return [e | {"record_id": n} for n, e in enumerate(found)]


def without_some(dumps: dict[int, dict[str, Any]], seed: int) -> dict[int, dict[str, Any]]:
    """The files of up to half of the ranks are lost."""
    draw = random.Random(seed)
    lost = draw.sample(sorted(dumps), draw.randint(1, max(1, len(dumps) // 2)))
    return {rank: found for rank, found in dumps.items() if rank not in lost}


def lapped(dumps: dict[int, dict[str, Any]], seed: int) -> dict[int, dict[str, Any]]:
    """Rings that hold what is open and a few calls before, on each rank another number, cut in the
    middle of a batch or not.
    """
    draw = random.Random(seed)
    found = {}
    for rank, whole in dumps.items():
        entries = whole["entries"]
        ended = {
            _numbers(e)
            for e in entries
            if e["profiling_name"] == "nccl:coalesced" and e["state"] == "completed"
        }
        waits = (
            n
            for n, e in enumerate(entries)
            if e["state"] != "completed" and _numbers(e) not in ended
        )
        found[rank] = {
            **whole,
            "entries": entries[max(next(waits, len(entries)) - draw.randint(1, 7), 0) :],
        }
    return found


def _numbers(one: dict[str, Any]) -> tuple[int, int, int]:
    return one["pg_id"], one["collective_seq_id"], one["p2p_seq_id"]
