"""ResponsesKit: everything that the API can do, as methods; hosts and transports are built on it."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from .._concurrency.signals import on_termination
from .._concurrency.tasks import open_task_group, spawn
from .._concurrency.threads import ThreadLimiter
from ..backend import Backend, Model
from ..engine.compaction import compact
from ..engine.hooks import CompletionHook, HostCaller, OnResponseEnd, Scope, call_on_event_loop
from ..engine.leases import LeaseRenewer
from ..engine.registry import RunRegistry
from ..engine.repository import EventFollower, Repository, response_not_found
from ..engine.run import Run
from ..errors import (
    ClientDisconnected,
    ConfigurationError,
    InvalidRequest,
    NotFound,
    StoreError,
    Unauthorized,
    error_from_code,
)
from ..protocol.encryption import Encryptor
from ..protocol.sse import decode_events
from ..protocol.state_machine import Event
from ..protocol.validation import as_json, parse_compact_request, parse_request
from ..runners.base import LocalRunner, Runner
from ..schema.request import CompactRequest, CreateRequest
from ..stores.memory import MemoryStore
from ..stores.protocol import Record, ResponseStore, call_store
from ..tools import Toolset
from .service import ResponseService, decode_response
from .settings import check_backend, check_numbers, check_runner, check_store, index_toolsets, normalize_origins

__all__ = ["Owner", "ResponsesKit"]

logger = logging.getLogger("responses_kit")

_CANCEL_SECONDS = 2.0
"""How long a worker elsewhere has to give a sign, once its response is to be cancelled."""

_CANCEL_PAUSE = 0.02

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
            be replaced. Without any, what is sealed opens in this process alone. See `sealing.Encryptor`.
        runner: Works on background responses; this process by default.
        lease: Seconds after which a response counts as left by its worker, where that gives no sign of life.
        resumable: Keep the events of foreground streams too, so that they can be told again. Those of background
            responses are always kept.
        socket_seconds: How long a WebSocket may last.
        max_sockets: Most WebSockets at the same time.
        allowed_origins: Web pages, such as "https://app.example", that may open WebSockets beside those of the
            request's own host; "*" for any.
        ended: Called with the owner and the response object of each response that has ended, however it did, once, in
            the process that has ended it; an async function, or a plain one that does not wait. A process that is
            killed in that moment calls nothing: the store is what counts.
        surroundings: Entered around the backend and the tools; for integrations.
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
        runner: Runner | None = None,
        lease: float = 30.0,
        resumable: bool = False,
        socket_seconds: float = 3600.0,
        max_sockets: int = 1000,
        allowed_origins: Sequence[str] = (),
        ended: OnResponseEnd | None = None,
        surroundings: Scope | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = {name: value for name, value in locals().items() if name != "self"}
        check_backend(backend)
        check_store(store)
        check_numbers(
            {
                "max_body_bytes": max_body_bytes,
                "threads": threads,
                "max_tool_calls": max_tool_calls,
                "max_sockets": max_sockets,
                "keep_alive": keep_alive,
                "patience": patience,
                "lease": lease,
                "socket_seconds": socket_seconds,
            }
        )
        if owner is not None and not callable(owner):
            raise ConfigurationError("owner is a function of the host's request, not a name")
        self.backend = backend
        self.store: ResponseStore = MemoryStore() if store is None else store
        check_runner(runner, self.store)
        if not secrets and not isinstance(self.store, MemoryStore):
            logger.warning("without secrets, what this process seals cannot be opened by others, nor after a restart")
        self.max_body_bytes = max_body_bytes
        self.keep_alive = keep_alive
        self.patience = patience
        self.socket_seconds = socket_seconds
        self.max_sockets = max_sockets
        self.allowed_origins = normalize_origins(allowed_origins)
        self.surroundings = surroundings or Scope()
        endings = CompletionHook(ended)
        self._records = Repository(self.store, clock=clock, endings=endings)
        self._leases = LeaseRenewer(self._records, seconds=lease, clock=clock)
        self._toolsets = index_toolsets(tools)
        self._seal = Encryptor(secrets)
        self._settings |= {"store": self.store, "secrets": self._seal.secrets}  # those that it has made up, too
        self._owner = owner
        self._clock = clock
        self._started = clock()
        self._open = RunRegistry()
        self._closed = False
        self._named: tuple[tuple[str | Model, ...], Mapping[str, Model]] = ((), {})
        here = runner if isinstance(runner, LocalRunner) else LocalRunner()
        self._creation = ResponseService(
            backend=backend,
            models=self._models,
            records=self._records,
            leases=self._leases,
            runner=here if runner is None else runner,
            here=here,
            open=self._open,
            seal=self._seal,
            toolsets=self._toolsets,
            max_tool_calls=max_tool_calls,
            threads=ThreadLimiter(threads, self.surroundings.thread_scope),
            # Of their own, so that tools that hang leave the backend's alone.
            tool_threads=ThreadLimiter(threads, self.surroundings.thread_scope),
            surroundings=self.surroundings,
            endings=endings,
            resumable=resumable,
            reasoning_events=reasoning_events,
            extension_events=extension_events,
            clock=clock,
        )
        self._creation.runner.bind(self.work)

    def with_settings(self, **changes: Any) -> ResponsesKit:
        """Another kit with the same store and the same settings, `backend` included, but for those that are given.

        Raises:
            ConfigurationError: As for a kit itself.
        """
        return ResponsesKit(**{**self._settings, **changes})

    async def resolve_owner(self, request: Any, call: HostCaller = call_on_event_loop) -> str:
        """The owner of a host's request.

        Args:
            request: The host's own request object.
            call: Calls the owner hook; see `surroundings.Call`.

        Raises:
            Unauthorized: The owner hook named nobody.
        """
        if self._owner is None:
            return ""
        owner = await call(self._owner, request)
        if inspect.isawaitable(owner):
            owner = await owner
        if not owner:
            raise Unauthorized("This server needs a valid key or session.")
        if not isinstance(owner, str):
            # A number would do in one store and not in the next; and True is nobody's name.
            raise ConfigurationError(f"the owner hook returns a str, or None for nobody, not {type(owner).__name__}")
        return owner

    # Responses.

    async def begin(
        self,
        body: Any,
        *,
        owner: str = "",
        streamed: bool | None = None,
        local: ResponseStore | None = None,
        generate: bool = True,
        error_events: bool = True,
    ) -> Run:
        """Validates a request and creates its response in the foreground, ready to be executed.

        Args:
            body: The request as JSON values, or as a `CreateRequest`.
            owner: Whose response it becomes.
            streamed: Whether its events will be told; by default as the request says.
            local: Keeps what is not to be stored, and is asked first for earlier responses.
            generate: False if the backend is not to be asked: the response is completed and empty.
            error_events: Whether a failure is told by an `error` event beside `response.failed`.

        Raises:
            InvalidRequest: The request is not valid or cannot be honoured.
            StoreError: The store is out of reach.
        """
        return await self._creation.begin(
            body, owner=owner, streamed=streamed, local=local, generate=generate, error_events=error_events
        )

    async def start(self, body: Any, *, owner: str = "", key: str | None = None) -> dict[str, Any]:
        """Creates a response that goes on by itself, whoever waits for it or leaves: `retrieve` or `follow` it.

        With `background`, it waits for the runner's worker, and is returned while it is queued. Its events are kept.

        Args:
            body: The request as JSON values, or as a `CreateRequest`.
            owner: Whose response it becomes.
            key: The request's idempotency key. Where the owner has used it before, the response of that time is
                returned and none is made.

        Raises:
            InvalidRequest: The request is not valid or cannot be honoured.
            KeyReused: The key belongs to another request.
            StoreError: The store is out of reach.
        """
        return await self._creation.start(body, owner=owner, key=key)

    async def work(self, owner: str, response_id: str) -> None:
        """Generates a response that waits in the store: what a runner's worker calls. Others' it leaves alone.

        Args:
            owner: Whose response it is.
            response_id: Its id.

        Raises:
            StoreError: The store is out of reach.
        """
        await self._creation.work(owner, response_id)

    async def create(self, body: Any, *, owner: str = "") -> dict[str, Any]:
        """Answers a request and returns the response object, whole; with `background`, as it is queued.

        Raises:
            APIError: The request was invalid, or the response failed.
        """
        request = body if isinstance(body, CreateRequest) else parse_request(as_json(body))
        if request.background:
            return await self.start(request, owner=owner)
        run = await self.begin(request, owner=owner, streamed=False)
        await run.complete()
        return run.response

    @asynccontextmanager
    async def stream(self, body: Any, *, owner: str = "") -> AsyncIterator[AsyncIterator[Event]]:
        """Answers a request event by event; leaving the context early cancels a response that is in the foreground.

        Example::

            async with kit.stream({"input": "Hello"}) as events:
                async for event in events:
                    ...

        Raises:
            APIError: The request was invalid. What fails later is told by events.
        """
        request = body if isinstance(body, CreateRequest) else parse_request(as_json(body))
        if request.background:
            started = await self.start(request, owner=owner)
            async with aclosing(self._events(await self.follow(started["id"], owner=owner))) as events:
                yield events
            return
        run = await self.begin(request, owner=owner, streamed=True)
        send, receive = anyio.create_memory_object_stream[Event](0)

        async def tell(events: list[Event]) -> None:
            try:
                for event in events:
                    await send.send(event)
            except anyio.BrokenResourceError:
                raise ClientDisconnected from None

        async def execute() -> None:
            async with send:
                await run.execute(tell)

        async with open_task_group() as group, receive:
            group.start_soon(execute)
            try:
                yield receive
            finally:
                group.cancel_scope.cancel()

    @staticmethod
    async def _events(follower: EventFollower) -> AsyncGenerator[Event]:
        async with aclosing(follower.pieces()) as pieces:
            async for piece in pieces:
                for event in decode_events(piece):
                    yield event

    async def follow(
        self, response_id: str, *, owner: str = "", after: int | None = None, rebuilt: bool = False
    ) -> EventFollower:
        """The events of a response, whoever makes it: those that there were, then those that come.

        Args:
            response_id: The response.
            owner: Whose it is.
            after: The `sequence_number` of the last event that is known already.
            rebuilt: Where its events are not kept any more, tell others that build the same response.

        Raises:
            NotFound: This owner has no such response.
            EventsGone: Its events are not kept, or not any more.
        """
        return await self._records.follow(owner, response_id, after, rebuilt=rebuilt)

    async def result(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """The response object once the response has ended.

        Raises:
            NotFound: This owner has no such response.
            APIError: The response failed.
        """
        response = decode_response(await self._records.wait(owner, response_id))
        if response["status"] == "failed":
            raise error_from_code(**response["error"])
        return response

    async def retrieve(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """The stored response object.

        Raises:
            NotFound: This owner has no such response.
        """
        return decode_response(await self._record(response_id, owner))

    async def cancel(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Cancels a response, whichever process works on it, and returns it as it is then. Once more does no harm.

        Raises:
            NotFound: This owner has no such response.
            InvalidRequest: It has ended otherwise.
        """
        record = await self._record(response_id, owner)
        asked = False
        with anyio.move_on_after(2 * _CANCEL_SECONDS):
            while not record.final:
                held = self._leases.find((owner, response_id))
                if held is not None:
                    held.cancel()
                    asked = True
                if record.request:  # it waits for a worker: nobody has to be asked
                    await self._records.end(owner, replace(record, cancelled=True))
                else:
                    asked |= await call_store(self.store.cancel(owner, response_id, self._clock() + _CANCEL_SECONDS))
                    await anyio.sleep(_CANCEL_PAUSE)
                record = await self._record(response_id, owner)
        if not record.final and not asked:
            raise StoreError("The server's store does not answer. Try again.")
        response = decode_response(record)
        if record.final and response["status"] != "cancelled":
            raise InvalidRequest(
                f"The response has ended already: it is {response['status']}.", code="response_already_ended"
            )
        return response

    async def delete(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Forgets a stored response. One that is in progress is cancelled first.

        Raises:
            NotFound: This owner has no such response.
        """
        record = await self._record(response_id, owner)
        if not record.final:
            with suppress(InvalidRequest, NotFound, ValueError):  # it has ended meanwhile, or cannot even be read
                await self.cancel(response_id, owner=owner)
        if not await self._records.delete(owner, response_id):
            raise response_not_found()
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

    # Compaction.

    async def compact(self, body: Any, *, owner: str = "") -> dict[str, Any]:
        """Makes a conversation short: its latest messages, and one item that stands for all of it.

        Args:
            body: The request as JSON values, or as a `CompactRequest`.
            owner: Who may refer to earlier responses, and send the compaction back.

        Raises:
            APIError: The request was invalid, or the model failed.
        """
        self._open.check_open()
        async with self.surroundings.async_scope():
            return await compact(
                body if isinstance(body, CompactRequest) else parse_compact_request(as_json(body)),
                owner=owner,
                models=self._models(),
                store=self._records,
                seal=self._seal,
                backend=self.backend,
                collect=self._creation.collect,
                now=self._clock(),
            )

    # Models.

    def models(self) -> dict[str, Any]:
        """The list of models, as `GET /models` shows it."""
        return {"object": "list", "data": [self._model(model) for model in self._models().values()]}

    def model(self, name: str) -> dict[str, Any]:
        """One model.

        Raises:
            NotFound: The backend has no such model.
        """
        model = self.capabilities(name)
        if model is None:
            raise NotFound("No such model here. GET /models lists the models that exist.", code="model_not_found")
        return self._model(model)

    def capabilities(self, name: str) -> Model | None:
        """What the backend says that a model can do; None where it has no such model."""
        return self._models().get(name)

    # The life of the server.

    @property
    def closing(self) -> bool:
        """Whether the server goes down: new requests are refused."""
        return self._open.is_closed

    async def wait_closing(self) -> None:
        """Returns when the server goes down."""
        with self._open.closing.subscribe() as rung:
            if not self.closing:
                await rung.wait()

    @asynccontextmanager
    async def lifespan(self, *, grace: float = 10.0) -> AsyncIterator[None]:
        """What your app enters where it starts, and leaves where it ends.

        Within it, responses whose workers are gone are looked for, and a SIGTERM or SIGINT to the process drains: new
        requests are refused, and what is in progress may come to its end; what has not after the grace time is
        ended with a terminal event. The server's own handling of the signal is left in place, and happens as well.

        Args:
            grace: Seconds that responses in progress have left at a signal. Leave the server a little more.

        Raises:
            ConfigurationError: The store was not set up.
        """
        await self._check_store()
        stop_sweeping = spawn(self._sweep)
        with on_termination(functools.partial(spawn, self.drain, grace)):
            try:
                yield
            finally:
                stop_sweeping()
                with anyio.CancelScope(shield=True):
                    await self.aclose(grace)

    async def _check_store(self) -> None:
        """Finds out at the start, and not at the first request, that a store was not set up."""
        try:
            await call_store(self.store.get("", ""))
        except StoreError as error:
            if isinstance(error.__cause__, ConfigurationError):
                raise error.__cause__ from None
            # It was logged; a store that is out of reach now may be back for the first request.

    async def drain(self, grace: float = 10.0) -> None:
        """Refuses new requests, and lets those in progress come to their end; what has not in time is ended.

        Args:
            grace: Seconds that they have, from the first call on.
        """
        try:
            await self._open.close(grace)
        finally:
            self._records.close()

    async def prune(self) -> tuple[int, int]:
        """Removes what has outlived its time from the store, and ends responses whose worker is gone.

        Returns:
            How many were removed, and how many were ended.

        Raises:
            StoreError: The store is out of reach.
        """
        return await self._records.prune()

    async def _sweep(self) -> None:
        while True:
            with suppress(StoreError):  # it was logged
                await self._records.sweep()
            await anyio.sleep(self._leases.duration)

    async def aclose(self, grace: float = 0.0) -> None:
        """Ends the responses in progress, waits until their records are final, and frees what the backend holds.

        Call it where your app shuts down, in the event loop that serves it, before the store is closed. Clients
        that are still there are told that their response has failed, and new requests are refused.

        Args:
            grace: Seconds that the responses have to end by themselves, from when the server began to go down.
        """
        try:
            await self.drain(grace)
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
        record = await self._records.get(owner, response_id)
        if record is None:
            raise response_not_found()
        return record
