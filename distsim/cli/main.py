"""From exceptions to exit statuses: 2 bad input, 3 our own fault, 4 the surroundings; a command itself ends with 0 or 1."""

from __future__ import annotations

import gc
import sys

from distsim.cli import console


def main() -> None:
    """Run the command line and end the process with its exit status."""
    from distsim.cli.app import app
    from distsim.errors import DistsimError, InternalError

    try:
        app(prog_name="distsim")
    except InternalError as error:
        sys.exit(_own_fault(error))
    except DistsimError as error:
        console.note(str(error))
        sys.exit(error.exit_code)
    except RecursionError:
        console.note("error: the input is nested too deeply")
        sys.exit(2)
    except Exception as error:
        sys.exit(_own_fault(error))
    finally:
        gc.freeze()  # the process ends: nothing is worth a last round of the collector


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
