"""Configurations of training steps as people wrap them: what real PyTorch calls, recorded, beside what a strategy expands to.

    python tests/wrapped.py                   # records every configuration anew, into tests/data/wrapped_<family>.json
    python tests/wrapped.py fsdp              # one family
    python tests/wrapped.py fsdp nested       # one configuration of it, printed beside the expansion; writes nothing
    python tests/wrapped.py --check           # whether the files still hold
    python tests/wrapped.py --table           # docs/same_calls.md from the files

A family is a module `wrapped_<family>` with `CASES`. A recording is compact: the distinct calls once, and per rank their numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
DATA = HERE / "data"
DOC = HERE.parent / "docs" / "same_calls.md"
FAMILIES = {
    "fsdp": "fully_shard (FSDP2)",
    "ddp": "DistributedDataParallel",
    "nested": "fully_shard around transformer blocks, with adapters",
}
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
            "torch.distributed.checkpoint", "torch.distributed.optim", "torch._dynamo")  # fmt: skip


class Case(NamedTuple):
    """``body(rank, size, log)`` is the program on real PyTorch; ``scenario`` (mesh, iterations, program, …) should make its calls.

    ``soft``: operations whose recorded call is asynchronous while ours returns when it is done, since the caller waits at once (a
    functional collective, or a call that C++ makes and waits for). ``gap``: what differs, where it is known to.
    """

    about: str
    ranks: int
    body: Callable[[int, int, list[dict[str, Any]]], None]
    scenario: dict[str, Any]
    soft: tuple[str, ...] = ()
    gap: str = ""


def cases(family: str) -> dict[str, Case]:
    found: dict[str, Case] = import_module(f"wrapped_{family}").CASES
    return found


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
    from test_same_calls import calls_of

    from distsim.scenario import Scenario

    return calls_of(Scenario(name="twin", world=case.ranks, **case.scenario))


def first_difference(case: Case, real: list[list[dict[str, Any]]], made: list[list[dict[str, Any]]]) -> str:
    """Where two programs part, in words; empty where they are equal."""
    for rank, (one, other) in enumerate(zip(real, made, strict=True)):
        for k in range(max(len(one), len(other))):
            theirs, ours = (text_of(calls[k]) if k < len(calls) else "nothing" for calls in (one, other))
            if theirs != ours and not (k < len(one) and _soft(case, one[k]) and theirs.replace(" async", "") == ours):
                return f"rank {rank}, call {k}: PyTorch {theirs}, distsim {ours}"
    return ""


def _soft(case: Case, call: dict[str, Any]) -> bool:
    return call["op"] in case.soft


def text_of(call: dict[str, Any]) -> str:
    words = [call["op"], f"of {','.join(map(str, call['ranks']))}", f"{call['numel']} {call.get('dtype', '')}".rstrip()]
    words += [f"{key} {call[key]}" for key in ("reduce_op", "root", "peer", "batch") if key in call]
    return " ".join(words) + (" async" if call["async"] and call["op"] not in ("send", "recv") else "")


# --- commands ---
def record(family: str, names: Iterable[str]) -> dict[str, Any]:
    import torch_recorder

    for module in IMPORTED:  # once, not in every process
        import_module(module)
    found = {}
    for name in names:
        case = cases(family)[name]
        found[name] = packed(torch_recorder.record(case.ranks, case.body))
        sys.stdout.write(f"{family} {name}: {first_difference(case, unpacked(found[name]), expanded(case)) or 'equal'}\n")
        sys.stdout.flush()
    return found


def write(family: str) -> None:
    import platform

    import torch

    found = record(family, cases(family))
    made = f"python tests/wrapped.py {family}, torch {torch.__version__}, Python {platform.python_version()}, Gloo"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(data, separators=(',', ':'))}" for name, data in found.items())
    (DATA / f"wrapped_{family}.json").write_text(f'{{"made": {json.dumps(made)}, "cases": {{\n{lines}\n}}}}\n')


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


def table() -> str:
    """The page: a row per configuration."""
    rows, total, equal = [], 0, 0
    for family, title in FAMILIES.items():
        known = recordings(family)
        rows += [f"\n## {title}\n", "| configuration | ranks | calls | equal |", "|---|---|---|---|"]
        for name, case in cases(family).items():
            real = unpacked(known[name])
            parted = first_difference(case, real, expanded(case))
            total, equal = total + 1, equal + (not parted)
            rows.append(f"| {case.about} | {case.ranks} | {sum(map(len, real))} | {'yes' if not parted else f'no: {case.gap}'} |")
    head = (HERE / "data" / "same_calls_head.md").read_text()
    return head.format(total=total, equal=equal) + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    words = [a for a in arguments if not a.startswith("--")]
    if "--table" in arguments:
        DOC.write_text(table())
        return 0
    if len(words) > 1:
        show(words[0], words[1])
        return 0
    families = words or list(FAMILIES)
    if "--check" in arguments:
        return int(not all([check(family) for family in families]))
    for family in families:
        write(family)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(sys.argv[1:]))
