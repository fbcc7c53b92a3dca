"""The default backend: a small model in this process."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from weakref import WeakKeyDictionary

import anyio.to_thread

from ...backend import Backend, Model
from ...errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from ...outputs import Finish, Output, Usage
from ...turn import Turn
from .cache import Progress
from .library import Engine
from .models import prepare
from .pool import Pool, Ticket
from .sampling import Sampler
from .template import ChatTemplate
from .tokenizer import Tokenizer

__all__ = ["LocalBackend"]

DEFAULT_CONTEXT = 8192
"""Tokens of context where the model allows more and nobody asks for it: each costs memory, used or not."""


class LocalBackend(Backend):
    """Serves one model from a GGUF file with the engine inside ctransformers.

    Making one fetches the model where it is not in the cache yet, loads it, and may take a while; it is ready then.
    Threads may use it at the same time. Each answer has an engine to itself for as long as it is generated; others
    wait in order of arrival.

    Usage counts all tokens of the prompt, control tokens included, and all tokens generated, the one that ends the
    answer included. `cached_tokens` were still in the engine's state from an earlier request.

    Args:
        model: "smollm2", a path to a GGUF file, or a hub name such as `owner/repo:file.gguf`.
        context_length: Tokens that prompt and answer share; by default the model's own, at most 8192.
        gpu_layers: Layers to keep on the GPU.
        threads: CPU threads for each engine; by default the processor's cores, shared among the instances.
        instances: Engines, and so answers that are generated at the same time. They share the weights in memory;
            each has a state of its own, for SmolLM2 up to 200 MB at 8192 tokens.
        queue: How many requests may wait; one more is refused with 429.
        system: System message for conversations that bring none; by default the embedded model's own, and for others
            whatever their template does then.
        progress: Told of a download or conversion: what is done, bytes done, bytes in total or None.

    Raises:
        ConfigurationError: The model cannot be had or loaded, or an argument makes no sense; the message says what
            to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        context_length: int | None = None,
        gpu_layers: int = 0,
        threads: int | None = None,
        instances: int = 1,
        queue: int = 16,
        system: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        for name, value, least in (("gpu_layers", gpu_layers, 0), ("instances", instances, 1), ("queue", queue, 0)):
            if value < least:
                raise ConfigurationError(f"{name} must be at least {least}.")
        if threads is not None and threads < 1:
            raise ConfigurationError("threads must be at least 1.")
        prepared = prepare(model, progress=progress)
        header = prepared.header
        self._name = prepared.name
        self._context = _context_length(context_length, header.context_length)
        self._tokenizer = Tokenizer(header)
        self._template = ChatTemplate(
            header.chat_template, self._tokenizer.control, bos=header.bos_id, eos=header.eos_id
        )
        threads = threads or max(1, _cores() // instances)
        engines: list[Engine] = []
        try:
            for _ in range(instances):
                engines.append(
                    Engine(prepared.path, context_length=self._context, gpu_layers=gpu_layers, threads=threads)
                )
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        self._pool = Pool(engines, queue=queue)
        self._system = prepared.system if system is None else system
        self._admitted: WeakKeyDictionary[Turn, tuple[list[int], Ticket]] = WeakKeyDictionary()
        self.models = [
            Model(
                prepared.name,
                context_window=self._context,
                temperature=prepared.defaults.temperature,
                top_p=prepared.defaults.top_p,
                frequency_penalty=prepared.defaults.frequency_penalty,
                max_output_tokens=prepared.defaults.max_output_tokens,
            )
        ]

    async def admit(self, turn: Turn) -> None:
        """Refuses what does not fit, or has no place in the queue any more, before the first byte is sent.

        Raises:
            ContextLengthExceeded: The prompt leaves no room for an answer.
            TooManyRequests: The queue is full.
            InvalidRequest: The input is empty, or the model's chat template has no form for this conversation.
        """
        await anyio.to_thread.run_sync(self._admit, turn)  # to cut a long text into tokens takes a moment

    def _admit(self, turn: Turn) -> None:
        ticket = self._pool.admit()
        self._admitted[turn] = self._prompt(turn), ticket

    def generate(self, turn: Turn) -> Iterator[Output]:
        """Yields the answer's text piece by piece, then `Usage`, then `Finish` if the answer was cut.

        Raises:
            ContextLengthExceeded: The prompt leaves no room for an answer; nothing was evaluated.
            TooManyRequests: The queue is full.
            InvalidRequest: The input is empty, or the model's chat template has no form for this conversation.
            ModelError: The template or the engine failed.
        """
        prompt, ticket = self._admitted.pop(turn, None) or (self._prompt(turn), None)
        limit = self._context - len(prompt)
        if turn.max_output_tokens is not None:
            limit = min(limit, turn.max_output_tokens)
        sampler = Sampler(
            temperature=turn.temperature,
            top_p=turn.top_p,
            presence_penalty=turn.presence_penalty,
            frequency_penalty=turn.frequency_penalty,
        )
        engine = self._pool.acquire(prompt, lambda: turn.cancelled, ticket)
        if engine is None:
            yield Usage(len(prompt), 0)
            return
        usage = Usage(len(prompt), 0)
        try:
            ended = yield from self._answer(engine, prompt, turn, sampler, limit, usage)
        finally:
            self._pool.release(engine)
        yield usage
        if not ended:
            yield Finish("max_output_tokens")

    def close(self) -> None:
        """Frees the model; answers in progress are finished first, requests in the queue fail."""
        self._pool.close()

    def _prompt(self, turn: Turn) -> list[int]:
        messages = turn.messages()
        if self._system and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self._system})
        size = sum(len(message["content"]) for message in messages)
        least = size // self._tokenizer.longest
        if least >= self._context:  # so much text need not even be cut into tokens
            raise self._too_long(f"at least {least}")
        prompt = self._tokenizer.prompt(self._template.render(messages))
        if len(prompt) >= self._context:
            raise self._too_long(str(len(prompt)))
        if not prompt:  # nothing to evaluate gives no logits to begin from
            raise InvalidRequest("The input holds nothing that the model has tokens for.", param="input")
        return prompt

    def _too_long(self, tokens: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"The input has {tokens} tokens; {self._name} has room for {self._context}, the answer included. "
            "Shorten the input."
        )

    def _answer(
        self, engine: Engine, prompt: list[int], turn: Turn, sampler: Sampler, limit: int, usage: Usage
    ) -> Generator[str, None, bool]:
        """Yields the text, counts in `usage`, and returns whether the answer came to its end by itself."""
        usage.cached_tokens = at = engine.rewind(prompt)
        while at < len(prompt):
            if turn.cancelled:
                return True
            engine.evaluate(prompt[at : at + engine.batch])
            at += engine.batch
        decoder = self._tokenizer.decoder()
        while usage.output_tokens < limit and not turn.cancelled:
            token = sampler.sample(engine.logits)
            usage.output_tokens += 1
            if token in self._tokenizer.stops:
                break
            if text := decoder.feed(token):
                yield text
            if usage.output_tokens < limit:
                engine.evaluate([token])
        else:
            token = None
        if text := decoder.flush():
            yield text
        return token is not None or turn.cancelled


def _context_length(wanted: int | None, trained: int) -> int:
    if wanted is None:
        return min(trained or 2048, DEFAULT_CONTEXT)
    if wanted < 16:
        raise ConfigurationError("context_length must be at least 16.")
    if trained and wanted > trained:
        raise ConfigurationError(
            f"The model was trained for {trained} tokens of context; set context_length to no more."
        )
    return wanted


def _cores() -> int:
    """Processor cores to count on; of many, every second one is taken for a hyperthread, which gains nothing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= 4 else cores // 2
