"""responses-kit adds the Open Responses API to an app that exists already.

Subclass `Backend`, put it into a `ResponsesKit`, mount the kit with an integration.
"""

from . import errors, outputs
from .backend import Backend, Model
from .kit import ResponsesKit
from .tools import HostedTool
from .turn import Turn

__all__ = ["Backend", "HostedTool", "Model", "ResponsesKit", "Turn", "errors", "outputs"]

__version__ = "0.1.0"
