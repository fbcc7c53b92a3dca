"""LMSP 1.0 (draft), the Local Model Service Protocol, as a second dialect over the same kit: `LMSP`.

The source is one chapter of the draft, "Responses and streaming". What is inferred beyond its shapes
stands in `inferred`.
"""

from .endpoints import LMSP

__all__ = ["LMSP"]
