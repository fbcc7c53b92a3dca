"""Compaction: a long conversation becomes a short one to carry on with (specification, `POST /responses/compact`).

What comes out takes the place of all that went in:

1. system and developer messages, and the latest user messages, as they were;
2. one compaction item, whose sealed summary tells of the whole conversation;
3. the calls that still wait for their outputs, so that an agent may compact in the middle of its loop.

The summary is the backend's (`Backend.compact`) or else the model's own. Where the conversation does not fit the
model's window, the model reads it piece by piece, each time with its summary so far. Nothing is stored: the client
carries the summary, which opens for its owner alone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from pydantic_core import to_json

from ..backend import Backend, Model
from ..context.history import load_conversation
from ..context.truncation import pairs
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
"""Has a turn answered to its end; returns the text and what it took, or raises an `APIError`."""

_TASK: Final = (
    "Provide a concise, objective summary of the input text, focusing on key facts, names, numbers, decisions, results "
    "and open tasks. The summary takes the place of the text: leave out nothing that may be asked for later."
)
"""In words that models of 135 million parameters were trained on, too: of several wordings this one loses least."""

_WINDOW: Final = 32_768
"""Tokens that a model is taken to have room for where it does not say."""

_SHARE: Final = 8
"""What part of the window a summary may take, and what part the user messages that are kept."""

_PART: Final = 4
"""What part of the conversation's own length a summary may have."""

_SHORTEST: Final = 64
"""Tokens that a summary may have, however short the conversation."""

_LONGEST: Final = 4096
"""Most tokens of a summary, however large the window."""

_MOST_PASSES: Final = 64
"""How often the model is asked at most."""

_LEAST_PIECE: Final = 32
"""Characters of a conversation below which it makes no sense to sum them up."""

_LEAST_ROOM: Final = 256
"""Tokens of a prompt below which no smaller one is tried, where their number was a guess."""

_BYTES: Final = 4
"""Bytes of text to a token, where the backend does not count: about right for English, and too few for no language."""

_PICTURE: Final = 1000
"""Tokens of a picture or file, where the backend does not count."""


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
    """Makes a conversation short.

    Args:
        request: The validated request.
        owner: Whose responses may be referred to, and who alone can send the summary back.
        models: The backend's models by name.
        store: Where earlier responses are.
        encryptor: Encrypts the summary, and decrypts payloads that the client carries.
        backend: May have a way of its own, and counts tokens.
        complete_turn: Asks the model.
        now: Seconds since the epoch.

    Returns:
        The specification's `CompactResource`.

    Raises:
        InvalidRequest: The request refers to what does not exist, holds nothing to compact, or more than this model
            can read; `param` names the field.
        ModelError: The model gave no summary.
    """
    model = models.get(request.model)
    if model is None:
        raise ModelNotFound
    items = (await load_conversation(request, model, owner=owner, store=store, encryptor=encryptor)).items
    text = _transcript(items)
    if not text:
        raise InvalidRequest("There is nothing to compact: input holds no conversation.", param="input")
    window = model.context_window or _WINDOW
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
        max_output_tokens=min(_LONGEST, max(16, window // _SHARE), max(_SHORTEST, _size(text) // _PART)),
        # Thoughts would use up what the summary may take.
        reasoning=Reasoning(effort="none") if model.reasoning else None,
        owner=owner,
        response_id=new_id("resp"),
    )
    work = _Work(turn, text, window, backend, complete_turn)
    kept = await work.kept()
    payload = to_json({"summary": replace_surrogates(await work.summary())}).decode()
    compaction = Compaction(
        id=new_id("cmp"), encrypted_content=_bounded(encryptor.encrypt(payload, kind="compaction", owner=owner))
    )
    return {
        "id": turn.response_id,
        "object": "response.compaction",
        "created_at": int(now),
        "output": ITEMS.dump_python([*kept, compaction, *_open_calls(items)], mode="json"),
        "usage": _shown(work.usage),
    }


@dataclass(slots=True)
class _Work:
    """One compaction.

    Attributes:
        turn: The conversation.
        text: The same as one text.
        window: Tokens that prompt and answer share.
        backend: Counts tokens.
        complete_turn: Asks the model.
        room: Tokens that a prompt may have.
        usage: What the model took so far.
    """

    turn: Turn
    text: str
    window: int
    backend: Backend
    complete_turn: CompleteTurn
    room: int = field(init=False)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def __post_init__(self) -> None:
        self.room = self.window - (self.turn.max_output_tokens or 0)

    async def kept(self) -> list[Item]:
        """The messages that stay as they are: the system's all, the user's latest ones."""
        users = [item for item in self.turn.items if isinstance(item, UserMessage)]

        async def tokens(number: int) -> int:
            return await self._tokens(replace(self.turn, items=users[len(users) - number :], instructions=None))

        enough, too_many = 0, len(users) + 1
        while too_many - enough > 1:  # by halving, since each look costs a tokenization
            middle = (enough + too_many) // 2
            if await tokens(middle) <= self.window // _SHARE:
                enough = middle
            else:
                too_many = middle
        if users and not enough and await tokens(1) <= self.window // 2:
            enough = 1  # what was asked last is what the model has to answer
        latest = {item.id for item in users[len(users) - enough :]}
        return [item for item in self.turn.items if isinstance(item, SystemMessage) or item.id in latest]

    async def summary(self) -> str:
        """What the conversation comes to.

        Raises:
            APIError: It is too much to sum up, or nobody did.
        """
        summary = await _answered(self.backend.compact, self.turn)
        if summary is not None:
            if not isinstance(summary, str) or not summary.strip():
                logger.error("compaction: the backend's own summary is no text, or empty")
                raise _no_summary()
            await self._use(self.turn, summary, None)
            return summary
        summary, rest, passes = "", self.text, 0
        while rest:
            size = await self._fitting(summary, rest)
            if len(rest) > size * (_MOST_PASSES - passes):
                raise ContextLengthExceeded(
                    f"The conversation is too long for this model's window of {self.window} tokens to be compacted. "
                    "Compact it sooner, or with another model."
                )
            # What follows the first pass belongs to it: no backend should refuse it because of others that wait.
            prompt = replace(self._prompt(summary, rest[:size]), round=passes)
            passes += 1
            try:
                text, usage = await self.complete_turn(prompt)
            except ContextLengthExceeded:
                if self.room < _LEAST_ROOM or await self._count(prompt) is not None:
                    raise
                self.room //= 2  # it was a guess, and too high a one
                continue
            summary = text.strip()
            if not summary:
                raise _no_summary()
            await self._use(prompt, summary, usage)
            rest = rest[size:]
        return summary

    def _prompt(self, summary: str, piece: str) -> Turn:
        """What asks the model to sum up a piece of the conversation, and what came before."""
        task = _TASK
        if self.turn.instructions:
            task += f"\n\nThe conversation is held under these instructions:\n{self.turn.instructions}"
        if summary:
            piece = f"Summary so far:\n{summary}\n\nWhat was said since then:\n{piece}"
        return replace(self.turn, items=[_asked(piece)], instructions=task)

    async def _fitting(self, summary: str, rest: str) -> int:
        """How many characters of the text fit into the window at once; up to the end of a line where there is one."""
        # Eight characters to a token are more than any language has: a text of millions need not be counted whole.
        size = most = min(len(rest), 8 * self.room)
        while (tokens := await self._tokens(self._prompt(summary, rest[:size]))) > self.room:
            size = size * self.room // tokens * 9 // 10
            if size < _LEAST_PIECE:
                if summary:
                    raise ModelError("The model's summary is longer than it may be. Compact with another model.")
                raise ContextLengthExceeded(
                    f"The model's window of {self.window} tokens leaves no room to compact anything. Shorten the "
                    "instructions, or compact with another model.",
                    param="instructions" if self.turn.instructions else "input",
                )
        if size == most == len(rest):
            return size
        return (rest.rfind("\n", size // 2, size) + 1) or (rest.rfind(" ", size // 2, size) + 1) or size

    async def _use(self, turn: Turn, summary: str, usage: Usage | None) -> None:
        """Adds what a summary took; counted here where the backend does not say, as far as it can count."""
        if usage is None:
            said = replace(turn, items=[_said(summary)], instructions=None)
            usage = Usage(await self._count(turn) or 0, await self._count(said) or 0)
        self.usage = Usage(
            self.usage.input_tokens + usage.input_tokens,
            self.usage.output_tokens + usage.output_tokens,
            self.usage.cached_tokens + usage.cached_tokens,
            self.usage.reasoning_tokens + usage.reasoning_tokens,
        )

    async def _tokens(self, turn: Turn) -> int:
        """How many tokens a turn of messages has, or about how many."""
        counted = await self._count(turn)
        return _guessed(turn) if counted is None else counted

    async def _count(self, turn: Turn) -> int | None:
        """The same, or None where the backend does not count, or not as far as that."""
        try:
            return await _answered(self.backend.count_tokens, turn)
        except ContextLengthExceeded:
            return None


async def _answered(ask: Callable[[Turn], Awaitable[T]], turn: Turn) -> T:
    """What the backend answers; of its own errors the client learns no more than that it failed."""
    try:
        return await ask(turn)
    except APIError:
        raise
    except Exception as error:
        logger.error("compaction: the backend failed", exc_info=error)
        raise ModelError("The model failed to compact. The server's log has the reason.") from error


def _asked(text: str) -> UserMessage:
    """A message of our own making, to which the bounds of a client's do not apply."""
    return UserMessage.model_construct(id=new_id("msg"), content=[InputText.model_construct(text=text)])


def _said(text: str) -> AssistantMessage:
    """The same of the model."""
    return AssistantMessage.model_construct(id=new_id("msg"), content=[OutputText.model_construct(text=text)])


def _no_summary() -> ModelError:
    return ModelError("The model gave no summary. Try again, or compact with another model.")


def _bounded(sealed: str) -> str:
    if len(sealed) > MAX_TEXT:
        logger.error("compaction: the backend's summary is longer than any text of a request may be")
        raise ModelError("The model's summary is too long to be sent back. Compact with another model.")
    return sealed


def _open_calls(items: Sequence[Item]) -> list[Item]:
    answered = {call for call, _ in pairs(items)}
    return [item for place, item in enumerate(items) if isinstance(item, FunctionCall) and place not in answered]


def _guessed(turn: Turn) -> int:
    parts = [part for item in turn.items if isinstance(item, Message) for part in item.content]
    words = [part.plain for part in parts if "text" in part.type]
    return _size((turn.instructions or "") + "".join(words)) + _PICTURE * (len(parts) - len(words))


def _size(text: str) -> int:
    """About how many tokens a text has."""
    return len(text.encode("utf-8", "surrogatepass")) // _BYTES


# The conversation as one text.


def _transcript(items: Sequence[Item]) -> str:
    """Who said what, in order; system messages aside, which stay as they are."""
    spoken = [item for item in items if not isinstance(item, SystemMessage)]
    return "\n".join(_lines(Turn(model="", items=spoken, text_format=PlainText()).messages()))


def _lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    functions: dict[str, str] = {}
    for message in messages:
        role, content = message["role"], _plain(message["content"])
        if role == "tool":
            yield f"{functions.get(message['tool_call_id'], 'The tool')} returned: {content}"
        elif content or "tool_calls" not in message:
            yield f"The {role}: {content}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            functions[call["id"]] = function["name"]
            yield f"The assistant called {function['name']}({function['arguments']})"


def _plain(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A message's content in words. Pictures and files are only named: a summary is text."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else _NAMES[part["type"]] for part in content)


_NAMES: Final = {"image_url": "[a picture]", "file": "[a file]", "video_url": "[a video]"}


def _shown(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
