"""What a server answers, and whether that is as it should be."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

_ERROR: Final = {"type": str, "code": str | None, "message": str, "param": str | None}


class Failed(Exception):
    """What was looked at is not as it should be; the message is the detail."""


class Skipped(Exception):
    """It could not be looked at, or not be judged; the message is the detail."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that has arrived whole."""

    asked: str  # method and path
    status: int
    media: str
    json: dict[str, Any]  # the members of the JSON object that it is

    @property
    def error(self) -> dict[str, Any]:
        """The members of its error, if that has the specification's shape."""
        error = members(self.json.get("error"))
        return error if all(isinstance(error.get(name, 0), kind) for name, kind in _ERROR.items()) else {}

    @property
    def models(self) -> list[str] | None:
        """The models that it lists, or None where it is no such list."""
        data = self.json.get("data") if self.status == 200 else None
        if not isinstance(data, list):
            return None
        return [model["id"] for model in objects(data) if isinstance(model.get("id"), str)]

    def expect(self, status: int = 200) -> dict[str, Any]:
        """The members of its JSON object or, where an error is expected, of that; else it has `Failed`."""
        found = self.json if status < 400 else self.error
        if self.status == status and found:
            return found
        instead = "" if status in (200, self.status) else f" instead of {status}"
        raise Failed(f"{self}{instead}. {self._advice()}")

    def _advice(self) -> str:
        error, refused = self.error, self.status in (401, 403)
        if refused and not error:
            return "Not the API refuses, but something before it, such as a log-in or a check against CSRF."
        if self.status >= 400 and not error:
            return (
                "That is the page of the host or of a proxy, not an error of this API with type, code, message and "
                "param: let every path below the prefix, and every error there, be the API's."
            )
        if refused:
            return "Give a --key, or a --header, that the owner hook (in Django the setting AUTH) accepts."
        if error.get("code") == "previous_response_not_found" or (self.status == 404 and "{id}" in self.asked):
            return "If several processes serve, they need a store that they share: docs/stores.md says how."
        if self.status >= 500:
            return "The server's log has the reason."
        return "Try again when less is going on." if self.status == 429 else "Is it a server of this API?"

    def __str__(self) -> str:
        error = self.error
        said = f": {quoted(error['message']).rstrip('.')}" if error else f" and {self.media or 'no Content-Type'}"
        return f"{self.asked} was answered with {self.status}{said}"


def judged(response: dict[str, Any]) -> str:
    """What is in a response that should have ended; raises `Failed` if that is not enough."""
    status = response.get("status")
    if status not in ("completed", "incomplete"):
        reason = members(response.get("error")).get("message") or "no reason is given."
        raise Failed(f"The response is {quoted(status)}: {quoted(reason)} Look at the server's log.")
    parts = [part for item in objects(response.get("output")) for part in objects(item.get("content"))]
    length = sum(len(str(part.get("text"))) for part in parts if part.get("type") == "output_text")
    if not length and status == "completed":
        raise Failed("The response is completed and has no text. Does the backend yield any?")
    tokens = members(response.get("usage")).get("total_tokens", "an unknown number of")
    return f"{status} with {length} characters of text, {quoted(tokens)} tokens in all"


def parsed(text: str | bytes) -> dict[str, Any]:
    """The members of a JSON object; none if it is anything else."""
    with suppress(ValueError):
        return members(from_json(text))
    return {}


def members(value: object) -> dict[str, Any]:
    """The same, of what has been parsed."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """The members of each object in an array."""
    return [members(member) for member in value] if isinstance(value, list) else []


def quoted(said: object) -> str:
    """What the server said, cut between words, so that no part of a key is left that would not be known as one."""
    return textwrap.shorten(str(said), 200, placeholder=" …")
