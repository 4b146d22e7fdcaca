"""`distsim bench`: what communication costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli import console
from distsim.cli.simulate import Format, FormatOption

Ranks = Annotated[str, typer.Option("--ranks", metavar="N,…", help="Numbers of processes.")]
Sizes = Annotated[str | None, typer.Option("--sizes", metavar="SIZE,…", help="As 4KiB,1MiB; left out: 4 KiB to 16 MiB by fours.")]
Ops = Annotated[
    str | None, typer.Option("--ops", metavar="OP,…", help="As send,all_reduce; left out: messages and every collective.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=10000, help="Samples of each.")]
Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="It is broken off after so long.")]
Output = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="F.json", help="Write the measurement, for `distsim calibrate`.")
]


def command(
    ranks: Ranks = "2,4",
    sizes: Sizes = None,
    ops: Ops = None,
    rounds: Rounds = 15,
    timeout: Timeout = "10 min",
    output: Output = None,
    format: FormatOption = Format.text,
) -> None:
    """Measure this machine with Gloo over loopback: messages and every collective.

    \b
    Example: distsim bench --out here.json
    Example: distsim bench --ranks 2 --sizes 4KiB,1MiB --ops send,all_reduce
    """
    from distsim.bench import OPS_MEASURED, SIZES, bench, to_json
    from distsim.views.benchview import bench_text

    found = bench(
        [_number(word) for word in ranks.split(",")],
        SIZES if sizes is None else [_size(word) for word in sizes.split(",")],
        OPS_MEASURED if ops is None else [word.strip() for word in ops.split(",")],
        rounds=rounds, timeout_s=_duration_s(timeout),
    )  # fmt: skip
    if output is not None:
        console.write_file(output, to_json(found))
        console.note(f"wrote {output}")
    console.out(to_json(found) if format is Format.json else bench_text(found))


def _number(word: str) -> int:
    from distsim.errors import UsageError

    if not word.strip().isdigit():
        raise UsageError(f"expected numbers of ranks, found `{word}`", "as --ranks 2,4")
    return int(word)


def _size(word: str) -> int:
    from distsim.errors import UsageError
    from distsim.units import parse_size_bytes

    try:
        size = parse_size_bytes(word.strip())
    except ValueError as error:
        raise UsageError(f"--sizes: {error}", "as --sizes 4KiB,1MiB") from None
    if size < 1024:
        raise UsageError(f"--sizes: {word} is below 1 KiB", "smaller messages cost what 1 KiB costs")
    return size


def _duration_s(text: str) -> float:
    from distsim.errors import UsageError
    from distsim.units import parse_timeout_ns

    try:
        return parse_timeout_ns(text) / 1e9
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "as --timeout '5 min'") from None
