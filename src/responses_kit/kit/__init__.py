"""The kit: the API as methods, and its settings."""

from .kit import ResponsesKit
from .settings import Limits, Owner, Timeouts

__all__ = ["Limits", "Owner", "ResponsesKit", "Timeouts"]
