"""Where the project's URLconf has the API, and which kit answers there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import get_script_prefix
from django.urls import Resolver404, get_resolver, resolve

from responses_kit.kit import ResponsesKit

from . import conf
from .views import ResponsesView

__all__ = ["kit_of", "own_kit", "view_at", "views"]


def views() -> Iterator[Any]:
    """The API's views, wherever they are."""
    return _below(get_resolver()) if getattr(settings, "ROOT_URLCONF", None) else iter(())


def _below(resolver: Any) -> Iterator[Any]:
    for pattern in resolver.url_patterns:
        if hasattr(pattern, "url_patterns"):
            yield from _below(pattern)
        elif _is_ours(pattern.callback):
            yield pattern.callback


def view_at(scope: Mapping[str, Any]) -> Any:
    """The API's view at an ASGI connection's path; None where there is another, or none."""
    try:
        view = resolve(scope["path"].removeprefix(get_script_prefix(scope))).func
    except Resolver404:
        return None
    return view if _is_ours(view) else None


def _is_ours(view: Any) -> bool:
    return issubclass(getattr(view, "view_class", object), ResponsesView)


def own_kit(view: Any) -> ResponsesKit | None:
    """The kit that a view brings along; None where that of the setting `RESPONSES_KIT` answers."""
    kit: ResponsesKit | None = view.view_initkwargs.get("kit", view.view_class.kit)
    return kit


async def kit_of(view: Any) -> ResponsesKit:
    """The kit that answers in a view."""
    return own_kit(view) or await conf.ready()
