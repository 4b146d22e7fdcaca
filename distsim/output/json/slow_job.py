"""The analysis of `distsim slow` as plain data for JSON; the keys are an interface."""

from __future__ import annotations

import math

from distsim.analysis.slow_jobs.slow_job import (
    RankCost,
    SlowFinding,
    SlowJob,
    SlowPlace,
    WhatIfStep,
)


def slow_json(job: SlowJob) -> dict[str, object]:
    """Verdict, findings, costs of all ranks, and the breakdown. Times are nanoseconds."""
    recording = job.recording
    steps = [name for name, used in zip(job.groups.graph.steps, job.counted, strict=True) if used]
    return {
        "schema_version": 1,
        "verdict": job.verdict,
        "not_comparable": job.not_comparable or None,
        "hangs": job.hangs,
        "step_ns": round(job.step_ns),
        "ideal_ns": round(job.ideal_ns),
        "ideal": job.ideal,
        "slowdown": _number(job.layers_ns["no delay"] / max(job.ideal_ns, 1.0)),
        "findings": [_finding(finding) for finding in job.findings],
        "breakdown": [
            {"part": row.name, "cost_ns": round(row.cost_ns), "share": _number(row.share)}
            for row in job.breakdown
        ],
        "what_if": None if job.what_if is None else _what_if(job.what_if),
        "ranks": [_rank(rank) for rank in job.ranks],
        "steps": [
            {"step": name, "recorded_ns": round(float(time))}
            for name, time in zip(steps, job.recorded_steps_ns[job.counted], strict=True)
        ],
        "recording": {
            "format": recording.format,
            "files": list(recording.files),
            "world_size": recording.world_size,
            "operations": recording.operation_count,
            "missing_ranks": list(recording.missing_ranks),
            "clock_offsets_ns": {
                str(rank): round(offset) for rank, offset in recording.clocks.offsets_ns.items()
            },
            "clock_error_ns": round(recording.clocks.worst_ns),
            "inferred_waits": recording.inferred_waits,
            "replay_error_ns": round(job.replay_error_ns),
            "negative_gaps": len(recording.graph.negative_gaps()),
            "unexplained_gap_ns": {
                str(rank): round(gap) for rank, gap in recording.unexplained_gap_ns.items()
            },
            "notes": list(recording.notes),
        },
    }


def rank_rows(job: SlowJob) -> list[dict[str, object]]:
    """One flat row per rank, for data frames."""
    return [
        {
            "rank": rank.rank,
            "cost_ns": round(rank.cost_ns),
            "share": rank.share,
            "slowdown": rank.slowdown,
            "stage": job.recording.stages.get(rank.rank),
        }
        for rank in job.ranks
    ]


def _rank(rank: RankCost) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "cost_ns": round(rank.cost_ns),
        "share": _number(rank.share),
        "slowdown": _number(rank.slowdown),
        "peers": list(rank.peers),
        "excess_ns": [round(value) for value in rank.excess_ns],
        "phases": {
            label: {"excess_ns": round(excess), "ratio": _number(ratio)}
            for label, (excess, ratio) in rank.phases.items()
        },
    }


def _finding(finding: SlowFinding) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "ranks": list(finding.ranks),
        "cost_ns": round(finding.cost_ns),
        "share": _number(finding.share),
        "steps": finding.steps,
        "counted_steps": finding.counted_steps,
        "phase": finding.phase,
        "ratio": _number(finding.ratio),
        "place": None if finding.place is None else _place(finding.place),
        "hints": list(finding.hints),
        "slow_steps": list(finding.slow_steps),
    }


def _what_if(what_if: WhatIfStep) -> dict[str, object]:
    return {
        "changes": list(what_if.changes),
        "step_ns": round(what_if.step_ns),
        "unpredicted": what_if.unpredicted,
    }


def _place(place: SlowPlace) -> dict[str, object]:
    return {
        "after": place.after,
        "before": place.before,
        "excess_ns": round(place.excess_ns),
        "peer_ns": round(place.peer_ns),
        "steps": place.steps,
    }


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
