"""A view function as a backend: bound to its request, in the request's own thread (`exchange.WSGIBridge`)."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio

from ..backend import Backend, Model
from ..engine.hooks import Scope
from ..errors import APIError, ClientDisconnected, IllegalOutput
from ..outputs import Output
from ..turn import Turn
from .wsgi_bridge import WSGIBridge, current

__all__ = ["RequestScope", "ViewBackend"]

_CLOSING_SECONDS: Final = 5.0
"""How long the end of a response waits for its view to be closed."""

_END: Final = object()


class ViewBackend(Backend):
    """Asks the view function of the request that is being answered.

    A plain function, and the iterator that it may return, have the request's own thread, so that all is there that an
    app keeps by thread; an async one has the event loop.

    Args:
        models: As for every backend.
        view: Called in the request's thread, with the turn; calls the request's view.
        refusal: As in `http.Request`.
    """

    is_request_bound = True

    def __init__(
        self,
        models: Sequence[str | Model],
        view: Callable[[Turn], Any],
        refusal: Callable[[Exception], APIError | None] = lambda error: None,
    ) -> None:
        self.models = models
        self._view, self._refusal = view, refusal

    async def generate(self, turn: Turn) -> AsyncIterator[Output]:
        """Yields what the view does."""
        exchange = current.get()
        assert exchange is not None, "the kit starts nothing for it that outlives a request"
        outputs: Any = None
        try:
            found = await exchange.call(lambda turn: _readied(self._view(turn)), turn)
            if isinstance(found, Awaitable):
                found = await exchange.call(_readied, await found)
            outputs = _Steps(exchange, found) if isinstance(found, Iterator) else found
            async for output in outputs:
                yield output
        except Exception as error:
            raise self._refusal(error) or error from error.__cause__
        except (KeyboardInterrupt, SystemExit) as error:  # which would end the loop, or this response without a word
            raise RuntimeError(f"the view raised {type(error).__name__}") from error
        except BaseException:
            turn.cancelled = True
            raise
        finally:
            if hasattr(outputs, "aclose"):
                # Where the view is busy for longer, it is closed all the same as soon as it comes to it.
                with anyio.move_on_after(_CLOSING_SECONDS, shield=True):
                    await outputs.aclose()


class _Steps:
    """A plain iterator, stepped in the host's thread.

    Each output is asked for when the one before is on its way, for the thread that makes them sends them, too.
    """

    def __init__(self, exchange: WSGIBridge, outputs: Iterator[Output]) -> None:
        self._exchange, self._outputs = exchange, outputs
        self._ended = False

    def __aiter__(self) -> _Steps:
        return self

    async def __anext__(self) -> Output:
        output: Any = await self._exchange.call(_next, self._outputs)
        if output is _END:
            self._ended = True
            raise StopAsyncIteration
        return output  # type: ignore[no-any-return]  # the machine looks at it

    async def aclose(self) -> None:
        if not self._ended and hasattr(self._outputs, "close"):
            with suppress(ClientDisconnected):
                await self._exchange.call(_close, self._outputs)


def _readied(found: Any) -> Any:
    """What a view has returned, as something to await or to iterate."""
    if isinstance(found, str):
        found = [found]
    if isinstance(found, Awaitable | AsyncIterable):
        return found
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        raise IllegalOutput(
            f"the view returned {type(found).__name__}: yield outputs, or return text; what may refuse goes above the"
            " decorator that makes it answer"
        )
    return iter(found)


def _next(outputs: Iterator[Output]) -> Any:
    return next(outputs, _END)


def _close(outputs: Any) -> None:
    outputs.close()


class RequestScope(Scope):
    """The host's context variables, as they are in the request's thread, for what a view does on the event loop.

    There a framework's contexts are seen, not entered: the host's thread leaves them, when the answer has ended.
    """

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """Sets them, in the task of the request."""
        exchange = current.get()
        for variable, value in exchange.context.items() if exchange is not None else ():
            variable.set(value)
        yield
