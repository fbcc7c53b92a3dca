"""What you test your own app with: a backend that plays a script."""

from .scripted import Pause, ScriptedBackend

__all__ = ["Pause", "ScriptedBackend"]
