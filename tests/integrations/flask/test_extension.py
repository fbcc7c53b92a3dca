"""The API under a URL prefix of a Flask app."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, current_app, g, redirect, request, session
from flask.testing import FlaskClient
from flask_login import LoginManager, UserMixin, login_required
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.serving import make_server
from werkzeug.test import Client
from werkzeug.wrappers import Response as AnyResponse

from responses_kit import Backend, Model, ResponsesKit, Turn
from responses_kit._concurrency import loop_thread
from responses_kit.errors import ConfigurationError
from responses_kit.outputs import ToolCall
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.sql import SqlStore
from responses_kit.testing import Pause, ScriptedBackend
from responses_kit.tools import HostedTool
from responses_kit_flask import Responses

from .replies import error, final_response, response

TIMEOUT = 10.0


@pytest.fixture
def kit() -> Iterator[ResponsesKit]:
    with running_kit(ScriptedBackend(["Hi"])) as kit:
        yield kit


@contextmanager
def running_kit(backend: Backend, **settings: Any) -> Iterator[ResponsesKit]:
    kit = ResponsesKit(backend, **settings)
    try:
        yield kit
    finally:
        loop_thread.stop_kit(kit)


@pytest.fixture
def app() -> Flask:
    """An app with its own pages."""
    app = Flask(__name__)
    app.secret_key = "not a secret"

    @app.get("/page")
    def page() -> str:
        return "a page"

    @app.post("/upload")
    def upload() -> str:
        return f"{len(request.get_data())} bytes"

    @app.get("/crash")
    def crash() -> str:
        raise LookupError("the password is hunter2")

    return app


def ask(client: FlaskClient | Client, path: str = "/v1", **fields: Any) -> AnyResponse:
    return client.post(f"{path}/responses", json={"input": "Hi", **fields})


def text(response: dict[str, Any]) -> str:
    output_text: str = response["output"][-1]["content"][0]["text"]
    return output_text


# Registration and paths.


def test_app_passed_to_constructor_has_api(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    assert text(response(ask(app.test_client()))) == "Hi"
    assert text(final_response(ask(app.test_client(), stream=True))) == "Hi"
    assert app.test_client().get("/page").data == b"a page"


def test_init_app_adds_api(app: Flask, kit: ResponsesKit) -> None:
    responses = Responses(kit=kit, url_prefix="/ai")
    responses.init_app(app)
    assert text(response(ask(app.test_client(), "/ai"))) == "Hi"
    assert ask(app.test_client()).status_code == 404


def test_apps_share_given_kit(kit: ResponsesKit) -> None:
    responses = Responses(kit=kit)
    one, two = (Flask(name) for name in ("one", "two"))
    for app in (one, two):
        responses.init_app(app)
    first = response(ask(one.test_client()))
    assert response(two.test_client().get(f"/v1/responses/{first['id']}"))["id"] == first["id"]


def test_apps_get_their_own_kit_from_factory() -> None:
    kits: dict[str, ResponsesKit] = {}

    def create_kit(app: Flask) -> ResponsesKit:
        kits[app.name] = ResponsesKit(ScriptedBackend([f"Hi from {app.name}"]))
        return kits[app.name]

    responses = Responses(kit=create_kit)
    one, two = (Flask(name) for name in ("one", "two"))
    for app in (one, two):
        responses.init_app(app)
    try:
        first = response(ask(one.test_client()))
        assert text(first) == "Hi from one"
        assert text(response(ask(two.test_client()))) == "Hi from two"
        error(two.test_client().get(f"/v1/responses/{first['id']}"), 404)
    finally:
        for kit in kits.values():
            loop_thread.stop_kit(kit)


def test_second_registration_is_refused(app: Flask, kit: ResponsesKit) -> None:
    responses = Responses(app, kit)
    with pytest.raises(ConfigurationError, match="already has this extension"):
        responses.init_app(app)
    with pytest.raises(ConfigurationError, match="already has this extension"):
        Responses(app, ResponsesKit(ScriptedBackend()), url_prefix="/v2")
    assert text(response(ask(app.test_client()))) == "Hi"


def test_blueprint_may_be_registered_at_other_prefix(app: Flask, kit: ResponsesKit) -> None:
    app.register_blueprint(Responses(kit=kit).blueprint, url_prefix="/ai/v9")
    client = app.test_client()
    created = response(ask(client, "/ai/v9"))
    assert response(client.get(f"/ai/v9/responses/{created['id']}"))["id"] == created["id"]
    error(client.get("/ai/v9/nothing"), 404)
    assert ask(client).content_type.startswith("text/html")


def test_blueprint_may_be_nested(app: Flask, kit: ResponsesKit) -> None:
    parent = Blueprint("parent", __name__, url_prefix="/api")

    @parent.get("/page")
    def page() -> str:
        return "the parent's"

    @parent.errorhandler(404)
    def missing(error: Exception) -> tuple[str, int]:
        return "the parent's 404", 404

    parent.register_blueprint(Responses(kit=kit).blueprint)
    app.register_blueprint(parent)
    client = app.test_client()
    assert text(response(ask(client, "/api/v1"))) == "Hi"
    assert text(final_response(ask(client, "/api/v1", stream=True))) == "Hi"
    error(client.get("/api/v1/nothing"), 404)
    error(client.open("/api/v1/responses", method="PROPFIND"), 405)
    assert client.get("/api/page").data == b"the parent's"


def test_blueprint_may_accompany_extension(app: Flask, kit: ResponsesKit) -> None:
    with running_kit(ScriptedBackend(["Hello"])) as other:
        Responses(app, kit)
        app.register_blueprint(Responses(kit=other, url_prefix="/v2").blueprint, name="second")
        client = app.test_client()
        created = response(ask(client))
        assert text(created) == "Hi"
        assert text(response(ask(client, "/v2"))) == "Hello"
        error(client.get(f"/v2/responses/{created['id']}"), 404)


def test_blueprint_at_two_prefixes_has_one_kit(app: Flask) -> None:
    kits: list[ResponsesKit] = []

    def create_kit(app: Flask) -> ResponsesKit:
        kits.append(ResponsesKit(ScriptedBackend(["Hi"])))
        return kits[-1]

    responses = Responses(kit=create_kit)
    app.register_blueprint(responses.blueprint)
    app.register_blueprint(responses.blueprint, url_prefix="/old", name="old")
    try:
        created = response(ask(app.test_client(), "/old"))
        assert response(app.test_client().get(f"/v1/responses/{created['id']}"))["id"] == created["id"]
        assert len(kits) == 1
    finally:
        for kit in kits:
            loop_thread.stop_kit(kit)


@pytest.mark.parametrize(
    "kit",
    [ScriptedBackend(["Hi"]), "a name", lambda app: ScriptedBackend(["Hi"]), lambda app: None],
    ids=["backend", "string", "factory of a backend", "factory of None"],
)
def test_invalid_kit_is_refused(app: Flask, kit: Any) -> None:
    with pytest.raises(ConfigurationError, match="ResponsesKit"):
        Responses(app, kit)


def test_blueprint_without_kit_is_refused(app: Flask) -> None:
    app.testing = True

    def use() -> None:
        app.register_blueprint(Responses().blueprint)
        ask(app.test_client())

    with pytest.raises(ConfigurationError, match="kit"):
        use()


def test_without_kit_prefix_is_empty(app: Flask) -> None:
    Responses(app)
    assert ask(app.test_client()).content_type.startswith("text/html")


@pytest.mark.parametrize(
    ("prefix", "path"), [("/v1", "/v1"), ("/v1/", "/v1"), ("/a/b/c/", "/a/b/c"), ("/", ""), ("/<shop>/v1", "/ann/v1")]
)
def test_any_path_prefix_is_accepted(app: Flask, kit: ResponsesKit, prefix: str, path: str) -> None:
    if "<" in prefix:

        @app.url_value_preprocessor
        def take(endpoint: str | None, values: dict[str, Any] | None) -> None:
            if values:
                values.pop("shop", None)

    Responses(app, kit, url_prefix=prefix)
    client = app.test_client()
    created = response(ask(client, path))
    assert response(client.get(f"{path}/responses/{created['id']}"))["id"] == created["id"]
    assert client.get(f"{path}/models").get_json()["data"][0]["id"] == "scripted"
    error(client.get(f"{path}/nothing"), 404)
    error(client.delete(f"{path}/responses"), 405)
    assert client.get("/page").data == b"a page"


def test_app_paths_take_precedence(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit, url_prefix="/")

    @app.get("/<path:name>")
    def file(name: str) -> str:
        return f"the file {name}"

    @app.post("/models/train")
    def train() -> str:
        return "trained"

    client = app.test_client()
    assert client.get("/responses/a/b").data == b"the file responses/a/b"
    assert client.post("/models/train").data == b"trained"
    response(ask(client, ""))
    error(client.put("/responses/a/b"), 404)


def test_paths_work_below_mount_point(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    client = Client(DispatcherMiddleware(Flask("outside"), {"/shop": app}))
    created = response(ask(client, "/shop/v1"))
    assert response(client.get(f"/shop/v1/responses/{created['id']}"))["id"] == created["id"]
    assert text(final_response(ask(client, "/shop/v1", stream=True))) == "Hi"
    error(client.get("/shop/v1/nothing"), 404)
    assert ask(client).content_type.startswith("text/html")


# Paths below the prefix.


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("PUT", "/v1", 404),
        ("PROPFIND", "/v1", 404),
        ("GET", "/v1/", 404),
        ("POST", "/v1/", 404),
        ("GET", "/v1/nothing", 404),
        ("PROPFIND", "/v1/nothing", 404),
        ("GET", "/v1/nothing/at/all/", 404),
        ("GET", "/v1//nothing//here", 404),
        ("GET", "/v1//models//none", 404),
        ("GET", "/v1/%0A", 404),
        ("GET", "/v1/responses%0A", 404),
        ("GET", "/v1/responses/%0Aresp", 404),
        ("GET", "/v1/%F0%9F%98%80/%FF", 404),
        ("GET", "/v1/responses/resp_none", 404),
        ("GET", "/v1/responses", 426),
        ("PUT", "/v1/responses", 405),
        ("PATCH", "/v1/responses", 405),
        ("TRACE", "/v1/responses", 405),
        ("PROPFIND", "/v1/responses", 405),
        ("BREW", "/v1/responses/resp_none", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/scripted", 405),
        ("GET", "/v1/responses/compact/", 405),
    ],
)
def test_unknown_path_returns_error_object(app: Flask, kit: ResponsesKit, method: str, path: str, status: int) -> None:
    Responses(app, kit)
    answer = app.test_client().open(path, method=method)
    error(answer, status)
    assert ("Allow" in answer.headers) == (status == 405)


def test_options_lists_methods(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    client = app.test_client()
    assert client.put("/v1/responses").headers["Allow"] == "POST, GET"
    assert client.put("/v1/responses/resp_none").headers["Allow"] == "GET, DELETE"
    answer = client.options("/v1/responses")
    assert (answer.status_code, answer.data, answer.headers["Allow"]) == (204, b"", "POST, GET")
    error(client.options("/v1/nothing"), 404)


def test_extra_slashes_are_accepted(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    client = app.test_client()
    for path in ("/v1/responses/", "/v1//responses", "/v1///responses//"):
        response(client.post(path, json={"input": "Hi"}))
    assert client.get("/v1//models/").get_json()["object"] == "list"


def test_head_has_no_body(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    answer = app.test_client().head("/v1/models")
    assert (answer.status_code, answer.data, answer.headers["Allow"]) == (405, b"", "GET")


UPGRADE = {
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses", 426),
        ("GET", "/v1/responses/", 426),
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/responses/resp_none", 404),
        ("PUT", "/v1/responses", 405),
        ("PROPFIND", "/v1/models", 405),
    ],
)
def test_unsupported_upgrade_returns_error_object(
    app: Flask, kit: ResponsesKit, method: str, path: str, status: int
) -> None:
    Responses(app, kit)
    error(app.test_client().open(path, method=method, headers=UPGRADE), status)


def test_post_ignores_upgrade_header(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    client = app.test_client()
    assert text(response(client.post("/v1/responses", json={"input": "Hi"}, headers=UPGRADE))) == "Hi"
    assert client.get("/v1/models", headers=UPGRADE).get_json()["object"] == "list"


def test_similar_prefix_belongs_to_app(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    for path in ("/v1x", "/v1x/responses", "/v", "/x/v1/responses"):
        answer = app.test_client().get(path)
        assert (answer.status_code, answer.mimetype) == (404, "text/html")


# The app's own error pages.


def by_code(app: Flask, handler: Callable[[Any], Any]) -> None:
    for code in (400, 401, 403, 404, 405, 413, 418, 500):
        app.register_error_handler(code, handler)


def by_http_exception(app: Flask, handler: Callable[[Any], Any]) -> None:
    app.register_error_handler(HTTPException, handler)


def by_exception(app: Flask, handler: Callable[[Any], Any]) -> None:
    app.register_error_handler(Exception, handler)


def without_handler(app: Flask, handler: Callable[[Any], Any]) -> None:
    """Flask's own pages."""


@pytest.mark.parametrize("registered", [by_code, by_http_exception, by_exception, without_handler])
def test_app_error_pages_do_not_apply_to_api(
    app: Flask, kit: ResponsesKit, registered: Callable[[Flask, Callable[[Any], Any]], None]
) -> None:
    seen: list[str] = []

    def page(error: Exception) -> tuple[str, int]:
        seen.append(request.path)
        return f"the app's page: {type(error).__name__}", getattr(error, "code", None) or 500

    @app.before_request
    def guard() -> None:
        if request.args.get("abort"):
            abort(int(request.args["abort"]), "Not you.")
        if "crash" in request.args:
            raise LookupError("the password is hunter2")

    registered(app, page)
    app.config["MAX_CONTENT_LENGTH"] = 100
    Responses(app, kit)
    client = app.test_client()
    outside = [
        (client.get("/nothing"), 404),
        (client.post("/page"), 405),
        (client.post("/upload", data=b"x" * 101), 413),
        (client.get("/page?abort=418"), 418),
        (client.get("/crash"), 500),
    ]
    for answer, status in outside:
        assert (answer.status_code, answer.mimetype) == (status, "text/html")
        assert answer.data.startswith(b"<!doctype html>" if registered is without_handler else b"the app's page")
    assert len(seen) == (0 if registered is without_handler else len(outside))
    error(client.get("/v1/nothing"), 404)
    error(client.put("/v1/responses"), 405)
    error(ask(client, input="x" * 100), 413)
    error(client.post("/v1/responses", data=b"{"), 400)
    assert error(client.get("/v1/models?abort=403"), 403)["message"] == "Not you."
    error(client.get("/v1/models?abort=418"), 400)
    failed = error(client.get("/v1/models?crash"), 500)
    assert "hunter2" not in json.dumps(failed)


def test_max_content_length_applies_without_content_length(app: Flask, kit: ResponsesKit) -> None:
    app.config["MAX_CONTENT_LENGTH"] = 100
    Responses(app, kit)
    body = json.dumps({"input": "x" * 100}).encode()
    more = {"wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    answer = app.test_client().post("/v1/responses", data=body, content_type="application/json", environ_overrides=more)
    error(answer, 413)
    response(ask(app.test_client()))


def test_exception_before_api_propagates_in_testing(app: Flask, kit: ResponsesKit) -> None:
    app.testing = True

    @app.before_request
    def guard() -> None:
        raise LookupError("no such shop")

    Responses(app, kit)
    with pytest.raises(LookupError, match="no such shop"):
        ask(app.test_client())


# Hooks before and after the API.


def test_app_before_request_may_answer(app: Flask, kit: ResponsesKit) -> None:
    @app.before_request
    def answer_early() -> Any:
        return {
            "ok": lambda: None,
            "abort": lambda: abort(401, "Who are you?"),
            "abort with an answer": lambda: abort(Response("no", 403)),
            "answer": lambda: ("This way is closed.", 403, {"WWW-Authenticate": "Bearer"}),
            "redirect": lambda: redirect("/page"),
        }[request.headers["X-Way"]]()

    Responses(app, kit)
    client = app.test_client()

    def send(name: str) -> AnyResponse:
        return client.post("/v1/responses", json={"input": "Hi"}, headers={"X-Way": name})

    response(send("ok"))
    assert error(send("abort"), 401)["message"] == "Who are you?"
    error(send("abort with an answer"), 403)
    answer = send("answer")
    error(answer, 403)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    answer = send("redirect")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/page")


def test_retry_after_is_kept(app: Flask, kit: ResponsesKit) -> None:
    @app.before_request
    def guard() -> Any:
        return "Too much.", 429, {"Retry-After": "7"}

    Responses(app, kit)
    answer = ask(app.test_client())
    assert error(answer, 429)["type"] == "too_many_requests"
    assert answer.headers.getlist("Retry-After") == ["7"]


def test_blueprint_before_request_sees_api_requests_only(app: Flask, kit: ResponsesKit) -> None:
    responses = Responses(kit=kit)

    @responses.blueprint.before_request
    def guard() -> None:
        if request.headers.get("X-User") != "ann":
            abort(403, "Ann may.")

    responses.init_app(app)
    client = app.test_client()
    assert error(ask(client), 403)["message"] == "Ann may."
    error(client.get("/v1/nothing"), 403)
    response(client.post("/v1/responses", json={"input": "Hi"}, headers={"X-User": "ann"}))
    assert client.get("/page").data == b"a page"


@pytest.mark.parametrize("streams", [False, True])
def test_app_headers_are_on_all_api_replies(app: Flask, kit: ResponsesKit, streams: bool) -> None:
    @app.after_request
    def earlier(answer: Response) -> Response:
        answer.headers["X-Earlier"] = "yes"
        return answer

    Responses(app, kit)

    @app.after_request
    def later(answer: Response) -> Response:
        answer.headers["X-Later"] = "yes"
        answer.set_cookie("seen", "yes")
        return answer

    client = app.test_client()
    reply = ask(client, stream=streams)
    (final_response if streams else response)(reply)
    not_found = client.get("/v1/nothing")
    error(not_found, 404)
    for answer in (reply, not_found):
        assert (answer.headers["X-Earlier"], answer.headers["X-Later"]) == ("yes", "yes")
        assert answer.headers["Set-Cookie"].startswith("seen=yes")


@pytest.mark.parametrize("streams", [False, True])
def test_replacing_error_is_error_object(app: Flask, kit: ResponsesKit, streams: bool) -> None:
    Responses(app, kit)

    @app.after_request
    def replace(answer: Response) -> Response:
        status = int(request.headers.get("X-Status", 0))
        return Response("maintenance", status) if status else answer

    client = app.test_client()
    body = {"input": "Hi", "stream": streams}
    error(client.post("/v1/responses", json=body, headers={"X-Status": "503"}), 500)
    assert client.post("/v1/responses", json=body, headers={"X-Status": "202"}).data == b"maintenance"
    (final_response if streams else response)(client.post("/v1/responses", json=body))


def replace_iterable(answer: Response, wrapped: Callable[[Any], Iterator[bytes]]) -> Response:
    answer.response = wrapped(answer.response)
    return answer


def replace_response(answer: Response, wrapped: Callable[[Any], Iterator[bytes]]) -> Response:
    return Response(wrapped(answer.response), answer.status_code, answer.headers)


def replace_data(answer: Response, wrapped: Callable[[Any], Iterator[bytes]]) -> Response:
    answer.set_data(b"".join(wrapped([answer.get_data()])))
    return answer


@pytest.mark.parametrize("how", [replace_iterable, replace_response, replace_data])
@pytest.mark.parametrize("streams", [False, True])
def test_app_may_wrap_stream(app: Flask, streams: bool, how: Callable[..., Response]) -> None:
    seen: list[bytes] = []
    Responses(app, lambda app: ResponsesKit(ScriptedBackend(["One, ", Pause(0.05), "two, ", "three"])))

    @app.after_request
    def count(answer: Response) -> Response:
        def wrapped(pieces: Any) -> Iterator[bytes]:
            for piece in pieces:
                seen.append(piece)
                yield piece

        return how(answer, wrapped)

    answer = ask(app.test_client(), stream=streams)
    assert text(final_response(answer) if streams else response(answer)) == "One, two, three"
    assert b"".join(seen) == answer.get_data()


@pytest.mark.parametrize(
    "read",
    [
        lambda: request.get_json(),
        lambda: request.get_data(),
        lambda: request.get_data(as_text=True, parse_form_data=True),
        lambda: request.form,
        lambda: request.values,
        lambda: (request.form, request.get_json()),
    ],
    ids=["json", "data", "data and form", "form", "values", "form and json"],
)
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
def test_body_may_be_read_before(app: Flask, kit: ResponsesKit, read: Callable[[], Any], content_type: str) -> None:
    @app.before_request
    def set_context() -> None:
        read()

    Responses(app, kit)
    body = json.dumps({"input": "x" * 200_000})
    response(app.test_client().post("/v1/responses", data=body, content_type=content_type))
    assert kit.backend.turns[-1].text == "x" * 200_000  # type: ignore[attr-defined]
    error(app.test_client().post("/v1/responses", data="", content_type="application/json"), 400)


# Owners and authentication.


def test_owner_hook_runs_in_request_thread_and_contexts(app: Flask) -> None:
    seen: list[tuple[Any, ...]] = []

    def owner(flask_request: Any) -> str:
        seen.append(
            (threading.get_ident(), flask_request is request._get_current_object(), current_app.name)  # type: ignore[attr-defined]
        )
        return f"{g.shop} {session['user']} {request.headers['X-User']}"

    @app.before_request
    def set_context() -> None:
        g.shop = "shop"
        session["user"] = "ann"

    backend = ScriptedBackend(["Hi"])
    with running_kit(backend, owner=owner) as kit:
        Responses(app, kit)
        for streams in (False, True):
            body = {"input": "Hi", "stream": streams}
            answer = app.test_client().post("/v1/responses", json=body, headers={"X-User": "browser"})
            (final_response if streams else response)(answer)
    assert seen == [(threading.get_ident(), True, app.name)] * 2
    assert [turn.owner for turn in backend.turns] == ["shop ann browser"] * 2


@pytest.mark.parametrize("body", [b'{"input": "Hi"}', b"no json"])
def test_owner_hook_may_abort(app: Flask, body: bytes) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "403": lambda: abort(403, "Not on Sundays."),
        "401": lambda: abort(401),
        "418": lambda: abort(418),
        "503": lambda: abort(503),
        "an answer": lambda: abort(Response("no", 403)),
        "nobody": lambda: None,
    }

    def owner(flask_request: Any) -> Any:
        return actions[flask_request.headers["X-Way"]]()

    with running_kit(ScriptedBackend(["Hi"]), owner=owner) as kit:
        Responses(app, kit)

        def send(name: str) -> AnyResponse:
            headers = {"X-Way": name}
            return app.test_client().post("/v1/responses", data=body, content_type="application/json", headers=headers)

        assert error(send("403"), 403)["message"] == "Not on Sundays."
        error(send("401"), 401)
        error(send("418"), 400)
        error(send("503"), 500)
        error(send("nobody"), 401)


def test_owner_hook_may_abort_with_response(app: Flask) -> None:
    with running_kit(ScriptedBackend(["Hi"]), owner=lambda flask_request: abort(Response("no", 403))) as kit:
        Responses(app, kit)
        error(ask(app.test_client()), 403)


def test_async_owner_hook_is_awaited(app: Flask) -> None:
    async def owner(flask_request: Any) -> Any:
        return flask_request.headers.get("X-User")

    with running_kit(ScriptedBackend(["Hi"]), owner=owner) as kit:
        Responses(app, kit)
        error(ask(app.test_client()), 401)
        response(app.test_client().post("/v1/responses", json={"input": "Hi"}, headers={"X-User": "ann"}))


@pytest.mark.parametrize("view", [None, "page"])
def test_login_redirect_becomes_401(app: Flask, kit: ResponsesKit, view: str | None) -> None:
    manager = LoginManager(app)
    manager.login_view = view

    class User(UserMixin):  # type: ignore[misc]  # it has no types
        id = "ann"

    @manager.request_loader
    def load(flask_request: Any) -> User | None:
        return User() if flask_request.headers.get("X-User") == "ann" else None

    responses = Responses(kit=kit)
    responses.blueprint.before_request(login_required(lambda: None))
    responses.init_app(app)

    @app.get("/mine")
    @login_required
    def mine() -> str:
        return "mine"

    client = app.test_client()
    error(ask(client), 401)
    error(client.get("/v1/nothing"), 401)
    response(client.post("/v1/responses", json={"input": "Hi"}, headers={"X-User": "ann"}))
    assert client.get("/mine").status_code == (302 if view else 401)
    assert client.get("/mine", headers={"X-User": "ann"}).data == b"mine"


# The app context of backends and tools.


class SyncContextBackend(Backend):
    """Yields the name of the current app, in a thread."""

    models = (Model("plain", tools=True),)

    def generate(self, turn: Turn) -> Iterator[str]:
        yield f"{current_app.name} "
        g.counted = getattr(g, "counted", 0) + 1
        yield f"{current_app.name} {g.counted}"


class AsyncContextBackend(Backend):
    """Yields the name of the current app, on the event loop."""

    models = (Model("waiting", tools=True),)

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        yield f"{current_app.name} "
        g.counted = getattr(g, "counted", 0) + 1
        yield f"{current_app.name} {g.counted}"


class ToolCallingBackend(Backend):
    """Calls tools that return the name of the current app."""

    models = (Model("caller", tools=True),)

    async def generate(self, turn: Turn) -> AsyncIterator[Any]:
        if turn.round == 0:
            yield ToolCall("plain", "{}")
            yield ToolCall("waiting", "{}")
        else:
            yield " ".join(str(getattr(item, "output", "")) for item in turn.items[1:])


def count_in_thread() -> str:
    g.counted = getattr(g, "counted", 0) + 1
    return f"{current_app.name} {g.counted}"


async def count_on_loop() -> str:
    g.counted = getattr(g, "counted", 0) + 1
    return f"{current_app.name} {g.counted}"


TOOLS = [
    HostedTool.from_function("acme:plain", count_in_thread, name="plain"),
    HostedTool.from_function("acme:waiting", count_on_loop, name="waiting"),
]

TOOL_TYPES = [{"type": "acme:plain"}, {"type": "acme:waiting"}]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail after a timeout."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("backend", "expected", "torn_down"),
    [
        (SyncContextBackend(), "shop shop 1", 1),
        (AsyncContextBackend(), "shop shop 1", 1),
        (ToolCallingBackend(), "shop 1 shop 1", 2),
    ],
    ids=["plain", "async", "tools"],
)
@pytest.mark.parametrize("how", ["whole", "streamed", "background"])
def test_backends_and_tools_have_app_context_with_teardown(
    backend: Backend, expected: str, torn_down: int, how: str
) -> None:
    app = Flask("shop")
    torn: list[BaseException | None] = []

    @app.teardown_appcontext
    def teardown(failure: BaseException | None) -> None:
        if "counted" in g:
            torn.append(failure)

    with running_kit(backend, tools=TOOLS) as kit:
        Responses(app, kit)
        client = app.test_client()
        answer = ask(client, stream=how == "streamed", background=how == "background", tools=TOOL_TYPES)
        body = final_response(answer) if how == "streamed" else response(answer)
        if how == "background":
            path = f"/v1/responses/{body['id']}"
            wait_until(lambda: response(client.get(path))["status"] == "completed")
            body = response(client.get(path))
        assert text(body) == expected
        wait_until(lambda: len(torn) == torn_down)
    assert torn == [None] * torn_down


@pytest.mark.parametrize("backend", [SyncContextBackend, AsyncContextBackend])
def test_each_of_several_apps_has_its_own_context(backend: type[Backend]) -> None:
    kits: list[ResponsesKit] = []

    def create_kit(app: Flask) -> ResponsesKit:
        kits.append(ResponsesKit(backend()))
        return kits[-1]

    responses = Responses(kit=create_kit)
    one, two = (Flask(name) for name in ("one", "two"))
    for app in (one, two):
        responses.init_app(app)
    try:
        for app in (one, two):
            assert text(response(ask(app.test_client()))) == f"{app.name} {app.name} 1"
    finally:
        for kit in kits:
            loop_thread.stop_kit(kit)


@pytest.mark.parametrize("backend", [SyncContextBackend, AsyncContextBackend])
def test_shared_kit_uses_context_of_requested_app(backend: type[Backend]) -> None:
    one, two = (Flask(name) for name in ("one", "two"))
    with running_kit(backend()) as kit:
        responses = Responses(one, kit)
        try:
            responses.init_app(two)
        except ConfigurationError:
            return  # a refusal is acceptable, too
        for app in (one, two):
            assert text(response(ask(app.test_client()))) == f"{app.name} {app.name} 1"


@pytest.mark.parametrize("backend", [SyncContextBackend, AsyncContextBackend])
def test_failure_is_torn_down(backend: type[Backend]) -> None:
    class Failing(backend):  # type: ignore[misc, valid-type]  # a dynamic base
        models = ("failing",)
        if backend is SyncContextBackend:

            def generate(self, turn: Turn) -> Iterator[str]:
                g.counted = 1
                raise ValueError("no")
                yield ""
        else:

            async def generate(self, turn: Turn) -> AsyncIterator[str]:
                g.counted = 1
                raise ValueError("no")
                yield ""

    app = Flask("shop")
    torn = threading.Event()

    @app.teardown_appcontext
    def teardown(failure: BaseException | None) -> None:
        if "counted" in g:
            torn.set()

    with running_kit(Failing()) as kit:
        Responses(app, kit)
        assert error(ask(app.test_client()), 500)["type"] == "model_error"
        assert torn.wait(TIMEOUT)


# Commands.


@contextmanager
def run_server(app: Flask) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join(TIMEOUT)
        server.server_close()


def run_command(app: Flask, *arguments: str, **more: Any) -> tuple[int, str]:
    logger = logging.getLogger("responses_kit")
    level = logger.level
    try:
        result = app.test_cli_runner().invoke(args=["responses", *arguments], **more)
    finally:
        logger.setLevel(level)  # the command sets the level for its process
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_check_reports_server_state(app: Flask) -> None:
    def owner(flask_request: Any) -> str | None:
        return "ann" if flask_request.headers.get("Authorization") == "Bearer key" else None

    with running_kit(ScriptedBackend(["Hello."]), owner=owner) as kit:
        Responses(app, kit)
        with run_server(app) as url:
            for options in ({"env": {"RESPONSES_KIT_API_KEY": "key"}}, {}):
                arguments = () if options else ("--key", "key")
                code, out = run_command(app, "check", url, *arguments, **options)
                assert code == 0, out
                assert [line for line in out.splitlines() if not re.match(r"(ok     |skipped) \S", line)] == []
                assert re.search(r"^ok      stream ", out, re.MULTILINE)
            code, out = run_command(app, "check", url, "--key", "wrong")
            assert code == 1
            assert re.search(r"^failed  models .*401", out, re.MULTILINE)
            assert "Error: 1 of these checks failed." in out
            assert run_command(app, "check", url, "--header", "Authorization: Bearer key")[0] == 0
            code, out = run_command(app, "check", url, "--key", "key", "--model", "nobody")
            assert code == 1


def test_check_works_without_extension(app: Flask) -> None:
    Responses(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, out = run_command(app, "check", f"http://127.0.0.1:{port}/v1", "--timeout", "5")
    assert code == 1
    assert "checks failed" in out


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("ftp://x/v1",), "The URL must be the base URL of the API", 1),
        (("http://x/v1", "--header", "X-Key"), 'A header must have the form "Name: value".', 1),
        (("http://x/v1", "--timeout", "0"), "Invalid value for '--timeout'", 2),
        ((), "Missing argument 'URL'", 2),
    ],
)
def test_check_reports_invalid_arguments(app: Flask, arguments: tuple[str, ...], message: str, status: int) -> None:
    Responses(app)
    code, out = run_command(app, "check", *arguments)
    assert code == status
    assert message in out


def test_commands_are_listed_once(app: Flask, kit: ResponsesKit) -> None:
    Responses(app, kit)
    app.register_blueprint(Responses(kit=kit, url_prefix="/v2").blueprint, name="second")
    code, out = run_command(app, "--help")
    assert code == 0
    assert out.count("\n  check ") == out.count("\n  prune ") == 1


@pytest.mark.parametrize("command", ["setup", "prune"])
def test_memory_store_is_skipped_by_commands(app: Flask, kit: ResponsesKit, command: str) -> None:
    Responses(app, kit)
    message = "Error: This app has memory stores only, which need neither setup nor pruning.\n"
    assert run_command(app, command) == (1, message)


def test_database_is_set_up_and_pruned(app: Flask, tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'responses.db'}")
    Responses(app, ResponsesKit(ScriptedBackend(), store=store, secrets=["s" * 32]))
    code, out = run_command(app, "prune")
    assert code == 1
    assert out.startswith("Error: ")
    for _ in range(2):
        assert run_command(app, "setup") == (0, "The stores are ready.\n")
    assert run_command(app, "prune") == (0, "Deleted 0 responses, ended 0 orphaned responses.\n")


class RecordingStore(MemoryStore):
    """A store that records calls."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._failure = failure

    async def prune(self) -> int:
        self.calls.append("prune")
        if self._failure is not None:
            raise self._failure
        return 7

    async def aclose(self) -> None:
        self.calls.append("aclose")


class StoreProxy:
    """A proxy for a store that is not a `MemoryStore`."""

    def __init__(self, store: RecordingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_prune_prunes_and_closes_all_stores(app: Flask) -> None:
    stores = [RecordingStore(), RecordingStore()]
    first, second = (ResponsesKit(ScriptedBackend(), store=StoreProxy(store), secrets=["s" * 32]) for store in stores)  # type: ignore[arg-type]
    Responses(app, first)
    app.register_blueprint(Responses(kit=second, url_prefix="/v2").blueprint, name="second")
    assert run_command(app, "prune") == (0, "Deleted 7 responses, ended 0 orphaned responses.\n" * 2)
    assert [store.calls for store in stores] == [["prune", "aclose"]] * 2


def test_prune_reports_failing_store_and_closes_it(app: Flask) -> None:
    store = RecordingStore(OSError("the disk is full"))
    Responses(app, ResponsesKit(ScriptedBackend(), store=StoreProxy(store), secrets=["s" * 32]))  # type: ignore[arg-type]
    assert run_command(app, "prune") == (1, "Error: The store failed: the disk is full\n")
    assert store.calls == ["prune", "aclose"]


@pytest.mark.parametrize("upgrade", [False, True], ids=["plain request", "upgrade request"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/put"), ("GET", "/only"), ("POST", "/page"), ("PUT", "/ask")])
def test_flask_refusals_are_unchanged(method: str, path: str, upgrade: bool) -> None:
    def site(with_kit: bool) -> Flask:
        app = Flask(__name__)
        app.add_url_rule("/put/", "put", lambda: "put", methods=["PUT"])
        app.add_url_rule("/only", "only", lambda: "only", methods=["POST"])
        app.add_url_rule("/page", "page", lambda: "page")
        if with_kit:
            responses = Responses(app)
            app.post("/ask")(responses.endpoint(lambda turn: "Hi"))
        else:
            app.add_url_rule("/ask", "ask", lambda: "ask", methods=["POST"])
        return app

    headers = {"Upgrade": "websocket", "Connection": "Upgrade"} if upgrade else {}
    before, after = (
        site(with_kit).test_client().open(path, method=method, headers=headers) for with_kit in (False, True)
    )
    assert after.status_code == before.status_code
    assert after.headers.get("Allow") == before.headers.get("Allow")
    if path != "/ask":
        assert after.data == before.data
    else:
        error(after, 405)


def test_consumed_body_is_reported(app: Flask) -> None:
    Responses(app, ResponsesKit(ScriptedBackend(["Hi"])))
    app.before_request(lambda: request.stream.read() and None)
    answer = app.test_client().post("/v1/responses", json={"input": "Hi"})
    assert "shorter" in error(answer, 400)["message"]
