"""Which reduction of a tensor the words of a file describe.

Key idea: "sums the counts of correct answers and takes the maximum of the latencies" shows the
reduction of two tensors. A clause counts only if it names one kind of reduction.
"""

from __future__ import annotations

import re
from typing import Final

from distsim.program.model import Program

_WORDS: Final = {
    "sum": re.compile(r"\b(sum|add|total)"),
    "avg": re.compile(r"\b(avg|average|averaging|mean)"),
    "max": re.compile(r"\b(max|largest|highest|slowest|longest)"),
    "min": re.compile(r"\b(min|smallest|lowest|fastest|shortest)"),
}
_CLAUSE_END: Final = re.compile(r"[.;,:#()]|\band\b|\bthen\b|\n\s*\n")
#: Shorter names occur in other words by chance.
_LEAST_LENGTH: Final = 4


def against_reductions(prose: str, program: Program) -> int:
    """How many tensors calls reduce in another way than a text says."""
    said: dict[str, set[str]] = {}
    for clause in _CLAUSE_END.split(prose):
        named = [op for op, words in _WORDS.items() if words.search(clause)]
        for tensor in program.tensors if len(named) == 1 else ():
            # The name without its last letter also finds the plural, such as `latencies`.
            stem = tensor.lower()[:-1]
            if len(stem) >= _LEAST_LENGTH and re.search(rf"\b{re.escape(stem)}", clause):
                said.setdefault(tensor, set()).add(named[0])
    made = {
        (buffer.name, call.reduce_op)
        for rank in program.present
        for _, call in program.calls_of(rank)
        if call.reduce_op in _WORDS
        for buffer in call.inputs
    }
    return sum(name in said and {op} != said[name] and len(said[name]) == 1 for name, op in made)


__all__ = ["against_reductions"]
