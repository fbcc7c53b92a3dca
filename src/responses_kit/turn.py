"""What a backend is given: one request with its whole context, validated, typed and resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .schema.content import InputFile, InputImage, InputVideo, Part
from .schema.items import Compaction, ExtensionItem, FunctionCall, FunctionCallOutput, Item, Message
from .schema.items import Reasoning as ReasoningItem
from .schema.request import Reasoning, TextFormat
from .schema.tools import AllowedTools, FunctionTool, NamedFunction

__all__ = ["Turn"]


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Turn:
    """One request as the backend sees it.

    Sampling values are never missing: what the client left out is filled with the model's own defaults, and
    the response echoes exactly these values.

    Attributes:
        model: Name of the model that was asked for.
        items: The whole context in order: earlier responses' input and output, then this request's input.
        instructions: The request's instructions; they lead the context and are not part of `items`.
        tools: What the model is shown: the request's functions, and hosted tools in the shape of functions.
        tool_choice: "none", "auto", "required", a named function or a list of allowed tools; `callable_tools`,
            `must_call` and `max_calls` say what it comes to.
        parallel_tool_calls: Whether the model may call several tools at once.
        max_tool_calls: How many calls the model may still make, or None for any number.
        text_format: What form the answer's text must have.
        verbosity: "low", "medium" or "high", where the client said so; a hint.
        max_output_tokens: Upper bound of generated tokens, or None for as many as fit.
        top_logprobs: How many likely tokens to report at each position; 0 to 20.
        logprobs: Whether the client wants `Text.logprobs` at all.
        reasoning: Effort and summary that the client asked for, where it did.
        truncation: "auto" or "disabled".
        owner: Who asks, as the host's owner hook named them.
        metadata: The client's key-value pairs.
        response_id: Id of the response that is being made; fit for logs.
        round: How often the model was asked for this response before: more than 0 after hosted tools ran.
        cancelled: Turns true once the client has left or the response was cancelled. A backend that loops in
            a thread looks at it now and then; async backends are cancelled where they await.
    """

    model: str
    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[FunctionTool] = ()
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    text_format: TextFormat
    verbosity: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_output_tokens: int | None = None
    top_logprobs: int = 0
    logprobs: bool = False
    reasoning: Reasoning | None = None
    truncation: str = "disabled"
    owner: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    response_id: str = ""
    round: int = 0
    cancelled: bool = False

    @property
    def text(self) -> str:
        """The last user message's text, or an empty string."""
        for item in reversed(self.items):
            if isinstance(item, Message) and item.role == "user":
                return item.text
        return ""

    @property
    def callable_tools(self) -> Sequence[FunctionTool]:
        """The tools that may be called now; the others are only shown to the model."""
        choice = self.tool_choice
        if choice == "none" or self.max_tool_calls == 0 or (isinstance(choice, AllowedTools) and choice.mode == "none"):
            return ()
        if isinstance(choice, str):
            return self.tools
        names = (
            {choice.name}
            if isinstance(choice, NamedFunction)
            else {tool.name for tool in choice.tools if isinstance(tool, NamedFunction)}
        )
        return [tool for tool in self.tools if tool.name in names]

    @property
    def must_call(self) -> bool:
        """Whether the model has to call a tool instead of answering."""
        choice = self.tool_choice
        return isinstance(choice, NamedFunction) or "required" in (choice, getattr(choice, "mode", None))

    @property
    def max_calls(self) -> int | None:
        """How many calls the model may make now, or None for any number."""
        if self.parallel_tool_calls:
            return self.max_tool_calls
        return 1 if self.max_tool_calls is None else min(1, self.max_tool_calls)

    def messages(self) -> list[dict[str, Any]]:
        """The context in the chat shape that model templates expect.

        Returns:
            Mappings with `role` (system, user, assistant or tool) and `content`. Content is a `str` unless a
            message holds pictures or files; then it is a list of `text`, `image_url`, `file` and `video_url`
            parts. Calls stand in an assistant message's `tool_calls`, their outputs are `tool` messages with
            `tool_call_id`; receipts of hosted tools become both. What the model thought before it spoke or called
            is that message's `reasoning_content`. Instructions come first as a system message. A compaction is a
            message of the assistant, who wrote its summary. Extension items have no place in a chat and are left out.
        """
        chat: list[dict[str, Any]] = []
        thought = ""
        called: set[str] = set()

        def say(role: str, content: Any, **more: Any) -> None:
            nonlocal thought
            if thought and role == "assistant":
                more["reasoning_content"] = thought
            thought = ""
            chat.append({"role": role, "content": content, **more})

        def calls(call_id: str, name: str, arguments: str) -> None:
            called.add(call_id)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            if chat and chat[-1]["role"] == "assistant" and not thought:
                chat[-1].setdefault("tool_calls", []).append(call)
            else:
                say("assistant", "", tool_calls=[call])

        if self.instructions:
            say("system", self.instructions)
        for item in _plain(self.items):
            if isinstance(item, ReasoningItem):
                thought += item.text
            elif isinstance(item, Message):
                say("system" if item.role == "developer" else item.role, _chat_content(item.content))
            elif isinstance(item, Compaction) and item.summary:
                # Not the system's, or what a tool once returned would speak with the system's authority.
                say("assistant", f"Summary of the conversation so far:\n{item.summary}")
            elif isinstance(item, FunctionCall):
                calls(item.call_id, item.name, item.arguments)
            elif isinstance(item, FunctionCallOutput):
                if item.name is not None and item.call_id not in called:
                    calls(item.call_id, item.name, "{}")
                output = item.output if isinstance(item.output, str) else _chat_content(item.output)
                say("tool", output, tool_call_id=item.call_id)
        return chat


def _plain(items: Sequence[Item]) -> Iterator[Item]:
    """The items, with receipts of hosted tools as the calls and outputs that they stand for."""
    for item in items:
        receipt = item.receipt() if isinstance(item, ExtensionItem) else None
        yield from (item,) if receipt is None else receipt


def _chat_content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    if not any(isinstance(part, InputImage | InputFile | InputVideo) for part in parts):
        return "".join(part.plain for part in parts)
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, InputImage):
            content.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
        elif isinstance(part, InputFile):
            content.append({"type": "file", "file": part.model_dump(exclude={"type"}, exclude_none=True)})
        elif isinstance(part, InputVideo):
            content.append({"type": "video_url", "video_url": {"url": part.video_url}})
        else:
            content.append({"type": "text", "text": part.plain})
    return content
