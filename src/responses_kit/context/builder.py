"""From a request to a turn: the chain before it, its references resolved, and what the model can't do refused."""

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
    """Resolves a request into a turn.

    Args:
        request: The validated request.
        owner: Whose responses and items may be referred to.
        models: The backend's models by name; the first answers where the request names none.
        store: Where earlier responses are.
        encryptor: Decrypts payloads that the client carries.
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
    tools = await resolve_tools(request, model, toolsets)
    choice = resolve_tool_choice(request, tools)
    check_capabilities(request, model)
    found = await load_conversation(request, model, owner=owner, store=store, encryptor=encryptor)
    if not found.items and not request.instructions:
        raise InvalidRequest("There is nothing to answer: input is empty.", param="input")
    response_id = response_id or new_id("resp")
    text_format = requested_format(request)
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
        logprobs=wants_logprobs(request),
        reasoning=request.reasoning,
        truncation=request.truncation,
        owner=owner,
        metadata=request.metadata,
        response_id=response_id,
    )
    demands = Constraints(compile_format(text_format), compile_strict_arguments(request), tools.hosted)
    return Context(turn, model, demands, _response(request, turn, tools.echo, now), found.own)


def _or(asked: float | None, default: float) -> float:
    return default if asked is None else asked


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
