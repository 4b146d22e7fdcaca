"""A bar on standard error for work that takes more than two seconds; nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from distsim.cli import console

#: Work shorter than this shows no bar.
PATIENCE_S = 2.0
T = TypeVar("T")


def watched(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar that goes away when all are done."""
    if not console.coloured(sys.stderr):
        yield from items
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=len(items))
    start = Timer(PATIENCE_S, bar.start)
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
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that says how many of how many are done, shown as a bar with the time left."""
    if not console.coloured(sys.stderr):
        yield lambda done, whole: None
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    start = Timer(PATIENCE_S, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
    finally:
        start.cancel()
        bar.stop()


@contextmanager
def phases(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done, beside the time it has taken, for work whose length nobody knows."""
    if not shown or not console.coloured(sys.stderr):
        yield lambda _: None
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    line = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    )
    task = line.add_task("", total=None)
    start = Timer(PATIENCE_S, line.start)
    start.daemon = True
    start.start()
    try:
        yield lambda words: line.update(task, description=words)
    finally:
        start.cancel()
        line.stop()
