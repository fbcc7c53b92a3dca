"""Variants of a conversation for chat templates.

`Turn.messages` returns one form, which not every template accepts. Some accept no system message, only alternating
users and assistants, one call per message, arguments only as mappings or only as text, or no calls at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....schema.tools import FunctionTool
from ...parsing.formats import CallFormat

__all__ = [
    "Message",
    "add_tool_instructions",
    "describe_tools",
    "normalize",
    "variants_with_calls",
    "variants_without_calls",
    "write_calls_as_text",
]

Message = Mapping[str, Any]
"""A message in the form of `Turn.messages`."""

InsertPlaceholders = Callable[[str], str]
"""Replaces the control tokens in trusted text by the placeholders that become control tokens."""

_TOOL_INSTRUCTIONS = """\
You can call these functions:
{tools}
To call one, answer with its name and arguments. For example:
{call}
Its result comes back in <tool_response></tool_response>. If no function fits, answer in plain words."""


def normalize(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with text as content and with short ids of calls.

    The strictest template, Mistral's, requires ids of nine letters and digits. The same id stays the same in all
    messages.
    """
    ids: dict[str, str] = {}

    def shorten(call_id: str) -> str:
        return ids.setdefault(call_id, f"call{len(ids):05d}")

    conversation: list[Message] = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        normalized = {**message, "content": content}
        if "tool_call_id" in message:
            normalized["tool_call_id"] = shorten(message["tool_call_id"])
        if "tool_calls" in message:
            normalized["tool_calls"] = [{**call, "id": shorten(call["id"])} for call in message["tool_calls"]]
        conversation.append(normalized)
    return conversation or [{"role": "user", "content": ""}]


def describe_tools(tools: Iterable[FunctionTool]) -> list[dict[str, Any]] | None:
    """Return tools in the form of templates, or None, which templates test for, if there are none."""
    return [{"type": "function", "function": _describe_function(tool)} for tool in tools] or None


def variants_with_calls(conversation: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield variants for a template that supports calls, the most common first."""
    for convert in (_parse_arguments, _parse_or_wrap_arguments, _arguments_as_text):
        messages = [_convert_arguments(message, convert) for message in conversation]
        yield messages
        yield _split_calls(messages)
        merged = _merge_system_messages(messages)
        yield merged
        yield _split_calls(merged)
        yield _alternate_roles(merged)


def variants_without_calls(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield variants of a conversation without calls, for a template that does not support them."""
    yield messages
    merged = _merge_system_messages(messages)
    yield merged
    yield _alternate_roles(merged)


def write_calls_as_text(
    conversation: Sequence[Message], call_format: CallFormat, insert_placeholders: InsertPlaceholders
) -> list[Message]:
    """Return the conversation with calls as text in the model's format, and with their outputs as user messages."""
    written: list[Message] = []
    opener, closer = insert_placeholders("<tool_response>\n"), insert_placeholders("\n</tool_response>")
    previous_role = ""
    for message in conversation:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"{opener}{content}{closer}"
            if previous_role == "tool":
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{content}"}
            else:
                written.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, _write_calls(calls, call_format, insert_placeholders)]))
            if previous_role == "assistant":  # text and the calls after it are one answer
                content = "\n".join(filter(None, [written.pop()["content"], content]))
            written.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
        else:
            written.append(message)
        previous_role = role
    return written


def add_tool_instructions(
    messages: list[Message],
    tools: Sequence[FunctionTool],
    call_format: CallFormat,
    insert_placeholders: InsertPlaceholders,
) -> list[Message]:
    """Return the conversation with a system message that explains the tools, for templates without tools."""
    if not tools:
        return messages
    call = _write_calls([{"function": _example_call(tools[0])}], call_format, insert_placeholders)
    lines = "\n".join(json.dumps(_describe_function(tool), ensure_ascii=False) for tool in tools)
    text = _TOOL_INSTRUCTIONS.format(tools=lines, call=call)
    for index, message in enumerate(messages):
        if message["role"] == "system":
            content = f"{message['content']}\n\n{text}"
            return [*messages[:index], {**message, "content": content}, *messages[index + 1 :]]
    return [{"role": "system", "content": text}, *messages]


def _describe_function(tool: FunctionTool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"name": tool.name, "description": tool.description or "", "parameters": parameters}


def _example_call(tool: FunctionTool) -> dict[str, str]:
    """Return a call of a real tool, because small models copy the example, even if its function does not exist."""
    properties = (tool.parameters or {}).get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return {"name": tool.name, "arguments": json.dumps(dict.fromkeys(names, "..."), ensure_ascii=False)}


def _write_calls(
    calls: Iterable[Mapping[str, Any]], call_format: CallFormat, insert_placeholders: InsertPlaceholders
) -> str:
    before_name = insert_placeholders(call_format.before_name)
    before_arguments = insert_placeholders(call_format.before_arguments)
    after_arguments = insert_placeholders(call_format.after_arguments)
    written = [
        before_name
        + call["function"]["name"]
        + before_arguments
        + _arguments_as_text(call["function"]["arguments"])
        + after_arguments
        for call in calls
    ]
    return (
        insert_placeholders(call_format.before_calls)
        + insert_placeholders(call_format.separator).join(written)
        + insert_placeholders(call_format.after_calls)
    )


# Arguments. A client may send arguments that are not JSON.


def _arguments_as_text(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


def _parse_arguments(arguments: str) -> Any:
    """Return the arguments as a mapping, or as text if they are not a JSON object."""
    try:
        value = json.loads(_arguments_as_text(arguments))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _parse_or_wrap_arguments(arguments: str) -> Any:
    """Return the arguments as a mapping in any case."""
    value = _parse_arguments(arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def _convert_arguments(message: Message, convert: Callable[[str], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


# Order of messages.


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each call in a message of its own, followed by its output."""
    split: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        outputs: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            outputs.append(messages[index])
            index += 1
        for call in calls:
            split.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}  # only the first message has the content
            split += [output for output in outputs if output.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        split += [output for output in outputs if output.get("tool_call_id") not in ids]
    return split


def _merge_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each system message at the beginning of the user's next one."""
    merged: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
        elif message["role"] == "user" and pending:
            merged.append({**message, "content": "\n\n".join([*pending, message["content"]])})
            pending = []
        else:
            merged.append(message)
    return [*merged, {"role": "user", "content": "\n\n".join(pending)}] if pending else merged


def _alternate_roles(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of a role, and begin with the user; calls and their outputs stay separate."""
    alternating: list[Message] = []
    for message in messages:
        role = message["role"] if message["role"] in ("assistant", "tool") else "user"
        if not alternating and role != "user":
            alternating.append({"role": "user", "content": ""})
        last = alternating[-1] if alternating else {}
        if last.get("role") == role != "tool" and "tool_calls" not in last and "tool_calls" not in message:
            alternating[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            alternating.append({**message, "role": role})
    return alternating
