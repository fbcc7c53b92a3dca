"""A backend that executes scripts from requests, and a control channel on a second port.

The last user text is a script, a JSON list of steps that are executed in order:

=====================================  =====================================================================
step                                   effect
=====================================  =====================================================================
`"text"`                               yields the text
`{"run": name}`                        traces the run under this name: started (with the turn), marks, ended
`{"gate": name}`                       waits until the test opens the gate
`{"mark": name}`                       adds an entry to the trace
`{"forever": text, "every": seconds}`  yields the text repeatedly, without end
`{"often": text, "times": n}`          yields the text n times
`{"block": seconds}`                   sleeps and cannot be cancelled (threads only)
`{"raise": message}`                   raises RuntimeError
`{"refuse": class, "message": m, …}`   raises that class of `responses_kit.errors`
`{"full": gate}`                       refuses to admit the turn if the gate is open
`{"junk": value}`                      yields the value unchanged, which is not a valid output
`{"Class": {…}}`                       yields that class of `responses_kit.outputs`
`{"rounds": [steps, steps, …]}`        executes the steps of the current round of hosted tool calls
`{"tell": null}`                       yields a description of the turn as JSON; see `describe`
=====================================  =====================================================================

The reply to any other text is the description of the turn; the reply to more than 10,000 characters is their number.

Every word is one token. The context window of "scripted-small" has `WINDOW` tokens.

The control channel has its own port, so that it works for every host in the same way, even if the host is broken.
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

ALL_CAPABILITIES = {"vision": True, "tools": True, "reasoning": True, "structured_output": True, "logprobs": True}
MAX_WAIT = 30.0
WINDOW = 100


class Control:
    """State that tests share with the backend: gates, traces of runs, and the store's clock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open_gates: set[str] = set()
        self.traces: dict[str, list[dict[str, Any]]] = {}
        self.clock_offset = 0.0

    def add_to_trace(self, run: str | None, what: str, **more: Any) -> None:
        if run is not None:
            with self.changed:
                self.traces.setdefault(run, []).append({"what": what, "at": time.monotonic(), **more})
                self.changed.notify_all()

    def clock(self) -> float:
        """Return monotonic seconds plus the time by which tests advanced the clock."""
        return time.monotonic() + self.clock_offset

    def open_gate(self, gate: str) -> None:
        with self.changed:
            self.open_gates.add(gate)
            self.changed.notify_all()

    def is_open(self, gate: str) -> bool:
        with self.changed:
            return gate in self.open_gates

    def wait_for(self, run: str, what: str, timeout: float) -> list[dict[str, Any]] | None:
        """Return the trace once it has an entry `what`, or None after the timeout."""

        def has_entry() -> bool:
            return any(note["what"] == what for note in self.traces.get(run, []))

        with self.changed:
            return list(self.traces[run]) if self.changed.wait_for(has_entry, timeout) else None

    def trace(self, run: str) -> list[dict[str, Any]]:
        with self.changed:
            return list(self.traces.get(run, []))


class _ControlHandler(socketserver.StreamRequestHandler):
    control: Control

    def handle(self) -> None:
        order = json.loads(self.rfile.readline())
        answer: Any = None
        match order.pop("do"):
            case "open":
                self.control.open_gate(order["gate"])
            case "wait":
                answer = self.control.wait_for(**order)
            case "later":
                self.control.clock_offset += order["seconds"]
            case "peak":
                answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            case "record":
                answer = self.control.trace(**order)
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _ControlServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


def serve_control(control: Control) -> int:
    """Serve the control channel, one JSON line each way per connection, and return its port."""
    handler = type("Handler", (_ControlHandler,), {"control": control})
    server = _ControlServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()
    return server.server_address[1]


def describe(turn: Turn) -> dict[str, Any]:
    """Return a description of the turn as JSON values."""
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
    """A step that waits for a gate or for some seconds; in threads it polls the turn for cancellation."""

    def __init__(self, turn: Turn, control: Control, gate: str | None, seconds: float) -> None:
        self.turn, self.control, self.gate = turn, control, gate
        self.deadline = time.monotonic() + (seconds if gate is None else MAX_WAIT)

    def is_over(self) -> bool:
        if self.gate is not None and self.control.is_open(self.gate):
            return True
        return time.monotonic() >= self.deadline

    def wait_in_thread(self) -> bool:
        """Wait in a worker thread; return False if the turn was cancelled."""
        while not self.is_over():
            if self.turn.cancelled:
                return False
            time.sleep(0.005)
        return True

    async def wait_on_loop(self) -> None:
        while not self.is_over():  # noqa: ASYNC110  # the gate is opened in another thread
            await anyio.sleep(0.005)


class _Traced:
    """Adds the start and the end of a generator to the run's trace."""

    def __init__(self, control: Control, run: str | None, turn: Turn) -> None:
        self.control, self.run, self.turn = control, run, turn

    def __enter__(self) -> None:
        self.control.add_to_trace(self.run, "started", turn=describe(self.turn))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.add_to_trace(
            self.run, "ended", how=kind.__name__ if kind else "returned", cancelled=self.turn.cancelled
        )


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
"""Scripts for the model of the LMSP draft's examples, "qwen3:14b-q4_k_m", by user text."""


def _script(turn: Turn) -> list[Any] | None:
    if turn.model == "qwen3:14b-q4_k_m":
        last = turn.items[-1]
        return [last.output] if last.type == "function_call_output" else EXAMPLES[turn.text]
    if not turn.text.startswith("["):
        return None
    try:
        steps = json.loads(turn.text)
    except ValueError:
        return None
    return steps if isinstance(steps, list) else None


class ScriptableBackend(Backend):
    """The common base of the backends; the subclasses choose between the event loop and threads."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.models = [
            Model("scripted", **ALL_CAPABILITIES),
            Model("scripted-sync", **ALL_CAPABILITIES),
            Model("scripted-plain", **ALL_CAPABILITIES),
            Model("scripted-text", temperature=0.25, top_p=0.5, owned_by="acme"),
            Model("scripted-stateless", conversations=False, tools=True, structured_output=True),
            Model("scripted-small", context_window=WINDOW, **ALL_CAPABILITIES),
            Model("qwen3:14b-q4_k_m", **ALL_CAPABILITIES),
            "acme/scripted",
        ]

    async def admit(self, turn: Turn) -> None:
        for step in _script(turn) or []:
            if isinstance(step, dict) and "full" in step and self.control.is_open(step["full"]):
                raise errors.TooManyRequests("The backend is full.")

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(text.split()) for message in turn.messages() for text in _texts(message))

    async def _generate_on_loop(self, turn: Turn) -> AsyncIterator[Any]:
        steps = _script(turn)
        with _Traced(self.control, _run_name(steps), turn):
            for step in self._execute(turn, steps):
                if isinstance(step, _Wait):
                    await step.wait_on_loop()
                else:
                    yield step

    def _generate_in_thread(self, turn: Turn) -> Iterator[Any]:
        steps = _script(turn)
        with _Traced(self.control, _run_name(steps), turn):
            for step in self._execute(turn, steps):
                if not isinstance(step, _Wait):
                    yield step
                elif not step.wait_in_thread():
                    return

    def _execute(self, turn: Turn, steps: list[Any] | None) -> Iterator[Any]:
        if steps is None:
            yield str(len(turn.text)) if len(turn.text) > 10_000 else json.dumps(describe(turn))
            return
        run = _run_name(steps)
        for step in _steps_of_round(steps, turn.round):
            match step:
                case str():
                    yield step
                case {"run": _} | {"full": _}:
                    pass
                case {"gate": gate}:
                    yield _Wait(turn, self.control, gate, 0)
                case {"mark": mark}:
                    self.control.add_to_trace(run, mark)
                case {"forever": text, "every": seconds}:
                    while True:
                        yield text
                        yield _Wait(turn, self.control, None, seconds)
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
                    ((name, fields),) = step.items()
                    if name == "Text" and "logprobs" in fields:
                        fields = {**fields, "logprobs": [_logprob(entry) for entry in fields["logprobs"]]}
                    yield getattr(outputs, name)(**fields)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a chat message."""
    if isinstance(value, dict):
        yield from (text for key, member in value.items() if key not in ("role", "type") for text in _texts(member))
    elif isinstance(value, list):
        yield from (text for member in value for text in _texts(member))
    elif isinstance(value, str):
        yield value


def _steps_of_round(steps: list[Any], number: int) -> Iterator[Any]:
    """Yield the steps, replacing "rounds" with the steps of this round."""
    for step in steps:
        match step:
            case {"rounds": rounds}:
                yield from rounds[number] if number < len(rounds) else ()
            case _:
                yield step


class AsyncScriptableBackend(ScriptableBackend):
    """All models are async generators."""

    generate = ScriptableBackend._generate_on_loop


class ThreadedScriptableBackend(ScriptableBackend):
    """scripted-sync is a generator, scripted-plain returns a list, all other models are async generators."""

    def generate(self, turn: Turn) -> Any:
        match turn.model:
            case "scripted-sync":
                return self._generate_in_thread(turn)
            case "scripted-plain":
                return list(self._generate_in_thread(turn))
        return self._generate_on_loop(turn)


def _logprob(fields: dict[str, Any]) -> outputs.LogProb:
    # JSON has no infinities, so scripts have them as strings.
    rivals = [_logprob(rival) for rival in fields.get("top", [])]
    return outputs.LogProb(**{**fields, "logprob": float(fields["logprob"]), "top": rivals})


def _run_name(steps: list[Any] | None) -> str | None:
    for step in steps or []:
        if isinstance(step, dict) and "run" in step:
            return str(step["run"])
    return None
