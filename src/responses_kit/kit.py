"""ResponsesKit: everything that the API can do, as methods; hosts and transports are built on it."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from .backend import Backend, Model
from .companion import unwrapped_group
from .context import build
from .errors import ClientGone, ConfigurationError, InvalidRequest, NotFound, Unauthorized
from .ids import new_id
from .machine import Event, Machine
from .runs import OpenRuns, Run
from .schema.request import CreateRequest
from .sealing import Seal
from .stores import Record, ResponseStore, stored
from .stores.memory import MemoryStore
from .tools import HostedTool, Toolset
from .validation import as_json, parse_request

__all__ = ["Owner", "ResponsesKit"]

logger = logging.getLogger("responses_kit")


Owner = Callable[[Any], Awaitable[str | None] | str | None]
"""Names the owner of a host's request, or refuses it by returning None or raising an `APIError`."""


class ResponsesKit:
    """The Open Responses API over one backend.

    Args:
        backend: Answers the turns.
        store: Keeps responses; a bounded memory store by default.
        owner: Called with the host's own request object; returns whose responses the request may see, as a
            `str`. None, or anything empty, means that nobody may: a 401. A plain function is called on the
            event loop and must not wait; an async one may. Without a hook everybody shares one owner, and only
            ids keep them apart.
        max_body_bytes: Largest request body, after decompression.
        keep_alive: Seconds of silence after which a stream gets a comment.
        patience: Seconds for which a client may leave a stream unread before it is taken for gone. Until then
            it holds its turn of the backend.
        threads: Most turns of a synchronous backend at the same time, and most calls of plain tools; others wait.
        reasoning_events: Stream raw reasoning as `response.reasoning.delta`. Off by default, since some
            clients fail on it; raw reasoning always arrives whole in its item.
        extension_events: Stream `outputs.Event`. Off by default for the same reason.
        tools: Hosted tools, and toolsets such as MCP servers, that clients may switch on.
        max_tool_calls: Most calls in one response where hosted tools are switched on; requests may ask for fewer.
        secrets: Seal what clients carry, such as encrypted reasoning. The first one seals, all open, so that they can
            be replaced. Without any, what is sealed opens in this process alone. See `sealing.Seal`.
        clock: Seconds since the epoch.

    Raises:
        ConfigurationError: The backend, the store, a tool or the owner hook is none, or a secret is too short.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        store: ResponseStore | None = None,
        owner: Owner | None = None,
        max_body_bytes: int = 64 * 1024 * 1024,
        keep_alive: float = 15.0,
        patience: float = 60.0,
        threads: int = 64,
        reasoning_events: bool = False,
        extension_events: bool = False,
        tools: Sequence[Toolset] = (),
        max_tool_calls: int = 64,
        secrets: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check_backend(backend)
        _check_store(store)
        if owner is not None and not callable(owner):
            raise ConfigurationError("owner is a function of the host's request, not a name")
        self.backend = backend
        self.store: ResponseStore = MemoryStore() if store is None else store
        self.max_body_bytes = max_body_bytes
        self.keep_alive = keep_alive
        self.patience = patience
        self.max_tool_calls = max_tool_calls
        self._toolsets = _by_type(tools)
        self._seal = Seal(secrets)
        self._owner = owner
        self._clock = clock
        self._started = clock()
        self._open = OpenRuns()
        self._closed = False
        self._named: tuple[tuple[str | Model, ...], Mapping[str, Model]] = ((), {})
        self._limiter = _Limiter(threads)
        self._tool_limiter = _Limiter(threads)  # of their own, so that tools that hang leave the backend's alone
        self._reasoning_events = reasoning_events
        self._extension_events = extension_events

    async def owner_of(self, request: Any) -> str:
        """The owner of a host's request.

        Raises:
            Unauthorized: The owner hook named nobody.
        """
        if self._owner is None:
            return ""
        owner = self._owner(request)
        if inspect.isawaitable(owner):
            owner = await owner
        if not owner:
            raise Unauthorized("This server needs a valid key or session.")
        if not isinstance(owner, str):
            # A number would do in one store and not in the next; and True is nobody's name.
            raise ConfigurationError(f"the owner hook returns a str, or None for nobody, not {type(owner).__name__}")
        return owner

    # Responses.

    async def begin(self, body: Any, *, owner: str = "") -> Run:
        """Validates a request and creates its response, ready to be executed.

        Args:
            body: The request as JSON values, or as a `CreateRequest`.
            owner: Whose response it becomes.

        Raises:
            InvalidRequest: The request is not valid or cannot be honoured.
            StoreError: The store is out of reach.
        """
        self._open.check()  # before anything is started for a request that comes too late
        request = body if isinstance(body, CreateRequest) else parse_request(as_json(body))
        context = await build(
            request,
            owner=owner,
            models=self._models(),
            store=self.store,
            seal=self._seal,
            toolsets=self._toolsets,
            max_tool_calls=self.max_tool_calls,
            now=self._clock(),
        )
        sealed = "reasoning.encrypted_content" in request.include
        machine = Machine(
            context.response,
            new_id=new_id,
            reasoning_events=self._reasoning_events,
            extension_events=self._extension_events,
            seal=functools.partial(self._seal.close, kind="reasoning", owner=owner) if sealed else None,
        )
        run = Run(
            backend=self.backend,
            context=context,
            machine=machine,
            store=self.store if request.store else None,
            threads=self._limiter.here,
            tool_threads=self._tool_limiter.here,
            open=self._open,
            clock=self._clock,
        )
        await run.create()
        return run

    async def create(self, body: Any, *, owner: str = "") -> dict[str, Any]:
        """Answers a request and returns the response object, whole.

        Raises:
            APIError: The request was invalid, or the response failed.
        """
        run = await self.begin(body, owner=owner)
        await run.collect()
        return run.response

    @asynccontextmanager
    async def stream(self, body: Any, *, owner: str = "") -> AsyncIterator[AsyncIterator[Event]]:
        """Answers a request event by event; leaving the context early cancels the response.

        Example::

            async with kit.stream({"input": "Hello"}) as events:
                async for event in events:
                    ...

        Raises:
            APIError: The request was invalid. What fails later is told by events.
        """
        run = await self.begin(body, owner=owner)
        send, receive = anyio.create_memory_object_stream[Event](0)

        async def tell(events: list[Event]) -> None:
            try:
                for event in events:
                    await send.send(event)
            except anyio.BrokenResourceError:
                raise ClientGone from None

        async def execute() -> None:
            async with send:
                await run.execute(tell)

        async with unwrapped_group() as group, receive:
            group.start_soon(execute)
            try:
                yield receive
            finally:
                group.cancel_scope.cancel()

    async def retrieve(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """The stored response object.

        Raises:
            NotFound: This owner has no such response.
        """
        response: dict[str, Any] = from_json((await self._record(response_id, owner)).response)
        return response

    async def delete(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Forgets a stored response.

        Raises:
            NotFound: This owner has no such response.
        """
        if not await stored(self.store.delete(owner, response_id)):
            raise _no_response()
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(
        self,
        response_id: str,
        *,
        owner: str = "",
        limit: int = 20,
        order: str = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """A page of the input items that a stored response was given itself.

        Args:
            response_id: The response.
            owner: Whose it is.
            limit: Most items, 1 to 100.
            order: "asc" for from the first on, "desc" for from the last.
            after: Id of the item that the page follows.

        Raises:
            NotFound: This owner has no such response.
            InvalidRequest: A bad page.
        """
        if not 1 <= limit <= 100:
            raise InvalidRequest("limit is a number from 1 to 100.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order is asc or desc.", param="order")
        record = await self._record(response_id, owner)
        items: list[dict[str, Any]] = from_json(record.input)
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidRequest("after names no input item of this response.", param="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }

    # Models.

    def models(self) -> dict[str, Any]:
        """The list of models, as `GET /models` shows it."""
        return {"object": "list", "data": [self._model(model) for model in self._models().values()]}

    def model(self, name: str) -> dict[str, Any]:
        """One model.

        Raises:
            NotFound: The backend has no such model.
        """
        model = self._models().get(name)
        if model is None:
            raise NotFound("No such model here. GET /models lists the models that exist.", code="model_not_found")
        return self._model(model)

    async def aclose(self) -> None:
        """Ends the responses in progress, waits until their records are final, and frees what the backend holds.

        Call it where your app shuts down, in the event loop that serves it, before the store is closed. Clients
        that are still there are told that their response has failed, and new requests are refused.
        """
        try:
            await self._open.stop()
        finally:
            if not self._closed:
                self._closed = True
                try:
                    self.backend.close()
                finally:
                    await self._close_tools()

    async def _close_tools(self) -> None:
        for toolset in self._toolsets.values():
            try:
                await toolset.aclose()
            except Exception as error:  # the others have to be closed, too
                logger.error("the tools of %s could not be closed", toolset.type, exc_info=error)

    def _models(self) -> Mapping[str, Model]:
        models = tuple(self.backend.models)  # they may change at any time
        if models != self._named[0]:
            named = (Model(model) if isinstance(model, str) else model for model in models)
            self._named = (models, {model.name: model for model in named})
        return self._named[1]

    def _model(self, model: Model) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": int(self._started), "owned_by": model.owned_by}

    async def _record(self, response_id: str, owner: str) -> Record:
        record = await stored(self.store.get(owner, response_id))
        if record is None:
            raise _no_response()
        return record


_NUMBERS = itertools.count()


class _Limiter:
    """So many threads at once on each event loop; the limiter itself is made when first needed there."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar(
            f"responses_kit.{next(_NUMBERS)}"  # anyio knows them by name
        )

    def here(self) -> anyio.CapacityLimiter:
        limiter = self._limiter.get(None)
        if limiter is None:
            self._limiter.set(limiter := anyio.CapacityLimiter(self._threads))
        return limiter


def _check_backend(backend: Backend) -> None:
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


def _check_store(store: ResponseStore | None) -> None:
    methods = ("create", "update", "get", "chain", "items", "delete")
    missing = [name for name in methods if store is not None and not callable(getattr(store, name, None))]
    if missing or isinstance(store, type):
        what = store.__name__ if isinstance(store, type) else type(store).__name__
        raise ConfigurationError(f"a store is an instance with the methods of ResponseStore; {what} is none")


def _by_type(tools: Sequence[Toolset]) -> dict[str, Toolset]:
    toolsets: dict[str, Toolset] = {}
    for tool in tools:
        if isinstance(tool, type) or not callable(getattr(tool, "tools", None)):
            raise ConfigurationError("tools holds HostedTool instances, or toolsets; see HostedTool.from_function")
        if isinstance(tool, HostedTool) and type(tool).call is HostedTool.call:
            raise ConfigurationError(f"the tool {tool.type} must define call(self, arguments, turn)")
        if toolsets.setdefault(tool.type, tool) is not tool:
            raise ConfigurationError(f"two tools have the type {tool.type}")
    return toolsets


def _no_response() -> NotFound:
    return NotFound("No response with this id exists.", code="response_not_found")
