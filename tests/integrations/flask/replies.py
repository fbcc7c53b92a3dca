"""Helpers that check an app's replies against the specification."""

from __future__ import annotations

import json
from typing import Any

from responses_kit.protocol.sse import decode_events

from ...support.conformance import check_error, check_response, check_stream

__all__ = ["error", "final_response", "response", "stream"]

DONE = b"data: [DONE]\n\n"


def response(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.get_data()
    body: dict[str, Any] = json.loads(answer.get_data())
    check_response(body)
    return body


def final_response(answer: Any) -> dict[str, Any]:
    """Check a streamed reply, and return its final response object."""
    data = answer.get_data()
    assert answer.status_code == 200, data
    assert answer.content_type.startswith("text/event-stream")
    return stream(data)


def stream(data: bytes) -> dict[str, Any]:
    assert data.endswith(DONE)
    return check_stream(decode_events(data.removesuffix(DONE)))


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.get_data()
    assert answer.headers["Content-Type"] == "application/json"
    body = json.loads(answer.get_data())
    check_error(body)
    error_object: dict[str, Any] = body["error"]
    return error_object
