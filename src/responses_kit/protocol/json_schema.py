"""JSON schemas of strangers: compiled without reaching for the network, and judged in bounded time.

Clients bring schemas for the answer and for their functions, hosted tools bring them for their arguments. A schema is
a program of a sort, and a small one can ask for more work than there is time: references are counted as they are
followed, patterns run with a limit on backtracking, and nothing is fetched.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import jsonschema_rs
from pydantic_core import from_json

from ..errors import InvalidRequest
from ..schema.base import replace_surrogates

__all__ = ["Fault", "Schema"]

_PATTERNS: Final = jsonschema_rs.RegexOptions(size_limit=2**20, dfa_size_limit=2**20)
"""An engine whose time is linear in the text; the price is that it knows no lookaround and no backreferences."""

_MOST_KEYWORDS: Final = 20_000
_MOST_WORK: Final = 20_000_000
"""Keywords that one judgement may look at by following references, and a tenth of what it may look at in all."""
_MOST_REFERENCES: Final = 50_000
_WORK_TOLD: Final = 1_000_000
"""Work up to which it is found out what is wrong, which costs far more than to see that something is."""
_MOST_UNEVALUATED: Final = 8
_FINEST: Final = 1e-9
_HUGE: Final = re.compile(r"\d{300}")
_WEIGHTS: Final = {"pattern": 50, "patternProperties": 50, "multipleOf": 50}

_COUNTED: Final = "responses-kit:counted"
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_NOTES: Final = frozenset({"$comment", "default", "description", "examples", "title"})
_VALUES: Final = frozenset({"const", "enum"})
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_NAMES: Final = _DEFINITIONS | {
    "$vocabulary",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
"""Keywords whose members have names of the author's own choice."""


class Fault(NamedTuple):
    """Where a text does not do as its schema says.

    Attributes:
        keyword: The keyword that it breaks, or "json" where it is none. Fit for logs.
        message: What is wrong and where, in words that quote the text. For the one who wrote it.
    """

    keyword: str
    message: str


class Schema:
    """A compiled schema; thread-safe.

    Formats that are known are asserted, others are notes. The draft is that of `$schema`, draft 7 or newer, or else
    the newest.

    Args:
        schema: The schema as JSON values.

    Attributes:
        weight: How large it is: about the number of its keywords.

    Raises:
        ValueError: It is no valid schema; the message says so in words that fit behind "The schema".
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        draft = str(schema.get("$schema", "")).rstrip("#")
        if draft.endswith(("/draft-04/schema", "/draft-06/schema")):
            raise ValueError("is of a draft that is too old at `$schema`: draft 7 or newer is understood.")
        self._count = count = _Count()
        reader = _Reader(alone=draft.endswith("/draft-07/schema"))
        try:
            counted = reader.read(schema)
        except RecursionError:
            raise ValueError("is nested too deeply.") from None
        self.weight = reader.weight
        if self.weight > _MOST_KEYWORDS:
            raise ValueError("is too large.")
        if reader.unevaluated > _MOST_UNEVALUATED:
            raise ValueError("nests `unevaluatedProperties` or `unevaluatedItems` too deeply.")
        self._work = self.weight * 4**reader.unevaluated
        self._divides = reader.divides
        self._most = min(_MOST_REFERENCES, _MOST_WORK // self.weight)

        class Counted:
            def __init__(self, parent: Any, value: Any, path: Any) -> None:
                """What the library wants to call."""

            def validate(self, instance: Any) -> None:
                count.left -= 1
                if count.left < 0:
                    raise ValueError("too many references")

        try:
            self._validator = jsonschema_rs.validator_for(
                counted,
                retriever=_refuse,
                validate_formats=True,
                pattern_options=_PATTERNS,
                keywords={_COUNTED: Counted},
            )
        except jsonschema_rs.ValidationError as error:
            # What it says quotes the schema; the keyword alone is no payload.
            path = error.instance_path
            named = [step for before, step in pairwise(["", *path]) if isinstance(step, str) and before not in _NAMES]
            raise ValueError(
                f"is not valid at `{named[-1]}`." if named else "is not valid, or refers to what is not in it."
            ) from None
        except ValueError:
            raise ValueError("is nested too deeply.") from None

    def fault(self, text: str) -> Fault | None:
        """What is wrong with a JSON text, or None.

        Raises:
            InvalidRequest: To find out would take too long: the schema is to blame.
        """
        try:
            value = from_json(replace_surrogates(text), allow_inf_nan=False)
        except ValueError as error:
            return Fault("json", f"not valid JSON: {error}")
        work = len(text) * self._work
        self._count.left = self._most
        too_much = work > 10 * _MOST_WORK or (self._divides and _HUGE.search(text) is not None)
        valid = too_much or self._validator.is_valid(value)
        if too_much or self._count.left < 0:
            raise InvalidRequest("The JSON schema takes too much work. Use a simpler one.", code="invalid_schema")
        return None if valid else self._told(value) if work < _WORK_TOLD else _MUTE

    def _told(self, value: Any) -> Fault:
        self._count.left = min(self._most, _WORK_TOLD // self.weight // 10)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            if self._count.left >= 0:
                path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
                return Fault(error.kind.name, f"{path.removeprefix('.') or 'it'}: {error.message}"[:500])
        return _MUTE


_MUTE: Final = Fault("schema", "it: not what the schema allows")


class _Count(threading.local):
    left = 0


class _Reader:
    """Reads a schema, and puts each reference behind a count: it is followed only while there are some left.

    Args:
        alone: What stands beside a reference does not count, as in draft 7.

    Attributes:
        weight: How much there is to judge by, in keywords.
        unevaluated: How deep it nests keywords that ask what the others have not looked at; each multiplies the work.
        divides: It asks for multiples.

    Raises:
        ValueError: What it asks for is not understood here.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self.weight = 1
        self.unevaluated = 0
        self._depth = 0
        self.divides = False

    def read(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.read(member) for member in schema]
        if not isinstance(schema, Mapping):
            return schema
        references = [
            {"if": {_COUNTED: True}, "then": {key: _plain(schema[key])}, "else": False}
            for key in _REFERENCES
            if isinstance(schema.get(key), str)
        ]
        counted: dict[str, Any] = {}
        asks = not schema.keys().isdisjoint(("unevaluatedProperties", "unevaluatedItems"))
        self._depth += asks
        self.unevaluated = max(self.unevaluated, self._depth)
        for key, value in schema.items():
            if key in _NOTES or (key in _REFERENCES and references):
                continue
            if references and self._alone and key not in _DEFINITIONS | {"$id", "$schema"}:
                continue
            self._weigh(key, value)
            if key in _NAMES and isinstance(value, Mapping):
                counted[key] = {name: self.read(member) for name, member in value.items()}
            else:
                counted[key] = value if key in _VALUES else self.read(value)
        self._depth -= asks
        if references:
            known = counted.get("allOf")
            counted["allOf"] = [*(known if isinstance(known, list) else ()), *references]
        return counted

    def _weigh(self, key: str, value: Any) -> None:
        number = len(value) if isinstance(value, Mapping | list) else 1
        self.weight += _WEIGHTS.get(key, 1) * (_size(value) if key in _VALUES else number)
        if key == "multipleOf" and isinstance(value, int | float):
            self.divides = True
            if 0 < value < _FINEST:
                raise ValueError("asks for what is too fine at `multipleOf`.")


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def _plain(reference: str) -> str:
    """The reference, if it does not lead into values or notes: what stands there was not read."""
    steps = unquote(reference.partition("#")[2]).split("/")
    if any(step in _VALUES | _NOTES and before not in _NAMES for before, step in pairwise(steps)):
        raise ValueError("refers to what is no schema at `$ref`.")
    return reference


def _refuse(address: str) -> Any:
    raise ValueError("schemas are not fetched")
