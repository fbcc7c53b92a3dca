"""What the known chapter of LMSP 1.0 does not say, or only shows, and is inferred: kept together, since it may change.

It is known that problems are RFC 9457's with a `code`, that there is a header `LMSP-Version`, and that tasks have
events and a final result. How these look exactly, other chapters say.
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
    "error_event",
    "is_kept",
    "problem",
    "response_id_of",
    "task",
    "task_id_of",
    "unknown_task",
]

# The version.

VERSION: Final = "1.0"


def check_version(headers: Mapping[str, str]) -> None:
    """Whether a request, whose header names are in lower case, is of this major version. Saying none says 1.0.

    Raises:
        InvalidRequest: It is of another, or nobody can tell.
    """
    asked = headers.get("lmsp-version", VERSION).strip()
    if not re.fullmatch(r"1(\.[0-9]{1,9})?", asked):
        raise InvalidRequest(
            f"This server speaks LMSP {VERSION}. Send that as LMSP-Version, or leave it out.",
            param="LMSP-Version",
            code="unsupported_version",
        )


# Problems.

_CODES: Final = {"unsupported_parameter": "unsupported_capability", "events_not_kept": "event_history_expired"}
"""Codes that are others here."""

_STATUSES: Final = {"event_history_expired": 410}
"""Statuses that are others here."""

_DETAILS: Final = {
    "model_not_found": "No such model here.",
    "event_history_expired": "These events are not kept any more. GET the task itself for its result.",
}
"""Messages that would name paths of the other dialect."""

_NO_PARAM: Final = {"event_history_expired"}
"""Codes whose fields are the other dialect's."""


def problem(error: APIError) -> dict[str, Any]:
    """A problem document (RFC 9457), with the stable `code`, and `param` where one field is at fault."""
    code = _CODES.get(error.code, error.code)
    status = _STATUSES.get(code, error.status)
    document = {
        "type": "about:blank",
        "title": responses.get(status, "Error"),
        "status": status,
        "detail": _DETAILS.get(code, error.message),
        "code": code,
    }
    if error.param is not None and code not in _NO_PARAM:
        param = error.param.replace("text.format.schema", "response_format.json_schema.schema")
        document["param"] = param.replace("text.format", "response_format")
    return document


def error_event(error: APIError) -> bytes:
    """The end of a stream that is not the response's: that may go on, and be told by another stream.

    It has no number, for that is the next event's, which is to come when the client resumes.
    """
    return b"event: error\ndata: %b\n\n" % encode_json({"error": problem(error)})


# What is kept.


def is_kept(store: bool | None, *, conversations: bool, needed: str | None) -> bool:
    """Whether a response is kept.

    Args:
        store: What the client says to it, if anything.
        conversations: Whether the model has the capability; without it nothing is stored.
        needed: What cannot be without, such as "A task": then it is kept, though the default is otherwise.

    Raises:
        InvalidRequest: It is needed and refused.
    """
    if needed is None:
        return bool(store) and conversations
    if store is False:
        raise InvalidRequest(f"{needed} is kept for a while: leave store out, or true.", param="store")
    return True


# Tasks. A task is a background response; its id is the response's, with a prefix of its own.


def task_id_of(response_id: str) -> str:
    """The id of the task that makes a response."""
    return "task_" + response_id.removeprefix("resp_")


def response_id_of(task_id: str) -> str:
    """The id of the response that a task makes.

    Raises:
        NotFound: This is no task's id.
    """
    if not task_id.startswith("task_"):
        raise unknown_task()
    return "resp_" + task_id.removeprefix("task_")


def task(response: Mapping[str, Any]) -> dict[str, Any]:
    """A task, from the response as LMSP shows it."""
    return {
        "id": task_id_of(response["id"]),
        "object": "task",
        "created_at": response["created_at"],
        "status": response["status"],
        "response": response,
    }


def unknown_task() -> NotFound:
    """What is said of a task that its owner does not have."""
    return NotFound("No task with this id exists.", code="task_not_found")
