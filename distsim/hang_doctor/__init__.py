"""Find the cause of a hang in the files that a real job left: dumps, logs and stacks of its ranks.

Data flows in one direction::

    readers: files → Evidence → model.reconcile → analysis: wait state → causes → Diagnosis

``minimal_scenario`` turns a diagnosis into a scenario that hangs in the same way. Only files and
live processes of real jobs are the subject; simulated hangs are diagnosed in ``checker``.
"""

from __future__ import annotations

from distsim.hang_doctor.analysis.diagnosis import Diagnosis, diagnose_hang
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.readers.input_files import read_evidence

__all__ = ["Diagnosis", "Evidence", "diagnose_hang", "read_evidence"]
