"""What is over when a rank's streams come to a call: the order that a program with several streams states, without a clock.

A stream runs its work in order. It knows besides what it was told to wait for: requests (`wait`), other streams (`wait_stream`), all of
the device (`synchronize`). What a stream does not know to be over may still run.
"""

from __future__ import annotations

from distsim.program.records import Code, CodeCall

#: Who works: a stream by its name ("" is the default one), or a request by the position of its call.
Actor = str | int


def uses_streams(code: Code) -> bool:
    """Does any call name a stream?"""
    return any(call.stream or call.op == "wait_stream" for call in code.distinct_calls(parts=False))


class StreamOrder:
    """Told every call of a rank in order, it says which earlier work is over for one that follows."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Actor, int]] = {"": {}}  # stream -> the newest position of each actor that is over for it
        self._before: dict[int, dict[Actor, int]] = {}  # request -> what was over when it was made

    def over(self, stream: str, actor: Actor, position: int) -> bool:
        """Is an actor's work at a position over before what the stream does next?"""
        return actor == stream or self._known.get(stream, {}).get(actor, -1) >= position

    def opened(self, stream: str, position: int) -> None:
        """A call made a request: it starts after what the stream holds."""
        self._before[position] = {**self._known.setdefault(stream, {}), stream: position}

    def told(self, position: int, call: CodeCall) -> None:
        """A stream learns by this call that other work is over."""
        stream = call.stream
        self._known.setdefault(stream, {})
        for distance in call.waits:
            self.joined(stream, position - distance)
        if call.op == "wait_stream":
            other = str(call.fields.get("stream") or "")
            self._learn(stream, {**self._known.get(other, {}), other: position})
        elif call.op == "synchronize":
            everything: dict[Actor, int] = {request: request for request in self._before}
            everything |= dict.fromkeys(self._known, position)
            for other in self._known:
                self._learn(other, everything)

    def joined(self, stream: str, request: int) -> None:
        """A stream waits for a request."""
        self._learn(stream, {**self._before.get(request, {}), request: request})

    def _learn(self, stream: str, news: dict[Actor, int]) -> None:
        known = self._known.setdefault(stream, {})
        for actor, position in news.items():
            if known.get(actor, -1) < position:
                known[actor] = position
