"""The launch plan as text in 80 columns, and as JSON."""

from __future__ import annotations

import shlex

from distsim.output.text_layout import page_width, table_lines, wrapped_lines
from distsim.real.launch.external_launchers import LaunchPlan, wrapped_command

#: More ranks than this are shown by the first and the last ones.
MAX_RANKS = 16


def launch_plan_text(plan: LaunchPlan) -> str:
    """The output of `distsim run FILE`."""
    machines = "1 machine"
    if plan.nodes != 1:
        machines = f"{plan.nodes} machines of {plan.ranks_per_node}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    sections = [
        [f"{plan.name}: {ranks} on {machines}, back end {plan.backend}"],
        [
            "Every rank",
            f"  WORLD_SIZE={plan.world_size} MASTER_ADDR={plan.master_addr} "
            f"MASTER_PORT={plan.master_port}",
        ],
        ["Each rank", *_rank_table(plan)],
        *_command_sections(plan),
    ]
    if plan.script:
        title = "By sbatch: save this as a file, and give it to sbatch"
        sections.append([title, *_sbatch_lines(plan)])
    sections += [
        ["Set by the launcher itself", *_launcher_variable_lines(plan)],
        [line for note in plan.notes for line in wrapped_lines(note)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _rank_table(plan: LaunchPlan) -> list[str]:
    rows = [(str(r.rank), str(r.local_rank), str(r.node), r.device) for r in plan.ranks]
    lines = table_lines(("RANK", "LOCAL_RANK", "NODE_RANK", "device"), rows, left=(3,))
    if len(rows) <= MAX_RANKS:
        return lines
    return [*lines[: MAX_RANKS - 3], f"  … {len(rows) - MAX_RANKS + 1} more …", *lines[-3:]]


_LAUNCHER_TITLES = {
    "distsim": "By distsim itself",
    "torchrun": "By torchrun",
    "elastic": "By torchrun's elastic rendezvous, the same line on every machine",
    "srun": "By srun, once for all machines",
    "mpirun": "By mpirun, once for all machines",
}
#: Machines whose command lines are printed; they differ only in --node_rank.
_MAX_NODES = 4


def _command_sections(plan: LaunchPlan) -> list[list[str]]:
    sections = []
    for launcher, title in _LAUNCHER_TITLES.items():
        commands = [line for line in plan.lines if line.launcher == launcher]
        if not commands:
            continue
        section = [f"{title}, one line per machine" if len(commands) > 1 else title]
        for command in commands[:_MAX_NODES]:
            section += wrapped_command(command.words, page_width(), "  ")
        if len(commands) > _MAX_NODES:
            section.append(f"  … and so on to machine {len(commands) - 1}")
        sections.append(section)
    return sections


def _sbatch_lines(plan: LaunchPlan) -> list[str]:
    """The script without indent, as sbatch reads it; its last line, the command, is wrapped."""
    *head, command = plan.script
    return [*head, *wrapped_command(tuple(shlex.split(command)), page_width(), "")]


def _launcher_variable_lines(plan: LaunchPlan) -> list[str]:
    return [
        line
        for launcher, names in plan.sets
        for line in wrapped_lines(f"{launcher}: {names}", "  ", "    ")
    ]


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
