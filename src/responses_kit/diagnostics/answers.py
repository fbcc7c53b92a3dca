"""Replies of the checked server, and their expected content."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

_ERROR: Final = {"type": str, "code": str | None, "message": str, "param": str | None}


class CheckFailed(Exception):
    """A check failed; the message is the detail of the finding."""


class CheckSkipped(Exception):
    """A check was skipped; the message is the detail of the finding."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete reply.

    Attributes:
        request: Method and path.
        status: HTTP status.
        content_type: Media type without parameters.
        json: The JSON object of the body; empty if the body is anything else.
    """

    request: str
    status: int
    content_type: str
    json: dict[str, Any]

    @property
    def error(self) -> dict[str, Any]:
        """The error object, or an empty one if it does not have the specification's shape."""
        error = as_object(self.json.get("error"))
        return error if all(isinstance(error.get(name, 0), kind) for name, kind in _ERROR.items()) else {}

    @property
    def models(self) -> list[str] | None:
        """The listed model names, or None if the reply is not a model list."""
        data = self.json.get("data") if self.status == 200 else None
        if not isinstance(data, list):
            return None
        return [model["id"] for model in as_objects(data) if isinstance(model.get("id"), str)]

    def require(self, status: int = 200) -> dict[str, Any]:
        """Return the JSON object, or for an expected error the error object.

        Raises:
            CheckFailed: The reply has another status or shape.
        """
        found = self.json if status < 400 else self.error
        if self.status == status and found:
            return found
        instead = "" if status in (200, self.status) else f" instead of {status}"
        raise CheckFailed(f"{self}{instead}. {self._advice()}")

    def _advice(self) -> str:
        error, refused = self.error, self.status in (401, 403)
        if refused and not error:
            return "Something in front of the API refuses, such as a login or a CSRF check."
        if self.status >= 400 and not error:
            return (
                "This is a page of the host or of a proxy, not an error object with type, code, message and param: "
                "route every path below the prefix, and its errors, to the API."
            )
        if refused:
            return "Pass a --key or a --header that the owner hook (in Django the setting AUTH) accepts."
        if error.get("code") == "previous_response_not_found" or (self.status == 404 and "{id}" in self.request):
            return "If several processes serve the API, give them one shared store; see docs/guides/stores.md."
        if self.status >= 500:
            return "The server's log has the reason."
        return "Try again under less load." if self.status == 429 else "Check that the URL is a server of this API."

    def __str__(self) -> str:
        error = self.error
        content = (
            f": {shorten(error['message']).rstrip('.')}" if error else f" and {self.content_type or 'no Content-Type'}"
        )
        return f"{self.request} was answered with {self.status}{content}"


def describe_response(response: dict[str, Any]) -> str:
    """Describe a response that must have ended with text.

    Raises:
        CheckFailed: The response failed, is still in progress, or has no text.
    """
    status = response.get("status")
    if status not in ("completed", "incomplete"):
        reason = as_object(response.get("error")).get("message") or "no reason was given."
        raise CheckFailed(f"The response is {shorten(status)}: {shorten(reason)} See the server's log.")
    parts = [part for item in as_objects(response.get("output")) for part in as_objects(item.get("content"))]
    length = sum(len(str(part.get("text"))) for part in parts if part.get("type") == "output_text")
    if not length and status == "completed":
        raise CheckFailed("The response is completed but has no text. Check that the backend yields text.")
    tokens = as_object(response.get("usage")).get("total_tokens", "an unknown number of")
    return f"{status} with {length} characters of text, {shorten(tokens)} tokens in all"


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON text as an object; an empty one if it is anything else."""
    with suppress(ValueError):
        return as_object(from_json(text))
    return {}


def as_object(value: object) -> dict[str, Any]:
    """Return a parsed value if it is an object, or an empty one."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[dict[str, Any]]:
    """Return the members of an array as objects; empty objects for members of other types."""
    return [as_object(member) for member in value] if isinstance(value, list) else []


def shorten(text: object) -> str:
    """Return text of the server, shortened between words so that no unredacted part of a key remains."""
    return textwrap.shorten(str(text), 200, placeholder=" …")
