"""The Flask extension: the API under a URL prefix, and the `endpoint` decorator."""

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

from .cli import responses_group
from .handling import (
    APIResponse,
    close_unsent_stream,
    error_response,
    handle_request,
    serve_websocket,
    translate_error,
)
from .scope import AppScope

__all__ = ["Responses"]

View = TypeVar("View", bound=Callable[..., Any])

Kit = ResponsesKit | Callable[[Flask], ResponsesKit]

_NAME: Final = "responses_kit"
"""Name of the extension, of its URL converter, and of the view attribute that holds the wire protocol."""

_KITS_KEY: Final = "responses_kit.kits"
"""Key in `app.extensions` of the app's kits, as pairs of the `kit` argument and the kit that was built from it."""

_VIEW_CALL_KEY: Final = "responses_kit.call"
"""The WSGI environment's key for the view of the request, as a function of the turn."""


class Responses:
    """A Flask extension that adds the Open Responses API to an app.

    Args:
        app: The app. Without it, call `init_app` for each app.
        kit: Serves the URL prefix: a kit, or a function that takes the app and returns a kit. Without it, the
            extension provides `endpoint` only. The kit's owner hook is called with Flask's request, in the request's
            thread and contexts.
        url_prefix: The API's URL prefix.
        dialect: The wire protocol, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.

    Raises:
        ConfigurationError: The app already has the extension, or `dialect` is not a wire protocol.
    """

    def __init__(
        self,
        app: Flask | None = None,
        kit: Kit | None = None,
        url_prefix: str = "/v1",
        *,
        dialect: type[WireProtocol] = OpenResponses,
    ) -> None:
        self._kit, self._url_prefix, self._protocol = kit, url_prefix, WireProtocol.validate(dialect)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Add the API to an app.

        Raises:
            ConfigurationError: The app already has the extension.
        """
        if _NAME in app.extensions:
            raise ConfigurationError(
                "The app already has this extension. Register the 'blueprint' of another Responses to add a second API."
            )
        if self._kit is None:
            self._register(app)
        else:
            app.register_blueprint(self.blueprint)

    def _register(self, app: Flask) -> None:
        if _NAME not in app.extensions:
            app.extensions[_NAME], app.extensions[_KITS_KEY] = {}, []
            _install_error_handling(app)
            app.teardown_request(close_unsent_stream)
            app.cli.add_command(responses_group)
            handle_sigterm_under_server()
        if self not in app.extensions[_NAME]:
            app.extensions[_NAME][self] = None if self._kit is None else _get_kit(app, self._kit)

    # The API under a prefix.

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """The blueprint with the API's routes, to register or extend yourself."""
        blueprint = Blueprint(self._protocol.name, __name__, url_prefix=self._url_prefix)
        blueprint.record(self._prepare_app)
        tag_view = _tag_view(self._protocol)

        @tag_view
        def api(path: str = "") -> Response:
            return handle_request(self._protocol(current_app.extensions[_NAME][self]), f"/{path}")

        @tag_view
        def socket(path: str = "") -> Response:
            is_websocket = self._protocol.has_websocket and request.method == "GET" and path.strip("/") == "responses"
            return serve_websocket(current_app.extensions[_NAME][self]) if is_websocket else api(path)

        for rule in ("", f"/<{_NAME}:path>") if self._url_prefix.strip("/") else (f"/<{_NAME}:path>",):
            blueprint.add_url_rule(rule, view_func=api, provide_automatic_options=False)
            blueprint.add_url_rule(rule, view_func=socket, provide_automatic_options=False, websocket=True)
        blueprint.record(_accept_all_methods)
        return blueprint

    def _prepare_app(self, state: BlueprintSetupState) -> None:
        assert isinstance(state.app, Flask)
        if self._kit is None:
            raise ConfigurationError("'kit' must be set to serve a URL prefix.")
        state.app.url_map.converters[_NAME] = _AnyPathConverter
        self._register(state.app)

    # Endpoints.

    @overload
    def endpoint(self, view: View, /) -> View: ...

    @overload
    def endpoint(self, /, *, models: Sequence[str | Model] = (), **options: Any) -> Callable[[View], View]: ...

    def endpoint(self, view: Any = None, /, *, models: Sequence[str | Model] = (), **options: Any) -> Any:
        """Serve a view function as the backend of `POST` requests.

        The function is called with a `Turn` and the URL's variables, and yields or returns outputs as a backend does.
        The decorator goes below `route` and all other decorators::

            @app.post("/ask")
            @login_required
            @responses.endpoint
            def ask(turn):
                yield "Hello"

        Args:
            view: The view function. Omitted if the decorator has arguments, as in `@responses.endpoint(models=...)`.
            models: Names of models, or `Model` to declare capabilities; by default the function's name.
            options: Settings of `ResponsesKit`, such as `owner`, `store` and `tools`. All other settings default to
                those of the extension's kit, if it has one. `limits` and `timeouts` are replaced as a whole; see
                `ResponsesKit.with_settings`.

        Raises:
            ConfigurationError: See `ResponsesKit`.
        """
        if view is None:
            return functools.partial(self._endpoint, models=models, options=options)
        return self._endpoint(view, models=models, options=options)

    def _endpoint(self, view: Any, *, models: Sequence[str | Model], options: dict[str, Any]) -> Any:
        backend = ViewBackend(
            models or [view.__name__], lambda turn: request.environ[_VIEW_CALL_KEY](turn), translate_error
        )
        options = {"backend": backend, "scope": RequestScope(), "runner": None, **options}
        own_kit = ResponsesKit(**options)
        kits: weakref.WeakKeyDictionary[ResponsesKit, ResponsesKit] = weakref.WeakKeyDictionary()

        @_tag_view(OpenResponses)
        @functools.wraps(view)
        def respond(*args: Any, **values: Any) -> Response:
            if request.method != "POST":
                return error_response(
                    MethodNotAllowed("The method must be POST for this path.", headers={"Allow": "POST"}), OpenResponses
                )
            if self not in current_app.extensions.get(_NAME, ()):
                raise ConfigurationError("The app does not have this extension. Call init_app(app).")
            app_kit = current_app.extensions[_NAME][self]
            kit = own_kit
            if app_kit is not None:
                kit = kits.get(app_kit) or kits.setdefault(app_kit, app_kit.with_settings(**options))
            request.environ[_VIEW_CALL_KEY] = lambda turn: view(*args, turn, **values)
            return handle_request(OpenResponses(kit), "/responses")

        return respond


class _AnyPathConverter(BaseConverter):
    """Matches every path, so that unknown ones get a 404 in the API's format."""

    regex = r"[\s\S]*"
    part_isolating = False
    weight = 1000


def _accept_all_methods(state: BlueprintSetupState) -> None:
    """Route every method to the API, which answers 405 in its own format."""
    for view in ("api", "socket"):
        for rule in state.app.url_map.iter_rules(f"{state.name_prefix}.{state.name}.{view}".lstrip(".")):
            rule.methods = None


def _tag_view(protocol: type[WireProtocol]) -> Callable[[View], View]:
    def tag(view: View) -> View:
        setattr(view, _NAME, protocol)  # decorators that use functools.wraps copy the attribute
        return view

    return tag


def _install_error_handling(app: Flask) -> None:
    """Render errors raised by decorators and hooks of the API's views in their wire protocol's format."""
    handle_user_exception = app.handle_user_exception

    def handle_exception(error: Exception) -> Any:
        protocol = _find_protocol()
        if protocol is None:
            return handle_user_exception(error)
        api_error = error if isinstance(error, APIError) else translate_error(error)
        return handle_user_exception(error) if api_error is None else error_response(api_error, protocol)

    app.handle_user_exception = handle_exception  # type: ignore[assignment, method-assign]  # precedes the app's handlers
    app.after_request(_convert_error_response)


def _find_protocol() -> type[WireProtocol] | None:
    """Return the wire protocol of the request's view, if any, whatever the method."""
    endpoint, routing_error = request.endpoint, request.routing_exception
    if isinstance(routing_error, NotAllowed) and (adapter := current_app.create_url_adapter(request)) is not None:
        with suppress(HTTPException):  # for example a redirect to the path with a slash
            endpoint, _ = adapter.match(method="POST", websocket=False)
    view = current_app.view_functions.get(endpoint or "")
    view = getattr(getattr(view, "view_class", None), request.method.lower(), view)
    protocol: type[WireProtocol] | None = getattr(view, _NAME, None)
    return protocol


def _convert_error_response(response: Response) -> Response:
    """Convert an error response from a decorator or hook into the wire protocol's format."""
    if response.status_code < 300 or isinstance(response, APIResponse) or (protocol := _find_protocol()) is None:
        return response
    if response.status_code >= 400:
        error = error_for_status(response.status_code, f"The request was refused: {response.status}")
    elif _is_anonymous():
        error = Unauthorized("Log in first.")  # Flask-Login redirects to a login page
        del response.headers["Location"]
    else:
        return response
    converted = error_response(error, protocol)
    response.set_data(converted.get_data())
    response.status_code = error.status
    for name, value in converted.headers.items():
        if name != "Retry-After" or name not in response.headers:
            response.headers[name] = value
    return response


def _get_kit(app: Flask, source: Kit) -> ResponsesKit:
    """Return the app's kit for a `kit` argument; equal arguments share one kit."""
    kits: list[tuple[Kit, ResponsesKit]] = app.extensions[_KITS_KEY]
    kit = next((kit for known, kit in kits if known == source), None)
    if kit is None:
        kit = _build_kit(app, source)
        kits.append((source, kit))
    return kit


def _build_kit(app: Flask, source: Kit) -> ResponsesKit:
    """Return a kit that runs in the app's context, unless it has its own scope."""
    kit = source(app) if callable(source) else source
    if not isinstance(kit, ResponsesKit):
        raise ConfigurationError(f"'kit' must be a ResponsesKit, not {type(kit).__name__}.")
    has_own_scope = type(kit.settings.scope) is not Scope
    return kit if has_own_scope else kit.with_settings(scope=AppScope(app))


def _is_anonymous() -> bool:
    """Return whether the app uses Flask-Login and the request is not authenticated."""
    if not hasattr(current_app, "login_manager"):
        return False
    from flask_login import current_user

    return not current_user.is_authenticated
