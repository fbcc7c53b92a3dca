"""The turn: one request with its whole context, validated, typed and resolved."""

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
    """One request as the backend receives it.

    Sampling parameters that the client omitted have the model's defaults. The response echoes exactly these values.

    Attributes:
        model: The model's name.
        items: The whole context in order: earlier responses' input and output, then this request's input.
        instructions: The request's instructions. They precede the context and are not part of `items`.
        tools: The request's functions, and hosted tools as functions. The model sees all of them.
        tool_choice: "none", "auto", "required", a named function or a list of allowed tools. `callable_tools`,
            `must_call` and `max_calls` evaluate it.
        parallel_tool_calls: Whether the model may call several tools at once.
        max_tool_calls: The number of calls that the model may still make, or None for any number.
        text_format: The required format of the answer's text.
        verbosity: "low", "medium" or "high", or None if the client did not specify it; a hint.
        temperature: The sampling temperature.
        top_p: The probability mass of nucleus sampling.
        presence_penalty: The penalty for tokens that have occurred.
        frequency_penalty: The penalty for tokens by their number of occurrences.
        max_output_tokens: The maximum number of generated tokens, or None for as many as fit.
        top_logprobs: The number of likely tokens to report at each position; 0 to 20.
        logprobs: Whether the client wants `Text.logprobs`.
        reasoning: The requested effort and summary, or None.
        truncation: "auto" or "disabled".
        owner: The owner of the request, as the kit's owner hook returned it.
        metadata: The client's key-value pairs.
        response_id: The id of the response, for logs.
        round: The number of earlier backend calls for this response; more than 0 after hosted tools ran.
        cancelled: Whether the client has left or the response was cancelled. A backend that runs in a thread must
            check it regularly; async backends are cancelled at their current await.
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
        """The text of the last user message, or an empty string."""
        for item in reversed(self.items):
            if isinstance(item, Message) and item.role == "user":
                return item.text
        return ""

    @property
    def callable_tools(self) -> Sequence[FunctionTool]:
        """The tools that the model may call now, a subset of `tools`."""
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
        """Whether the model must call a tool instead of answering."""
        choice = self.tool_choice
        return isinstance(choice, NamedFunction) or "required" in (choice, getattr(choice, "mode", None))

    @property
    def max_calls(self) -> int | None:
        """The number of calls that the model may make now, or None for any number."""
        if self.parallel_tool_calls:
            return self.max_tool_calls
        return 1 if self.max_tool_calls is None else min(1, self.max_tool_calls)

    def messages(self) -> list[dict[str, Any]]:
        """Return the context as chat messages, the form that chat templates expect.

        Returns:
            Mappings with `role` (system, user, assistant or tool) and `content`. The content is a `str` unless the
            message contains images, files or videos; then it is a list of `text`, `image_url`, `file` and `video_url`
            parts. Calls are in the `tool_calls` of an assistant message, their outputs are `tool` messages with a
            `tool_call_id`; a receipt of a hosted tool becomes both. Raw reasoning is the `reasoning_content` of the
            next assistant message. Instructions are the first message, with the role system. A compaction is an
            assistant message. Other extension items are omitted.
        """
        chat: list[dict[str, Any]] = []
        reasoning = ""
        call_ids: set[str] = set()

        def add_message(role: str, content: Any, **members: Any) -> None:
            nonlocal reasoning
            if reasoning and role == "assistant":
                members["reasoning_content"] = reasoning
            reasoning = ""
            chat.append({"role": role, "content": content, **members})

        def add_call(call_id: str, name: str, arguments: str) -> None:
            call_ids.add(call_id)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            if chat and chat[-1]["role"] == "assistant" and not reasoning:
                chat[-1].setdefault("tool_calls", []).append(call)
            else:
                add_message("assistant", "", tool_calls=[call])

        if self.instructions:
            add_message("system", self.instructions)
        for item in _expand_receipts(self.items):
            if isinstance(item, ReasoningItem):
                reasoning += item.text
            elif isinstance(item, Message):
                add_message("system" if item.role == "developer" else item.role, _chat_content(item.content))
            elif isinstance(item, Compaction) and item.summary:
                # The summary may quote tool outputs, which must not gain the authority of a system message.
                add_message("assistant", f"Summary of the conversation so far:\n{item.summary}")
            elif isinstance(item, FunctionCall):
                add_call(item.call_id, item.name, item.arguments)
            elif isinstance(item, FunctionCallOutput):
                if item.name is not None and item.call_id not in call_ids:
                    add_call(item.call_id, item.name, "{}")
                output = item.output if isinstance(item.output, str) else _chat_content(item.output)
                add_message("tool", output, tool_call_id=item.call_id)
        return chat


def _expand_receipts(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, with each receipt of a hosted tool replaced by its call and output."""
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
