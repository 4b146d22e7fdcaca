"""From what a hung job left to its cause: dumps, logs and stacks of some ranks, one model of
evidence, one analysis.

::

    sources → readers (flight, logs, ras, stacks, others) → Evidence → standing → examine → Diagnosis
"""

from __future__ import annotations

from distsim.hang_doctor.analysis.diagnosis import Diagnosis, diagnose_hang
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.readers.input_files import read_evidence

__all__ = ["Diagnosis", "Evidence", "diagnose_hang", "read_evidence"]
