"""Flask behind an ASGI adapter, and Quart: `uvicorn tests.integrations.flask.asgi_apps:flask_app`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from a2wsgi import WSGIMiddleware
from flask import Flask, g
from quart import Quart

from responses_kit import ResponsesKit, Turn
from responses_kit.testing import ScriptedBackend
from responses_kit_flask import Responses
from responses_kit_starlette import ResponsesMiddleware


def create_kit() -> ResponsesKit:
    return ResponsesKit(ScriptedBackend(lambda turn: ["Hello, ", turn.text], models=["scripted"]))


site = Flask(__name__)
responses = Responses(site, create_kit())


@site.before_request
def set_user() -> None:
    g.user = "ann"


@site.post("/ask/responses")
@responses.endpoint(models=["scripted"])
def ask(turn: Turn) -> Iterator[str]:
    yield "Hello, "
    yield f"{turn.text} of {g.user}"


flask_app: Any = WSGIMiddleware(site)

quart_app = Quart(__name__)
quart_app.asgi_app = ResponsesMiddleware(quart_app.asgi_app, create_kit())  # type: ignore[assignment, arg-type]  # as Quart documents it


@quart_app.get("/")
async def page() -> str:
    return "a page"
