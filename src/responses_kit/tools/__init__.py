"""Hosted tools, and the execution of their calls."""

from .execution import HostedCall, run_hosted_calls
from .hosted import HostedTool, Toolset

__all__ = ["HostedCall", "HostedTool", "Toolset", "run_hosted_calls"]
