"""A scenario's start-up: what each of its processes brings to init_process_group, and what comes of
it.
"""

from __future__ import annotations

from collections.abc import Mapping

from distsim.backends import BACKEND_PROFILES
from distsim.common.errors import ScenarioErrors
from distsim.common.expressions import ExpressionError, parse_expression
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.code import Program, at_row
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.model import Scenario
from distsim.scenario.startup.init_method import ENV_VARIABLES, is_loopback, rendezvous_info
from distsim.scenario.startup.records import (
    RendezvousInfo,
    StartupCause,
    StartupEnvironment,
    StartupProcess,
    StartupResult,
)
from distsim.scenario.startup.rendezvous import simulate_startup

INIT_OP = "init_process_group"
#: Launchers whose agent serves the store, and those that set the four variables.
_AGENT_LAUNCHERS = ("torchrun", "elastic")
_ENV_SETTING_LAUNCHERS = ("", "torchrun", "elastic")
_INTEGER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def scenario_startup(scenario: Scenario, program: Program, names: SymbolTable) -> StartupResult:
    """What becomes of the first init_process_group."""
    brought = startup_processes(scenario, program, names)
    found = simulate_startup(brought, startup_environment(scenario))
    if not found.failed:
        _check_rank_numbers(brought, names)
    return found


def _check_rank_numbers(brought: list[StartupProcess], names: SymbolTable) -> None:
    """A start-up of other numbers than the file counts by would run the steps of one rank under
    another's name.
    """
    for entrance in brought:
        here = rendezvous_info(entrance)
        if (
            isinstance(here, RendezvousInfo)
            and here.kind != "launcher"
            and here.rank != entrance.rank
            and not entrance.absent
        ):
            names.problem(
                ("program",),
                f"process {entrance.rank} says that it is rank {here.rank}, and all numbers are there once; a file "
                "counts processes by these numbers: write `rank: rank`",
            )


def startup_environment(scenario: Scenario) -> StartupEnvironment:
    """What the file says of its machines. Where it lists no hosts, `launch.master_addr` is the
    first one.
    """
    launch = scenario.launch
    listed = {host: node for node, host in enumerate(launch.hosts)}
    first = {} if launch.hosts or is_loopback(launch.master_addr) else {launch.master_addr: 0}
    return StartupEnvironment(
        scenario.world.size,
        listed | first,
        bool(launch.hosts),
        tuple(launch.ports_taken),
        tuple(launch.files_left),
    )


def startup_processes(
    scenario: Scenario, program: Program, names: SymbolTable
) -> list[StartupProcess]:
    """What every process brings."""
    absent = {f.rank for f in program.faults if f.kind == "absent"}
    explicit = any(call.op == INIT_OP for code in program.codes for call in code.calls)
    environment = _RankEnvironment(scenario, names, explicit)
    found = []
    for rank in range(program.world_size):
        call = _first_init_call(program, rank)
        method = call.init_method if call else None
        if method is None and (call is None or call.store is None):
            method = scenario.options.init_method
        implied = not explicit and method is not None and not method.startswith("env:")
        backend = scenario.backend
        timeout = (
            (call.timeout_ns if call else None)
            or scenario.options.timeout_ns
            or BACKEND_PROFILES[backend].timeout_ns
        )
        found.append(
            StartupProcess(
                rank,
                program.node(rank),
                backend,
                int(timeout),
                method,
                call.store if call else None,
                _argument_or_implied(
                    rank if implied else None, call.rank_argument if call else None
                ),
                _argument_or_implied(
                    program.world_size if implied else None,
                    call.world_size_argument if call else None,
                ),
                call.device_id if call else None,
                environment.of(rank),
                scenario.launch.by in _AGENT_LAUNCHERS and method in (None, "env://"),
                scenario.launch.by or "",
                rank in absent,
            )
        )
    return found


def _argument_or_implied(implied: int | None, said: int | None) -> int:
    return said if said is not None else -1 if implied is None else implied


def _first_init_call(program: Program, rank: int) -> ResolvedCall | None:
    """The rank's first init_process_group as it is written; None where it is implied."""
    code = program.code(rank)
    for position in code.positions(program.row_of[rank]):
        if code.calls[position].op == INIT_OP:
            return program.resolve(rank, code.calls[position])
    return None


class _RankEnvironment:
    """The variables that start-up reads, for every rank."""

    def __init__(self, scenario: Scenario, names: SymbolTable, explicit: bool) -> None:
        self.scenario, self.names, self.explicit = scenario, names, explicit
        self.launch: LaunchOptions = scenario.launch

    def of(self, rank: int) -> dict[str, str]:
        own = {}
        for name, given in self.launch.env.items():
            value = given.get(rank) if hasattr(given, "get") else given
            if value is not None:
                own[name] = self._number(value, rank) if name in _INTEGER_VARIABLES else value
        return {
            name: value
            for name, value in ({**self._launchers(rank), **own}).items()
            if value and name in (*ENV_VARIABLES, *own)
        }

    def _launchers(self, rank: int) -> Mapping[str, str]:
        """What the launcher sets. A program that leaves its start to distsim gets all of it from
        whatever launcher.
        """
        if self.explicit and (self.launch.by or "") not in _ENV_SETTING_LAUNCHERS:
            return {}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.scenario.world.size),
            "MASTER_ADDR": master_host(self.scenario),
            "MASTER_PORT": str(self.launch.master_port),
        }

    def _number(self, text: str, rank: int) -> str:
        """The value of an expression; any other text as it stands."""
        try:
            value = self.names.evaluate(parse_expression(text), self.names.world, ("launch", "env"))
        except (ExpressionError, ScenarioErrors, ValueError):
            return text
        return str(int(at_row(value, rank)))


def master_host(scenario: Scenario) -> str:
    """The address of machine 0: `launch.master_addr`, else the first of `launch.hosts`; for several
    machines without either a stand-in.
    """
    launch = scenario.launch
    if "master_addr" in launch.model_fields_set or (scenario.world.nodes == 1 and not launch.hosts):
        return launch.master_addr
    return launch.hosts[0] if launch.hosts else "HOST0"


def startup_findings(program: Program, startup: StartupResult) -> tuple[Finding, ...]:
    """DS121 to DS129 and DS706, at the call where it is written."""
    return tuple(_finding(program, cause, "error") for cause in startup.causes) + tuple(
        _finding(program, cause, "warning") for cause in startup.remarks
    )


def _finding(program: Program, cause: StartupCause, severity: str) -> Finding:
    places: dict[SourceLocation, None] = {}
    for rank in cause.ranks:
        code = program.code(rank)
        for call in code.calls:
            if call.op == INIT_OP:
                places[program.sites[call.site].place(rank)] = None
                break
    return Finding(
        cause.code,
        severity,
        cause.message,
        cause.ranks,
        cause.ranks,
        (cause.help,),
        tuple(places)[:1],
    )  # type: ignore[arg-type]
