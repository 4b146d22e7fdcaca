"""The what-if questions of `distsim simulate`, each answered by a table of text.

--compare-with compares with another scenario, --what-if makes resources faster in turn, and --seeds
repeats the simulation with other seeds. Each question runs further simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distsim.api.inputs import is_trace
from distsim.cli.shared.arguments import read_scenario
from distsim.cli.shared.simulate_arguments import SimulateArguments, WhatIfArguments

if TYPE_CHECKING:
    from distsim.output.report_record import Section
    from distsim.simulation.simulate_scenario import Simulation


def check_what_if_arguments(arguments: SimulateArguments, what_if: WhatIfArguments) -> None:
    """Check combinations of arguments before anything runs. Raises UsageError."""
    from distsim.common.errors import UsageError

    if what_if.stragglers is not None and what_if.seeds is None:
        raise UsageError("--stragglers needs several runs", "add --seeds 100")
    if str(arguments.format) == "json":
        raise UsageError(
            "--compare-with, --what-if and --seeds print text only", "omit --format json"
        )
    if is_trace(arguments.file):
        raise UsageError(
            f"{arguments.file} is a trace, but what-if questions need a scenario",
            "use `distsim replay` to run the trace on another cluster",
        )


def what_if_report(
    arguments: SimulateArguments,
    what_if: WhatIfArguments,
    simulation: Simulation,
    show_phase: Callable[[str], None],
) -> str:
    """The tables that were asked for, separated by empty lines."""
    from distsim.output.report_record import Paragraph, Report, Section
    from distsim.output.report_text import write_text

    sections: list[Section] = []
    if what_if.compare_with is not None:
        sections += _scenario_comparison(arguments, what_if.compare_with, simulation)
    if what_if.what_if:
        sections += _speedup_sections(simulation, show_phase)
    if what_if.seeds is not None:
        text = _distribution_text(arguments, what_if.seeds, what_if.stragglers, show_phase)
        sections.append(Section([Paragraph(text)]))
    return write_text(Report(sections))


def _scenario_comparison(
    arguments: SimulateArguments, other: str, simulation: Simulation
) -> list[Section]:
    """The table of differences between this scenario and another one."""
    from distsim.api.functions import simulate
    from distsim.output.text.whatif_tables import difference_sections
    from distsim.simulation.what_if import metric_differences

    other_simulation = simulate(
        read_scenario(other, None), backend=arguments.backend, values=False
    ).raw
    words = [arguments.file, *(arguments.sets or ())]
    if arguments.cluster is not None:
        words.append(f"cluster={arguments.cluster}")
    differences = metric_differences(other_simulation, simulation)
    return difference_sections(differences, (other, " ".join(words)))


def _speedup_sections(simulation: Simulation, show_phase: Callable[[str], None]) -> list[Section]:
    """The critical path by kind, and the gain of each faster resource; none if the run fails."""
    from distsim.output.text.whatif_tables import path_kind_section, speedup_section
    from distsim.simulation.what_if import critical_path_by_kind, resource_speedups

    if not simulation.makespan_ns or simulation.outcome != "completes":
        return []
    speedups = list(resource_speedups(simulation, show_phase))
    return [
        path_kind_section(critical_path_by_kind(simulation)),
        speedup_section(speedups, simulation.makespan_ns),
    ]


def _distribution_text(
    arguments: SimulateArguments,
    count: int,
    stragglers_text: str | None,
    show_phase: Callable[[str], None],
) -> str:
    """The distribution of the makespan over ``count`` seeds, with random stragglers if given.

    Raises UsageError if nothing is random.
    """
    from distsim.api.functions import simulate
    from distsim.common.errors import UsageError
    from distsim.output.text.whatif_tables import spread_text
    from distsim.simulation.what_if import makespan_distribution, parse_stragglers, random_scenarios

    stragglers = None if stragglers_text is None else parse_stragglers(stragglers_text)
    scenario = read_scenario(arguments.file, arguments.sets)
    if stragglers is None and not scenario.jitter:
        raise UsageError(
            "--seeds: nothing in the scenario is random",
            "add --set jitter=0.1, or --stragglers 1%x1.3",
        )
    makespans = []
    for number, draw in enumerate(random_scenarios(scenario, count, stragglers), 1):
        show_phase(f"run {number} of {count}")
        simulation = simulate(
            draw,
            backend=arguments.backend,
            cluster=arguments.cluster,
            verdict=False,
            values=False,
        )
        if simulation.outcome != "completes":
            return (
                f"the run with seed {draw.seed} {simulation.outcome}, so no spread can be computed"
            )
        makespans.append(simulation.makespan_ns)
    causes = []
    if scenario.jitter:
        causes.append(f"jitter up to {100 * scenario.jitter:g} %")
    if stragglers is not None:
        causes.append(
            f"{100 * stragglers.share:g} % of the ranks slowed by a factor of {stragglers.factor:g}"
        )
    return spread_text(makespan_distribution(makespans), f" ({', '.join(causes)})")
