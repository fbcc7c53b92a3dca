"""The API's views in the project's URLconf, and their kits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import get_script_prefix
from django.urls import Resolver404, get_resolver, resolve

from responses_kit.kit import ResponsesKit

from . import conf
from .views import ResponsesView

__all__ = ["find_view", "get_explicit_kit", "get_kit", "iter_views"]


def iter_views() -> Iterator[Any]:
    """Yield all API views of the URLconf."""
    return _iter_views(get_resolver()) if getattr(settings, "ROOT_URLCONF", None) else iter(())


def _iter_views(resolver: Any) -> Iterator[Any]:
    for pattern in resolver.url_patterns:
        if hasattr(pattern, "url_patterns"):
            yield from _iter_views(pattern)
        elif _is_api_view(pattern.callback):
            yield pattern.callback


def find_view(scope: Mapping[str, Any]) -> Any:
    """Return the API view at an ASGI connection's path, or None if the path has another view or none."""
    try:
        view = resolve(scope["path"].removeprefix(get_script_prefix(scope))).func
    except Resolver404:
        return None
    return view if _is_api_view(view) else None


def _is_api_view(view: Any) -> bool:
    return issubclass(getattr(view, "view_class", object), ResponsesView)


def get_explicit_kit(view: Any) -> ResponsesKit | None:
    """Return the kit that was passed to a view, or None if the view uses the kit of the setting `RESPONSES_KIT`."""
    kit: ResponsesKit | None = view.view_initkwargs.get("kit", view.view_class.kit)
    return kit


async def get_kit(view: Any) -> ResponsesKit:
    """Return the kit of a view, and build the one of the setting `RESPONSES_KIT` if needed."""
    return get_explicit_kit(view) or await conf.get_kit_async()
