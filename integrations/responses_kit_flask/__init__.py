"""The Open Responses API in a Flask app.

Under a prefix of it::

    responses = Responses(app, kit, url_prefix="/v1")

and a view function that is itself what answers::

    @app.post("/ask")
    @responses.endpoint
    def ask(turn):
        yield f"{current_user.name}, you said: {turn.text}"
"""

from __future__ import annotations

try:
    import flask  # noqa: F401  # only to say early what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('responses_kit_flask needs Flask: pip install "responses-kit[flask]"') from error

from .extension import Responses

__all__ = ["Responses"]
