"""From exceptions to exit statuses: 2 bad input, 3 our own fault, 4 the surroundings; a command itself ends with 0 or 1."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from distsim.cli import console, process

if TYPE_CHECKING:
    from distsim.errors import DistsimError

#: What a process ends with that Ctrl-C has ended.
INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        process.ready_streams()
        if not {"--real", "bench", "capture"} & set(sys.argv[1:]):  # those start processes, which take what memory they need
            process.end_on_interrupt()
            process.bound_memory()
            gc.set_threshold(100_000, 50, 100)  # modules and models are made by the ten thousand, and all live on
        status = _status()
    except KeyboardInterrupt:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # a large heap takes seconds to tear down
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
    gc.freeze()  # the process ends: nothing is worth a last round of the collector
    sys.exit(status)


def _status() -> str | int | None:
    """Run the command; its status, or that of what it failed with."""
    from distsim.cli.app import application
    from distsim.errors import OUT_OF_BOUNDS, DistsimError, out_of_bounds

    try:
        words = sys.argv[2:] if sys.argv[1:2] == ["--debug"] else sys.argv[1:]
        application(words)(prog_name="distsim", terminal_width=min(max(console.columns() or 80, 40), 200) - 2)
    except SystemExit as end:
        return end.code  # typer's own
    except DistsimError as error:
        return _told(error)
    except OUT_OF_BOUNDS as error:
        return _told(out_of_bounds(error, _inputs()))
    except OSError as error:
        return _surroundings(error)
    except Exception as error:
        return _own_fault(error)
    return 0


def _told(error: DistsimError) -> int:
    from distsim.errors import InternalError

    if isinstance(error, InternalError):
        return _own_fault(error)
    console.note(error.laid_out(console.note_columns()))
    return error.exit_code


def _inputs() -> str:
    """The files that the command was given, to say where."""
    found = [word for word in sys.argv[2:] if not word.startswith("-") and os.path.isfile(word)]
    return ", ".join(found)


def _surroundings(error: OSError) -> int:
    """Say what the machine refused; what is still to be written to standard output is lost."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    where = f": {error.filename}" if error.filename else ""
    console.note(
        f"error: the system says: {error.strerror or error}{where}\n  help: see that files and streams are there and take data"
    )
    return 4


def _own_fault(error: Exception) -> int:
    """Say that distsim is wrong, not the user; the traceback only when it was asked for."""
    console.note(f"distsim failed, and it is not your fault: {type(error).__name__}: {error}")
    if "--debug" in sys.argv[1:2]:
        import traceback

        console.note("".join(traceback.format_exception(error)).rstrip())
    else:
        console.note("help: `distsim --debug …` shows where; please report that with your scenario")
    return 3


__all__ = ["main"]
