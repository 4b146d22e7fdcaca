"""Write the smallest scenario that hangs like the job.

The scenario is built from the diagnosis and then simulated, under one backend after the other,
because some hangs depend on the rules of a backend. It is returned only if it hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from distsim.common.errors import DistsimError, UsageError
from distsim.common.file_io import escape_control_characters
from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.message_pairs import opposite
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState
from distsim.hang_doctor.model.evidence_records import EvidenceCall
from distsim.hang_doctor.model.operation_names import P2P_OPS
from distsim.scenario import loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.simulate_scenario import simulate

#: How many ranks of the cause, of the other waiting ranks, and of a mismatch are included.
_MAX_RANKS = 8
_MAX_OTHER_WAITING_RANKS = 2
_MAX_MISMATCHED_RANKS = 4
#: Tensors are scaled down to this many elements; ratios between sizes are kept.
_MAX_ELEMENTS = 1024
_MAX_ABOUT_LENGTH = 600
_BACKENDS = ("gloo", "nccl", "mpi")
_BACKENDS_FROM_NCCL = ("nccl", "gloo", "mpi")


class _ScenarioRank(NamedTuple):
    """A rank's calls, in order."""

    rank: int
    calls: tuple[EvidenceCall, ...]


def minimal_scenario_text(found: Diagnosis) -> str:
    """The scenario as YAML.

    Raises UsageError if the evidence is insufficient, or if no variant hangs in simulation.
    """
    main = found.main
    if main is None or not any(found.standing.all_waits()):
        raise UsageError(
            "no rank is blocked in the given files, so there is no hang to reproduce",
            "give the dumps or stacks of more ranks",
        )
    ranks = _ranks_and_calls(found.standing, main)
    if len(ranks) < 2 or not any(rank.calls for rank in ranks):
        raise UsageError(
            "the given files show the calls of one rank only; a scenario needs at least two",
            "give the files of more ranks",
        )
    for backend in _backends_to_try(found, ranks):
        text = _scenario_text(found, main, ranks, backend)
        if _hangs(text):
            return text
    raise UsageError(
        "no small scenario of these calls hangs in simulation: the records do not contain the "
        "cause of the hang",
        "take stacks of all ranks (`py-spy dump --locals`), or Flight Recorder dumps",
    )


def _backends_to_try(found: Diagnosis, ranks: list[_ScenarioRank]) -> tuple[str, ...]:
    """All backends, beginning with the one of the job.

    Libraries built like NCCL (RCCL, HCCL, ...) have "ccl" in their names.
    """
    if any("ccl" in records.backend for records in found.evidence.ranks.values()):
        return _BACKENDS_FROM_NCCL
    if any("cuda" in call.source for rank in ranks for call in rank.calls):
        return _BACKENDS_FROM_NCCL
    return _BACKENDS


def _hangs(text: str) -> bool:
    try:
        result = simulate(loads(text), with_values=False)
    except DistsimError:
        return False
    if result.outcome == "hangs":
        return True
    return result.verdict is not None and result.verdict.verdict in ("deadlock", "mismatch")


# --- which ranks and calls ---


def _ranks_and_calls(job: JobWaitState, main: HangCause) -> list[_ScenarioRank]:
    """The ranks that the cause concerns and some that wait, with the calls of each.

    A rank makes the call that it is in, then the calls for which others wait for it. A rank about
    which nothing was given makes no call.
    """
    calls = _calls_of_mismatch(job, main) if main.kind == "mismatch" else _calls_of_waits(job, main)
    ranks = [_ScenarioRank(rank, tuple(own_calls)) for rank, own_calls in sorted(calls.items())]
    silent = [rank for wait in job.all_waits() for rank in wait.silent]
    absent = [rank for rank in silent if rank not in calls]
    if absent:
        ranks.append(_ScenarioRank(absent[0], ()))
    return ranks


def _calls_of_mismatch(job: JobWaitState, main: HangCause) -> dict[int, list[EvidenceCall]]:
    """One rank of each side of the mismatch, then others, each with the mismatched call."""
    examples = [line.ranks[0] for line in main.lines if line.ranks]
    chosen = list(dict.fromkeys([*examples, *main.ranks]))[:_MAX_MISMATCHED_RANKS]
    calls: dict[int, list[EvidenceCall]] = {}
    for rank in chosen:
        if rank in job.ranks:
            call = _collective(job, rank, main.group, main.number)
            calls[rank] = [call] if call is not None else _first_waiting_call(job, rank)
    return calls


def _calls_of_waits(job: JobWaitState, main: HangCause) -> dict[int, list[EvidenceCall]]:
    """The ranks of the cause and some other waiting ranks, with the calls that they wait for."""
    waiting = [rank for rank, state in job.ranks.items() if state.waits]
    others = [rank for rank in waiting if rank not in main.ranks][:_MAX_OTHER_WAITING_RANKS]
    chosen = list(dict.fromkeys([*main.ranks[:_MAX_RANKS], *others]))
    calls = {rank: _first_waiting_call(job, rank) for rank in chosen if rank in job.ranks}
    for wait in _first_waits(job, chosen):
        for other in wait.missing:
            if calls.get(other):
                _append_new(calls[other], _answering_call(wait, other))
    _add_calls_of_unknown_groups(job, main, chosen, calls)
    return calls


def _add_calls_of_unknown_groups(
    job: JobWaitState, main: HangCause, chosen: list[int], calls: dict[int, list[EvidenceCall]]
) -> None:
    """In a cycle through a group with unknown members, any other rank may represent them."""
    if main.kind != "wait_for_cycle":
        return
    for wait in _first_waits(job, chosen):
        another = next((rank for rank in calls if rank != wait.rank), None)
        if wait.open_ended and not wait.call.p2p and another is not None:
            _append_new(calls[another], _answering_call(wait, another))


def _first_waits(job: JobWaitState, ranks: list[int]) -> Iterator[EvidenceWait]:
    for rank in ranks:
        if rank in job.ranks:
            yield from job.ranks[rank].waits[:1]


def _first_waiting_call(job: JobWaitState, rank: int) -> list[EvidenceCall]:
    return [wait.call for wait in job.ranks[rank].waits[:1]]


def _collective(job: JobWaitState, rank: int, group: str, number: int) -> EvidenceCall | None:
    for call in job.evidence.ranks[rank].calls:
        if call.is_collective(group, number):
            return call
    return None


def _append_new(calls: list[EvidenceCall], call: EvidenceCall) -> None:
    if all((c.op, c.group, c.peer) != (call.op, call.group, call.peer) for c in calls):
        calls.append(call)


def _answering_call(wait: EvidenceWait, rank: int) -> EvidenceCall:
    """The call that the awaited rank would have to make."""
    call = wait.call
    op = opposite(call.op) if call.op in P2P_OPS else call.op
    peer = call.rank if call.p2p else None
    return call._replace(
        rank=rank, op=op, state="waiting", peer=peer, started=False, batched=False, frames=()
    )


# --- as YAML ---


def _scenario_text(
    found: Diagnosis, main: HangCause, ranks: list[_ScenarioRank], backend: str
) -> str:
    numbers = {rank.rank: number for number, rank in enumerate(ranks)}
    sizes = [call.elements_in for rank in ranks for call in rank.calls]
    writer = _StepWriter(found.standing, numbers, largest=max(sizes, default=1))
    program = []
    for rank in ranks:
        if rank.calls:
            steps = [writer.step(call) for call in rank.calls]
            program.append({"ranks": [numbers[rank.rank]], "steps": steps})
    mapping = ", ".join(
        f"rank {number} is the job's rank {rank}"
        for rank, number in numbers.items()
        if rank != number
    )
    title = f"{main.title} ({mapping})" if mapping else main.title
    about = escape_control_characters(title, one_line=True)
    data: dict[str, object] = {
        "name": "hang",
        "about": about[:_MAX_ABOUT_LENGTH],
        "world": len(ranks),
        "backend": backend,
    }
    if writer.groups:
        data["groups"] = {name: {"ranks": ranks} for name, ranks in writer.groups.items()}
    data["tensors"] = writer.tensors or {"x": {"shape": [1]}}
    data["program"] = program
    return f"# Written by distsim doctor: only the calls that hang.\n{dump_yaml(data)}"


class _StepWriter:
    """Writes calls as steps, and collects the groups and tensors that they use.

    ``numbers``: rank of the job -> rank of the scenario. ``largest``: the most elements of a call.
    """

    def __init__(self, job: JobWaitState, numbers: dict[int, int], largest: int) -> None:
        self.job = job
        self.numbers = numbers
        self.largest = max(largest, 1)
        self.groups: dict[str, list[int]] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}

    def step(self, call: EvidenceCall) -> dict[str, object]:
        # Of several calls issued as one, the first that is known.
        if " + " in call.op:
            call = call._replace(op=call.op.split(" + ")[0])
        elif call.op == "coalesced":
            call = call._replace(op="")
        fields = self._fields(call)
        group = "" if call.op in P2P_OPS else self._group(call.group)
        if group:
            fields["group"] = group
        return {_OPERATION_OF_FAMILY.get(call.op, call.op): fields}

    def _members(self, key: str) -> list[int]:
        """The members of a group in the scenario: all ranks if none is known, at least two."""
        known = self.job.members_of(key)
        found = sorted(self.numbers[rank] for rank in known if rank in self.numbers)
        if len(found) == 1:  # the files do not name the others
            another = next(number for number in self.numbers.values() if number not in found)
            found = sorted([*found, another])
        return found or sorted(self.numbers.values())

    def _group(self, key: str) -> str:
        """The name of a group, empty for the group of all ranks."""
        ranks = self._members(key)
        if len(ranks) == len(self.numbers):
            return ""
        name = self._names.setdefault(key, f"group_{len(self._names)}")
        self.groups[name] = ranks
        return name

    def _fields(self, call: EvidenceCall) -> dict[str, Any]:
        if call.op in ("barrier", ""):
            return {}
        tensor = self._tensor(call.elements_in, call.dtype)
        if call.op in P2P_OPS:
            return self._message_fields(call, tensor)
        return self._collective_fields(call, tensor)

    def _message_fields(self, call: EvidenceCall, tensor: str) -> dict[str, Any]:
        peer = None if call.peer is None else self.numbers.get(call.peer)
        if peer is None:
            peer = (self.numbers[call.rank] + 1) % len(self.numbers)
        fields = {"tensor": tensor, "dst" if call.op == "send" else "src": peer}
        if call.tag:
            fields["tag"] = call.tag
        return fields

    def _collective_fields(self, call: EvidenceCall, tensor: str) -> dict[str, Any]:
        size = self.tensors[tensor]["shape"][0]
        members = self._members(call.group)
        n = max(len(members), 1)
        root = members[0]
        match call.op:
            case "all_gather":
                return {"input": tensor, "output": self._rows(tensor, n, size)}
            case "gather":
                return {"input": tensor, "output": self._rows(tensor, n, size), "dst": root}
            case "reduce_scatter":
                return {"input": self._rows(tensor, n, size), "output": tensor}
            case "scatter":
                return {"input": self._rows(tensor, n, size), "output": tensor, "src": root}
            case "all_to_all":
                wide = self._variant(f"{tensor}_wide", tensor, [size * n])
                out = self._variant(f"{tensor}_out", tensor, [size * n])
                return {"input": wide, "output": out}
            case "broadcast":
                return {"tensor": tensor, "src": root}
            case "reduce":
                return {"tensor": tensor, "dst": root}
        return {"tensor": tensor}

    def _tensor(self, elements: int, dtype: str) -> str:
        """The name of a tensor with so many elements, scaled down."""
        size = _MAX_ELEMENTS
        if elements >= 0:
            size = max(1, round(_MAX_ELEMENTS * max(elements, 1) / self.largest))
        if size > 1:
            size = -(-size // 8) * 8  # round up to a multiple of 8
        scenario_dtype = _DTYPES.get(dtype.lower(), _DEFAULT_DTYPE)
        if scenario_dtype == _DEFAULT_DTYPE:
            name = f"x{size}"
            self.tensors[name] = {"shape": [size]}
        else:
            name = f"x{size}_{scenario_dtype}"
            self.tensors[name] = {"shape": [size], "dtype": scenario_dtype}
        return name

    def _rows(self, tensor: str, n: int, size: int) -> str:
        """A tensor with one row for each member."""
        return self._variant(f"{tensor}_rows{n}", tensor, [n, size])

    def _variant(self, name: str, tensor: str, shape: list[int]) -> str:
        """A tensor like another one, with a shape of its own."""
        self.tensors[name] = {**self.tensors[tensor], "shape": shape}
        return name


_DEFAULT_DTYPE = "float32"
_OPERATION_OF_FAMILY = {
    "all_to_all": "all_to_all_single",
    "": "barrier",
    "all_gather_v": "all_gather",
    "reduce_scatter_v": "reduce_scatter",
}
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "int64": "int64",
    "int32": "int32",
}
