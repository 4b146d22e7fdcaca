"""Findings speak of scenarios; of a script they speak in torch's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distsim.findings.finding_types import Finding

if TYPE_CHECKING:
    from distsim.script_capture.result.evaluation import CapturedRankStatus

#: What a finding says of a file, and what it says of a script. In order: the first that is found in
#: a place counts.
_REPLACEMENTS = (
    (
        "give each request a handle of its own, `as: h@i` in a loop, and wait for each",
        "keep each Work, and call wait() on it",
    ),
    ("keep it with `as: h` and wait for h before", "keep the Work and call wait() on it before"),
    ("write `as: h` and `wait: h`", "keep the Work and call wait() on it"),
    ("index the handle, `as: h@i`, and wait for each", "keep each Work and call wait() on it"),
    ("keep the request (`as: h`)", "keep the Work"),
    ("no wait names its handle", "nobody calls wait() on its Work"),
    ("its handle is bound again before", "its Work is gone before"),
    ("it has no handle", "its Work is not kept"),
    ("keeps no handle", "keeps no Work"),
    (" (`copies:`)", ""),
    (" by a fault of the file", ""),
    ("stands under a selector that leaves out", "stands on a branch that leaves out"),
)


def in_torch_terms(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings in words of torch, and without what is not known of calls that were never
    reached.
    """
    return tuple(
        replace(
            f,
            message=_text_in_torch_terms(f.message),
            help=tuple(_text_in_torch_terms(text) for text in f.help),
        )
        for f in findings
    )


def _text_in_torch_terms(text: str) -> str:
    for written, said in _REPLACEMENTS:
        text = text.replace(written, said)
    text = re.sub(
        r"^compute of (.*) writes (.*) while", r"the script, on \1, changes \2 in place while", text
    )
    text = re.sub(r"\bcompute\(\) (?= )", "the script", text)
    return re.sub(r"\blater,$", "later", text, flags=re.MULTILINE)


#: Findings about members of a group that part, and the operations by which DDP and FSDP reduce
#: gradients.
_DIVERGENCE_CODES = ("DS201", "DS202", "DS203", "DS302")
_GRADIENT_REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
#: The frame of torch that runs a backward pass.
_BACKWARD_FRAME = "_engine_run_backward"


def with_backward_explanation(
    findings: Sequence[Finding], stands: Sequence[CapturedRankStatus]
) -> tuple[Finding, ...]:
    """With what makes ranks part in a backward pass, where some stand in its reduction of gradients
    and others don't.
    """
    reducing = {
        s.rank
        for s in stands
        if s.state == "waits" and s.what in _GRADIENT_REDUCTIONS and _BACKWARD_FRAME in s.place[3]
    }
    found = list(findings)
    for k, finding in enumerate(found):
        inside = sorted(reducing & set(finding.ranks))
        if (
            finding.code in _DIVERGENCE_CODES
            and inside
            and any(s.rank not in reducing for s in stands)
        ):
            who = (
                f"ranks {', '.join(map(str, inside))} reduce"
                if len(inside) > 1
                else f"rank {inside[0]} reduces"
            )
            why = f"{who} gradients in backward() and the others do not: parameters that they did not use"
            rest = (
                "(DDP: find_unused_parameters=True), no_sync() on some ranks only, or a batch less"
            )
            found[k] = replace(finding, help=(f"{why} {rest}", *finding.help))
            break
    return tuple(found)
