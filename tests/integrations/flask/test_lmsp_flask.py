"""LMSP in a Flask app: beside Open Responses with the same kit, and with errors in its own format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask, Response, abort, request
from flask_login import LoginManager, UserMixin, login_required

from responses_kit import ResponsesKit
from responses_kit._concurrency import loop_thread
from responses_kit.http.lmsp import LMSP
from responses_kit.testing import ScriptedBackend
from responses_kit_flask import Responses

from ...contract.lmsp import message
from ...http.lmsp.conformance import check_response, problem_in
from .replies import error, response

REQUEST: dict[str, Any] = {"model": "scripted", "input": [message("Hi")]}


@pytest.fixture
def kit() -> Iterator[ResponsesKit]:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    yield kit
    loop_thread.stop_kit(kit)


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__)
    app.secret_key = "not a secret"
    return app


def problem(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.get_data()
    return problem_in(status, answer.headers, answer.get_data())


def add_both_protocols(app: Flask, kit: Any) -> Responses:
    """Add the kit to the app with both dialects."""
    responses = Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)
    return responses


def test_both_dialects_share_kit(app: Flask, kit: ResponsesKit) -> None:
    add_both_protocols(app, kit)
    client = app.test_client()
    created = json.loads(client.post("/lmsp/v1/responses", json={**REQUEST, "store": True}).data)
    check_response(created)
    assert response(client.get(f"/v1/responses/{created['id']}"))["output"][0]["id"] == created["output"][0]["id"]
    assert len(app.extensions["responses_kit.kits"]) == 1


def test_kit_factory_is_called_once_for_both_dialects(app: Flask, kit: ResponsesKit) -> None:
    calls = []

    def create_kit(app: Flask) -> ResponsesKit:
        calls.append(app)
        return kit

    add_both_protocols(app, create_kit)
    client = app.test_client()
    created = json.loads(client.post("/lmsp/v1/responses", json={**REQUEST, "store": True}).data)
    response(client.get(f"/v1/responses/{created['id']}"))
    assert calls == [app]


class UnhashableFactory:
    """A factory of kits that cannot be a dictionary key."""

    __hash__ = None  # type: ignore[assignment]  # the default of classes that define __eq__

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnhashableFactory) and other.kit is self.kit

    def __call__(self, app: Flask) -> ResponsesKit:
        return self.kit


def test_kit_factory_may_be_any_callable(app: Flask, kit: ResponsesKit) -> None:
    add_both_protocols(app, UnhashableFactory(kit))
    check_response(json.loads(app.test_client().post("/lmsp/v1/responses", json=REQUEST).data))
    assert len(app.extensions["responses_kit.kits"]) == 1


def test_lmsp_works_alone(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit, "/lmsp/v1", dialect=LMSP)
    client = app.test_client()
    check_response(json.loads(client.post("/lmsp/v1/responses", json=REQUEST).data))
    assert client.post("/v1/responses", json={"input": "Hi"}).status_code == 404


def test_early_refusal_is_problem_document(app: Flask, kit: ResponsesKit) -> None:
    add_both_protocols(app, kit)

    @app.before_request
    def first() -> Response | None:
        match request.headers.get("X-Refuse"):
            case "abort":
                abort(403, "Not you.")
            case "answer":
                return Response("a page", 503)
        return None

    client = app.test_client()
    for refusal, status in (("abort", 403), ("answer", 500)):
        problem(client.post("/lmsp/v1/responses", json=REQUEST, headers={"X-Refuse": refusal}), status)
        error(client.post("/v1/responses", json={"input": "Hi"}, headers={"X-Refuse": refusal}), status)
    problem(client.get("/lmsp/v1/responses"), 405)
    problem(client.get("/lmsp/v1"), 404)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    problem(client.get("/lmsp/v1/responses", headers=upgrade), 405)


def test_login_required_returns_problem_document(app: Flask, kit: ResponsesKit) -> None:
    manager = LoginManager(app)
    manager.login_view = "login"
    manager.user_loader(lambda name: None)
    manager.request_loader(lambda flask_request: UserMixin() if flask_request.headers.get("X-User") == "ann" else None)
    responses = Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP)
    responses.blueprint.before_request(login_required(lambda: None))
    responses.init_app(app)
    app.add_url_rule("/login", "login", lambda: "log in")
    client = app.test_client()
    problem(client.post("/lmsp/v1/responses", json=REQUEST), 401)
    check_response(json.loads(client.post("/lmsp/v1/responses", json=REQUEST, headers={"X-User": "ann"}).data))
