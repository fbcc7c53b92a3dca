"""A view function as a backend, called in its request's own thread by a `WSGIBridge`."""

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
from .wsgi_bridge import WSGIBridge, current_bridge

__all__ = ["RequestScope", "ViewBackend"]

_CLOSE_TIMEOUT: Final = 5.0
"""Seconds that the end of a response waits for its view's iterator to be closed."""

_EXHAUSTED: Final = object()


class ViewBackend(Backend):
    """A backend that calls the view function of the current request.

    A plain function, and an iterator that it returns, run in the request's thread, so that the app's thread-local
    objects are available; an async function runs on the event loop.

    Args:
        models: The models; see `Backend`.
        view: Called with the turn in the request's thread; calls the request's view.
        translate_error: See `http.messages.Request`.
    """

    is_request_bound = True

    def __init__(
        self,
        models: Sequence[str | Model],
        view: Callable[[Turn], Any],
        translate_error: Callable[[Exception], APIError | None] = lambda error: None,
    ) -> None:
        self.models = models
        self._view, self._translate_error = view, translate_error

    async def generate(self, turn: Turn) -> AsyncIterator[Output]:
        """Yield the outputs of the view."""
        bridge = current_bridge.get()
        assert bridge is not None, "a request-bound backend is called within its request only"
        outputs: Any = None
        try:
            result = await bridge.call(lambda turn: _normalize_result(self._view(turn)), turn)
            if isinstance(result, Awaitable):
                result = await bridge.call(_normalize_result, await result)
            outputs = _ThreadIterator(bridge, result) if isinstance(result, Iterator) else result
            async for output in outputs:
                yield output
        except Exception as error:
            raise self._translate_error(error) or error from error.__cause__
        except (KeyboardInterrupt, SystemExit) as error:  # would stop the event loop
            raise RuntimeError(f"the view raised {type(error).__name__}") from error
        except BaseException:
            turn.cancelled = True
            raise
        finally:
            if hasattr(outputs, "aclose"):
                # After the timeout the iterator is still closed, as soon as the thread is free.
                with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True):
                    await outputs.aclose()


class _ThreadIterator:
    """A plain iterator as an async one, advanced in the host's thread.

    Outputs are requested one at a time, because the same thread also sends them.
    """

    def __init__(self, bridge: WSGIBridge, outputs: Iterator[Output]) -> None:
        self._bridge, self._outputs = bridge, outputs
        self._is_exhausted = False

    def __aiter__(self) -> _ThreadIterator:
        return self

    async def __anext__(self) -> Output:
        output: Any = await self._bridge.call(_next, self._outputs)
        if output is _EXHAUSTED:
            self._is_exhausted = True
            raise StopAsyncIteration
        return output  # type: ignore[no-any-return]  # validated by the state machine

    async def aclose(self) -> None:
        if not self._is_exhausted and hasattr(self._outputs, "close"):
            with suppress(ClientDisconnected):
                await self._bridge.call(_close, self._outputs)


def _normalize_result(result: Any) -> Any:
    """Return a view's result as an awaitable, an async iterable or an iterator."""
    if isinstance(result, str):
        result = [result]
    if isinstance(result, Awaitable | AsyncIterable):
        return result
    if isinstance(result, Mapping) or not isinstance(result, Iterable):
        raise IllegalOutput(
            f"the view returned {type(result).__name__}: yield outputs, or return text. Decorators that may refuse a"
            " request belong above the one that registers the view"
        )
    return iter(result)


def _next(outputs: Iterator[Output]) -> Any:
    return next(outputs, _EXHAUSTED)


def _close(outputs: Any) -> None:
    outputs.close()


class RequestScope(Scope):
    """Copies the context variables of the request's thread, for views that run on the event loop.

    The framework's contexts are not entered there: the host's thread entered them, and exits them after the reply.
    """

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """Set the variables in the request's task."""
        bridge = current_bridge.get()
        for variable, value in bridge.context.items() if bridge is not None else ():
            variable.set(value)
        yield
