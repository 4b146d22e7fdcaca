"""Values that ranks and the hub exchange, and the list of their messages.

A rank has three kinds of connections to the hub. Its ``out`` connection carries everything that
the rank reports, from all threads, in order. Each thread that waits has a reply connection
(``line``). One connection (``notices``) carries messages that the hub sends without a
request. The first message of each connection begins with the secret of the capture
(`distsim.script_capture.protocol.wire.HubAddress`).

Messages from a rank (each a JSON list whose first element is the verb):

=============  ====================================================================
``out``        first message of the out connection: process id
``line``       first message of a reply connection: process id, token, thread, descriptor
``notices``    first message of the notice connection: process id, thread, descriptor
``ask``        wraps another message whose sender waits for a reply: token of its line
``rank``       this process is a rank of the world
``site``       defines the number of a call site
``group``      defines the number of a process group
``template``   defines the number of a call that the script will make repeatedly
``call``       a posted call, in full
``repeat``     a posted call, by the number of its template
``wait``       a wait for a call, whose reply is the call's result
``waited``     a wait for calls that needed no reply
``poll``       asks whether a call is done
``dropped``    a request that the script can no longer wait for
``future``     a future was requested for a call: send a notice when the call is done
``read``       a result in shared memory has been copied
``store``      an operation on the key-value store
``meet``       a collective start-up call (init_process_group), which needs all ranks
``event``      something else that the rank did (new_group, compute, a changed buffer, ...)
``streams``    what CUDA streams waited for since the last call, and the current stream
``thread``     the thread that made the messages from here on
``end``        how the process ends
``killed``     a signal ended a process that this process had started
``heard``      a notice has been handled
``threads``    reply to the notice ``threads``: threads without user code
=============  ====================================================================

Messages from the hub: ``ok``, ``result``, ``raise`` and ``not yet`` are replies. Notices are
``done`` (a call with a future is done), ``threads`` (list idle threads) and ``held`` (report the
calls that have not been sent yet; handling any notice does that).
"""

from __future__ import annotations

import signal
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

#: How the keys begin by which a TCPStore waits for its server and for its workers.
SERVER_KEY_PREFIX: Final = "the server of "
WORKERS_KEY_PREFIX: Final = "all "
#: Kinds of reports of values about random states (`distsim.script_capture.hub.state.ValueReport`).
DROPOUT_REPORT: Final = "dropout"
MODEL_GROUP_REPORT: Final = "model group"
#: The kind of a report of two uses of one tensor that no wait orders.
RACE_REPORT: Final = "race"


class CallOrigin(NamedTuple):
    """A place in the user's own files.

    ``via`` is the library frame in between ("" where the script calls torch directly), followed by
    the forward line that a backward pass is for.
    """

    file: str
    line: int
    function: str
    via: str


NO_CALL_SITE: Final = CallOrigin("", 0, "", "")
#: Introduces the forward line in `CallOrigin.via`.
BACKWARD_PREFIX: Final = "backward of "


class ProcessExit(NamedTuple):
    """How a process ended: ``how`` is ended, raised, exited or killed.

    ``refused`` is a finding's code if torch rejected an argument of a call, else "".
    """

    how: str
    code: int = 0
    text: str = ""
    place: CallOrigin = NO_CALL_SITE
    trace: str = ""
    refused: str = ""


def exit_of_status(code: int) -> ProcessExit:
    """The exit of a process that reported nothing itself.

    ``code`` is its exit status, or the negative number of the signal that ended it.
    """
    if code < 0:
        with suppress(ValueError):
            return ProcessExit("killed", code, signal.Signals(-code).name)
        return ProcessExit("killed", code, f"signal {-code}")
    return ProcessExit("exited" if code else "ended", code)


def timeout_in_ns(timeout: timedelta | None) -> int | None:
    """A timeout in ns; None stays None."""
    return None if timeout is None else round(timeout.total_seconds() * 1e9)
