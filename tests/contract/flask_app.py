"""The app of the hosts that are Flask's: what a site has, and the kit under `/v1`."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, jsonify, request
from flask_sock import Sock

from responses_kit import ResponsesKit
from responses_kit.http.lmsp import LMSP
from responses_kit_flask import Responses

from .hosts import HOST_404


def site() -> Flask:
    """What there is without us, a WebSocket by an extension for them included."""
    app = Flask(__name__)
    sock = Sock(app)

    @app.post("/host/echo")
    def echo() -> Response:
        body = request.get_data()
        said = {
            "method": request.method,
            "path": request.path,
            "root_path": request.root_path,
            "query": request.query_string.decode(),
            "length": len(body),
            "body": body[:100].decode(),
        }
        answer = jsonify(said)
        answer.headers["X-Host"] = "flask"
        return answer

    @app.get("/host/state")
    def state() -> Response:
        return jsonify(started=False)

    @sock.route("/host/socket")
    def socket(there: Any) -> None:
        there.send(f"host at {request.path}")

    @app.errorhandler(404)
    def lost(error: Exception) -> tuple[str, int]:
        return HOST_404, 404

    return app


def under_prefix(kit: ResponsesKit) -> Flask:
    app = site()
    Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)
    return app


def by_decorator(kit: ResponsesKit) -> Flask:
    """The same, but for what creates responses, which is a view of the site's own."""
    app = site()
    responses = Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)

    @app.post("/v1/responses")
    @responses.endpoint(models=kit.backend.models)
    def create(turn: Any) -> Any:
        return kit.backend.generate(turn)

    return app
