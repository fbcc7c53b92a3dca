"""The default backend, which runs a small model in this process."""

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
from .grammar.builder import build_grammar
from .grammar.constraint import GrammarCompiler, GrammarConstraint
from .inference.engine import Engine
from .inference.output_decoder import LogProbTracker, OutputDecoder
from .inference.pool import EnginePool, Reservation
from .inference.sampling import Sampler
from .inference.tokenizer import Tokenizer
from .model_files import prepare
from .prompting.template import ChatTemplate

__all__ = ["LocalBackend"]

DEFAULT_CONTEXT_LENGTH = 8192
"""The maximum default of `context_length`, in tokens; each token occupies memory, used or not."""

_FALLBACK_CONTEXT_LENGTH = 2048
"""The default of `context_length` for a model file that does not contain its context length."""

MIN_CONTEXT_LENGTH = 16
"""The minimum of `context_length`, in tokens."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a turn.

    Attributes:
        tokens: Its token ids.
        in_reasoning: Whether it ends within a span of reasoning.
    """

    tokens: list[int]
    in_reasoning: bool


@dataclass(frozen=True, slots=True)
class _Admission:
    """The result of admitting a turn.

    Attributes:
        reservation: The turn's place in the queue.
        constraint: The constraint of the answer, or None if the answer may be any text.
        constraint_without_calls: The constraint of an answer in JSON without calls, if calls are optional. A small
            model that may write only JSON or a call never stops calling. It may therefore call only if it would begin
            the answer with a call even without a constraint.
    """

    reservation: Reservation
    constraint: GrammarConstraint | None
    constraint_without_calls: GrammarConstraint | None


class LocalBackend(Backend):
    """A backend that serves one model from a GGUF file, with the engine inside ctransformers.

    The constructor downloads the model if it is not in the cache, and loads it, which may take minutes. The backend is
    thread-safe. Each answer uses one engine exclusively, and further requests wait in order of arrival.

    A grammar enforces the tool choice and the text format; see `grammar.builder.build_grammar`. An answer in JSON that
    approaches its token limit is completed in time if possible.

    Usage counts all tokens of the prompt, including control tokens, and all generated tokens, including the one that
    ends the answer. `cached_tokens` counts tokens of the prompt that an earlier request evaluated.

    Args:
        model: "smollm2", a path to a GGUF file, or a hub name such as `owner/repo:file.gguf`.
        context_length: The number of tokens that a prompt and its answer share; by default the model's own, at most
            8192.
        gpu_layers: Layers to offload to the GPU.
        threads: CPU threads for each engine; by default the processor's cores, divided among the instances.
        instances: The number of engines, and so of concurrent answers. They share the weights in memory; each has its
            own state, for SmolLM2 up to 200 MB at 8192 tokens.
        queue: The number of requests that may wait; further ones are refused with 429.
        system: The system message added to conversations without one; by default that of the embedded model, and for
            other models that of their template.
        progress: Receives the progress of downloads and conversions: the stage, the bytes done, and the bytes in total
            or None.

    Raises:
        ConfigurationError: The model is not available or cannot be loaded, or an argument is invalid.
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
        limits = (
            ("gpu_layers", gpu_layers, 0),
            ("threads", threads, 1),
            ("instances", instances, 1),
            ("queue", queue, 0),
        )
        for name, value, minimum in limits:
            if value is not None and value < minimum:
                raise ConfigurationError(f"'{name}' must be at least {minimum}.")
        prepared = prepare(model, progress=progress)
        header = prepared.header
        self._context_length = _choose_context_length(context_length, header.context_length)
        self._tokenizer = Tokenizer(header)
        self._template = ChatTemplate(
            header.chat_template, self._tokenizer.control_tokens, bos=header.bos_id, eos=header.eos_id
        )
        threads = threads or max(1, _count_cores() // instances)
        engines: list[Engine] = []
        try:
            for _ in range(instances):
                engines.append(
                    Engine(prepared.path, context_length=self._context_length, gpu_layers=gpu_layers, threads=threads)
                )
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        self._pool = EnginePool(engines, queue=queue)
        self._system = prepared.system if system is None else system
        self._grammar_compiler = GrammarCompiler(self._tokenizer)
        self._prompts: WeakKeyDictionary[Turn, _Prompt] = WeakKeyDictionary()
        self._admissions: WeakKeyDictionary[Turn, _Admission] = WeakKeyDictionary()
        self.models = [
            Model(
                prepared.name,
                context_window=self._context_length,
                tools=True,
                structured_output=True,
                logprobs=True,
                reasoning=self._template.supports_reasoning,
                temperature=prepared.defaults.temperature,
                top_p=prepared.defaults.top_p,
                frequency_penalty=prepared.defaults.frequency_penalty,
                max_output_tokens=prepared.defaults.max_output_tokens,
            )
        ]

    async def admit(self, turn: Turn) -> None:
        """Reserve a place in the queue for a turn, or refuse the turn.

        Raises:
            ContextLengthExceeded: The prompt leaves no space for an answer.
            TooManyRequests: The queue is full.
            UnsupportedParameter: A schema cannot be enforced.
            InvalidRequest: The input is empty, or the model's chat template does not accept the conversation.
            ModelError: The chat template failed.
        """
        await anyio.to_thread.run_sync(self._admit, turn)  # the tokenization of a long text would block the event loop

    async def count_tokens(self, turn: Turn) -> int:
        """Return the number of tokens in the turn's prompt, or a lower bound if the prompt is far too long.

        Raises:
            InvalidRequest: The input is empty, or the model's chat template does not accept the conversation.
            ModelError: The chat template failed.
        """
        return await anyio.to_thread.run_sync(self._count_tokens, turn)

    def generate(self, turn: Turn) -> Iterator[Output]:
        """Yield text, reasoning and calls, then `Usage`, then `Finish` if a limit cut off the answer.

        Raises:
            ContextLengthExceeded: The prompt leaves no space for an answer; nothing was evaluated.
            TooManyRequests: The queue is full.
            UnsupportedParameter: A schema cannot be enforced.
            InvalidRequest: The input is empty, or the model's chat template does not accept the conversation.
            ModelError: The template or the engine failed, or a schema could not be enforced to the end.
        """
        if turn not in self._admissions:
            self._admit(turn)
        admission = self._admissions.pop(turn)
        prompt = self._prompts.pop(turn)
        usage = Usage(len(prompt.tokens), 0)
        engine = self._pool.acquire(prompt.tokens, lambda: turn.cancelled, admission.reservation)
        if engine is None:
            yield usage
            return
        try:
            is_complete = yield from self._answer(engine, prompt, turn, admission, usage)
        finally:
            self._pool.release(engine)
        yield usage
        if not is_complete:
            yield Finish("max_output_tokens")

    def close(self) -> None:
        """Free the model after the answers in progress have finished; requests in the queue fail."""
        self._pool.close()

    # Admission.

    def _admit(self, turn: Turn) -> None:
        # A round after calls of hosted tools continues a response, which a full queue must not interrupt.
        reservation = self._pool.reserve(force=turn.round > 0)
        prompt = self._prompts.get(turn) or self._build_prompt(turn)
        if isinstance(prompt, int) or len(prompt.tokens) >= self._context_length:
            tokens = f"at least {prompt}" if isinstance(prompt, int) else len(prompt.tokens)
            raise ContextLengthExceeded(
                f"'input' must fit the context window of {self._context_length} tokens together with the answer, but "
                f"has {tokens} tokens."
            )
        constraint = self._compile_constraint(turn, prompt)
        without_calls = None
        if constraint is not None and turn.callable_tools and not turn.must_call and turn.text_format.type != "text":
            without_calls = self._compile_constraint(replace(turn, tool_choice="none"), prompt)
        self._prompts[turn] = prompt
        self._admissions[turn] = _Admission(reservation, constraint, without_calls)

    def _compile_constraint(self, turn: Turn, prompt: _Prompt) -> GrammarConstraint | None:
        grammar = build_grammar(
            turn,
            self._template.call_format,
            self._tokenizer.control_tokens,
            self._grammar_compiler.find_problem,
            may_reason=self._may_reason(turn),
            in_reasoning=prompt.in_reasoning,
        )
        return None if grammar is None else self._grammar_compiler.compile(grammar)

    def _may_reason(self, turn: Turn) -> bool:
        return self._template.supports_reasoning and _enable_thinking(turn) is not False

    def _count_tokens(self, turn: Turn) -> int:
        prompt = self._build_prompt(turn)
        if isinstance(prompt, int):
            return prompt
        self._prompts[turn] = prompt
        return len(prompt.tokens)

    def _build_prompt(self, turn: Turn) -> _Prompt | int:
        """Return the turn's prompt, or a lower bound of its tokens if its text certainly exceeds the context."""
        messages = turn.messages()
        if self._system and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self._system})
        text_length = sum(len(message["content"]) for message in messages)
        min_tokens = text_length // self._tokenizer.max_token_length
        if min_tokens >= self._context_length:
            return min_tokens
        # A later round presents the tools even if it may not call them, so that the prompt's prefix stays the same and
        # need not be evaluated again.
        tools = turn.tools if turn.callable_tools or turn.round else ()
        parts = self._template.render(messages, tools=tools, enable_thinking=_enable_thinking(turn))
        tokens = self._tokenizer.encode_prompt(parts)
        if not tokens:  # without an evaluation, there are no logits for the first token
            raise InvalidRequest("'input' contains nothing that the model has tokens for.", param="input")
        return _Prompt(tokens, self._template.ends_in_reasoning(parts))

    # Generation.

    def _answer(
        self, engine: Engine, prompt: _Prompt, turn: Turn, admission: _Admission, usage: Usage
    ) -> Generator[Output, None, bool]:
        """Yield the outputs, count their tokens in `usage`, and return False if a limit cut off the answer."""
        limit = self._context_length - len(prompt.tokens)
        if turn.max_output_tokens is not None:
            limit = min(limit, turn.max_output_tokens)
        usage.cached_tokens = position = engine.rewind(prompt.tokens)
        while position < len(prompt.tokens):
            if turn.cancelled:
                return True
            engine.evaluate(prompt.tokens[position : position + engine.batch_size])
            position += engine.batch_size
        constraint, parsed_turn = admission.constraint, turn
        may_call = (
            admission.constraint_without_calls is None or prompt.in_reasoning or self._may_reason(turn)
        ) or self._would_call(engine, prompt.tokens)
        if not may_call:
            constraint, parsed_turn = admission.constraint_without_calls, replace(turn, tool_choice="none")
        decoder = OutputDecoder(
            self._tokenizer, self._template.call_format, parsed_turn, in_reasoning=prompt.in_reasoning
        )
        sampler = Sampler(
            temperature=turn.temperature,
            top_p=turn.top_p,
            presence_penalty=turn.presence_penalty,
            frequency_penalty=turn.frequency_penalty,
            constraint=constraint,
        )
        is_complete = False
        while not is_complete and usage.output_tokens < limit:
            if turn.cancelled:
                return True
            tokens = self._next_tokens(engine, sampler, constraint, limit - usage.output_tokens, decoder.logprobs)
            for token in tokens:
                usage.output_tokens += 1
                is_complete = token in self._tokenizer.stop_ids
                if not is_complete:
                    yield from decoder.feed(token)
                    usage.reasoning_tokens += decoder.is_reasoning
            is_complete = is_complete or (constraint is not None and constraint.is_finished)
            if not is_complete and usage.output_tokens < limit:
                engine.evaluate(tokens)
        is_complete = is_complete or (constraint is not None and constraint.is_complete)
        yield from decoder.finish(truncated=not is_complete)
        return is_complete

    def _would_call(self, engine: Engine, prompt: list[int]) -> bool:
        """Return whether the model, without a constraint, would begin its answer with a call.

        The engine evaluates a few tokens ahead, and then returns to the prompt.
        """
        call_format = self._template.call_format
        opener, text = (call_format.opener or call_format.before_name).encode(), b""
        while opener.startswith(text) and text != opener and len(engine.tokens) < self._context_length:
            token = int(engine.logits.argmax())
            if not self._tokenizer.token_bytes[token]:
                break
            text += self._tokenizer.token_bytes[token]
            engine.evaluate([token])
        if text:
            engine.rewind(prompt)
            engine.evaluate(prompt[-1:])
        return text.startswith(opener)

    def _next_tokens(
        self,
        engine: Engine,
        sampler: Sampler,
        constraint: GrammarConstraint | None,
        remaining: int,
        logprobs: LogProbTracker | None,
    ) -> list[int]:
        """Return the next token, or all tokens that the grammar forces if no log probabilities are requested."""
        tokens: list[int] = []
        if constraint is not None:
            tokens = constraint.accept_forced(remaining, 1 if logprobs else engine.batch_size)
        logits = engine.logits.copy() if logprobs and not tokens else engine.logits
        if not tokens:
            tokens = [sampler.sample(engine.logits)]
        if logprobs and tokens[0] not in self._tokenizer.stop_ids:
            logprobs.add(tokens[0], logits)
        return tokens


def _choose_context_length(requested: int | None, trained: int) -> int:
    if requested is None:
        return min(trained or _FALLBACK_CONTEXT_LENGTH, DEFAULT_CONTEXT_LENGTH)
    if requested < MIN_CONTEXT_LENGTH:
        raise ConfigurationError(f"'context_length' must be at least {MIN_CONTEXT_LENGTH}.")
    if trained and requested > trained:
        raise ConfigurationError(
            f"'context_length' must be at most {trained}, the context length that the model was trained for."
        )
    return requested


def _enable_thinking(turn: Turn) -> bool | None:
    """Return whether the client wants the model to reason, or None if the client has no preference."""
    effort = turn.reasoning.effort if turn.reasoning is not None else None
    return None if effort is None else effort != "none"


def _count_cores() -> int:
    """Return the number of physical cores; of more than four logical cores, half are assumed to be hyperthreads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= 4 else cores // 2
