"""Chat templates: messages to a prompt of texts and control tokens.

A template is a program in a model file, and the text it works on is the client's, so neither is trusted:

- It runs in a sandbox with bounds on steps, time and size (`sandbox.py`).
- Control tokens in the template's source are replaced by placeholders that hold 128 random bits, before anything is
  rendered. Only placeholders become control tokens; text that spells one stays text, wherever the template puts it.
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
from ...parsing.formats import BARE, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, REASONING, CallFormat
from .messages import Message, in_words, plain, shown, structured, taught, without_calls
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


class ChatTemplate:
    """A model's chat template; thread-safe.

    Args:
        source: The template, or None for a default that fits the control tokens.
        control: Control tokens' ids by their text.
        bos: Id of the token that begins a text.
        eos: Id of the token that ends one.

    Attributes:
        dialect: How the model writes calls, after what its template says; Hermes' way where that says nothing of tools.
        knows_tools: Whether the template shows tools to the model. Where it does not, a system message does.
        reasons: Whether the template speaks of reasoning.

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
        self._control = dict(control)
        self._special = {"bos_token": self._placeholder(bos), "eos_token": self._placeholder(eos)}
        longest_first = sorted(control, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        sandbox = Sandbox()
        try:
            self._template = sandbox.from_string(self._marked(source))
            names = {value for _, kind, value in sandbox.lex(source) if kind == "name"}
        except (jinja2.TemplateError, RecursionError, MemoryError) as problem:
            raise ConfigurationError(
                f"The chat template in the model file cannot be used ({str(problem)[:200]}). "
                "Choose another file of this model."
            ) from problem
        self.knows_tools = "tools" in names
        self._knows_calls = self.knows_tools or "tool_calls" in source
        self.dialect = _dialect(source, BARE if self.knows_tools else HERMES)
        self.reasons = "enable_thinking" in names or any(tag in source for tag in REASONING)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[FunctionTool] = (), think: bool | None = None
    ) -> list[str | int]:
        """Lays out a conversation, and opens the assistant's turn.

        A template that does not accept the conversation as it is gets it in another form: system messages in front of
        the user's next one, one call a message, neighbours of a role joined, calls written out as text. Where it knows
        no tools, a system message explains them; where it knows no calls, they and their outputs are text at once.

        Args:
            messages: The conversation as `Turn.messages` gives it.
            tools: What the model is shown.
            think: Whether the model is to reason first, for templates that let one choose; None for their own choice.

        Returns:
            Texts, and ids of control tokens between them.

        Raises:
            InvalidRequest: The template accepts the conversation in no form.
            ModelError: The template fails.
        """
        values: dict[str, Any] = {**self._special, "add_generation_prompt": True, BUDGET: Budget()}
        values["tools"] = shown(tools) if self.knows_tools else None
        if think is not None:
            values |= {"enable_thinking": think, "thinking": think}
        tried: list[list[Message]] = []
        failure: Exception | None = None
        for form in self._forms(plain(messages), tools):
            if form in tried:
                continue
            tried.append(form)
            try:
                return self._split(self._render(values | {"messages": form}))
            except RefusedError:
                continue
            except Exception as problem:
                # Whatever a stranger's program raises. It may take another form; if it was stopped, it gets none.
                failure = failure or problem
                if isinstance(problem, SecurityError):
                    break
        if failure is not None:  # its words may hold the client's, so they are not passed on
            raise ModelError(f"The model's chat template failed ({type(failure).__name__}).") from failure
        raise InvalidRequest("The model's chat template does not accept this order of messages.", param="input")

    def thinking(self, parts: Sequence[str | int]) -> bool:
        """Whether a rendered prompt ends within a span of reasoning, so that the answer begins in it.

        Args:
            parts: What `render` returned.
        """
        if not self.reasons:
            return False
        texts = {token: text for text, token in self._control.items()}
        ends = (texts.get(part, "") if isinstance(part, int) else part.rstrip() for part in reversed(parts))
        return next(filter(None, ends), "").endswith(tuple(REASONING))

    def _forms(self, conversation: list[Message], tools: Sequence[FunctionTool]) -> Iterator[list[Message]]:
        if not self.knows_tools:
            conversation = taught(conversation, tools, self.dialect, self._marked)
        if self._knows_calls:
            yield from structured(conversation)
        yield from without_calls(in_words(conversation, self.dialect, self._marked))

    def _render(self, values: dict[str, Any]) -> str:
        text, size = [], 0
        for piece in self._template.generate(values):
            text.append(piece)
            size += len(piece)
            if size > LIMIT:
                raise SecurityError("the template builds too much text")
        return "".join(text)

    def _split(self, text: str) -> list[str | int]:
        parts: list[str | int] = list(re.split(f"{self._nonce}([0-9a-f]{{8}})", text))
        parts[1::2] = [int(str(token), 16) for token in parts[1::2]]
        halves = self._nonce[:16], self._nonce[16:]
        if any(isinstance(part, str) and half in part for part in parts for half in halves):
            raise jinja2.TemplateRuntimeError("the template takes a control token apart")
        return [part for part in parts if part != ""]

    def _marked(self, source: str) -> str:
        """A text of a template or of our own, with placeholders for its control tokens."""
        return self._tokens.sub(lambda match: self._placeholder(self._control[match[0]]), source)

    def _placeholder(self, token: int | None) -> str:
        return "" if token is None else f"{self._nonce}{token:08x}"


def _dialect(source: str, default: CallFormat) -> CallFormat:
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL
    return LLAMA if "<|python_tag|>" in source or '"parameters"' in source else default
