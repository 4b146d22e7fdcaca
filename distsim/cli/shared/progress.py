"""Progress bars on standard error for work whose length is known.

A bar appears only on a terminal, and only if the work takes longer than `PROGRESS_DELAY_S`.
`console.progress_phases` is for work of unknown length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from distsim.cli.shared import console

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")


def with_progress_bar(items: Sequence[T], description: str) -> Iterator[T]:
    """Yield the items, with a bar that disappears after the last one."""
    if not console.uses_colour(sys.stderr):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=len(items))
    with console.shown_after_delay(bar):
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (items done, items in all) that moves a bar with the remaining time."""
    if not console.uses_colour(sys.stderr):
        yield lambda done, total: None
        return
    bar = _bar_with_remaining_time()
    task = bar.add_task(description, total=None)
    with console.shown_after_delay(bar):
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar_with_remaining_time() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
