"""Building the context of a request: its turn, its constraints and its initial response object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backend import Model
from ..errors import (
    InvalidRequest,
    ModelNotFound,
)
from ..protocol.encryption import Encryptor
from ..protocol.ids import new_id
from ..schema.items import (
    Item,
)
from ..schema.request import CreateRequest, JsonSchema
from ..stores.protocol import History
from ..tools import Toolset
from ..turn import Turn
from .capabilities import check_capabilities, requested_format, wants_logprobs
from .constraints import Constraints, compile_format, compile_strict_arguments
from .history import load_conversation
from .tools import resolve_tool_choice, resolve_tools

__all__ = ["Context", "build_context"]


@dataclass(frozen=True, slots=True)
class Context:
    """A resolved request.

    Attributes:
        turn: The turn for the backend.
        model: The model that answers.
        constraints: Constraints on the output that the turn does not contain.
        response: The initial response object.
        input: The request's own input items, with ids.
    """

    turn: Turn
    model: Model
    constraints: Constraints
    response: dict[str, Any]
    input: list[Item]


async def build_context(
    request: CreateRequest,
    *,
    owner: str,
    models: Mapping[str, Model],
    store: History,
    encryptor: Encryptor,
    toolsets: Mapping[str, Toolset],
    max_tool_calls: int,
    now: float,
    response_id: str | None = None,
) -> Context:
    """Resolve a request into a turn.

    Args:
        request: The validated request.
        owner: The owner of the request, and of the responses and items that it may refer to.
        models: The backend's models by name. The first one answers requests without a `model`.
        store: The store of earlier responses.
        encryptor: Decrypts payloads that clients carry.
        toolsets: The kit's toolsets by type.
        max_tool_calls: The maximum number of tool calls if hosted tools are switched on.
        now: Seconds since the epoch.
        response_id: The id of the response if it exists already, such as a queued one.

    Raises:
        InvalidRequest: The request contradicts itself, refers to a missing response or item, or requires a feature
            that the model does not support. `param` is the path of the invalid parameter.
    """
    model = next(iter(models.values())) if request.model is None else models.get(request.model)
    if model is None:
        raise ModelNotFound
    tools = await resolve_tools(request, model, toolsets)
    choice = resolve_tool_choice(request, tools)
    check_capabilities(request, model)
    conversation = await load_conversation(request, model, owner=owner, store=store, encryptor=encryptor)
    if not conversation.items and not request.instructions:
        raise InvalidRequest("'input' must not be empty.", param="input")
    response_id = response_id or new_id("resp")
    text_format = requested_format(request)
    turn = Turn(
        model=model.name,
        items=conversation.items,
        instructions=request.instructions,
        tools=tools.functions,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        max_tool_calls=min(request.max_tool_calls or max_tool_calls, max_tool_calls)
        if tools.hosted
        else request.max_tool_calls,
        text_format=text_format,
        verbosity=None if request.text is None else request.text.verbosity,
        temperature=_or_default(request.temperature, model.temperature),
        top_p=_or_default(request.top_p, model.top_p),
        presence_penalty=_or_default(request.presence_penalty, model.presence_penalty),
        frequency_penalty=_or_default(request.frequency_penalty, model.frequency_penalty),
        max_output_tokens=model.max_output_tokens if request.max_output_tokens is None else request.max_output_tokens,
        top_logprobs=request.top_logprobs,
        logprobs=wants_logprobs(request),
        reasoning=request.reasoning,
        truncation=request.truncation,
        owner=owner,
        metadata=request.metadata,
        response_id=response_id,
    )
    constraints = Constraints(compile_format(text_format), compile_strict_arguments(request), tools.hosted)
    response = _initial_response(request, turn, tools.echo, now)
    return Context(turn, model, constraints, response, conversation.input_items)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _initial_response(request: CreateRequest, turn: Turn, tools: list[dict[str, Any]], now: float) -> dict[str, Any]:
    choice = request.tool_choice
    text: dict[str, Any] = {"format": {"type": turn.text_format.type}}
    if isinstance(turn.text_format, JsonSchema):
        # Clients fail if the echoed schema is not null.
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
