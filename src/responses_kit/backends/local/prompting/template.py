"""Chat templates: rendering of messages to a prompt of texts and control tokens.

A template is a program in a model file, and its input is the client's text. Neither is trusted:

- The template runs in a sandbox with limits on steps, time and size (`sandbox.py`).
- Before rendering, control tokens in the template's source are replaced by placeholders that contain 128 random bits.
  Only placeholders become control tokens; the same characters in a client's text remain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ....errors import ConfigurationError, InvalidRequest, ModelError
from ....schema.tools import FunctionTool
from ...parsing.formats import BARE_JSON, HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL_LIST, REASONING_TAGS, CallFormat
from .messages import (
    Message,
    add_tool_instructions,
    describe_tools,
    normalize,
    variants_with_calls,
    variants_without_calls,
    write_calls_as_text,
)
from .sandbox import BUDGET_KEY, MAX_OUTPUT_LENGTH, ConversationRejectedError, RenderBudget, Sandbox

__all__ = ["ChatTemplate"]

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of models that have ChatML's control tokens, but no template of their own."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}User: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of all other models without one of their own: a transcript."""


class ChatTemplate:
    """A model's chat template. It is thread-safe.

    Args:
        source: The template, or None for a default that matches the control tokens.
        control_tokens: The ids of control tokens by their text.
        bos: The id of the token that begins a text.
        eos: The id of the token that ends a text.

    Attributes:
        call_format: The format in which the model writes calls, as its template shows; Hermes if the template does not
            support tools.
        supports_tools: Whether the template presents tools to the model. If not, a system message does.
        supports_reasoning: Whether the template mentions reasoning.

    Raises:
        ConfigurationError: The template is not valid Jinja.
    """

    def __init__(
        self, source: str | None, control_tokens: Mapping[str, int], *, bos: int | None = None, eos: int | None = None
    ) -> None:
        if source is None:
            source = CHATML_TEMPLATE if "<|im_start|>" in control_tokens else PLAIN_TEMPLATE
        nonce = secrets.token_hex(16)
        self._nonce = nonce
        self._control_tokens = dict(control_tokens)
        self._special = {"bos_token": self._placeholder(bos), "eos_token": self._placeholder(eos)}
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        sandbox = Sandbox()
        try:
            self._template = sandbox.from_string(self._insert_placeholders(source))
            names = {value for _, kind, value in sandbox.lex(source) if kind == "name"}
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise ConfigurationError(
                f"The chat template in the model file is not valid Jinja: {str(error)[:200].rstrip('.')}. "
                "Choose another file of this model."
            ) from error
        self.supports_tools = "tools" in names
        self._supports_calls = self.supports_tools or "tool_calls" in source
        self.call_format = _detect_call_format(source, BARE_JSON if self.supports_tools else HERMES)
        self.supports_reasoning = "enable_thinking" in names or any(tag in source for tag in REASONING_TAGS)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[FunctionTool] = (), enable_thinking: bool | None = None
    ) -> list[str | int]:
        """Render a conversation, and open the assistant's message.

        If the template rejects the conversation, variants of it are tried: system messages merged into the user's next
        one, one call per message, consecutive messages of a role joined, calls written as text. If the template does
        not support tools, a system message describes them; if it does not support calls, they and their outputs are
        always written as text.

        Args:
            messages: The conversation, as `Turn.messages` returns it.
            tools: The tools that the model may call.
            enable_thinking: Whether the model reasons first, if the template supports that choice; None for its
                default.

        Returns:
            Texts, and the ids of control tokens between them.

        Raises:
            InvalidRequest: The template rejects all variants of the conversation.
            ModelError: The template fails.
        """
        values: dict[str, Any] = {**self._special, "add_generation_prompt": True, BUDGET_KEY: RenderBudget()}
        values["tools"] = describe_tools(tools) if self.supports_tools else None
        if enable_thinking is not None:
            values |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
        tried: list[list[Message]] = []
        failure: Exception | None = None
        for variant in self._variants(normalize(messages), tools):
            if variant in tried:
                continue
            tried.append(variant)
            try:
                return self._split_tokens(self._render(values | {"messages": variant}))
            except ConversationRejectedError:
                continue
            except Exception as error:
                # A template may raise any exception. The next variant may succeed, unless a limit was exceeded.
                failure = failure or error
                if isinstance(error, SecurityError):
                    break
        if failure is not None:  # the exception's message may contain the client's text, so it is not included
            raise ModelError(f"The model's chat template failed ({type(failure).__name__}).") from failure
        raise InvalidRequest("The model's chat template does not accept this order of messages.", param="input")

    def ends_in_reasoning(self, parts: Sequence[str | int]) -> bool:
        """Return whether a rendered prompt ends within a span of reasoning, so that the answer begins in it.

        Args:
            parts: The result of `render`.
        """
        if not self.supports_reasoning:
            return False
        texts = {token: text for text, token in self._control_tokens.items()}
        ends = (texts.get(part, "") if isinstance(part, int) else part.rstrip() for part in reversed(parts))
        return next(filter(None, ends), "").endswith(tuple(REASONING_TAGS))

    def _variants(self, conversation: list[Message], tools: Sequence[FunctionTool]) -> Iterator[list[Message]]:
        if not self.supports_tools:
            conversation = add_tool_instructions(conversation, tools, self.call_format, self._insert_placeholders)
        if self._supports_calls:
            yield from variants_with_calls(conversation)
        yield from variants_without_calls(
            write_calls_as_text(conversation, self.call_format, self._insert_placeholders)
        )

    def _render(self, values: dict[str, Any]) -> str:
        text, size = [], 0
        for piece in self._template.generate(values):
            text.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT_LENGTH:
                raise SecurityError("the template creates too much text")
        return "".join(text)

    def _split_tokens(self, text: str) -> list[str | int]:
        parts: list[str | int] = list(re.split(f"{self._nonce}([0-9a-f]{{8}})", text))
        parts[1::2] = [int(str(token), 16) for token in parts[1::2]]
        halves = self._nonce[:16], self._nonce[16:]
        if any(isinstance(part, str) and half in part for part in parts for half in halves):
            raise jinja2.TemplateRuntimeError("the template splits a control token")
        return [part for part in parts if part != ""]

    def _insert_placeholders(self, source: str) -> str:
        """Replace the control tokens in trusted text, such as the template's source, by placeholders."""
        return self._control_pattern.sub(lambda match: self._placeholder(self._control_tokens[match[0]]), source)

    def _placeholder(self, token: int | None) -> str:
        return "" if token is None else f"{self._nonce}{token:08x}"


def _detect_call_format(source: str, default: CallFormat) -> CallFormat:
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL_LIST
    return LLAMA3 if "<|python_tag|>" in source or '"parameters"' in source else default
