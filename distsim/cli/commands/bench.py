"""`distsim bench`: measure the time of communication on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat

RanksOption = Annotated[
    str, typer.Option("--ranks", metavar="N,…", help="Numbers of ranks to measure with.")
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="SIZE,…",
        help="Message sizes, such as 4KiB,1MiB. [default: 4 KiB, 16 KiB, … 16 MiB]",
    ),
]
OpsOption = Annotated[
    str | None,
    typer.Option(
        "--ops",
        metavar="OP,…",
        help="Operations, such as send,all_reduce. [default: send and all collectives]",
    ),
]
SamplesOption = Annotated[
    int,
    typer.Option(
        "--samples", metavar="N", min=1, max=10000, help="Number of samples per operation and size."
    ),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Stop after this long.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F.json",
        help="Write the measurement to a file for `distsim calibrate`.",
    ),
]


def command(
    ranks: RanksOption = "2,4",
    sizes: SizesOption = None,
    ops: OpsOption = None,
    samples: SamplesOption = 15,
    timeout: TimeoutOption = "10 min",
    output: OutputOption = None,
    format: FormatOption = OutputFormat.text,
) -> None:
    """Measure the cost of messages and collectives on this machine (Gloo over loopback).

    \b
    Example: distsim bench --output here.json
    Example: distsim bench --ranks 2 --sizes 4KiB,1MiB --ops send,all_reduce
    """
    from distsim.cli.shared.trace_output import check_output_folder
    from distsim.output.text.calibration_tables import bench_text
    from distsim.real.bench.measurement import BENCH_OPS, BENCH_SIZES, bench_to_json, run_bench

    if output is not None:
        check_output_folder(output)
    measured = run_bench(
        _parse_rank_counts(ranks),
        BENCH_SIZES if sizes is None else _parse_sizes(sizes),
        BENCH_OPS if ops is None else _parse_names(ops),
        rounds=samples,
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
        raise UsageError(f"expected numbers of ranks, found `{word}`", "for example --ranks 2,4")
    return int(word)


def _parse_sizes(text: str) -> list[int]:
    return [_parse_size(word) for word in text.split(",")]


def _parse_size(word: str) -> int:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_size_bytes

    try:
        size = parse_size_bytes(word.strip())
    except ValueError as error:
        raise UsageError(f"--sizes: {error}", "for example --sizes 4KiB,1MiB") from None
    if size < 1024:
        raise UsageError(
            f"--sizes: {word} is below 1 KiB", "use 1 KiB: smaller messages cost the same"
        )
    return size


def _parse_timeout_s(text: str) -> float:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_timeout_ns

    try:
        return parse_timeout_ns(text) / 1e9
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "for example --timeout '5 min'") from None
