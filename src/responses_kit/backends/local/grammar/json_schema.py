"""Translation of a client's JSON schemas to grammars.

Some freedom that a schema leaves is removed, because a small model may otherwise never finish: no whitespace except
one space after commas and colons; no members beyond those in `properties`, unless `additionalProperties` allows them;
numbers of ordinary size. A value that is valid for the narrower schema is always valid for the client's schema.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from ....errors import UnsupportedParameter

__all__ = ["schema_to_grammar"]

MAX_SCHEMA_LENGTH = 400_000
"""Characters of a schema's JSON above which it is refused."""

MAX_SCHEMA_DEPTH = 50
"""The maximum nesting of schemas; llguidance's own limit is slightly higher."""

MAX_MULTIPLE_OF = 10_000
"""The largest `multipleOf`, in units of its last digit; a grammar has as many states, and llguidance sets no limit."""

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "not", "if", "then", "else"),
)

_ENFORCED_FORMATS = frozenset({"ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces. JSON Schema treats unknown formats as annotations, so they are ignored."""

_NARROWER_FORMATS = dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), "uri")
_NARROWER_FORMATS |= {"idn-email": "email", "idn-hostname": "hostname"}
"""Formats that llguidance does not know, each with a format of which all values are valid for it."""

_MONTH_AND_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE = rf"[12]\d{{3}}-{_MONTH_AND_DAY}"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[\w+-]{1,30}(?:\.[\w+-]{1,30})?@(?:[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?\.){1,3}[a-z]{2,20}$",
    "hostname": r"^(?:[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?\.){0,3}[a-z]{2,20}$",
    "duration": r"^P(?:\d{1,3}W|\d{1,3}[YMD]|\d{1,3}DT\d{1,2}H|T\d{1,3}[HMS]|T\d{1,3}H\d{1,2}M)$",
    "json-pointer": r"^(?:/\w+)*$",
    "relative-json-pointer": r"^(?:0|[1-9]\d{0,8})(?:/\w+)*$",
    "regex": r"^[\w ]*$",
}
"""Patterns for formats that llguidance does not know or enforce completely, without leap days and leap seconds."""

_DEFAULT_BOUND = 10**15
"""The absolute limit of numbers without bounds in their schema; floats represent all integers up to it exactly."""

_COMPOSING_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_OBJECT_KEYWORDS = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties"),
)
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_KEYWORDS_BY_MESSAGE = {
    r"Unimplemented keys: \[\"(\$?\w+)\"": "",
    r"oneOf constraints": "oneOf",
    r"regex parse error|Unable to determine if regex|too many expressions|lexer error|Lexer": "pattern",
    r"patternProperty regexes": "patternProperties",
    r"min/maxProperties": "minProperties",
    r"regex for (?:integer|float) range": "minimum",
    r"[Mm]ultiple": "multipleOf",
    r"circular ref|not present in a registry|Pointer|Reference|\bURI\b|\banchor\b|Definition not found": "$ref",
    r"Invalid type|type must": "type",
    r"for '(\w+)'(?: item)?, got": "",
    r"JSON schema: (\w+) must be": "",
}
"""Patterns for llguidance's error messages, with the keyword at fault; empty if the pattern captures the keyword.

The messages quote the client's schema, so only the keyword is used.
"""


class _UnsupportedKeywordError(Exception):
    """A grammar cannot express a schema; the argument is the keyword at fault, or a description of the problem."""


def schema_to_grammar(
    schema: Mapping[str, Any], *, strict: bool, param: str, find_problem: Callable[[str], str]
) -> str:
    """Return a grammar's term for values that are valid for a schema.

    Args:
        schema: The client's schema.
        strict: Whether to refuse a schema that the grammar cannot express. Otherwise unsupported keywords are ignored,
            as the API permits for functions without `strict`.
        param: The request's parameter that contains the schema, for errors.
        find_problem: Returns llguidance's error message about a grammar, or an empty string if the grammar is valid.

    Raises:
        UnsupportedParameter: The schema is malformed, too large, not satisfiable, or beyond the abilities of a grammar.
            The message names the keyword.
    """
    try:
        narrowed = _narrow(schema)
        while True:
            term = "%json " + json.dumps({**narrowed, "x-guidance": {**_LAYOUT, "lenient": not strict}})
            problem = find_problem(f"start: {term}") if _has_small_multiples(narrowed) else "multipleOf"
            if not problem:
                return term
            keyword = _find_keyword(problem)
            if strict or not _remove_keyword(narrowed, keyword):
                raise _UnsupportedKeywordError(keyword)
    except _UnsupportedKeywordError as error:
        (keyword,) = error.args
        raise UnsupportedParameter(_error_message(param, keyword), param=param) from None


def _error_message(param: str, keyword: str) -> str:
    if not keyword:
        return f"'{param}' is a schema that no value satisfies, or that is too complex to enforce. Simplify it."
    if keyword.isalnum() or keyword.startswith("$"):
        return f"'{param}' uses the keyword `{keyword}` in a way that cannot be enforced. Remove or replace it."
    return f"'{param}' is a schema that is {keyword}. Simplify it."


def _find_keyword(problem: str) -> str:
    for pattern, keyword in _KEYWORDS_BY_MESSAGE.items():
        if match := re.search(pattern, problem):
            return keyword or match[1]
    return "too large" if "too large" in problem else ""


def _remove_keyword(schema: dict[str, Any], keyword: str) -> bool:
    """Remove a keyword and related ones from a schema, unless they define its structure.

    Returns:
        Whether the schema contained one of them.
    """
    if keyword in ("type", "properties", "$ref"):
        return False
    groups = (_NUMBER_KEYWORDS, ("minProperties", "maxProperties"))
    group = next((group for group in groups if keyword in group), (keyword,))
    affected = [node for node in _iter_schemas(schema) if any(name in node for name in group)]
    for node in affected:
        for name in group:
            node.pop(name, None)
    return bool(affected)


def _narrow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a narrower copy of a schema, with only formats that llguidance enforces."""
    if len(json.dumps(schema)) > MAX_SCHEMA_LENGTH:
        raise _UnsupportedKeywordError("too large")
    narrowed = copy.deepcopy(dict(schema))
    nodes = list(_iter_schemas(narrowed))
    is_composed = any(_is_composed(node) for node in nodes)
    for node in nodes:
        node.pop("x-guidance", None)
        if "format" in node:
            _replace_format(node)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if isinstance(node.get("oneOf"), list) and "anyOf" not in node and _make_branches_disjoint(node, narrowed):
            node["anyOf"] = node.pop("oneOf")
    if not is_composed:
        for node in nodes:
            _close_object(node)
            _bound_number(node)
    return narrowed


def _iter_schemas(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_SCHEMA_DEPTH:
        raise _UnsupportedKeywordError("nested too deeply")
    yield schema
    for key, value in schema.items():
        inner: Any = ()
        if isinstance(value, dict):
            inner = value.values() if key in _MAPS_OF_SCHEMAS else (value,) if key in _SINGLE_SCHEMAS else ()
        elif isinstance(value, list) and key in _LISTS_OF_SCHEMAS:
            inner = value
        for child in inner:
            yield from _iter_schemas(child, depth + 1)


def _is_composed(node: dict[str, Any]) -> bool:
    """Return whether several schemas may apply to one value, so that none of them can be narrowed on its own."""
    if "allOf" in node or "if" in node or "dependentSchemas" in node:
        return True
    return any(key in node for key in _COMPOSING_KEYWORDS) and any(
        key in node for key in (*_OBJECT_KEYWORDS, *_NUMBER_KEYWORDS)
    )


def _close_object(node: dict[str, Any]) -> None:
    """Forbid members that are not in `properties`, unless the schema says otherwise."""
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    if any(key in node for key in (*_COMPOSING_KEYWORDS, *_OBJECT_KEYWORDS) if key not in ("properties", "required")):
        return
    if all(isinstance(name, str) and name in properties for name in required):
        node["additionalProperties"] = False


def _bound_number(node: dict[str, Any]) -> None:
    """Set bounds for a number without them."""
    if not _get_types(node) & {"number"} or "enum" in node or "const" in node:
        return
    limits = {key: node[key] for key in _NUMBER_KEYWORDS[:4] if key in node}
    if any(
        isinstance(limit, bool) or not isinstance(limit, int | float) or abs(limit) > _DEFAULT_BOUND
        for limit in limits.values()
    ):
        return
    if "minimum" not in limits and "exclusiveMinimum" not in limits:
        node["minimum"] = -_DEFAULT_BOUND
    if "maximum" not in limits and "exclusiveMaximum" not in limits:
        node["maximum"] = _DEFAULT_BOUND


def _replace_format(node: dict[str, Any]) -> None:
    """Replace a format by one that llguidance enforces, or by a pattern, or remove it."""
    name = node.pop("format")
    if not isinstance(name, str) or "enum" in node or "const" in node:  # stricter than the format
        return
    name = _NARROWER_FORMATS.get(name, name)
    if name in _ENFORCED_FORMATS:
        node["format"] = name
    elif name in _FORMAT_PATTERNS and "pattern" not in node:
        node["pattern"] = _FORMAT_PATTERNS[name]
    elif name in _FORMAT_PATTERNS and isinstance(node.get("allOf", []), list):
        node["allOf"] = [*node.get("allOf", []), {"pattern": _FORMAT_PATTERNS[name]}]


def _has_small_multiples(schema: dict[str, Any]) -> bool:
    """Return whether each `multipleOf`, and the common multiple of those that may apply to one number, is small."""
    nodes = list(_iter_schemas(schema))
    values = [node["multipleOf"] for node in nodes if type(node.get("multipleOf")) in (int, float)]  # not bool
    decimals = [Decimal(repr(value)).normalize().as_tuple() for value in values if value and math.isfinite(value)]
    parts = [(int("".join(map(str, decimal.digits))), int(decimal.exponent)) for decimal in decimals]
    if len(parts) < len(values) or any(abs(exponent) > 6 for _, exponent in parts):
        return False
    least = min((exponent for _, exponent in parts), default=0)
    whole = [digits * 10 ** max(0, exponent) for digits, exponent in parts]
    if any(_is_composed(node) for node in nodes):
        whole.append(math.lcm(*(digits * 10 ** (exponent - least) for digits, exponent in parts)))
    return max(whole, default=0) <= MAX_MULTIPLE_OF


def _make_branches_disjoint(node: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return whether no value is valid for two branches of `oneOf`, so that `anyOf` is equivalent.

    A member that distinguishes objects, such as the `discriminator` of a union, becomes required in each branch.
    """
    branches = [_resolve(branch, root) for branch in node["oneOf"]]
    if not all(isinstance(branch, dict) for branch in branches) or len(branches) > 100:
        return False
    discriminators: list[tuple[dict[str, Any], str]] = []
    for one, other in combinations(branches, 2):
        if not (_get_types(one) and _get_types(other)):
            return False
        if not _get_types(one) & _get_types(other):
            continue
        name = next((name for name in _get_listed_values(one) if _is_discriminator(one, other, name)), None)
        if name is None or _get_types(one) != {"object"} or _get_types(other) != {"object"}:
            return False
        discriminators += [(one, name), (other, name)]
    for branch, name in discriminators:
        required = branch.setdefault("required", [])
        if not isinstance(required, list):
            return False
        if name not in required:
            required.append(name)
    return True


def _resolve(schema: Any, root: dict[str, Any]) -> Any:
    """Return the schema that a reference inside the document points to, or None after too many references."""
    for _ in range(8):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/")):
            return schema
        target: Any = root
        for step in schema["$ref"][2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return None


def _get_types(schema: dict[str, Any]) -> set[str]:
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    names = {name for name in listed if isinstance(name, str)}
    return {"number" if name == "integer" else name for name in names}


def _get_listed_values(schema: dict[str, Any]) -> dict[str, set[str]]:
    """Return the values of each member that lists them in `enum` or `const`, as JSON."""
    listed: dict[str, set[str]] = {}
    properties = schema.get("properties")
    for name, member in properties.items() if isinstance(properties, dict) else ():
        values = (
            member.get("enum", [member["const"]] if "const" in member else None) if isinstance(member, dict) else None
        )
        if isinstance(values, list):
            listed[name] = {json.dumps(value, sort_keys=True) for value in values}
    return listed


def _is_discriminator(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    """Return whether two schemas of objects list values of a member, but none in common."""
    values, other_values = _get_listed_values(one).get(name), _get_listed_values(other).get(name)
    return values is not None and other_values is not None and not values & other_values
