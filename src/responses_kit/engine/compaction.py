"""Compaction of conversations (specification, `POST /responses/compact`).

The output replaces the input of the request:

1. system and developer messages, and the latest user messages, unchanged;
2. one compaction item with an encrypted summary of the whole conversation;
3. calls without outputs, so that an agent can compact in the middle of its loop.

The backend writes the summary (`Backend.compact`), or else the model does. If the conversation does not fit the model's
window, the model summarizes it piece by piece, each time together with its previous summary. Nothing is stored: the
client carries the summary, and it can be decrypted for its owner only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from pydantic_core import to_json

from ..backend import Backend, Model
from ..context.history import load_conversation
from ..context.truncation import pair_calls
from ..errors import APIError, ContextLengthExceeded, InvalidRequest, ModelError, ModelNotFound
from ..outputs import Usage
from ..protocol.encryption import Encryptor
from ..protocol.ids import new_id
from ..schema.base import MAX_TEXT, replace_surrogates
from ..schema.content import InputText, OutputText
from ..schema.items import ITEMS, AssistantMessage, Compaction, FunctionCall, Item, Message, SystemMessage, UserMessage
from ..schema.request import CompactRequest, PlainText, Reasoning
from ..stores.protocol import History
from ..turn import Turn

__all__ = ["CompleteTurn", "compact"]

logger = logging.getLogger("responses_kit")

T = TypeVar("T")

CompleteTurn = Callable[[Turn], Awaitable[tuple[str, Usage | None]]]
"""Generates the whole answer to a turn; returns its text and usage, or raises an `APIError`."""

_INSTRUCTIONS: Final = (
    "Provide a concise, objective summary of the input text, focusing on key facts, names, numbers, decisions, results "
    "and open tasks. The summary takes the place of the text: leave out nothing that may be asked for later."
)
"""Worded after the training data of models with 135 million parameters; the best of several wordings tested."""

_DEFAULT_WINDOW: Final = 32_768
"""Tokens of the context window of a model that does not declare one."""

_WINDOW_SHARES: Final = 8
"""A summary may take up to one part in this many of the window, and likewise the unchanged user messages."""

_COMPRESSION: Final = 4
"""A summary may have up to one part in this many of the conversation's length."""

_MIN_SUMMARY_TOKENS: Final = 64
"""Tokens that a summary may always have, however short the conversation."""

_MAX_SUMMARY_TOKENS: Final = 4096
"""Tokens of a summary, however large the window."""

_MAX_PASSES: Final = 64
"""Turns of the model in one compaction; longer conversations are refused."""

_MIN_PIECE_LENGTH: Final = 32
"""Characters of a piece; if not even so many fit into a prompt, the compaction fails."""

_MIN_PROMPT_TOKENS: Final = 256
"""Tokens of a prompt below which no smaller one is tried, if token counts are estimates."""

_BYTES_PER_TOKEN: Final = 4
"""Estimated bytes of text per token, if the backend does not count tokens."""

_TOKENS_PER_FILE: Final = 1000
"""Estimated tokens of an image or file, if the backend does not count tokens."""


async def compact(
    request: CompactRequest,
    *,
    owner: str,
    models: Mapping[str, Model],
    store: History,
    encryptor: Encryptor,
    backend: Backend,
    complete_turn: CompleteTurn,
    now: float,
) -> dict[str, Any]:
    """Compact a conversation.

    Args:
        request: The validated request.
        owner: The owner of earlier responses and of the summary.
        models: The backend's models by name.
        store: Holds earlier responses.
        encryptor: Encrypts the summary, and decrypts payloads that the client carries.
        backend: Counts tokens, and may have its own compaction.
        complete_turn: Generates the answer to a turn.
        now: Seconds since the epoch.

    Returns:
        The specification's `CompactResource`.

    Raises:
        ModelNotFound: The model does not exist.
        InvalidRequest: The request refers to unknown responses or items, holds no conversation, or one that is too long
            for the model; `param` names the field.
        ModelError: The model failed, or returned no summary.
    """
    model = models.get(request.model)
    if model is None:
        raise ModelNotFound
    items = (await load_conversation(request, model, owner=owner, store=store, encryptor=encryptor)).items
    text = _transcript(items)
    if not text:
        raise InvalidRequest("'input' must hold a conversation to compact.", param="input")
    window = model.context_window or _DEFAULT_WINDOW
    turn = Turn(
        model=model.name,
        items=items,
        instructions=request.instructions,
        tool_choice="none",
        text_format=PlainText(),
        temperature=model.temperature,
        top_p=model.top_p,
        presence_penalty=model.presence_penalty,
        frequency_penalty=model.frequency_penalty,
        max_output_tokens=min(
            _MAX_SUMMARY_TOKENS,
            max(16, window // _WINDOW_SHARES),
            max(_MIN_SUMMARY_TOKENS, _estimate_text_tokens(text) // _COMPRESSION),
        ),
        # Reasoning would count against the summary's max_output_tokens.
        reasoning=Reasoning(effort="none") if model.reasoning else None,
        owner=owner,
        response_id=new_id("resp"),
    )
    compactor = _Compactor(turn, text, window, backend, complete_turn)
    messages = await compactor.select_messages()
    payload = to_json({"summary": replace_surrogates(await compactor.summarize())}).decode()
    compaction = Compaction(
        id=new_id("cmp"), encrypted_content=_check_length(encryptor.encrypt(payload, kind="compaction", owner=owner))
    )
    return {
        "id": turn.response_id,
        "object": "response.compaction",
        "created_at": int(now),
        "output": ITEMS.dump_python([*messages, compaction, *_open_calls(items)], mode="json"),
        "usage": _dump_usage(compactor.usage),
    }


@dataclass(slots=True)
class _Compactor:
    """One compaction.

    Attributes:
        turn: The conversation.
        text: The conversation as plain text.
        window: Tokens that prompt and answer share.
        backend: Counts tokens, and may have its own compaction.
        complete_turn: Generates the answer to a turn.
        max_prompt_tokens: Tokens of a prompt.
        usage: Usage of the model so far.
    """

    turn: Turn
    text: str
    window: int
    backend: Backend
    complete_turn: CompleteTurn
    max_prompt_tokens: int = field(init=False)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def __post_init__(self) -> None:
        self.max_prompt_tokens = self.window - (self.turn.max_output_tokens or 0)

    async def select_messages(self) -> list[Item]:
        """Return the messages that stay unchanged: all system messages and the latest user messages."""
        users = [item for item in self.turn.items if isinstance(item, UserMessage)]

        async def tokens(number: int) -> int:
            return await self._estimate(replace(self.turn, items=users[len(users) - number :], instructions=None))

        count, too_many = 0, len(users) + 1
        while too_many - count > 1:  # a binary search, because each step tokenizes the messages
            middle = (count + too_many) // 2
            if await tokens(middle) <= self.window // _WINDOW_SHARES:
                count = middle
            else:
                too_many = middle
        if users and not count and await tokens(1) <= self.window // 2:
            count = 1  # the model has to answer the last message
        latest = {item.id for item in users[len(users) - count :]}
        return [item for item in self.turn.items if isinstance(item, SystemMessage) or item.id in latest]

    async def summarize(self) -> str:
        """Return a summary of the conversation.

        Raises:
            ContextLengthExceeded: The conversation is too long for the model.
            APIError: The model failed, or returned no summary.
        """
        summary = await _call_backend(self.backend.compact, self.turn)
        if summary is not None:
            if not isinstance(summary, str) or not summary.strip():
                logger.error("compaction: the backend's summary must be a str and not empty")
                raise _missing_summary()
            await self._add_usage(self.turn, summary, None)
            return summary
        summary, rest, passes = "", self.text, 0
        while rest:
            size = await self._fit(summary, rest)
            if len(rest) > size * (_MAX_PASSES - passes):
                raise ContextLengthExceeded(
                    f"The conversation is too long to be compacted in this model's window of {self.window} tokens. "
                    "Compact it earlier, or with another model."
                )
            # Like later rounds of a response, later passes must not be refused because the backend's queue is full.
            prompt = replace(self._prompt(summary, rest[:size]), round=passes)
            passes += 1
            try:
                text, usage = await self.complete_turn(prompt)
            except ContextLengthExceeded:
                if self.max_prompt_tokens < _MIN_PROMPT_TOKENS or await self._count(prompt) is not None:
                    raise
                self.max_prompt_tokens //= 2  # the estimate was too low
                continue
            summary = text.strip()
            if not summary:
                raise _missing_summary()
            await self._add_usage(prompt, summary, usage)
            rest = rest[size:]
        return summary

    def _prompt(self, summary: str, piece: str) -> Turn:
        """Return the turn that summarizes a piece of the conversation together with the previous summary."""
        instructions = _INSTRUCTIONS
        if self.turn.instructions:
            instructions += f"\n\nThe conversation is held under these instructions:\n{self.turn.instructions}"
        if summary:
            piece = f"Summary so far:\n{summary}\n\nWhat was said since then:\n{piece}"
        return replace(self.turn, items=[_user_message(piece)], instructions=instructions)

    async def _fit(self, summary: str, rest: str) -> int:
        """Return how many characters of the text fit into one prompt, cut at the end of a line or word if possible."""
        # No language has more than eight characters per token, so longer texts need not be tokenized as a whole.
        size = max_size = min(len(rest), 8 * self.max_prompt_tokens)
        while (tokens := await self._estimate(self._prompt(summary, rest[:size]))) > self.max_prompt_tokens:
            size = size * self.max_prompt_tokens // tokens * 9 // 10
            if size < _MIN_PIECE_LENGTH:
                if summary:
                    raise ModelError("The model's summary is too long. Compact with another model.")
                raise ContextLengthExceeded(
                    f"The model's window of {self.window} tokens leaves no room to compact anything. Shorten the "
                    "instructions, or compact with another model.",
                    param="instructions" if self.turn.instructions else "input",
                )
        if size == max_size == len(rest):
            return size
        return (rest.rfind("\n", size // 2, size) + 1) or (rest.rfind(" ", size // 2, size) + 1) or size

    async def _add_usage(self, turn: Turn, summary: str, usage: Usage | None) -> None:
        """Add the usage of a summary; count its tokens if the backend does not report usage."""
        if usage is None:
            answer = replace(turn, items=[_assistant_message(summary)], instructions=None)
            usage = Usage(await self._count(turn) or 0, await self._count(answer) or 0)
        self.usage = Usage(
            self.usage.input_tokens + usage.input_tokens,
            self.usage.output_tokens + usage.output_tokens,
            self.usage.cached_tokens + usage.cached_tokens,
            self.usage.reasoning_tokens + usage.reasoning_tokens,
        )

    async def _estimate(self, turn: Turn) -> int:
        """Return the number of tokens of a turn, estimated if the backend does not count them."""
        count = await self._count(turn)
        return _estimate_turn_tokens(turn) if count is None else count

    async def _count(self, turn: Turn) -> int | None:
        """Return the number of tokens of a turn, or None if the backend does not count them or not so many."""
        try:
            return await _call_backend(self.backend.count_tokens, turn)
        except ContextLengthExceeded:
            return None


async def _call_backend(method: Callable[[Turn], Awaitable[T]], turn: Turn) -> T:
    """Call a method of the backend; log its own errors and raise a `ModelError` without details for the client."""
    try:
        return await method(turn)
    except APIError:
        raise
    except Exception as error:
        logger.error("compaction: the backend failed", exc_info=error)
        raise ModelError("The model failed to compact the conversation. The server's log has the reason.") from error


def _user_message(text: str) -> UserMessage:
    """Return a user message without validation, because the limits for clients do not apply."""
    return UserMessage.model_construct(id=new_id("msg"), content=[InputText.model_construct(text=text)])


def _assistant_message(text: str) -> AssistantMessage:
    """Return an assistant message without validation; see `_user_message`."""
    return AssistantMessage.model_construct(id=new_id("msg"), content=[OutputText.model_construct(text=text)])


def _missing_summary() -> ModelError:
    return ModelError("The model returned no summary. Try again, or compact with another model.")


def _check_length(encrypted: str) -> str:
    if len(encrypted) > MAX_TEXT:
        logger.error("compaction: the backend's summary is longer than a request's text may be")
        raise ModelError("The model's summary is too long. Compact with another model.")
    return encrypted


def _open_calls(items: Sequence[Item]) -> list[Item]:
    answered = {call for call, _ in pair_calls(items)}
    return [item for position, item in enumerate(items) if isinstance(item, FunctionCall) and position not in answered]


def _estimate_turn_tokens(turn: Turn) -> int:
    parts = [part for item in turn.items if isinstance(item, Message) for part in item.content]
    texts = [part.plain for part in parts if "text" in part.type]
    return _estimate_text_tokens((turn.instructions or "") + "".join(texts)) + _TOKENS_PER_FILE * (
        len(parts) - len(texts)
    )


def _estimate_text_tokens(text: str) -> int:
    """Return the estimated number of tokens of a text."""
    return len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN


# The conversation as plain text.


def _transcript(items: Sequence[Item]) -> str:
    """Return the conversation as text without system messages, which stay unchanged."""
    messages = [item for item in items if not isinstance(item, SystemMessage)]
    return "\n".join(_format_lines(Turn(model="", items=messages, text_format=PlainText()).messages()))


def _format_lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    functions: dict[str, str] = {}
    for message in messages:
        role, content = message["role"], _plain_text(message["content"])
        if role == "tool":
            yield f"{functions.get(message['tool_call_id'], 'The tool')} returned: {content}"
        elif content or "tool_calls" not in message:
            yield f"The {role}: {content}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            functions[call["id"]] = function["name"]
            yield f"The assistant called {function['name']}({function['arguments']})"


def _plain_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a message's content as text, with placeholders for images and files."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else _PLACEHOLDERS[part["type"]] for part in content)


_PLACEHOLDERS: Final = {"image_url": "[a picture]", "file": "[a file]", "video_url": "[a video]"}


def _dump_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
