"""Formats in which models write tool calls and reasoning.

A model was trained with one format, which its chat template shows. `CallFormat` describes it for grammars, for the
parser, and for instructions to models without a template for tools.

A call is ``before_name name before_arguments arguments after_arguments``; an answer with calls contains
``before_calls call (separator call)* after_calls``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BARE_JSON",
    "CALL_FORMATS",
    "CALL_OPENERS",
    "HERMES",
    "LLAMA3",
    "MARKER_TOKENS",
    "MISTRAL_ARGS",
    "MISTRAL_LIST",
    "REASONING_TAGS",
    "CallFormat",
]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format for tool calls.

    Attributes:
        name: Its name, for logs and tests.
        opener: The text that opens calls within text; empty if only an answer that begins with a call contains one.
        before_name: The text before a call's name.
        before_arguments: The text between the name and the arguments.
        after_arguments: The text after the arguments, which are a JSON object.
        before_calls: The text before the first call.
        separator: The text between two calls.
        after_calls: The text after the last call.
    """

    name: str
    opener: str
    before_name: str
    before_arguments: str
    after_arguments: str
    before_calls: str = ""
    separator: str = ""
    after_calls: str = ""


HERMES = CallFormat(
    "hermes",
    opener="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen and many more; also the format in the instructions for models without a template for tools."""

LLAMA3 = CallFormat(
    "llama",
    opener="",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator="; ",
)
"""Llama 3: the whole answer is a call, sometimes after `<|python_tag|>`."""

MISTRAL_LIST = CallFormat(
    "mistral",
    opener="[TOOL_CALLS]",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    before_calls="[TOOL_CALLS] [",
    separator=", ",
    after_calls="]",
)
"""Older Mistral models: one list of calls."""

MISTRAL_ARGS = CallFormat(
    "mistral-args", opener="[TOOL_CALLS]", before_name="[TOOL_CALLS]", before_arguments="[ARGS]", after_arguments=""
)
"""Newer Mistral models: a marker before each name and one before its arguments."""

BARE_JSON = CallFormat(
    "bare",
    opener="",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator="\n",
)
"""Models without a marker: an answer that is a JSON object with a tool's name is a call."""

CALL_OPENERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Texts that open calls within text, in any format."""

CALL_FORMATS = (HERMES, LLAMA3, MISTRAL_LIST, MISTRAL_ARGS, BARE_JSON)
"""All formats."""

REASONING_TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>"}
"""Tags that open a span of reasoning, with the tags that close it."""

MARKER_TOKENS = frozenset(
    {*REASONING_TAGS, *REASONING_TAGS.values(), "<tool_call>", "</tool_call>", "<|python_tag|>"}
    | {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
)
"""Texts that delimit calls and reasoning; many vocabularies contain them as control tokens."""
