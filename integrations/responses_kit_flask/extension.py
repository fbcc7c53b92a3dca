"""The extension: the API under a prefix of an app, and the decorator."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, overload

from flask import Blueprint, Flask, Response, current_app, request
from flask.blueprints import BlueprintSetupState
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as NotAllowed
from werkzeug.routing import BaseConverter

from responses_kit._concurrency.loop_thread import handle_sigterm_under_server
from responses_kit.adapters.view_backend import RequestScope, ViewBackend
from responses_kit.backend import Model
from responses_kit.engine.hooks import Scope
from responses_kit.errors import APIError, ConfigurationError, MethodNotAllowed, Unauthorized, error_for_status
from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol
from responses_kit.kit import ResponsesKit

from .cli import commands
from .responses import Answered, answer, converse, end_unsent, refused, shown
from .scope import AppScope

__all__ = ["Responses"]

View = TypeVar("View", bound=Callable[..., Any])

Kit = ResponsesKit | Callable[[Flask], ResponsesKit]

_NAME: Final = "responses_kit"
"""Of the extension, of its converter, and of the mark that its views have, which is the dialect that they speak."""

_KITS: Final = "responses_kit.kits"
"""Where an app has the kits that are its own, each with what it was given for it."""

_CALL: Final = "responses_kit.call"
"""Where a request's environment has the call of its view, which lacks but the turn."""


class Responses:
    """The Open Responses API in a Flask app, as an extension.

    Args:
        app: The app; or `init_app` later, for each app that there is.
        kit: Answers under the prefix; a kit, or a function of the app that makes one. Without it there are the
            endpoints only. Its owner hook is given Flask's request, in the request's thread and contexts.
        url_prefix: Where the API's paths begin.
        dialect: What is spoken there, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.

    Raises:
        ConfigurationError: The app has the extension already, or the dialect is none.
    """

    def __init__(
        self,
        app: Flask | None = None,
        kit: Kit | None = None,
        url_prefix: str = "/v1",
        *,
        dialect: type[WireProtocol] = OpenResponses,
    ) -> None:
        self._kit, self._url_prefix, self._dialect = kit, url_prefix, WireProtocol.validate(dialect)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Adds the API to an app.

        Raises:
            ConfigurationError: The app has the extension already.
        """
        if _NAME in app.extensions:
            raise ConfigurationError(
                "this app has the extension already: use that one; for another API beside it register a blueprint"
            )
        if self._kit is None:
            self._extend(app)
        else:
            app.register_blueprint(self.blueprint)

    def _extend(self, app: Flask) -> None:
        if _NAME not in app.extensions:
            app.extensions[_NAME], app.extensions[_KITS] = {}, []
            _guard(app)
            app.teardown_request(end_unsent)
            app.cli.add_command(commands)
            handle_sigterm_under_server()
        if self not in app.extensions[_NAME]:
            app.extensions[_NAME][self] = None if self._kit is None else _kit_for(app, self._kit)

    # The API under a prefix.

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """The API's paths, for who mounts them by hand, or asks more of its requests by `before_request`."""
        blueprint = Blueprint(self._dialect.name, __name__, url_prefix=self._url_prefix)
        blueprint.record(self._prepare)
        marked = _marked(self._dialect)

        @marked
        def api(path: str = "") -> Response:
            return answer(self._dialect(current_app.extensions[_NAME][self]), f"/{path}")

        @marked
        def socket(path: str = "") -> Response:
            is_asked = self._dialect.sockets and request.method == "GET" and path.strip("/") == "responses"
            return converse(current_app.extensions[_NAME][self]) if is_asked else api(path)

        for rule in ("", f"/<{_NAME}:path>") if self._url_prefix.strip("/") else (f"/<{_NAME}:path>",):
            blueprint.add_url_rule(rule, view_func=api, provide_automatic_options=False)
            blueprint.add_url_rule(rule, view_func=socket, provide_automatic_options=False, websocket=True)
        blueprint.record(_accept_all_methods)
        return blueprint

    def _prepare(self, state: BlueprintSetupState) -> None:
        assert isinstance(state.app, Flask)
        if self._kit is None:
            raise ConfigurationError("give Responses a kit, which answers under the prefix")
        state.app.url_map.converters[_NAME] = _Anything
        self._extend(state.app)

    # Endpoints.

    @overload
    def endpoint(self, view: View, /) -> View: ...

    @overload
    def endpoint(self, /, *, models: Sequence[str | Model] = (), **options: Any) -> Callable[[View], View]: ...

    def endpoint(self, view: Any = None, /, *, models: Sequence[str | Model] = (), **options: Any) -> Any:
        """Makes a view function answer `POST` as the API does: what it yields, or returns, are outputs of a backend.

        It is called with a `Turn`, and the URL's values by their names. Put it below `route` and who else decorates::

            @app.post("/ask")
            @login_required
            @responses.endpoint
            def ask(turn):
                yield "Hello"

        Args:
            view: The view function; or, with arguments, they come first: `@responses.endpoint(models=...)`.
            models: Names, or `Model` where the view can do more than talk; by default the function's name.
            options: Those of `ResponsesKit`, such as `owner`, `store` and `tools`. What is not given is as in the kit
                under the prefix, if there is one.

        Raises:
            ConfigurationError: The options do not fit.
        """
        if view is None:
            return functools.partial(self._endpoint, models=models, options=options)
        return self._endpoint(view, models=models, options=options)

    def _endpoint(self, view: Any, *, models: Sequence[str | Model], options: dict[str, Any]) -> Any:
        backend = ViewBackend(models or [view.__name__], lambda turn: request.environ[_CALL](turn), refused)
        options = {"backend": backend, "scope": RequestScope(), "runner": None, **options}
        alone = ResponsesKit(**options)
        kits: weakref.WeakKeyDictionary[ResponsesKit, ResponsesKit] = weakref.WeakKeyDictionary()

        @_marked(OpenResponses)
        @functools.wraps(view)
        def respond(*args: Any, **values: Any) -> Response:
            if request.method != "POST":
                return shown(MethodNotAllowed("This path answers POST only.", headers={"Allow": "POST"}), OpenResponses)
            if self not in current_app.extensions.get(_NAME, ()):
                raise ConfigurationError("the extension does not know this app: call init_app with it")
            shared = current_app.extensions[_NAME][self]
            kit = alone
            if shared is not None:
                kit = kits.get(shared) or kits.setdefault(shared, shared.with_settings(**options))
            request.environ[_CALL] = lambda turn: view(*args, turn, **values)
            return answer(OpenResponses(kit), "/responses")

        return respond


class _Anything(BaseConverter):
    """All that is below the prefix, so that what is not there is missed in the API's own way."""

    regex = r"[\s\S]*"
    part_isolating = False
    weight = 1000


def _accept_all_methods(state: BlueprintSetupState) -> None:
    """Has Flask refuse none, for the API says itself which it takes."""
    for view in ("api", "socket"):
        for rule in state.app.url_map.iter_rules(f"{state.name_prefix}.{state.name}.{view}".lstrip(".")):
            rule.methods = None


def _marked(dialect: type[WireProtocol]) -> Callable[[View], View]:
    def mark(view: View) -> View:
        setattr(view, _NAME, dialect)  # decorators around it that are well made copy it
        return view

    return mark


def _guard(app: Flask) -> None:
    """Has what stands before the API's views, such as decorators, refuse in the shape of their dialect."""
    handle = app.handle_user_exception

    def handle_ours(error: Exception) -> Any:
        dialect = _spoken()
        if dialect is None:
            return handle(error)
        found = error if isinstance(error, APIError) else refused(error)
        return handle(error) if found is None else shown(found, dialect)

    app.handle_user_exception = handle_ours  # type: ignore[assignment, method-assign]  # comes before the app's own handlers
    app.after_request(_in_shape)


def _spoken() -> type[WireProtocol] | None:
    """What the view of the API's speaks that the request is for, by a method that it does not take, too; or None."""
    endpoint, missed = request.endpoint, request.routing_exception
    if isinstance(missed, NotAllowed) and (adapter := current_app.create_url_adapter(request)) is not None:
        with suppress(HTTPException):  # such as a redirect to the path with a slash
            endpoint, _ = adapter.match(method="POST", websocket=False)
    view = current_app.view_functions.get(endpoint or "")
    view = getattr(getattr(view, "view_class", None), request.method.lower(), view)
    found: type[WireProtocol] | None = getattr(view, _NAME, None)
    return found


def _in_shape(response: Response) -> Response:
    """Makes errors that were answered, and not raised, into the dialect's."""
    if response.status_code < 300 or isinstance(response, Answered) or (dialect := _spoken()) is None:
        return response
    if response.status_code >= 400:
        error = error_for_status(response.status_code, f"The request was refused: {response.status}")
    elif _is_stranger():
        error = Unauthorized("Log in first.")  # instead of being led to a page
        del response.headers["Location"]
    else:
        return response
    found = shown(error, dialect)
    response.set_data(found.get_data())
    response.status_code = error.status
    for name, value in found.headers.items():
        if name != "Retry-After" or name not in response.headers:
            response.headers[name] = value
    return response


def _kit_for(app: Flask, given: Kit) -> ResponsesKit:
    """The app's own kit; the same for all that are given the same."""
    kits: list[tuple[Kit, ResponsesKit]] = app.extensions[_KITS]
    found = next((kit for known, kit in kits if known == given), None)
    if found is None:
        found = _adapted(app, given)
        kits.append((given, found))
    return found


def _adapted(app: Flask, given: Kit) -> ResponsesKit:
    """A kit whose backend finds the app's context."""
    kit = given(app) if callable(given) else given
    if not isinstance(kit, ResponsesKit):
        raise ConfigurationError(f"give it a ResponsesKit, such as ResponsesKit(backend), not {type(kit).__name__}")
    own = type(kit.settings.scope) is not Scope
    return kit if own else kit.with_settings(scope=AppScope(app))


def _is_stranger() -> bool:
    """Whether Flask-Login, where the app has it, knows nobody."""
    if not hasattr(current_app, "login_manager"):
        return False
    from flask_login import current_user

    return not current_user.is_authenticated
