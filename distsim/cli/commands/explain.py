"""`distsim explain`: a finding, an operation, a key of the scenario file or the back ends on a
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A finding's code, an operation, a key of the file, `scenario`, `expressions` or `backends`.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Tell an operation's price here, term by term: a preset or a file.",
    ),
]
Bytes = Annotated[
    str,
    typer.Option(
        "--bytes", metavar="SIZE", help="Of that price: the buffer, as nccl-tests counts."
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks", metavar="N", min=2, max=1 << 17, help="Of that price: how many take part."
    ),
]
PerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        max=1 << 17,
        help="Of it: ranks on a machine; left out, the preset's GPUs, or 8.",
    ),
]
ClusterSets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of that cluster: nics.count=4. Repeatable."
    ),
]


def command(
    name: Name = None,
    cluster: ClusterOption = None,
    nbytes: Bytes = "16 MiB",
    ranks: Ranks = 8,
    per_node: PerNode = None,
    sets: ClusterSets = None,
) -> None:
    """Explain a finding (DS301), an operation (all_gather), a key of the file (world.nodes); with
    --cluster, a price.

    \b
    Example: distsim explain all_gather
    Example: distsim explain tensors.x.shape
    Example: distsim explain all_reduce.async
    Example: distsim explain backends
    Example: distsim explain all_reduce --cluster dgx-h100 --ranks 64
    """
    from distsim.output.text.explain.operation_pages import index_page

    if cluster is not None:
        console.out(cost_page(name, cluster, nbytes, ranks, per_node, sets or ()))
        return
    if sets:
        from distsim.common.errors import UsageError

        raise UsageError(
            "--set changes a cluster, and none is asked for", "add `--cluster dgx-h100`"
        )
    console.out(index_page() if name is None else explain_page(name))


def cost_page(
    name: str | None,
    cluster: str,
    nbytes: str,
    ranks: int,
    per_node: int | None,
    sets: Sequence[str] = (),
) -> str:
    """The price of an operation, term by term. Raises UsageError for another word, and for what is
    not priced by NCCL's forms.
    """
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean
    from distsim.common.units import parse_size_bytes
    from distsim.hardware.cluster.presets import gpus_per_machine
    from distsim.hardware.cost import CostModel
    from distsim.hardware.cost.explain import explain_cost
    from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
    from distsim.output.text.explain.cost_terms import cost_explanation_text

    row = OPERATIONS.get(OPERATION_ALIASES.get(name or "", name or ""))
    if row is None or row.signals or row.kind not in ("collective", "p2p"):
        raise UsageError(
            f"no operation is called {name}{did_you_mean(name, OPERATIONS)}",
            "as `distsim explain all_reduce --cluster dgx-h100`",
        )
    try:
        size = parse_size_bytes(nbytes)
    except ValueError as fault:
        raise UsageError(f"--bytes: {fault}", "as --bytes 16MiB") from None
    described = changed_cluster(cluster, sets)
    cost = CostModel(described, ranks, min(per_node or gpus_per_machine(described.name), ranks))
    found = explain_cost(
        cost, row, (0, ranks - 1) if row.kind == "p2p" else tuple(range(ranks)), size, ways=True
    )
    if found is None:
        remedy = (
            "GPU presets have `collectives: nccl`; others are priced by their schedule, see `distsim explain "
            + row.op
            + "`"
        )
        raise UsageError(f"{row.op} has no forms to choose among on {cost.name}", remedy)
    return cost_explanation_text(row.op, cost.name, found)


def changed_cluster(name: str, sets: Sequence[str]) -> Cluster:
    """A preset or a file's cluster, with keys of it changed, as `--set cluster.KEY=VALUE` changes
    those of a scenario's.
    """
    import json

    from distsim.cli.commands.replay import read_cluster
    from distsim.hardware.cluster import PRESETS, cluster_from
    from distsim.scenario import loads

    found = cluster_from(read_cluster(name) or name)
    if not sets:
        return found
    written = json.dumps(name if name in PRESETS else found.to_mapping())
    under = [text if text.startswith("cluster.") else f"cluster.{text}" for text in sets]
    scenario = loads(
        f"{{name: price, world: 2, cluster: {written}, program: [barrier]}}", sets=under
    )
    return found if scenario.cluster is None else cluster_from(scenario.cluster)


def explain_page(name: str) -> str:
    """The page of a finding, an operation, a key, or the back ends. Raises UsageError, with the
    nearest name, for any other word.
    """
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean
    from distsim.findings.codes import CODES, explain_code
    from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
    from distsim.output.text.explain.format_pages import expressions_page, key_page, scenario_page
    from distsim.output.text.explain.operation_pages import (
        backends_page,
        operation_page,
        strategy_page,
    )
    from distsim.output.text_layout import page_width
    from distsim.scenario.format.schema.key_reference import find_key, format_keys
    from distsim.scenario.strategies import STRATEGIES

    if name == "backends":
        return backends_page()
    if name.lower() in ("scenario", "file"):
        return scenario_page()
    if name == "expressions":
        return expressions_page()
    if name.upper() in CODES:
        return explain_code(name, page_width())
    if name in STRATEGIES:
        return strategy_page(STRATEGIES[name])
    row = OPERATIONS.get(OPERATION_ALIASES.get(name, name))
    if row is None:
        if (key := find_key(name)) is not None:
            return key_page(key)
        known = [
            *OPERATIONS,
            *OPERATION_ALIASES,
            *STRATEGIES,
            *CODES,
            "backends",
            "scenario",
            "expressions",
            *format_keys(),
        ]
        raise UsageError(
            f"nothing is called {name}{did_you_mean(name, known)}",
            "`distsim explain` lists all names",
        )
    return operation_page(row)
