"""The service behind a kit, for transports, integrations and runners."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
from pydantic_core import from_json

from .._concurrency.tasks import spawn
from .._concurrency.threads import ThreadLimiter
from ..backend import Model
from ..context.builder import Context, build_context
from ..context.constraints import Constraints
from ..engine.follower import EventFollower
from ..engine.hooks import CompletionHook, HostCaller, call_on_event_loop
from ..engine.leases import LeaseRenewer
from ..engine.recorder import Recorder
from ..engine.registry import RunRegistry
from ..engine.repository import LayeredRepository, Repository, response_not_found
from ..engine.run import Run, discard_events
from ..errors import (
    APIError,
    ConfigurationError,
    IdempotencyKeyReused,
    ServerError,
    StoreError,
    Unauthorized,
    UnsupportedParameter,
)
from ..outputs import Usage
from ..protocol.encryption import Encryptor
from ..protocol.ids import fingerprint, new_id
from ..protocol.state_machine import StateMachine
from ..protocol.validation import as_json, parse_request
from ..runners.base import LocalRunner, encode_request
from ..schema.items import ITEMS
from ..schema.request import CreateRequest
from ..stores.protocol import Record, ResponseStore
from ..turn import Turn
from .settings import Settings, index_toolsets

__all__ = ["ResponseService", "decode_response", "parse_create"]

logger = logging.getLogger("responses_kit")

Events = Literal["logged", "streamed", "none"]
"""See `Record.events`."""


@dataclass(slots=True, eq=False)
class _Submission:
    """The result of a submission: a new response, an earlier one with the same idempotency key, or an error."""

    done: anyio.Event = field(default_factory=anyio.Event)
    response: dict[str, Any] = field(default_factory=dict)
    earlier: Record | None = None
    error: Exception | None = None


class ResponseService:
    """Creates, submits and follows responses.

    Args:
        settings: The settings of the kit.

    Attributes:
        repository: Reads and writes the records in the kit's store.
        leases: Renews the leases of the runs in this process.
        registry: The runs that have not finished.
        toolsets: The hosted tools by type.
        encryptor: Encrypts payloads that clients carry.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = settings.backend
        self.toolsets = index_toolsets(settings.tools)
        self.encryptor = Encryptor(settings.secrets)
        self.registry = RunRegistry()
        self._clock = settings.clock
        self._completion_hook = CompletionHook(settings.on_response_end)
        self.repository = Repository(settings.store, clock=self._clock, completion_hook=self._completion_hook)
        self.leases = LeaseRenewer(self.repository, duration=settings.timeouts.lease, clock=self._clock)
        limit, scope = settings.limits.max_threads, settings.scope.thread_scope
        self._threads = ThreadLimiter(limit, scope)
        self._tool_threads = ThreadLimiter(limit, scope)  # separate, so that hanging tools do not block the backend
        self._local_runner = settings.runner if isinstance(settings.runner, LocalRunner) else LocalRunner()
        self._runner = self._local_runner if settings.runner is None else settings.runner
        self._runner.bind(self.run_queued)
        self._models: tuple[tuple[str | Model, ...], Mapping[str, Model]] = ((), {})

    # Requests.

    async def resolve_owner(self, request: Any, call: HostCaller = call_on_event_loop) -> str:
        """Return the owner of a host's request.

        Args:
            request: The host's own request object.
            call: Calls the owner hook; see `engine.hooks.HostCaller`.

        Raises:
            Unauthorized: The owner hook returned None or an empty value.
            ConfigurationError: The owner hook returned something other than a string.
        """
        if self.settings.owner is None:
            return ""
        owner = await call(self.settings.owner, request)
        if inspect.isawaitable(owner):
            owner = await owner
        if not owner:
            raise Unauthorized("This server needs a valid key or session.")
        if not isinstance(owner, str):
            # An int would match in one store and not in another, and True identifies nothing.
            raise ConfigurationError(f"the owner hook must return a str or None, not {type(owner).__name__}")
        return owner

    def models(self) -> Mapping[str, Model]:
        """Return the backend's models by name; a backend may change them at any time."""
        models = tuple(self.backend.models)
        if models != self._models[0]:
            named = (Model(model) if isinstance(model, str) else model for model in models)
            self._models = (models, {model.name: model for model in named})
        return self._models[1]

    async def get_record(self, response_id: str, owner: str) -> Record:
        """Return the record of a response.

        Raises:
            NotFound: This owner has no such response.
            StoreError: The store failed.
        """
        record = await self.repository.get(owner, response_id)
        if record is None:
            raise response_not_found()
        return record

    # Runs.

    async def create_run(
        self,
        body: Any,
        *,
        owner: str = "",
        streamed: bool | None = None,
        local: ResponseStore | None = None,
        generate: bool = True,
        error_events: bool = True,
    ) -> Run:
        """Create the response of a foreground request and return its run, ready to be executed.

        Args:
            body: The request as JSON values, or as a `CreateRequest`.
            owner: The owner of the response.
            streamed: Whether events are sent to a client; None for the request's own `stream`.
            local: Store of responses with `store: false`; earlier responses are looked up here before the kit's store.
            generate: False to complete the response without asking the backend.
            error_events: Emit an `error` event before `response.failed`.

        Raises:
            InvalidRequest: The request is not valid or cannot be honoured.
            StoreError: The store failed.
        """
        self.registry.check_open()  # before a late request causes any work
        request = parse_create(body)
        if request.background:
            raise UnsupportedParameter("'background' is not supported here.", param="background")
        local_repository = None if local is None else Repository(local, clock=self._clock)
        repository = (
            self.repository if local_repository is None else LayeredRepository(local_repository, self.repository)
        )
        context = await self.build_context(request, owner, repository)
        events: Events = "streamed" if (request.stream if streamed is None else streamed) else "none"
        if events == "streamed" and self.settings.resumable and request.store:
            events = "logged"
        run = self._build_run(
            context,
            repository=self.repository if request.store else local_repository,
            include=request.include,
            events=events,
            generate=generate,
            error_events=error_events,
        )
        await run.create()
        return run

    async def submit(self, body: Any, *, owner: str = "", key: str | None = None) -> dict[str, Any]:
        """Create a response that outlives its client's connection, and return its current state.

        With `background`, the response waits for the runner. Its events are logged.

        Args:
            body: The request as JSON values, or as a `CreateRequest`.
            owner: The owner of the response.
            key: The request's idempotency key. If the owner has used it before, the earlier response is returned.

        Raises:
            InvalidRequest: The request is not valid or cannot be honoured.
            IdempotencyKeyReused: The key belongs to another request.
            StoreError: The store failed.
        """
        self.registry.check_open()
        request = parse_create(body)
        if self.backend.is_request_bound:
            param = "background" if request.background else "Idempotency-Key"
            raise UnsupportedParameter(
                f"'{param}' is not supported: responses of this server cannot outlive their requests.", param=param
            )
        if key is not None and not request.store:
            raise UnsupportedParameter("'store' must be true when an Idempotency-Key is sent.", param="store")
        request_fingerprint = "" if key is None else fingerprint(request)
        earlier = None if key is None else await self.repository.find(owner, key)
        if earlier is not None:
            return _earlier_response(earlier, request_fingerprint)
        context = await self.build_context(request, owner, self.repository)
        run = self._build_run(
            context,
            repository=self.repository,
            events="logged",
            include=request.include,
            key=key,
            fingerprint=request_fingerprint,
        )
        submission = _Submission()
        # In its own task, because another request with the same key may wait for it when this client disconnects.
        spawn(self._launch, run, request, submission)
        await submission.done.wait()
        if submission.error is not None:
            raise submission.error
        return (
            submission.response
            if submission.earlier is None
            else _earlier_response(submission.earlier, request_fingerprint)
        )

    async def _launch(self, run: Run, request: CreateRequest, submission: _Submission) -> None:
        try:
            if request.background:
                run.recorder.request = encode_request(request, run.context)
                timeout = max(self._runner.queue_timeout, self.leases.duration)
                record: Record | None = await run.enqueue(self._clock() + timeout)
            else:
                record = await run.create()
            if record is not None and record.id != run.id:
                submission.earlier = record
            else:
                submission.response = run.response | {"output": []}
                await (self._runner if request.background else self._local_runner).submit(run)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(StoreError):  # no work has started
                await self.repository.delete(run.owner, run.id)
            if not isinstance(error, Exception):
                raise
            submission.error = error
        finally:
            submission.done.set()

    async def run_queued(self, owner: str, response_id: str) -> None:
        """Generate a response that waits in the store; do nothing if another worker has it.

        Args:
            owner: The owner of the response.
            response_id: Its id.

        Raises:
            StoreError: The store failed.
        """
        record = await self.repository.get(owner, response_id)
        if record is None or record.final or not record.request:
            return
        if record.cancelled:
            await self.repository.end(owner, record)
            return
        response = decode_response(record)
        try:
            request = CreateRequest.model_validate_json(record.request)
            request = request.model_copy(update={"input": ITEMS.validate_json(record.input)})
            context = await self.build_context(
                request, owner, self.repository, now=response["created_at"], response_id=record.id
            )
        except StoreError:
            raise
        except APIError as error:
            await self.repository.end(owner, record, error, only_queued=True)
            return
        except Exception as error:
            logger.error(
                "response %s cannot be started; check that the worker runs the same version", record.id, exc_info=error
            )
            unreadable = ServerError("The server cannot read the queued request.")
            await self.repository.end(owner, record, unreadable, only_queued=True)
            return
        run = self._build_run(
            replace(context, response=response),
            repository=self.repository,
            include=request.include,
            events="logged",
            key=record.key,
            fingerprint=record.fingerprint,
        )
        run.restore_queued(record)
        run.register()
        await run.execute(discard_events)

    async def build_context(
        self,
        request: CreateRequest,
        owner: str,
        repository: Repository | LayeredRepository | None = None,
        *,
        now: float | None = None,
        response_id: str | None = None,
    ) -> Context:
        """Resolve a request into its context; see `context.builder.build_context`."""
        return await build_context(
            request,
            owner=owner,
            models=self.models(),
            store=self.repository if repository is None else repository,
            encryptor=self.encryptor,
            toolsets=self.toolsets,
            max_tool_calls=self.settings.limits.max_tool_calls,
            now=self._clock() if now is None else now,
            response_id=response_id,
        )

    def _build_run(
        self,
        context: Context,
        *,
        repository: Repository | None,
        events: Events = "none",
        include: Sequence[str] = (),
        generate: bool = True,
        error_events: bool = True,
        key: str | None = None,
        fingerprint: str = "",
        private: bool = False,
    ) -> Run:
        encrypt = None
        if "reasoning.encrypted_content" in include:
            encrypt = functools.partial(self.encryptor.encrypt, kind="reasoning", owner=context.turn.owner)
        state_machine = StateMachine(
            context.response,
            new_id=new_id,
            stream_reasoning=self.settings.stream_reasoning,
            stream_extensions=self.settings.stream_extensions,
            encrypt=encrypt,
            error_events=error_events,
        )
        recorder = Recorder(
            context=context,
            state_machine=state_machine,
            repository=repository,
            leases=self.leases if repository is self.repository else None,
            events=events,
            key=key,
            fingerprint=fingerprint,
        )
        return Run(
            backend=self.backend,
            context=context,
            state_machine=state_machine,
            recorder=recorder,
            threads=self._threads,
            tool_threads=self._tool_threads,
            registry=self.registry,
            scope=self.settings.scope,
            completion_hook=CompletionHook() if private else self._completion_hook,
            clock=self._clock,
            generate=generate,
        )

    async def complete_turn(self, turn: Turn) -> tuple[str, Usage | None]:
        """Generate the answer to a turn without storing anything; return its text and usage.

        Raises:
            APIError: The model failed.
        """
        response: dict[str, Any] = {"id": turn.response_id, "previous_response_id": None, "output": [], "usage": None}
        context = Context(turn, self.models()[turn.model], Constraints(), response, [])
        run = self._build_run(context, repository=None, private=True)
        await run.create()
        await run.complete()
        parts = (part for item in run.response["output"] if item["type"] == "message" for part in item["content"])
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        return text, _usage(run.response["usage"])

    async def follow(
        self, response_id: str, *, owner: str = "", after: int | None = None, synthesize: bool = False
    ) -> EventFollower:
        """Return a follower of a response's events, whichever process generates it: logged events first, then new ones.

        Args:
            response_id: The response.
            owner: Its owner.
            after: `sequence_number` of the last event that the client has; None to start at the first.
            synthesize: If the log has expired, synthesize events that build the same response.

        Raises:
            NotFound: This owner has no such response.
            EventsUnavailable: The events are not logged, or the log has expired.
            StoreError: The store failed.
        """
        return await EventFollower.open(self.repository, owner, response_id, after, synthesize=synthesize)


def parse_create(body: Any) -> CreateRequest:
    """Return a create request from JSON values, or unchanged if it is one.

    Raises:
        InvalidRequest: The request is not valid.
    """
    return body if isinstance(body, CreateRequest) else parse_request(as_json(body))


def decode_response(record: Record) -> dict[str, Any]:
    """Return the response object of a record."""
    response: dict[str, Any] = from_json(record.response)
    return response


def _earlier_response(earlier: Record, fingerprint: str) -> dict[str, Any]:
    if earlier.fingerprint != fingerprint:
        raise IdempotencyKeyReused("This Idempotency-Key was used for another request. Use a new key per request.")
    return decode_response(earlier)


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        usage["input_tokens"],
        usage["output_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    )
