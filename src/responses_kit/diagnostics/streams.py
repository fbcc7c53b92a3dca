"""Streams of the checked server: order of events, and pace of delivery."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any, Final

from ..protocol.state_machine import TERMINAL_EVENT_TYPES
from .answers import CheckFailed, CheckSkipped, as_object, parse_object, shorten

DONE: Final = "[DONE]"

_MIN_DURATION: Final = 1.0  # seconds; shorter streams are not judged
_BURST_SHARE: Final = 0.1  # share of the duration in which a buffered stream arrives
_MAX_FIRST_EVENT_DELAY, _MIN_BURST_DELTAS = 0.5, 3  # signs of a stream that is buffered in blocks


@dataclass(slots=True)
class Stream:
    """A stream as received so far.

    Attributes:
        started: Time of the request (`time.monotonic`).
        encoding: Content encoding.
        events: Name, data and time of arrival of each event.
        problem: The reason for an interruption, as a sentence.
    """

    started: float = field(default_factory=time.monotonic)
    encoding: str = "identity"
    events: list[tuple[str, str, float]] = field(default_factory=list)
    problem: str = ""
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Parse received bytes."""
        now = time.monotonic()
        *blocks, self._rest = re.split(rb"\r?\n\r?\n", self._rest + chunk)
        for block in blocks:
            text = block.decode(errors="replace").replace("\r", "")
            name, data = ("\n".join(re.findall(f"^{line}: ?(.*)", text, re.MULTILINE)) for line in ("event", "data"))
            if data:  # otherwise a comment
                self.events.append((name, data, now))

    def terminal_event(self) -> dict[str, Any]:
        """Return the terminal event.

        Raises:
            CheckFailed: The events are out of order, or the stream has no legal end.
        """
        last: dict[str, Any] = {}
        for number, (name, data, _) in enumerate(self.events):
            event, ended = parse_object(data), last.get("type") in TERMINAL_EVENT_TYPES
            if ended and data == DONE and number == len(self.events) - 1:
                if self.problem:
                    raise CheckFailed(f"The stream does not end after [DONE], so clients wait for more. {self.problem}")
                return last
            kind, sequence = event.get("type"), event.get("sequence_number")
            if kind == "error":
                raise CheckFailed(
                    f"The stream contains an error: {shorten(as_object(event.get('error')).get('message'))}"
                )
            if ended or kind != name or sequence != number or (number == 0 and name != "response.created"):
                raise CheckFailed(
                    f"Event {number} has the name {shorten(name or data)}, the type {shorten(kind)} and the "
                    f"sequence_number {shorten(sequence)}: events were lost, repeated, changed or reordered in transit."
                )
            last = event
        problem = self.problem or "The stream ended early."
        if not self.events:
            raise CheckFailed(f"{problem} No event arrived; the stream may be buffered.")
        if last.get("type") in TERMINAL_EVENT_TYPES:
            raise CheckFailed(f"{problem} [DONE] is missing after {last['type']}.")
        raise CheckFailed(
            f"{problem} No terminal event such as response.completed arrived; a proxy or worker timeout may have "
            "interrupted it."
        )

    def describe_pace(self, latency: float) -> str:
        """Describe the arrival of the events.

        Args:
            latency: Seconds that the network takes.

        Raises:
            CheckFailed: The events were buffered.
            CheckSkipped: The stream was too short to judge.
        """
        if not self.events:
            raise CheckSkipped("There was no stream to measure.")
        packed = f" It is compressed ({shorten(self.encoding)})." if self.encoding != "identity" else ""
        first, last = self.events[0][2], self.events[-1][2]
        started = min(self.started + latency, first)
        if last - started < _MIN_DURATION:
            raise CheckSkipped(f"The stream took {last - started:.1f} s, too short to detect buffering.{packed}")
        with_first = [name for name, _, moment in self.events if moment == first]
        deltas = sum(name.endswith(".delta") for name in with_first)
        seen = f"the first event arrived after {first - started:.1f} s, the last {last - first:.1f} s later"
        if last - first < _BURST_SHARE * (last - started) or (
            first - started >= _MAX_FIRST_EVENT_DELAY and deltas >= _MIN_BURST_DELTAS
        ):
            raise CheckFailed(
                f"The events are buffered: {seen}, and {len(with_first)} at once.{packed} Turn off buffering in "
                "proxies (nginx: proxy_buffering off), and buffering or compressing middleware and servers."
            )
        return f"The events arrive as they are generated: {seen}.{packed}"
