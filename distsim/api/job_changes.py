"""What-ifs on recorded jobs as texts: ``like-peers=2``, ``compute@6-7=0.8``, ``cluster=NAME``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from distsim.analysis.slow_jobs.job_changes import JobChanges
from distsim.common.errors import UsageError
from distsim.output.trace_data.selection import parse_number_ranges

_LARGEST_FACTOR = 1e9
_EXAMPLES = "for example like-peers=2, compute@6-7=0.8 or cluster=dgx-h100"


def parse_changes(texts: Sequence[str]) -> JobChanges:
    """The changes that these texts name together. Raises UsageError."""
    like_peers: set[int] = set()
    factors: dict[int, float] = {}
    cluster = ""
    for text in texts:
        name, has_value, value = text.partition("=")
        compute = re.fullmatch(r"compute@(.+)", name)
        if name == "like-peers" and has_value:
            like_peers.update(parse_number_ranges(value, "what-if"))
        elif name == "cluster" and value:
            cluster = value
        elif compute is not None:
            factor = _factor(value, text)
            factors |= dict.fromkeys(parse_number_ranges(compute[1], "what-if"), factor)
        else:
            raise UsageError(f"what-if: unknown change {text!r}", _EXAMPLES)
    return JobChanges(tuple(sorted(like_peers)), factors, cluster)


def _factor(value: str, text: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < _LARGEST_FACTOR:
        raise UsageError(f"what-if: {text!r} has no factor", _EXAMPLES)
    return factor
