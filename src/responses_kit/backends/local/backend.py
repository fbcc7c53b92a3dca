"""The default backend: a small model in this process."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import anyio.to_thread

from ...backend import Backend, Model
from ...errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from ...outputs import Finish, Output, Usage
from ...turn import Turn
from .cache import Progress
from .grammar.builder import grammar
from .grammar.constraint import GrammarConstraint, Grammars
from .inference.answer import Answer, LogProbs
from .inference.engine import Engine
from .inference.pool import Pool, Ticket
from .inference.sampling import Sampler
from .inference.tokenizer import Tokenizer
from .model_files import prepare
from .prompting.template import ChatTemplate

__all__ = ["LocalBackend"]

DEFAULT_CONTEXT = 8192
"""Tokens of context where the model allows more and nobody asks for it: each costs memory, used or not."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A turn's prompt.

    Attributes:
        tokens: Its tokens.
        thinking: It ends within a span of reasoning.
    """

    tokens: list[int]
    thinking: bool


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A turn that may be generated.

    Attributes:
        ticket: Its place in the queue.
        constraint: What the answer is held to, if anything.
        silent: The same for an answer that does not call. Left with nothing but JSON or a call, a small model calls
            and calls; so where it would begin with neither, it is held to the JSON.
    """

    ticket: Ticket
    constraint: GrammarConstraint | None
    silent: GrammarConstraint | None


class LocalBackend(Backend):
    """Serves one model from a GGUF file with the engine inside ctransformers.

    Making one fetches the model where it is not in the cache yet, loads it, and may take a while; it is ready then.
    Threads may use it at the same time. Each answer has an engine to itself for as long as it is generated; others
    wait in order of arrival.

    Tool choice and the answer's format are no requests to the model: a grammar leaves it no other way (see
    `grammar.grammar` for what that comes to). When the tokens that an answer may have run out, an answer in JSON is
    led to its end in time, so that it is cut only where its schema asks for more than there is room for.

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
        self._grammars = Grammars(self._tokenizer)
        self._prompts: WeakKeyDictionary[Turn, _Prompt] = WeakKeyDictionary()
        self._admitted: WeakKeyDictionary[Turn, _Admitted] = WeakKeyDictionary()
        self.models = [
            Model(
                prepared.name,
                context_window=self._context,
                tools=True,
                structured_output=True,
                logprobs=True,
                reasoning=self._template.reasons,
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
            UnsupportedParameter: A schema that the model cannot be held to.
            InvalidRequest: The input is empty, or the model's chat template has no form for this conversation.
        """
        await anyio.to_thread.run_sync(self._admit, turn)  # to cut a long text into tokens takes a moment

    async def count_tokens(self, turn: Turn) -> int:
        """How many tokens the turn's prompt has; of far more text than fits, at least so many.

        Raises:
            InvalidRequest: The input is empty, or the model's chat template has no form for this conversation.
        """
        return await anyio.to_thread.run_sync(self._count, turn)

    def generate(self, turn: Turn) -> Iterator[Output]:
        """Yields what the model says, thinks and calls, then `Usage`, then `Finish` if the answer was cut.

        Raises:
            ContextLengthExceeded: The prompt leaves no room for an answer; nothing was evaluated.
            TooManyRequests: The queue is full.
            UnsupportedParameter: A schema that the model cannot be held to.
            InvalidRequest: The input is empty, or the model's chat template has no form for this conversation.
            ModelError: The template or the engine failed, or the model could not be held to a schema to the end.
        """
        if turn not in self._admitted:
            self._admit(turn)
        admitted = self._admitted.pop(turn)
        prompt = self._prompts.pop(turn)
        usage = Usage(len(prompt.tokens), 0)
        engine = self._pool.acquire(prompt.tokens, lambda: turn.cancelled, admitted.ticket)
        if engine is None:
            yield usage
            return
        try:
            ended = yield from self._answer(engine, prompt, turn, admitted, usage)
        finally:
            self._pool.release(engine)
        yield usage
        if not ended:
            yield Finish("max_output_tokens")

    def close(self) -> None:
        """Frees the model; answers in progress are finished first, requests in the queue fail."""
        self._pool.close()

    # Before an answer.

    def _admit(self, turn: Turn) -> None:
        # What follows the calls of hosted tools is the rest of a response: to refuse it would break that in the middle.
        ticket = self._pool.admit(always=turn.round > 0)
        prompt = self._prompts.get(turn) or self._prompt(turn)
        if isinstance(prompt, int) or len(prompt.tokens) >= self._context:
            tokens = f"at least {prompt}" if isinstance(prompt, int) else len(prompt.tokens)
            raise ContextLengthExceeded(
                f"The input has {tokens} tokens; {self._name} has room for {self._context}, the answer included. "
                "Shorten the input."
            )
        constraint = self._constraint(turn, prompt)
        silent = None
        if constraint is not None and turn.callable_tools and not turn.must_call and turn.text_format.type != "text":
            silent = self._constraint(replace(turn, tool_choice="none"), prompt)
        self._prompts[turn] = prompt
        self._admitted[turn] = _Admitted(ticket, constraint, silent)

    def _constraint(self, turn: Turn, prompt: _Prompt) -> GrammarConstraint | None:
        demanded = grammar(
            turn,
            self._template.dialect,
            self._tokenizer.control,
            self._grammars.problem,
            reasons=self._reasons(turn),
            thinking=prompt.thinking,
        )
        return None if demanded is None else self._grammars.constraint(demanded)

    def _reasons(self, turn: Turn) -> bool:
        return self._template.reasons and _think(turn) is not False

    def _count(self, turn: Turn) -> int:
        prompt = self._prompt(turn)
        if isinstance(prompt, int):
            return prompt
        self._prompts[turn] = prompt
        return len(prompt.tokens)

    def _prompt(self, turn: Turn) -> _Prompt | int:
        """The turn's prompt; of so much text that it need not even be cut into tokens, the least that it can have."""
        messages = turn.messages()
        if self._system and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self._system})
        size = sum(len(message["content"]) for message in messages)
        least = size // self._tokenizer.longest
        if least >= self._context:
            return least
        # A later round shows them even if all calls are spent: what was evaluated of the prompt is good for it, too.
        tools = turn.tools if turn.callable_tools or turn.round else ()
        parts = self._template.render(messages, tools=tools, think=_think(turn))
        tokens = self._tokenizer.prompt(parts)
        if not tokens:  # nothing to evaluate gives no logits to begin from
            raise InvalidRequest("The input holds nothing that the model has tokens for.", param="input")
        return _Prompt(tokens, self._template.thinking(parts))

    # The answer.

    def _answer(
        self, engine: Engine, prompt: _Prompt, turn: Turn, admitted: _Admitted, usage: Usage
    ) -> Generator[Output, None, bool]:
        """Yields the outputs, counts in `usage`, and returns whether the answer came to its end by itself."""
        limit = self._context - len(prompt.tokens)
        if turn.max_output_tokens is not None:
            limit = min(limit, turn.max_output_tokens)
        usage.cached_tokens = at = engine.rewind(prompt.tokens)
        while at < len(prompt.tokens):
            if turn.cancelled:
                return True
            engine.evaluate(prompt.tokens[at : at + engine.batch])
            at += engine.batch
        constraint, read = admitted.constraint, turn
        may = admitted.silent is None or prompt.thinking or self._reasons(turn)
        if not may and not self._calls(engine, prompt.tokens):
            constraint, read = admitted.silent, replace(turn, tool_choice="none")
        answer = Answer(self._tokenizer, self._template.dialect, read, thinking=prompt.thinking)
        sampler = Sampler(
            temperature=turn.temperature,
            top_p=turn.top_p,
            presence_penalty=turn.presence_penalty,
            frequency_penalty=turn.frequency_penalty,
            constraint=constraint,
        )
        ended = False
        while not ended and usage.output_tokens < limit:
            if turn.cancelled:
                return True
            tokens = self._next(engine, sampler, constraint, limit - usage.output_tokens, answer.logprobs)
            for token in tokens:
                usage.output_tokens += 1
                ended = token in self._tokenizer.stops
                if not ended:
                    yield from answer.feed(token)
                    usage.reasoning_tokens += answer.reasoning
            ended = ended or (constraint is not None and constraint.ended)
            if not ended and usage.output_tokens < limit:
                engine.evaluate(tokens)
        ended = ended or (constraint is not None and constraint.complete)
        yield from answer.end(cut=not ended)
        return ended

    def _calls(self, engine: Engine, prompt: list[int]) -> bool:
        """Whether the model would begin a call now, if nothing held it: looks ahead, and goes back."""
        dialect = self._template.dialect
        opening, said = (dialect.trigger or dialect.head).encode(), b""
        while opening.startswith(said) and said != opening and len(engine.tokens) < self._context:
            token = int(engine.logits.argmax())
            if not self._tokenizer.pieces[token]:
                break
            said += self._tokenizer.pieces[token]
            engine.evaluate([token])
        if said:
            engine.rewind(prompt)
            engine.evaluate(prompt[-1:])
        return said.startswith(opening)

    def _next(
        self,
        engine: Engine,
        sampler: Sampler,
        constraint: GrammarConstraint | None,
        left: int,
        logprobs: LogProbs | None,
    ) -> list[int]:
        """The next token, or several where the grammar forces them and nobody wants to know how likely they were."""
        tokens = [] if constraint is None else constraint.forced(left, 1 if logprobs else engine.batch)
        logits = engine.logits.copy() if logprobs and not tokens else engine.logits
        if not tokens:
            tokens = [sampler.sample(engine.logits)]
        if logprobs and tokens[0] not in self._tokenizer.stops:
            logprobs.add(tokens[0], logits)
        return tokens


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


def _think(turn: Turn) -> bool | None:
    """Whether the model is to reason first, where the client says so."""
    effort = turn.reasoning.effort if turn.reasoning is not None else None
    return None if effort is None else effort != "none"


def _cores() -> int:
    """Processor cores to count on; of many, every second one is taken for a hyperthread, which gains nothing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= 4 else cores // 2
