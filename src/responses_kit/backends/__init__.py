"""Backends that come with the kit."""

from typing import TYPE_CHECKING

from .._exports import lazy_exports

if TYPE_CHECKING:
    from .local import LocalBackend
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"LocalBackend": ".local"})

__all__ = ["LocalBackend"]
