"""The API as a view, for ASGI and WSGI alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from responses_kit.errors import ConfigurationError, ServerError
from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol
from responses_kit.kit import ResponsesKit

from . import conf
from ._http.handling import handle_asgi, handle_wsgi, to_http_response

__all__ = ["ResponsesView"]

logger = logging.getLogger("responses_kit")


class ResponsesView(View):
    """The view for all paths of the API. `urls` maps it to the root of a prefix, and with a `path` to all paths below.

    Attributes:
        kit: The kit; by default the one of the setting `RESPONSES_KIT`.
        dialect: The wire protocol, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.
    """

    kit: ResponsesKit | None = None
    dialect: type[WireProtocol] = OpenResponses
    view_is_async = True

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """Return the view, exempt from Django's login and CSRF middleware: authenticators in `AUTH` check both.

        Raises:
            ConfigurationError: `dialect` is not a wire protocol.
        """
        WireProtocol.validate(initkwargs.get("dialect", cls.dialect))
        view = login_not_required(csrf_exempt(super().as_view(**initkwargs)))
        for alias in connections:  # ATOMIC_REQUESTS would keep a transaction open while a response is generated
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    async def dispatch(self, request: HttpRequest, path: str = "") -> HttpResponseBase:  # type: ignore[override]  # it may be async
        """Handle one request."""
        try:
            dialect = self.dialect(self.kit or await _get_kit())
            if isinstance(request, ASGIRequest):
                return await handle_asgi(dialect, request, path)
            return await sync_to_async(handle_wsgi)(dialect, request, path)  # runs in the request's own thread
        except (ConfigurationError, ImproperlyConfigured) as error:
            logger.error("the API cannot be served: %s", error)
            reason = str(error) if settings.DEBUG else "see the server's log."
            failure = ServerError(f"This server's API is not configured: {reason}")
            return to_http_response(self.dialect.render_error(failure))


async def _get_kit() -> ResponsesKit:
    """Return the project's kit. Errors of the backend's constructor are logged, but not sent to the client."""
    try:
        return await conf.get_kit_async()
    except (ConfigurationError, ImproperlyConfigured):
        raise
    except Exception as error:
        logger.error("the kit could not be created", exc_info=error)
        raise ConfigurationError("the backend could not be created; see the server's log") from None
