"""Hosted tools, and the loop in which the kit runs them."""

from .execution import HostedCall, answer
from .hosted import HostedTool, Toolset

__all__ = ["HostedCall", "HostedTool", "Toolset", "answer"]
