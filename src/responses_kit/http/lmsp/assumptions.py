"""Assumptions about the chapters of LMSP 1.0 that are not available.

The available chapter says that errors are problem documents (RFC 9457) with a `code`, that a header `LMSP-Version`
exists, and that tasks have events and a final result. Their exact formats are inferred here and may change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http.client import responses
from typing import Any, Final

from ...errors import APIError, InvalidRequest, NotFound
from ...protocol.sse import encode_json

__all__ = [
    "VERSION",
    "check_version",
    "encode_error_event",
    "render_problem",
    "render_task",
    "resolve_store",
    "task_not_found",
    "to_response_id",
    "to_task_id",
]

# The version.

VERSION: Final = "1.0"


def check_version(headers: Mapping[str, str]) -> None:
    """Check that a request has this major version; without a version it is 1.0.

    Args:
        headers: The request's headers, with names in lower case.

    Raises:
        InvalidRequest: The version is another one, or malformed.
    """
    version = headers.get("lmsp-version", VERSION).strip()
    if not re.fullmatch(r"1(\.[0-9]{1,9})?", version):
        raise InvalidRequest(
            f"'LMSP-Version' must be {VERSION} or omitted.",
            param="LMSP-Version",
            code="unsupported_version",
        )


# Problems.

_CODES: Final = {"unsupported_parameter": "unsupported_capability", "events_not_kept": "event_history_expired"}
"""LMSP's codes by the kit's, if they differ."""

_STATUSES: Final = {"event_history_expired": 410}
"""LMSP's statuses by its codes, if they differ from the kit's."""

_DETAILS: Final = {
    "model_not_found": "No such model.",
    "event_history_expired": "The events have expired. GET the task for its result.",
}
"""Messages in place of the kit's, which mention paths of the Open Responses API."""

_CODES_WITHOUT_PARAM: Final = {"event_history_expired"}
"""Codes with a `param` that only the Open Responses API has."""


def render_problem(error: APIError) -> dict[str, Any]:
    """Return a problem document (RFC 9457) with a stable `code`, and `param` if one field caused the error."""
    code = _CODES.get(error.code, error.code)
    status = _STATUSES.get(code, error.status)
    document = {
        "type": "about:blank",
        "title": responses.get(status, "Error"),
        "status": status,
        "detail": _DETAILS.get(code, _translate_fields(error.message)),
        "code": code,
    }
    if error.param is not None and code not in _CODES_WITHOUT_PARAM:
        document["param"] = _translate_fields(error.param)
    return document


def _translate_fields(text: str) -> str:
    """Replace fields of the Open Responses API by LMSP's."""
    text = text.replace("text.format.schema", "response_format.json_schema.schema")
    return text.replace("text.format", "response_format")


def encode_error_event(error: APIError) -> bytes:
    """Return the last event of a stream that cannot continue, although the response may.

    It has no id, because the next id belongs to the event that follows when the client resumes.
    """
    return b"event: error\ndata: %b\n\n" % encode_json({"error": render_problem(error)})


# Storage.


def resolve_store(store: bool | None, *, conversations: bool, required_by: str | None) -> bool:
    """Return whether a response is stored.

    Args:
        store: The request's `store`, if it was sent.
        conversations: Whether the model has this capability; without it responses are stored only if required.
        required_by: The condition that requires storage, such as "for a task"; None if it is optional.

    Raises:
        InvalidRequest: Storage is required, but `store` is false.
    """
    if required_by is None:
        return bool(store) and conversations
    if store is False:
        raise InvalidRequest(f"'store' must be true {required_by}.", param="store")
    return True


# Tasks. A task is a background response; its id is the response's with another prefix.


def to_task_id(response_id: str) -> str:
    """Return the id of the task of a response."""
    return "task_" + response_id.removeprefix("resp_")


def to_response_id(task_id: str) -> str:
    """Return the id of the response of a task.

    Raises:
        NotFound: The id is not a task's.
    """
    if not task_id.startswith("task_"):
        raise task_not_found()
    return "resp_" + task_id.removeprefix("task_")


def render_task(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task object of a rendered response."""
    return {
        "id": to_task_id(response["id"]),
        "object": "task",
        "created_at": response["created_at"],
        "status": response["status"],
        "response": response,
    }


def task_not_found() -> NotFound:
    """Return the error for a task that does not exist for its owner."""
    return NotFound("No task with this id exists.", code="task_not_found")
