"""responses-kit adds the Open Responses API to an existing app.

Subclass `Backend`, put it into a `ResponsesKit`, and mount the kit with an integration.
"""

from typing import TYPE_CHECKING

from . import errors, outputs
from ._exports import lazy_exports
from .errors import APIError

if TYPE_CHECKING:
    from .backend import Backend, Model
    from .http.lmsp import LMSP
    from .kit import Limits, ResponsesKit, Timeouts
    from .stores import MemoryStore, open_store
    from .tools import HostedTool
    from .turn import Turn
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Backend": ".backend",
            "HostedTool": ".tools",
            "LMSP": ".http.lmsp",
            "Limits": ".kit",
            "MemoryStore": ".stores",
            "Model": ".backend",
            "ResponsesKit": ".kit",
            "Timeouts": ".kit",
            "Turn": ".turn",
            "open_store": ".stores",
        },
    )

__all__ = [
    "LMSP",
    "APIError",
    "Backend",
    "HostedTool",
    "Limits",
    "MemoryStore",
    "Model",
    "ResponsesKit",
    "Timeouts",
    "Turn",
    "errors",
    "open_store",
    "outputs",
]

__version__ = "0.1.0"
