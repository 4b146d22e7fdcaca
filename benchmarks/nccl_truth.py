"""Does NCCL behave as distsim's rules say? Runs agreed programs and scenarios on real GPUs and
compares each result with the simulation.

    python benchmarks/nccl_truth.py cases|scenarios|rules [pattern] [--init lazy|eager] [--out FILE.jsonl] [--slots N] [--seconds S]
        [--ranks N] [--backend gloo]

The output has a line for each run whose result differs from the simulation, or that the rules leave
open, and the totals. ``--out`` writes a line of JSON for each run. Ranks share GPUs if there are
too few. A process that finishes a program also runs the next one, because creating a CUDA context
takes a second. After a hang, the process is ended. Runs that differ are repeated once, alone and
with a longer timeout. ``--backend gloo`` tries the benchmark without GPUs. ``rules`` tests each
numbered NCCL rule of `docs/explanation/semantics.md` (N5 to N12).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from distsim.backends import BACKEND_PROFILES  # noqa: E402
from distsim.common.errors import DistsimError  # noqa: E402
from distsim.operations.registry import OPERATIONS  # noqa: E402
from distsim.real import run as real  # noqa: E402
from distsim.real.launch.start_methods import ProcessLauncher  # noqa: E402
from distsim.real.shared.job import WorkerJob  # noqa: E402
from distsim.real.worker import rank_process  # noqa: E402
from distsim.real.worker.rank_tensors import tensor_bytes  # noqa: E402
from distsim.scenario import load  # noqa: E402
from distsim.semantics.form.nccl_connect import connection_mismatches  # noqa: E402
from distsim.simulation.simulate_scenario import Simulation, simulate  # noqa: E402
from distsim.trace.model import Trace  # noqa: E402
from tests.support.agreed import load_cases, scenario_of  # noqa: E402

#: The most ranks, bytes of tensors and simulated nanoseconds of a program that is run.
RANKS, LARGEST, LONGEST_NS = 8, 1 << 30, 5_000_000_000
#: Seconds in which nothing moves: a hang. The second number holds for what is run again.
PATIENCE = (4, 12)
#: Longer than this inside isend, and the host waited for somebody.
WAITED_NS = 500_000_000
Found = dict[str, Any]

#: Rule -> its file and what is set in it; ``init`` is set by ``--init``.
RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "N5 tags are ignored": ("scenarios/tag_mismatch.yaml", ()),
    "N6 no receive from any source": ("scenarios/findings/ds701_any_source_on_nccl.yaml", ()),
    "N7 which communicator messages use": ("traces/nccl_rules/message_behind_collective.yaml", ()),
    "N8 first use waits on the host": ("traces/nccl_rules/first_isend.yaml", ()),
    "N8 a first batch takes the whole group": ("traces/nccl_rules/batch_first.yaml", ()),
    "N9 both send as first contact": ("traces/nccl_rules/both_send.yaml", ("vars.warm=0",)),
    **{
        f"N10 both send, {size} bytes": (
            "traces/nccl_rules/both_send.yaml",
            (f"vars.elements={size // 4}",),
        )
        for size in (
            1 << 10,
            1 << 14,
            1 << 16,
            1 << 18,
            1 << 19,
            1 << 20,
            1 << 21,
            1 << 22,
            1 << 23,
            1 << 24,
            1 << 26,
        )
    },
    "N11 a batch completes as a unit": ("scenarios/zoo/z13_asymmetric_batch.yaml", ()),
    "N12 opposite order, blocking": ("scenarios/zoo/z11_groups_opposite_order.yaml", ()),
    "N12 opposite order, async": ("traces/nccl_rules/groups_crossed.yaml", ()),
}


class Question(NamedTuple):
    """A program that is to be run: its name, its file, what is set in it."""

    name: str
    path: str
    sets: tuple[str, ...]


# --- processes that run more than one program ---


class WarmRank(NamedTuple):
    """A process that waits for jobs."""

    process: Any
    connection: Connection


class WarmLauncher(ProcessLauncher):
    """Gives ranks to processes that have run others before, and have their CUDA context."""

    idle: ClassVar[list[WarmRank]] = []

    def __init__(self, method: str) -> None:
        super().__init__(method)
        self.taken: dict[int, WarmRank] = {}
        self.status: dict[int, int] = {}

    def start(self, job: WorkerJob, ranks: Sequence[int]) -> None:
        for rank in ranks:
            warm = self.idle.pop() if self.idle else _new_rank()
            warm.connection.send((replace(job, parent=os.getpid()), rank))
            self.taken[rank], self.processes[rank] = warm, warm.process

    def exit_of(self, rank: int) -> int | None:
        if rank in self.status:
            return self.status[rank]
        warm = self.taken.get(rank)
        try:
            if warm is not None and warm.process.is_alive() and warm.connection.poll():
                self.status[rank] = int(warm.connection.recv())
                return self.status[rank]
        except EOFError:
            pass
        return super().exit_of(rank)

    def end(self, grace_s: float) -> None:
        limit = time.monotonic() + grace_s
        while time.monotonic() < limit and any(self.exit_of(rank) is None for rank in self.taken):
            time.sleep(0.005)
        kept = [rank for rank in self.taken if self.status.get(rank) == 0]
        self.idle.extend(self.taken[rank] for rank in kept)
        for rank in kept:
            del self.processes[rank]
        super().end(0)


def _new_rank() -> WarmRank:
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_rank_loop, args=(there,), daemon=True
    )
    process.start()
    there.close()
    return WarmRank(process, here)


def _rank_loop(connection: Connection) -> None:
    while True:
        try:
            job, rank = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(rank_process._run_process(job, rank))


# --- one question ---


def asked(question: Question, backend: str, patience: int, ranks: int) -> Found:
    """Simulate and run one program."""
    began = time.monotonic()
    found: Found = {"name": question.name, "sets": list(question.sets)}
    try:
        simulation = simulate(load(question.path, list(question.sets)), backend=backend)
        found |= {"world": simulation.program.world_size, "predicted": simulation.outcome}
        profile = BACKEND_PROFILES[simulation.program.backend]
        found["may raise"] = profile.device and bool(
            connection_mismatches(simulation.program, profile)
        )
        why = _unfit(simulation, ranks)
        if why:
            return found | {"found": f"not run: {why}"}
        wish = real.RealRunOptions(
            backend=backend, launcher="fork", timeout_ns=patience * 10**9, force=True
        )
        record, _ = real.run_simulation(simulation, wish)
    except DistsimError as error:
        return found | {"found": f"refused: {error}"}
    if record is None:
        return found | {"found": "no record"}
    values = Counter(value.state for value in record.values)
    if "first use" in question.name:
        found["isend waits"] = {
            "simulated": _waits(simulation.run.trace),
            "found": _waits(record.trace),
        }
    found |= {
        "found": record.outcome,
        "reason": record.reason,
        "agrees": record.agrees,
        "differences": list(record.differences),
        "agreement": record.agreement,
        "values": dict(values),
        "launcher": record.launcher,
        "findings": [finding.code for finding in record.findings],
        "culprits": list(record.culprits),
        "ends": [str(end)[:300] for end in record.final_state.ends],
        "blocked": [f"{b.rank} {b.position}" for b in record.final_state.blocked],
    }
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _waits(trace: Trace) -> bool:
    """Whether the host waited in the first isend."""
    isend = trace.ops("isend")
    return bool((trace["returned_ns"] - trace["posted_ns"])[isend][0] > WAITED_NS)


def _unfit(simulation: Simulation, ranks: int) -> str:
    program = simulation.program
    if program.startup is not None and program.startup.failed:
        return "it does not start"
    if program.world_size > ranks:
        return f"{program.world_size} ranks"
    if any(
        OPERATIONS[call.op].kind == "remote" or OPERATIONS[call.op].signals
        for code in program.codes
        for call in code.calls
    ):
        return "torch.distributed has no call for what is one-sided"
    if tensor_bytes(program, range(program.world_size)) > LARGEST:
        return "its tensors are large"
    return "it takes long" if simulation.run.makespan_ns > LONGEST_NS else ""


def differs(found: Found) -> bool:
    """It ended otherwise than simulated, or with other values. Launches that connect other
    directions than each other hang or raise, by NCCL's transport (N9)."""
    if found["predicted"] == "hangs" and found["found"] == "raises" and found.get("may raise"):
        return False
    return not found["found"].startswith(("not run", "refused")) and (
        (found["predicted"] != "undefined" and not found.get("agrees"))
        or bool(found.get("values", {}).get("differs"))
        or len(set(found.get("isend waits", {}).values())) > 1
    )


# --- all of them ---


def cases(pattern: str, init: str, folder: Path) -> Iterator[Question]:
    for case in load_cases():
        if case["world_size"] <= RANKS and re.search(pattern, f"{case['id']} {case['category']}"):
            path = folder / f"{case['id']}.yaml"
            path.write_text(scenario_of(case))
            yield Question(f"{case['id']} {case['category']}", str(path), (f"options.init={init}",))


def scenarios(pattern: str, init: str, folder: Path) -> Iterator[Question]:
    for path in sorted((ROOT / "scenarios").rglob("*.yaml")):
        name = str(path.relative_to(ROOT / "scenarios"))
        if re.search(pattern, name):
            yield Question(name, str(path), (f"options.init={init}",))


def rules(pattern: str, init: str, folder: Path) -> Iterator[Question]:
    for name, (path, sets) in RULES.items():
        if re.search(pattern, name):
            yield Question(name, str(ROOT / path), (*sets, f"options.init={init}"))


SOURCES = {"cases": cases, "scenarios": scenarios, "rules": rules}


def slot(questions: Any, answers: Any, backend: str, until: float, ranks: int) -> None:
    """Take questions one after the other; a process of its own."""
    real.ProcessLauncher = WarmLauncher  # type: ignore[misc]
    while (item := questions.get()) is not None:
        question, patience = item
        if time.time() > until:
            answers.put(
                {
                    "name": question.name,
                    "sets": list(question.sets),
                    "predicted": "",
                    "found": "not run: no time left",
                }
            )
            continue
        try:
            answers.put(asked(question, backend, patience, ranks))
        except Exception as error:  # of one program; the others are to be run
            answers.put(
                {
                    "name": question.name,
                    "predicted": "",
                    "found": f"broke: {type(error).__name__}: {error}",
                }
            )
    for warm in WarmLauncher.idle:
        warm.process.kill()


def ask_all(
    questions: Sequence[Question],
    given: argparse.Namespace,
    slots: int,
    patience: int,
    until: float,
) -> list[Found]:
    context = multiprocessing.get_context("fork")
    todo, answers = context.Queue(), context.Queue()
    workers = [
        context.Process(target=slot, args=(todo, answers, given.backend, until, given.ranks))
        for _ in range(slots)
    ]
    for process in workers:
        process.start()
    for question in questions:
        todo.put((question, patience))
    for _ in workers:
        todo.put(None)
    found = []
    for _ in questions:
        found.append(answers.get())
        if (
            differs(found[-1])
            or found[-1]["predicted"] == "undefined"
            or found[-1]["found"].startswith("broke")
        ):
            print(_line(found[-1]), flush=True)
    for process in workers:
        process.join()
    return found


def _line(found: Found) -> str:
    more = "; ".join(found.get("differences", [])[:2])
    return f"{found['name']} {' '.join(found.get('sets', ()))}: {found['predicted']}, found {found['found']} {more}"[
        :300
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=tuple(SOURCES))
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--init", default="lazy", choices=("lazy", "eager"))
    parser.add_argument("--out")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--ranks", type=int, default=RANKS)
    given = parser.parse_args()
    import torch.distributed  # noqa: F401 - the ranks are forked from this process

    import distsim.real.worker.runner  # noqa: F401

    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        chosen = list(SOURCES[given.what](given.pattern, given.init, Path(folder)))
        chosen.sort(
            key=lambda one: hashlib.sha256(one.name.encode()).digest()
        )  # so that what there was time for is a fair sample
        found = ask_all(chosen, given, given.slots, PATIENCE[0], began + given.seconds * 0.75)
        again = {one.name for one in chosen} & {one["name"] for one in found if differs(one)}
        print(f"repeated alone: {len(again)}")
        second = ask_all(
            [one for one in chosen if one.name in again],
            given,
            1,
            PATIENCE[1],
            began + given.seconds,
        )
    later = {one["name"]: one for one in second if not one["found"].startswith("not run")}
    found = [later.get(one["name"], one) for one in found]
    if given.out:
        Path(given.out).write_text(
            "".join(f"{json.dumps(one)}\n" for one in sorted(found, key=lambda one: one["name"]))
        )
    return summary(found)


def summary(found: Sequence[Found]) -> int:
    """Print the totals; return 1 if a run differs or broke, or if nothing ran."""
    ran = [one for one in found if not one["found"].startswith(("not run", "refused", "broke"))]
    open_ = [one for one in ran if one["predicted"] == "undefined"]
    other = [one for one in ran if differs(one)]
    for one in sorted(other, key=lambda one: one["name"]):
        print("DIFFERS", _line(one))
    kinds = Counter((one["predicted"], one["found"]) for one in ran)
    for (predicted, came), count in sorted(kinds.items()):
        print(f"{count:5}  simulated {predicted}, found {came}")
    print(
        Counter(
            one["found"].split(":")[0] + ":" + one["found"].partition(":")[2][:40]
            for one in found
            if one not in ran
        )
    )
    print(
        f"{len(ran) - len(open_) - len(other)} of {len(ran) - len(open_)} as simulated; {len(open_)} more undefined by the rules"
    )
    return bool(other) or not ran or any(one["found"].startswith("broke") for one in found)


if __name__ == "__main__":
    sys.exit(main())
