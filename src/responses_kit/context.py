"""From a request to a turn: the chain before it, its references resolved, and what the model can't do refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import from_json

from .backend import Model
from .control import Demands
from .errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    PreviousResponseNotFound,
    StoreError,
    UnsupportedParameter,
)
from .ids import is_id, new_id
from .json_schema import Schema
from .schema.content import InputFile, InputImage, InputVideo, ReasoningText
from .schema.items import (
    ITEMS,
    UNPAIRED,
    Compaction,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    Item,
    ItemReference,
    Message,
    Reasoning,
    UserMessage,
)
from .schema.request import CompactRequest, CreateRequest, JsonObject, JsonSchema, PlainText, TextFormat
from .schema.tools import AllowedTools, FunctionTool, NamedFunction, NamedHosted, NamedTool, OtherTool, ToolChoice
from .sealing import Seal
from .stores import History, Record, stored
from .tools import HostedTool, Toolset
from .turn import Turn

__all__ = ["Context", "Conversation", "build", "conversation"]

_SERVER_TOOLS = (
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "mcp",
    "web_search",
)
"""Prefixes of tool types that ask the server to do the work. Other unknown types are the client's own."""


_MOST_STRICT = 50_000
"""Keywords of all strict functions together: they are compiled for each request."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a request became.

    Attributes:
        turn: What the backend is given.
        model: Who is asked.
        demands: What the answer is held to beside what the turn says.
        response: The response object as it begins.
        input: The request's own input items, with ids.
    """

    turn: Turn
    model: Model
    demands: Demands
    response: dict[str, Any]
    input: list[Item]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request is about.

    Attributes:
        items: Earlier responses' input and output, then the request's own input, in order and opened.
        own: The request's own input items, with ids, as they came.
    """

    items: list[Item]
    own: list[Item]


async def build(
    request: CreateRequest,
    *,
    owner: str,
    models: Mapping[str, Model],
    store: History,
    seal: Seal,
    toolsets: Mapping[str, Toolset],
    max_tool_calls: int,
    now: float,
    response_id: str | None = None,
) -> Context:
    """Resolves a request into a turn.

    Args:
        request: The validated request.
        owner: Whose responses and items may be referred to.
        models: The backend's models by name; the first answers where the request names none.
        store: Where earlier responses are.
        seal: Opens what the client carried.
        toolsets: The hosted tools by type.
        max_tool_calls: Most calls where hosted tools are switched on.
        now: Seconds since the epoch.
        response_id: The id of a response that exists already, where its context is made anew.

    Raises:
        InvalidRequest: The request refers to what does not exist, contradicts itself, or asks for what the
            model cannot do; `param` names the field.
    """
    model = next(iter(models.values())) if request.model is None else models.get(request.model)
    if model is None:
        raise ModelNotFound
    tools = await _tools(request, model, toolsets)
    choice = _tool_choice(request, tools)
    _check_capabilities(request, model)
    found = await conversation(request, model, owner=owner, store=store, seal=seal)
    if not found.items and not request.instructions:
        raise InvalidRequest("There is nothing to answer: input is empty.", param="input")
    response_id = response_id or new_id("resp")
    text_format = _text_format(request)
    turn = Turn(
        model=model.name,
        items=found.items,
        instructions=request.instructions,
        tools=tools.functions,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        max_tool_calls=min(request.max_tool_calls or max_tool_calls, max_tool_calls)
        if tools.hosted
        else request.max_tool_calls,
        text_format=text_format,
        verbosity=None if request.text is None else request.text.verbosity,
        temperature=_or(request.temperature, model.temperature),
        top_p=_or(request.top_p, model.top_p),
        presence_penalty=_or(request.presence_penalty, model.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, model.frequency_penalty),
        max_output_tokens=model.max_output_tokens if request.max_output_tokens is None else request.max_output_tokens,
        top_logprobs=request.top_logprobs,
        logprobs=_wants_logprobs(request),
        reasoning=request.reasoning,
        truncation=request.truncation,
        owner=owner,
        metadata=request.metadata,
        response_id=response_id,
    )
    demands = Demands(_format(text_format), _strict_arguments(request), tools.hosted)
    return Context(turn, model, demands, _response(request, turn, tools.echo, now), found.own)


async def conversation(
    request: CreateRequest | CompactRequest, model: Model, *, owner: str, store: History, seal: Seal
) -> Conversation:
    """Gathers what a request refers to and what it brings along, and opens what is sealed.

    Args:
        request: The validated request.
        model: Who is asked.
        owner: Whose responses and items may be referred to.
        store: Where earlier responses are.
        seal: Opens what the client carried.

    Raises:
        InvalidRequest: The request refers to what does not exist, holds what cannot be opened here, or what the
            model cannot read; `param` names the field.
    """
    previous = request.previous_response_id
    if previous is not None and not model.conversations:
        raise UnsupportedParameter(
            "This model does not go on from earlier responses. Send everything in input.", param="previous_response_id"
        )
    earlier = await _chain(previous, owner, store) if previous is not None else []
    own = await _own_items(request.input, earlier, owner, store)
    _check_pairs(earlier, own)
    if not model.vision:
        _check_text_only(earlier, own)
    items = [*earlier, *own.values()]
    return Conversation(_opened(items, len(earlier), list(own), owner, seal), list(own.values()))


def _or(asked: float | None, default: float) -> float:
    return default if asked is None else asked


# Earlier responses and references.


_LONGEST_CONVERSATION: Final = 64 * 1024 * 1024
"""Bytes of all responses that one continues, with their input."""


async def _chain(response_id: str, owner: str, store: History) -> list[Item]:
    records = await stored(store.chain(owner, response_id))
    if not records:
        raise PreviousResponseNotFound
    if records[0].previous_id is not None:
        raise PreviousResponseNotFound(
            "An earlier response of this conversation was deleted or has expired. Send the conversation in input."
        )
    # No conversation can become longer than this and one more turn, so that none can fill the memory.
    if sum(record.size for record in records) > _LONGEST_CONVERSATION:
        raise ContextLengthExceeded(
            "The conversation is longer than this server takes. Compact it, or begin anew.",
            param="previous_response_id",
        )
    if not records[-1].final:
        raise InvalidRequest(
            "The previous response is still in progress. Wait for its end before you continue it.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    items: list[Item] = []
    seen: set[str] = set()
    for record in records:
        for item in _items_of(record):
            if item.id not in seen:
                seen.add(item.id)
                items.append(item)
    return items


def _items_of(record: Record) -> list[Item]:
    try:
        return [*ITEMS.validate_json(record.input), *ITEMS.validate_python(from_json(record.response)["output"])]
    except (ValueError, KeyError) as error:
        raise StoreError("A stored response cannot be read. Send the conversation in input instead.") from error


async def _own_items(
    given: str | Sequence[InputItem] | None, earlier: Sequence[Item], owner: str, store: History
) -> dict[int, Item]:
    """The request's own items by their position in `input`; what the model knows already is left out."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {0: UserMessage.model_validate({"id": new_id("msg"), "content": given})}
    known = {item.id for item in earlier}
    # A reference to an item that is sent along, or to one that is known, adds nothing.
    skipped = known | {item.id for item in given if not isinstance(item, ItemReference)}
    wanted = {item.id for item in given if isinstance(item, ItemReference) and is_id(item.id)} - skipped
    stored_items = await _stored_items(wanted, owner, store) if wanted else {}
    items: dict[int, Item] = {}
    kept: set[str] = set()
    for position, item in enumerate(given):
        if isinstance(item, ItemReference):
            if item.id not in skipped:
                skipped.add(item.id)
                items[position] = _referenced(stored_items, item.id, position)
        elif not item.id or item.id not in known:
            # An id of ours comes back with the item that we gave it to; it stands for one item only.
            items[position] = item if is_id(item.id) and item.id not in kept else _with_id(item)
            kept.add(item.id)
            if isinstance(item, FunctionCallOutput) and item.call_id == UNPAIRED and item.name is not None:
                items[position] = items[position].model_copy(update={"call_id": new_id("call")})
    return items


def _with_id(item: Item) -> Item:
    return item.model_copy(update={"id": new_id(_PREFIXES.get(item.type, "item"))})


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


async def _stored_items(ids: Set[str], owner: str, store: History) -> dict[str, Item]:
    records = await stored(store.items(owner, ids))
    distinct = {record.id: record for record in records.values()}  # many items may be in one record
    return {item.id: item for record in distinct.values() for item in _items_of(record)}


def _referenced(items: Mapping[str, Item], item_id: str, position: int) -> Item:
    item = items.get(item_id)
    if item is None:
        raise InvalidRequest(
            "The item_reference names no stored item. Send the item itself.",
            param=f"input[{position}].id",
            code="item_not_found",
        )
    return item


def _check_pairs(earlier: Sequence[Item], own: Mapping[int, Item]) -> None:
    outputs = {position: item for position, item in own.items() if isinstance(item, FunctionCallOutput)}
    if not outputs:
        return
    calls = {item.call_id for item in (*earlier, *own.values()) if isinstance(item, FunctionCall)}
    for position, output in outputs.items():
        if output.call_id not in calls and output.name is None:
            raise InvalidRequest(
                f"No function call with the call_id {output.call_id!r} stands in the context of this output.",
                param=f"input[{position}].call_id",
                code="function_call_not_found",
            )


def _opened(items: Sequence[Item], earlier: int, positions: Sequence[int], owner: str, seal: Seal) -> list[Item]:
    """The items, with the reasoning and the summaries in them that were sealed for the client to carry."""
    opened: list[Item] = []
    for index, item in enumerate(items):
        own = index - earlier
        param = "previous_response_id" if own < 0 else f"input[{positions[own]}].encrypted_content"
        if isinstance(item, Reasoning) and item.encrypted_content and not item.content:
            text = seal.open(item.encrypted_content, kind="reasoning", owner=owner, param=param)
            if text is not None:
                item = item.model_copy(update={"content": [ReasoningText(text=text)]})
        elif isinstance(item, Compaction):
            item = item.opened(_summary(item, owner, seal, param))
        opened.append(item)
    return opened


def _summary(item: Compaction, owner: str, seal: Seal, param: str) -> str:
    """What a compaction stands for. Without it a conversation would lose its past, so there is no going on."""
    try:
        summary = from_json(seal.open(item.encrypted_content, kind="compaction", owner=owner, param=param) or "")
        if isinstance(summary["summary"], str):
            return summary["summary"]
    except (InvalidRequest, ValueError, KeyError, TypeError):
        pass
    raise InvalidRequest(
        "This compaction cannot be opened here: it was changed, or it comes from another server or user. "
        "Send the messages that it stands for, or compact them here.",
        param=param,
        code="invalid_encrypted_content",
    )


# What the model can do.


def _check_capabilities(request: CreateRequest, model: Model) -> None:
    if request.background and not request.store:
        raise InvalidRequest("A background response is one that is kept: leave store out, or true.", param="background")
    for field in ("conversation", "prompt"):
        # Not of this specification; but clients of its model know them, and an answer without them would be wrong.
        if getattr(request, field) is not None:
            raise UnsupportedParameter(f"There is no {field} here. Send everything in input.", param=field)
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise UnsupportedParameter("Obfuscation is not available here.", param="stream_options.include_obfuscation")
    if not model.structured_output and _text_format(request).type != "text":
        raise UnsupportedParameter("This model cannot be held to a format.", param="text.format")
    if not model.logprobs and _wants_logprobs(request):
        param = "top_logprobs" if request.top_logprobs else "include"
        raise UnsupportedParameter("This model gives no log probabilities.", param=param)
    if not model.reasoning and request.reasoning is not None and request.reasoning.effort not in (None, "none"):
        raise UnsupportedParameter("This model does not reason.", param="reasoning.effort")


def _wants_logprobs(request: CreateRequest) -> bool:
    return bool(request.top_logprobs) or "message.output_text.logprobs" in request.include


def _check_text_only(earlier: Sequence[Item], own: Mapping[int, Item]) -> None:
    for item in earlier:
        if _picture(item):
            raise UnsupportedParameter(_TEXT_ONLY, param="previous_response_id")
    for position, item in own.items():
        if place := _picture(item):
            raise UnsupportedParameter(_TEXT_ONLY, param=f"input[{position}].{place}")


_TEXT_ONLY = "This model reads text only."


def _picture(item: Item) -> str | None:
    """Where an item holds what is no text, such as `content[1]`."""
    if isinstance(item, Message):
        field, parts = "content", item.content
    elif isinstance(item, FunctionCallOutput) and not isinstance(item.output, str):
        field, parts = "output", item.output
    else:
        return None
    for index, part in enumerate(parts):
        if isinstance(part, InputImage | InputFile | InputVideo):
            return f"{field}[{index}]"
    return None


@dataclass(frozen=True, slots=True)
class _Tools:
    """A request's tools: as the model is shown them, those that are hosted by name, and as the response echoes them."""

    functions: list[FunctionTool]
    hosted: dict[str, HostedTool]
    echo: list[dict[str, Any]]


async def _tools(request: CreateRequest, model: Model, toolsets: Mapping[str, Toolset]) -> _Tools:
    tools = _Tools([], {}, [])
    names: set[str] = set()
    for index, tool in enumerate(request.tools):
        if isinstance(tool, FunctionTool):
            found = [tool]
        else:
            toolset = toolsets.get(tool.type)
            if toolset is None:
                if ":" in tool.type or tool.type.startswith(_SERVER_TOOLS):
                    known = f" It has {', '.join(list(toolsets)[:10])}." if toolsets else ""
                    raise UnsupportedParameter(
                        f"This server has no tool of this type.{known}", param=f"tools[{index}].type"
                    )
                continue  # the client's own, of a kind that this wire does not know
            hosted = _wanted(await toolset.tools(), tool, f"tools[{index}]")
            tools.hosted.update((one.name, one) for one in hosted)
            found = [
                FunctionTool(name=one.name, description=one.description, parameters=one.parameters) for one in hosted
            ]
        for function in found:
            if function.name in names:
                raise InvalidRequest("Two tools have the same name.", param=f"tools[{index}]")
            names.add(function.name)
        tools.functions.extend(found)
        tools.echo.append(tool.model_dump())
    if tools.functions and not model.tools and request.tool_choice != "none":
        raise UnsupportedParameter("This model cannot call tools.", param="tools")
    return tools


def _wanted(hosted: Sequence[HostedTool], tool: OtherTool, param: str) -> Sequence[HostedTool]:
    """Those of a toolset that the request switches on: all, or those that `allowed_tools` names."""
    settings = tool.model_extra or {}
    for setting in settings:
        if setting != "allowed_tools":
            raise UnsupportedParameter("A hosted tool has no such setting.", param=f"{param}.{setting}"[:100])
    names = settings.get("allowed_tools")
    if names is None:
        return hosted
    known = {one.name: one for one in hosted}
    if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
        raise InvalidRequest("allowed_tools is a list of names of these tools.", param=f"{param}.allowed_tools")
    return [one for one in hosted if one.name in names]


def _tool_choice(
    request: CreateRequest, tools: _Tools
) -> Literal["none", "auto", "required"] | NamedFunction | AllowedTools:
    """The choice with names of functions alone, hosted ones included."""
    choice: ToolChoice = request.tool_choice
    if isinstance(choice, str):
        if choice == "required" and not tools.functions:
            raise InvalidRequest("tool_choice is required, but there are no tools.", param="tool_choice")
        return choice
    if isinstance(choice, AllowedTools):
        named = [
            function
            for index, one in enumerate(choice.tools)
            for function in _named(one, tools, f"tool_choice.tools[{index}]")
        ]
        return choice.model_copy(update={"tools": named})
    functions = _named(choice, tools, "tool_choice")
    if len(functions) == 1:
        return functions[0]
    return AllowedTools.model_construct(tools=list[NamedTool](functions), mode="required")


def _named(choice: NamedFunction | NamedHosted, tools: _Tools, param: str) -> list[NamedFunction]:
    if isinstance(choice, NamedHosted):
        names = [
            name for name, tool in tools.hosted.items() if tool.type == choice.type and choice.name in (None, name)
        ]
        param = f"{param}.type" if choice.name is None else f"{param}.name"
    else:
        names = [tool.name for tool in tools.functions if tool.name == choice.name and tool.name not in tools.hosted]
        param = f"{param}.name"
    if not names:
        raise InvalidRequest("tool_choice names a tool that is not among the tools.", param=param)
    return [NamedFunction(name=name) for name in names]


def _format(text_format: TextFormat) -> Schema | None:
    if isinstance(text_format, JsonSchema) and text_format.schema_ is not None:
        return _schema(text_format.schema_, "text.format.schema")
    return Schema({"type": "object"}) if text_format.type != "text" else None


def _strict_arguments(request: CreateRequest) -> dict[str, Schema]:
    schemas: dict[str, Schema] = {}
    weight = 0
    for index, tool in enumerate(request.tools):
        if isinstance(tool, FunctionTool) and tool.strict and tool.parameters is not None:
            schema = schemas[tool.name] = _schema(tool.parameters, f"tools[{index}].parameters")
            weight += schema.weight
            if weight > _MOST_STRICT:
                raise InvalidRequest("The strict functions' schemas are too large together.", param="tools")
    return schemas


def _schema(schema: dict[str, Any], param: str) -> Schema:
    try:
        return Schema(schema)
    except ValueError as error:
        raise InvalidRequest(f"The schema {error}", param=param, code="invalid_schema") from None


# The response as it begins.


def _text_format(request: CreateRequest) -> TextFormat:
    if request.text is None or request.text.format is None:
        return _PLAIN
    if isinstance(request.text.format, JsonSchema) and request.text.format.schema_ is None:
        return JsonObject()
    return request.text.format


_PLAIN = PlainText()


def _response(request: CreateRequest, turn: Turn, tools: list[dict[str, Any]], now: float) -> dict[str, Any]:
    choice = request.tool_choice
    text: dict[str, Any] = {"format": {"type": turn.text_format.type}}
    if isinstance(turn.text_format, JsonSchema):
        # Clients fail on anything but null for the schema; they know their own.
        text["format"] |= turn.text_format.model_dump(exclude={"type", "schema_"}) | {"schema": None}
    if turn.verbosity is not None:
        text["verbosity"] = turn.verbosity
    return {
        "id": turn.response_id,
        "object": "response",
        "created_at": int(now),
        "completed_at": None,
        "status": "in_progress",
        "incomplete_details": None,
        "model": turn.model,
        "previous_response_id": request.previous_response_id,
        "instructions": request.instructions,
        "output": [],
        "error": None,
        "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "truncation": turn.truncation,
        "parallel_tool_calls": turn.parallel_tool_calls,
        "text": text,
        "top_p": turn.top_p,
        "presence_penalty": turn.presence_penalty,
        "frequency_penalty": turn.frequency_penalty,
        "top_logprobs": turn.top_logprobs,
        "temperature": turn.temperature,
        "reasoning": None if request.reasoning is None else request.reasoning.model_dump(),
        "usage": None,
        "max_output_tokens": turn.max_output_tokens,
        "max_tool_calls": None if request.max_tool_calls is None else turn.max_tool_calls,
        "store": request.store,
        "background": request.background,
        "service_tier": "default",
        "metadata": dict(turn.metadata),
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
