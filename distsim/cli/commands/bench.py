"""`distsim bench`: what communication costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

Ranks = Annotated[str, typer.Option("--ranks", metavar="N,…", help="Numbers of processes.")]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--sizes", metavar="SIZE,…", help="As 4KiB,1MiB; left out: 4 KiB to 16 MiB by fours."
    ),
]
Ops = Annotated[
    str | None,
    typer.Option(
        "--ops", metavar="OP,…", help="As send,all_reduce; left out: messages and every collective."
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=10000, help="Samples of each.")]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="It is broken off after so long.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="F.json", help="Write the measurement, for `distsim calibrate`."
    ),
]


def command(
    ranks: Ranks = "2,4",
    sizes: Sizes = None,
    ops: Ops = None,
    rounds: Rounds = 15,
    timeout: Timeout = "10 min",
    output: Output = None,
    format: FormatOption = OutputFormat.text,
) -> None:
    """Measure this machine with Gloo over loopback: messages and every collective.

    \b
    Example: distsim bench --out here.json
    Example: distsim bench --ranks 2 --sizes 4KiB,1MiB --ops send,all_reduce
    """
    from distsim.output.text.calibration_tables import bench_text
    from distsim.real.bench.measurement import BENCH_OPS, BENCH_SIZES, bench_to_json, run_bench

    found = run_bench(
        [_parse_rank_count(word) for word in ranks.split(",")],
        BENCH_SIZES if sizes is None else [_parse_size(word) for word in sizes.split(",")],
        BENCH_OPS if ops is None else [word.strip() for word in ops.split(",")],
        rounds=rounds,
        timeout_s=_duration_s(timeout),
    )
    if output is not None:
        console.write_file(output, bench_to_json(found))
        console.note(f"wrote {output}")
    console.out(bench_to_json(found) if format is OutputFormat.json else bench_text(found))


def _parse_rank_count(word: str) -> int:
    from distsim.common.errors import UsageError

    if not word.strip().isdigit():
        raise UsageError(f"expected numbers of ranks, found `{word}`", "as --ranks 2,4")
    return int(word)


def _parse_size(word: str) -> int:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_size_bytes

    try:
        size = parse_size_bytes(word.strip())
    except ValueError as error:
        raise UsageError(f"--sizes: {error}", "as --sizes 4KiB,1MiB") from None
    if size < 1024:
        raise UsageError(
            f"--sizes: {word} is below 1 KiB", "smaller messages cost what 1 KiB costs"
        )
    return size


def _duration_s(text: str) -> float:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_timeout_ns

    try:
        return parse_timeout_ns(text) / 1e9
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "as --timeout '5 min'") from None
