"""Report each Python process of a captured command to `distsim capture`, before it runs.

Python imports this module when it starts, if its folder is in PYTHONPATH. The process sends its
command line, folder and environment, and waits for the answer: it runs, or it exits because capture
has run the program itself. See `distsim.script_capture.launch.command_hook`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module

#: The variable with the name of the socket of `distsim capture`.
SOCKET_VARIABLE = "DISTSIM_CAPTURE_COMMAND"


def _exit_status(address: str) -> int | None:
    """The status with which to exit at once; None if this process shall run."""
    question = {"words": sys.orig_argv, "folder": os.getcwd(), "environment": dict(os.environ)}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + address)
    except OSError:  # capture has ended
        return None
    connection.sendall(json.dumps(question).encode() + b"\n")
    answer = connection.makefile("r").readline()
    if not answer:  # capture was killed
        return 1
    status: int | None = json.loads(answer)
    return status


def _import_replaced_module() -> None:
    """Import the `sitecustomize` that this one hides, if there is one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    own = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ImportError:
        # Python expects the module that it is importing to be there.
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    _address = os.environ.get(SOCKET_VARIABLE)
    if _address:
        _status = _exit_status(_address)
        if _status is not None:
            sys.stderr.flush()
            os._exit(_status)
    _import_replaced_module()
