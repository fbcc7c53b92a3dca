"""View functions that answer: what they may return, and that all of a request is theirs as long as they stream."""

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

from .answers import error, response, stream, told

BOUND = 10.0


LOOP = "responses-kit"
"""The name of the loop's thread."""

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


def answered(client: FlaskClient, streams: bool, where: str = "/ask", **more: Any) -> dict[str, Any]:
    answer = ask(client, where, stream=streams, **more)
    return told(answer) if streams else response(answer)


def said(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@contextmanager
def serving(app: Flask) -> Iterator[httpx.Client]:
    """The app on a real server, with a thread for each connection."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", timeout=BOUND) as client:
            yield client
    finally:
        server.shutdown()
        thread.join(BOUND)
        server.server_close()


def happens(condition: Callable[[], bool]) -> None:
    """Returns once it is so; fails when that takes too long."""
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


# What a view may return.


def generator(turn: Turn) -> Any:
    yield "You said: "
    yield turn.text


def function(turn: Turn) -> Any:
    return f"You said: {turn.text}"


def a_list(turn: Turn) -> Any:
    return ["You said: ", turn.text]


def an_iterator(turn: Turn) -> Any:
    return iter(("You said: ", outputs.Text(turn.text)))


def a_generator_of_another(turn: Turn) -> Any:
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


async def async_function_of_an_async_generator(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return async_generator(turn)


async def async_function_of_a_generator(turn: Turn) -> Any:
    await anyio.lowlevel.checkpoint()
    return generator(turn)


def an_async_generator_of_another(turn: Turn) -> Any:
    return async_generator(turn)


def an_awaitable_of_another(turn: Turn) -> Any:
    return async_function(turn)


@STREAMS
@pytest.mark.parametrize(
    "view",
    [
        generator,
        function,
        a_list,
        an_iterator,
        a_generator_of_another,
        async_function,
        async_list,
        async_generator,
        async_function_of_an_async_generator,
        async_function_of_a_generator,
        an_async_generator_of_another,
        an_awaitable_of_another,
    ],
)
def test_a_view_may_yield_and_return_what_a_backend_may(
    app: Flask, responses: Responses, client: FlaskClient, view: Any, streams: bool
) -> None:
    app.post("/ask")(responses.endpoint(view))
    found = answered(client, streams, input="Hello")
    assert said(found) == "You said: Hello"
    assert (found["model"], found["status"]) == (view.__name__, "completed")


async def returns_nothing_later(turn: Turn) -> None:
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
        returns_nothing_later,
    ],
    ids=["nothing", "a dict", "a number", "a response", "a status", "bytes", "nothing among it", "nothing, later"],
)
def test_what_is_no_output_is_an_error_of_the_model(
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
            assert told(answer)["error"]["code"] == "model_error"
        else:
            assert error(answer, 500)["type"] == "model_error"
    assert len(caplog.records) == 1


@STREAMS
@pytest.mark.parametrize("how", ["plain", "async"])
def test_a_view_may_yield_all_kinds_of_outputs(
    app: Flask, responses: Responses, client: FlaskClient, how: str, streams: bool
) -> None:
    whole = [
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
        yield from whole

    async def waiting(turn: Turn) -> Any:
        for output in whole:
            yield output

    model = Model("able", tools=True, reasoning=True)
    app.post("/ask")(responses.endpoint(models=[model])(plain if how == "plain" else waiting))
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    found = answered(client, streams, tools=tools)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "acme:note", "function_call"]
    assert (found["output"][2]["note"], found["output"][3]["arguments"]) == ("one", '{"at":1}')
    assert found["usage"]["total_tokens"] == 7


@STREAMS
def test_what_ends_early_is_incomplete(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    @app.post("/ask")
    @responses.endpoint
    def brief(turn: Turn) -> Any:
        yield "Once upon "
        yield outputs.Finish("max_output_tokens")

    found = answered(client, streams)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


# How a view is called.


@STREAMS
def test_values_of_the_url_are_given_by_their_names(
    app: Flask, responses: Responses, client: FlaskClient, streams: bool
) -> None:
    @app.post("/shops/<int:shop>/<path:shelf>", defaults={"language": "en"})
    @responses.endpoint
    def ask_shop(turn: Turn, shop: int, shelf: str, language: str) -> Any:
        yield f"{shop + 1} {shelf} {language} {turn.text}"

    assert said(answered(client, streams, "/shops/41/a/b")) == "42 a/b en Hi"


@STREAMS
def test_a_view_may_be_a_method(app: Flask, responses: Responses, client: FlaskClient, streams: bool) -> None:
    class Shop(MethodView):
        name = "the shop"

        def get(self, shop: int) -> str:
            return f"Shop {shop}"

        @responses.endpoint
        def post(self, turn: Turn, shop: int) -> Any:
            yield f"{self.name} {shop}: {turn.text}"

    app.add_url_rule("/shops/<int:shop>", view_func=Shop.as_view("shop"))
    assert said(answered(client, streams, "/shops/5")) == "the shop 5: Hi"
    assert client.get("/shops/5").data == b"Shop 5"
    error(client.post("/shops/5", data=b"{", content_type="application/json"), 400)


def test_a_view_keeps_its_name_and_what_it_says_of_itself(app: Flask, responses: Responses) -> None:
    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> str:
        """Answers."""
        return "Hi"

    @app.post("/other")
    @responses.endpoint(models=["other"])
    def ask_another(turn: Turn) -> str:
        """Answers, too."""
        return "Hi"

    assert (ask_me.__name__, ask_me.__doc__) == ("ask_me", "Answers.")
    assert (ask_another.__name__, ask_another.__doc__) == ("ask_another", "Answers, too.")
    assert {"ask_me", "ask_another"} <= app.view_functions.keys()


def test_a_view_that_takes_other_methods_answers_post_only(
    app: Flask, responses: Responses, client: FlaskClient
) -> None:
    app.route("/ask", methods=["GET", "POST", "PUT"])(responses.endpoint(function))
    for method in ("GET", "PUT"):
        answer = client.open("/ask", method=method)
        error(answer, 405)
        assert answer.headers["Allow"] == "POST"
    response(ask(client))


def test_models_say_what_the_view_can_do(app: Flask, responses: Responses, client: FlaskClient) -> None:
    @app.post("/ask")
    @responses.endpoint(models=["first", Model("able", tools=True, temperature=0.5)])
    def ask_me(turn: Turn) -> str:
        return f"{turn.model} at {turn.temperature}"

    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    assert said(response(ask(client))) == "first at 1.0"
    assert said(response(ask(client, model="able", tools=tools))) == "able at 0.5"
    assert error(ask(client, tools=tools), 400)["param"] == "tools"
    assert error(ask(client, model="ask_me"), 400)["code"] == "model_not_found"


@STREAMS
def test_hosted_tools_are_called_and_the_view_is_asked_again(
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

    found = answered(client, streams, tools=[{"type": "acme:add"}, {"type": "acme:double"}])
    assert said(found) == "ann: 6"
    assert [item["type"] for item in found["output"]] == ["acme:add", "acme:double", "message"]
    assert threads == [threading.get_ident()] * 3
    assert contexts == [("shop", "ann")] * 2


def test_an_owner_hook_of_the_views_own_is_asked(app: Flask, responses: Responses, client: FlaskClient) -> None:
    threads: list[int] = []

    def owner(asked: Any) -> Any:
        threads.append(threading.get_ident())
        if g.closed:
            abort(403, "Not on Sundays.")
        return asked.headers.get("X-User")

    @app.before_request
    def note() -> None:
        g.closed = "closed" in request.args

    @app.post("/ask")
    @responses.endpoint(owner=owner)
    def ask_me(turn: Turn) -> str:
        return turn.owner

    assert said(response(ask(client, headers={"X-User": "ann"}))) == "ann"
    error(ask(client), 401)
    assert error(ask(client, "/ask?closed"), 403)["message"] == "Not on Sundays."
    assert threads == [threading.get_ident()] * 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"owner": "ann"}, "owner"), ({"tools": ["add"]}, "tool"), ({"store": {}}, "store"), ({"limits": 5}, "limits")],
)
def test_options_that_do_not_fit_are_refused_where_the_view_is_made(
    responses: Responses, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        responses.endpoint(**options)(function)


def test_an_app_that_the_extension_does_not_know_is_told(app: Flask, responses: Responses) -> None:
    other = Flask("other")
    other.testing = True
    view = responses.endpoint(function)
    for each in (app, other):
        each.post("/ask")(view)
    with pytest.raises(ConfigurationError, match="init_app"):
        ask(other.test_client())
    response(ask(app.test_client()))


def test_another_extensions_views_are_not_taken_for_ones_own(app: Flask, responses: Responses) -> None:
    app.testing = True
    app.post("/ask")(Responses().endpoint(function))
    with pytest.raises(ConfigurationError, match="init_app"):
        ask(app.test_client())


@pytest.mark.parametrize("given", [False, True], ids=["views before the app", "the app before views"])
def test_views_may_be_made_before_the_app_is_known(app: Flask, given: bool) -> None:
    responses = Responses()
    view = None if given else responses.endpoint(function)
    responses.init_app(app)
    app.post("/ask")(view or responses.endpoint(function))
    assert said(response(ask(app.test_client()))) == "You said: Hi"


@STREAMS
def test_a_view_may_be_in_a_blueprint_of_the_apps(
    app: Flask, responses: Responses, client: FlaskClient, streams: bool
) -> None:
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
    assert said(answered(client, streams, "/shops/corner/ask", headers={"X-User": "ann"})) == "corner shop Hi"
    error(ask(client, "/shops/corner/ask", stream=streams), 401)


# What is kept.


@pytest.fixture
def kit() -> Iterator[ResponsesKit]:
    kit = ResponsesKit(ScriptedBackend(lambda turn: [f"The kit knows of {len(turn.items)} items."]), owner=by_user)
    yield kit
    loop_thread.stop_kit(kit)


def by_user(asked: Any) -> str:
    user: str = asked.headers.get("X-User", "ann")
    return user


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_view_keeps_its_responses_where_the_kit_under_the_prefix_does(
    app: Flask, kit: ResponsesKit, made: str
) -> None:
    responses = Responses(kit=kit)

    def view(turn: Turn) -> str:
        return f"{turn.owner} told the view {len(turn.items)} items."

    wrapped = responses.endpoint(view)
    if made == "before":
        app.post("/ask")(wrapped)
    responses.init_app(app)
    if made == "after":
        app.post("/ask")(wrapped)
    client = app.test_client()
    first = response(ask(client))
    assert said(first) == "ann told the view 1 items."
    assert response(client.get(f"/v1/responses/{first['id']}")) == first
    second = response(ask(client, "/v1/responses", previous_response_id=first["id"]))
    assert said(second) == "The kit knows of 3 items."
    third = response(ask(client, previous_response_id=second["id"]))
    assert said(third) == "ann told the view 5 items."
    bob = {"X-User": "bob"}
    assert error(ask(client, previous_response_id=second["id"], headers=bob), 400)["code"] == (
        "previous_response_not_found"
    )
    error(client.get(f"/v1/responses/{first['id']}", headers=bob), 404)
    assert client.delete(f"/v1/responses/{first['id']}").status_code == 200
    error(client.get(f"/v1/responses/{first['id']}"), 404)


def test_what_is_not_to_be_kept_is_not(app: Flask, kit: ResponsesKit) -> None:
    responses = Responses(app, kit)
    app.post("/ask")(responses.endpoint(function))
    found = response(ask(app.test_client(), store=False))
    error(app.test_client().get(f"/v1/responses/{found['id']}"), 404)


def test_each_app_keeps_what_its_views_have_answered() -> None:
    kits: list[ResponsesKit] = []

    def make(app: Flask) -> ResponsesKit:
        kits.append(ResponsesKit(ScriptedBackend()))
        return kits[-1]

    responses = Responses(kit=make)
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


def test_without_a_kit_a_view_keeps_its_responses_itself(app: Flask, responses: Responses, client: FlaskClient) -> None:
    def view(turn: Turn) -> str:
        return f"{len(turn.items)} items."

    app.post("/ask")(responses.endpoint(view))
    app.post("/other", endpoint="other")(responses.endpoint(view))
    first = response(ask(client))
    assert said(response(ask(client, previous_response_id=first["id"]))) == "3 items."
    assert error(ask(client, "/other", previous_response_id=first["id"]), 400)["code"] == "previous_response_not_found"


@STREAMS
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "beside a kit"])
def test_what_would_outlive_its_request_is_refused(app: Flask, kit: ResponsesKit, shared: bool, streams: bool) -> None:
    responses = Responses(app, kit if shared else None)
    app.post("/ask")(responses.endpoint(function))
    client = app.test_client()
    refused = error(ask(client, background=True, stream=streams), 400)
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "background")
    refused = error(ask(client, stream=streams, headers={"Idempotency-Key": "a key"}), 400)
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "Idempotency-Key")
    assert said(answered(client, streams)) == "You said: Hi"


# Failures.


class Failing:
    """Views that fail, before they have said something or after it."""

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


def busy() -> Any:
    raise TooManyRequests("All lines are busy.", retry_after=7)


def broken() -> Any:
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
        (busy, 429, "too_many_requests", "All lines are busy."),
        (broken, 500, "model_error", None),
    ],
    ids=["404", "403", "418", "500", "the kit's own", "another"],
)
def test_a_view_may_fail_at_any_time(
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
    failing, noted = Failing(fail, after), Noted(app)
    app.errorhandler(Exception)(lambda error: ("the app's page", 500))
    app.post("/ask")(responses.endpoint(models=["failing"])(getattr(failing, view)))
    with caplog.at_level(logging.CRITICAL):
        answer = ask(client, stream=streams)
        if streams:
            found = told(answer)
            assert (found["status"], said(found)) == ("failed", "word " * after)
            failure = found["error"]
        else:
            failure = error(answer, status)
            assert answer.headers.get("Retry-After") == ("7" if fail is busy else None)
    assert noted.names() == TORN_DOWN
    assert failure["code"] == code
    assert message is None or failure["message"] == message
    assert "hunter2" not in failure["message"]
    assert client.get("/nothing").data == b"the app's page"


def test_a_view_that_aborts_with_an_answer_of_its_own_is_refused_with_its_status(
    app: Flask, responses: Responses, client: FlaskClient
) -> None:
    app.post("/ask")(responses.endpoint(models=["closed"])(lambda turn: abort(Response("no", 403))))
    error(ask(client), 403)


def test_a_failure_is_logged_with_its_reason(
    app: Flask, responses: Responses, client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    app.post("/ask")(responses.endpoint(models=["failing"])(Failing(broken, 0).function))
    with caplog.at_level(logging.ERROR, "responses_kit"):
        error(ask(client), 500)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


def test_a_request_that_is_not_valid_does_not_call_the_view(
    app: Flask, responses: Responses, client: FlaskClient
) -> None:
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


# Who may ask.


class User(UserMixin):  # type: ignore[misc]  # it has no types
    def __init__(self, name: str) -> None:
        self.id = name


@pytest.fixture
def manager(app: Flask) -> LoginManager:
    manager = LoginManager(app)

    @manager.request_loader
    def load(asked: Any) -> User | None:
        return User(asked.headers["X-User"]) if "X-User" in asked.headers else None

    @app.get("/login")
    def login() -> str:
        return "Who are you?"

    return manager


@pytest.mark.parametrize("view", [None, "login"])
@STREAMS
def test_who_is_not_logged_in_is_refused_in_shape(
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
    assert said(answered(client, streams, headers={"X-User": "ann"})) == "ann, ann."


@pytest.mark.parametrize("view", [None, "login"])
@pytest.mark.parametrize("where", ["the method", "the class"])
def test_who_is_not_logged_in_is_refused_in_shape_by_methods_too(
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
    assert said(response(ask(client, headers={"X-User": "ann"}))) == "ann."
    if where == "the class":
        assert client.get("/ask").status_code == (302 if view else 401)
        assert client.get("/ask").mimetype == "text/html"


@pytest.mark.parametrize("code", [401, 403, 404, 418, 429, 503])
@pytest.mark.parametrize("how", ["words", "an answer", "an answer that is returned"])
def test_what_decorators_refuse_is_in_shape_and_keeps_what_the_app_adds(
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


# The request, as long as it streams.


class Noted:
    """An app that notes what is torn down, and in which thread."""

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


TORN_DOWN = ["teardown of the request", "teardown of the app's context"]


@STREAMS
def test_a_view_has_its_requests_thread_and_what_is_torn_down_is_so_at_the_end(
    app: Flask, responses: Responses, streams: bool
) -> None:
    noted = Noted(app)
    app.before_request(lambda: noted("before"))

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        noted("begun")
        try:
            for word in ("One, ", "two."):
                yield word
                noted(word)
        finally:
            noted("closed")

    with serving(app) as client:
        data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
        happens(lambda: len(noted.what) == 7)
    assert said(stream(data) if streams else json.loads(data)) == "One, two."
    assert noted.names() == ["before", "begun", "One, ", "two.", "closed", *TORN_DOWN]
    assert len(noted.threads()) == 1
    assert threading.get_ident() not in noted.threads()


def test_requests_at_the_same_time_have_each_their_own_thread(app: Flask, responses: Responses) -> None:
    both = threading.Barrier(2, timeout=BOUND)
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

    with serving(app) as client:

        def one(user: str, found: dict[str, str]) -> None:
            body = {"input": user, "stream": True}
            found[user] = said(stream(client.post("/ask", json=body, headers={"X-User": user}).read()))

        found: dict[str, str] = {}
        asking = [threading.Thread(target=one, args=(user, found)) for user in threads]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(BOUND)
    assert found == {"ann": "ann ann ann ", "bob": "bob bob bob "}
    assert [len(seen) for seen in threads.values()] == [1, 1]
    assert threads["ann"] != threads["bob"]


@STREAMS
def test_a_connection_that_one_thread_alone_may_use_is_used_while_it_streams(
    app: Flask, responses: Responses, streams: bool
) -> None:
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

    with serving(app) as client:
        data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
        happens(lambda: len(closed) == 1)
    assert said(stream(data) if streams else json.loads(data)) == "One, two, three."
    assert closed == [True]


def found_here() -> str:
    asked = request.headers["X-User"]
    return f"{current_app.name} {g.shop} {session['user']} {asked} {request.path} {current_user.id}; "


FOUND = "shop corner ann browser /ask browser; "


def view_that_finds(turn: Turn) -> Any:
    yield found_here()
    yield found_here()


async def async_view_that_finds(turn: Turn) -> Any:
    yield found_here()
    await anyio.sleep(0.01)
    yield found_here()


async def async_function_that_finds(turn: Turn) -> Any:
    first = found_here()
    await anyio.sleep(0.01)
    return first + found_here()


async def async_view_that_finds_in_a_thread(turn: Turn) -> Any:
    yield found_here()
    yield await anyio.to_thread.run_sync(found_here)


@STREAMS
@pytest.mark.parametrize(
    "view",
    [view_that_finds, async_view_that_finds, async_function_that_finds, async_view_that_finds_in_a_thread],
)
@pytest.mark.usefixtures("manager")
def test_a_view_finds_all_of_flasks_as_long_as_it_streams(
    app: Flask, responses: Responses, view: Any, streams: bool
) -> None:
    noted = Noted(app)

    @app.before_request
    def note() -> None:
        g.shop = "corner"
        session["user"] = "ann"

    app.post("/ask")(responses.endpoint(view))
    with serving(app) as client:
        answer = client.post("/ask", json={"input": "Hi", "stream": streams}, headers={"X-User": "browser"})
        happens(lambda: noted.names() == TORN_DOWN)
    assert said(stream(answer.read()) if streams else answer.json()) == FOUND * 2
    assert "session" in answer.cookies
    assert len(noted.threads()) == 1


@STREAMS
def test_what_a_view_has_put_into_g_is_there_for_what_is_torn_down(
    app: Flask, responses: Responses, client: FlaskClient, streams: bool
) -> None:
    seen: list[Any] = []
    app.teardown_appcontext(lambda failure: seen.append(g.get("word")))

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        yield "Hi"
        g.word = "said"

    answered(client, streams)
    assert seen == ["said"]


@STREAMS
def test_flask_sqlalchemys_session_is_the_requests_as_long_as_it_streams(
    app: Flask, responses: Responses, tmp_path: Path, streams: bool
) -> None:
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'words.db'}"
    database = SQLAlchemy(app)
    sessions: list[Any] = []
    noted = Noted(app)

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
    noted.what.clear()
    try:
        with serving(app) as client:
            data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
            happens(lambda: noted.names() == TORN_DOWN)
        assert said(stream(data) if streams else json.loads(data)) == "1 1 1 "
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
def test_a_session_that_is_kept_by_thread_is_the_requests_as_long_as_it_streams(
    app: Flask, responses: Responses, tmp_path: Path, streams: bool
) -> None:
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
        with serving(app) as client:
            data = client.post("/ask", json={"input": "Hi", "stream": streams}).read()
            happens(lambda: len(removed) == 1)
        assert said(stream(data) if streams else json.loads(data)) == "0 1 2 "
        assert len(sessions) == 4
        assert len(set(map(id, sessions))) == 1
        assert removed == [True]
    finally:
        engine.dispose()


def test_async_views_have_the_event_loop(app: Flask, responses: Responses, client: FlaskClient) -> None:
    @app.post("/ask")
    @responses.endpoint
    async def ask_me(turn: Turn) -> Any:
        yield threading.current_thread().name
        g.seen = True

    assert said(response(ask(client))) == LOOP


# Ends that nobody has planned.


@pytest.fixture
def ended() -> list[str]:
    """How the responses of a view have ended, as it is told by `on_response_end=`."""
    return []


def ended_into(ended: list[str]) -> Callable[[str, dict[str, Any]], None]:
    return lambda owner, response: ended.append(response["status"])


@pytest.mark.parametrize("again", [False, True], ids=["once", "and the next streams"])
def test_a_stream_that_the_app_has_replaced_is_ended_and_leaves_nothing_to_the_next_request(
    app: Flask, responses: Responses, client: FlaskClient, ended: list[str], again: bool
) -> None:
    noted = Noted(app)
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
    @responses.endpoint(on_response_end=ended_into(ended))
    def ask_me(turn: Turn) -> Any:
        calls.append(turn.text)
        yield "Hi"

    @app.get("/page")
    def page() -> str:
        return f"{g.user} {request.path}"

    answer = ask(client, "/ask?replace", input="lost", stream=True)
    assert (answer.status_code, answer.data) == (202, b"maintenance")
    assert noted.names() == TORN_DOWN
    happens(lambda: len(ended) == 1)
    assert ended[0] != "completed"
    assert client.get("/page").data == b"ann /page"
    if again:
        assert said(told(ask(client, input="next", stream=True))) == "Hi"
        assert calls == ["next"]
    assert [user for user, _ in seen] == [None] * len(seen)
    assert noted.names() == TORN_DOWN * len(seen)


def test_an_error_after_the_view_ends_its_stream(
    app: Flask, responses: Responses, client: FlaskClient, ended: list[str]
) -> None:
    noted = Noted(app)

    @app.after_request
    def fail(answer: Response) -> Response:
        raise LookupError("no such shop")

    app.post("/ask")(responses.endpoint(on_response_end=ended_into(ended))(generator))
    assert ask(client, stream=True).status_code == 500
    happens(lambda: len(ended) == 1)
    assert ended[0] != "completed"
    assert noted.names() == TORN_DOWN


@pytest.mark.parametrize("read", ["whole", "in part", "not at all"])
@pytest.mark.parametrize("another", [False, True], ids=["in place", "in another answer"])
def test_a_stream_that_the_app_has_wrapped_leaves_nothing_to_the_next_request(
    app: Flask,
    responses: Responses,
    client: FlaskClient,
    ended: list[str],
    another: bool,
    read: str,
) -> None:
    noted = Noted(app)
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
        if another:
            return Response(wrapped(answer.response), answer.status_code, answer.headers)
        answer.response = wrapped(answer.response)
        return answer

    @app.post("/ask")
    @responses.endpoint(on_response_end=ended_into(ended))
    def ask_me(turn: Turn) -> Any:
        for _ in range(50):
            yield f"{g.user} "

    answer = ask(client, stream=True)
    if read == "whole":
        assert said(told(answer)) == "bob " * 50
    elif read == "in part":
        read_until(b"bob ", answer).close()
    else:
        answer.close()
    del answer
    happens(lambda: len(ended) == 1)
    assert (ended[0] == "completed") == (read == "whole")
    assert not current_app
    assert noted.names() == TORN_DOWN
    assert client.get("/nothing").status_code == 404
    assert fresh == [True, True]


def test_a_stream_of_which_nothing_is_read_is_ended(
    app: Flask, responses: Responses, client: FlaskClient, ended: list[str]
) -> None:
    noted = Noted(app)
    app.post("/ask")(responses.endpoint(on_response_end=ended_into(ended))(generator))
    ask(client, stream=True).close()
    assert noted.names() == TORN_DOWN
    happens(lambda: len(ended) == 1)


def test_a_view_that_fails_as_it_is_closed_holds_nothing_up(
    app: Flask, responses: Responses, client: FlaskClient, ended: list[str]
) -> None:
    noted = Noted(app)

    @app.post("/ask")
    @responses.endpoint(on_response_end=ended_into(ended))
    def ask_me(turn: Turn) -> Any:
        try:
            while True:
                yield "on and "
        finally:
            raise LookupError("no such shop")

    read_until(b"on and", ask(client, stream=True)).close()
    assert noted.names() == TORN_DOWN
    happens(lambda: len(ended) == 1)
    assert ended[0] != "completed"
    assert client.get("/nothing").status_code == 404


def read_until(word: bytes, answer: Any) -> Any:
    """The answer, once as much of it has come."""
    pieces = iter(answer.response)
    data = b""
    while word not in data:
        data += next(pieces)
    return answer


def test_a_stream_that_is_closed_unread_closes_the_view_in_its_thread(
    app: Flask, responses: Responses, client: FlaskClient, ended: list[str]
) -> None:
    noted = Noted(app)

    @app.post("/ask")
    @responses.endpoint(on_response_end=ended_into(ended))
    def ask_me(turn: Turn) -> Any:
        try:
            while True:
                yield "on and "
        finally:
            assert turn.cancelled
            noted(f"closed {request.path}")

    read_until(b"on and", ask(client, stream=True)).close()
    assert noted.names() == ["closed /ask", *TORN_DOWN]
    assert noted.threads() == {threading.get_ident()}
    happens(lambda: len(ended) == 1)
    assert ended[0] != "completed"


@pytest.mark.parametrize("how", ["yields", "looks at turn.cancelled", "async"])
@STREAMS
def test_a_client_that_leaves_ends_the_view(
    app: Flask, responses: Responses, ended: list[str], how: str, streams: bool
) -> None:
    noted = Noted(app)
    begun, closed = threading.Event(), threading.Event()
    until = time.monotonic() + AT_MOST

    def talking(turn: Turn) -> Any:
        try:
            while time.monotonic() < until:
                yield "on and "
                begun.set()
                time.sleep(0.002)
            noted("never ended")
        finally:
            closed.set()

    def looking(turn: Turn) -> Any:
        yield "on and "
        begun.set()
        while time.monotonic() < until:
            if turn.cancelled:
                closed.set()
                return
            time.sleep(0.002)
        noted("never ended")

    async def waiting(turn: Turn) -> Any:
        yield "on and "
        begun.set()
        try:
            await anyio.sleep(AT_MOST)
            noted("never ended")
        finally:
            closed.set()

    view = {"yields": talking, "looks at turn.cancelled": looking, "async": waiting}[how]
    app.post("/ask")(responses.endpoint(on_response_end=ended_into(ended))(view))
    with serving(app) as client:
        leave(client, begun, streams)
        assert begun.wait(BOUND)
        assert closed.wait(BOUND)
        happens(lambda: noted.names()[-2:] == TORN_DOWN)
        happens(lambda: len(ended) == 1)
    assert noted.names() == TORN_DOWN
    assert ended[0] != "completed"


AT_MOST = 4.0
"""Seconds after which a view gives up waiting for its client to leave."""


def leave(client: httpx.Client, begun: threading.Event, streams: bool) -> None:
    """Asks, and leaves before the answer ends."""
    body = {"input": "Hi", "stream": streams}
    if streams:
        with client.stream("POST", "/ask", json=body) as answer:
            assert any(b"on and" in piece for piece in answer.iter_raw())
            assert begun.wait(BOUND)
        return
    with pytest.raises(httpx.ReadTimeout):
        client.post("/ask", json=body, timeout=httpx.Timeout(BOUND, read=0.1))


def test_a_test_client_that_keeps_the_contexts_finds_them_after_a_stream(
    app: Flask, responses: Responses, client: FlaskClient
) -> None:
    noted = Noted(app)

    @app.post("/ask")
    @responses.endpoint
    def ask_me(turn: Turn) -> Any:
        yield "Hi"
        g.user = turn.text

    with client:
        for name in ("ann", "bob"):
            told(ask(client, input=name, stream=True))
            assert (g.user, request.path) == (name, "/ask")
    assert noted.names() == TORN_DOWN * 2
    assert not current_app


def test_many_requests_in_one_thread_leave_nothing_behind(
    app: Flask, responses: Responses, client: FlaskClient
) -> None:
    noted = Noted(app)
    fresh: list[bool] = []

    @app.before_request
    def note() -> None:
        fresh.append("user" not in g)
        g.user = "ann"

    app.post("/ask")(responses.endpoint(generator))
    for number in range(20):
        answered(client, number % 2 == 0)
    assert fresh == [True] * 20
    assert noted.names() == TORN_DOWN * 20
    assert not current_app
