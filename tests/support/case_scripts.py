"""The programs of tests/data/agreed as scripts of torch.distributed, as somebody would write them,
and what the hub makes of them.

`benchmarks/capture_truth.py` runs them under the rules of gloo and of nccl and prints each whose
verdict is not that of `check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distsim.checker.verdict import Verdict, verdict_of
from distsim.program.from_calls import build_program
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture
from tests.support.agreed import Case, Plain

HEAD = """\
import torch
import torch.distributed as dist

dist.init_process_group("{backend}")
rank = dist.get_rank()
work, group = {{}}, {{"world": None}}
"""
#: Partners that no rank can name are for torch to refuse.
_OP = {
    "max": "MAX",
    "min": "MIN",
    "sum": "SUM",
    "product": "PRODUCT",
    "avg": "AVG",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def script_of(case: Case, backend: str) -> str:
    """The whole script: a branch for each program, a line for each call."""
    lines = [HEAD.format(backend=backend)]
    lines += [
        f"group[{name!r}] = dist.new_group({ranks})\n" for name, ranks in case["groups"].items()
    ]
    for rank, program in case["programs"].items():
        writer = _Writer(case, int(rank))
        body = [line for call in program for line in writer.lines(call)]
        lines.append(
            f"if rank == {rank}:\n"
            + "".join(f"    {line}\n" for line in [*writer.made, *(body or ["pass"])])
        )
    return "".join(lines)


class _Writer:
    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.made: list[str] = []
        self.sizes = {
            "world": case["world_size"],
            **{name: len(ranks) for name, ranks in case["groups"].items()},
        }
        self.named: set[str] = set()

    def lines(self, call: Plain) -> Iterator[str]:
        op = call["op"]
        if op == "compute":
            if "buf" in call:
                yield (
                    f"{self._named(call)}.add_(1)"
                    if call.get("writes")
                    else f"{self._named(call)}.sum()"
                )
        elif op == "wait":
            yield f"work.pop({call['handle']!r}).wait()"
        elif op == "new_group":
            self.sizes[call["name"]] = len(call["ranks"])
            yield f"group[{call['name']!r}] = dist.new_group({call['ranks']})"
        elif op == "batch":
            yield from self._batch(call)
        elif "peer" in call:
            yield from self._message(call)
        else:
            yield from self._collective(call)

    # --- parts ---
    def _tensor(self, call: Plain, count: int | None = None) -> str:
        if "buf" in call:
            return self._named(call)
        return (
            f"torch.ones({call['numel'] if count is None else count}, dtype=torch.{call['dtype']})"
        )

    def _named(self, call: Plain) -> str:
        if call["buf"] not in self.named:
            self.named.add(call["buf"])
            numel, dtype = call.get("numel", 64), call.get("dtype", "float32")
            self.made.append(f"{call['buf']} = torch.ones({numel}, dtype=torch.{dtype})")
        return str(call["buf"])

    def _words(self, call: Plain) -> str:
        tag = f", tag={call['tag']}" if call.get("tag") else ""
        group = f", group=group[{call['group']!r}]" if call.get("group", "world") != "world" else ""
        return tag + group

    def _message(self, call: Plain) -> Iterator[str]:
        peer = "" if call["peer"] is None else f", {call['peer']}"
        text = f"dist.{call['op']}({self._tensor(call)}{peer}{self._words(call)})"
        if "assume_from" in call:
            text = f"assert {text} == {call['assume_from']}"
        yield f"work[{call['handle']!r}] = {text}" if "handle" in call else text

    def _batch(self, call: Plain) -> Iterator[str]:
        parts = ", ".join(
            f"dist.P2POp(dist.{p['op']}, {self._tensor(p)}, {p['peer']}{self._words(p)})"
            for p in call["ops"]
        )
        text = f"dist.batch_isend_irecv([{parts}])"
        if "handle" in call:
            yield f"work[{call['handle']!r}] = Batch({text})"
            if "class Batch" not in "".join(self.made):
                self.made.append(
                    "class Batch(list): wait = lambda self: [one.wait() for one in self]"
                )
        else:
            yield f"for one in {text}: one.wait()"

    def _collective(self, call: Plain) -> Iterator[str]:
        given = [*_arguments(call, self)]
        if call.get("group", "world") != "world":
            given.append(f"group=group[{call['group']!r}]")
        if call.get("async"):
            given.append("async_op=True")
        op = "all_to_all_single" if call["op"] == "all_to_all" else call["op"]
        text = f"dist.{op}({', '.join(given)})"
        yield f"work[{call['handle']!r}] = {text}" if "handle" in call else text


def _arguments(call: Plain, writer: _Writer) -> Iterator[str]:
    op, n = call["op"], writer.sizes.get(call.get("group", "world"), 1)
    one, root = (writer._tensor(call) if op != "barrier" else ""), call.get("root", 0)
    several = f"[{', '.join([one] * n)}]" if n < 3 else f"[{one} for _ in range({n})]"
    reduces = f"op=dist.ReduceOp.{_OP[call.get('reduce_op', 'sum')]}"
    if op == "all_reduce":
        yield from (one, reduces)
    elif op == "reduce":
        yield from (one, f"dst={root}", reduces)
    elif op == "broadcast":
        yield from (one, f"src={root}")
    elif op == "all_gather":
        yield from (several, one)
    elif op == "gather":
        yield from (one, several if writer.rank == root else "None", f"dst={root}")
    elif op == "scatter":
        yield from (one, several if writer.rank == root else "None", f"src={root}")
    elif op == "reduce_scatter":
        yield from (one, several, reduces)
    elif op == "all_to_all":
        yield from _exchange(call, writer)


def _exchange(call: Plain, writer: _Writer) -> Iterator[str]:
    got = sum(call["out_splits"]) if "out_splits" in call else call["numel"]
    yield writer._tensor(call, got)
    yield writer._tensor(call)
    if "in_splits" in call or "out_splits" in call:
        yield f"output_split_sizes={call.get('out_splits')}"
        yield f"input_split_sizes={call.get('in_splits')}"


def reason(case: Case, backend: str) -> str:
    """Why the verdicts of a case may differ; "" where they must not."""
    if "race" in str(case["expect"]["verdict"]):
        return "that requests share a tensor, who reads one that is being filled, and on whom a receive counts, are no calls of torch"
    if backend == "nccl" and any(
        "peer" in c and c["peer"] is None for program in case["programs"].values() for c in program
    ):
        return "nccl refuses a receive from any source: there the rank ends by its rules, and not in the run"
    return ""


def on_the_hub(case: Case, backend: str, folder: Path) -> CaptureResult:
    """Run the script of a case under the hub."""
    script = folder / f"{case['id']}_{backend}.py"
    script.write_text(script_of(case, backend))
    capture_options = CaptureRunOptions(
        CaptureTarget(str(script)), case["world_size"], backend=backend, keep_output=True
    )
    return evaluate_capture(run_capture(capture_options), backend=backend)


def checked(case: Case, backend: str) -> Verdict:
    """What `check` says of the case."""
    return verdict_of(
        build_program(
            case["world_size"],
            case["programs"],
            groups=case["groups"],
            backend=backend,
            name=case["id"],
        )
    )


def difference(case: Case, backend: str, folder: Path) -> str:
    """How the verdicts differ; "" where they do not."""
    mine, judged = checked(case, backend), on_the_hub(case, backend, folder)
    theirs = judged.simulation.verdict
    if theirs is None:
        first = next((s for s in judged.stands if s.state not in ("ended", "waits")), None)
        return f"{mine.verdict} is {judged.outcome}{f', rank {first.rank} {first.state} {first.what[:150]}' if first is not None else ''}"
    if theirs.verdict != mine.verdict:
        return f"{mine.verdict} is {theirs.verdict} ({judged.outcome})"
    return ""
