"""Findings speak of scenarios; of a script they speak in torch's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from distsim.findings.record import Finding

#: What a finding says of a file, and what it says of a script. In order: the first that is found in a place counts.
_WORDS = (
    ("give each request a handle of its own, `as: h@i` in a loop, and wait for each", "keep each Work, and call wait() on it"),
    ("keep it with `as: h` and wait for h before", "keep the Work and call wait() on it before"),
    ("write `as: h` and `wait: h`", "keep the Work and call wait() on it"),
    ("index the handle, `as: h@i`, and wait for each", "keep each Work and call wait() on it"),
    ("keep the request (`as: h`)", "keep the Work"),
    ("no wait names its handle", "nobody calls wait() on its Work"),
    ("its handle is bound again before", "its Work is gone before"),
    ("it has no handle", "its Work is not kept"),
    ("keeps no handle", "keeps no Work"),
    (" by a fault of the file", ""),
    ("stands under a selector that leaves out", "stands on a branch that leaves out"),
)


def spoken(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings in words of torch, and without what is not known of calls that were never reached."""
    return tuple(replace(f, message=_spoken(f.message), help=tuple(_spoken(text) for text in f.help)) for f in findings)


def _spoken(text: str) -> str:
    for written, said in _WORDS:
        text = text.replace(written, said)
    return re.sub(r"\blater,$", "later", text, flags=re.MULTILINE)
