"""One exception tree; every error that reaches the wire knows its status, type, code and param.

The tree::

    ResponsesKitError
    ├── ConfigurationError          the kit or a backend was set up wrongly; raised at once, never sent
    ├── IllegalOutput               a backend yielded what the state machine cannot accept
    ├── ToolError                   a hosted tool could not do what it was called for; the model is told
    ├── ClientDisconnected          whoever was told, or asked, has left; nothing is sent any more
    └── APIError                    anything a client may see
        ├── InvalidRequest          400 invalid_request
        │   ├── PreviousResponseNotFound
        │   ├── ModelNotFound
        │   ├── UnsupportedParameter
        │   ├── EventsUnavailable
        │   ├── WebSocketLimitReached
        │   └── ContextLengthExceeded
        ├── Unauthorized            401 invalid_request
        ├── Forbidden               403 invalid_request
        ├── NotFound                404 not_found
        ├── MethodNotAllowed        405 invalid_request
        ├── IdempotencyKeyReused    409 invalid_request
        ├── PayloadTooLarge         413 invalid_request
        ├── UnsupportedMediaType    415 invalid_request
        ├── UpgradeRequired         426 invalid_request
        ├── TooManyRequests         429 too_many_requests
        └── ServerError             500 server_error
            ├── ModelError          500 model_error
            ├── StoreError          500 server_error
            └── WebSocketsUnavailable 503 server_error

The types are those of the specification's table of error types. Messages are short, say what to do, and
never repeat what the client or the model said.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .schema.base import replace_surrogates


class ResponsesKitError(Exception):
    """The root of everything this package raises on purpose."""


class ConfigurationError(ResponsesKitError):
    """The kit, a store or a backend was set up in a way that cannot work; the message says how to mend it."""


class IllegalOutput(ResponsesKitError):
    """A backend yielded something that has no place in the stream at that moment.

    The machine that refused it has not changed. The client is told of a `model_error`; the message is for the
    backend's author and goes to the log.
    """


class ClientDisconnected(ResponsesKitError):
    """The client has left, while it was read from or written to."""


class ToolError(ResponsesKitError):
    """A hosted tool could not do what it was called for. Raised by tools.

    The message is shown to the model, which may try again, and to the client. Of any other exception both learn no
    more than that the tool failed.
    """


class APIError(ResponsesKitError):
    """An error in the shape that the specification gives it.

    Args:
        message: One or two sentences for a person. Never holds a payload.
        param: The request field at fault, as a path such as `input[0].content`.
        code: A stable, machine-readable name; each class has a default.
        headers: Extra headers for the HTTP reply, such as `Retry-After`.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # Others raise it as well, with whatever they have; and it has to be told, whatever that is.
        self.message = replace_surrogates(str(message))
        super().__init__(self.message)
        self.param = None if param is None else replace_surrogates(str(param))
        self.code = replace_surrogates(str(code or self.default_code))
        self.headers = headers or {}

    def payload(self) -> dict[str, Any]:
        """The four members that the wire shows: type, code, message, param."""
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


class InvalidRequest(APIError):
    """The request is malformed or asks for something that makes no sense; the client can mend it."""

    status = 400
    type = "invalid_request"
    default_code = "invalid_request"


class PreviousResponseNotFound(InvalidRequest):
    """`previous_response_id` names nothing that this owner can continue. Permanent, hence a 400 and not retried."""

    default_code = "previous_response_not_found"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message or "No response with this previous_response_id exists. Send the conversation in input instead.",
            param="previous_response_id",
        )


class ModelNotFound(InvalidRequest):
    """`model` names none of the backend's models."""

    default_code = "model_not_found"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or "No such model here. GET /models lists the models that exist.", param="model")


class UnsupportedParameter(InvalidRequest):
    """A valid field asks for what this model or this server cannot do."""

    default_code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Input and instructions do not fit the model's context window."""

    default_code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = "input") -> None:
        super().__init__(message, param=param)


class EventsUnavailable(InvalidRequest):
    """The events of a response are not there to be told again; the response itself may be. Permanent, hence a 400."""

    default_code = "events_not_kept"

    def __init__(self, message: str, *, param: str | None = "stream") -> None:
        super().__init__(message, param=param)


class WebSocketLimitReached(InvalidRequest):
    """The socket has been open for as long as any may (specification, "WebSocket Reconnects")."""

    default_code = "websocket_connection_limit_reached"


class Unauthorized(APIError):
    """No key, or a wrong one."""

    status = 401
    type = "invalid_request"
    default_code = "invalid_api_key"


class Forbidden(APIError):
    """Known, but not allowed."""

    status = 403
    type = "invalid_request"
    default_code = "forbidden"


class NotFound(APIError):
    """The path, or the resource it names, does not exist for this owner."""

    status = 404
    type = "not_found"
    default_code = "not_found"


class MethodNotAllowed(APIError):
    """The path exists, but not with this method."""

    status = 405
    type = "invalid_request"
    default_code = "method_not_allowed"


class IdempotencyKeyReused(APIError):
    """The `Idempotency-Key` belongs to another request."""

    status = 409
    type = "invalid_request"
    default_code = "idempotency_key_reused"


class PayloadTooLarge(APIError):
    """The body is larger than the server accepts."""

    status = 413
    type = "invalid_request"
    default_code = "payload_too_large"


class UnsupportedMediaType(APIError):
    """The body is not JSON, or is encoded in a way the server does not read."""

    status = 415
    type = "invalid_request"
    default_code = "unsupported_media_type"


class UpgradeRequired(APIError):
    """The path answers WebSocket connections only with this method."""

    status = 426
    type = "invalid_request"
    default_code = "upgrade_required"


class TooManyRequests(APIError):
    """All slots are taken and the queue is full.

    Args:
        message: What is full.
        retry_after: Seconds after which a new try makes sense; sent as `Retry-After`.
    """

    status = 429
    type = "too_many_requests"
    default_code = "too_many_requests"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, headers={"Retry-After": str(max(1, retry_after))})


class ServerError(APIError):
    """Something broke here; trying again later may help."""

    status = 500
    type = "server_error"
    default_code = "server_error"


class ModelError(ServerError):
    """The model or its backend failed at a valid request."""

    type = "model_error"
    default_code = "model_error"


class StoreError(ServerError):
    """The store could not read or write; what was generated was not kept."""

    default_code = "store_error"


class WebSocketsUnavailable(ServerError):
    """No socket can be opened now."""

    status = 503
    default_code = "sockets_unavailable"


def error_from_code(code: str, message: str) -> APIError:
    """The error that a stored response failed with. Of a code that no class has, its status is not known any more."""
    kinds: list[type[APIError]] = [APIError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.default_code == code and kind is not APIError:
            if kind.__module__ == __name__:
                return kind(message)
            error = kind.__new__(kind)  # others may want to be called with something else
            APIError.__init__(error, message)
            return error
    return ServerError(message, code=code)


def error_for_status(status: int, message: str) -> APIError:
    """The error for a status that a host's own exception has; what is none of ours becomes the nearest."""
    if status == TooManyRequests.status:
        return TooManyRequests(message)
    if status >= ServerError.status:
        return ServerError("The server failed. Its log has the reason.")
    kinds = (Unauthorized, Forbidden, NotFound, MethodNotAllowed, PayloadTooLarge, UnsupportedMediaType)
    return next((kind for kind in kinds if kind.status == status), InvalidRequest)(message)
