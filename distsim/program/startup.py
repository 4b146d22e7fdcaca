"""The start-up of a scenario: what each process passes to init_process_group, and the result.

The simulation itself is in `distsim.scenario.startup`; here a file's launch options, faults and
calls become its input, and its causes become findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.backends import BACKEND_PROFILES
from distsim.common.errors import ScenarioErrors
from distsim.common.expressions import ExpressionError, parse_expression
from distsim.common.field_parsing import PerRank
from distsim.findings.finding_types import Finding, Severity, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.code import CodeCall, SharedCode, at_row
from distsim.program.model import Program
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.model import Scenario
from distsim.scenario.startup.init_method import ENV_VARIABLES, is_loopback, rendezvous_info
from distsim.scenario.startup.records import (
    NOT_PASSED,
    RendezvousInfo,
    StartupCause,
    StartupEnvironment,
    StartupProcess,
    StartupResult,
)
from distsim.scenario.startup.rendezvous import simulate_startup

INIT_OP = "init_process_group"
#: Launchers whose agent serves the store.
_AGENT_LAUNCHERS = ("torchrun", "elastic")
#: Launchers that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
_ENV_SETTING_LAUNCHERS = ("", "torchrun", "elastic")
_INTEGER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def scenario_startup(scenario: Scenario, program: Program, names: SymbolTable) -> StartupResult:
    """The result of the first init_process_group."""
    processes = startup_processes(scenario, program, names)
    result = simulate_startup(processes, startup_environment(scenario))
    if not result.failed:
        _check_rank_numbers(processes, names)
    return result


def with_startup_under(program: Program, backend: str) -> Program:
    """The program with the start-up that its processes have under another backend.

    The backend decides where the ranks meet: mpi uses its launcher, and never the store.
    """
    startup = program.startup
    if startup is None or startup.environment is None or backend == program.backend:
        return program
    processes = [replace(process, backend=backend) for process in startup.entrances]
    return replace(program, startup=simulate_startup(processes, startup.environment))


def _check_rank_numbers(processes: list[StartupProcess], names: SymbolTable) -> None:
    """Refuse a start-up that numbers processes differently from the file.

    It would run the steps of one rank under another rank's number.
    """
    for process in processes:
        info = rendezvous_info(process)
        if not isinstance(info, RendezvousInfo) or info.kind == "launcher" or process.absent:
            continue
        if info.rank != process.rank:
            names.problem(
                ("program",),
                (
                    f"process {process.rank} passes rank {info.rank}; a scenario numbers its "
                    "processes by rank, so write `rank: rank`"
                ),
            )


# --- the input of the simulation ---
def startup_environment(scenario: Scenario) -> StartupEnvironment:
    """The machines that the file describes.

    If it lists no hosts, `launch.master_addr` is the first one.
    """
    launch = scenario.launch
    node_of_host = {host: node for node, host in enumerate(launch.hosts)}
    if not launch.hosts and not is_loopback(launch.master_addr):
        node_of_host[launch.master_addr] = 0
    return StartupEnvironment(
        world_size=scenario.world.size,
        hosts=node_of_host,
        closed=bool(launch.hosts),
        ports_taken=tuple(launch.ports_taken),
        files_left=tuple(launch.files_left),
    )


def startup_processes(
    scenario: Scenario, program: Program, names: SymbolTable
) -> list[StartupProcess]:
    """What every process passes to init_process_group."""
    absent = {fault.rank for fault in program.faults if fault.kind == "absent"}
    has_init = any(_first_init(code) is not None for code in program.codes)
    environment = _RankEnvironment(scenario, names, has_init)
    return [
        _startup_process(scenario, program, rank, environment, is_absent=rank in absent)
        for rank in range(program.world_size)
    ]


def _startup_process(
    scenario: Scenario,
    program: Program,
    rank: int,
    environment: _RankEnvironment,
    *,
    is_absent: bool,
) -> StartupProcess:
    call = _first_init_call(program, rank)
    method = _init_method(scenario, call)
    # The implied init_process_group passes what its method needs.
    implies_arguments = (
        not environment.has_init and method is not None and not method.startswith("env:")
    )
    rank_argument = rank if implies_arguments else NOT_PASSED
    world_size_argument = program.world_size if implies_arguments else NOT_PASSED
    if call is not None and call.rank_argument is not None:
        rank_argument = call.rank_argument
    if call is not None and call.world_size_argument is not None:
        world_size_argument = call.world_size_argument
    launcher = scenario.launch.by or ""
    return StartupProcess(
        rank=rank,
        node=program.node(rank),
        backend=scenario.backend,
        timeout_ns=_timeout_ns(scenario, call),
        init_method=method,
        store=call.store if call else None,
        rank_argument=rank_argument,
        world_size_argument=world_size_argument,
        device=call.device_id if call else None,
        env=environment.variables_of(rank),
        agent=launcher in _AGENT_LAUNCHERS and method in (None, "env://"),
        launcher=launcher,
        absent=is_absent,
    )


def _init_method(scenario: Scenario, call: ResolvedCall | None) -> str | None:
    """The call's own init_method; else that of the options, unless the call passes a store."""
    if call is None:
        return scenario.options.init_method
    if call.init_method is not None or call.store is not None:
        return call.init_method
    return scenario.options.init_method


def _timeout_ns(scenario: Scenario, call: ResolvedCall | None) -> int:
    own_timeout_ns = call.timeout_ns if call else None
    default_ns = BACKEND_PROFILES[scenario.backend].timeout_ns
    return int(own_timeout_ns or scenario.options.timeout_ns or default_ns)


def _first_init_call(program: Program, rank: int) -> ResolvedCall | None:
    """The rank's first init_process_group, if the file contains one; None if it is implied."""
    code = program.code(rank)
    for position in code.positions(program.row_of[rank]):
        if code.calls[position].op == INIT_OP:
            return program.resolve(rank, code.calls[position])
    return None


class _RankEnvironment:
    """The environment variables that start-up reads, for every rank.

    ``has_init``: the file contains an init_process_group. Otherwise distsim implies one.
    """

    def __init__(self, scenario: Scenario, names: SymbolTable, has_init: bool) -> None:
        self.scenario = scenario
        self.names = names
        self.has_init = has_init
        self.launch: LaunchOptions = scenario.launch

    def variables_of(self, rank: int) -> dict[str, str]:
        """The variables of a rank, without empty ones (an empty one is the same as none)."""
        own = self._own_variables(rank)
        from_launcher = self._launcher_variables(rank)
        read = {name: value for name, value in from_launcher.items() if name in ENV_VARIABLES}
        return {name: value for name, value in {**read, **own}.items() if value}

    def _own_variables(self, rank: int) -> dict[str, str]:
        """The variables that the file sets."""
        own = {}
        for name, given in self.launch.env.items():
            value = given.get(rank) if isinstance(given, PerRank) else given
            if value is None:
                continue
            own[name] = self._evaluated(value, rank) if name in _INTEGER_VARIABLES else value
        return own

    def _launcher_variables(self, rank: int) -> Mapping[str, str]:
        """The variables that the launcher sets.

        A program without init_process_group gets all of them from any launcher, because its
        start-up is left to distsim.
        """
        if self.has_init and (self.launch.by or "") not in _ENV_SETTING_LAUNCHERS:
            return {}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.scenario.world.size),
            "MASTER_ADDR": master_host(self.scenario),
            "MASTER_PORT": str(self.launch.master_port),
        }

    def _evaluated(self, text: str, rank: int) -> str:
        """The value of an expression; any other text unchanged."""
        try:
            value = self.names.evaluate(parse_expression(text), self.names.world, ("launch", "env"))
        except (ExpressionError, ScenarioErrors, ValueError):
            return text
        return str(int(at_row(value, rank)))


def master_host(scenario: Scenario) -> str:
    """The address of machine 0: `launch.master_addr`, else the first of `launch.hosts`.

    Several machines without either get a placeholder.
    """
    launch = scenario.launch
    if "master_addr" in launch.model_fields_set:
        return launch.master_addr
    if launch.hosts:
        return launch.hosts[0]
    return launch.master_addr if scenario.world.nodes == 1 else "HOST0"


# --- findings ---
def startup_findings(program: Program, startup: StartupResult) -> tuple[Finding, ...]:
    """DS121 to DS129 and DS706, at the calls of init_process_group."""
    errors = tuple(_finding(program, cause, "error") for cause in startup.causes)
    warnings = tuple(_finding(program, cause, "warning") for cause in startup.remarks)
    return errors + warnings


def _finding(program: Program, cause: StartupCause, severity: Severity) -> Finding:
    places = _init_places(program, cause.ranks)
    return Finding(
        code=cause.code,
        severity=severity,
        message=cause.message,
        ranks=cause.ranks,
        core=cause.ranks,
        help=(cause.help,),
        places=places[:1],
    )


def _init_places(program: Program, ranks: tuple[int, ...]) -> tuple[SourceLocation, ...]:
    """Where these ranks call init_process_group; empty if it is implied."""
    places = []
    for rank in ranks:
        call = _first_init(program.code(rank))
        if call is not None:
            places.append(program.sites[call.site].place(rank))
    return tuple(places)


def _first_init(code: SharedCode) -> CodeCall | None:
    """The first init_process_group of a code, whether a rank reaches it or not."""
    return next((call for call in code.calls if call.op == INIT_OP), None)
