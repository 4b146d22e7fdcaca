"""The arguments that describe a run on torch.distributed, shared by `run` and `replay`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared.arguments import choice_option
from distsim.cli.shared.backend_names import RealBackendName

if TYPE_CHECKING:
    from distsim.real.run import RealRunOptions


class RealDeviceName(StrEnum):
    """The device of the tensors of a run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LauncherName(StrEnum):
    """The method that starts the processes of this node."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"
    elastic = "elastic"


TimeoutOption = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="TIME", help="Report a hang if no rank makes progress for this long."
    ),
]
LauncherOption = Annotated[
    LauncherName | None,
    choice_option(
        LauncherName,
        "--launcher",
        help=(
            "How the processes are started; elastic uses torch's own launcher. [default: fork, "
            "or spawn if fork would break CUDA]"
        ),
    ),
]
DeviceOption = Annotated[
    RealDeviceName,
    choice_option(
        RealDeviceName,
        "--device",
        help="Device of the tensors; auto uses GPUs with nccl, otherwise the CPU.",
    ),
]
InitMethodOption = Annotated[
    str,
    typer.Option(
        "--init-method",
        metavar="HOW",
        help="Rendezvous of the ranks: env, tcp, file, or a URL such as file:///tmp/x.",
    ),
]
RepeatOption = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        min=1,
        max=1000,
        help="Number of measured runs. If N > 1, a warm-up run comes first.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Run even if the simulation predicts a failure.")
]
NnodesOption = Annotated[
    int,
    typer.Option("--nnodes", metavar="N", min=1, help="Number of nodes; each runs one launcher."),
]
NodeRankOption = Annotated[
    int, typer.Option("--node-rank", metavar="N", min=0, help="Index of this node.")
]
MasterAddrOption = Annotated[
    str | None, typer.Option("--master-addr", metavar="HOST", help="Address of node 0.")
]
MasterPortOption = Annotated[
    int | None,
    typer.Option(
        "--master-port", metavar="PORT", min=1, max=65535, help="Port of the store on node 0."
    ),
]


@dataclass(frozen=True)
class RealRunArguments:
    """How `run` and `replay` start a run on torch.distributed."""

    timeout: TimeoutOption = "10 s"
    launcher: LauncherOption = None
    init_method: InitMethodOption = "env"
    repeat: RepeatOption = 1
    force: ForceOption = False
    nnodes: NnodesOption = 1
    node_rank: NodeRankOption = 0
    master_addr: MasterAddrOption = None
    master_port: MasterPortOption = None
    device: DeviceOption = RealDeviceName.auto

    @property
    def timeout_ns(self) -> int:
        """The timeout in nanoseconds. Raises UsageError if it cannot be parsed."""
        from distsim.common.errors import UsageError
        from distsim.common.units import parse_timeout_ns

        try:
            return parse_timeout_ns(self.timeout)
        except ValueError as error:
            raise UsageError(f"--timeout: {error}", "for example --timeout '10 s'") from None

    def options(self, backend: RealBackendName | None) -> RealRunOptions:
        """The same as options of `distsim.real`. Raises UsageError for an unreadable timeout."""
        from distsim.real.run import RealRunOptions

        return RealRunOptions(
            backend=backend.value if backend else None,
            launcher=self.launcher.value if self.launcher else None,
            init=self.init_method,
            timeout_ns=self.timeout_ns,
            repeat=self.repeat,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            force=self.force,
            device=self.device.value,
        )

    def changed_options(self) -> list[str]:
        """The names of the options whose values differ from their defaults."""
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return [f"--{name.replace('_', '-')}" for name in changed]
