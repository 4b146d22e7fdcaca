"""The shape of one entry of the table of finding codes."""

from __future__ import annotations

import re
from typing import Literal

from distsim.common.records import dataclass
from distsim.findings.finding_types import Severity

#: The classes of a verdict, worst first, except `ok`.
VerdictClass = Literal["invalid", "mismatch", "deadlock", "race", "leak"]

#: The elements of the tensors that the examples may use.
_EXAMPLE_SIZES = {"x": 4, "z": 4, "y": 8}


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """The code of a finding and its page.

    ``what``: what the finding means. ``why``: what happens in a real run. ``remedy``: what to do.
    ``verdict`` is the class that a finding of this code gives the program; None if the finding does
    not affect the verdict. ``example`` is a short scenario (YAML) with the finding, or a torch
    script if a scenario cannot express it.
    """

    code: str
    title: str
    severity: Severity
    verdict: VerdictClass | None
    what: str
    why: str
    remedy: str
    example: str

    @property
    def of_scripts(self) -> bool:
        """Whether only captured scripts can have the finding."""
        return self.example.startswith("import ")


def two_rank_scenario(*steps: str) -> str:
    """A scenario of two ranks on gloo.

    ``steps`` are the entries of its program.
    """
    return example_scenario(2, "", *steps)


def example_scenario(world: int, head: str, *steps: str, backend: str = "gloo") -> str:
    """A scenario whose steps may use the tensors x, z (4 float32) and y (8 float32).

    ``head`` contains further top-level lines. The scenario lists only the tensors in use.
    """
    program = "".join(f"  - {step}\n" for step in steps)
    tensors = _tensor_line(program)
    return f"world: {world}\nbackend: {backend}\n{tensors}{head}program:\n{program}"


def _tensor_line(program: str) -> str:
    used = [
        f"{name}: {{shape: [{size}]}}"
        for name, size in _EXAMPLE_SIZES.items()
        if re.search(rf"\b{name}\b", program)
    ]
    return f"tensors: {{{', '.join(used)}}}\n" if used else ""
