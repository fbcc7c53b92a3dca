"""From a request to a response that is in the making: in the foreground, by itself, or in a worker's hands."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
from pydantic_core import from_json

from .._concurrency.tasks import spawn
from .._concurrency.threads import ThreadLimiter
from ..backend import Backend, Model
from ..context.builder import Context, build_context
from ..context.constraints import Constraints
from ..engine.hooks import CompletionHook, Scope
from ..engine.leases import LeaseRenewer
from ..engine.recorder import Recorder
from ..engine.registry import RunRegistry
from ..engine.repository import LayeredRepository, Repository
from ..engine.run import Run, discard_events
from ..errors import APIError, IdempotencyKeyReused, ServerError, StoreError, UnsupportedParameter
from ..outputs import Usage
from ..protocol.encryption import Encryptor
from ..protocol.ids import fingerprint, new_id
from ..protocol.state_machine import StateMachine
from ..protocol.validation import as_json, parse_request
from ..runners.base import LocalRunner, Runner, encode_request
from ..schema.items import ITEMS
from ..schema.request import CreateRequest
from ..stores.protocol import Record, ResponseStore
from ..tools import Toolset
from ..turn import Turn

__all__ = ["ResponseService", "decode_response"]

logger = logging.getLogger("responses_kit")

Events = Literal["kept", "told", "none"]
"""See `Record.events`."""


@dataclass(slots=True, eq=False)
class _Submission:
    """What became of a response that goes on by itself."""

    known: anyio.Event = field(default_factory=anyio.Event)
    response: dict[str, Any] = field(default_factory=dict)
    earlier: Record | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseService:
    """What responses are made with; the attributes are those of a `ResponsesKit`."""

    backend: Backend
    models: Callable[[], Mapping[str, Model]]
    records: Repository
    leases: LeaseRenewer
    runner: Runner
    here: LocalRunner
    open: RunRegistry
    seal: Encryptor
    toolsets: Mapping[str, Toolset]
    max_tool_calls: int
    threads: ThreadLimiter
    tool_threads: ThreadLimiter
    surroundings: Scope
    endings: CompletionHook
    resumable: bool
    reasoning_events: bool
    extension_events: bool
    clock: Callable[[], float]

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
        """As `ResponsesKit.begin`."""
        self.open.check_open()  # before anything is started for a request that comes too late
        request = body if isinstance(body, CreateRequest) else parse_request(as_json(body))
        if request.background:
            raise UnsupportedParameter("A background response is not available here.", param="background")
        kept = None if local is None else Repository(local, clock=self.clock)
        context = await self._context(
            request, owner, self.records if kept is None else LayeredRepository(kept, self.records)
        )
        told: Events = "told" if (request.stream if streamed is None else streamed) else "none"
        run = self._run(
            context,
            records=self.records if request.store else kept,
            include=request.include,
            events="kept" if told == "told" and self.resumable and request.store else told,
            generate=generate,
            error_events=error_events,
        )
        await run.create()
        return run

    async def start(self, body: Any, *, owner: str = "", key: str | None = None) -> dict[str, Any]:
        """As `ResponsesKit.start`."""
        self.open.check_open()
        request = body if isinstance(body, CreateRequest) else parse_request(as_json(body))
        if self.backend.is_request_bound:
            what = "background" if request.background else "the header Idempotency-Key"
            raise UnsupportedParameter(
                f"What is answered here ends with its request: leave out {what}.",
                param="background" if request.background else "Idempotency-Key",
            )
        if key is not None and not request.store:
            raise UnsupportedParameter("What has an Idempotency-Key is kept: leave store out, or true.", param="store")
        same = "" if key is None else fingerprint(request)
        earlier = None if key is None else await self.records.find(owner, key)
        if earlier is not None:
            return self._same(earlier, same)
        context = await self._context(request, owner, self.records)
        run = self._run(
            context, records=self.records, events="kept", include=request.include, key=key, fingerprint=same
        )
        begun = _Submission()
        # In a task of its own: whoever asked with the same key may wait for it already when this client leaves.
        spawn(self._launch, run, request, begun)
        await begun.known.wait()
        if begun.error is not None:
            raise begun.error
        return begun.response if begun.earlier is None else self._same(begun.earlier, same)

    async def _launch(self, run: Run, request: CreateRequest, begun: _Submission) -> None:
        try:
            if request.background:
                run.recorder.request = encode_request(request, run.context)
                record: Record | None = await run.enqueue(
                    self.clock() + max(self.runner.queue_timeout, self.leases.duration)
                )
            else:
                record = await run.create()
            if record is not None and record.id != run.id:
                begun.earlier = record
            else:
                begun.response = run.response | {"output": []}
                await (self.runner if request.background else self.here).submit(run)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(StoreError):  # nothing has begun
                await self.records.delete(run.owner, run.id)
            if not isinstance(error, Exception):
                raise
            begun.error = error
        finally:
            begun.known.set()

    def _same(self, earlier: Record, fingerprint: str) -> dict[str, Any]:
        if earlier.fingerprint != fingerprint:
            raise IdempotencyKeyReused(
                "This Idempotency-Key was used for another request. Use a new key for each request."
            )
        return decode_response(earlier)

    async def work(self, owner: str, response_id: str) -> None:
        """As `ResponsesKit.work`."""
        record = await self.records.get(owner, response_id)
        if record is None or record.final or not record.request:
            return
        if record.cancelled:
            await self.records.end(owner, record)
            return
        begun = decode_response(record)
        try:
            request = CreateRequest.model_validate_json(record.request)
            request = request.model_copy(update={"input": ITEMS.validate_json(record.input)})
            context = await self._context(request, owner, self.records, now=begun["created_at"], response_id=record.id)
        except StoreError:
            raise
        except APIError as error:
            await self.records.end(owner, record, error, queued=True)
            return
        except Exception as error:
            logger.error("response %s cannot be begun: is its worker of another version?", record.id, exc_info=error)
            await self.records.end(owner, record, ServerError("The server cannot read the request."), queued=True)
            return
        run = self._run(
            replace(context, response=begun),
            records=self.records,
            include=request.include,
            events="kept",
            key=record.key,
            fingerprint=record.fingerprint,
        )
        run.requeue(record)
        run.claim()
        await run.execute(discard_events)

    async def _context(
        self,
        request: CreateRequest,
        owner: str,
        records: Repository | LayeredRepository,
        *,
        now: float | None = None,
        response_id: str | None = None,
    ) -> Context:
        return await build_context(
            request,
            owner=owner,
            models=self.models(),
            store=records,
            seal=self.seal,
            toolsets=self.toolsets,
            max_tool_calls=self.max_tool_calls,
            now=self.clock() if now is None else now,
            response_id=response_id,
        )

    def _run(
        self,
        context: Context,
        *,
        records: Repository | None,
        events: Events = "none",
        include: Sequence[str] = (),
        generate: bool = True,
        error_events: bool = True,
        key: str | None = None,
        fingerprint: str = "",
        private: bool = False,
    ) -> Run:
        sealed = "reasoning.encrypted_content" in include
        machine = StateMachine(
            context.response,
            new_id=new_id,
            reasoning_events=self.reasoning_events,
            extension_events=self.extension_events,
            seal=functools.partial(self.seal.encrypt, kind="reasoning", owner=context.turn.owner) if sealed else None,
            error_events=error_events,
        )
        keeping = Recorder(
            context=context,
            state_machine=machine,
            repository=records,
            leases=self.leases if records is self.records else None,
            events=events,
            key=key,
            fingerprint=fingerprint,
        )
        return Run(
            backend=self.backend,
            context=context,
            state_machine=machine,
            recorder=keeping,
            threads=self.threads,
            tool_threads=self.tool_threads,
            registry=self.open,
            scope=self.surroundings,
            completion_hook=CompletionHook() if private else self.endings,
            clock=self.clock,
            generate=generate,
        )

    async def collect(self, turn: Turn) -> tuple[str, Usage | None]:
        """Has a turn answered of which nothing is kept."""
        response: dict[str, Any] = {"id": turn.response_id, "previous_response_id": None, "output": [], "usage": None}
        context = Context(turn, self.models()[turn.model], Constraints(), response, [])
        run = self._run(context, records=None, private=True)
        await run.create()
        await run.complete()
        parts = (part for item in run.response["output"] if item["type"] == "message" for part in item["content"])
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        return text, _usage(run.response["usage"])


def decode_response(record: Record) -> dict[str, Any]:
    """The response object that a record holds."""
    response: dict[str, Any] = from_json(record.response)
    return response


def _usage(shown: dict[str, Any] | None) -> Usage | None:
    if shown is None:
        return None
    return Usage(
        shown["input_tokens"],
        shown["output_tokens"],
        shown["input_tokens_details"]["cached_tokens"],
        shown["output_tokens_details"]["reasoning_tokens"],
    )
