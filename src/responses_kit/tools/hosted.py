"""Hosted tools, which the kit runs when the model calls them (specification, "Extending tools").

A client switches a tool on by its type in `tools`, as in ``{"type": "acme:weather"}``. Each call becomes an item of the
same type, its receipt, with the `name`, `call_id` and `arguments` of the call, and its `status` and `output`. If a
client sends a receipt as input, it represents the call and its output.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NotRequired, Protocol

import pydantic
from pydantic_core import from_json
from typing_extensions import TypedDict

from ..errors import ConfigurationError, ToolError
from ..protocol.json_schema import Schema
from ..schema.base import replace_surrogates
from ..schema.items import EXTENSION_TYPE, TOOL_NAME
from ..turn import Turn

__all__ = ["HostedTool", "Toolset"]


class Toolset(Protocol):
    """Tools that a client switches on together, by one type."""

    type: str

    async def tools(self) -> Sequence[HostedTool]:
        """Return the tools, each with the toolset's type.

        Raises:
            responses_kit.errors.APIError: The tools are not available now.
        """

    async def aclose(self) -> None:
        """Release the toolset's resources. Called once, by `ResponsesKit.aclose`."""


class HostedTool:
    """A tool that the kit runs. Subclass it and define `call`, or use `from_function`.

    Args:
        type: `slug:name`. The tool's type in requests, and the type of its receipts.
        name: The name that the model sees; by default the part after the slug.
        description: The description that the model sees.
        parameters: The JSON schema of the arguments; by default the tool has none. Arguments are validated with it.
        timeout: Seconds after which a call fails.

    Raises:
        ConfigurationError: The type, the name or the schema is not valid.
    """

    def __init__(
        self,
        type: str,  # noqa: A002  # the member's name on the wire
        *,
        name: str | None = None,
        description: str = "",
        parameters: dict[str, Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        if not EXTENSION_TYPE.fullmatch(type):
            raise ConfigurationError('The type of a hosted tool must have the form slug:name, such as "acme:weather".')
        self.type = type
        self.name = re.sub(r"[^a-zA-Z0-9_-]", "_", type.partition(":")[2])[:64] if name is None else name
        if not TOOL_NAME.fullmatch(self.name):
            raise ConfigurationError("The name of a tool must have 1 to 64 letters, digits, underscores or hyphens.")
        self.description = description
        self.parameters: dict[str, Any] = parameters or {"type": "object", "properties": {}}
        self.timeout = timeout
        try:
            self._schema = Schema(self.parameters)
        except ValueError as error:
            raise ConfigurationError(f"The schema in 'parameters' of the tool {self.name} {error}") from None

    @classmethod
    def from_function(
        cls,
        type: str,  # noqa: A002  # the member's name on the wire
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = 30.0,
    ) -> HostedTool:
        """Return a hosted tool that calls a function with typed parameters.

        The schema is derived from the annotations, and arguments are converted to them: models, dates, enums. A
        parameter annotated with `Turn` receives the turn, with the owner, and is not part of the schema. A plain
        function runs in a thread. A result that is not a `str` is encoded as JSON.

        Args:
            type: As for the class.
            function: A plain or async function.
            name: The name that the model sees; by default the function's name.
            description: The description that the model sees; by default the function's docstring.
            timeout: Seconds after which a call fails.

        Raises:
            ConfigurationError: The parameters cannot be described by a JSON schema.
        """
        return _FunctionTool(type, function, name=name, description=description, timeout=timeout)

    async def tools(self) -> Sequence[HostedTool]:
        """Return this tool, because a tool is a toolset with one member."""
        return [self]

    async def aclose(self) -> None:
        """Release the tool's resources."""

    def parse_arguments(self, arguments: str) -> dict[str, Any]:
        """Return the arguments of a call from their JSON text.

        Raises:
            ToolError: The arguments do not match `parameters`; the message explains the violation to the model.
        """
        arguments = replace_surrogates(arguments).strip() or "{}"
        violation = self._schema.validate(arguments)
        if violation is not None:
            raise ToolError(f"The arguments are not valid: {violation.message}")
        value = from_json(arguments)
        if not isinstance(value, dict):
            raise ToolError("The arguments are not valid: they must be a JSON object.")
        return value

    def call(self, arguments: dict[str, Any], turn: Turn) -> Awaitable[Any] | Any:
        """Run the tool: on the event loop if defined as `async def`, in a thread if defined as plain `def`.

        Args:
            arguments: The model's arguments, validated.
            turn: The turn of the call.

        Returns:
            Text, or JSON values, for the model and the receipt.

        Raises:
            responses_kit.errors.ToolError: The tool cannot do its work; the model sees the message. Any other
                exception is logged, and the model only sees that the tool failed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define call(self, arguments, turn)")

    @property
    def is_async(self) -> bool:
        """Whether `call` is async."""
        return inspect.iscoroutinefunction(self.call)


class _FunctionTool(HostedTool):
    def __init__(
        self,
        type: str,  # noqa: A002  # the member's name on the wire
        function: Callable[..., Any],
        *,
        name: str | None,
        description: str | None,
        timeout: float,
    ) -> None:
        self._function = function
        self._arguments, self._turn_parameters = _inspect_parameters(function)
        super().__init__(
            type,
            name=getattr(function, "__name__", None) if name is None else name,
            description=inspect.getdoc(function) or "" if description is None else description,
            parameters=_remove_titles(self._arguments.json_schema()),
            timeout=timeout,
        )

    def parse_arguments(self, arguments: str) -> dict[str, Any]:
        super().parse_arguments(arguments)
        try:
            return self._arguments.validate_json(replace_surrogates(arguments).strip() or "{}")
        except pydantic.ValidationError as error:
            details = error.errors(include_url=False, include_input=False, include_context=False)[0]
            path = ".".join(map(str, details["loc"]))
            raise ToolError(f"The arguments are not valid: {path}: {details['msg']}") from None

    def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
        return self._function(**arguments, **dict.fromkeys(self._turn_parameters, turn))

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)


def _inspect_parameters(function: Callable[..., Any]) -> tuple[pydantic.TypeAdapter[dict[str, Any]], Sequence[str]]:
    """Return the validator of a function's arguments, and the names of its parameters that receive the turn."""
    name = getattr(function, "__name__", "a tool")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        members: dict[str, Any] = {}
        turn_parameters: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"The tool function {name} must not have *args, **kwargs or positional-only parameters."
                )
            kind = hints.get(parameter.name, Any)
            if Turn in (kind, *typing.get_args(kind)):
                turn_parameters.append(parameter.name)
            else:
                members[parameter.name] = kind if parameter.default is parameter.empty else NotRequired[kind]
        make_typed_dict: Any = TypedDict  # type checkers accept it with literals only
        arguments_type = make_typed_dict(name, members)
        arguments_type.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
        adapter = pydantic.TypeAdapter(arguments_type)
        adapter.json_schema()
    except (TypeError, ValueError, NameError, pydantic.PydanticUserError) as error:
        raise ConfigurationError(
            f"The parameters of the tool function {name} have no JSON schema ({type(error).__name__}). "
            "Annotate them with JSON types or pydantic models."
        ) from error
    return adapter, turn_parameters


def _remove_titles(schema: Any) -> Any:
    """Return the schema without pydantic's titles, which cost tokens and add no information."""
    if isinstance(schema, Mapping):
        return {
            key: {name: _remove_titles(member) for name, member in value.items()}
            if key in ("properties", "$defs") and isinstance(value, Mapping)
            else _remove_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_remove_titles(member) for member in schema] if isinstance(schema, list) else schema
