"""From what a hung job left to its cause: dumps, logs and stacks of some ranks, one model of evidence, one analysis.

::

    sources → readers (flight, logs, ras, stacks, others) → Evidence → standing → examine → Diagnosis
"""

from __future__ import annotations

from distsim.doctor.evidence import Evidence
from distsim.doctor.examine import Diagnosis, examine
from distsim.doctor.sources import read_evidence

__all__ = ["Diagnosis", "Evidence", "examine", "read_evidence"]
