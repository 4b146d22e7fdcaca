"""The smallest scenario with the same standstill: the calls that stand, on as few ranks as show it;
simulated before it is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from distsim.backends import BACKEND_PROFILES, DEVICE_BACKEND
from distsim.common.errors import DistsimError, UsageError
from distsim.common.file_io import escape_control_characters
from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState
from distsim.hang_doctor.model.evidence_records import EvidenceCall
from distsim.hang_doctor.model.operation_names import P2P_OPS
from distsim.scenario import loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.simulate_scenario import simulate

_MAX_RANKS = 8
#: Tensors are cut to so many elements; what differs keeps its ratio.
_MAX_ELEMENTS = 1024


class _ScenarioRank(NamedTuple):
    """A rank's calls, in order."""

    rank: int
    calls: tuple[EvidenceCall, ...]


def minimal_scenario_text(found: Diagnosis) -> str:
    """The scenario as YAML. Raises UsageError where the evidence is too thin for one, or none of
    its forms hangs in simulation.
    """
    main = found.main
    if main is None or not any(s.waits for s in found.standing.ranks.values()):
        raise UsageError(
            "nobody is seen waiting, so there is no standstill to write down",
            "give the dumps or stacks of more ranks",
        )
    parts = _rank_calls(found.standing, main)
    if len(parts) < 2 or not any(p.calls for p in parts):
        raise UsageError(
            "what I was given shows the calls of one rank only: too little for a scenario",
            "give the files of more ranks",
        )
    for backend in _backends_to_try(found, parts):
        text = _scenario_text(found, main, parts, backend)
        if _hangs(text):
            return text
    raise UsageError(
        "no small scenario of these calls hangs in simulation: the records do not hold what made them hang",
        "take stacks of all ranks (`py-spy dump --locals`), or Flight Recorder dumps",
    )


def _backends_to_try(found: Diagnosis, parts: list[_ScenarioRank]) -> tuple[str, ...]:
    """Those whose rules are tried: first the one that the job had, or NCCL's where it had one that
    is built like it.
    """
    used = {given.backend for given in found.evidence.ranks.values()} - {""}
    nccl = any("ccl" in backend for backend in used) or any(
        "cuda" in c.source for p in parts for c in p.calls
    )
    backends = tuple(BACKEND_PROFILES)
    # Each backend once, in the order of the registry, but NCCL first.
    return tuple(dict.fromkeys((DEVICE_BACKEND, *backends))) if nccl else backends


def _hangs(text: str) -> bool:
    try:
        done = simulate(loads(text), with_values=False)
    except DistsimError:
        return False
    return done.outcome == "hangs" or (
        done.verdict is not None and done.verdict.verdict in ("deadlock", "mismatch")
    )


def _rank_calls(whole: JobWaitState, main: HangCause) -> list[_ScenarioRank]:
    """The ranks that the cause concerns, one or two that wait, and what each calls: where it is,
    then where it is waited for.
    """
    waiting = [r for r, s in whole.ranks.items() if s.waits]
    chosen = list(
        dict.fromkeys([*main.ranks[:_MAX_RANKS], *[r for r in waiting if r not in main.ranks][:2]])
    )
    if main.kind == "clash":
        chosen = list(
            dict.fromkeys([*(ranks[0] for ranks, _, _ in main.lines if ranks), *main.ranks])
        )[:4]
    own = {r: [w.call for w in whole.ranks[r].waits[:1]] for r in chosen if r in whole.ranks}
    if main.kind == "clash":
        for rank in own:
            call = _call_by_number(whole, rank, main.group, main.number)
            own[rank] = [call] if call is not None else own[rank]
    for rank in chosen:
        for wait in whole.ranks[rank].waits[:1] if rank in whole.ranks else ():
            for other in wait.missing:
                if own.get(other) and main.kind != "clash":
                    _append_new(own[other], _answering_call(wait, other))
    for rank in chosen:
        for wait in whole.ranks[rank].waits[:1] if rank in whole.ranks else ():
            another = next((r for r in own if r != rank), None)
            if (
                wait.open_ended
                and not wait.call.p2p
                and another is not None
                and main.kind == "circle"
            ):
                _append_new(own[another], _answering_call(wait, another))
    absent = [r for w in waiting for x in whole.ranks[w].waits for r in x.silent if r not in own][
        :1
    ]
    return [_ScenarioRank(r, tuple(calls)) for r, calls in sorted(own.items())] + [
        _ScenarioRank(r, ()) for r in absent
    ]


def _call_by_number(whole: JobWaitState, rank: int, group: str, number: int) -> EvidenceCall | None:
    return next(
        (
            c
            for c in whole.evidence.ranks[rank].calls
            if (c.group, c.number, c.p2p) == (group, number, False)
        ),
        None,
    )


def _append_new(calls: list[EvidenceCall], call: EvidenceCall) -> None:
    if all((c.op, c.group, c.peer) != (call.op, call.group, call.peer) for c in calls):
        calls.append(call)


def _answering_call(wait: EvidenceWait, rank: int) -> EvidenceCall:
    """What the awaited rank would have to call."""
    call = wait.call
    op = {"send": "recv", "recv": "send"}.get(call.op, call.op)
    return EvidenceCall(
        rank,
        call.group,
        call.number,
        op,
        "waiting",
        call.p2p,
        call.rank if call.p2p else None,
        sizes=call.sizes,
        elements_in=call.elements_in,
        elements_out=call.elements_out,
        dtype=call.dtype,
        frames=(),
        tag=call.tag,
    )


# --- as YAML ---


def _scenario_text(
    found: Diagnosis, main: HangCause, parts: list[_ScenarioRank], backend: str
) -> str:
    number = {p.rank: i for i, p in enumerate(parts)}
    writer = _StepWriter(
        found.standing, number, max((c.elements_in for p in parts for c in p.calls), default=1)
    )
    program = [
        {"ranks": [number[p.rank]], "steps": [writer.step(c) for c in p.calls]}
        for p in parts
        if p.calls
    ]
    mapping = ", ".join(
        f"rank {i} is the job's rank {rank}" for rank, i in number.items() if rank != i
    )
    about = escape_control_characters(
        f"{main.title}{f' ({mapping})' if mapping else ''}", one_line=True
    )
    data: dict[str, object] = {
        "name": "standstill",
        "about": about[:600],
        "world": len(parts),
        "backend": backend,
    }
    if writer.groups:
        data["groups"] = {name: {"ranks": ranks} for name, ranks in writer.groups.items()}
    data["tensors"] = writer.tensors or {"x": {"shape": [1]}}
    data["program"] = program
    return f"# Written by distsim doctor: the calls that stand, and no more.\n{dump_yaml(data)}"


class _StepWriter:
    """Calls as steps, with the groups and tensors that they name."""

    def __init__(self, whole: JobWaitState, number: dict[int, int], largest: int) -> None:
        self.whole, self.number, self.scale = whole, number, max(largest, 1)
        self.groups: dict[str, list[int]] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}

    def step(self, call: EvidenceCall) -> dict[str, object]:
        if (
            call.op == "coalesced" or " + " in call.op
        ):  # several calls as one: the first that is known
            call = replace(call, op=call.op.split(" + ")[0] if " + " in call.op else "")
        fields = self._fields(call)
        group = "" if call.op in P2P_OPS else self._group(call.group)
        if group:
            fields["group"] = group
        return {_OPERATION_OF_FAMILY.get(call.op, call.op): fields}

    def _members(self, key: str) -> list[int]:
        known = self.whole.members_of(key)
        found = sorted(self.number[r] for r in known if r in self.number)
        if len(found) == 1:  # nobody named the others
            found = sorted({*found, next(n for n in self.number.values() if n not in found)})
        return found or sorted(self.number.values())

    def _group(self, key: str) -> str:
        ranks = self._members(key)
        if len(ranks) == len(self.number):
            return ""
        name = self._names.setdefault(key, f"group_{len(self._names)}")
        self.groups[name] = ranks
        return name

    def _tensor(self, elements: int, dtype: str) -> str:
        size = (
            max(1, round(_MAX_ELEMENTS * max(elements, 1) / self.scale))
            if elements >= 0
            else _MAX_ELEMENTS
        )
        size = -(-size // 8) * 8 if size > 1 else 1
        kind = _DTYPES.get(dtype.lower(), "float32")
        name = f"x{size}" + ("" if kind == "float32" else f"_{kind}")
        self.tensors[name] = {"shape": [size]} | ({} if kind == "float32" else {"dtype": kind})
        return name

    def _fields(self, call: EvidenceCall) -> dict[str, Any]:
        if call.op in ("barrier", ""):
            return {}
        x = self._tensor(call.elements_in, call.dtype)
        size = self.tensors[x]["shape"][0]
        members = self._members(call.group)
        many = max(len(members), 1)
        if call.op in P2P_OPS:
            peer = self.number.get(
                call.peer if call.peer is not None else -1,
                (self.number[call.rank] + 1) % len(self.number),
            )
            tag = {"tag": call.tag} if call.tag else {}
            return {"tensor": x, "dst" if call.op == "send" else "src": peer, **tag}
        if call.op in ("all_gather", "gather"):
            return {"input": x, "output": self._made(x, [many, size], "rows")} | (
                {"dst": members[0]} if call.op == "gather" else {}
            )
        if call.op in ("reduce_scatter", "scatter"):
            rows = self._made(x, [many, size], "rows")
            return {"input": rows, "output": x} | (
                {"src": members[0]} if call.op == "scatter" else {}
            )
        if call.op == "all_to_all":
            wide = self._made(x, [size * many], "wide")
            return {"input": wide, "output": self._made(x, [size * many], "out")}
        root = {"broadcast": "src", "reduce": "dst"}.get(call.op)
        return {"tensor": x} | ({root: members[0]} if root else {})

    def _made(self, base: str, shape: list[int], word: str) -> str:
        name = f"{base}_{word}{shape[0] if word == 'rows' else ''}"
        self.tensors[name] = {**self.tensors[base], "shape": shape}
        return name


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
