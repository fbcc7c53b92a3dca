"""A backend on strings: the request says what it shall do, and a second port tells what became of it.

The last user text is a script, a JSON list of moves that are played in order:

=====================================  =====================================================================
move                                   what the puppet does
=====================================  =====================================================================
`"text"`                               yields the text
`{"run": name}`                        keeps a record under this name: started, turn, marks, ended
`{"gate": name}`                       waits until the test opens the gate
`{"mark": name}`                       notes that it came this far
`{"forever": text, "every": seconds}`  yields the text again and again
`{"often": text, "times": n}`          yields the text n times
`{"block": seconds}`                   sleeps and heeds nothing, not even a cancellation (threads only)
`{"raise": message}`                   raises RuntimeError
`{"refuse": class, "message": m, …}`   raises that class of `responses_kit.errors`
`{"full": gate}`                       does nothing, but once the test has opened the gate no such turn is admitted
`{"junk": value}`                      yields the value as it is, which no backend may
`{"Class": {…}}`                       yields that class of `responses_kit.outputs`
`{"rounds": [moves, moves, …]}`        plays those of the round: the first until hosted tools have answered, …
`{"tell": null}`                       yields what it was given, as JSON; see `describe`
=====================================  =====================================================================

Any other text is answered with what the puppet was given, as if told to tell. A text of more than 10,000 characters
is answered with its length.

A token is a word, wherever it stands. The window of "puppet-small" is `WINDOW` of them.

The side channel is a port of its own rather than routes of the host's: it works alike for every host, and it
works while the host is broken.
"""

from __future__ import annotations

import json
import resource
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

import anyio

from responses_kit import Backend, Model, Turn, errors, outputs

CAN_DO_ALL = {"vision": True, "tools": True, "reasoning": True, "structured_output": True, "logprobs": True}
LONGEST_WAIT = 30.0
WINDOW = 100


class Strings:
    """What tests and puppets share: gates that tests open, records that puppets keep, a clock that tests turn."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open: set[str] = set()
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.ahead = 0.0

    def note(self, run: str | None, what: str, **more: Any) -> None:
        if run is not None:
            with self.changed:
                self.runs.setdefault(run, []).append({"what": what, "at": time.monotonic(), **more})
                self.changed.notify_all()

    def clock(self) -> float:
        """Seconds, monotonic, and as far ahead as tests have turned it."""
        return time.monotonic() + self.ahead

    def pull(self, gate: str) -> None:
        with self.changed:
            self.open.add(gate)
            self.changed.notify_all()

    def is_open(self, gate: str) -> bool:
        with self.changed:
            return gate in self.open

    def wait(self, run: str, what: str, timeout: float) -> list[dict[str, Any]] | None:
        """The record once it holds `what`; None when that does not come in time."""

        def there() -> bool:
            return any(note["what"] == what for note in self.runs.get(run, []))

        with self.changed:
            return list(self.runs[run]) if self.changed.wait_for(there, timeout) else None

    def record(self, run: str) -> list[dict[str, Any]]:
        with self.changed:
            return list(self.runs.get(run, []))


class _Control(socketserver.StreamRequestHandler):
    strings: Strings

    def handle(self) -> None:
        order = json.loads(self.rfile.readline())
        answer: Any = None
        match order.pop("do"):
            case "open":
                self.strings.pull(order["gate"])
            case "wait":
                answer = self.strings.wait(**order)
            case "later":
                self.strings.ahead += order["seconds"]
            case "peak":
                answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            case "record":
                answer = self.strings.record(**order)
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _ControlServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


def serve_control(strings: Strings) -> int:
    """Opens the side channel, one JSON line in and one out a connection, and returns its port."""
    handler = type("Enforcer", (_Control,), {"strings": strings})
    server = _ControlServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()
    return server.server_address[1]


def describe(turn: Turn) -> dict[str, Any]:
    """What a backend is given, as JSON."""
    return {
        "model": turn.model,
        "items": [item.model_dump(mode="json", by_alias=True) for item in turn.items],
        "messages": turn.messages(),
        "instructions": turn.instructions,
        "tools": [tool.model_dump(mode="json") for tool in turn.tools],
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "max_output_tokens": turn.max_output_tokens,
        "tool_choice": turn.tool_choice if isinstance(turn.tool_choice, str) else turn.tool_choice.model_dump(),
        "callable_tools": [tool.name for tool in turn.callable_tools],
        "max_tool_calls": turn.max_tool_calls,
        "round": turn.round,
        "text_format": turn.text_format.model_dump(mode="json", by_alias=True),
        "metadata": dict(turn.metadata),
        "owner": turn.owner,
        "response_id": turn.response_id,
    }


class _Wait:
    """A step that takes time. Asks the turn now and then whether anybody still waits for the answer."""

    def __init__(self, turn: Turn, strings: Strings, gate: str | None, seconds: float) -> None:
        self.turn, self.strings, self.gate = turn, strings, gate
        self.until = time.monotonic() + (seconds if gate is None else LONGEST_WAIT)

    def over(self) -> bool:
        if self.gate is not None and self.strings.is_open(self.gate):
            return True
        return time.monotonic() >= self.until

    def in_thread(self) -> bool:
        """Waits in a worker thread; False where the turn was cancelled meanwhile."""
        while not self.over():
            if self.turn.cancelled:
                return False
            time.sleep(0.005)
        return True

    async def on_loop(self) -> None:
        while not self.over():  # noqa: ASYNC110  # the gate is opened in another thread
            await anyio.sleep(0.005)


class _Watched:
    """Notes in the run's record when a generator began and how it ended."""

    def __init__(self, strings: Strings, run: str | None, turn: Turn) -> None:
        self.strings, self.run, self.turn = strings, run, turn

    def __enter__(self) -> None:
        self.strings.note(self.run, "started", turn=describe(self.turn))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.strings.note(self.run, "ended", how=kind.__name__ if kind else "returned", cancelled=self.turn.cancelled)


EXAMPLES: dict[str, list[Any]] = {
    "Describe a local model service in one sentence.": [
        "A local model service is a resident interface layer that discovers, manages and calls models on the "
        "user's own device.",
        {"Usage": {"input_tokens": 28, "output_tokens": 31}},
    ],
    "Describe a local model service in a few words.": [
        "A local model ",
        "service is a resident interface layer.",
        {"Usage": {"input_tokens": 28, "output_tokens": 12}},
    ],
    "What is the weather in Hangzhou?": [
        {"ToolCall": {"name": "get_weather", "arguments": '{"city":"Hangzhou"}'}},
        {"Usage": {"input_tokens": 74, "output_tokens": 18}},
    ],
}
"""What "qwen3:14b-q4_k_m", which the examples of LMSP's draft ask, is asked there, and answers."""


def _script(turn: Turn) -> list[Any] | None:
    if turn.model == "qwen3:14b-q4_k_m":
        last = turn.items[-1]
        return [last.output] if last.type == "function_call_output" else EXAMPLES[turn.text]
    if not turn.text.startswith("["):
        return None
    try:
        moves = json.loads(turn.text)
    except ValueError:
        return None
    return moves if isinstance(moves, list) else None


class Puppet(Backend):
    """What the puppets have in common; the subclass says where they move."""

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self.models = [
            Model("puppet", **CAN_DO_ALL),
            Model("puppet-sync", **CAN_DO_ALL),
            Model("puppet-plain", **CAN_DO_ALL),
            Model("puppet-text", temperature=0.25, top_p=0.5, owned_by="acme"),
            Model("puppet-forgetful", conversations=False, tools=True, structured_output=True),
            Model("puppet-small", context_window=WINDOW, **CAN_DO_ALL),
            Model("qwen3:14b-q4_k_m", **CAN_DO_ALL),
            "acme/puppet",
        ]

    async def admit(self, turn: Turn) -> None:
        for move in _script(turn) or []:
            if isinstance(move, dict) and "full" in move and self.strings.is_open(move["full"]):
                raise errors.TooManyRequests("The puppet's hands are full.")

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(text.split()) for message in turn.messages() for text in _texts(message))

    async def _on_loop(self, turn: Turn) -> AsyncIterator[Any]:
        moves = _script(turn)
        with _Watched(self.strings, _run(moves), turn):
            for step in self._steps(turn, moves):
                if isinstance(step, _Wait):
                    await step.on_loop()
                else:
                    yield step

    def _in_thread(self, turn: Turn) -> Iterator[Any]:
        moves = _script(turn)
        with _Watched(self.strings, _run(moves), turn):
            for step in self._steps(turn, moves):
                if not isinstance(step, _Wait):
                    yield step
                elif not step.in_thread():
                    return

    def _steps(self, turn: Turn, moves: list[Any] | None) -> Iterator[Any]:
        if moves is None:
            yield str(len(turn.text)) if len(turn.text) > 10_000 else json.dumps(describe(turn))
            return
        run = _run(moves)
        for move in _played(moves, turn.round):
            match move:
                case str():
                    yield move
                case {"run": _} | {"full": _}:
                    pass
                case {"gate": gate}:
                    yield _Wait(turn, self.strings, gate, 0)
                case {"mark": mark}:
                    self.strings.note(run, mark)
                case {"forever": text, "every": seconds}:
                    while True:
                        yield text
                        yield _Wait(turn, self.strings, None, seconds)
                case {"often": text, "times": times}:
                    for _ in range(times):
                        yield text
                case {"block": seconds}:
                    time.sleep(seconds)
                case {"tell": _}:
                    yield json.dumps(describe(turn))
                case {"raise": message}:
                    raise RuntimeError(message)
                case {"refuse": name, **arguments}:
                    raise getattr(errors, name)(**arguments)
                case {"junk": value}:
                    yield value
                case dict():
                    ((name, fields),) = move.items()
                    if name == "Text" and "logprobs" in fields:
                        fields = {**fields, "logprobs": [_logprob(entry) for entry in fields["logprobs"]]}
                    yield getattr(outputs, name)(**fields)


def _texts(value: Any) -> Iterator[str]:
    """Everything in a chat message that somebody wrote."""
    if isinstance(value, dict):
        yield from (text for key, member in value.items() if key not in ("role", "type") for text in _texts(member))
    elif isinstance(value, list):
        yield from (text for member in value for text in _texts(member))
    elif isinstance(value, str):
        yield value


def _played(moves: list[Any], number: int) -> Iterator[Any]:
    """The moves, with those of this round where there are rounds."""
    for move in moves:
        match move:
            case {"rounds": rounds}:
                yield from rounds[number] if number < len(rounds) else ()
            case _:
                yield move


class LoopPuppet(Puppet):
    """Every model is an async generator."""

    generate = Puppet._on_loop


class ThreadPuppet(Puppet):
    """puppet-sync is a plain generator, puppet-plain returns a list, all others hand back an async generator."""

    def generate(self, turn: Turn) -> Any:
        match turn.model:
            case "puppet-sync":
                return self._in_thread(turn)
            case "puppet-plain":
                return list(self._in_thread(turn))
        return self._on_loop(turn)


def _logprob(fields: dict[str, Any]) -> outputs.LogProb:
    # JSON has no infinities; the script spells them.
    rivals = [_logprob(rival) for rival in fields.get("top", [])]
    return outputs.LogProb(**{**fields, "logprob": float(fields["logprob"]), "top": rivals})


def _run(moves: list[Any] | None) -> str | None:
    for move in moves or []:
        if isinstance(move, dict) and "run" in move:
            return str(move["run"])
    return None
