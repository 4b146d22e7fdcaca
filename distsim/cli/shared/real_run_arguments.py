"""The arguments that describe a run on torch.distributed, shared by `run` and `replay`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared.backend_names import RealBackendName

if TYPE_CHECKING:
    from distsim.real.run import RealRunOptions


class RealDeviceName(StrEnum):
    """Where the tensors of a run lie."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LauncherName(StrEnum):
    """What starts the processes of this machine."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"
    elastic = "elastic"


TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Nothing moves for so long: a standstill.")
]
LauncherOption = Annotated[
    LauncherName | None,
    typer.Option(
        "--launcher",
        help="Who starts the processes; elastic: torch's own. Else fork; "
        "spawn where a forked rank can't use its GPU.",
    ),
]
DeviceOption = Annotated[
    RealDeviceName,
    typer.Option("--device", help="Where tensors lie; auto: on GPUs for nccl, else on the CPU."),
]
InitOption = Annotated[
    str,
    typer.Option(
        "--init", metavar="HOW", help="How ranks meet: env, tcp, file, or a URL as file:///tmp/x."
    ),
]
RepeatOption = Annotated[
    int, typer.Option("--repeat", min=1, max=1000, help="Runs that count, after one to warm up.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Run it although the simulation says that it fails.")
]
NnodesOption = Annotated[
    int, typer.Option("--nnodes", min=1, help="Launchers that share the ranks: one per machine.")
]
NodeRankOption = Annotated[int, typer.Option("--node-rank", min=0, help="Which of them this is.")]
MasterAddrOption = Annotated[
    str | None, typer.Option("--master-addr", metavar="HOST", help="Machine 0.")
]
MasterPortOption = Annotated[
    int | None, typer.Option("--master-port", min=1, max=65535, help="Its port for the store.")
]


@dataclass(frozen=True)
class RealRunArguments:
    """How a run on torch.distributed is made; of `run` and `replay`."""

    timeout: TimeoutOption = "10 s"
    launcher: LauncherOption = None
    init: InitOption = "env"
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
            raise UsageError(f"--timeout: {error}", "as --timeout '10 s'") from None

    def options(self, backend: RealBackendName | None) -> RealRunOptions:
        """The same as options of `distsim.real`. Raises UsageError for an unreadable timeout."""
        from distsim.real.run import RealRunOptions

        return RealRunOptions(
            backend=backend.value if backend else None,
            launcher=self.launcher.value if self.launcher else None,
            init=self.init,
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
