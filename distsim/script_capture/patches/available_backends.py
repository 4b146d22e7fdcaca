"""Let torch report that it has every backend.

Calls are evaluated by the rules of a backend, without its library, so a torch without NCCL or MPI
can run any script. Some packages ask once, when they are imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from distsim.script_capture.cuda.fake_driver import NCCL_VERSION


class ProcessGroupNCCL:
    """Stands in for the class that a torch without NCCL lacks; no group of the hub is one."""


def report_all_backends_available() -> None:
    """Patch torch.distributed of this process. Imports torch; may be called repeatedly."""
    dist: Any = importlib.import_module("torch.distributed")
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("is_nccl_available", "is_gloo_available", "is_mpi_available"):
        for module in (dist, c10d):
            setattr(module, name, lambda: True)
    # Where it has NCCL, torch asks whether a group is of this class (`_set_pg_timeout`, which
    # torchtitan calls).
    if not hasattr(c10d, "ProcessGroupNCCL"):
        dist.ProcessGroupNCCL = ProcessGroupNCCL
        c10d.ProcessGroupNCCL = ProcessGroupNCCL
    # torch's logger asks for the version when a call of NCCL raises; if that fails too, it hides
    # what the call raised.
    core: Any = importlib.import_module("torch._C")
    if not hasattr(core, "_nccl_version"):
        core._nccl_version = lambda: NCCL_VERSION
        core._nccl_version_suffix = lambda: b""
