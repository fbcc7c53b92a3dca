"""The tools of a request: functions, hosted tools and the tool choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..backend import Model
from ..errors import (
    InvalidRequest,
    UnsupportedParameter,
)
from ..schema.request import CreateRequest
from ..schema.tools import AllowedTools, FunctionTool, NamedFunction, NamedHosted, NamedTool, OtherTool, ToolChoice
from ..tools import HostedTool, Toolset

__all__ = ["ResolvedTools", "resolve_tool_choice", "resolve_tools"]

_SERVER_TOOL_PREFIXES = (
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "mcp",
    "web_search",
)
"""Prefixes of tool types that the server would have to run. Clients run tools of other unknown types themselves."""


@dataclass(frozen=True, slots=True)
class ResolvedTools:
    """The tools of a request.

    Attributes:
        functions: All tools as functions, as the model sees them.
        hosted: The hosted tools by name.
        echo: The tools as the response echoes them.
    """

    functions: list[FunctionTool]
    hosted: dict[str, HostedTool]
    echo: list[dict[str, Any]]


async def resolve_tools(request: CreateRequest, model: Model, toolsets: Mapping[str, Toolset]) -> ResolvedTools:
    """Resolve the tools of a request against the toolsets of the kit.

    Raises:
        InvalidRequest: Two tools have the same name, or a hosted tool's settings are not valid.
        UnsupportedParameter: The server does not have a tool, or the model cannot call tools.
    """
    tools = ResolvedTools([], {}, [])
    names: set[str] = set()
    for index, tool in enumerate(request.tools):
        if isinstance(tool, FunctionTool):
            functions = [tool]
        else:
            toolset = toolsets.get(tool.type)
            if toolset is None:
                if ":" in tool.type or tool.type.startswith(_SERVER_TOOL_PREFIXES):
                    param = f"tools[{index}].type"
                    available = f" Available: {', '.join(list(toolsets)[:10])}." if toolsets else ""
                    raise UnsupportedParameter(f"'{param}' is not a tool of this server.{available}", param=param)
                continue  # a tool that the client runs, of a type that the specification does not define
            hosted = _select_tools(await toolset.tools(), tool, f"tools[{index}]")
            tools.hosted.update((one.name, one) for one in hosted)
            functions = [
                FunctionTool(name=one.name, description=one.description, parameters=one.parameters) for one in hosted
            ]
        for function in functions:
            if function.name in names:
                raise InvalidRequest("Two tools have the same name.", param=f"tools[{index}]")
            names.add(function.name)
        tools.functions.extend(functions)
        tools.echo.append(tool.model_dump())
    if tools.functions and not model.tools and request.tool_choice != "none":
        raise UnsupportedParameter("This model does not support 'tools'.", param="tools")
    return tools


def _select_tools(hosted: Sequence[HostedTool], tool: OtherTool, param: str) -> Sequence[HostedTool]:
    """Return the tools of a toolset that the request switches on: all, or those that `allowed_tools` names."""
    settings = tool.model_extra or {}
    for setting in settings:
        if setting != "allowed_tools":
            raise UnsupportedParameter(
                f"'{param}' supports no setting but 'allowed_tools'.", param=f"{param}.{setting}"[:100]
            )
    names = settings.get("allowed_tools")
    if names is None:
        return hosted
    available = {one.name: one for one in hosted}
    if not isinstance(names, list) or not all(isinstance(name, str) and name in available for name in names):
        param = f"{param}.allowed_tools"
        raise InvalidRequest(f"'{param}' must be a list of names of tools of this type.", param=param)
    return [one for one in hosted if one.name in names]


def resolve_tool_choice(
    request: CreateRequest, tools: ResolvedTools
) -> Literal["none", "auto", "required"] | NamedFunction | AllowedTools:
    """Return the tool choice with hosted tools replaced by the functions that represent them.

    Raises:
        InvalidRequest: The choice names a tool that is not among the tools, or requires one when there is none.
    """
    choice: ToolChoice = request.tool_choice
    if isinstance(choice, str):
        if choice == "required" and not tools.functions:
            raise InvalidRequest("'tool_choice' must not be 'required' without 'tools'.", param="tool_choice")
        return choice
    if isinstance(choice, AllowedTools):
        named = [
            function
            for index, one in enumerate(choice.tools)
            for function in _resolve_names(one, tools, f"tool_choice.tools[{index}]")
        ]
        return choice.model_copy(update={"tools": named})
    functions = _resolve_names(choice, tools, "tool_choice")
    if len(functions) == 1:
        return functions[0]
    return AllowedTools.model_construct(tools=list[NamedTool](functions), mode="required")


def _resolve_names(choice: NamedFunction | NamedHosted, tools: ResolvedTools, param: str) -> list[NamedFunction]:
    if isinstance(choice, NamedHosted):
        names = [
            name for name, tool in tools.hosted.items() if tool.type == choice.type and choice.name in (None, name)
        ]
        param = f"{param}.type" if choice.name is None else f"{param}.name"
    else:
        names = [tool.name for tool in tools.functions if tool.name == choice.name and tool.name not in tools.hosted]
        param = f"{param}.name"
    if not names:
        raise InvalidRequest(f"'{param}' is not one of the 'tools'.", param=param)
    return [NamedFunction(name=name) for name in names]
