"""HTTP with no framework in it, and no dialect: a `Request` in, a `Reply` out.

A host makes a `Request`, whose body is read only once it is known that it counts (`Body` helps), has a `WireProtocol` handle
it, and sends the reply: either `body`, or what `stream` writes. It watches for the client's leaving and cancels around
both. Everything else is done here, and in the dialects, which are one module each: `open_responses`, `lmsp`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from ..errors import (
    APIError,
    ClientDisconnected,
    ConfigurationError,
    MethodNotAllowed,
    NotFound,
    ServerError,
)
from ..kit import ResponsesKit
from .messages import Reply, Request

__all__ = ["Endpoint", "WireProtocol"]

logger = logging.getLogger("responses_kit")


Endpoint = Callable[..., Awaitable[Reply]]
"""Answers a request: called with the kit, the request, its owner, and the values in its path."""


class WireProtocol:
    """What is spoken over a kit: which paths there are, and how it is said that something is wrong.

    Subclasses name themselves, list their endpoints, and say how they refuse. They keep nothing of their own, so that
    one may be made for each request.

    Args:
        kit: Answers the requests.

    Attributes:
        name: In lower case.
        routes: Endpoints by path and method. `*` in a path stands for one step of it, `**` for all that follow.
        sockets: Whether `GET /responses` may become a WebSocket; see `websocket`.
    """

    name: ClassVar[str]
    routes: ClassVar[Mapping[str, Mapping[str, Endpoint]]]
    sockets: ClassVar[bool] = False

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    @staticmethod
    def validate(dialect: type[WireProtocol]) -> type[WireProtocol]:
        """The dialect that a host was told to speak.

        Raises:
            ConfigurationError: It is none.
        """
        if not (isinstance(dialect, type) and issubclass(dialect, WireProtocol)) or dialect is WireProtocol:
            raise ConfigurationError("dialect is a class, such as responses_kit.http.lmsp.LMSP")
        return dialect

    @classmethod
    def render_error(cls, error: APIError) -> Reply:
        """An error as a reply."""
        raise NotImplementedError(f"{cls.__name__} must define refuse(error)")

    async def handle(self, request: Request) -> Reply:
        """Answers one request; every error becomes a reply in the dialect's shape.

        Raises:
            ClientGone: The client left while its body was read.
        """
        try:
            if request.method == "OPTIONS":  # asked by browsers, before they send who asks
                return Reply(204, {"Allow": ", ".join(self._methods(request.path)[0])})
            owner = await self.kit.service.resolve_owner(request.host, request.call)
            endpoint, values = self._route(request.method, request.path)
            return await endpoint(self.kit, request, owner, *values)
        except APIError as error:
            return self.render_error(error)
        except ClientDisconnected:
            raise
        except Exception as error:
            if (refused := request.refusal(error)) is not None:
                return self.render_error(refused)
            logger.error("the request failed", exc_info=error)
            return self.render_error(ServerError("The server failed. Its log has the reason."))

    def _route(self, method: str, path: str) -> tuple[Endpoint, list[str]]:
        """The endpoint for a request, and the values in its path."""
        methods, values = self._methods(path)
        endpoint = methods.get(method)
        if endpoint is None:
            raise MethodNotAllowed(
                f"This path answers {' and '.join(methods)} only.", headers={"Allow": ", ".join(methods)}
            )
        return endpoint, values

    def _methods(self, path: str) -> tuple[Mapping[str, Endpoint], list[str]]:
        """The endpoints at a path by their methods, and the values in it. A trailing slash makes no difference."""
        path = path.strip("/")
        first, _, rest = path.partition("/")
        value, slash, more = rest.partition("/")
        for pattern, values in (
            (path.replace("*", "no"), []),  # nobody is to name a pattern itself
            (f"{first}/**", [rest]),
            (f"{first}/*{slash}{more}", [value]),
        ):
            if pattern in self.routes and all(values):
                return self.routes[pattern], values
        raise NotFound("There is no such path in this API.")
