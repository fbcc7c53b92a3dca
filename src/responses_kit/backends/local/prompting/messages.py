"""Conversations in the forms that chat templates accept.

`Turn.messages` gives one form; templates differ in what they take: no system message, only users and assistants in
turns, one call a message, arguments as mappings or as text, or no calls at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....schema.tools import FunctionTool
from ...parsing.formats import CallFormat

__all__ = ["Message", "in_words", "plain", "shown", "structured", "taught", "without_calls"]

Message = Mapping[str, Any]

Marked = Callable[[str], str]
"""Writes control tokens in a text of our own so that they become control tokens."""

_TEACHING = """\
You can call these functions:
{tools}
To call one, answer with its name and arguments. For example:
{call}
Its result comes back in <tool_response></tool_response>. If no function fits, answer in plain words."""


def plain(messages: Sequence[Message]) -> list[Message]:
    """The conversation with text for content, and ids of calls as the strictest template wants them.

    That one is Mistral's: nine letters and digits. The same id is the same in every message.
    """
    ids: dict[str, str] = {}

    def known(call_id: str) -> str:
        return ids.setdefault(call_id, f"call{len(ids):05d}")

    conversation: list[Message] = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        made = {**message, "content": content}
        if "tool_call_id" in message:
            made["tool_call_id"] = known(message["tool_call_id"])
        if "tool_calls" in message:
            made["tool_calls"] = [{**call, "id": known(call["id"])} for call in message["tool_calls"]]
        conversation.append(made)
    return conversation or [{"role": "user", "content": ""}]


def shown(tools: Iterable[FunctionTool]) -> list[dict[str, Any]] | None:
    """Tools as templates take them; None, which they look for, if there are none."""
    return [{"type": "function", "function": _described(tool)} for tool in tools] or None


def structured(conversation: Sequence[Message]) -> Iterator[list[Message]]:
    """Forms for a template that knows calls, the likeliest first."""
    for kind in (_mapping, _mapping_always, _text):
        messages = [_with_arguments(message, kind) for message in conversation]
        yield messages
        yield _one_call_each(messages)
        folded = _without_system(messages)
        yield folded
        yield _one_call_each(folded)
        yield _taking_turns(folded)


def without_calls(messages: list[Message]) -> Iterator[list[Message]]:
    """Forms for a template that knows no calls, of a conversation that has none."""
    yield messages
    folded = _without_system(messages)
    yield folded
    yield _taking_turns(folded)


def in_words(conversation: Sequence[Message], dialect: CallFormat, marked: Marked) -> list[Message]:
    """The conversation with calls written out as a model writes them, and their outputs in the user's turns."""
    made: list[Message] = []
    opener, closer = marked("<tool_response>\n"), marked("\n</tool_response>")
    before = ""
    for message in conversation:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"{opener}{content}{closer}"
            if before == "tool":
                made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{content}"}
            else:
                made.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, _written(calls, dialect, marked)]))
            if before == "assistant":  # what a model says and the calls that it makes then are one answer
                content = "\n".join(filter(None, [made.pop()["content"], content]))
            made.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
        else:
            made.append(message)
        before = role
    return made


def taught(
    messages: list[Message], tools: Sequence[FunctionTool], dialect: CallFormat, marked: Marked
) -> list[Message]:
    """The conversation with a system message that explains the tools, for a model whose template knows none."""
    if not tools:
        return messages
    call = _written([{"function": _example(tools[0])}], dialect, marked)
    lines = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools)
    text = _TEACHING.format(tools=lines, call=call)
    for index, message in enumerate(messages):
        if message["role"] == "system":
            content = f"{message['content']}\n\n{text}"
            return [*messages[:index], {**message, "content": content}, *messages[index + 1 :]]
    return [{"role": "system", "content": text}, *messages]


def _described(tool: FunctionTool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"name": tool.name, "description": tool.description or "", "parameters": parameters}


def _example(tool: FunctionTool) -> dict[str, str]:
    """A call of a tool of the model's own: small models call what they see, a made-up function too."""
    properties = (tool.parameters or {}).get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return {"name": tool.name, "arguments": json.dumps(dict.fromkeys(names, "..."), ensure_ascii=False)}


def _written(calls: Iterable[Mapping[str, Any]], dialect: CallFormat, marked: Marked) -> str:
    head, middle, tail = marked(dialect.head), marked(dialect.middle), marked(dialect.tail)
    written = [head + call["function"]["name"] + middle + _text(call["function"]["arguments"]) + tail for call in calls]
    return marked(dialect.begin) + marked(dialect.between).join(written) + marked(dialect.end)


# Arguments. A client may send back what is no JSON.


def _text(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


def _mapping(arguments: str) -> Any:
    try:
        value = json.loads(_text(arguments))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _mapping_always(arguments: str) -> Any:
    value = _mapping(arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def _with_arguments(message: Message, kind: Callable[[str], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": kind(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


# Order of messages.


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Several calls in one message become as many messages, each with its output behind it."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        outputs: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            outputs.append(messages[at])
            at += 1
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}  # what else it says is said once
            made += [output for output in outputs if output.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        made += [output for output in outputs if output.get("tool_call_id") not in ids]
    return made


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages stand in front of the user's next one."""
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


def _taking_turns(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of a role are one message, and the first is the user's; calls and outputs stay as they are."""
    turns: list[Message] = []
    for message in messages:
        role = message["role"] if message["role"] in ("assistant", "tool") else "user"
        if not turns and role != "user":
            turns.append({"role": "user", "content": ""})
        last = turns[-1] if turns else {}
        if last.get("role") == role != "tool" and "tool_calls" not in last and "tool_calls" not in message:
            turns[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            turns.append({**message, "role": role})
    return turns
