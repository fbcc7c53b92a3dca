"""View functions as backends: their outputs, and the request's context while they stream."""

from __future__ import annotations

import functools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from flask import Blueprint, Flask, Response, abort, current_app, g, request, session
from flask.testing import FlaskClient
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, current_user, login_required
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, text
from sqlalchemy.orm import scoped_session, sessionmaker
from werkzeug.serving import make_server

from responses_kit import Model, ResponsesKit, Turn, outputs
from responses_kit._concurrency import loop_thread
from responses_kit.errors import ConfigurationError, TooManyRequests
from responses_kit.testing import ScriptedBackend
from responses_kit.tools import HostedTool
from responses_kit_flask import Responses

from .replies import error, final_response, response, stream

TIMEOUT = 10.0


LOOP_THREAD = "responses-kit"
"""The name of the event loop's thread."""

STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def app() -> Flask:
    app = Flask("shop")
    app.secret_key = "not a secret"
    return app


@pytest.fixture
def responses(app: Flask) -> Responses:
    return Responses(app)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


def ask(client: FlaskClient, where: str = "/ask", *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return client.post(where, json={"input": "Hi", **fields}, headers=headers)


def ask_successfully(client: FlaskClient, streams: bool, where: str = "/ask", **more: Any) -> dict[str, Any]:
    answer = ask(client, where, stream=streams, **more)
    return final_response(answer) if streams else response(answer)


def output_text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@contextmanager
def run_server(app: Flask) -> Iterator[httpx.Client]:
    """Serve the app with one thread per connection, and yield a client."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", timeout=TIMEOUT) as client:
            yield client
    finally:
        server.shutdown()
        thread.join(TIMEOUT)
        server.server_close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail after a timeout."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.002)


# Outputs of views.


def generator(turn: Turn) -> Any:
    yield "You said: "
    yield turn.text


def function(turn: Turn) -> Any:
    return f"You said: {turn.text}"


def list_function(turn: Turn) -> Any:
    return ["You said: ", turn.text]


def iterator_function(turn: Turn) -> Any:
    return iter(("You said: ", outputs.Text(turn.text)))


def returned_generator(turn: Turn) -> Any:
    return generator(turn)


async def async_function(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return f"You said: {turn.text}"


async def async_list(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return ["You said: ", turn.text]


async def async_generator(turn: Turn) -> Any:
    yield "You said: "
    await anyio.lowlevel.checkpoint()
    yield turn.text


async def async_returned_async_generator(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return async_generator(turn)


async def async_returned_generator(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return generator(turn)


def returned_async_generator(turn: Turn) -> Any:
    return async_generator(turn)


def returned_awaitable(turn: Turn) -> Any:
    return async_function(turn)


@STREAMS
@pytest.mark.parametrize(
    "view",
    [
        generator,
        function,
        list_function,
        iterator_function,
        returned_generator,
        async_function,
        async_list,
        async_generator,
        async_returned_async_generator,
        async_returned_generator,
        returned_async_generator,
        returned_awaitable,
    ],
)
def test_view_may_yield_and_return_backend_outputs(
    app: Flask, responses: Responses, client: FlaskClient, view: Any, streams: bool
) -> None:
    app.post("/ask")(responses.endpoint(view))
    body = ask_successfully(client, streams, input="Hello")
    assert output_text(body) == "You said: Hello"
    assert (body["model"], body["status"]) == (view.__name__, "completed")


async def async_none(turn: Turn) -> None:
    await anyio.lowlevel.checkpoint()


@STREAMS
@pytest.mark.parametrize(
    "view",
    [
        lambda turn: None,
        lambda turn: {"answer": "Hi"},
        lambda turn: 5,
        lambda turn: Response("Hi"),
        lambda turn: ("Hi", 201),
        lambda turn: b"Hi",
        lambda turn: [None],
        async_none,
    ],
    ids=["None", "dict", "int", "response", "tuple with status", "bytes", "list with None", "async None"],
)
def test_invalid_output_is_model_error(
    app: Flask,
    responses: Responses,
    client: FlaskClient,
    caplog: pytest.LogCaptureFixture,
    view: Any,
    streams: bool,
) -> None:
    app.post("/ask")(responses.endpoint(view))
    with caplog.at_level(logging.ERROR, "responses_kit"):
        answer = ask(client, stream=streams)
        if streams:
            assert final_response(answer)["error"]["code"] == "model_error"
        else:
            assert error(answer, 500)["type"] == "model_error"
    assert len(caplog.records) == 1


@STREAMS
@pytest.mark.parametrize("how", ["plain", "async"])
def test_view_may_yield_every_output_type(
    app: Flask, responses: Responses, client: FlaskClient, how: str, streams: bool
) -> None:
    view_outputs = [
        outputs.Reasoning("Hm."),
        outputs.ReasoningSummary("Thought."),
        outputs.Message("commentary"),
        "Let me see.",
        outputs.Annotation("https://example.org", "Example"),
        outputs.Item("acme:note", {"note": "one"}),
        outputs.ToolCall("look", '{"at":', call_id="call_1"),
        outputs.ToolArguments("1}"),
        outputs.Usage(3, 4),
        outputs.Finish(),
    ]

    def plain(turn: Turn) -> Any:
        yield from view_outputs

    async def async_view(turn: Turn) -> Any:
        for output in view_outputs:
            yield output

    model = Model("able", tools=True, reasoning=True)
    app.post("/ask")(responses.endpoint(models=[model])(plain if how == "plain" else async_view))
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    body = ask_successfully(client, streams, tools=tools)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "acme:note", "function_call"]
    assert (body["output"][2]["note"], body["output"][3]["arguments"]) == ("one", '{"at":1}')
    assert body["usage"]["total_tokens"] == 7


@STREAMS
def test_finish_reason_makes_response_incomplete(
    app: Flask, responses: Responses, client: FlaskClient, streams: bool
) -> None:
    @app.post("/ask")
    @responses.endpoint
    def truncated_view(turn: Turn) -> Any:
        yield "Once upon "
        yield outputs.Finish("max_output_tokens")

    body = ask_successfully(client, streams)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


# Calls of views.


@STREAMS
def test_url_values_are_passed_by_name(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    @app.post("/shops/<int:shop>/<path:shelf>", defaults={"language": "en"})
    @responses.endpoint
    def ask_shop(turn: Turn, shop: int, shelf: str, language: str) -> Any:
        yield f"{shop + 1} {shelf} {language} {turn.text}"

    assert output_text(ask_successfully(client, streams, "/shops/41/a/b")) == "42 a/b en Hi"


@STREAMS
def test_view_may_be_method(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    class Shop(MethodView):
        name = "the shop"

        def get(self, shop: int) -> str:
            return f"Shop {shop}"

        @responses.endpoint
        def post(self, turn: Turn, shop: int) -> Any:
            yield f"{self.name} {shop}: {turn.text}"

    app.add_url_rule("/shops/<int:shop>", view_func=Shop.as_view("shop"))
    assert output_text(ask_successfully(client, streams, "/shops/5")) == "the shop 5: Hi"
    assert client.get("/shops/5").data == b"Shop 5"
    error(client.post("/shops/5", data=b"{", content_type="application/json"), 400)


def test_view_keeps_name_and_docstring(app: Flask, responses: Responses) -> None:
    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> str:
        """Answer."""
        return "Hi"

    @app.post("/other")
    @responses.endpoint(models=["other"])
    def ask_another(turn: Turn) -> str:
        """Answer, too."""
        return "Hi"

    assert (ask_me.__name__, ask_me.__doc__) == ("ask_me", "Answer.")
    assert (ask_another.__name__, ask_another.__doc__) == ("ask_another", "Answer, too.")
    assert {"ask_me", "ask_another"} <= app.view_functions.keys()


def test_endpoint_answers_post_only(app: Flask, responses: Responses, client: FlaskClient) -> None:
    app.route("/ask", methods=["GET", "POST", "PUT"])(responses.endpoint(function))
    for method in ("GET", "PUT"):
        answer = client.open("/ask", method=method)
        error(answer, 405)
        assert answer.headers["Allow"] == "POST"
    response(ask(client))


def test_models_argument_declares_capabilities(app: Flask, responses: Responses, client: FlaskClient) -> None:
    @app.post("/ask")
    @responses.endpoint(models=["first", Model("able", tools=True, temperature=0.5)])
    def ask_me(turn: Turn) -> str:
        return f"{turn.model} at {turn.temperature}"

    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    assert output_text(response(ask(client))) == "first at 1.0"
    assert output_text(response(ask(client, model="able", tools=tools))) == "able at 0.5"
    assert error(ask(client, tools=tools), 400)["param"] == "tools"
    assert error(ask(client, model="ask_me"), 400)["code"] == "model_not_found"


@STREAMS
def test_view_is_called_again_after_hosted_tools(
    app: Flask, responses: Responses, client: FlaskClient, streams: bool
) -> None:
    threads: list[int] = []
    contexts: list[Any] = []

    def add(a: int, b: int) -> int:
        contexts.append((current_app.name, g.user))
        return a + b

    async def double(number: int) -> int:
        contexts.append((current_app.name, g.user))
        return 2 * number

    tools = [HostedTool.from_function("acme:add", add), HostedTool.from_function("acme:double", double)]

    @app.before_request
    def note() -> None:
        g.user = "ann"

    @app.post("/ask")
    @responses.endpoint(models=[Model("sums", tools=True)], tools=tools)
    def sums(turn: Turn) -> Any:
        threads.append(threading.get_ident())
        if turn.round == 0:
            yield outputs.ToolCall("add", '{"a": 1, "b": 2}')
        elif turn.round == 1:
            yield outputs.ToolCall("double", json.dumps({"number": int(turn.items[-1].output)}))  # type: ignore[union-attr, arg-type]
        else:
            yield f"{g.user}: {turn.items[-1].output}"  # type: ignore[union-attr]

    body = ask_successfully(client, streams, tools=[{"type": "acme:add"}, {"type": "acme:double"}])
    assert output_text(body) == "ann: 6"
    assert [item["type"] for item in body["output"]] == ["acme:add", "acme:double", "message"]
    assert threads == [threading.get_ident()] * 3
    assert contexts == [("shop", "ann")] * 2


def test_view_owner_hook_is_called(app: Flask, responses: Responses, client: FlaskClient) -> None:
    threads: list[int] = []

    def owner(flask_request: Any) -> Any:
        threads.append(threading.get_ident())
        if g.closed:
            abort(403, "Not on Sundays.")
        return flask_request.headers.get("X-User")

    @app.before_request
    def note() -> None:
        g.closed = "closed" in request.args

    @app.post("/ask")
    @responses.endpoint(owner=owner)
    def ask_me(turn: Turn) -> str:
        return turn.owner

    assert output_text(response(ask(client, headers={"X-User": "ann"}))) == "ann"
    error(ask(client), 401)
    assert error(ask(client, "/ask?closed"), 403)["message"] == "Not on Sundays."
    assert threads == [threading.get_ident()] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"owner": "ann"}, "owner"), ({"tools": ["add"]}, "tool"), ({"store": {}}, "store"), ({"limits": 5}, "limits")],
)
def test_invalid_options_are_refused_at_decoration(responses: Responses, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        responses.endpoint(**options)(function)


def test_unregistered_app_is_reported(app: Flask, responses: Responses) -> None:
    other = Flask("other")
    other.testing = True
    view = responses.endpoint(function)
    for each in (app, other):
        each.post("/ask")(view)
    with pytest.raises(ConfigurationError, match="init_app"):
        ask(other.test_client())
    response(ask(app.test_client()))


def test_views_of_other_extension_are_separate(app: Flask, responses: Responses) -> None:
    app.testing = True
    app.post("/ask")(Responses().endpoint(function))
    with pytest.raises(ConfigurationError, match="init_app"):
        ask(app.test_client())


@pytest.mark.parametrize("init_first", [False, True], ids=["views first", "app first"])
def test_views_may_be_decorated_before_init_app(app: Flask, init_first: bool) -> None:
    responses = Responses()
    view = None if init_first else responses.endpoint(function)
    responses.init_app(app)
    app.post("/ask")(view or responses.endpoint(function))
    assert output_text(response(ask(app.test_client()))) == "You said: Hi"


@STREAMS
def test_view_may_be_in_app_blueprint(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    shop = Blueprint("shop", __name__, url_prefix="/shops/<name>")

    @shop.before_request
    def guard() -> None:
        if "X-User" not in request.headers:
            abort(401)

    @shop.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn, name: str) -> Any:
        yield f"{name} {request.blueprint} {turn.text}"

    app.register_blueprint(shop)
    assert (
        output_text(ask_successfully(client, streams, "/shops/corner/ask", headers={"X-User": "ann"}))
        == "corner shop Hi"
    )
    error(ask(client, "/shops/corner/ask", stream=streams), 401)


# Stores.


@pytest.fixture
def kit() -> Iterator[ResponsesKit]:
    kit = ResponsesKit(
        ScriptedBackend(lambda turn: [f"The kit knows of {len(turn.items)} items."]), owner=owner_of_request
    )
    yield kit
    loop_thread.stop_kit(kit)


def owner_of_request(flask_request: Any) -> str:
    user: str = flask_request.headers.get("X-User", "ann")
    return user


@pytest.mark.parametrize("decorated", ["before", "after"])
def test_view_shares_store_of_mounted_kit(app: Flask, kit: ResponsesKit, decorated: str) -> None:
    responses = Responses(kit=kit)

    def view(turn: Turn) -> str:
        return f"{turn.owner} told the view {len(turn.items)} items."

    wrapped = responses.endpoint(view)
    if decorated == "before":
        app.post("/ask")(wrapped)
    responses.init_app(app)
    if decorated == "after":
        app.post("/ask")(wrapped)
    client = app.test_client()
    first = response(ask(client))
    assert output_text(first) == "ann told the view 1 items."
    assert response(client.get(f"/v1/responses/{first['id']}")) == first
    second = response(ask(client, "/v1/responses", previous_response_id=first["id"]))
    assert output_text(second) == "The kit knows of 3 items."
    third = response(ask(client, previous_response_id=second["id"]))
    assert output_text(third) == "ann told the view 5 items."
    bob = {"X-User": "bob"}
    assert error(ask(client, previous_response_id=second["id"], headers=bob), 400)["code"] == (
        "previous_response_not_found"
    )
    error(client.get(f"/v1/responses/{first['id']}", headers=bob), 404)
    assert client.delete(f"/v1/responses/{first['id']}").status_code == 200
    error(client.get(f"/v1/responses/{first['id']}"), 404)


def test_view_stores_nothing_with_store_false(app: Flask, kit: ResponsesKit) -> None:
    responses = Responses(app, kit)
    app.post("/ask")(responses.endpoint(function))
    body = response(ask(app.test_client(), store=False))
    error(app.test_client().get(f"/v1/responses/{body['id']}"), 404)


def test_each_app_stores_its_own_responses() -> None:
    kits: list[ResponsesKit] = []

    def create_kit(app: Flask) -> ResponsesKit:
        kits.append(ResponsesKit(ScriptedBackend()))
        return kits[-1]

    responses = Responses(kit=create_kit)
    view = responses.endpoint(function)
    clients: list[FlaskClient] = []
    for name in ("one", "two"):
        app = Flask(name)
        app.post("/ask")(view)
        responses.init_app(app)
        clients.append(app.test_client())
    try:
        first = response(ask(clients[0]))
        assert response(clients[0].get(f"/v1/responses/{first['id']}")) == first
        error(clients[1].get(f"/v1/responses/{first['id']}"), 404)
        error(ask(clients[1], previous_response_id=first["id"]), 400)
    finally:
        for kit in kits:
            loop_thread.stop_kit(kit)


def test_view_without_kit_has_its_own_store(app: Flask, responses: Responses, client: FlaskClient) -> None:
    def view(turn: Turn) -> str:
        return f"{len(turn.items)} items."

    app.post("/ask")(responses.endpoint(view))
    app.post("/other", endpoint="other")(responses.endpoint(view))
    first = response(ask(client))
    assert output_text(response(ask(client, previous_response_id=first["id"]))) == "3 items."
    assert error(ask(client, "/other", previous_response_id=first["id"]), 400)["code"] == "previous_response_not_found"


@STREAMS
@pytest.mark.parametrize("shared", [False, True], ids=["without kit", "with kit"])
def test_background_and_key_are_refused_for_views(app: Flask, kit: ResponsesKit, shared: bool, streams: bool) -> None:
    responses = Responses(app, kit if shared else None)
    app.post("/ask")(responses.endpoint(function))
    client = app.test_client()
    refused = error(ask(client, background=True, stream=streams), 400)
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "background")
    refused = error(ask(client, stream=streams, headers={"Idempotency-Key": "a key"}), 400)
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "Idempotency-Key")
    assert output_text(ask_successfully(client, streams)) == "You said: Hi"


# Failures.


class FailingViews:
    """Views that fail before or after their first output."""

    def __init__(self, fail: Callable[[], Any], after: int) -> None:
        self._fail, self._after = fail, after

    def function(self, turn: Turn) -> Any:
        self._fail()

    def generator(self, turn: Turn) -> Any:
        for _ in range(self._after):
            yield "word "
        self._fail()

    async def async_function(self, turn: Turn) -> Any:
        await anyio.lowlevel.checkpoint()
        self._fail()

    async def async_generator(self, turn: Turn) -> Any:
        for _ in range(self._after):
            yield "word "
            await anyio.lowlevel.checkpoint()
        self._fail()


def raise_model_busy() -> Any:
    raise TooManyRequests("All lines are busy.", retry_after=7)


def raise_lookup_error() -> Any:
    raise LookupError("the password is hunter2")


@STREAMS
@pytest.mark.parametrize(
    ("view", "after"),
    [
        ("function", 0),
        ("generator", 0),
        ("generator", 2),
        ("async_function", 0),
        ("async_generator", 0),
        ("async_generator", 2),
    ],
)
@pytest.mark.parametrize(
    ("fail", "status", "code", "message"),
    [
        (lambda: abort(404, "There is no such shop."), 404, "not_found", "There is no such shop."),
        (lambda: abort(403), 403, "forbidden", None),
        (lambda: abort(418, "I am a teapot."), 400, "invalid_request", "I am a teapot."),
        (lambda: abort(500), 500, "server_error", None),
        (raise_model_busy, 429, "too_many_requests", "All lines are busy."),
        (raise_lookup_error, 500, "model_error", None),
    ],
    ids=["404", "403", "418", "500", "APIError", "LookupError"],
)
def test_view_failure_is_handled_at_any_time(
    app: Flask,
    responses: Responses,
    client: FlaskClient,
    caplog: pytest.LogCaptureFixture,
    view: str,
    after: int,
    fail: Callable[[], Any],
    status: int,
    code: str,
    message: str | None,
    streams: bool,
) -> None:
    failing, recorder = FailingViews(fail, after), TeardownRecorder(app)
    app.errorhandler(Exception)(lambda error: ("the app's page", 500))
    app.post("/ask")(responses.endpoint(models=["failing"])(getattr(failing, view)))
    with caplog.at_level(logging.CRITICAL):
        answer = ask(client, stream=streams)
        if streams:
            body = final_response(answer)
            assert (body["status"], output_text(body)) == ("failed", "word " * after)
            failure = body["error"]
        else:
            failure = error(answer, status)
            assert answer.headers.get("Retry-After") == ("7" if fail is raise_model_busy else None)
    assert recorder.names() == TEARDOWNS
    assert failure["code"] == code
    assert message is None or failure["message"] == message
    assert "hunter2" not in failure["message"]
    assert client.get("/nothing").data == b"the app's page"


def test_abort_with_response_keeps_status(app: Flask, responses: Responses, client: FlaskClient) -> None:
    app.post("/ask")(responses.endpoint(models=["closed"])(lambda turn: abort(Response("no", 403))))
    error(ask(client), 403)


def test_view_failure_is_logged(
    app: Flask, responses: Responses, client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    app.post("/ask")(responses.endpoint(models=["failing"])(FailingViews(raise_lookup_error, 0).function))
    with caplog.at_level(logging.ERROR, "responses_kit"):
        error(ask(client), 500)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


def test_invalid_request_does_not_call_view(app: Flask, responses: Responses, client: FlaskClient) -> None:
    calls: list[Turn] = []

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> str:
        calls.append(turn)
        return "Hi"

    app.config["MAX_CONTENT_LENGTH"] = 1000
    error(client.post("/ask", data=b"{", content_type="application/json"), 400)
    error(client.post("/ask", data=b"input=Hi", content_type="application/x-www-form-urlencoded"), 415)
    error(ask(client, input="x" * 1000), 413)
    error(ask(client, temperature="hot"), 400)
    assert calls == []
    response(ask(client))
    assert len(calls) == 1


# Authentication.


class User(UserMixin):  # type: ignore[misc]  # it has no types
    def __init__(self, name: str) -> None:
        self.id = name


@pytest.fixture
def manager(app: Flask) -> LoginManager:
    manager = LoginManager(app)

    @manager.request_loader
    def load(flask_request: Any) -> User | None:
        return User(flask_request.headers["X-User"]) if "X-User" in flask_request.headers else None

    @app.get("/login")
    def login() -> str:
        return "Who are you?"

    return manager


@pytest.mark.parametrize("view", [None, "login"])
@STREAMS
def test_login_required_returns_error_object(
    app: Flask, responses: Responses, client: FlaskClient, manager: LoginManager, view: str | None, streams: bool
) -> None:
    manager.login_view = view

    @app.post("/ask")
    @login_required
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        yield f"{current_user.id}, "
        yield f"{current_user.id}."

    error(ask(client, stream=streams), 401)
    assert output_text(ask_successfully(client, streams, headers={"X-User": "ann"})) == "ann, ann."


@pytest.mark.parametrize("view", [None, "login"])
@pytest.mark.parametrize("where", ["the method", "the class"])
def test_login_required_on_method_returns_error_object(
    app: Flask, responses: Responses, client: FlaskClient, manager: LoginManager, view: str | None, where: str
) -> None:
    manager.login_view = view

    class Shop(MethodView):
        decorators = [login_required] if where == "the class" else []

        def get(self) -> str:
            return "a page"

        @responses.endpoint
        def post(self, turn: Turn) -> Any:
            yield f"{current_user.id}."

        if where == "the method":
            post = login_required(post)

    app.add_url_rule("/ask", view_func=Shop.as_view("shop"))
    error(ask(client), 401)
    assert output_text(response(ask(client, headers={"X-User": "ann"}))) == "ann."
    if where == "the class":
        assert client.get("/ask").status_code == (302 if view else 401)
        assert client.get("/ask").mimetype == "text/html"


@pytest.mark.parametrize("code", [401, 403, 404, 418, 429, 503])
@pytest.mark.parametrize("how", ["words", "an answer", "an answer that is returned"])
def test_decorator_refusal_is_error_object_with_app_headers(
    app: Flask, responses: Responses, client: FlaskClient, how: str, code: int
) -> None:
    closing = Response("<h1>Closed</h1>", code, {"WWW-Authenticate": "Bearer"})

    def closed(view: Any) -> Any:
        @functools.wraps(view)
        def guarded(*args: Any, **values: Any) -> Any:
            if how != "an answer that is returned":
                abort(*([code, "It is Sunday."] if how == "words" else [closing]))
            return closing

        return guarded

    @app.errorhandler(Exception)
    def page(failure: Exception) -> Any:
        pytest.fail("the app's pages are for its own views")

    @app.after_request
    def allow(answer: Response) -> Response:
        answer.headers["Access-Control-Allow-Origin"] = "https://app.example"
        return answer

    app.post("/ask")(closed(responses.endpoint(function)))
    answer = ask(client)
    error(answer, {418: 400, 503: 500}.get(code, code))
    if how == "words":
        assert code >= 500 or answer.json["error"]["message"] == "It is Sunday."
    else:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert int(answer.headers["Content-Length"]) == len(answer.data)


# The request's context while the view streams.


class TeardownRecorder:
    """Records teardowns of an app, and their threads."""

    def __init__(self, app: Flask) -> None:
        self.what: list[tuple[str, int]] = []
        app.teardown_request(lambda failure: self("teardown of the request"))
        app.teardown_appcontext(lambda failure: self("teardown of the app's context"))

    def __call__(self, what: str) -> None:
        self.what.append((what, threading.get_ident()))

    def names(self) -> list[str]:
        return [what for what, _ in self.what]

    def threads(self) -> set[int]:
        return {thread for _, thread in self.what}


TEARDOWNS = ["teardown of the request", "teardown of the app's context"]


@STREAMS
def test_view_runs_in_request_thread_until_teardown(app: Flask, responses: Responses, streams: bool) -> None:
    recorder = TeardownRecorder(app)
    app.before_request(lambda: recorder("before"))

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        recorder("begun")
        try:
            for word in ("One, ", "two."):
                yield word
                recorder(word)
        finally:
            recorder("closed")

    with run_server(app) as client:
        data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
        wait_until(lambda: len(recorder.what) == 7)
    assert output_text(stream(data) if streams else json.loads(data)) == "One, two."
    assert recorder.names() == ["before", "begun", "One, ", "two.", "closed", *TEARDOWNS]
    assert len(recorder.threads()) == 1
    assert threading.get_ident() not in recorder.threads()


def test_concurrent_requests_have_their_own_threads(app: Flask, responses: Responses) -> None:
    both = threading.Barrier(2, timeout=TIMEOUT)
    threads: dict[str, set[int]] = {"ann": set(), "bob": set()}

    @app.before_request
    def note() -> None:
        g.user = request.headers["X-User"]

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        for _ in range(3):
            both.wait()
            threads[turn.text].add(threading.get_ident())
            yield f"{g.user} "

    with run_server(app) as client:

        def ask_as(user: str, reply: dict[str, str]) -> None:
            body = {"input": user, "stream": True}
            reply[user] = output_text(stream(client.post("/ask", json=body, headers={"X-User": user}).read()))

        reply: dict[str, str] = {}
        clients = [threading.Thread(target=ask_as, args=(user, reply)) for user in threads]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(TIMEOUT)
    assert reply == {"ann": "ann ann ann ", "bob": "bob bob bob "}
    assert [len(seen) for seen in threads.values()] == [1, 1]
    assert threads["ann"] != threads["bob"]


@STREAMS
def test_thread_bound_connection_works_while_streaming(app: Flask, responses: Responses, streams: bool) -> None:
    closed: list[bool] = []

    @app.before_request
    def connect() -> None:
        g.connection = sqlite3.connect(":memory:")
        g.connection.execute("CREATE TABLE words (word TEXT)")
        g.connection.executemany("INSERT INTO words VALUES (?)", [("One, ",), ("two, ",), ("three.",)])

    @app.teardown_appcontext
    def close(failure: BaseException | None) -> None:
        g.pop("connection").close()
        closed.append(failure is None)

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        for (word,) in g.connection.execute("SELECT word FROM words"):
            yield word

    with run_server(app) as client:
        data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
        wait_until(lambda: len(closed) == 1)
    assert output_text(stream(data) if streams else json.loads(data)) == "One, two, three."
    assert closed == [True]


def describe_contexts() -> str:
    user = request.headers["X-User"]
    return f"{current_app.name} {g.shop} {session['user']} {user} {request.path} {current_user.id}; "


EXPECTED_CONTEXTS = "shop corner ann browser /ask browser; "


def generator_with_contexts(turn: Turn) -> Any:
    yield describe_contexts()
    yield describe_contexts()


async def async_generator_with_contexts(turn: Turn) -> Any:
    yield describe_contexts()
    await anyio.sleep(0.01)
    yield describe_contexts()


async def async_function_with_contexts(turn: Turn) -> Any:
    first = describe_contexts()
    await anyio.sleep(0.01)
    return first + describe_contexts()


async def async_generator_with_contexts_in_thread(turn: Turn) -> Any:
    yield describe_contexts()
    yield await anyio.to_thread.run_sync(describe_contexts)


@STREAMS
@pytest.mark.parametrize(
    "view",
    [
        generator_with_contexts,
        async_generator_with_contexts,
        async_function_with_contexts,
        async_generator_with_contexts_in_thread,
    ],
)
@pytest.mark.usefixtures("manager")
def test_flask_contexts_are_available_while_streaming(
    app: Flask, responses: Responses, view: Any, streams: bool
) -> None:
    recorder = TeardownRecorder(app)

    @app.before_request
    def note() -> None:
        g.shop = "corner"
        session["user"] = "ann"

    app.post("/ask")(responses.endpoint(view))
    with run_server(app) as client:
        answer = client.post("/ask", json={"input": "Hi", "stream": streams}, headers={"X-User": "browser"})
        wait_until(lambda: recorder.names() == TEARDOWNS)
    assert output_text(stream(answer.read()) if streams else answer.json()) == EXPECTED_CONTEXTS * 2
    assert "session" in answer.cookies
    assert len(recorder.threads()) == 1


@STREAMS
def test_g_is_available_at_teardown(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    seen: list[Any] = []
    app.teardown_appcontext(lambda failure: seen.append(g.get("word")))

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        yield "Hi"
        g.word = "said"

    ask_successfully(client, streams)
    assert seen == ["said"]


@STREAMS
def test_flask_sqlalchemy_session_lasts_for_stream(
    app: Flask, responses: Responses, tmp_path: Path, streams: bool
) -> None:
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'words.db'}"
    database = SQLAlchemy(app)
    sessions: list[Any] = []
    recorder = TeardownRecorder(app)

    @app.before_request
    def note() -> None:
        database.session.execute(text("INSERT INTO words VALUES ('not committed')"))
        sessions.append(database.session())

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        for _ in range(3):
            sessions.append(database.session())
            yield f"{database.session.execute(text('SELECT count(*) FROM words')).scalar()} "

    with app.app_context():
        database.session.execute(text("CREATE TABLE words (word TEXT)"))
        database.session.commit()
    recorder.what.clear()
    try:
        with run_server(app) as client:
            data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
            wait_until(lambda: recorder.names() == TEARDOWNS)
        assert output_text(stream(data) if streams else json.loads(data)) == "1 1 1 "
        assert len(sessions) == 4
        assert len(set(map(id, sessions))) == 1
        with app.app_context():
            assert database.session.execute(text("SELECT count(*) FROM words")).scalar() == 0
            assert database.session() is not sessions[0]
            assert database.engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # this one
    finally:
        with app.app_context():
            database.engine.dispose()


@STREAMS
def test_scoped_session_lasts_for_stream(app: Flask, responses: Responses, tmp_path: Path, streams: bool) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'words.db'}")
    database = scoped_session(sessionmaker(engine))
    sessions: list[Any] = []
    removed: list[bool] = []

    @app.before_request
    def note() -> None:
        sessions.append(database())

    @app.teardown_appcontext
    def remove(failure: BaseException | None) -> None:
        removed.append(database() is sessions[0])
        database.remove()

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        for number in range(3):
            sessions.append(database())
            yield f"{database.execute(text(f'SELECT {number}')).scalar()} "

    try:
        with run_server(app) as client:
            data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
            wait_until(lambda: len(removed) == 1)
        assert output_text(stream(data) if streams else json.loads(data)) == "0 1 2 "
        assert len(sessions) == 4
        assert len(set(map(id, sessions))) == 1
        assert removed == [True]
    finally:
        engine.dispose()


def test_async_views_run_on_event_loop(app: Flask, responses: Responses, client: FlaskClient) -> None:
    @app.post("/ask")
    @responses.endpoint
    async def ask_me(turn: Turn) -> Any:
        yield threading.current_thread().name
        g.seen = True

    assert output_text(response(ask(client))) == LOOP_THREAD


# Early ends of streams.


@pytest.fixture
def statuses() -> list[str]:
    """The final statuses of a view's responses, from `on_response_end`."""
    return []


def append_status_to(statuses: list[str]) -> Callable[[str, dict[str, Any]], None]:
    return lambda owner, response: statuses.append(response["status"])


@pytest.mark.parametrize("streams_again", [False, True], ids=["replaced", "replaced, then streamed"])
def test_replaced_stream_is_ended_without_leaks(
    app: Flask, responses: Responses, client: FlaskClient, statuses: list[str], streams_again: bool
) -> None:
    recorder = TeardownRecorder(app)
    calls: list[str] = []
    seen: list[Any] = []

    @app.before_request
    def note() -> None:
        seen.append((g.get("user"), request.path))
        g.user = "ann"

    @app.after_request
    def replace(answer: Response) -> Response:
        return Response("maintenance", 202) if "replace" in request.args else answer

    @app.post("/ask")
    @responses.endpoint(on_response_end=append_status_to(statuses))
    def ask_me(turn: Turn) -> Any:
        calls.append(turn.text)
        yield "Hi"

    @app.get("/page")
    def page() -> str:
        return f"{g.user} {request.path}"

    answer = ask(client, "/ask?replace", input="lost", stream=True)
    assert (answer.status_code, answer.data) == (202, b"maintenance")
    assert recorder.names() == TEARDOWNS
    wait_until(lambda: len(statuses) == 1)
    assert statuses[0] != "completed"
    assert client.get("/page").data == b"ann /page"
    if streams_again:
        assert output_text(final_response(ask(client, input="next", stream=True))) == "Hi"
        assert calls == ["next"]
    assert [user for user, _ in seen] == [None] * len(seen)
    assert recorder.names() == TEARDOWNS * len(seen)


def test_error_after_view_ends_stream(
    app: Flask, responses: Responses, client: FlaskClient, statuses: list[str]
) -> None:
    recorder = TeardownRecorder(app)

    @app.after_request
    def fail(answer: Response) -> Response:
        raise LookupError("no such shop")

    app.post("/ask")(responses.endpoint(on_response_end=append_status_to(statuses))(generator))
    assert ask(client, stream=True).status_code == 500
    wait_until(lambda: len(statuses) == 1)
    assert statuses[0] != "completed"
    assert recorder.names() == TEARDOWNS


@pytest.mark.parametrize("read", ["whole", "in part", "not at all"])
@pytest.mark.parametrize("new_response", [False, True], ids=["in place", "in a new response"])
def test_wrapped_stream_leaves_no_leaks(
    app: Flask,
    responses: Responses,
    client: FlaskClient,
    statuses: list[str],
    new_response: bool,
    read: str,
) -> None:
    recorder = TeardownRecorder(app)
    fresh: list[bool] = []

    @app.before_request
    def note() -> None:
        fresh.append("user" not in g)
        g.user = "ann"

    @app.after_request
    def wrap(answer: Response) -> Response:
        def wrapped(pieces: Any) -> Iterator[bytes]:
            for piece in pieces:
                yield piece.replace(b"ann ", b"bob ")

        if not answer.is_streamed:
            return answer
        if new_response:
            return Response(wrapped(answer.response), answer.status_code, answer.headers)
        answer.response = wrapped(answer.response)
        return answer

    @app.post("/ask")
    @responses.endpoint(on_response_end=append_status_to(statuses))
    def ask_me(turn: Turn) -> Any:
        for _ in range(50):
            yield f"{g.user} "

    answer = ask(client, stream=True)
    if read == "whole":
        assert output_text(final_response(answer)) == "bob " * 50
    elif read == "in part":
        read_until(b"bob ", answer).close()
    else:
        answer.close()
    del answer
    wait_until(lambda: len(statuses) == 1)
    assert (statuses[0] == "completed") == (read == "whole")
    assert not current_app
    assert recorder.names() == TEARDOWNS
    assert client.get("/nothing").status_code == 404
    assert fresh == [True, True]


def test_unread_stream_is_ended(app: Flask, responses: Responses, client: FlaskClient, statuses: list[str]) -> None:
    recorder = TeardownRecorder(app)
    app.post("/ask")(responses.endpoint(on_response_end=append_status_to(statuses))(generator))
    ask(client, stream=True).close()
    assert recorder.names() == TEARDOWNS
    wait_until(lambda: len(statuses) == 1)


def test_view_failing_at_close_is_handled(
    app: Flask, responses: Responses, client: FlaskClient, statuses: list[str]
) -> None:
    recorder = TeardownRecorder(app)

    @app.post("/ask")
    @responses.endpoint(on_response_end=append_status_to(statuses))
    def ask_me(turn: Turn) -> Any:
        try:
            while True:
                yield "on and "
        finally:
            raise LookupError("no such shop")

    read_until(b"on and", ask(client, stream=True)).close()
    assert recorder.names() == TEARDOWNS
    wait_until(lambda: len(statuses) == 1)
    assert statuses[0] != "completed"
    assert client.get("/nothing").status_code == 404


def read_until(word: bytes, answer: Any) -> Any:
    """Read a reply up to a word, and return it."""
    pieces = iter(answer.response)
    data = b""
    while word not in data:
        data += next(pieces)
    return answer


def test_unread_closed_stream_closes_view_in_its_thread(
    app: Flask, responses: Responses, client: FlaskClient, statuses: list[str]
) -> None:
    recorder = TeardownRecorder(app)

    @app.post("/ask")
    @responses.endpoint(on_response_end=append_status_to(statuses))
    def ask_me(turn: Turn) -> Any:
        try:
            while True:
                yield "on and "
        finally:
            assert turn.cancelled
            recorder(f"closed {request.path}")

    read_until(b"on and", ask(client, stream=True)).close()
    assert recorder.names() == ["closed /ask", *TEARDOWNS]
    assert recorder.threads() == {threading.get_ident()}
    wait_until(lambda: len(statuses) == 1)
    assert statuses[0] != "completed"


@pytest.mark.parametrize("how", ["yields", "looks at turn.cancelled", "async"])
@STREAMS
def test_disconnect_ends_view(app: Flask, responses: Responses, statuses: list[str], how: str, streams: bool) -> None:
    recorder = TeardownRecorder(app)
    started, closed = threading.Event(), threading.Event()
    until = time.monotonic() + MAX_WAIT

    def yielding_view(turn: Turn) -> Any:
        try:
            while time.monotonic() < until:
                yield "on and "
                started.set()
                time.sleep(0.002)
            recorder("never ended")
        finally:
            closed.set()

    def polling_view(turn: Turn) -> Any:
        yield "on and "
        started.set()
        while time.monotonic() < until:
            if turn.cancelled:
                closed.set()
                return
            time.sleep(0.002)
        recorder("never ended")

    async def async_view(turn: Turn) -> Any:
        yield "on and "
        started.set()
        try:
            await anyio.sleep(MAX_WAIT)
            recorder("never ended")
        finally:
            closed.set()

    view = {"yields": yielding_view, "looks at turn.cancelled": polling_view, "async": async_view}[how]
    app.post("/ask")(responses.endpoint(on_response_end=append_status_to(statuses))(view))
    with run_server(app) as client:
        request_and_disconnect(client, started, streams)
        assert started.wait(TIMEOUT)
        assert closed.wait(TIMEOUT)
        wait_until(lambda: recorder.names()[-2:] == TEARDOWNS)
        wait_until(lambda: len(statuses) == 1)
    assert recorder.names() == TEARDOWNS
    assert statuses[0] != "completed"


MAX_WAIT = 4.0
"""Seconds after which a view stops waiting for a disconnect."""


def request_and_disconnect(client: httpx.Client, started: threading.Event, streams: bool) -> None:
    """Send a request and disconnect before the end of the response."""
    body = {"input": "Hi", "stream": streams}
    if streams:
        with client.stream("POST", "/ask", json=body) as answer:
            assert any(b"on and" in piece for piece in answer.iter_raw())
            assert started.wait(TIMEOUT)
        return
    with pytest.raises(httpx.ReadTimeout):
        client.post("/ask", json=body, timeout=httpx.Timeout(TIMEOUT, read=0.1))


def test_test_client_context_is_preserved_after_stream(app: Flask, responses: Responses, client: FlaskClient) -> None:
    recorder = TeardownRecorder(app)

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        yield "Hi"
        g.user = turn.text

    with client:
        for name in ("ann", "bob"):
            final_response(ask(client, input=name, stream=True))
            assert (g.user, request.path) == (name, "/ask")
    assert recorder.names() == TEARDOWNS * 2
    assert not current_app


def test_many_requests_in_one_thread_leave_no_leaks(app: Flask, responses: Responses, client: FlaskClient) -> None:
    recorder = TeardownRecorder(app)
    fresh: list[bool] = []

    @app.before_request
    def note() -> None:
        fresh.append("user" not in g)
        g.user = "ann"

    app.post("/ask")(responses.endpoint(generator))
    for number in range(20):
        ask_successfully(client, number % 2 == 0)
    assert fresh == [True] * 20
    assert recorder.names() == TEARDOWNS * 20
    assert not current_app
