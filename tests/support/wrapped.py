"""Compares recorded calls of real PyTorch with the expansion of a strategy, for usual configurations of
training steps.

    python -m tests.support.wrapped                   # records every configuration again, into tests/data/wrapped_<family>.json
    python -m tests.support.wrapped fsdp              # one family
    python -m tests.support.wrapped fsdp nested       # prints one configuration next to its expansion; writes nothing
    python -m tests.support.wrapped --check           # checks that the files are still right
    python -m tests.support.wrapped --table           # writes docs/explanation/same_calls.md from the files

A family is a module `wrapped_<family>` with `CASES`. A recording is compact: it contains each
distinct call once, and the numbers of the calls per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

#: Seconds until the recording of a family is given up.
LIMIT_S = 900
HERE = Path(__file__).resolve().parents[1]
DATA = HERE / "data"
DOC = HERE.parent / "docs" / "explanation" / "same_calls.md"
FAMILIES = {
    "fsdp": "fully_shard (FSDP2)",
    "ddp": "DistributedDataParallel",
    "nested": "fully_shard around transformer blocks, with adapters",
    "tp": "Tensor parallelism (DTensor)",
    "pipeline": "Pipelines",
    "dualpipe": "DualPipe, in both directions",
    "service": "Averaging, checkpoints, weight transfer, Ulysses attention",
    "deepspeed": "DeepSpeed's ZeRO",
    "megatron": "Megatron-Core's DistributedDataParallel",
    "serving": "Written after the sources",
}
#: What is said above a family's table.
NOTES = {
    "dualpipe": """\
The package's own `step` (1.0.0, github deepseek-ai/DualPipe, commit 3da1bbe); its caller sums the gradients of both copies.""",
    "megatron": """\
`megatron-core` 0.16.1. Its optimizer requires CUDA tensors, so both sides skip the all_reduce of the norm. Calls inside its coalescing
manager are recorded as one call of its tensor.""",
    "serving": """\
These frameworks cannot be recorded on a CPU. vLLM's parallel layers and its messages between prefill and decode use its own CUDA groups.
DeepEP's kernels are not calls of torch.distributed. torchft has its own group classes and a server for quorums. `put`, `get` and signals of
symmetric memory exist on GPUs only and have no row.""",
}
#: The package that recording a family takes beside torch; without it, `python -m
#: tests.support.wrapped` leaves the family out.
NEEDS = {"deepspeed": "deepspeed", "dualpipe": "dualpipe", "megatron": "megatron-core"}
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch._dynamo",
)


class Case(NamedTuple):
    """``body(rank, size, log)`` is the program on real PyTorch; ``scenario`` (mesh, iterations,
    program, …) should make its calls.

    ``soft``: operations whose recorded call is asynchronous while ours returns when it is done,
    since the caller waits at once (a functional collective, or a call that C++ makes and waits
    for).
    """

    about: str
    ranks: int
    body: Callable[[int, int, list[dict[str, Any]]], None]
    scenario: dict[str, Any]
    soft: tuple[str, ...] = ()


def cases(family: str) -> dict[str, Case]:
    found: dict[str, Case] = import_module(f"tests.support.wrapped_{family}").CASES
    return found


def installed(family: str) -> bool:
    """Whether what a family's programs import is there."""
    try:
        return family not in NEEDS or bool(metadata.version(NEEDS[family]))
    except metadata.PackageNotFoundError:
        return False


# --- compact recordings ---
def packed(calls: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Distinct calls in the order of their first appearance, and per rank their numbers."""
    number: dict[str, int] = {}
    ranks = [[number.setdefault(json.dumps(call), len(number)) for call in rank] for rank in calls]
    return {"calls": [json.loads(text) for text in number], "ranks": ranks}


def unpacked(data: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [[data["calls"][k] for k in rank] for rank in data["ranks"]]


def recordings(family: str) -> dict[str, Any]:
    path = DATA / f"wrapped_{family}.json"
    found: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return found


def expanded(case: Case) -> list[list[dict[str, Any]]]:
    """The scenario's calls. A coalesced call of one tensor is recorded as that tensor's own."""
    from distsim.scenario import Scenario
    from tests.strategies.test_same_calls import calls_of

    made = calls_of(Scenario(name="twin", world=case.ranks, **case.scenario))
    return [
        [{**call, "op": call["op"].removesuffix("_coalesced")} for call in rank] for rank in made
    ]


def first_difference(
    case: Case, real: list[list[dict[str, Any]]], made: list[list[dict[str, Any]]]
) -> str:
    """Where two programs part, in words; empty where they are equal."""
    for rank, (one, other) in enumerate(zip(real, made, strict=True)):
        for k in range(max(len(one), len(other))):
            theirs, ours = (
                text_of(calls[k]) if k < len(calls) else "nothing" for calls in (one, other)
            )
            if theirs != ours and not (
                k < len(one) and _soft(case, one[k]) and theirs.replace(" async", "") == ours
            ):
                return f"rank {rank}, call {k}: PyTorch {theirs}, distsim {ours}"
    return ""


def _soft(case: Case, call: dict[str, Any]) -> bool:
    return call["op"] in case.soft


def text_of(call: dict[str, Any]) -> str:
    words = [
        call["op"],
        f"of {','.join(map(str, call['ranks']))}",
        f"{call['numel']} {call.get('dtype', '')}".rstrip(),
    ]
    words += [f"{key} {call[key]}" for key in ("reduce_op", "root", "peer", "batch") if key in call]
    return " ".join(words) + (
        " async" if call["async"] and call["op"] not in ("send", "recv") else ""
    )


# --- recording ---
def _play(rank: int, size: int, names: list[str], family: str, folder: Path) -> None:
    """One process: joins once, then runs every configuration of so many ranks; nothing of the way
    between them is kept.
    """
    import torch
    import torch.distributed as dist

    from tests.support import torch_recorder

    log: list[dict[str, Any]] = []
    torch_recorder._number_batches(log)
    dist.Backend.register_backend(
        "recorder", torch_recorder._backend(log), extended_api=True, devices=["cpu"]
    )
    dist.init_process_group(
        "recorder",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    torch.set_num_threads(1)
    for name in names:
        dist.barrier()
        log.clear()
        torch.manual_seed(0)
        try:
            cases(family)[name].body(rank, size, log)
        except Exception as error:  # the same on every rank, or the next barrier comes to nothing
            sys.stderr.write(f"{name}, rank {rank}: {type(error).__name__}: {error}\n")
            continue
        first = min((call["batch"] for call in log if "batch" in call), default=1) - 1
        kept = [
            {**call, "batch": call["batch"] - first} if "batch" in call else call for call in log
        ]
        (folder / f"{name}.{rank}.json").write_text(json.dumps(kept))


def played(family: str, names: list[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """The calls of each rank of each configuration. Raises RuntimeError where a process fails or
    does not end in time.
    """
    from tests.support import torch_recorder

    for module in IMPORTED:  # once, not in every process
        import_module(module)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch_recorder.LIMIT_S = LIMIT_S
    found = {}
    for size in sorted({cases(family)[name].ranks for name in names}):
        mine = [name for name in names if cases(family)[name].ranks == size]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            children = [_forked(rank, size, mine, family, folder) for rank in range(size)]
            failed = torch_recorder._awaited(children)
            done = [
                name
                for name in mine
                if all((folder / f"{name}.{rank}.json").exists() for rank in range(size))
            ]
            found |= {
                name: [
                    json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(size)
                ]
                for name in done
            }
            if failed:
                sys.stdout.write(
                    f"{family}: ranks {failed} failed after {done[-1:]}, before {[n for n in mine if n not in done][:1]}\n"
                )
    return found


def _forked(rank: int, size: int, names: list[str], family: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _play(rank, size, names, family, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# --- commands ---
def record(family: str, names: Iterable[str]) -> dict[str, Any]:
    found = {name: packed(calls) for name, calls in played(family, list(names)).items()}
    for name, data in found.items():
        case = cases(family)[name]
        sys.stdout.write(
            f"{family} {name}: {first_difference(case, unpacked(data), expanded(case)) or 'equal'}\n"
        )
    return found


def write(family: str) -> None:
    import platform

    import torch

    found = record(family, cases(family))
    other = f" {NEEDS[family]} {metadata.version(NEEDS[family])}," if family in NEEDS else ""
    made = f"python -m tests.support.wrapped {family}, torch {torch.__version__},{other} Python {platform.python_version()}, Gloo"
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(data, separators=(',', ':'))}"
        for name, data in found.items()
    )
    (DATA / f"wrapped_{family}.json").write_text(
        f'{{"made": {json.dumps(made)}, "cases": {{\n{lines}\n}}}}\n'
    )


def check(family: str) -> bool:
    """Records anew; false where a recording differs from its file."""
    return record(family, cases(family)) == recordings(family)


def show(family: str, name: str) -> None:
    """One configuration: both lists of calls side by side."""
    case = cases(family)[name]
    real = unpacked(record(family, [name])[name])
    made = expanded(case)
    for rank in range(1 if len(sys.argv) < 4 else case.ranks):
        for k in range(max(len(real[rank]), len(made[rank]))):
            theirs, ours = (text_of(c[rank][k]) if k < len(c[rank]) else "-" for c in (real, made))
            mark = " " if theirs.replace(" async", "") == ours.replace(" async", "") else "!"
            sys.stdout.write(f"{rank} {k:3} {mark} {theirs:75} | {ours}\n")


HEAD = """# The same calls as PyTorch

Does a training strategy of distsim make the calls that PyTorch makes? Each row is a configuration as torchtitan, TRL, accelerate,
Lightning or DeepSpeed wraps models. Each ran on real PyTorch 2.13 with Gloo processes, and every call was recorded. The recording is
compared with the output of [`distsim expand`](../reference/strategies.md): every collective and message of every rank in order, with
group, element count, dtype, reduce op, root, peer, batch, and whether the call blocks.

DeepSpeed, DualPipe and Megatron-Core ran their own code, on CPU tensors. The last table lists configurations that cannot be recorded on
a CPU. Their calls were written by hand from the source code, so these rows only compare distsim with the source code.

{equal} of {total} configurations are equal ({calls} calls). `python -m tests.support.wrapped` records them again; with `--table` it
writes this page.
"""


def table() -> str:
    """The page: a row per configuration."""
    rows, total, equal, calls = [], 0, 0, 0
    for family, title in FAMILIES.items():
        known = recordings(family)
        rows += [
            f"\n## {title}\n",
            *([f"{NOTES[family]}\n"] if family in NOTES else ()),
            "| configuration | ranks | calls | equal |",
            "|---|---|---|---|",
        ]
        for name, case in cases(family).items():
            real = unpacked(known[name])
            parted = first_difference(case, real, expanded(case))
            total, equal, calls = total + 1, equal + (not parted), calls + sum(map(len, real))
            rows.append(
                f"| {case.about} | {case.ranks} | {sum(map(len, real))} | {f'no: {parted}' if parted else 'yes'} |"
            )
    return HEAD.format(total=total, equal=equal, calls=calls) + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", help="A family of configurations. [default: all]")
    parser.add_argument("case", nargs="?", help="Print this configuration; write nothing.")
    parser.add_argument("--check", action="store_true", help="Check the recordings.")
    parser.add_argument("--table", action="store_true", help="Write the page of the recordings.")
    options = parser.parse_args(arguments)
    if options.table:
        DOC.write_text(table())
        return 0
    if options.case:
        show(options.family, options.case)
        return 0
    families = [family for family in FAMILIES if installed(family)]
    if options.family:
        families = [options.family]
    if options.check:
        return 0 if sum(not check(family) for family in families) == 0 else 1
    for family in families:
        write(family)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main(sys.argv[1:]))
