"""distsim: simulates and verifies torch.distributed programs.

    >>> import distsim
    >>> scenario = distsim.loads("world: 2\\ntensors: {x: {shape: [1], value: rank}}\\nprogram:\\n  - all_reduce: {tensor: x}\\n")
    >>> distsim.simulate(scenario).outcome
    'completes'

The names below are loaded when they are first used, so that `import distsim` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, whose import would take longer than all of this file
if TYPE_CHECKING:
    from typing import Any

    from distsim.checker.verdict import verdict_of
    from distsim.common.errors import DistsimError, ScenarioErrors, UsageError, UserError
    from distsim.findings.finding_types import Finding, SourceLocation
    from distsim.program.lower import lower
    from distsim.scenario import Scenario, load, loads
    from distsim.simulation.expectations import unmet_expectations
    from distsim.simulation.simulate_scenario import Simulation, simulate
    from distsim.trace.model import Trace

__version__ = "0.1.0"

#: Public name -> the module it lives in.
_HOME = {
    "load": "distsim.scenario",
    "loads": "distsim.scenario",
    "Scenario": "distsim.scenario",
    "lower": "distsim.program.lower",
    "verdict_of": "distsim.checker.verdict",
    "simulate": "distsim.simulation.simulate_scenario",
    "Simulation": "distsim.simulation.simulate_scenario",
    "unmet_expectations": "distsim.simulation.expectations",
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
    "SourceLocation",
    "Scenario",
    "ScenarioErrors",
    "Simulation",
    "Trace",
    "UsageError",
    "UserError",
    "__version__",
    "unmet_expectations",
    "load",
    "loads",
    "lower",
    "simulate",
    "verdict_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distsim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
