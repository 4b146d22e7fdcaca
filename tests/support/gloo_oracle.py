"""An oracle for outcomes under gloo: runs scenario mappings on torch, without distsim.

    python -m tests.support.gloo_oracle --count 500 --seed 1 [--show]

Draws programs that the ordinary generator rarely makes (early exits, destroyed groups, object
collectives, overlapping groups, late ranks), runs each one on torch.distributed in real processes,
and compares the outcome with those that `check` calls possible. The exit status is 1 if a real
outcome is not among them. Nothing here reads distsim's own code for real runs: the mapping's steps
are interpreted directly, so an error there cannot hide one here.

Key idea: ranks are forked from a process that has imported torch (about one CPU second a program
instead of several), and each rank ends like a script, through the interpreter's finalization. A
program hangs when its ranks use no processor time for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Mapping = dict[str, Any]

#: How often the ranks are looked at, in seconds.
_LOOK_S = 0.1
#: Ranks are blocked if none of their threads works during so many looks. Counting looks instead of
#: seconds gives the ranks time on a busy machine, which delays the looks as well.
_QUIET_LOOKS = 20
#: Ranks that have used so much processor time together, in seconds, are blocked too: a gloo pair
#: whose partner dropped a request spins. Other programs need less than a second per rank.
_LIMIT_CPU_S = 8.0
#: A thread that works runs for at least so long, in seconds, each time it gets a processor. Gloo's
#: threads poll for events every 10 ms, which takes less.
_WORK_S = 3e-4
#: A thread has shown what it does after it got a processor so often.
_KNOWN_AFTER_SLICES = 5
OUTCOMES_WORST_FIRST = ("crashes", "raises", "hangs", "completes")
#: A real run cannot tell these apart: the data are not looked at.
_COMPLETED = ("completes", "wrong-data", "undefined")


@dataclass(frozen=True)
class RealOutcome:
    """``ranks``: by rank, how it ended: ``done``, ``raised: …``, ``signal N``, ``exit N`` or
    ``blocked``.
    """

    outcome: str
    ranks: tuple[str, ...]


# --- drawing programs ---


class ProgramMaker:
    """Draws a program in one global order of events, then spoils most of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = self.random.choice((2, 2, 3, 3, 4))
        self.steps: list[Mapping] = []
        self.groups: dict[str, list[int]] = {}
        self.handles = 0

    def mapping(self) -> Mapping:
        """The program as a scenario file would contain it."""
        for number in range(self.random.choice((0, 0, 1, 2))):
            size = self.random.randint(2, self.world)
            members = sorted(self.random.sample(range(self.world), size))
            self.groups[f"g{number}"] = members
        for _ in range(self.random.randint(1, 5)):
            self._add_event()
        for _ in range(self.random.choice((0, 1, 1, 2))):
            self._spoil()
        self._drop_impossible_calls()
        drawn: Mapping = {
            "name": "drawn",
            "world": self.world,
            "backend": "gloo",
            "tensors": {
                "x": {"shape": [4], "value": 1},
                "y": {"shape": [4], "value": 0},
                "big": {"shape": [1 << 20], "value": 1},
                "into": {"shape": [1 << 20], "value": 0},
            },
            "program": self.steps,
        }
        if self.groups:
            drawn["groups"] = self.groups
        return drawn

    def _add(self, ranks: list[int], op: str, **fields: Any) -> None:
        self.steps.append({op: fields, "ranks": ranks})

    def _group(self) -> tuple[dict[str, str], list[int]]:
        """The argument `group` of a call, and the members."""
        if self.groups and self.random.random() < 0.5:
            name = self.random.choice(list(self.groups))
            return {"group": name}, self.groups[name]
        return {}, list(range(self.world))

    def _add_event(self) -> None:
        kinds = (
            *("message", "message", "collective", "collective", "async_message"),
            *("objects", "sleep", "barrier", "new_group", "async_collective"),
        )
        getattr(self, f"_{self.random.choice(kinds)}")()

    def _pair(self) -> tuple[dict[str, str], int, int]:
        group, members = self._group()
        sender, receiver = self.random.sample(members, 2)
        return group, sender, receiver

    def _message(self) -> None:
        group, sender, receiver = self._pair()
        tensor, into = self.random.choice((("x", "y"), ("big", "into")))
        tag = {"tag": self.random.choice((1, 2))} if self.random.random() < 0.2 else {}
        self._add([sender], "send", tensor=tensor, dst=receiver, **group, **tag)
        self._add([receiver], "recv", tensor=into, src=sender, **group, **tag)

    def _async_message(self) -> None:
        group, sender, receiver = self._pair()
        tensor, into = self.random.choice((("x", "y"), ("big", "into")))
        sent, received = f"h{self.handles}", f"h{self.handles + 1}"
        self.handles += 2
        waits = []
        if self.random.random() < 0.6:
            self._add([sender], "isend", tensor=tensor, dst=receiver, **group, **{"as": sent})
            waits.append((sender, sent))
        else:
            self._add([sender], "send", tensor=tensor, dst=receiver, **group)
        if self.random.random() < 0.5:
            self._add([receiver], "irecv", tensor=into, src=sender, **group, **{"as": received})
            waits.append((receiver, received))
        else:
            self._add([receiver], "recv", tensor=into, src=sender, **group)
        if self.random.random() < 0.3:
            self._add_event()
        for rank, handle in waits:
            if self.random.random() < 0.8:
                self.steps.append({"wait": handle, "ranks": [rank]})

    def _collective(self) -> None:
        group, members = self._group()
        op = self.random.choice(("all_reduce", "all_reduce", "broadcast", "reduce"))
        root = {"broadcast": "src", "reduce": "dst"}.get(op)
        rooted = {root: self.random.choice(members)} if root else {}
        tensor = self.random.choice(("x", "x", "big"))
        self._add(members, op, tensor=tensor, **group, **rooted)

    def _async_collective(self) -> None:
        group, members = self._group()
        handle = f"h{self.handles}"
        self.handles += 1
        more = {"async": True, "as": handle}
        self._add(members, "all_reduce", tensor="x", **group, **more)
        if self.random.random() < 0.8:
            self.steps.append({"wait": handle, "ranks": members})

    def _objects(self) -> None:
        group, members = self._group()
        op = self.random.choice(("all_gather_object", "broadcast_object_list"))
        if op == "all_gather_object":
            self._add(members, op, object="40 B", **group)
        else:
            self._add(members, op, objects=["40 B"], src=members[0], **group)

    def _sleep(self) -> None:
        rank = self.random.randrange(self.world)
        self._add([rank], "sleep", time=self.random.choice(("50 ms", "200 ms")))

    def _barrier(self) -> None:
        group, members = self._group()
        self._add(members, "barrier", **group)

    def _new_group(self) -> None:
        name = f"n{len(self.steps)}"
        members = sorted(self.random.sample(range(self.world), self.random.randint(2, self.world)))
        step = {"new_group": {"name": name, "ranks": members}, "ranks": list(range(self.world))}
        self.steps.append(step)
        self._add(members, "all_reduce", tensor="x", group=name)

    def _drop_impossible_calls(self) -> None:
        """Remove calls that Python could not make, because the rank lacks the handle or the group."""
        known = {(rank, name) for name, members in self.groups.items() for rank in members}
        kept: list[Mapping] = []
        for step in self.steps:
            ((op, fields),) = ((key, value) for key, value in step.items() if key != "ranks")
            needed = fields if op == "wait" else fields.get("group")
            ranks = [r for r in step["ranks"] if needed is None or (r, needed) in known]
            if not ranks:
                continue
            kept.append({**step, "ranks": ranks})
            if op == "wait":
                known -= {(rank, needed) for rank in ranks}
                continue
            made = fields["name"] if op == "new_group" else fields.get("as")
            known |= {(rank, made) for rank in ranks}
        self.steps = kept or [{"sleep": {"time": "50 ms"}, "ranks": [0]}]

    # --- mistakes ---

    def _spoil(self) -> None:
        mistakes = (
            *("skip", "skip", "swap", "exit", "exit", "destroy", "fail", "late"),
            *("other_root", "other_peer", "end_early"),
        )
        getattr(self, f"_spoil_{self.random.choice(mistakes)}")()

    def _place(self) -> int:
        return self.random.randrange(len(self.steps) + 1)

    def _rank(self) -> int:
        return self.random.randrange(self.world)

    def _spoil_skip(self) -> None:
        """One rank does not make a call."""
        if not self.steps:
            return
        index = self.random.randrange(len(self.steps))
        step = self.steps[index]
        if len(step["ranks"]) > 1:
            missing = self.random.choice(step["ranks"])
            left = [rank for rank in step["ranks"] if rank != missing]
            self.steps[index] = {**step, "ranks": left}
        elif "wait" not in step:
            del self.steps[index]

    def _spoil_swap(self) -> None:
        """Two calls change places on all ranks of the first one, or on one of them."""
        if len(self.steps) < 2:
            return
        first = self.random.randrange(len(self.steps) - 1)
        one, two = self.steps[first], self.steps[first + 1]
        if "wait" in one or "wait" in two or "new_group" in one or "new_group" in two:
            return
        rank = self._rank()
        others = [other for other in one["ranks"] if other != rank]
        moved = [{**one, "ranks": [rank]}] if rank in one["ranks"] else []
        kept = [{**one, "ranks": others}] if others else []
        self.steps[first : first + 2] = [*kept, two, *moved]

    def _spoil_exit(self) -> None:
        code = self.random.choice((0, 0, 1))
        self.steps.insert(self._place(), {"exit": {"code": code}, "ranks": [self._rank()]})

    def _spoil_end_early(self) -> None:
        """One rank makes no call after some point."""
        place, rank = self._place(), self._rank()
        for index in range(place, len(self.steps)):
            step = self.steps[index]
            self.steps[index] = {**step, "ranks": [r for r in step["ranks"] if r != rank]}
        self.steps[:] = [step for step in self.steps if step["ranks"]]
        if not self.steps:
            self._add([0], "sleep", time="50 ms")

    def _spoil_destroy(self) -> None:
        fields = {"group": self.random.choice(list(self.groups))} if self.groups else {}
        ranks = [self._rank()] if self.random.random() < 0.7 else list(range(self.world))
        if fields:
            ranks = [rank for rank in ranks if rank in self.groups[fields["group"]]]
        if ranks:
            step = {"destroy_process_group": fields, "ranks": ranks}
            self.steps.insert(self._place(), step)

    def _spoil_fail(self) -> None:
        step = {"fail": {"message": "out of memory"}, "ranks": [self._rank()]}
        self.steps.insert(self._place(), step)

    def _spoil_late(self) -> None:
        self.steps.insert(0, {"sleep": {"time": "400 ms"}, "ranks": [self._rank()]})

    def _spoil_other_root(self) -> None:
        for index, step in enumerate(self.steps):
            for op in ("broadcast", "reduce"):
                if op in step and len(step["ranks"]) > 1:
                    root = "src" if op == "broadcast" else "dst"
                    rank = self.random.choice(step["ranks"])
                    others = [other for other in step["ranks"] if other != rank]
                    changed = {**step[op], root: self.random.choice(step["ranks"])}
                    self.steps[index : index + 1] = [
                        {op: step[op], "ranks": others},
                        {op: changed, "ranks": [rank]},
                    ]
                    return

    def _spoil_other_peer(self) -> None:
        for index, step in enumerate(self.steps):
            if "send" in step and self.world > 2:
                others = [r for r in range(self.world) if r not in step["ranks"]]
                group = step["send"].get("group")
                if group:
                    others = [r for r in others if r in self.groups[group]]
                if others:
                    changed = {**step["send"], "dst": self.random.choice(others)}
                    self.steps[index] = {"send": changed, "ranks": step["ranks"]}
                return


# --- running programs ---


class GlooRunner:
    """Forks ranks from a process that has imported torch, and watches how they end."""

    def __init__(self) -> None:
        self._forker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gloo_oracle_rank"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self) -> None:
        """End the forking process."""
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(timeout=30)

    def run(self, mapping: Mapping) -> RealOutcome:
        """Run a program; ranks that are blocked are killed."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            job = {"folder": folder, "scenario": mapping}
            self._forker.stdin.write(json.dumps(job) + "\n")
            self._forker.stdin.flush()
            processes = json.loads(self._forker.stdout.readline())
            blocked = self._watch(processes)
            for rank in blocked:
                os.kill(processes[rank], signal.SIGKILL)
            statuses = json.loads(self._forker.stdout.readline())
            ends = tuple(
                "blocked" if rank in blocked else _end_of(Path(folder), rank, status)
                for rank, status in enumerate(statuses)
            )
        return RealOutcome(_outcome(ends), ends)

    def _watch(self, processes: list[int]) -> set[int]:
        """Wait until all ranks have exited, or until the others are blocked; the blocked ranks."""
        begin: dict[int, _ThreadUse] = {}
        quiet_looks = 0
        alive = set(range(len(processes)))
        while alive:
            time.sleep(_LOOK_S)
            found = {rank: _threads_of(processes[rank]) for rank in alive}
            alive = {rank for rank in alive if found[rank] is not None}
            now = {task: use for threads in found.values() for task, use in (threads or {}).items()}
            if sum(use.run_s for use in now.values()) > _LIMIT_CPU_S:
                return alive
            if now.keys() != begin.keys() or any(now[task].works(begin[task]) for task in now):
                begin, quiet_looks = now, 0
            elif not any(now[task].waits_for_processor(begin[task]) for task in now):
                quiet_looks += 1
            if quiet_looks >= _QUIET_LOOKS:
                return alive
        return alive


@dataclass(frozen=True)
class _ThreadUse:
    """The processor time of a thread, how often it got a processor, and whether it wants one."""

    run_s: float
    slices: int
    is_runnable: bool

    def works(self, before: _ThreadUse) -> bool:
        """Whether the thread has done more than to poll since then."""
        run_s = self.run_s - before.run_s
        return run_s > _WORK_S * max(1, self.slices - before.slices)

    def waits_for_processor(self, before: _ThreadUse) -> bool:
        """Whether the machine is too busy to see what the thread would do."""
        return self.is_runnable and self.slices - before.slices < _KNOWN_AFTER_SLICES


def _threads_of(process: int) -> dict[int, _ThreadUse] | None:
    """What the threads of a process use; None once it has exited."""
    found: dict[int, _ThreadUse] = {}
    try:
        if _stat_fields(Path(f"/proc/{process}/stat"))[0] == "Z":
            return None
    except OSError:
        return None
    for task in Path(f"/proc/{process}/task").glob("*"):
        try:
            state = _stat_fields(task / "stat")[0]
            run_ns, _, slices = (task / "schedstat").read_text(encoding="utf-8").split()
        except OSError:
            continue  # the thread has ended meanwhile
        found[int(task.name)] = _ThreadUse(int(run_ns) / 1e9, int(slices), state in "RD")
    return found


def _stat_fields(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").rpartition(")")[2].split()


def _end_of(folder: Path, rank: int, status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    report = folder / f"rank{rank}"
    if report.exists():
        return report.read_text(encoding="utf-8")
    return f"exit {os.WEXITSTATUS(status)}"


def _outcome(ends: tuple[str, ...]) -> str:
    kinds = {
        "signal": "crashes",
        "raised": "raises",
        "blocked": "hangs",
        "done": "completes",
        "exit": "completes",
    }
    happened = {kinds[end.split(":")[0].split(" ")[0]] for end in ends}
    return next(word for word in OUTCOMES_WORST_FIRST if word in happened)


# --- comparing ---


@dataclass(frozen=True)
class Comparison:
    """A real outcome, and what `check` says about the same program."""

    seed: int
    mapping: Mapping
    real: RealOutcome
    predicted: str
    possible: tuple[str, ...]

    @property
    def is_possible(self) -> bool:
        """Whether the real outcome is among the possible ones."""
        return self.real.outcome in _comparable(self.possible)

    @property
    def is_first(self) -> bool:
        """Whether the real outcome is the predicted one."""
        return self.real.outcome in _comparable((self.predicted,))


def _comparable(outcomes: tuple[str, ...]) -> set[str]:
    """Outcomes as a real run shows them. Undefined behaviour may show as any outcome."""
    if "undefined" in outcomes:
        return set(OUTCOMES_WORST_FIRST)
    return {"completes" if outcome in _COMPLETED else outcome for outcome in outcomes}


def comparisons(seeds: range) -> Iterator[Comparison]:
    """Compare the programs of these seeds."""
    runner = GlooRunner()
    try:
        for seed in seeds:
            yield compare(seed, ProgramMaker(seed).mapping(), runner)
    finally:
        runner.close()


def compare(seed: int, mapping: Mapping, runner: GlooRunner) -> Comparison:
    """Check a program and run it."""
    from distsim.backends import BACKEND_PROFILES
    from distsim.engine.backend_outcomes import backend_outcome
    from distsim.program.lower import lower
    from distsim.scenario import Scenario

    predicted = backend_outcome(lower(Scenario(**mapping)), BACKEND_PROFILES["gloo"])
    real = runner.run(mapping)
    return Comparison(seed, mapping, real, predicted.outcome, predicted.possible)


def main() -> int:
    """Compare many programs and print those that differ."""
    from distsim.scenario.format.dump import dump_yaml

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the programs that differ")
    given = parser.parse_args()
    kinds: Counter[str] = Counter()
    for found in comparisons(range(given.seed, given.seed + given.count)):
        kinds["programs"] += 1
        kinds["possible"] += found.is_possible
        kinds["first"] += found.is_first
        print(f"seed {found.seed}: real {found.real.outcome}", file=sys.stderr)
        if found.is_possible and found.is_first:
            continue
        mark = "not possible" if not found.is_possible else "not first"
        kinds[f"{mark}: real {found.real.outcome}, predicted {found.predicted}"] += 1
        print(f"seed {found.seed}: {mark}: real {found.real.outcome}; possible {found.possible}")
        for rank, end in enumerate(found.real.ranks):
            print(f"  rank {rank}: {end[:150]}")
        if given.show:
            print(dump_yaml(found.mapping))
    for kind, number in kinds.most_common():
        print(f"{number:6} {kind}")
    return 0 if kinds["possible"] == kinds["programs"] else 1


if __name__ == "__main__":
    sys.exit(main())
