"""The Local Model Service Protocol (LMSP) 1.0 (draft) over the same kit: `LMSP`.

The source is one chapter of the draft, "Responses and streaming". The module `assumptions` holds everything that this
chapter does not define.
"""

from .endpoints import LMSP

__all__ = ["LMSP"]
