"""The exceptions of the package; those that reach clients have a status, type, code and param.

The hierarchy::

    ResponsesKitError
    ├── ConfigurationError          the setup of the kit, a store or a backend is not valid; never sent to clients
    ├── IllegalOutput               a backend yielded an output that the state machine cannot accept
    ├── ToolError                   a hosted tool could not do its work; the message goes to the model
    ├── ClientDisconnected          the client has left; nothing is sent any more
    └── APIError                    errors that clients may see
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

The types are those of the specification's table of error types. Messages name the parameter and the rule, and at most
one remedy. They never quote the client or the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .schema.base import replace_surrogates


class ResponsesKitError(Exception):
    """The base of all exceptions of this package."""


class ConfigurationError(ResponsesKitError):
    """The setup of the kit, a store or a backend is not valid; the message says how to correct it."""


class IllegalOutput(ResponsesKitError):
    """A backend yielded an output that is malformed or not legal in the response's current state.

    The state machine has not changed. The client receives a `model_error`; the message is for the backend's author and
    goes to the log.
    """


class ClientDisconnected(ResponsesKitError):
    """The client left while the server was reading from it or writing to it."""


class ToolError(ResponsesKitError):
    """A hosted tool could not do its work. Raised by tools.

    The model, which may try again, and the client both see the message. For any other exception they only see that the
    tool failed.
    """


class APIError(ResponsesKitError):
    """An error that clients see, in the specification's shape.

    Args:
        message: One or two sentences for a person, without payloads.
        param: The path of the invalid parameter, such as `input[0].content`.
        code: A stable, machine-readable name; each class has a default.
        headers: Additional headers of the HTTP response, such as `Retry-After`.
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
        # Applications may pass other types than str, and the error must still be serializable.
        self.message = replace_surrogates(str(message))
        super().__init__(self.message)
        self.param = None if param is None else replace_surrogates(str(param))
        self.code = replace_surrogates(str(code or self.default_code))
        self.headers = headers or {}

    def payload(self) -> dict[str, Any]:
        """Return the members of the error on the wire: type, code, message and param."""
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


class InvalidRequest(APIError):
    """The request is malformed or contradictory; the client can correct it."""

    status = 400
    type = "invalid_request"
    default_code = "invalid_request"


class PreviousResponseNotFound(InvalidRequest):
    """`previous_response_id` is not the id of a response that this owner can continue.

    Clients must not retry, hence the status 400.
    """

    default_code = "previous_response_not_found"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message or "'previous_response_id' is not the id of a stored response. Send the conversation in 'input'.",
            param="previous_response_id",
        )


class ModelNotFound(InvalidRequest):
    """`model` is not one of the backend's models."""

    default_code = "model_not_found"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or "'model' is not an available model. GET /models lists them.", param="model")


class UnsupportedParameter(InvalidRequest):
    """A valid parameter requests a feature that the model or the server does not support."""

    default_code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Input and instructions exceed the model's context window."""

    default_code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = "input") -> None:
        super().__init__(message, param=param)


class EventsUnavailable(InvalidRequest):
    """The events of a response are not logged, or their log has expired.

    The response itself may exist. Clients must not retry, hence the status 400.
    """

    default_code = "events_not_kept"

    def __init__(self, message: str, *, param: str | None = "stream") -> None:
        super().__init__(message, param=param)


class WebSocketLimitReached(InvalidRequest):
    """The WebSocket has reached its maximum lifetime (specification, "WebSocket Reconnects")."""

    default_code = "websocket_connection_limit_reached"


class Unauthorized(APIError):
    """The API key is missing or not valid."""

    status = 401
    type = "invalid_request"
    default_code = "invalid_api_key"


class Forbidden(APIError):
    """The request is authenticated but not permitted."""

    status = 403
    type = "invalid_request"
    default_code = "forbidden"


class NotFound(APIError):
    """The path, or the resource, does not exist for this owner."""

    status = 404
    type = "not_found"
    default_code = "not_found"


class MethodNotAllowed(APIError):
    """The path does not support this method."""

    status = 405
    type = "invalid_request"
    default_code = "method_not_allowed"


class IdempotencyKeyReused(APIError):
    """The `Idempotency-Key` was already used with another request."""

    status = 409
    type = "invalid_request"
    default_code = "idempotency_key_reused"


class PayloadTooLarge(APIError):
    """The body is larger than the server accepts."""

    status = 413
    type = "invalid_request"
    default_code = "payload_too_large"


class UnsupportedMediaType(APIError):
    """The body is not JSON, or has an encoding that the server does not support."""

    status = 415
    type = "invalid_request"
    default_code = "unsupported_media_type"


class UpgradeRequired(APIError):
    """With this method, the path accepts WebSocket connections only."""

    status = 426
    type = "invalid_request"
    default_code = "upgrade_required"


class TooManyRequests(APIError):
    """The server is at its capacity.

    Args:
        message: The limit that was reached.
        retry_after: Seconds that the client should wait before it retries; sent as `Retry-After`.
    """

    status = 429
    type = "too_many_requests"
    default_code = "too_many_requests"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, headers={"Retry-After": str(max(1, retry_after))})


class ServerError(APIError):
    """The server failed; a later attempt may succeed."""

    status = 500
    type = "server_error"
    default_code = "server_error"


class ModelError(ServerError):
    """The model or its backend failed on a valid request."""

    type = "model_error"
    default_code = "model_error"


class StoreError(ServerError):
    """The store could not read or write. Output that was generated is lost."""

    default_code = "store_error"


class WebSocketsUnavailable(ServerError):
    """The server accepts no WebSocket connections at present."""

    status = 503
    default_code = "sockets_unavailable"


def error_from_code(code: str, message: str) -> APIError:
    """Return the error with which a stored response failed.

    A code that no class has becomes a `ServerError`, because a stored response does not contain the status.
    """
    kinds: list[type[APIError]] = [APIError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.default_code == code and kind is not APIError:
            if kind.__module__ == __name__:
                return kind(message)
            error = kind.__new__(kind)  # an application's class may have another signature
            APIError.__init__(error, message)
            return error
    return ServerError(message, code=code)


def error_for_status(status: int, message: str) -> APIError:
    """Return the error for the status of a host's exception; an unknown status becomes the nearest known one."""
    if status == TooManyRequests.status:
        return TooManyRequests(message)
    if status >= ServerError.status:
        return ServerError("The server failed. Its log has the reason.")
    kinds = (Unauthorized, Forbidden, NotFound, MethodNotAllowed, PayloadTooLarge, UnsupportedMediaType)
    return next((kind for kind in kinds if kind.status == status), InvalidRequest)(message)
