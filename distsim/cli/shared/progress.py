"""A bar on standard error for work that takes more than two seconds; nothing where there is no
terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from distsim.cli.shared import console

T = TypeVar("T")


def with_progress_bar(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar that goes away when all are done."""
    if not console.uses_colour(sys.stderr):
        yield from items
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=len(items))
    start = Timer(console.PROGRESS_DELAY_S, bar.start)
    start.daemon = True
    start.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        start.cancel()
        bar.stop()


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that says how many of how many are done, shown as a bar with the time
    left.
    """
    if not console.uses_colour(sys.stderr):
        yield lambda done, whole: None
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    start = Timer(console.PROGRESS_DELAY_S, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
    finally:
        start.cancel()
        bar.stop()
