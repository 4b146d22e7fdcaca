"""`launch:` of a scenario: how its ranks are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from distsim.common.field_parsing import expected_error
from distsim.operations.core.field_types import PerRank, per_rank
from distsim.scenario.format.models.base_model import FormatModel, parse_mapping
from distsim.scenario.format.models.scalars import (
    Count,
    Names,
    Ranks,
    Text,
    choice,
    integer,
    list_parser,
    parsed_by,
)

LAUNCHERS = ("torchrun", "elastic", "mp.spawn", "mp.Process", "srun", "mpirun")
_parse_port = integer(1, 65535, "a port, an integer")
PortList = Annotated[
    tuple[int, ...],
    *parsed_by(
        list_parser(_parse_port, "a list of ports"), {"type": "array", "items": {"type": "integer"}}
    ),
]


def _parse_variable(value: object) -> str:
    """A variable's value; "" stands for one that is not set."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise expected_error("a string, a number, or null for an unset variable", value)
    return str(value)


def _parse_environment(value: object) -> Mapping[str, object]:
    return parse_mapping(
        value,
        "a mapping of variables to values, such as `{MASTER_ADDR: node0, RANK: null}`",
        per_rank(_parse_variable),
    )


def _plain_environment(env: dict[str, object]) -> dict[str, object]:
    def one(value: object) -> object:
        return value.written(one) if isinstance(value, PerRank) else value or None

    return {name: one(value) for name, value in env.items()}


class LaunchOptions(FormatModel):
    """How the ranks are started: the environment that their launcher gives them."""

    master_addr: Text = Field(
        default="127.0.0.1",
        description="MASTER_ADDR: address of rank 0's store.",
        examples=["node0"],
    )
    master_port: Annotated[
        int, *parsed_by(integer(1, 65535), {"type": "integer", "minimum": 1, "maximum": 65535})
    ] = Field(default=29500, description="MASTER_PORT: port of rank 0's store.", examples=[29500])
    visible_devices: Ranks | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of each node.", examples=[[0, 1, 2, 3]]
    )
    omp_threads: Count = Field(default=1, description="OMP_NUM_THREADS of each rank.", examples=[4])
    start: Annotated[
        str,
        *parsed_by(
            choice("spawn", "fork", "forkserver"), {"enum": ["spawn", "fork", "forkserver"]}
        ),
    ] = Field(default="spawn", description="Start method of multiprocessing.", examples=["spawn"])
    by: Annotated[str | None, *parsed_by(choice(*LAUNCHERS), {"enum": list(LAUNCHERS)})] = Field(
        default=None,
        description=(
            "Launcher of the ranks. It decides which environment variables they get, and whether "
            "its agent or rank 0 serves the store."
        ),
        examples=["mp.spawn"],
    )
    env: Annotated[
        dict[str, Any], *parsed_by(_parse_environment, {"type": "object"}, _plain_environment)
    ] = Field(
        default_factory=dict,
        description=(
            "Environment variables that override the launcher's, by rank if they differ; `null` "
            "unsets a variable. A number may be an expression."
        ),
        examples=[{"MASTER_ADDR": "node0", "RANK": "rank"}],
    )
    hosts: Names = Field(
        default=(),
        description="Names or addresses of the nodes, in order. No other host name resolves.",
        examples=[["node0", "node1"]],
    )
    ports_taken: PortList = Field(
        default=(), description="Ports that another process already uses.", examples=[[29500]]
    )
    files_left: Names = Field(
        default=(),
        description="Rendezvous files that an earlier run did not delete.",
        examples=[["/shared/meet"]],
    )
