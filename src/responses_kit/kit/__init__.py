"""The kit: the API as methods, and its settings."""

from .kit import Owner, ResponsesKit

__all__ = ["Owner", "ResponsesKit"]
