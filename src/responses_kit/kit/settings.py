"""What a kit can be made of; whatever is wrong is a `ConfigurationError` at once, that says how to mend it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Final

from ..backend import Backend, Model
from ..errors import ConfigurationError
from ..stores.memory import MemoryStore
from ..stores.protocol import ResponseStore
from ..tools import HostedTool, Toolset

__all__ = ["check_backend", "check_numbers", "check_runner", "check_store", "index_toolsets", "normalize_origins"]


def check_backend(backend: Backend) -> None:
    """Whether it is one, with different names for its models."""
    if isinstance(backend, type):
        raise ConfigurationError(f"give the kit an instance of {backend.__name__}, not the class: {backend.__name__}()")
    if not isinstance(backend, Backend):
        raise ConfigurationError(f"a backend is an instance of a subclass of Backend, not of {type(backend).__name__}")
    name = type(backend).__name__
    if type(backend).generate is Backend.generate and "generate" not in vars(backend):
        raise ConfigurationError(f"{name} must define generate(self, turn)")
    if not isinstance(backend.models, Sequence) or isinstance(backend.models, str):
        raise ConfigurationError(f'{name}.models must be a list of names, such as models = ["some-name"]')
    names = [model.name if isinstance(model, Model) else model for model in backend.models]
    if not names:
        raise ConfigurationError(f'{name} names no models: set models = ["some-name"]')
    if not all(isinstance(one, str) and one for one in names) or len(set(names)) < len(names):
        raise ConfigurationError(f"{name}.models must hold different names, or Model instances with different names")


def check_store(store: ResponseStore | None) -> None:
    """Whether it has all methods of a store."""
    methods = [name for name, method in vars(ResponseStore).items() if inspect.iscoroutinefunction(method)]
    missing = [name for name in methods if store is not None and not callable(getattr(store, name, None))]
    if missing or isinstance(store, type):
        what = store.__name__ if isinstance(store, type) else type(store).__name__
        lacking = f" it lacks {', '.join(missing)}" if missing else " it is the class"
        raise ConfigurationError(f"a store is an instance with the methods of ResponseStore; {what} is none:{lacking}")


def check_runner(runner: object | None, store: ResponseStore) -> None:
    """Whether it is one, whose workers can reach the store."""
    if runner is not None and not all(callable(getattr(runner, name, None)) for name in ("bind", "submit")):
        raise ConfigurationError(f"a runner is an instance with the methods of Runner, not {type(runner).__name__}")
    if getattr(runner, "is_out_of_process", False) and isinstance(store, MemoryStore):
        raise ConfigurationError(
            "other processes cannot see this one's memory: give the kit a store that all share, see docs/stores.md"
        )


_WHOLE: Final[Mapping[str, int]] = {"max_body_bytes": 1, "threads": 1, "max_tool_calls": 0, "max_sockets": 0}
"""Settings that are whole numbers, and how small they may be."""

_SECONDS: Final = ("keep_alive", "patience", "lease", "socket_seconds")


def check_numbers(given: Mapping[str, object]) -> None:
    """Whether what is to be a number is one: what comes from the environment, say, is text."""
    for name, least in _WHOLE.items():
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{name} is a whole number, {least} or more")
    for name in _SECONDS:
        value = given.get(name, 1.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigurationError(f"{name} is a number of seconds, more than 0")


def index_toolsets(tools: Sequence[Toolset]) -> dict[str, Toolset]:
    """The toolsets by their types, each once."""
    toolsets: dict[str, Toolset] = {}
    for tool in tools:
        if isinstance(tool, type) or not callable(getattr(tool, "tools", None)):
            raise ConfigurationError("tools holds HostedTool instances, or toolsets; see HostedTool.from_function")
        if isinstance(tool, HostedTool) and type(tool).call is HostedTool.call:
            raise ConfigurationError(f"the tool {tool.type} must define call(self, arguments, turn)")
        if toolsets.setdefault(tool.type, tool) is not tool:
            raise ConfigurationError(f"two tools have the type {tool.type}")
    return toolsets


def normalize_origins(origins: Sequence[str]) -> frozenset[str]:
    """The origins, as they are compared."""
    if isinstance(origins, str) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigurationError('allowed_origins is a list of origins, such as ["https://app.example"]')
    return frozenset(origin.rstrip("/").lower() for origin in origins)
