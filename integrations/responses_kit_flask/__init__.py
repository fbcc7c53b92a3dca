"""The Open Responses API in a Flask app.

Mounted under a URL prefix::

    responses = Responses(app, kit, url_prefix="/v1")

and as a view function that is the backend itself::

    @app.post("/ask")
    @responses.endpoint
    def ask(turn):
        yield f"{current_user.name}, you said: {turn.text}"
"""

from __future__ import annotations

try:
    import flask  # noqa: F401  # for a clear error if Flask is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('responses_kit_flask needs Flask: pip install "responses-kit[flask]"') from error

from responses_kit._concurrency.loop_thread import handle_sigterm

from .extension import Responses

__all__ = ["Responses", "handle_sigterm"]
