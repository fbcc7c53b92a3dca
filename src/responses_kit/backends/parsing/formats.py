"""How models write the calls that they make, and what they think.

A model's chat template was made for one way of writing. `CallFormat` describes it: for whoever holds a model to it with a
grammar, for whoever reads what a model wrote, and for whoever has to explain it to a model that knows none.

A call is written as ``head name middle arguments tail``; one or several make up
``begin call (between call)* end``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BARE",
    "DIALECTS",
    "HERMES",
    "LLAMA",
    "MARKERS",
    "MISTRAL",
    "MISTRAL_ARGS",
    "OPENERS",
    "REASONING",
    "CallFormat",
]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing calls.

    Attributes:
        name: Its name, for logs and tests.
        trigger: What opens calls in the middle of text; empty where only an answer that begins with one is a call.
        head: What stands before a call's name.
        middle: What stands between its name and its arguments.
        tail: What follows its arguments, a JSON object.
        begin: What stands before the first call.
        between: What stands between two calls.
        end: What follows the last call.
    """

    name: str
    trigger: str
    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""


HERMES = CallFormat(
    "hermes",
    trigger="<tool_call>",
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
)
"""Hermes, Qwen and many others; also what a model is taught whose template knows no tools."""

LLAMA = CallFormat("llama", trigger="", head='{"name": "', middle='", "parameters": ', tail="}", between="; ")
"""Llama 3: the whole answer is a call, sometimes behind `<|python_tag|>`."""

MISTRAL = CallFormat(
    "mistral",
    trigger="[TOOL_CALLS]",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    begin="[TOOL_CALLS] [",
    between=", ",
    end="]",
)
"""Mistral's older models: one list of calls."""

MISTRAL_ARGS = CallFormat("mistral-args", trigger="[TOOL_CALLS]", head="[TOOL_CALLS]", middle="[ARGS]", tail="")
"""Mistral's newer models: a marker before each name and one before its arguments."""

BARE = CallFormat("bare", trigger="", head='{"name": "', middle='", "arguments": ', tail="}", between="\n")
"""An answer that is nothing but a JSON object with a tool's name is a call."""

OPENERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What opens calls wherever it stands, in one dialect or another."""

DIALECTS = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, BARE)

REASONING = {"<think>": "</think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>"}
"""What opens a span of reasoning, and what closes it."""

MARKERS = frozenset(
    {*REASONING, *REASONING.values(), "<tool_call>", "</tool_call>", "<|python_tag|>"}
    | {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
)
"""Whatever tells calls and reasoning from text. Many a vocabulary has them as control tokens."""
