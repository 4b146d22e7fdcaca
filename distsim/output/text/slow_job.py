"""The report of `distsim slow`: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from distsim.analysis.slow_jobs.slow_job import NOT_SURE, RankCost, SlowFinding, SlowJob
from distsim.common.units import show_ns
from distsim.output.report_record import (
    Block,
    Column,
    Paragraph,
    Report,
    Section,
    Table,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text_layout import rank_list, ranks_label
from distsim.trace.recordings.recording import CHECKPOINT

#: The table omits losses below this share of a step.
_LEAST_SHOWN_SHARE = 0.0005


def slow_text(job: SlowJob) -> str:
    """The whole report as text."""
    return write_text(slow_report(job))


def slow_report(job: SlowJob) -> Report:
    """Verdict, findings, breakdown of a step, and what was read."""
    findings = [_finding_section(job, finding) for finding in job.findings]
    sections = [
        Section([Paragraph(line) for line in _headline(job)]),
        *findings,
        # The parts are wrong if the ranks do not fit together.
        *([] if job.not_comparable else [_breakdown_section(job)]),
        Section([Paragraph(text) for text in _what_if_texts(job)]),
        Section([Paragraph(text) for text in _provenance(job)]),
    ]
    return Report(sections)


# --- the first lines ---


def _headline(job: SlowJob) -> Iterator[str]:
    step = f"every {show_ns(int(job.step_ns))} step"
    if job.hangs:
        files = " ".join(job.recording.files)
        calls = _count(job.recording.unended_calls, "call")
        yield f"This job hangs: use `distsim doctor {files}`. {calls} never ended."
        if not job.findings:
            return
    if job.not_comparable:
        yield f"Not sure. {job.not_comparable}"
        return
    if not job.findings:
        yield from _no_straggler_lines(job)
        return
    first = job.findings[0]
    cost = f"{show_ns(int(first.cost_ns))} of {step}"
    if first.kind == "straggler":
        yield f"Rank {first.ranks[0]} is a straggler: it costs {cost}."
    elif first.kind == "intermittent":
        steps = f"{first.steps} of {first.counted_steps} steps"
        yield f"Rank {first.ranks[0]} is slow in {steps}: this costs {cost} on average."
    elif first.kind == "missing rank":
        yield (
            f"The other ranks wait for {ranks_label(first.ranks)} (no trace available) or the "
            f"network to it: this costs {cost}."
        )
    elif first.kind == "slow communication":
        steps = f"{first.steps} of {first.counted_steps} steps"
        yield f"{first.phase} is slow in {steps}: this costs {cost} on average."
    elif first.kind == "uneven":
        yield f"No rank is a straggler, but work is uneven: this costs {cost}."
    else:
        yield f"{_stage_name(job, first)} is too long: this costs {cost}."
    rest = show_ns(int(job.step_ns - first.cost_ns))
    yield f"Without this, a step would take about {rest}."


def _no_straggler_lines(job: SlowJob) -> Iterator[str]:
    slowest = job.slowest
    yield f"No rank is a straggler. A step takes {show_ns(int(job.step_ns))}."
    if slowest is None or not slowest.peers:
        if len(job.ranks) > 1:
            yield "No ranks have the same role, so they cannot be compared."
        return
    cost = f"{show_ns(int(slowest.cost_ns))} of it ({slowest.share:.0%})"
    if job.verdict != NOT_SURE:
        yield f"The slowest rank, {slowest.rank}, costs {cost}."
        return
    slower = sum(excess > 0 for excess in slowest.excess_ns)
    yield (
        f"Not sure: rank {slowest.rank} costs {cost}, but it is slower than its peers in only "
        f"{slower} of {len(slowest.excess_ns)} steps, or at times by no more than other ranks."
    )


# --- findings ---


def _finding_section(job: SlowJob, finding: SlowFinding) -> Section:
    if finding.kind in ("straggler", "intermittent"):
        texts = list(_slow_rank_texts(job, finding))
    elif finding.kind == "long stage":
        ratio = f"{finding.phase} takes {finding.ratio:.1f}× as long as on the other ranks"
        texts = [f"{_stage_name(job, finding)} (cost {finding.share:.0%}): {ratio}."]
    elif finding.kind == "slow communication":
        texts = [f"{ranks_label(finding.ranks)} (cost {finding.share:.0%}): slow {finding.phase}."]
        if finding.slow_steps:
            texts.append(f"Slow steps: {rank_list(finding.slow_steps, 12)}.")
    elif finding.kind == "uneven":
        texts = [f"{ranks_label(finding.ranks)} (cost {finding.share:.0%}): uneven work."]
    else:
        texts = [f"Communication with {ranks_label(finding.ranks)} is late in every step."]
        texts.append(
            "help: profile these ranks, too; the trace shows whether rank or network is slow"
        )
    blocks: list[Block] = [Paragraph(text, "  ", "    ") for text in (*texts, *finding.hints)]
    return Section(blocks)


def _slow_rank_texts(job: SlowJob, finding: SlowFinding) -> Iterator[str]:
    rank = next(one for one in job.ranks if one.rank == finding.ranks[0])
    peers = ranks_label(rank.peers)
    steps = f"in {finding.steps} of {finding.counted_steps} steps"
    place = finding.place
    if place is None:
        yield f"rank {rank.rank}: {_phase_ratios(rank, finding)} as long as on {peers}, {steps}."
    else:
        if place.operation is None:
            where = f"the gap between `{place.after}` and `{place.before}`"
        else:
            where = place.operation
        yield (
            f"rank {rank.rank}, {finding.phase}: {where} takes {show_ns(int(place.excess_ns))} "
            f"longer than on {peers}, where it takes {show_ns(int(place.peer_ns))}. This happens "
            f"{steps}."
        )
    if finding.slow_steps:
        yield f"Slow steps: {rank_list(finding.slow_steps, 12)}."
    impact = job.impact
    if impact is not None and impact.waited_ns:
        waits = impact.waited_ns.values()
        low, high = show_ns(int(min(waits))), show_ns(int(max(waits)))
        verb = "waits" if len(impact.waited_ns) == 1 else "wait"
        time = low if low == high else f"{low} to {high}"
        yield (
            f"impact: {ranks_label(sorted(impact.waited_ns))} {verb} {time} per step for "
            f"rank {rank.rank}, mostly in {impact.operation}."
        )


def _phase_ratios(rank: RankCost, finding: SlowFinding) -> str:
    """``forward takes 2.5× and backward 2.3×``, the largest excess first."""
    slow = [item for item in rank.phases.items() if item[1][0] > 0 and item[1][1] > 1.1]
    slow.sort(key=lambda item: -item[1][0])
    shown = [f"{label} takes {ratio:.1f}×" for label, (_, ratio) in slow[:2]]
    return " and ".join(shown) or f"{finding.phase} takes {finding.ratio:.1f}×"


def _stage_name(job: SlowJob, finding: SlowFinding) -> str:
    stages = {job.recording.stages.get(rank) for rank in finding.ranks}
    ranks = ranks_label(finding.ranks)
    if len(stages) == 1 and None not in stages:
        return f"Stage {stages.pop()} ({ranks})"
    return f"The work of {ranks}"


# --- the breakdown ---


def _breakdown_section(job: SlowJob) -> Section:
    rows = [
        {"part": row.name, "time": show_ns(int(row.cost_ns)), "share": _percent(row.share)}
        for row in job.breakdown
        if abs(row.share) >= _LEAST_SHOWN_SHARE
    ]
    columns = [text_column("part"), Column("time"), Column("share")]
    return Section([Table(columns, rows, has_header=False)], "Step breakdown")


def _what_if_texts(job: SlowJob) -> Iterator[str]:
    what_if = job.what_if
    if what_if is None:
        return
    before, after = show_ns(int(job.step_ns)), show_ns(int(what_if.step_ns))
    yield f"With {', '.join(what_if.changes)}, a step would take {after} instead of {before}."
    if what_if.unpredicted:
        count = _count(what_if.unpredicted, "communication")
        yield f"{count} of unknown kind or size: the recorded time is kept."


# --- what was read ---


def _provenance(job: SlowJob) -> Iterator[str]:
    recording = job.recording
    replay = "the replay matches the recording exactly"
    if job.replay_error_ns:
        replay = f"the replay differs by up to {show_ns(int(job.replay_error_ns))}"
    ranks, steps = len(job.ranks), job.counted_steps
    yield (
        f"{recording.format}: {_count(ranks, 'rank')}, {_count(steps, 'step')}, "
        f"{recording.operation_count:,} operations; {replay}."
    )
    if recording.clocks.offsets_ns and ranks > 1:
        worst = max(recording.clocks.worst_ns, 1e5)
        shifted = any(recording.clocks.offsets_ns.values())
        aligned = "clocks were aligned and agree" if shifted else "clocks agree"
        waits = recording.inferred_waits
        yield f"{aligned} within {show_ns(int(worst))}.".capitalize()
        if waits:
            was = "wait was" if waits == 1 else "waits were"
            yield f"{waits} {was} inferred, because profiles of Gloo do not record waits."
    unusual = int(job.selected.sum()) - steps
    if unusual:
        others = job.recorded_steps_ns[job.selected & ~job.counted]
        yield (
            f"{_count(unusual, 'step')} with other operations than most steps, such as a "
            f"checkpoint or an evaluation: not analysed; {show_ns(int(others.mean()))} per step."
        )
        yield from _checkpoint_texts(job)
    if recording.missing_ranks:
        yield f"No trace of {ranks_label(recording.missing_ranks)} was given."
    if recording.unexplained_gap_ns:
        longest = max(recording.unexplained_gap_ns.values())
        yield (
            f"Streams start late without a recorded cause (up to {show_ns(int(longest))} per rank "
            "and step): savings are lower bounds."
        )
    for text in recording.notes:
        yield f"note: {text}"


def _checkpoint_texts(job: SlowJob) -> Iterator[str]:
    """Which of the steps that are not analysed save a checkpoint, if this is recorded."""
    saved: dict[int, float] = {}
    for (_, step), activities in job.recording.activities.items():
        if job.selected[step] and not job.counted[step] and CHECKPOINT in activities:
            saved[step] = max(saved.get(step, 0.0), activities[CHECKPOINT])
    if saved:
        names = rank_list([job.groups.graph.steps[step] for step in sorted(saved)], 12)
        longest = show_ns(int(max(saved.values())))
        yield f"Steps that save a checkpoint: {names} (up to {longest} on a rank)."


def _percent(share: float) -> str:
    """A share without ``-0%``, which a small negative number would give."""
    return f"{round(share * 100) / 100 + 0.0:.0%}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
