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

    from distsim.check.verdict import verdict_of
    from distsim.errors import DistsimError, ScenarioErrors, UsageError, UserError
    from distsim.expectations import differences
    from distsim.findings.record import Finding, Place
    from distsim.program.lower import lower
    from distsim.scenario import Scenario, load, loads
    from distsim.simulation import Simulation, simulate
    from distsim.trace import Trace

__version__ = "0.1.0"

#: Public name -> the module it lives in.
_HOME = {
    "load": "distsim.scenario",
    "loads": "distsim.scenario",
    "Scenario": "distsim.scenario",
    "lower": "distsim.program.lower",
    "verdict_of": "distsim.check.verdict",
    "simulate": "distsim.simulation",
    "Simulation": "distsim.simulation",
    "differences": "distsim.expectations",
    "Trace": "distsim.trace",
    "Finding": "distsim.findings.record",
    "Place": "distsim.findings.record",
    "DistsimError": "distsim.errors",
    "UserError": "distsim.errors",
    "ScenarioErrors": "distsim.errors",
    "UsageError": "distsim.errors",
}

__all__ = [
    "DistsimError", "Finding", "Place", "Scenario", "ScenarioErrors", "Simulation", "Trace", "UsageError", "UserError",
    "__version__", "differences", "load", "loads", "lower", "simulate", "verdict_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distsim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
