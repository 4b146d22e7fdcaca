"""`distsim bench`: measure the time of communication on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat

RanksOption = Annotated[str, typer.Option("--ranks", metavar="N,…", help="Numbers of processes.")]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--sizes", metavar="SIZE,…", help="As 4KiB,1MiB; left out: 4 KiB to 16 MiB by fours."
    ),
]
OpsOption = Annotated[
    str | None,
    typer.Option(
        "--ops", metavar="OP,…", help="As send,all_reduce; left out: messages and every collective."
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=10000, help="Samples of each.")]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="It is broken off after so long.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="F.json", help="Write the measurement, for `distsim calibrate`."
    ),
]


def command(
    ranks: RanksOption = "2,4",
    sizes: SizesOption = None,
    ops: OpsOption = None,
    rounds: RoundsOption = 15,
    timeout: TimeoutOption = "10 min",
    output: OutputOption = None,
    format: FormatOption = OutputFormat.text,
) -> None:
    """Measure this machine with Gloo over loopback: messages and every collective.

    \b
    Example: distsim bench --out here.json
    Example: distsim bench --ranks 2 --sizes 4KiB,1MiB --ops send,all_reduce
    """
    from distsim.output.text.calibration_tables import bench_text
    from distsim.real.bench.measurement import BENCH_OPS, BENCH_SIZES, bench_to_json, run_bench

    measured = run_bench(
        _parse_rank_counts(ranks),
        BENCH_SIZES if sizes is None else _parse_sizes(sizes),
        BENCH_OPS if ops is None else _parse_names(ops),
        rounds=rounds,
        timeout_s=_parse_timeout_s(timeout),
    )
    if output is not None:
        console.write_file(output, bench_to_json(measured))
        console.note(f"wrote {output}")
    if format is OutputFormat.json:
        console.out(bench_to_json(measured))
    else:
        console.out(bench_text(measured))


def _parse_rank_counts(text: str) -> list[int]:
    return [_parse_rank_count(word) for word in text.split(",")]


def _parse_names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _parse_rank_count(word: str) -> int:
    from distsim.common.errors import UsageError

    if not word.strip().isdigit():
        raise UsageError(f"expected numbers of ranks, found `{word}`", "as --ranks 2,4")
    return int(word)


def _parse_sizes(text: str) -> list[int]:
    return [_parse_size(word) for word in text.split(",")]


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


def _parse_timeout_s(text: str) -> float:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_timeout_ns

    try:
        return parse_timeout_ns(text) / 1e9
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "as --timeout '5 min'") from None
