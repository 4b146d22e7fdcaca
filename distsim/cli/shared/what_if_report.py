"""What `simulate` answers beside its report: another scenario beside it, faster resources, the path
by kind, many draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distsim.cli.application import is_trace, read_scenario

if TYPE_CHECKING:
    from distsim.cli.commands.simulate import SimulateArguments, WhatIfArguments
    from distsim.simulation.simulate_scenario import Simulation


def check_what_if_arguments(given: SimulateArguments, more: WhatIfArguments) -> None:
    """Raises UsageError for questions that do not go together with the rest, before anything
    runs.
    """
    from distsim.common.errors import UsageError

    if more.stragglers is not None and more.draws is None:
        raise UsageError("--stragglers: one run has no spread", "add --draws 100")
    if str(given.format) == "json":
        raise UsageError("--against, --what-if and --draws print text", "leave out --format json")
    if is_trace(given.file):
        raise UsageError(
            f"{given.file} is a trace: what if is asked of scenarios",
            "`distsim replay` runs it on other clusters",
        )


def what_if_report(
    given: SimulateArguments,
    more: WhatIfArguments,
    simulation: Simulation,
    tell: Callable[[str], None],
) -> str:
    """The texts of what was asked."""
    parts = []
    if more.against is not None:
        parts.append(_scenario_comparison(given, more.against, simulation))
    if more.what_if:
        parts += _speedup_table(simulation, tell)
    if more.draws is not None:
        parts.append(_distribution_lines(given, more.draws, more.stragglers, tell))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _scenario_comparison(given: SimulateArguments, other: str, simulation: Simulation) -> list[str]:
    from distsim.output.text.whatif_tables import difference_lines
    from distsim.simulation.simulate_scenario import simulate
    from distsim.simulation.what_if import metric_differences

    found = simulate(read_scenario(other, None), backend=given.backend, with_values=False)
    mine = [
        given.file,
        *(given.sets or ()),
        *([f"cluster={given.cluster}"] if given.cluster is not None else []),
    ]
    return difference_lines(metric_differences(found, simulation), (" ".join(mine), other))


def _speedup_table(simulation: Simulation, tell: Callable[[str], None]) -> list[list[str]]:
    from distsim.output.text.whatif_tables import path_kind_lines, speed_up_lines
    from distsim.simulation.what_if import critical_path_by_kind, resource_speedups

    if not simulation.makespan_ns or simulation.outcome != "completes":
        return []
    return [
        path_kind_lines(critical_path_by_kind(simulation)),
        speed_up_lines(list(resource_speedups(simulation, tell)), simulation.makespan_ns),
    ]


def _distribution_lines(
    given: SimulateArguments, count: int, stragglers: str | None, tell: Callable[[str], None]
) -> list[str]:
    from distsim.common.errors import UsageError
    from distsim.output.text.whatif_tables import spread_lines
    from distsim.simulation.simulate_scenario import simulate
    from distsim.simulation.what_if import makespan_distribution, parse_stragglers, random_scenarios

    slow = None if stragglers is None else parse_stragglers(stragglers)
    scenario = read_scenario(given.file, given.sets)
    if slow is None and not scenario.jitter:
        raise UsageError(
            "--draws: nothing in the scenario is left to chance",
            "add --set jitter=0.1, or --stragglers 1%x1.3",
        )
    times = []
    for k, one in enumerate(random_scenarios(scenario, count, slow)):
        tell(f"draw {k + 1} of {count}")
        found = simulate(
            one, backend=given.backend, cluster=given.cluster, with_verdict=False, with_values=False
        )
        if found.outcome != "completes":
            return [f"the draw with seed {one.seed} {found.outcome}: there is no spread"]
        times.append(found.makespan_ns)
    told = [f"jitter up to {100 * scenario.jitter:g} %"] if scenario.jitter else []
    told += (
        [f"{100 * slow.share:g} % of the ranks {slow.factor:g} times as long"]
        if slow is not None
        else []
    )
    return spread_lines(makespan_distribution(times), f" ({', '.join(told)})")
