"""Chat templates: messages to a prompt of texts and control tokens.

A template is a program in a model file, and the text it works on is the client's, so neither is trusted:

- It runs in a sandbox with bounds on steps, time and size (`sandbox.py`).
- Control tokens in the template's source are replaced by placeholders that hold 128 random bits, before anything is
  rendered. Only placeholders become control tokens; text that spells one stays text, wherever the template puts it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ...errors import ConfigurationError, InvalidRequest, ModelError
from .sandbox import BUDGET, LIMIT, Budget, RefusedError, Sandbox

__all__ = ["ChatTemplate"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models that have its control tokens and no template."""

PLAIN = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}User: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For all other models without a template: a transcript."""

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template; thread-safe.

    Args:
        source: The template, or None for a default that fits the control tokens.
        control: Control tokens' ids by their text.
        bos: Id of the token that begins a text.
        eos: Id of the token that ends one.

    Raises:
        ConfigurationError: The template is no valid Jinja.
    """

    def __init__(
        self, source: str | None, control: Mapping[str, int], *, bos: int | None = None, eos: int | None = None
    ) -> None:
        if source is None:
            source = CHATML if "<|im_start|>" in control else PLAIN
        nonce = secrets.token_hex(16)
        self._nonce = nonce
        self._special = {"bos_token": self._placeholder(bos), "eos_token": self._placeholder(eos)}
        if control:
            longest_first = sorted(control, key=len, reverse=True)
            pattern = "|".join(map(re.escape, longest_first))
            source = re.sub(pattern, lambda match: self._placeholder(control[match[0]]), source)
        try:
            self._template = Sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as problem:
            raise ConfigurationError(
                f"The chat template in the model file cannot be used ({str(problem)[:200]}). "
                "Choose another file of this model."
            ) from problem

    def render(self, messages: Sequence[Message]) -> list[str | int]:
        """Lays out a conversation, and opens the assistant's turn.

        A template that knows no system messages, or wants users and assistants to take turns, gets the conversation
        in a form that it accepts: system messages in front of the user's next one, neighbours of a role joined.

        Args:
            messages: The conversation as `Turn.messages` gives it.

        Returns:
            Texts, and ids of control tokens between them.

        Raises:
            InvalidRequest: The template accepts the conversation in no form.
            ModelError: The template fails.
        """
        messages = [_plain(message) for message in messages] or [{"role": "user", "content": ""}]
        for form in (_as_it_is, _without_system, _taking_turns):
            try:
                return self._split(self._render(form(messages)))
            except RefusedError:
                continue
            except Exception as problem:
                # Whatever a stranger's program raises; its words may hold the client's, so they are not passed on.
                raise ModelError(f"The model's chat template failed ({type(problem).__name__}).") from problem
        raise InvalidRequest("The model's chat template does not accept this order of messages.", param="input")

    def _render(self, messages: Sequence[Message]) -> str:
        values = self._special | {"messages": messages, "add_generation_prompt": True, BUDGET: Budget()}
        text, size = [], 0
        for piece in self._template.generate(values):
            text.append(piece)
            size += len(piece)
            if size > LIMIT:
                raise jinja2.TemplateRuntimeError("the template builds too much text")
        return "".join(text)

    def _split(self, text: str) -> list[str | int]:
        parts: list[str | int] = list(re.split(f"{self._nonce}([0-9a-f]{{8}})", text))
        parts[1::2] = [int(str(token), 16) for token in parts[1::2]]
        halves = self._nonce[:16], self._nonce[16:]
        if any(isinstance(part, str) and half in part for part in parts for half in halves):
            raise jinja2.TemplateRuntimeError("the template takes a control token apart")
        return [part for part in parts if part != ""]

    def _placeholder(self, token: int | None) -> str:
        return "" if token is None else f"{self._nonce}{token:08x}"


def _plain(message: Message) -> Message:
    """A message as templates know it: content is a string, a call's arguments are a mapping where they can be."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    plain = {**message, "content": content}
    if "tool_calls" in message:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _mapping(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return plain


def _mapping(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_it_is(messages: Sequence[Message]) -> Sequence[Message]:
    return messages


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            folded.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            folded.append(message)
    return [*folded, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else folded


def _taking_turns(messages: Sequence[Message]) -> Sequence[Message]:
    turns: list[dict[str, Any]] = []
    for message in _without_system(messages):
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n\n" + message["content"]
        elif turns or role == "user":
            turns.append({"role": role, "content": message["content"]})
        else:
            turns += [{"role": "user", "content": ""}, {"role": role, "content": message["content"]}]
    return turns
