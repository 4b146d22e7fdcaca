"""The launch plan as text in 80 columns, and as JSON."""

from __future__ import annotations

import shlex

from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    RowLimit,
    Section,
    Table,
    Verbatim,
    paragraphs,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text_layout import page_width
from distsim.real.launch.external_launchers import LaunchPlan, wrapped_command

#: More ranks than this are shown by the first and the last ones.
MAX_RANKS = 16


def launch_plan_text(plan: LaunchPlan) -> str:
    """The whole report as text."""
    return write_text(launch_plan_report(plan))


def launch_plan_report(plan: LaunchPlan) -> Report:
    """The output of `distsim run FILE`."""
    nodes = "1 node"
    if plan.nodes != 1:
        nodes = f"{plan.nodes} nodes ({plan.ranks_per_node} ranks per node)"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    head = f"{plan.name}: {ranks} on {nodes}, backend {plan.backend}"
    shared = (
        f"  WORLD_SIZE={plan.world_size} MASTER_ADDR={plan.master_addr} "
        f"MASTER_PORT={plan.master_port}"
    )
    script_title = "With sbatch: save this as a file and submit it"
    variables = [f"{launcher}: {names}" for launcher, names in plan.sets]
    return Report(
        [
            Section([Paragraph(head)]),
            Section([Verbatim([shared])], "Environment of all ranks"),
            Section([_rank_table(plan)], "Environment of each rank"),
            *_command_sections(plan),
            Section([Verbatim(_sbatch_lines(plan))], script_title),
            Section(paragraphs(variables, "  ", "    "), "Variables that the launchers set"),
            Section(paragraphs(plan.notes)),
        ]
    )


_RANK_COLUMNS = [*map(Column, ("RANK", "LOCAL_RANK", "NODE_RANK")), text_column("device")]


def _rank_table(plan: LaunchPlan) -> Table:
    rows = [(str(r.rank), str(r.local_rank), str(r.node), r.device) for r in plan.ranks]
    limit = RowLimit(MAX_RANKS - 4, 3) if len(rows) > MAX_RANKS else None
    return table_of(_RANK_COLUMNS, rows, limit)


_LAUNCHER_TITLES = {
    "distsim": "With distsim",
    "torchrun": "With torchrun",
    "elastic": "With torchrun's elastic rendezvous, the same command on every node",
    "srun": "With srun, once for all nodes",
    "mpirun": "With mpirun, once for all nodes",
}
#: Nodes whose command lines are printed; they differ only in --node_rank.
_MAX_NODES = 4


def _command_sections(plan: LaunchPlan) -> list[Section]:
    sections = []
    for launcher, title in _LAUNCHER_TITLES.items():
        commands = [line for line in plan.lines if line.launcher == launcher]
        if len(commands) > 1:
            title = f"{title}, one command per node"
        lines = []
        for command in commands[:_MAX_NODES]:
            lines += wrapped_command(command.words, page_width(), "  ")
        if len(commands) > _MAX_NODES:
            lines.append(f"  … and so on to node {len(commands) - 1}")
        sections.append(Section([Verbatim(lines)], title))
    return sections


def _sbatch_lines(plan: LaunchPlan) -> list[str]:
    """The script without indent, as sbatch reads it; its last line, the command, is wrapped."""
    if not plan.script:
        return []
    *head, command = plan.script
    return [*head, *wrapped_command(tuple(shlex.split(command)), page_width(), "")]


def launch_plan_json(plan: LaunchPlan) -> dict[str, object]:
    """The plan for programs."""
    shared = {
        "WORLD_SIZE": plan.world_size,
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": plan.master_port,
    }
    ranks = []
    for r in plan.ranks:
        own = {"RANK": r.rank, "LOCAL_RANK": r.local_rank, "NODE_RANK": r.node}
        ranks.append({"rank": r.rank, "device": r.device, "env": {**shared, **own}})
    commands = [
        {"launcher": line.launcher, "node": line.node, "command": shlex.join(line.words)}
        for line in plan.lines
    ]
    return {
        "schema_version": 1,
        "name": plan.name,
        "backend": plan.backend,
        "world_size": plan.world_size,
        "nodes": plan.nodes,
        "ranks": ranks,
        "commands": commands,
        "launcher_sets": dict(plan.sets),
        "notes": list(plan.notes),
        "by": plan.by or None,
        "script": list(plan.script),
    }
