"""CPU time of simulating and checking programs that hang, compared with the same program without the
hang, over the number of ranks.

    python benchmarks/hangs.py [--most RANKS] [--kind NAME] [simulate | check | explain]

For each kind of hang and each number of ranks, the output shows the CPU seconds of the healthy and
of the hanging program and their ratio. After each kind, it shows the exponent with which the time
of the hanging program grows (1: twice the ranks take twice the time). `explain` measures without
the engines: the verdict, the findings in the text of the program, and the diagnosis of the hang.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

from distsim.backends import BACKEND_PROFILES
from distsim.checker.detectors.backend_support import backend_findings
from distsim.checker.detectors.lint import lint_findings
from distsim.checker.detectors.swapped_collectives import swapped_collective_findings
from distsim.checker.detectors.swapped_messages import swapped_message_findings
from distsim.checker.diagnosis.hang_findings import diagnose_hang
from distsim.checker.verdict import CheckedProgram, verdict_of
from distsim.findings.final_state import FinalState
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import Scenario, loads
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import simulate

RANKS = (64, 128, 256, 512, 1024, 2048)
TENSORS = "{x: {shape: [1048576]}, y: {like: x}, z: {shape: [1024 + rank % 2]}, w: {shape: [1024 + (rank == 3)]}}"
#: Steps of an exchange with both neighbours, of a step of training, and of an exchange between two
#: ranks each.
RING = """
  - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
  - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
  - wait: [s, r]"""
TRAINING = f"""{RING}
  - all_reduce: {{tensor: x}}
  - barrier:"""
REPEATED = """
  - repeat:
      times: 20
      steps:
        - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
        - wait: [s, r]"""
PAIRS = """
  - ranks: rank % 2 == 0
    steps:
      - send: {tensor: x, dst: rank + 1}
      - recv: {tensor: y, src: rank + 1}
  - ranks: rank % 2 == 1
    steps:
      - recv: {tensor: y, src: rank - 1}
      - send: {tensor: x, dst: rank - 1}"""
ODD = "rank != world_size // 2 + 5"
#: kind -> (steps of the healthy program, of the hanging one).
KINDS: dict[str, tuple[str, str]] = {
    "a member makes no call": (
        TRAINING,
        TRAINING.replace("- barrier:", f"- ranks: {ODD}\n    steps:\n      - barrier:"),
    ),
    "a member makes another call": (
        TRAINING,
        TRAINING.replace(
            "- all_reduce: {tensor: x}",
            f"- ranks: {ODD}\n    steps:\n      - all_reduce: {{tensor: x}}",
        ),
    ),
    "a member leaves a call out after twenty exchanges": (
        f"{REPEATED}\n  - all_reduce: {{tensor: x}}\n  - barrier:",
        f"{REPEATED}\n  - ranks: {ODD}\n    steps:\n      - all_reduce: {{tensor: x}}\n  - barrier:",
    ),
    "sizes differ": (
        TRAINING,
        TRAINING.replace("all_reduce: {tensor: x}", "all_reduce: {tensor: z}"),
    ),
    "a ring sends first": (
        RING,
        """
  - send: {tensor: x, dst: (rank + 1) % world_size}
  - recv: {tensor: y, src: (rank - 1) % world_size}""",
    ),
    "pairs send head to head": (
        PAIRS,
        """
  - send: {tensor: x, dst: rank + 1 - 2 * (rank % 2)}
  - recv: {tensor: y, src: rank + 1 - 2 * (rank % 2)}""",
    ),
    "a rank never starts": (TRAINING, f"{TRAINING}\nfaults: [{{rank: 7, kind: absent}}]"),
    "tags differ": (PAIRS, PAIRS.replace("src: rank + 1", "src: rank + 1, tag: 1")),
    "a rank is killed": (
        TRAINING,
        f"{TRAINING}\niterations: 2\nfaults: [{{rank: 7, iteration: 1, kind: kill}}]",
    ),
    "half of the ranks leave early": (
        TRAINING,
        TRAINING.replace(
            "- barrier:",
            "- ranks: rank < world_size // 2\n    steps:\n      - all_reduce: {tensor: x}",
        ),
    ),
    "each rank names another root": (
        TRAINING,
        TRAINING.replace("all_reduce: {tensor: x}", "broadcast: {tensor: x, src: rank}"),
    ),
    "one rank's size differs": (
        TRAINING,
        TRAINING.replace("all_reduce: {tensor: x}", "all_reduce: {tensor: w}"),
    ),
    "a pipeline waits for its first": (
        "\n  - ranks: rank > 0\n    steps:\n      - recv: {tensor: y, src: rank - 1}"
        "\n  - ranks: rank < world_size - 1\n    steps:\n      - send: {tensor: x, dst: rank + 1}",
        "\n  - recv: {tensor: y, src: (rank - 1) % world_size}\n  - send: {tensor: x, dst: (rank + 1) % world_size}",
    ),
}


def program(steps: str, world: int) -> Scenario:
    """A scenario with messages that are too large for buffering."""
    return loads(
        f"name: hang\nworld: {world}\nbackend: gloo\ntensors: {TENSORS}\nprogram:{steps}\n"
    )


def _simulate(scenario: Scenario) -> Callable[[], object]:
    return lambda: simulate(scenario, with_values=False)


def _check(scenario: Scenario) -> Callable[[], object]:
    return lambda: check_scenario(scenario)


def _explain(scenario: Scenario) -> Callable[[], object]:
    lowered = lower(scenario)
    stood = verdict_of(lowered).final_state
    return lambda: _findings(lowered, stood)


def _findings(lowered: Program, stood: FinalState | None) -> None:
    subject, profile = CheckedProgram(lowered), BACKEND_PROFILES[lowered.backend]
    layout = subject.layout
    verdict_of(lowered, subject=subject)
    swapped_collective_findings(lowered, None, layout)
    swapped_message_findings(lowered, None, layout)
    backend_findings(lowered, profile, layout)
    lint_findings(lowered, profile, layout)
    if stood is not None:
        diagnose_hang(lowered, stood, layout)


WORKS = {"simulate": _simulate, "check": _check, "explain": _explain}


def seconds(work: Callable[[Scenario], Callable[[], object]], scenario: Scenario) -> float:
    """CPU seconds of the work, the better of two."""
    found = []
    for _ in range(2):
        done = work(scenario)
        start = time.process_time()
        done()
        found.append(time.process_time() - start)
    return min(found)


def measure(name: str, kind: str, most: int) -> None:
    whole, hanging = KINDS[kind]
    took = {}
    for world in (world for world in RANKS if world <= most):
        healthy, hung = (seconds(WORKS[name], program(steps, world)) for steps in (whole, hanging))
        took[world] = hung
        print(
            f"{kind}, {name}, {world} ranks: healthy {healthy:.3f} s, hanging {hung:.3f} s, ratio {hung / healthy:.2f}",
            flush=True,
        )
    first, last = 256 if 256 in took and most > 256 else min(took), max(took)
    if last > first:
        print(
            f"{kind}, {name}: grows with the ranks to the power of {math.log(took[last] / took[first], last / first):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "works",
        nargs="*",
        default=["simulate", "check"],
        help="simulate, check or explain. [default: simulate and check]",
    )
    parser.add_argument("--most", type=int, default=RANKS[-1])
    parser.add_argument("--kind", choices=KINDS, action="append")
    chosen = parser.parse_args()
    for kind in chosen.kind or KINDS:
        for name in chosen.works:
            measure(name, kind, chosen.most)


if __name__ == "__main__":
    main()
