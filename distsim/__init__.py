"""distsim: simulates and verifies torch.distributed programs.

    >>> import distsim
    >>> tensors = "tensors: {x: {shape: [1], value: rank}}"
    >>> program = "program:\\n  - all_reduce: {tensor: x}\\n"
    >>> distsim.simulate(f"world: 2\\n{tensors}\\n{program}").outcome
    'completes'

The names in ``__all__`` are public: they keep their meaning within a minor version, and a change is
announced in CHANGELOG.md. Everything else may change at any time. Each name is loaded when it is
first used, so ``import distsim`` costs almost nothing.
"""

from __future__ import annotations

from distsim.common.version import __version__

TYPE_CHECKING = False  # importing typing would take longer than this whole file
if TYPE_CHECKING:
    from typing import Any

    from distsim.api.functions import (
        capture,
        check,
        compare,
        doctor,
        expand,
        fix,
        load,
        plan,
        render,
        replay,
        report,
        run_real,
        shrink,
        simulate,
        slow,
        sweep,
    )
    from distsim.api.limited_reading import limited_reading
    from distsim.common.errors import DistsimError, ScenarioErrors, UsageError, UserError
    from distsim.findings.finding_types import Finding, SourceLocation
    from distsim.scenario import Scenario
    from distsim.trace.model import Trace

#: Public name -> the module that defines it.
_MODULE_OF_NAME = {
    "load": "distsim.api.functions",
    "simulate": "distsim.api.functions",
    "check": "distsim.api.functions",
    "expand": "distsim.api.functions",
    "plan": "distsim.api.functions",
    "sweep": "distsim.api.functions",
    "capture": "distsim.api.functions",
    "doctor": "distsim.api.functions",
    "slow": "distsim.api.functions",
    "run_real": "distsim.api.functions",
    "replay": "distsim.api.functions",
    "compare": "distsim.api.functions",
    "shrink": "distsim.api.functions",
    "fix": "distsim.api.functions",
    "render": "distsim.api.functions",
    "report": "distsim.api.functions",
    "limited_reading": "distsim.api.limited_reading",
    "Scenario": "distsim.scenario",
    "Trace": "distsim.trace.model",
    "Finding": "distsim.findings.finding_types",
    "SourceLocation": "distsim.findings.finding_types",
    "DistsimError": "distsim.common.errors",
    "UserError": "distsim.common.errors",
    "ScenarioErrors": "distsim.common.errors",
    "UsageError": "distsim.common.errors",
}

__all__ = [
    "DistsimError",
    "Finding",
    "Scenario",
    "ScenarioErrors",
    "SourceLocation",
    "Trace",
    "UsageError",
    "UserError",
    "__version__",
    "capture",
    "check",
    "compare",
    "doctor",
    "expand",
    "fix",
    "limited_reading",
    "load",
    "plan",
    "render",
    "replay",
    "report",
    "run_real",
    "shrink",
    "simulate",
    "slow",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'distsim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
