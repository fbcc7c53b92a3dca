"""What you test your own app with: a backend that plays a script, and the contract of every store."""

from .scripted import Pause, ScriptedBackend
from .store_contract import STORE_CONTRACT

__all__ = ["STORE_CONTRACT", "Pause", "ScriptedBackend"]
