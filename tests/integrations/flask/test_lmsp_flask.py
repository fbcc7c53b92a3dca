"""LMSP in a Flask app: beside the other dialect, over the same kit, and in its own shape whoever refuses."""

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

from ...contract.lmsp import said
from ...http.lmsp.conformance import check_response, problem_in
from .answers import error, response

ASKED: dict[str, Any] = {"model": "scripted", "input": [said("Hi")]}


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


def beside(app: Flask, kit: Any) -> Responses:
    """Both dialects, in the app."""
    responses = Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP).blueprint)
    return responses


def test_both_dialects_answer_from_one_kit(app: Flask, kit: ResponsesKit) -> None:
    beside(app, kit)
    client = app.test_client()
    made = json.loads(client.post("/lmsp/v1/responses", json={**ASKED, "store": True}).data)
    check_response(made)
    assert response(client.get(f"/v1/responses/{made['id']}"))["output"][0]["id"] == made["output"][0]["id"]
    assert len(app.extensions["responses_kit.kits"]) == 1


def test_a_function_that_makes_the_kit_is_called_once_for_both(app: Flask, kit: ResponsesKit) -> None:
    calls = []

    def make(app: Flask) -> ResponsesKit:
        calls.append(app)
        return kit

    beside(app, make)
    client = app.test_client()
    made = json.loads(client.post("/lmsp/v1/responses", json={**ASKED, "store": True}).data)
    response(client.get(f"/v1/responses/{made['id']}"))
    assert calls == [app]


class Maker:
    """Makes a kit, and cannot be looked up."""

    __hash__ = None  # type: ignore[assignment]  # as classes that define equality have it

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Maker) and other.kit is self.kit

    def __call__(self, app: Flask) -> ResponsesKit:
        return self.kit


def test_what_makes_the_kit_may_be_any_callable(app: Flask, kit: ResponsesKit) -> None:
    beside(app, Maker(kit))
    check_response(json.loads(app.test_client().post("/lmsp/v1/responses", json=ASKED).data))
    assert len(app.extensions["responses_kit.kits"]) == 1


def test_lmsp_may_be_alone(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit, "/lmsp/v1", dialect=LMSP)
    client = app.test_client()
    check_response(json.loads(client.post("/lmsp/v1/responses", json=ASKED).data))
    assert client.post("/v1/responses", json={"input": "Hi"}).status_code == 404


def test_whatever_is_refused_before_the_api_is_a_problem_there(app: Flask, kit: ResponsesKit) -> None:
    beside(app, kit)

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
        problem(client.post("/lmsp/v1/responses", json=ASKED, headers={"X-Refuse": refusal}), status)
        error(client.post("/v1/responses", json={"input": "Hi"}, headers={"X-Refuse": refusal}), status)
    problem(client.get("/lmsp/v1/responses"), 405)
    problem(client.get("/lmsp/v1"), 404)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    problem(client.get("/lmsp/v1/responses", headers=upgrade), 405)


def test_who_must_log_in_is_told_so_by_a_problem(app: Flask, kit: ResponsesKit) -> None:
    manager = LoginManager(app)
    manager.login_view = "login"
    manager.user_loader(lambda name: None)
    manager.request_loader(lambda asked: UserMixin() if asked.headers.get("X-User") == "ann" else None)
    responses = Responses(kit=kit, url_prefix="/lmsp/v1", dialect=LMSP)
    responses.blueprint.before_request(login_required(lambda: None))
    responses.init_app(app)
    app.add_url_rule("/login", "login", lambda: "log in")
    client = app.test_client()
    problem(client.post("/lmsp/v1/responses", json=ASKED), 401)
    check_response(json.loads(client.post("/lmsp/v1/responses", json=ASKED, headers={"X-User": "ann"}).data))
