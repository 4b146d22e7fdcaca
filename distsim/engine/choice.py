"""Which engine may run a program: the fast one where no order of arrival decides anything, else the time-ordered one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from distsim.cost import CostModel
from distsim.ops.table import OPS
from distsim.profiles import Profile
from distsim.program.records import Code, Program, at

_MESSAGES = ("p2p", "batch")
_CUTS = ("input_splits", "output_splits", "inputs", "outputs")


def why_not_fast(program: Program, profile: Profile, cost: CostModel) -> str | None:
    """The reason why the fast engine can't run this program, None when it can."""
    if profile.device and any(program.options.get(name) for name in ("blocking_wait", "launch_order_implicit", "one_queue")):
        return "an option of nccl needs the explicit rules"
    if any(fault.kind != "slow" for fault in program.faults):
        return "a rank fails"
    if cost.cluster.shared_links:
        return "links are shared"
    return next((why for code in program.codes if (why := _of_code(code, program, profile)) is not None), None)


def _of_code(code: Code, program: Program, profile: Profile) -> str | None:
    if any(np.any(np.asarray(port.peer) < 0) for port in code.ports):
        return "a receive is open to any source"
    if profile.lock and _mixes(code):
        return "the process's one lock decides who comes first"
    if profile.dropped != "nothing" and next(_dropped(code), None) is not None:
        return "a request is dropped"
    judged: set[int] = set()
    for call in code.calls:
        row = OPS[call.op]
        if id(call) in judged:
            continue
        judged.add(id(call))
        if any(part.invalid for part in (call, *call.parts)):
            return "a call is invalid"
        if row.pairwise and any(len(call.fields.get(name) or ()) > 1 for name in _CUTS):
            return f"{call.op} with parts of unlike size is judged pair by pair"
        if row.kind == "group" or call.op in ("exit", "fail", "monitored_barrier"):
            return f"{call.op} needs the explicit rules"
        if row.kind in ("p2p", "collective") and profile.refuse(program.resolve(code.ranks[0], call)) is not None:
            return "the back end refuses a call"
    return _queue_fills(code, profile)


def drops_requests(program: Program, profile: Profile) -> bool:
    """A request for a message is dropped, and the back end does not leave it alone."""
    return profile.dropped != "nothing" and any(next(_dropped(code), None) is not None for code in program.codes)


def _dropped(code: Code) -> Iterator[int]:
    """Positions of messages that nobody waits for."""
    waited = {p - d for p, call in enumerate(code.calls) for d in call.waits}
    for position, call in enumerate(code.calls):
        if call.is_async and OPS[call.op].kind in _MESSAGES and position not in waited:
            yield position


def _mixes(code: Code) -> bool:
    """Does an asynchronous collective run beside messages, or beside a wait for one?"""
    ends = {p - d: p for p, call in enumerate(code.calls) for d in call.waits}
    until = -1  # an asynchronous collective is open before this position
    for position, call in enumerate(code.calls):
        kind = OPS[call.op].kind
        targets = (OPS[code.calls[position - d].op].kind for d in call.waits)
        if kind == "collective" and call.is_async:
            until = max(until, ends.get(position, len(code.calls)))
        elif position <= until and (kind in _MESSAGES or any(target in _MESSAGES for target in targets)):
            return True
    return False


def _queue_fills(code: Code, profile: Profile) -> str | None:
    """Do more collectives of a group stand open at once than its workers run?"""
    if not any(call.is_async and OPS[call.op].kind == "collective" for call in code.calls):
        return None
    ends = {p - d: p for p, call in enumerate(code.calls) for d in call.waits}
    opened: dict[Hashable, list[int]] = {}
    for position, call in enumerate(code.calls):
        if OPS[call.op].kind != "collective":
            continue
        group = at(code.groups[call.group], 0)
        workers = profile.workers(code.ranks[0], group)
        if workers is None:
            continue
        still = [end for end in opened.get(workers.key, ()) if end > position]
        if len(still) >= workers.width:
            return "a queue of collectives fills up"
        opened[workers.key] = [*still, ends.get(position, len(code.calls))] if call.is_async else still
    return None
