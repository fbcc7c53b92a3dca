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
from ._http.handling import answer, plain, respond

__all__ = ["ResponsesView"]

logger = logging.getLogger("responses_kit")


class ResponsesView(View):
    """All paths of the API, below wherever it is mounted. `urls` has it twice: at the root, and with a `path`.

    Attributes:
        kit: Answers the requests; by default the one of the setting `RESPONSES_KIT`.
        dialect: What is spoken, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.
    """

    kit: ResponsesKit | None = None
    dialect: type[WireProtocol] = OpenResponses
    view_is_async = True

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """The view. Who asks is found out by the setting `AUTH`, CSRF check included, and a 401 is JSON.

        Raises:
            ConfigurationError: The dialect is none.
        """
        WireProtocol.validate(initkwargs.get("dialect", cls.dialect))
        view = login_not_required(csrf_exempt(super().as_view(**initkwargs)))
        for alias in connections:  # no transaction is to be open for as long as an answer takes
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    async def dispatch(self, request: HttpRequest, path: str = "") -> HttpResponseBase:  # type: ignore[override]  # it may be async
        """Answers one request."""
        try:
            dialect = self.dialect(self.kit or await _ready())
            if isinstance(request, ASGIRequest):
                return await answer(dialect, request, path)
            return await sync_to_async(respond)(dialect, request, path)  # in the thread that has the request
        except (ConfigurationError, ImproperlyConfigured) as error:
            logger.error("the API cannot be served: %s", error)
            told = str(error) if settings.DEBUG else "its log says what is missing."
            return plain(self.dialect.render_error(ServerError(f"The API of this server is not set up: {told}")))


async def _ready() -> ResponsesKit:
    """The project's kit. What a backend fails with while it is made is not shown, with all that is around it."""
    try:
        return await conf.ready()
    except (ConfigurationError, ImproperlyConfigured):
        raise
    except Exception as error:
        logger.error("the kit could not be made", exc_info=error)
        raise ConfigurationError("the backend could not be made; the log has the reason") from None
