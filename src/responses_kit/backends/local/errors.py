"""Errors about model files."""

from __future__ import annotations

from ...errors import ConfigurationError

__all__ = ["ModelFileError", "NoRoomError"]


class ModelFileError(ConfigurationError):
    """A model file cannot be had, or is not one that the local engine can load; the message says how to mend it."""


class NoRoomError(ModelFileError):
    """The disk is full, or would be."""
