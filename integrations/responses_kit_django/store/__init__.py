"""The store of responses in a database of the Django project."""

from .store import OrmStore

__all__ = ["OrmStore"]
