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

_SERVER_TOOLS = (
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "mcp",
    "web_search",
)
"""Prefixes of tool types that ask the server to do the work. Other unknown types are the client's own."""


@dataclass(frozen=True, slots=True)
class ResolvedTools:
    """A request's tools: as the model is shown them, those that are hosted by name, and as the response echoes them."""

    functions: list[FunctionTool]
    hosted: dict[str, HostedTool]
    echo: list[dict[str, Any]]


async def resolve_tools(request: CreateRequest, model: Model, toolsets: Mapping[str, Toolset]) -> ResolvedTools:
    """Resolve the tools of a request against the toolsets of the kit.

    Raises:
        InvalidRequest: Two tools have the same name, or a hosted tool's settings are not valid.
        UnsupportedParameter: A tool is not available here, or the model cannot call tools.
    """
    tools = ResolvedTools([], {}, [])
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


def resolve_tool_choice(
    request: CreateRequest, tools: ResolvedTools
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


def _named(choice: NamedFunction | NamedHosted, tools: ResolvedTools, param: str) -> list[NamedFunction]:
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
