"""Settings of a kit: limits, timeouts and their validation."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..backend import Backend, Model
from ..engine.hooks import OnResponseEnd, Scope
from ..errors import ConfigurationError
from ..runners.base import Runner
from ..stores.memory import MemoryStore
from ..stores.protocol import ResponseStore
from ..tools import HostedTool, Toolset

__all__ = [
    "Limits",
    "Owner",
    "Settings",
    "Timeouts",
    "check_backend",
    "check_runner",
    "check_store",
    "index_toolsets",
    "normalize_origins",
]

Owner = Callable[[Any], Awaitable[str | None] | str | None]
"""Return the owner of a host's request, or refuse the request by returning None or raising an `APIError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what clients can send and occupy.

    Args:
        max_body_bytes: Bytes of a request body or WebSocket frame, after decompression. Larger ones get a 413.
        max_threads: Synchronous turns that run at the same time, and likewise calls of synchronous tools. Further ones
            wait.
        max_tool_calls: Tool calls in one response if hosted tools are switched on. A request may ask for fewer.
        max_websockets: WebSockets that are open at the same time. Further ones get a 503.

    Raises:
        ConfigurationError: A value is not a whole number in range.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_threads: int = 64
    max_tool_calls: int = 64
    max_websockets: int = 1000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in ("max_tool_calls", "max_websockets") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"'{one.name}' must be a whole number, {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Durations in seconds.

    Args:
        keep_alive: Silence after which a stream gets a comment, so that proxies keep the connection open.
        send: Time that a client may leave a stream unread before the run is aborted. Until then the run holds its
            place in the backend.
        lease: Time after which a response counts as orphaned if its worker stops renewing the lease.
        websocket: Lifetime of a WebSocket (specification, "WebSocket Reconnects").

    Raises:
        ConfigurationError: A value is not a number above 0.
    """

    keep_alive: float = 15.0
    send: float = 60.0
    lease: float = 30.0
    websocket: float = 3600.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigurationError(f"'{one.name}' must be a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The validated settings of a kit; see `ResponsesKit` for each of them.

    Raises:
        ConfigurationError: A setting has the wrong type or contradicts another one.
    """

    backend: Backend
    store: ResponseStore
    tools: Sequence[Toolset] = ()
    runner: Runner | None = None
    secrets: Sequence[str] = field(default=(), repr=False)
    owner: Owner | None = None
    on_response_end: OnResponseEnd | None = None
    scope: Scope = field(default_factory=Scope)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    stream_reasoning: bool = False
    stream_extensions: bool = False
    resumable: bool = False
    allowed_origins: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        check_backend(self.backend)
        check_store(self.store)
        check_runner(self.runner, self.store)
        if self.owner is not None and not callable(self.owner):
            raise ConfigurationError("'owner' must be a function of the host's request")
        if self.on_response_end is not None and not callable(self.on_response_end):
            raise ConfigurationError("'on_response_end' must be a function of the owner and the response")
        expected: Mapping[str, type] = {"scope": Scope, "limits": Limits, "timeouts": Timeouts}
        for name, kind in expected.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(f"'{name}' must be an instance of {kind.__name__}, such as {kind.__name__}()")


def check_backend(backend: Backend) -> None:
    """Check that a backend is an instance of a subclass of `Backend` with distinct model names."""
    if isinstance(backend, type):
        raise ConfigurationError(f"'backend' must be an instance, not the class: use {backend.__name__}()")
    if not isinstance(backend, Backend):
        raise ConfigurationError(
            f"'backend' must be an instance of a subclass of Backend, not of {type(backend).__name__}"
        )
    name = type(backend).__name__
    if type(backend).generate is Backend.generate and "generate" not in vars(backend):
        raise ConfigurationError(f"{name} must define generate(self, turn)")
    if not isinstance(backend.models, Sequence) or isinstance(backend.models, str):
        raise ConfigurationError(f'{name}.models must be a list of names, such as models = ["some-name"]')
    names = [model.name if isinstance(model, Model) else model for model in backend.models]
    if not names:
        raise ConfigurationError(f'{name}.models must name at least one model, such as models = ["some-name"]')
    if not all(isinstance(one, str) and one for one in names) or len(set(names)) < len(names):
        raise ConfigurationError(f"{name}.models must hold different names, or Model instances with different names")


def check_store(store: ResponseStore) -> None:
    """Check that a store is an instance with all methods of `ResponseStore`."""
    if isinstance(store, type):
        raise ConfigurationError(f"'store' must be an instance, not the class: use {store.__name__}()")
    methods = [name for name, method in vars(ResponseStore).items() if inspect.iscoroutinefunction(method)]
    missing = [name for name in methods if not callable(getattr(store, name, None))]
    if missing:
        raise ConfigurationError(
            f"'store' must have the methods of ResponseStore; {type(store).__name__} lacks {', '.join(missing)}"
        )


def check_runner(runner: object | None, store: ResponseStore) -> None:
    """Check that a runner has the methods of `Runner`, and that its workers can reach the store."""
    if runner is not None and not all(callable(getattr(runner, name, None)) for name in ("bind", "submit")):
        raise ConfigurationError(f"'runner' must have the methods of Runner, unlike {type(runner).__name__}")
    if getattr(runner, "is_out_of_process", False) and isinstance(store, MemoryStore):
        raise ConfigurationError(
            "workers in other processes cannot read this process's memory: "
            "use a shared store, see docs/guides/stores.md"
        )


def index_toolsets(tools: Sequence[Toolset]) -> dict[str, Toolset]:
    """Return the toolsets by their types.

    Raises:
        ConfigurationError: An entry is not a toolset, or two have the same type.
    """
    toolsets: dict[str, Toolset] = {}
    for tool in tools:
        if isinstance(tool, type) or not callable(getattr(tool, "tools", None)):
            raise ConfigurationError("'tools' must hold HostedTool instances or toolsets; see HostedTool.from_function")
        if isinstance(tool, HostedTool) and type(tool).call is HostedTool.call:
            raise ConfigurationError(f"the tool {tool.type} must define call(self, arguments, turn)")
        if toolsets.setdefault(tool.type, tool) is not tool:
            raise ConfigurationError(f"two tools have the type {tool.type}")
    return toolsets


def normalize_origins(origins: Sequence[str]) -> frozenset[str]:
    """Return the origins in lower case and without a trailing slash, as they are compared."""
    if isinstance(origins, str) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigurationError("'allowed_origins' must be a list of origins, such as [\"https://app.example\"]")
    return frozenset(origin.rstrip("/").lower() for origin in origins)
