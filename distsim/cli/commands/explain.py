"""`distsim explain`: one page about a finding, an operation, a key of the file, or a cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distsim.api.inputs import read_cluster
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Finding code, operation, strategy, key of the scenario file, term "
        "(`busbw`), `scenario`, `expressions` or `backends`.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Print the operation's cost on this hardware model (preset or file), term by term.",
    ),
]
BytesOption = Annotated[
    str | None,
    typer.Option(
        "--bytes",
        metavar="SIZE",
        help="With --cluster: buffer size, as nccl-tests counts it. [default: 16 MiB]",
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=2,
        max=1 << 17,
        help="With --cluster: number of ranks in the group. [default: 8]",
    ),
]
PerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        max=1 << 17,
        help="With --cluster: ranks per node. [default: the preset's GPUs per node, or 8]",
    ),
]
ClusterSetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --cluster: set a key of the cluster, such as nics.count=4. Repeatable.",
    ),
]

_DEFAULT_SIZE = "16 MiB"
_DEFAULT_RANKS = 8
_KINDS_WITH_COST = ("collective", "p2p")


def command(
    name: NameArgument = None,
    cluster: ClusterOption = None,
    nbytes: BytesOption = None,
    ranks: RanksOption = None,
    per_node: PerNodeOption = None,
    sets: ClusterSetsOption = None,
) -> None:
    """Explain a finding (DS301), an operation (all_gather), a strategy (pipeline), a key of the
    scenario file (world.nodes) or a term (busbw). With --cluster, print the cost of an operation.

    \b
    Example: distsim explain all_gather
    Example: distsim explain tensors.x.shape
    Example: distsim explain all_reduce.async
    Example: distsim explain backends
    Example: distsim explain all_reduce --cluster dgx-h100 --ranks 64
    """
    from distsim.output.text.explain.operation_pages import index_page

    if cluster is not None:
        size = nbytes or _DEFAULT_SIZE
        group = ranks or _DEFAULT_RANKS
        console.out(cost_page(name, cluster, size, group, per_node, sets or ()))
        return
    if nbytes or ranks or per_node or sets:
        from distsim.common.errors import UsageError

        raise UsageError(
            "--bytes, --ranks, --ranks-per-node and --set need a cluster",
            "add `--cluster dgx-h100`",
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
    """The cost of an operation on a cluster, term by term.

    Raises UsageError for a name that is no operation, and for operations whose cost is not chosen
    among the algorithms of NCCL.
    """
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean
    from distsim.common.units import parse_size_bytes
    from distsim.hardware.cluster.presets import gpus_per_machine
    from distsim.hardware.cost import CostModel
    from distsim.hardware.cost.explain import explain_cost
    from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
    from distsim.output.text.explain.cost_terms import cost_explanation_text

    operation = OPERATIONS.get(OPERATION_ALIASES.get(name or "", name or ""))
    if operation is not None and (operation.signals or operation.kind not in _KINDS_WITH_COST):
        operation = None
    if operation is None:
        raise UsageError(
            f"unknown operation {name}{did_you_mean(name, OPERATIONS)}",
            "for example `distsim explain all_reduce --cluster dgx-h100`",
        )
    try:
        size = parse_size_bytes(nbytes)
    except ValueError as fault:
        raise UsageError(f"--bytes: {fault}", "for example --bytes 16MiB") from None
    machine = changed_cluster(cluster, sets)
    cost = CostModel(machine, ranks, min(per_node or gpus_per_machine(machine.name), ranks))
    # A message goes from the first to the last rank: the farthest that there is.
    members = (0, ranks - 1) if operation.kind == "p2p" else tuple(range(ranks))
    explanation = explain_cost(cost, operation, members, size, ways=True)
    if explanation is None:
        raise UsageError(
            f"{operation.op} has only one algorithm on {cost.name}",
            "name a GPU preset (`collectives: nccl`); on others the schedule decides the cost, "
            f"see `distsim explain {operation.op}`",
        )
    return cost_explanation_text(operation.op, cost.name, explanation)


def changed_cluster(name: str, sets: Sequence[str]) -> Cluster:
    """The cluster of a preset or a file, with some keys changed.

    The keys are those of ``--set cluster.KEY=VALUE`` for scenarios. Therefore a scenario around
    the cluster is read: it validates keys and values with the same messages.
    """
    import json

    from distsim.hardware.cluster import PRESETS, cluster_from
    from distsim.scenario import loads

    cluster = cluster_from(read_cluster(name) or name)
    if not sets:
        return cluster
    cluster_yaml = json.dumps(name if name in PRESETS else cluster.to_mapping())
    scenario = loads(
        f"{{name: cost, world: 2, cluster: {cluster_yaml}, program: [barrier]}}",
        sets=[text if text.startswith("cluster.") else f"cluster.{text}" for text in sets],
    )
    return cluster if scenario.cluster is None else cluster_from(scenario.cluster)


def explain_page(name: str) -> str:
    """The page about a name. Raises UsageError, with the nearest name, for an unknown one."""
    from distsim.findings.codes import CODES, explain_code
    from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
    from distsim.output.text.explain.format_pages import expressions_page, key_page, scenario_page
    from distsim.output.text.explain.glossary import find_term, term_page
    from distsim.output.text.explain.operation_pages import (
        backends_page,
        operation_page,
    )
    from distsim.output.text.explain.strategy_page import strategy_page
    from distsim.output.text_layout import page_width
    from distsim.scenario.format.schema.key_reference import find_key
    from distsim.scenario.strategies import STRATEGIES

    if name == "backends":
        return backends_page()
    if name.lower() in ("scenario", "file"):
        return scenario_page()
    if name == "expressions":
        return expressions_page()
    if name.upper() in CODES:
        return explain_code(name, page_width())
    # Operations and strategies come before keys: `all_reduce` is also a key of the file.
    if name in STRATEGIES:
        return strategy_page(STRATEGIES[name])
    operation = OPERATIONS.get(OPERATION_ALIASES.get(name, name))
    if operation is not None:
        return operation_page(operation)
    # Terms come before keys: `verdict` is also short for `expect.verdict`.
    term = find_term(name)
    if term is not None:
        return term_page(term)
    key = find_key(name)
    if key is not None:
        return key_page(key)
    _raise_unknown_name(name)


def _raise_unknown_name(name: str) -> NoReturn:
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean
    from distsim.findings.codes import CODES
    from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
    from distsim.output.text.explain.glossary import GLOSSARY
    from distsim.scenario.format.schema.key_reference import format_keys
    from distsim.scenario.strategies import STRATEGIES

    known = [
        *OPERATIONS,
        *OPERATION_ALIASES,
        *STRATEGIES,
        *CODES,
        *GLOSSARY,
        "backends",
        "scenario",
        "expressions",
        *format_keys(),
    ]
    raise UsageError(
        f"unknown name {name}{did_you_mean(name, known)}",
        "run `distsim explain` for a list of all names",
    )
