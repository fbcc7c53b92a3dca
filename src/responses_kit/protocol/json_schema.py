"""Untrusted JSON schemas, compiled without network access and evaluated in bounded time.

Clients send schemas for the answer and for their functions; hosted tools define them for their arguments. A small
schema can require unbounded work. Therefore followed references are counted, patterns run in linear time, and remote
schemas are not fetched.
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

__all__ = ["Schema", "Violation"]

_PATTERN_OPTIONS: Final = jsonschema_rs.RegexOptions(size_limit=2**20, dfa_size_limit=2**20)
"""Selects the engine with linear time, which supports no lookaround and no backreferences, and bounds its memory."""

_MAX_KEYWORDS: Final = 20_000
"""Weight of the largest schema that is accepted."""
_MAX_WORK: Final = 20_000_000
"""Keywords that one validation may evaluate by following references, and a tenth of its keywords in total."""
_MAX_REFERENCES: Final = 50_000
"""References that one validation may follow."""
_MAX_EXPLAINED_WORK: Final = 1_000_000
"""Work up to which a violation is explained, which costs far more than detecting it."""
_MAX_UNEVALUATED_DEPTH: Final = 8
"""Levels of nested `unevaluated…` keywords; each multiplies the work."""
_MIN_MULTIPLE_OF: Final = 1e-9
_HUGE_NUMBER: Final = re.compile(r"\d{300}")
"""A number with too many digits to divide quickly."""
_WEIGHTS: Final = {"pattern": 50, "patternProperties": 50, "multipleOf": 50}
"""Costs of expensive keywords; any other keyword costs 1."""

_COUNTER_KEYWORD: Final = "responses-kit:counted"
_REFERENCE_KEYWORDS: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ANNOTATION_KEYWORDS: Final = frozenset({"$comment", "default", "description", "examples", "title"})
_VALUE_KEYWORDS: Final = frozenset({"const", "enum"})
_DEFINITION_KEYWORDS: Final = frozenset({"$defs", "definitions"})
_NAMED_MEMBER_KEYWORDS: Final = _DEFINITION_KEYWORDS | {
    "$vocabulary",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
"""Keywords with members that the schema's author names."""


class Violation(NamedTuple):
    """A violation of a schema.

    Attributes:
        keyword: The violated keyword, or "json" if the text is not valid JSON. Contains no payload.
        message: The path and the violation. Quotes the text, so it is for the text's author only.
    """

    keyword: str
    message: str


class Schema:
    """A compiled schema; thread-safe.

    Known formats are asserted, unknown ones ignored. The draft is that of `$schema`, draft 7 or newer, or by default
    the newest.

    Args:
        schema: The schema as JSON values.

    Attributes:
        weight: The schema's size, about the number of its keywords.

    Raises:
        ValueError: The schema is not valid. The message is a predicate to be appended to the schema's name.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        draft = str(schema.get("$schema", "")).rstrip("#")
        if draft.endswith(("/draft-04/schema", "/draft-06/schema")):
            raise ValueError("must use draft 7 or newer in `$schema`.")
        self._budget = budget = _ReferenceBudget()
        instrumenter = _Instrumenter(ignores_siblings=draft.endswith("/draft-07/schema"))
        try:
            instrumented = instrumenter.instrument(schema)
        except RecursionError:
            raise ValueError("is nested too deeply.") from None
        self.weight = instrumenter.weight
        if self.weight > _MAX_KEYWORDS:
            raise ValueError("is too large.")
        if instrumenter.unevaluated_depth > _MAX_UNEVALUATED_DEPTH:
            raise ValueError("nests `unevaluatedProperties` or `unevaluatedItems` too deeply.")
        self._work_per_character = self.weight * 4**instrumenter.unevaluated_depth
        self._has_multiple_of = instrumenter.has_multiple_of
        self._max_references = min(_MAX_REFERENCES, _MAX_WORK // self.weight)

        class CounterKeyword:
            def __init__(self, parent: Any, value: Any, path: Any) -> None:
                """Accept the arguments that jsonschema_rs passes."""

            def validate(self, instance: Any) -> None:
                budget.remaining -= 1
                if budget.remaining < 0:
                    raise ValueError("too many references")

        try:
            self._validator = jsonschema_rs.validator_for(
                instrumented,
                retriever=_refuse_remote_schema,
                validate_formats=True,
                pattern_options=_PATTERN_OPTIONS,
                keywords={_COUNTER_KEYWORD: CounterKeyword},
            )
        except jsonschema_rs.ValidationError as error:
            # The library's message quotes the schema; a keyword is not a payload.
            keywords = [
                step
                for parent, step in pairwise(["", *error.instance_path])
                if isinstance(step, str) and parent not in _NAMED_MEMBER_KEYWORDS
            ]
            raise ValueError(
                f"is not valid at `{keywords[-1]}`." if keywords else "is not valid, or has an unresolved reference."
            ) from None
        except ValueError:
            raise ValueError("is nested too deeply.") from None

    def validate(self, text: str) -> Violation | None:
        """Return the first violation in a JSON text, or None.

        Raises:
            InvalidRequest: Validation would take too long.
        """
        try:
            value = from_json(replace_surrogates(text), allow_inf_nan=False)
        except ValueError as error:
            return Violation("json", f"not valid JSON: {error}")
        work = len(text) * self._work_per_character
        self._budget.remaining = self._max_references
        is_too_complex = work > 10 * _MAX_WORK or (self._has_multiple_of and _HUGE_NUMBER.search(text) is not None)
        is_valid = is_too_complex or self._validator.is_valid(value)
        if is_too_complex or self._budget.remaining < 0:
            raise InvalidRequest("The JSON schema is too complex. Use a simpler one.", code="invalid_schema")
        return None if is_valid else self._explain(value) if work < _MAX_EXPLAINED_WORK else _UNEXPLAINED

    def _explain(self, value: Any) -> Violation:
        self._budget.remaining = min(self._max_references, _MAX_EXPLAINED_WORK // self.weight // 10)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            if self._budget.remaining >= 0:
                path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
                return Violation(error.kind.name, f"{path.removeprefix('.') or 'it'}: {error.message}"[:500])
        return _UNEXPLAINED


_UNEXPLAINED: Final = Violation("schema", "it: does not match the schema")


class _ReferenceBudget(threading.local):
    """References that the current validation may still follow, per thread."""

    remaining = 0


class _Instrumenter:
    """Copies a schema so that each reference is followed only while the reference budget lasts, and measures it.

    Args:
        ignores_siblings: Whether keywords beside a reference are ignored, as in draft 7.

    Attributes:
        weight: The cost of the schema's keywords.
        unevaluated_depth: Levels of nested `unevaluated…` keywords.
        has_multiple_of: Whether `multipleOf` occurs.
    """

    def __init__(self, *, ignores_siblings: bool) -> None:
        self._ignores_siblings = ignores_siblings
        self.weight = 1
        self.unevaluated_depth = 0
        self._depth = 0
        self.has_multiple_of = False

    def instrument(self, schema: Any) -> Any:
        """Return the instrumented copy.

        Raises:
            ValueError: The schema uses an unsupported feature.
        """
        if isinstance(schema, list):
            return [self.instrument(member) for member in schema]
        if not isinstance(schema, Mapping):
            return schema
        references = [
            {"if": {_COUNTER_KEYWORD: True}, "then": {key: _check_reference(schema[key])}, "else": False}
            for key in _REFERENCE_KEYWORDS
            if isinstance(schema.get(key), str)
        ]
        instrumented: dict[str, Any] = {}
        has_unevaluated = not schema.keys().isdisjoint(("unevaluatedProperties", "unevaluatedItems"))
        self._depth += has_unevaluated
        self.unevaluated_depth = max(self.unevaluated_depth, self._depth)
        for key, value in schema.items():
            if key in _ANNOTATION_KEYWORDS or (key in _REFERENCE_KEYWORDS and references):
                continue
            if references and self._ignores_siblings and key not in _DEFINITION_KEYWORDS | {"$id", "$schema"}:
                continue
            self._measure(key, value)
            if key in _NAMED_MEMBER_KEYWORDS and isinstance(value, Mapping):
                instrumented[key] = {name: self.instrument(member) for name, member in value.items()}
            else:
                instrumented[key] = value if key in _VALUE_KEYWORDS else self.instrument(value)
        self._depth -= has_unevaluated
        if references:
            existing = instrumented.get("allOf")
            instrumented["allOf"] = [*(existing if isinstance(existing, list) else ()), *references]
        return instrumented

    def _measure(self, key: str, value: Any) -> None:
        length = len(value) if isinstance(value, Mapping | list) else 1
        self.weight += _WEIGHTS.get(key, 1) * (_count_values(value) if key in _VALUE_KEYWORDS else length)
        if key == "multipleOf" and isinstance(value, int | float):
            self.has_multiple_of = True
            if 0 < value < _MIN_MULTIPLE_OF:
                raise ValueError(f"must not use a `multipleOf` below {_MIN_MULTIPLE_OF}.")


def _count_values(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_count_values, value.values()))
    return 1 + sum(map(_count_values, value)) if isinstance(value, list) else 1


def _check_reference(reference: str) -> str:
    """Return the reference.

    Raises:
        ValueError: The reference points into values or annotations, which are not instrumented.
    """
    steps = unquote(reference.partition("#")[2]).split("/")
    not_schemas = _VALUE_KEYWORDS | _ANNOTATION_KEYWORDS
    if any(step in not_schemas and parent not in _NAMED_MEMBER_KEYWORDS for parent, step in pairwise(steps)):
        raise ValueError("has a `$ref` to a value that is not a schema.")
    return reference


def _refuse_remote_schema(address: str) -> Any:
    raise ValueError("schemas are not fetched")
