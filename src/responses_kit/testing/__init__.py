"""Test support for your app: a scripted backend and the contract of response stores."""

from .scripted import Pause, ScriptedBackend
from .store_contract import STORE_CONTRACT

__all__ = ["STORE_CONTRACT", "Pause", "ScriptedBackend"]
