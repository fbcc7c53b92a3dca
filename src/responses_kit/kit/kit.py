"""The kit: the API as methods."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import fields, replace
from typing import Any, Final

import anyio
from pydantic_core import from_json

from .._concurrency.tasks import open_task_group
from ..backend import Backend, Model
from ..engine.compaction import compact
from ..engine.hooks import OnResponseEnd, Scope
from ..engine.repository import response_not_found
from ..errors import (
    APIError,
    ClientDisconnected,
    InvalidRequest,
    ModelError,
    NotFound,
    StoreError,
    error_from_code,
)
from ..protocol.encryption import Encryptor
from ..protocol.sse import decode_events
from ..protocol.state_machine import Event
from ..protocol.validation import as_json, parse_compact_request
from ..runners.base import Runner
from ..schema.request import CompactRequest
from ..stores.memory import MemoryStore
from ..stores.protocol import ResponseStore, call_store
from ..tools import Toolset
from .lifecycle import Lifecycle
from .service import ResponseService, decode_response, parse_create
from .settings import Limits, Owner, Settings, Timeouts, normalize_origins

__all__ = ["ResponsesKit"]

logger = logging.getLogger("responses_kit")

_CANCEL_TIMEOUT: Final = 2.0
"""Seconds that a worker in another process has to confirm a cancellation before its lease expires."""

_CANCEL_POLL_INTERVAL: Final = 0.02
"""Seconds between reads of a record that is being cancelled."""


class ResponsesKit:
    """The Open Responses API over one backend.

    Args:
        backend: Answers the turns.
        store: Stores responses; by default a bounded memory store.
        tools: Hosted tools, and toolsets such as MCP servers, that clients may switch on.
        runner: Runs background responses; by default this process does.
        secrets: Texts of at least 16 characters that encrypt payloads which clients carry, such as reasoning. The first
            one encrypts, all decrypt, so that secrets can be rotated. Without secrets, payloads can be decrypted in
            this process only.
        owner: Called with the host's own request object; returns the owner of the request as a `str`. None or an
            empty value is a 401. A plain function runs on the event loop and must not block; an async one may wait.
            Without this hook all requests share one owner, and only unguessable ids keep responses apart.
        on_response_end: Called with the owner and the response object once after each response has ended, in the
            process that ended it. A plain function must not block. A process that is killed at that moment calls
            nothing, so treat the store as the source of truth.
        scope: Entered around backends and tools; integrations use it for database connections and app contexts.
        limits: Bounds on what clients can send and occupy.
        timeouts: Durations in seconds.
        stream_reasoning: Stream raw reasoning as `response.reasoning.delta`. Off by default, because some clients fail
            on these events; raw reasoning is always in its finished item.
        stream_extensions: Stream `outputs.Event`. Off by default for the same reason.
        resumable: Log the events of foreground streams too, so that they can be resumed. Background responses are
            always logged.
        allowed_origins: Web pages, such as "https://app.example", that may open WebSockets in addition to pages of the
            request's own host; "*" for any.
        clock: Seconds since the epoch.

    Attributes:
        settings: The settings, validated and completed.
        service: What transports, integrations and runners need.

    Raises:
        ConfigurationError: A setting has the wrong type, contradicts another one, or a secret is too short.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        store: ResponseStore | None = None,
        tools: Sequence[Toolset] = (),
        runner: Runner | None = None,
        secrets: Sequence[str] = (),
        owner: Owner | None = None,
        on_response_end: OnResponseEnd | None = None,
        scope: Scope | None = None,
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        stream_reasoning: bool = False,
        stream_extensions: bool = False,
        resumable: bool = False,
        allowed_origins: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = Settings(
            backend=backend,
            store=MemoryStore() if store is None else store,
            tools=tools,
            runner=runner,
            secrets=Encryptor(secrets).secrets,
            owner=owner,
            on_response_end=on_response_end,
            scope=Scope() if scope is None else scope,
            limits=Limits() if limits is None else limits,
            timeouts=Timeouts() if timeouts is None else timeouts,
            stream_reasoning=stream_reasoning,
            stream_extensions=stream_extensions,
            resumable=resumable,
            allowed_origins=normalize_origins(allowed_origins),
            clock=clock,
        )
        if not secrets and not isinstance(self.store, MemoryStore):
            logger.warning("without 'secrets', encrypted payloads are lost at a restart and unreadable elsewhere")
        self.service = ResponseService(self.settings)
        self.lifecycle = Lifecycle(self.service)
        self._created = int(clock())

    @property
    def backend(self) -> Backend:
        """The backend."""
        return self.settings.backend

    @property
    def store(self) -> ResponseStore:
        """The store."""
        return self.settings.store

    def with_settings(self, **changes: Any) -> ResponsesKit:
        """Return another kit with the same store and settings, except for the given ones.

        `limits` and `timeouts` are replaced as a whole: to change one of them, pass for example
        `limits=dataclasses.replace(kit.settings.limits, max_tool_calls=1)`.

        Raises:
            ConfigurationError: See `ResponsesKit`.
        """
        settings = {one.name: getattr(self.settings, one.name) for one in fields(Settings)}
        return ResponsesKit(**{**settings, "allowed_origins": tuple(self.settings.allowed_origins), **changes})

    # Responses.

    async def create(self, body: Any, *, owner: str = "") -> dict[str, Any]:
        """Answer a request and return the whole response object; with `background`, the queued one.

        Args:
            body: The request as JSON values.
            owner: The owner of the response.

        Raises:
            APIError: The request is not valid, or the response failed.
        """
        request = parse_create(body)
        if request.background:
            return await self.service.submit(request, owner=owner)
        run = await self.service.create_run(request, owner=owner, streamed=False)
        await run.complete()
        return run.response

    @asynccontextmanager
    async def stream(self, body: Any, *, owner: str = "") -> AsyncIterator[AsyncIterator[Event]]:
        """Answer a request event by event. Leaving the context early cancels a foreground response.

        Example::

            async with kit.stream({"input": "Hello"}) as events:
                async for event in events:
                    ...

        Args:
            body: The request as JSON values.
            owner: The owner of the response.

        Raises:
            APIError: The request is not valid. Later failures are events.
        """
        request = parse_create(body)
        if request.background:
            started = await self.service.submit(request, owner=owner)
            async with aclosing(self.events(started["id"], owner=owner)) as events:
                yield events
            return
        run = await self.service.create_run(request, owner=owner, streamed=True)
        send, receive = anyio.create_memory_object_stream[Event](0)

        async def emit(events: list[Event]) -> None:
            try:
                for event in events:
                    await send.send(event)
            except anyio.BrokenResourceError:
                raise ClientDisconnected from None

        async def execute() -> None:
            async with send:
                await run.execute(emit)

        async with open_task_group() as group, receive:
            group.start_soon(execute)
            try:
                yield receive
            finally:
                group.cancel_scope.cancel()

    async def events(self, response_id: str, *, owner: str = "", after: int | None = None) -> AsyncGenerator[Event]:
        """Yield the events of a response, logged ones first, until it has ended.

        Args:
            response_id: The response.
            owner: Its owner.
            after: `sequence_number` of the last event that is known; None to start at the first.

        Raises:
            NotFound: This owner has no such response.
            EventsUnavailable: The events are not logged, or the log has expired.
        """
        follower = await self.service.follow(response_id, owner=owner, after=after)
        async with aclosing(follower.pieces()) as pieces:
            async for piece in pieces:
                for event in decode_events(piece):
                    yield event

    async def wait(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Return the response object once the response has ended.

        Raises:
            NotFound: This owner has no such response.
            APIError: The response failed.
        """
        response = decode_response(await self.service.repository.wait(owner, response_id))
        if response["status"] == "failed":
            raise error_from_code(**response["error"])
        return response

    async def retrieve(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Return the stored response object.

        Raises:
            NotFound: This owner has no such response.
        """
        return decode_response(await self.service.get_record(response_id, owner))

    async def cancel(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Cancel a response, whichever process generates it, and return it. Idempotent.

        Raises:
            NotFound: This owner has no such response.
            InvalidRequest: The response has already ended in another way.
            StoreError: The store failed.
        """
        service = self.service
        record = await service.get_record(response_id, owner)
        is_requested = False
        with anyio.move_on_after(2 * _CANCEL_TIMEOUT):
            while not record.final:
                run = service.leases.find((owner, response_id))
                if run is not None:
                    run.cancel()
                    is_requested = True
                if record.request:  # still queued: no worker has to confirm
                    await service.repository.end(owner, replace(record, cancelled=True))
                else:
                    until = self.settings.clock() + _CANCEL_TIMEOUT
                    is_requested |= await call_store(self.store.cancel(owner, response_id, until))
                    await anyio.sleep(_CANCEL_POLL_INTERVAL)
                record = await service.get_record(response_id, owner)
        if not record.final and not is_requested:
            raise StoreError("The server's store does not answer. Try again.")
        response = decode_response(record)
        if record.final and response["status"] != "cancelled":
            raise InvalidRequest(
                f"The response has already ended as {response['status']}.", code="response_already_ended"
            )
        return response

    async def delete(self, response_id: str, *, owner: str = "") -> dict[str, Any]:
        """Delete a stored response. A response in progress is cancelled first.

        Raises:
            NotFound: This owner has no such response.
        """
        record = await self.service.get_record(response_id, owner)
        if not record.final:
            with suppress(InvalidRequest, NotFound, ValueError):  # it ended meanwhile, or its record is damaged
                await self.cancel(response_id, owner=owner)
        if not await self.service.repository.delete(owner, response_id):
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
        """Return a page of a stored response's own input items.

        Args:
            response_id: The response.
            owner: Its owner.
            limit: Items per page, 1 to 100.
            order: "asc" for oldest first, "desc" for newest first.
            after: Id of the last item of the previous page.

        Raises:
            NotFound: This owner has no such response.
            InvalidRequest: An argument is not valid.
        """
        if not 1 <= limit <= 100:
            raise InvalidRequest("'limit' must be between 1 and 100.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
        record = await self.service.get_record(response_id, owner)
        items: list[dict[str, Any]] = from_json(record.input)
        if order == "desc":
            items.reverse()
        if after is not None:
            positions = [position for position, item in enumerate(items) if item["id"] == after]
            if not positions:
                raise InvalidRequest("'after' is not the id of an input item of this response.", param="after")
            items = items[positions[0] + 1 :]
        page = items[:limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }

    # Compaction and tokens.

    async def compact(self, body: Any, *, owner: str = "") -> dict[str, Any]:
        """Shorten a conversation to its latest messages and one compaction item.

        Args:
            body: The request as JSON values.
            owner: The owner of the earlier responses and of the compaction.

        Raises:
            APIError: The request is not valid, or the model failed.
        """
        self.service.registry.check_open()
        async with self.settings.scope.async_scope():
            return await compact(
                body if isinstance(body, CompactRequest) else parse_compact_request(as_json(body)),
                owner=owner,
                models=self.service.models(),
                store=self.service.repository,
                encryptor=self.service.encryptor,
                backend=self.backend,
                complete_turn=self.service.complete_turn,
                now=self.settings.clock(),
            )

    async def count_tokens(self, body: Any, *, owner: str = "") -> int | None:
        """Return the tokens of a request's prompt, or None if the backend cannot count them.

        Args:
            body: The request as JSON values, as for `create`.
            owner: The owner of earlier responses that the request refers to.

        Raises:
            APIError: The request is not valid, the model failed, or the kit is closed.
        """
        self.service.registry.check_open()
        context = await self.service.build_context(parse_create(body), owner)
        try:
            async with self.settings.scope.async_scope():
                return await self.backend.count_tokens(context.turn)
        except APIError:
            raise
        except Exception as error:
            logger.error("counting tokens: the backend failed", exc_info=error)
            raise ModelError("The model failed to count the tokens. The server's log has the reason.") from error

    # Models.

    def models(self) -> dict[str, Any]:
        """Return the list of models, as `GET /models` shows it."""
        return {"object": "list", "data": [self._model(model) for model in self.service.models().values()]}

    def model(self, name: str) -> dict[str, Any]:
        """Return one model, as `GET /models/{id}` shows it.

        Raises:
            NotFound: The backend has no such model.
        """
        model = self.service.models().get(name)
        if model is None:
            raise NotFound("No such model. GET /models lists the models that exist.", code="model_not_found")
        return self._model(model)

    def _model(self, model: Model) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": self._created, "owned_by": model.owned_by}

    # Startup, shutdown and maintenance.

    @asynccontextmanager
    async def lifespan(self, *, grace: float = 10.0) -> AsyncIterator[None]:
        """Run the kit for the lifetime of your app.

        Within the block, orphaned responses are ended. At a SIGTERM or SIGINT the kit drains: new requests are refused,
        and runs may finish within the grace time; then they are stopped with a terminal event. The server's own
        signal handlers stay in place and run as well.

        Args:
            grace: Seconds that runs may continue after a signal. Give the server a little more.

        Raises:
            ConfigurationError: The store was not set up.
        """
        async with self.lifecycle.run(grace, self.aclose):
            yield

    async def prune(self) -> tuple[int, int]:
        """Delete expired responses from the store, and end orphaned ones.

        Returns:
            The numbers of deleted and of ended responses.

        Raises:
            StoreError: The store failed.
        """
        return await self.service.repository.prune()

    async def aclose(self, grace: float = 0.0) -> None:
        """Stop running responses, save their final records, and close the backend and the tools.

        Call it at your app's shutdown, on the event loop that serves it, before the store is closed. Connected clients
        are sent a failed response; new requests are refused.

        Args:
            grace: Seconds that runs may continue, counted from the start of the shutdown.
        """
        await self.lifecycle.close(grace)
