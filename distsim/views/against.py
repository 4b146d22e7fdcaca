"""Where the verdict and the outcome of the back end do not agree, in one sentence: which of the two is meant, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.check.verdict import Verdict
from distsim.findings.record import Finding
from distsim.views.tables import folded

_MILD = ("ok", "leak")
#: A `fail`, an `exit` or a fault of the file ends ranks: no back end is to blame.
_ENDED = ("DS801", "DS802", "DS803", "DS805")
_WHAT = {"hangs": "it hangs", "raises": "it raises", "crashes": "a process crashes", "wrong-data": "the data are wrong",
         "undefined": "what happens is left open"}  # fmt: skip


def against_lines(verdict: Verdict | None, outcome: str, backend: str, findings: Sequence[Finding]) -> list[str]:
    """`Right by the contract, but on nccl it hangs: batch both or neither, or …`; no line where verdict and outcome agree.

    ``outcome``: what comes of the program under its own back end. The remedy is that of the first finding which explains it.
    """
    if verdict is None or not verdict.complete or any(f.code in _ENDED for f in findings):
        return []
    told = sorted((f for f in findings if f.severity != "note" and f.help and f.code != "DS705"), key=lambda f: f.severity)
    remedy = _remedy(told[0].help) if told else ""
    what = f": {remedy}" if remedy else "."
    if verdict.verdict in _MILD and outcome in _WHAT:
        return folded(f"Right by what torch.distributed promises, but on {backend} {_WHAT[outcome]}{what}")
    if verdict.verdict == "invalid" and outcome == "completes":
        return folded(f"An argument that no call may have; {backend} goes on all the same{what}")
    if verdict.verdict not in _MILD and outcome == "completes":
        return folded(f"Wrong by what torch.distributed promises; that {backend} completes is luck{what}")
    return []


def _remedy(lines: Sequence[str]) -> str:
    """The last line of a help, with those that it carries on."""
    first = len(lines) - 1
    while first and (lines[first - 1].endswith((",", ":")) or lines[first].startswith("or ")):
        first -= 1
    return " ".join(lines[first:])
