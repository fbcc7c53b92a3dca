"""Tool definitions and tool choice (specification, "Tools" and "`tool_choice`")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from .base import Optional, WireModel
from .items import ExtensionType, ToolName


class FunctionTool(WireModel):
    """A function that the client runs. `parameters` is a JSON schema."""

    type: Literal["function"] = "function"
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OtherTool(WireModel):
    """A tool of a type that the specification does not define, such as a hosted tool."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1, max_length=256)]


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "~function" if kind == "function" else "~other"


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[OtherTool, Tag("~other")], Discriminator(_tool_kind)
]
"""Any tool of a request."""


class NamedFunction(WireModel):
    """The function that must be called, or an allowed one."""

    type: Literal["function"] = "function"
    name: ToolName


class NamedHosted(WireModel):
    """The hosted tools of a type that must or may be called; with a `name`, only the one with that name."""

    type: ExtensionType
    name: Optional[ToolName] = None


def choice_kind(value: Any) -> str | None:
    """Return the tag of a tool choice, which is a mode or a named tool."""
    if isinstance(value, str):
        return "~mode"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return "~hosted" if ":" in kind else f"~{kind}"


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("~function")] | Annotated[NamedHosted, Tag("~hosted")], Discriminator(choice_kind)
]
"""A tool that a tool choice names."""


class AllowedTools(WireModel):
    """The subset of the tools that may be called; the model sees all of them."""

    type: Literal["allowed_tools"] = "allowed_tools"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]
    mode: Annotated[
        Literal["none", "auto", "required"], BeforeValidator(lambda value: "auto" if value is None else value)
    ] = "auto"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[NamedFunction, Tag("~function")]
    | Annotated[NamedHosted, Tag("~hosted")]
    | Annotated[AllowedTools, Tag("~allowed_tools")],
    Discriminator(choice_kind),
]
"""Whether the model may or must call tools, and which."""
