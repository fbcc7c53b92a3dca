"""Measure the local backend: its cost over the bare engine, the gain of prefix reuse, and the cost of control.

Run it on an idle machine: `python -m tests.benchmarks.local`.
"""

from __future__ import annotations

import ctypes
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ctransformers.llm import LLM, Config

from responses_kit.backends.local import LocalBackend
from responses_kit.backends.local.grammar.constraint import GrammarConstraint
from responses_kit.backends.local.model_files import prepare
from responses_kit.outputs import Usage
from responses_kit.schema.items import AssistantMessage, Item, UserMessage
from responses_kit.schema.request import JsonSchema, PlainText
from responses_kit.schema.tools import FunctionTool
from responses_kit.turn import Turn

from .http import posted, serving

PROMPT = "Write a long story about a fox, a river and a very old bridge."
TOKENS = 60
ROUNDS = 15
CONTROL_ROUNDS = 5
CONTEXT = 4096


def turn(*texts: str, temperature: float, top_p: float, max_output_tokens: int, **values: Any) -> Turn:
    """Return a turn with alternating user and assistant messages."""
    kinds = (UserMessage, AssistantMessage)
    items: list[Item] = [kinds[i % 2].model_validate({"content": text}) for i, text in enumerate(texts)]
    return Turn(
        model="smollm2",
        items=items,
        temperature=temperature,
        top_p=top_p,
        max_output_tokens=max_output_tokens,
        **{"text_format": PlainText(type="text"), **values},
    )


def bare_rate(model: LLM, prompt: list[int], *, temperature: float, top_p: float, threads: int) -> float:
    """Return the tokens per second of a minimal ctransformers loop: evaluate, sample, detokenize.

    The library samples with top_k 1, which is greedy. The time starts at the end of the prompt.
    """
    model.ctransformers_llm_batch_eval((ctypes.c_int * len(prompt))(*prompt), len(prompt), 0, 32, threads)
    none = (ctypes.c_int * 0)()
    past = len(prompt)
    started = time.perf_counter()
    for _ in range(TOKENS):
        top_k = 40 if temperature else 1
        token = model.ctransformers_llm_sample(none, 0, top_k, top_p, temperature or 1.0, 1.0, -1)
        model.ctransformers_llm_detokenize(token)
        model.ctransformers_llm_batch_eval((ctypes.c_int * 1)(token), 1, past, 1, threads)
        past += 1
    return TOKENS / (time.perf_counter() - started)


def stream_rate(pieces: Iterable[object], tokens: Callable[[], int]) -> float:
    """Return the tokens per second between the first piece of a stream and its end.

    Args:
        pieces: The stream.
        tokens: Called at the end for the number of tokens.
    """
    first = 0.0
    for _ in pieces:
        first = first or time.perf_counter()
    return (tokens() - 1) / (time.perf_counter() - first)


def backend_rate(backend: LocalBackend, *, temperature: float, top_p: float) -> float:
    """Return the tokens per second of `LocalBackend.generate`."""
    usage: list[Usage] = []

    def pieces() -> Iterable[object]:
        for output in backend.generate(turn(PROMPT, temperature=temperature, top_p=top_p, max_output_tokens=TOKENS)):
            if isinstance(output, Usage):
                usage.append(output)
            yield output

    return stream_rate(pieces(), lambda: usage[0].output_tokens)


def served_rate(port: int, *, temperature: float, top_p: float) -> float:
    """Return the tokens per second of a stream over HTTP, read by a minimal client."""
    body = {"input": PROMPT, "temperature": temperature, "top_p": top_p, "max_output_tokens": TOKENS, "stream": True}
    received: list[bytes] = []

    def deltas() -> Iterator[bytes]:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(posted(body, close=True))
            while data := connection.recv(65536):
                received.append(data)
                if b"output_text.delta" in data:
                    yield data

    def tokens() -> int:
        return int(re.findall(rb'"output_tokens":(\d+)', b"".join(received))[-1])

    return stream_rate(deltas(), tokens)


def first_token(backend: LocalBackend, *texts: str) -> tuple[float, Usage]:
    """Return the seconds until the first piece of an answer."""
    started = time.perf_counter()
    answer = iter(backend.generate(turn(*texts, temperature=0, top_p=1, max_output_tokens=16)))
    next(answer)
    seconds = time.perf_counter() - started
    return seconds, next(output for output in answer if isinstance(output, Usage))


def conversation(backend: LocalBackend) -> list[str]:
    """Return the texts of four long turns and a fifth question."""
    texts: list[str] = []
    for number in range(1, 6):
        texts.append(f"Part {number}: {PROMPT} " + "The fox waits by the water and looks at the bridge. " * 12)
        if number < 5:
            made = backend.generate(turn(*texts, temperature=0, top_p=1, max_output_tokens=60))
            texts.append("".join(output for output in made if isinstance(output, str)))
    return texts


STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "mood": {"enum": ["happy", "sad", "strange"]},
        "scenes": {
            "type": "array",
            "minItems": 3,
            "items": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "text": {"type": "string"}, "minutes": {"type": "integer"}},
                "required": ["place", "text", "minutes"],
            },
        },
    },
    "required": ["title", "mood", "scenes"],
}
TOOL = FunctionTool(name="write_story", description="Writes a story", parameters=STORY)
CONTROLLED: dict[str, dict[str, Any]] = {
    "json_schema": {"text_format": JsonSchema.model_validate({"schema": STORY, "strict": True})},
    "required call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "text that may call": {"tools": [TOOL]},
    "free text": {},
}


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """A constraint that totals its time in seconds and the tokens that it forces."""

    def counting(name: str) -> Callable[..., Any]:
        inner = getattr(GrammarConstraint, name)

        def wrapper(self: GrammarConstraint, *args: Any) -> Any:
            started = time.perf_counter()
            made = inner(self, *args)
            spent["seconds"] += time.perf_counter() - started
            spent["forced"] += len(made) if name == "forced" else 0
            return made

        return wrapper

    with patch.multiple(GrammarConstraint, **{name: counting(name) for name in ("forced", "mask", "accept")}):
        yield


def control_cost(backend: LocalBackend, **values: Any) -> str:
    """Return the tokens per second after the prompt and the constraint's share of that time."""
    rates, shares, forced = [], [], []
    for _ in range(CONTROL_ROUNDS):
        spent = {"seconds": 0.0, "forced": 0.0}
        made = turn(PROMPT, temperature=0, top_p=1, max_output_tokens=200, **values)
        next(iter(backend.generate(turn(PROMPT, temperature=0, top_p=1, max_output_tokens=1, **values))))  # the prompt
        with timed(spent):
            started = time.perf_counter()
            usage = next(output for output in backend.generate(made) if isinstance(output, Usage))
            total = time.perf_counter() - started
        rates.append(usage.output_tokens / total)
        shares.append(spent["seconds"] / (total - spent["seconds"]))
        forced.append(spent["forced"] / usage.output_tokens)
    return (
        f"{statistics.median(rates):.1f} tokens/s, the constraint takes {statistics.median(shares):.1%} of the time to "
        f"decode, {statistics.median(forced):.0%} of the tokens are forced"
    )


def main() -> None:
    """Print all figures. The rounds of both sides alternate, so that noise affects them equally."""
    prepared = prepare("smollm2")
    backend = LocalBackend(context_length=CONTEXT)
    backend._tokenizer.stop_ids = frozenset()  # both sides must generate the same number of tokens
    model = LLM(str(prepared.path), config=Config(context_length=CONTEXT))
    sampled = turn(PROMPT, temperature=0, top_p=1, max_output_tokens=TOKENS)
    prepared_prompt = backend._build_prompt(sampled)
    assert not isinstance(prepared_prompt, int)
    prompt = prepared_prompt.tokens
    threads = backend._pool._idle[0]._threads
    defaults = prepared.defaults
    with serving("local", "--factory", pinned=False) as port:
        for name, temperature, top_p in (("greedy", 0.0, 1.0), ("sampled", defaults.temperature, defaults.top_p)):
            rounds = [
                (
                    bare_rate(model, prompt, temperature=temperature, top_p=top_p, threads=threads),
                    backend_rate(backend, temperature=temperature, top_p=top_p),
                    served_rate(port, temperature=temperature, top_p=top_p),
                )
                for _ in range(ROUNDS)
            ]
            bare, ours, served = (statistics.median(side) for side in zip(*rounds, strict=True))
            print(
                f"{name}: bare engine {bare:.1f} tokens/s, backend {ours:.1f} (ratio {ours / bare:.2f}), "
                f"through the API {served:.1f} (ratio {served / bare:.2f})"
            )
    backend.close()

    backend = LocalBackend(context_length=CONTEXT)
    texts = conversation(backend)
    with_reuse, usage = first_token(backend, *texts)
    backend.close()
    backend = LocalBackend(context_length=CONTEXT)
    without, _ = first_token(backend, *texts)
    backend.close()
    print(
        f"fifth turn, {usage.input_tokens} tokens of input: first token after {with_reuse:.2f} s with reuse "
        f"({usage.cached_tokens} cached), {without:.2f} s without"
    )

    backend = LocalBackend(context_length=CONTEXT)
    for name, values in CONTROLLED.items():
        print(f"{name}: {control_cost(backend, **values)}")
    backend.close()


if __name__ == "__main__":
    main()
