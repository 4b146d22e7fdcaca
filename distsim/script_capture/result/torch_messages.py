"""Phrase findings in torch's terms, and explain hangs in a backward pass.

Findings are worded for scenario files. The user of a captured script has no file with handles and
`as:`, but `Work` and `wait()`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from distsim.findings.finding_types import Finding
from distsim.script_capture.result.rank_status import CapturedRankStatus

#: What a finding says for a file, and for a script. In this order: the first that matches a place
#: counts.
_REPLACEMENTS: Final = (
    (
        "give each request its own handle (`as: h@i` in a loop), and wait for each",
        "keep each Work, and call wait() on it",
    ),
    ("keep the handle (`as: h`), and wait for `h` before", "keep the Work and call wait() before"),
    (
        "keep the handle (`as: h`) and wait for it (`wait: h`)",
        "keep the Work and call wait() on it",
    ),
    ("index the handle (`as: h@i`) and wait for each", "keep each Work and call wait() on it"),
    ("keep the request (`as: h`)", "keep the Work"),
    ("no call waits for its handle", "no call waits for its Work"),
    ("its handle is overwritten before the wait", "its Work is overwritten before the wait"),
    ("overwrote its handle before the wait", "overwrote its Work before the wait"),
    ("did not keep its request", "did not keep its Work"),
    ("loses its handle, which", "loses its Work, which"),
    ("the call has no handle", "the script does not keep its Work"),
    ("has no handle", "returns a Work that the script does not keep"),
    (" (`copies:`)", ""),
    (" (`init: eager`)", ""),
    (" (`ranks:` selects the callers)", ""),
    (" by an injected fault", ""),
    (", but `ranks:` at ", ", but the branch at "),
)

#: torch's error for a CPU tensor on a group that has only NCCL.
_CPU_TENSOR_ERROR: Final = "No backend type associated with device type cpu"
#: Findings on ranks that were killed and on ranks that wait for them; the signal that the kernel
#: sends if memory runs out.
_KILL_CODES: Final = ("DS303", "DS801")
_SIGKILL: Final = "SIGKILL"
#: Findings about members of a group whose calls differ.
_DIVERGENCE_CODES: Final = ("DS201", "DS202", "DS203", "DS302")
#: The operations by which DDP and FSDP reduce gradients.
_GRADIENT_REDUCTIONS: Final = (
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
#: torch's function that runs a backward pass.
_BACKWARD_FUNCTION: Final = "_engine_run_backward"


def in_torch_terms(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings in torch's terms."""
    return tuple(_finding_in_torch_terms(finding) for finding in findings)


def _finding_in_torch_terms(finding: Finding) -> Finding:
    remedies = tuple(_text_in_torch_terms(text) for text in finding.help)
    if _CPU_TENSOR_ERROR in finding.message and finding.help:
        remedies = ("move the tensor to the GPU, or create the group with `cpu:gloo,cuda:nccl`",)
    return replace(finding, message=_text_in_torch_terms(finding.message), help=remedies)


def _text_in_torch_terms(text: str) -> str:
    for for_file, for_script in _REPLACEMENTS:
        text = text.replace(for_file, for_script)
    text = re.sub(
        r"^compute on (.*) writes (.*) while", r"the script, on \1, changes \2 in place while", text
    )
    return re.sub(r"\bcompute\(\) (?= )", "the script", text)


def with_kill_advice(
    findings: Sequence[Finding], statuses: Sequence[CapturedRankStatus]
) -> tuple[Finding, ...]:
    """The findings on ranks that SIGKILL ended, with the usual reason."""
    killed = [s.rank for s in statuses if s.state == "killed" and s.what.endswith(_SIGKILL)]
    explained = []
    for finding in findings:
        ranks = [rank for rank in killed if rank in (*finding.ranks, *finding.awaited)]
        if finding.code in _KILL_CODES and ranks:
            finding = replace(finding, help=(_kill_advice(ranks),))
        explained.append(finding)
    return tuple(explained)


def _kill_advice(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    who = f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"
    return (
        f"find out what killed {who}: {_SIGKILL} often means that the memory of this machine ran "
        "out. Then run fewer ranks or a smaller model, or add --fake"
    )


def with_backward_explanation(
    findings: Sequence[Finding], statuses: Sequence[CapturedRankStatus]
) -> tuple[Finding, ...]:
    """Explain why only some ranks reduce gradients in a backward pass.

    The first finding about ranks whose calls differ gets the explanation.
    """
    reducing = {status.rank for status in statuses if _reduces_gradients(status)}
    if all(status.rank in reducing for status in statuses):
        return tuple(findings)
    explained = list(findings)
    for position, finding in enumerate(findings):
        ranks = sorted(reducing & set(finding.ranks))
        if finding.slips:  # it names the extra or missing call already
            break
        if ranks and finding.code in _DIVERGENCE_CODES:
            remedies = (_backward_explanation(ranks), *finding.help)
            explained[position] = replace(finding, help=remedies)
            break
    return tuple(explained)


def _reduces_gradients(status: CapturedRankStatus) -> bool:
    if status.state != "waits" or status.what not in _GRADIENT_REDUCTIONS:
        return False
    return _BACKWARD_FUNCTION in status.place.via


def _backward_explanation(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    subject = f"ranks {numbers} reduce" if len(ranks) > 1 else f"rank {numbers} reduces"
    return (
        f"{subject} gradients in backward() and the others do not; check for unused parameters"
        " (DDP: find_unused_parameters=True), no_sync() on some ranks only, or one batch fewer"
    )
