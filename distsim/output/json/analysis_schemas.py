"""The JSON of commands that plan, measure and diagnose jobs, as schemas.

Times are in ns, sizes in bytes, shares between 0 and 1. The types are written in the notation of
`schema_notation`.
"""

from __future__ import annotations

from distsim.output.json.schema_notation import record_fields
from distsim.planning.layouts import ParallelLayout
from distsim.real.bench.measurement import BENCH_FORMAT, BenchRow
from distsim.real.calibrate.fit_cluster import FitError

_LAYOUT = record_fields(ParallelLayout)
PLAN: dict[str, object] = {
    "schema_version": "version",
    "model": ("text", {"{}": "any"}),
    "global_batch": "int",
    "sequence": "int",
    "gpus": ["int"],
    "clusters": ["text"],
    "layouts": [
        {
            "layout": {**_LAYOUT, "dp": "int"},
            "label": "text",
            "cluster": "text",
            "step_ns": "int",
            "band_ns": ["int"],
            "tokens_s_gpu": "number",
            "mfu": "number",
            "held_nbytes": "int",
            "memory": "number",
            "memory_low_nbytes": "int",
            "memory_high_nbytes": "int",
            "memory_reserve_nbytes": "int",
            "may_run_out": "flag",
            "bubble": "number",
            "exposed": "number",
            "bound": "text",
            "shares": {"{}": "number"},
            "tied": "flag",
            "pareto": "flag",
            "timed": "text",
        }
    ],
    "excluded": [{"layout": _LAYOUT, "reason": "text"}],
}
SWEEP: dict[str, object] = {
    "schema_version": "version",
    "computed": "int",
    "known": "int",
    "points": [
        {
            "key": "text",
            "status": "text",
            "outcome": "outcome?",
            "verdict": "verdict?",
            "makespan_ns": "int?",
            "low_ns": "int?",
            "high_ns": "int?",
            "iteration_ns": "int?",
            "tokens_s_gpu": "number?",
            "mfu": "number?",
            "bubble": "number?",
            "exposed": "number?",
            "memory": "number?",
            "findings": "text?",
            "reason": "text?",
            # The swept keys.
            "{}": "any",
        }
    ],
}
_CAUSE = {
    "kind": "text",
    "grade": "text",
    "title": "text",
    "culprits": ["int"],
    "ranks": ["int"],
    "group": "text",
    "call": "int",
    "lines": [{"ranks": ["int"], "what": "text", "line": "text?", "function": "text?"}],
    "details": ["text"],
}
_WAIT = {
    "rank": "int",
    "op": "text",
    "group": "text",
    "call": "int",
    "peer": "int?",
    "for": ["int"],
    "ranks_without_data": ["int"],
    "known": "flag",
    "line": "text?",
}
DOCTOR: dict[str, object] = {
    "schema_version": "version",
    "culprits": ["int"],
    "causes": [_CAUSE],
    "waits": [_WAIT],
    "ranks": [
        {
            "rank": "int",
            "line": "text?",
            "ended": "text?",
            "calls": "int",
            "last": {"{}": {"enqueued": "int", "completed": "int"}},
            "from": ["text"],
        }
    ],
    "groups": [
        {"name": "text", "description": "text", "members?": ["int"], "members_certain": "flag"}
    ],
    "last_common": ["text"],
    "ranks_without_data": ["int"],
    "disagree": ["text"],
    "notes": ["text"],
    "collect": ["text"],
    "files": [
        {
            "path": "text",
            "kind": "text",
            "ranks": ["int"],
            "problem": "text",
            "rank_of_name": "int?",
        }
    ],
}
_SLOW_FINDING = {
    "kind": "text",
    "ranks": ["int"],
    "cost_ns": "int",
    "share": "number?",
    "steps": "int",
    "counted_steps": "int",
    "phase": "text",
    "ratio": "number?",
    "place?": {
        "after": "text",
        "before": "text",
        "excess_ns": "int",
        "peer_ns": "int",
        "steps": "int",
    },
    "hints": ["text"],
    "slow_steps": ["int"],
}
_SLOW_RANK = {
    "rank": "int",
    "cost_ns": "int",
    "share": "number?",
    "slowdown": "number?",
    "peers": ["int"],
    "excess_ns": ["int"],
    "phases": {"{}": {"excess_ns": "int", "ratio": "number?"}},
}
SLOW: dict[str, object] = {
    "schema_version": "version",
    "verdict": "text",
    "not_comparable": "text?",
    "hangs": "flag",
    "step_ns": "int",
    "ideal_ns": "int",
    "ideal": "text",
    "slowdown": "number?",
    "findings": [_SLOW_FINDING],
    "breakdown": [{"part": "text", "cost_ns": "int", "share": "number?"}],
    "what_if?": {"changes": ["text"], "step_ns": "int", "unpredicted": "int"},
    "ranks": [_SLOW_RANK],
    "steps": [{"step": "int", "recorded_ns": "int"}],
    "recording": {
        "format": "text",
        "files": ["text"],
        "world_size": "int",
        "operations": "int",
        "missing_ranks": ["int"],
        "clock_offsets_ns": {"{}": "int"},
        "clock_error_ns": "int",
        "inferred_waits": "int",
        "replay_error_ns": "int",
        "negative_gaps": "int",
        "unexplained_gap_ns": {"{}": "int"},
        "notes": ["text"],
    },
}
BENCH: dict[str, object] = {
    "format": f"={BENCH_FORMAT}",
    "schema_version": "version",
    "machine": {"cores": "int", "processor": "text", "torch": "text", "backend": "text"},
    "seconds": "number",
    "rows": [record_fields(BenchRow)],
}
CALIBRATE: dict[str, object] = {
    "schema_version": "version",
    "cluster": {"{}": "any"},
    "points": "int",
    "median_error": "number",
    "worst_error": "number",
    "model_median_error": "number",
    "spread": "number",
    "errors": [record_fields(FitError)],
}
#: What `compare LOG --cluster C` prints.
MEASURED_TIMES: dict[str, object] = {
    "schema_version": "version",
    "times": [
        {
            "op": "text",
            "group": "int",
            "nodes": "int",
            "bytes": "int",
            "measured_ns": "int",
            "predicted_ns": "int",
            "band?": ["number"],
            "parts": "flag",
        }
    ],
}
