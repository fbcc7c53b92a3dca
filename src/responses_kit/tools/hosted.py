"""Hosted tools: what the kit runs itself when the model calls it (specification, "Extending tools").

A client switches a tool on by naming its type in `tools`, as in ``{"type": "acme:weather"}``. Each call becomes an
item of the same type, its receipt: `name`, `call_id` and `arguments` say how it was called, `status` and `output` what
came of it. Sent back as input, a receipt stands for the call and its output.
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
    """Tools that are switched on together, by one type."""

    type: str

    async def tools(self) -> Sequence[HostedTool]:
        """The tools, each with the toolset's type.

        Raises:
            responses_kit.errors.APIError: They cannot be had now.
        """

    async def aclose(self) -> None:
        """Frees what the toolset holds; called once, by `ResponsesKit.aclose`."""


class HostedTool:
    """A tool that the kit runs itself. Subclass it and write `call`, or make one `from_function`.

    Args:
        type: `slug:name`. What clients put into `tools`, and the type of the receipts.
        name: What the model calls it; by default what follows the slug.
        description: What the model is told of it.
        parameters: JSON schema of its arguments; by default it has none. What the model gives is held to it.
        timeout: Seconds after which a call is given up.

    Raises:
        ConfigurationError: The type, the name or the schema is none.
    """

    def __init__(
        self,
        type: str,  # noqa: A002  # the wire's own word
        *,
        name: str | None = None,
        description: str = "",
        parameters: dict[str, Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        if not EXTENSION_TYPE.fullmatch(type):
            raise ConfigurationError('a hosted tool\'s type is slug:name, such as "acme:weather"')
        self.type = type
        self.name = re.sub(r"[^a-zA-Z0-9_-]", "_", type.partition(":")[2])[:64] if name is None else name
        if not TOOL_NAME.fullmatch(self.name):
            raise ConfigurationError("a tool's name is 1 to 64 letters, digits, underscores or hyphens")
        self.description = description
        self.parameters: dict[str, Any] = parameters or {"type": "object", "properties": {}}
        self.timeout = timeout
        try:
            self._schema = Schema(self.parameters)
        except ValueError as error:
            raise ConfigurationError(f"the schema of the tool {self.name}'s parameters {error}") from None

    @classmethod
    def from_function(
        cls,
        type: str,  # noqa: A002  # the wire's own word
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = 30.0,
    ) -> HostedTool:
        """A hosted tool that calls a function with typed parameters.

        The schema comes from the annotations, and the function gets what they say: models, dates, enums. A parameter
        annotated `Turn` is not shown to the model; it gets the turn, and with it whose request this is. A plain
        function runs in a thread. What is returned is shown to the model as text, or else as JSON.

        Args:
            type: As for the class.
            function: Plain or async.
            name: What the model calls it; by default the function's own name.
            description: By default the function's docstring.
            timeout: Seconds after which a call is given up.

        Raises:
            ConfigurationError: The function's parameters have no JSON schema.
        """
        return _Function(type, function, name=name, description=description, timeout=timeout)

    async def tools(self) -> Sequence[HostedTool]:
        """Itself: a tool is a toolset of one."""
        return [self]

    async def aclose(self) -> None:
        """Frees what the tool holds."""

    def read(self, arguments: str) -> dict[str, Any]:
        """The arguments of a call.

        Raises:
            ToolError: They are not what `parameters` says; tells the model why.
        """
        arguments = replace_surrogates(arguments).strip() or "{}"
        fault = self._schema.fault(arguments)
        if fault is not None:
            raise ToolError(f"The arguments are not valid: {fault.message}")
        value = from_json(arguments)
        if not isinstance(value, dict):
            raise ToolError("The arguments are not valid: they must be a JSON object.")
        return value

    def call(self, arguments: dict[str, Any], turn: Turn) -> Awaitable[Any] | Any:
        """Does what the tool is for. Written as `async def`, it runs on the event loop; as a plain `def`, in a thread.

        Args:
            arguments: As the model gave them, and valid.
            turn: The turn in which it was called.

        Returns:
            Text, or anything that is JSON; it is shown to the model and stands in the receipt.

        Raises:
            responses_kit.errors.ToolError: It cannot be done; the message is shown to the model. Any other exception
                says no more than that the tool failed, and goes to the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must define call(self, arguments, turn)")

    @property
    def waits(self) -> bool:
        """Whether `call` is async."""
        return inspect.iscoroutinefunction(self.call)


class _Function(HostedTool):
    def __init__(
        self,
        type: str,  # noqa: A002  # the wire's own word
        function: Callable[..., Any],
        *,
        name: str | None,
        description: str | None,
        timeout: float,
    ) -> None:
        self._function = function
        self._arguments, self._turns = _signature(function)
        super().__init__(
            type,
            name=getattr(function, "__name__", None) if name is None else name,
            description=inspect.getdoc(function) or "" if description is None else description,
            parameters=_untitled(self._arguments.json_schema()),
            timeout=timeout,
        )

    def read(self, arguments: str) -> dict[str, Any]:
        super().read(arguments)
        try:
            return self._arguments.validate_json(replace_surrogates(arguments).strip() or "{}")
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            path = ".".join(map(str, first["loc"]))
            raise ToolError(f"The arguments are not valid: {path}: {first['msg']}") from None

    def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
        return self._function(**arguments, **dict.fromkeys(self._turns, turn))

    @property
    def waits(self) -> bool:
        return inspect.iscoroutinefunction(self._function)


def _signature(function: Callable[..., Any]) -> tuple[pydantic.TypeAdapter[dict[str, Any]], Sequence[str]]:
    """What reads a function's arguments, and the names of its parameters that take the turn."""
    name = getattr(function, "__name__", "a tool")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        members: dict[str, Any] = {}
        turns: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"{name}: a tool's parameters all have names; it cannot take *args or **kwargs"
                )
            kind = hints.get(parameter.name, Any)
            if Turn in (kind, *typing.get_args(kind)):
                turns.append(parameter.name)
            else:
                members[parameter.name] = kind if parameter.default is parameter.empty else NotRequired[kind]
        make: Any = TypedDict  # type checkers know it only with literals
        shape = make(name, members)
        shape.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
        adapter = pydantic.TypeAdapter(shape)
        adapter.json_schema()
    except (TypeError, ValueError, NameError, pydantic.PydanticUserError) as error:
        raise ConfigurationError(
            f"{name}: its parameters cannot be shown to a model ({type(error).__name__}). Annotate them with types "
            "that are JSON, or pydantic models."
        ) from error
    return adapter, turns


def _untitled(schema: Any) -> Any:
    """The schema without pydantic's titles, which tell a model nothing and cost tokens."""
    if isinstance(schema, Mapping):
        return {
            key: {name: _untitled(member) for name, member in value.items()}
            if key in ("properties", "$defs") and isinstance(value, Mapping)
            else _untitled(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_untitled(member) for member in schema] if isinstance(schema, list) else schema
