"""What a server streams: whether it keeps the rules of order, and comes as it is made."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any, Final

from ..protocol.state_machine import TERMINAL
from .answers import Failed, Skipped, members, parsed, quoted

DONE: Final = "[DONE]"

_LONG_ENOUGH: Final = 1.0  # seconds, before which pace says nothing
_AT_ONCE: Final = 0.1  # the part of its time in which a stream comes that was held back until its end
_LATE, _MANY_DELTAS = 0.5, 3  # seconds until the first event, and deltas with it, of a stream that is cut into blocks


@dataclass(slots=True)
class Stream:
    """A stream, as far as it has come."""

    began: float = field(default_factory=time.monotonic)
    encoding: str = "identity"
    events: list[tuple[str, str, float]] = field(default_factory=list)  # name, data, when it had arrived
    problem: str = ""  # why it came no further, in a sentence
    _rest: bytes = b""

    def feed(self, piece: bytes) -> None:
        """Takes in what has just come."""
        now = time.monotonic()
        *blocks, self._rest = re.split(rb"\r?\n\r?\n", self._rest + piece)
        for block in blocks:
            text = block.decode(errors="replace").replace("\r", "")
            name, data = ("\n".join(re.findall(f"^{line}: ?(.*)", text, re.MULTILINE)) for line in ("event", "data"))
            if data:  # else a comment
                self.events.append((name, data, now))

    def last(self) -> dict[str, Any]:
        """Its terminal event; raises `Failed` if a rule of order is broken."""
        last: dict[str, Any] = {}
        for number, (name, data, _) in enumerate(self.events):
            event, ended = parsed(data), last.get("type") in TERMINAL
            if ended and data == DONE and number == len(self.events) - 1:
                if self.problem:
                    raise Failed(f"The stream does not end after [DONE], so that clients wait on. {self.problem}")
                return last
            kind, sequence = event.get("type"), event.get("sequence_number")
            if kind == "error":
                raise Failed(f"The stream has an error: {quoted(members(event.get('error')).get('message'))}")
            if ended or kind != name or sequence != number or (number == 0 and name != "response.created"):
                raise Failed(
                    f"Event {number} has the name {quoted(name or data)}, in its JSON the type {quoted(kind)} and the "
                    f"sequence_number {quoted(sequence)}: on the way, events were lost, doubled, rewritten or put into "
                    "another order."
                )
            last = event
        problem = self.problem or "The stream ended early."
        if not self.events:
            raise Failed(f"{problem} Not one event came: is the stream held back?")
        if last.get("type") in TERMINAL:
            raise Failed(f"{problem} [DONE] is missing after {last['type']}.")
        raise Failed(
            f"{problem} No terminal event such as response.completed had come: is something on the way, or a worker, "
            "ended after a certain time?"
        )

    def pace(self, latency: float) -> str:
        """When its events came; raises `Failed` if they were held back for longer than the network takes."""
        if not self.events:
            raise Skipped("There was no stream to judge by.")
        packed = f" It is compressed ({quoted(self.encoding)})." if self.encoding != "identity" else ""
        first, last = self.events[0][2], self.events[-1][2]
        began = min(self.began + latency, first)
        if last - began < _LONG_ENOUGH:
            raise Skipped(f"The stream took {last - began:.1f} s, too little to tell whether it is held back.{packed}")
        with_first = [name for name, _, moment in self.events if moment == first]
        deltas = sum(name.endswith(".delta") for name in with_first)
        seen = f"the first event came after {first - began:.1f} s, the last {last - first:.1f} s later"
        if last - first < _AT_ONCE * (last - began) or (first - began >= _LATE and deltas >= _MANY_DELTAS):
            raise Failed(
                f"The events are held back: {seen}, and {len(with_first)} at once.{packed} No proxy may buffer streams "
                "(nginx: proxy_buffering off), no middleware may collect or compress them, no server hold back what is "
                "sent."
            )
        return f"The events come as they are made: {seen}.{packed}"
