"""The JSON of commands that simulate, check, run and compare programs, as schemas.

Times are in ns, sizes in bytes. The types are written in the notation of `schema_notation`.
"""

from __future__ import annotations

from distsim.analysis.critical_path import CriticalPathSegment
from distsim.analysis.run_comparison import CriticalPathDelta, OperationTimes, ValueMatchCounts
from distsim.analysis.timeline import RankTimes
from distsim.output.json.schema_notation import record_fields

_PLACE = {"file": "text?", "line": "int?", "column": "int?"}
_FINDING = {
    "code": "code",
    "severity": "severity",
    "ranks": ["int"],
    "core": ["int"],
    "message": "text",
    "help": ["text"],
    "places": [{"rank": "int?", **_PLACE, "op": "text"}],
}
_RANK_TIMES = {**record_fields(RankTimes), "finished_ns": "int?"}
_COST_MODEL = {"name": "text", "source": "text", "error_band": "text"}
SIMULATE: dict[str, object] = {
    "schema_version": "version",
    "file": "text",
    "name": "text",
    "outcome": "outcome",
    "possible": ["outcome"],
    "verdict": "verdict?",
    "complete": "flag?",
    "depends_on": "text?",
    "verdict_ranks?": ["int"],
    "core?": ["int"],
    "profile": "text",
    "world_size": "int",
    "driver": ("=local clocks", "=event-driven"),
    "simulated_ranks": "int",
    "makespan_ns": "int",
    "makespan_band_ns?": ["int"],
    "iteration_ns": "int?",
    "ranks": [_RANK_TIMES],
    "critical_path": [
        {
            "rank": "int",
            "op": "text",
            "name": "text",
            "why": "text",
            "start_ns": "int",
            "end_ns": "int",
            "calls": "int",
            **_PLACE,
        }
    ],
    "collectives": [
        {
            "op": "text",
            "group": "text",
            "group_size": "int",
            "nbytes": "int",
            "calls": "int",
            "duration_ns": "int",
            "algbw": "number",
            "busbw": "number",
        }
    ],
    "memory": [
        {
            "name": "text",
            "ranks": ["int"],
            "parts_nbytes": {"{}": "int"},
            "total_nbytes": "int",
            "allocated_nbytes": "int?",
            "device": "text",
            "device_nbytes": "int",
            "fits": "flag",
        }
    ],
    "values?": {"{}": {"{}": "any"}},
    "findings": [_FINDING],
    "figures?": {
        "step_ns": "int",
        "tokens": "int",
        "tokens_s_gpu": "number",
        "mfu": "number",
        "shares": {"{}": "number"},
    },
    "cost_model": _COST_MODEL,
}
_CAPTURED_RANK = {
    "rank": "int",
    "state": "text",
    "what": "text",
    "file": "text",
    "line": "int",
    "function": "text",
    "via": "text",
    "source": "text",
}
CAPTURE: dict[str, object] = {
    **SIMULATE,
    "captured": {
        "target": "text",
        "args": ["text"],
        "ended": "text",
        "calls": "int",
        "devices": "text",
        "threaded": ["int"],
        "ranks": [_CAPTURED_RANK],
    },
}
_CALL_ID = {"rank": "int", "position": "int", "part": "int", "at*": "text"}
_SCHEDULE = {
    "schema_version": "version",
    "reading": "text",
    "choices": [({"receive": _CALL_ID, "takes": _CALL_ID}, {"buffered": _CALL_ID})],
}
_CHECKED_FILE: dict[str, object] = {
    "file": "text",
    "verdict": "verdict",
    "complete": "flag",
    "explored": "int",
    "depends_on": "text?",
    "ranks": ["int"],
    "core": ["int"],
    "readings": {"rendezvous": "text", "early": "text", "buffered": "text", "mixed": "text"},
    "stuck_sets": [["int"]],
    "schedule?": _SCHEDULE,
    "culprits": ["int"],
    "profiles": {
        "{}": {
            "outcome": "outcome",
            "possible": ["outcome"],
            "ranks": ["int"],
            "flips_at_nbytes*": "int?",
            "variants*": {"{}": "outcome"},
        }
    },
    "findings": [_FINDING],
}
_UNREADABLE_FILE = {"file": "text", "errors": [{"line": "int", "column": "int", "message": "text"}]}
CHECK: dict[str, object] = {
    "schema_version": "version",
    "files": [(_CHECKED_FILE, _UNREADABLE_FILE)],
}
_STOPPED_RUN = {
    "summary": "text",
    "reason": "text?",
    "cut": "any",
    "stops": [
        {
            "rank": "int",
            "status": "text",
            "inside_call": "flag",
            "op": "text?",
            "line": "int?",
            "iteration": "int?",
            "position": "int?",
            "at_ns": "int",
            "message": "text",
        }
    ],
}
REPLAY: dict[str, object] = {
    "schema_version": "version",
    "file": "text",
    "name": "text?",
    "outcome": "text",
    "partial?": _STOPPED_RUN,
    "as_recorded": "flag",
    "predicted_communication": "text?",
    "profile": "text?",
    "world_size": "int",
    "calls": "int",
    "trace_makespan_ns": "int",
    "makespan_ns": "int",
    "iteration_ns": "int?",
    "ranks": [_RANK_TIMES],
    "critical_path": [{**record_fields(CriticalPathSegment), "place": "text"}],
    "cost_model?": _COST_MODEL,
}
LAUNCH_PLAN: dict[str, object] = {
    "schema_version": "version",
    "name": "text",
    "backend": "text",
    "world_size": "int",
    "nodes": "int",
    "ranks": [{"rank": "int", "device": "text?", "env": {"{}": "any"}}],
    "commands": [{"launcher": "text", "node": "int?", "command": "text"}],
    "launcher_sets": {"{}": "text"},
    "notes": ["text"],
    "by": "text?",
    "script": ["text"],
}
REAL_RUN: dict[str, object] = {
    "schema_version": "version",
    "file": "text",
    "name": "text",
    "outcome": "outcome?",
    "reason": "text",
    "backend": "text",
    "launcher": "text",
    "world_size": "int",
    "makespans_ns": ["int"],
    "simulated": {"outcome": "outcome", "makespan_ns": "int"},
    "agrees": "flag?",
    "differences": ["text"],
    "agreement": "text",
    "ended_by": "text?",
    "culprits": ["int"],
    "any_source_matches": [
        {
            "rank": "int",
            "position": "int",
            "part": "int",
            "line": "int",
            "source": "int",
            "simulated": "int",
        }
    ],
    "ranks": [
        {
            "rank": "int",
            "status": "text",
            "position": "int",
            "at_ns": "int",
            "message": "text",
            "op": "text?",
            "file": "text?",
            "line": "int?",
            "stack": "text?",
            "output": "text?",
        }
    ],
    "findings": [_FINDING],
    "values": [{"rank": "int", "tensor": "text", "state": "text", "detail": "text"}],
    "recording_ns_per_call": "number",
    "clock_error_ns": "number?",
    "complete": "flag",
    "notes": ["text"],
}
#: What `run --real` prints, without --force, of a program whose simulation fails.
REFUSED_RUN: dict[str, object] = {"refused": "true", **SIMULATE}
REAL_REPLAY: dict[str, object] = {
    **REAL_RUN,
    "replay_of": {"file": "text", "source": "text", "backend": "text?", "makespan_ns": "int"},
}
_CALL = {
    "position": "int",
    "part": "int",
    "op": "text",
    "line": "int",
    "iteration": "int",
    "posted_ns": "int",
    "finished_ns": "int",
    "returned_ns": "int",
}
COMPARE: dict[str, object] = {
    "schema_version": "version",
    "a": "text",
    "b": "text",
    "same": "flag",
    "tolerance": "number",
    "makespan_ns": ["int"],
    "outcome": ["text"],
    "aligned": "int",
    "only_a": "int",
    "only_b": "int",
    "worst_ns": "int",
    "values": record_fields(ValueMatchCounts),
    "stopped?": {"run": "text", **_STOPPED_RUN},
    "divergences": [
        {
            "kind": "text",
            "rank": "int",
            "text": "text",
            "a?": _CALL,
            "b?": _CALL,
            "tensor*": "text",
            "element*": "int?",
            "numbers*": "any",
        }
    ],
    "causes": [{**record_fields(CriticalPathDelta), "delta_ns": "int"}],
    "ops": [record_fields(OperationTimes)],
    "ranks": [
        {
            "rank": "int",
            "compute_ns": ["int"],
            "exposed_ns": ["int"],
            "waiting_ns": ["int"],
            "idle_ns": ["int"],
        }
    ],
}
