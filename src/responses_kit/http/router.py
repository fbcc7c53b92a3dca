"""Routing and error handling of the wire protocols, without a web framework.

A host builds a `Request`, passes it to `WireProtocol.handle` and sends the `Reply`. It reads the body only when
`Request.read` is called, and cancels the handling and the stream when the client leaves. The wire protocols are in
`open_responses` and `lmsp`.
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
"""Answers a request. Called with the kit, the request, its owner, and the values of the path's wildcards."""


class WireProtocol:
    """An HTTP API over a kit: its endpoints, and its representation of errors.

    Instances are stateless, so that a host may create one per request.

    Args:
        kit: Answers the requests.

    Attributes:
        name: The protocol's name in lower case.
        routes: Endpoints by path and method. `*` in a path matches one segment, `**` all remaining ones.
        has_websocket: Whether `GET /responses` may be upgraded to a WebSocket; see `websocket`.
    """

    name: ClassVar[str]
    routes: ClassVar[Mapping[str, Mapping[str, Endpoint]]]
    has_websocket: ClassVar[bool] = False

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    @staticmethod
    def validate(dialect: type[WireProtocol]) -> type[WireProtocol]:
        """Return the `dialect` argument of a host.

        Raises:
            ConfigurationError: It is not a subclass of `WireProtocol`.
        """
        if not (isinstance(dialect, type) and issubclass(dialect, WireProtocol)) or dialect is WireProtocol:
            raise ConfigurationError("'dialect' must be a WireProtocol class, such as responses_kit.http.lmsp.LMSP")
        return dialect

    @classmethod
    def render_error(cls, error: APIError) -> Reply:
        """Return an error as a reply."""
        raise NotImplementedError(f"{cls.__name__} must define render_error(error)")

    async def handle(self, request: Request) -> Reply:
        """Answer a request. Errors become replies in the protocol's format.

        Raises:
            ClientDisconnected: The client left while its body was read.
        """
        try:
            if request.method == "OPTIONS":  # a CORS preflight carries no credentials (Fetch standard)
                return Reply(204, {"Allow": ", ".join(self._find_methods(request.path)[0])})
            owner = await self.kit.service.resolve_owner(request.host_request, request.call_hook)
            endpoint, values = self._find_endpoint(request.method, request.path)
            return await endpoint(self.kit, request, owner, *values)
        except APIError as error:
            return self.render_error(error)
        except ClientDisconnected:
            raise
        except Exception as error:
            if (translated := request.translate_error(error)) is not None:
                return self.render_error(translated)
            logger.error("the request failed", exc_info=error)
            return self.render_error(ServerError("The server failed. Its log has the reason."))

    def _find_endpoint(self, method: str, path: str) -> tuple[Endpoint, list[str]]:
        """Return the endpoint for a request, and the values of its path's wildcards."""
        methods, values = self._find_methods(path)
        endpoint = methods.get(method)
        if endpoint is None:
            raise MethodNotAllowed(
                f"The method must be {' or '.join(methods)} for this path.", headers={"Allow": ", ".join(methods)}
            )
        return endpoint, values

    def _find_methods(self, path: str) -> tuple[Mapping[str, Endpoint], list[str]]:
        """Return the endpoints of a path by method, and the values of its wildcards. Trailing slashes are ignored."""
        path = path.strip("/")
        first, _, rest = path.partition("/")
        value, slash, more = rest.partition("/")
        for pattern, values in (
            (path.replace("*", "no"), []),  # a literal "*" in a path must not match a pattern
            (f"{first}/**", [rest]),
            (f"{first}/*{slash}{more}", [value]),
        ):
            if pattern in self.routes and all(values):
                return self.routes[pattern], values
        raise NotFound("This path does not exist.")
