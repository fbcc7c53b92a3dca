"""The app of the Flask hosts: a site with its own routes, and the kit under `/v1`."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, jsonify, request
from flask_sock import Sock

from responses_kit import ResponsesKit
from responses_kit.http.lmsp import LMSP
from responses_kit_flask import Responses

from .hosts import HOST_404


def create_site() -> Flask:
    """Return the site without the kit, including a WebSocket by Flask-Sock."""
    app = Flask(__name__)
    sock = Sock(app)

    @app.post("/host/echo")
    def echo() -> Response:
        body = request.get_data()
        request_data = {
            "method": request.method,
            "path": request.path,
            "root_path": request.root_path,
            "query": request.query_string.decode(),
            "length": len(body),
            "body": body[:100].decode(),
        }
        answer = jsonify(request_data)
        answer.headers["X-Host"] = "flask"
        return answer

    @app.get("/host/state")
    def state() -> Response:
        return jsonify(started=False)

    @sock.route("/host/socket")
    def socket(websocket: Any) -> None:
        websocket.send(f"host at {request.path}")

    @app.errorhandler(404)
    def not_found(error: Exception) -> tuple[str, int]:
        return HOST_404, 404

    return app


def with_extension(kit: ResponsesKit) -> Flask:
    app = create_site()
    Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)
    return app


def with_endpoint(kit: ResponsesKit) -> Flask:
    """Return the site with the kit, except that one of its own views creates the responses."""
    app = create_site()
    responses = Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)

    @app.post("/v1/responses")
    @responses.endpoint(models=kit.backend.models)
    def create(turn: Any) -> Any:
        return kit.backend.generate(turn)

    return app
