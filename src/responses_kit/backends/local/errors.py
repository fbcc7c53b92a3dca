"""Errors about model files."""

from __future__ import annotations

from ...errors import ConfigurationError

__all__ = ["DiskFullError", "ModelFileError"]


class ModelFileError(ConfigurationError):
    """A model file is missing, damaged or not supported by the local engine; the message gives a remedy."""


class DiskFullError(ModelFileError):
    """The disk is full, or too full for the next step."""
