"""The closed table of finding codes, and the page of each.

A code never changes its meaning. The groups of codes:

* DS1xx: invalid calls (DS12x: start-up)
* DS2xx: mismatches
* DS3xx: deadlocks
* DS4xx: races
* DS5xx: leaks
* DS6xx: portability, and programs that complete by luck
* DS7xx: calls that a backend does not support
* DS8xx: faults and timeouts
* DS9xx: the scenario file and the check itself
"""

from __future__ import annotations

from difflib import get_close_matches
from textwrap import fill, indent

from distsim.findings.code_info import CodeInfo, VerdictClass
from distsim.findings.deadlocks_races_leaks import DEADLOCK_RACE_LEAK_CODES
from distsim.findings.invalid_calls import INVALID_CALL_CODES
from distsim.findings.mismatched_calls import MISMATCH_CODES
from distsim.findings.portability_and_faults import PORTABILITY_AND_FAULT_CODES
from distsim.findings.startup_failures import STARTUP_FAILURE_CODES

_ALL_CODES = (
    *INVALID_CALL_CODES,
    *STARTUP_FAILURE_CODES,
    *MISMATCH_CODES,
    *DEADLOCK_RACE_LEAK_CODES,
    *PORTABILITY_AND_FAULT_CODES,
)
#: Every code, in ascending order.
CODES: dict[str, CodeInfo] = {
    info.code: info for info in sorted(_ALL_CODES, key=lambda info: info.code)
}

_WIDTH = 80


def nearest_code(code: str) -> str | None:
    """The code that was probably meant, or None."""
    close = get_close_matches(code.upper(), CODES, n=1, cutoff=0.6)
    return close[0] if close else None


def explain_code(code: str, width: int = _WIDTH) -> str:
    """The page of one code for `distsim explain`, wrapped to ``width``; its example is not wrapped.

    Raises KeyError with a sentence that names the nearest code if there is no such code.
    """
    info = CODES.get(code.upper())
    if info is None:
        near = nearest_code(code)
        hint = f"did you mean {near}?" if near else f"codes run from {min(CODES)} to {max(CODES)}"
        raise KeyError(f"no finding has the code {code}; {hint}")
    verdict = f"verdict {info.verdict}" if info.verdict else "leaves the verdict to other findings"
    title = fill(
        f"{info.code}  {info.title}",
        width,
        subsequent_indent="       ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    parts = [title, fill(f"{info.severity}, {verdict}", width)]
    chapters = {"What it is": info.what, "What happens": info.why, "What to do": info.remedy}
    parts += [f"{head}\n{_wrapped_text(body, width)}" for head, body in chapters.items()]
    parts.append(
        f"Example ({'script' if info.of_scripts else 'scenario'})\n"
        + indent(info.example.rstrip(), "  ")
    )
    return "\n\n".join(parts)


def _wrapped_text(body: str, width: int) -> str:
    return fill(
        body,
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=width >= _WIDTH,
    )


__all__ = ["CODES", "CodeInfo", "VerdictClass", "explain_code", "nearest_code"]
