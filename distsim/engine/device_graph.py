"""The device's side of the fast nccl engine: launches that wait for each other, and what they end at."""

from __future__ import annotations

from distsim.cost import CostModel
from distsim.engine.device_calls import BATCH, GROUP, WORK
from distsim.engine.device_parts import Lane, Meeting, Node, Sent
from distsim.engine.flat import Disagree
from distsim.engine.record import Columns
from distsim.ops.records import Group
from distsim.ops.table import OPS
from distsim.profiles import Profile
from distsim.program.records import CodeCall, Program


class Graph:
    """Starts launches whose turn has come, and writes down when their rows start, meet and finish."""

    def __init__(self, program: Program, profile: Profile, cost: CostModel, columns: Columns) -> None:
        self.program, self.profile, self.cost, self.columns = program, profile, cost, columns

    def go(self, node: Node) -> None:
        """A launch starts; whatever ends because of it lets others start."""
        todo = [node]
        started = self.columns.started
        while todo:
            node = todo.pop()
            kind = node.act[0]
            if kind == WORK:
                started[node.row] = node.ready
                self._ended(node, node.ready + node.act[1], todo)
            elif kind == GROUP:
                self._arrive(node, todo)
            else:
                if kind == BATCH:
                    started[node.row] = node.ready
                node.parts = len(node.act[1])
                for sends, row, lane, nbytes, signature in node.act[1]:
                    if sends:
                        self._send(lane, Sent(node, row, nbytes, signature, node.ready), todo)
                    else:
                        self._receive(lane, node, row, signature, todo)

    def _ended(self, node: Node, end: int, todo: list[Node]) -> None:
        node.end = self.columns.finished[node.row] = end
        for after in node.succ:
            if end > after.ready:
                after.ready = end
            after.pending -= 1
            if not after.pending:
                todo.append(after)
        node.succ = []
        if node.waiter is not None:
            node.waiter.at(end)

    def _part_ended(self, node: Node, row: int, end: int, todo: list[Node]) -> None:
        self.columns.finished[row] = end
        node.parts -= 1
        node.latest = max(node.latest, end)
        if not node.parts:
            self._ended(node, node.latest, todo)

    def _arrive(self, node: Node, todo: list[Node]) -> None:
        """A member has come to its collective; the last one fixes the time for all."""
        _, comm, number, call, signature, rank = node.act
        meeting = comm.meetings.get(number)
        if meeting is None:
            meeting = comm.meetings[number] = Meeting(signature, self._price(call, comm.group, rank))
        elif meeting.signature != signature:
            raise Disagree
        meeting.came.append((rank, node))
        meeting.latest = max(meeting.latest, node.ready)
        if len(meeting.came) < len(comm.members):
            return
        del comm.meetings[number]
        first = min(other.row for _, other in meeting.came)
        for _, other in meeting.came:
            self.columns.match[other.row] = first
            self.columns.started[other.row] = meeting.latest
            self._ended(other, meeting.latest + meeting.price, todo)

    def _price(self, call: CodeCall, group: Group, rank: int) -> int:
        plain = self.program.resolve(rank, call)
        return self.cost.collective_ns(OPS[call.op], group.ranks, OPS[call.op].nbytes(plain), plain.root)

    # --- messages ---
    def _send(self, lane: Lane, sent: Sent, todo: list[Node]) -> None:
        if self.profile.credit(sent.nbytes, 0, self.program.options):
            if lane.stalled is not None:
                raise Disagree
            self._run_ahead(lane, sent, todo)
        if lane.recvs:
            self._pair(lane, sent, *lane.recvs.popleft(), todo)
        else:
            lane.sends.append(sent)

    def _receive(self, lane: Lane, node: Node, row: int, signature: int, todo: list[Node]) -> None:
        if lane.sends:
            self._pair(lane, lane.sends.popleft(), node, row, signature, node.ready, todo)
        else:
            lane.recvs.append((node, row, signature, node.ready))

    def _run_ahead(self, lane: Lane, sent: Sent, todo: list[Node]) -> None:
        """A small message leaves as soon as the buffers have room: those before it that were not taken by then fill them."""
        leaves, credit, options = sent.ready, self.profile.credit, self.program.options
        while lane.ahead and -1 < lane.ahead[0].met <= leaves:
            lane.outstanding -= lane.ahead.popleft().nbytes
        still = lane.outstanding
        for other in lane.ahead:
            if credit(sent.nbytes, still, options):
                break
            if other.met < 0:
                lane.stalled = sent
                return
            still -= other.nbytes
            leaves = max(leaves, other.met)
        lane.ahead.append(sent)
        lane.outstanding += sent.nbytes
        sent.left = self.columns.started[sent.row] = leaves
        self._part_ended(sent.node, sent.row, leaves, todo)

    def _pair(self, lane: Lane, sent: Sent, node: Node, row: int, signature: int, came: int, todo: list[Node]) -> None:
        """A message and its receive have both come."""
        if sent.signature != signature or (lane.stalled is sent):
            raise Disagree
        meets = max(sent.ready, came)
        columns, price = self.columns, lane.price[sent.nbytes]
        columns.match[sent.row] = columns.match[row] = min(sent.row, row)
        columns.started[row] = meets
        if sent.left < 0:
            columns.started[sent.row] = meets
            self._part_ended(sent.node, sent.row, meets + price, todo)
            self._part_ended(node, row, meets + price, todo)
            return
        sent.met = meets
        self._part_ended(node, row, max(meets, sent.left + price), todo)
        if lane.stalled is not None:
            stalled, lane.stalled = lane.stalled, None
            self._run_ahead(lane, stalled, todo)
