"""What a backend is given: one request with its whole context, validated, typed and resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .schema.content import InputFile, InputImage, InputVideo, Part
from .schema.items import FunctionCall, FunctionCallOutput, Item, Message
from .schema.request import Reasoning, TextFormat
from .schema.tools import FunctionTool, ToolChoice

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
        tools: Function tools of the request.
        tool_choice: "none", "auto", "required", a named function or a list of allowed tools.
        parallel_tool_calls: Whether one response may hold several calls.
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
        cancelled: Turns true once the client has left or the response was cancelled. A backend that loops in
            a thread looks at it now and then; async backends are cancelled where they await.
    """

    model: str
    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
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
    cancelled: bool = False

    @property
    def text(self) -> str:
        """The last user message's text, or an empty string."""
        for item in reversed(self.items):
            if isinstance(item, Message) and item.role == "user":
                return item.text
        return ""

    def messages(self) -> list[dict[str, Any]]:
        """The context in the chat shape that model templates expect.

        Returns:
            Mappings with `role` (system, user, assistant or tool) and `content`. Content is a `str` unless a
            message holds pictures or files; then it is a list of `text`, `image_url`, `file` and `video_url`
            parts. Calls stand in an assistant message's `tool_calls`, their outputs are `tool` messages with
            `tool_call_id`. Instructions come first as a system message. Reasoning, compaction and extension
            items have no place in a chat and are left out.
        """
        chat: list[dict[str, Any]] = []
        if self.instructions:
            chat.append({"role": "system", "content": self.instructions})
        for item in self.items:
            if isinstance(item, Message):
                role = "system" if item.role == "developer" else item.role
                chat.append({"role": role, "content": _chat_content(item.content)})
            elif isinstance(item, FunctionCall):
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                if chat and "tool_calls" in chat[-1]:
                    chat[-1]["tool_calls"].append(call)
                else:
                    chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif isinstance(item, FunctionCallOutput):
                output = item.output if isinstance(item.output, str) else _chat_content(item.output)
                chat.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        return chat


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
