"""A client's JSON schemas, in the form in which a grammar holds a model to them.

What a schema leaves open is narrowed where nobody misses it, for a small model that may go on does go on: no whitespace
but one space behind commas and colons; no members but those that an object's `properties` name, unless
`additionalProperties` invites them; numbers of ordinary size. Whatever is valid to the narrower form is valid to the
schema.
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

__all__ = ["expressed"]

MAX_LENGTH = 400_000
"""Characters of a schema's JSON."""

MAX_DEPTH = 50
"""Schemas inside schemas; llguidance's own bound is a little higher."""

MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, in units of its last digit: the grammar has as many states, and no bound of its own on them."""

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "not", "if", "then", "else"),
)

_FORMATS = frozenset({"ipv4", "ipv6", "uuid", "uri"})
"""Those that llguidance enforces and that need no more; what is not known is the annotation that JSON Schema says."""

_NARROWER = dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), "uri")
_NARROWER |= {"idn-email": "email", "idn-hostname": "hostname"}
"""Formats that llguidance does not know, and one whose values are all valid to them."""

_MONTH_AND_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE = rf"[12]\d{{3}}-{_MONTH_AND_DAY}"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_PATTERNS = {
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
"""Formats of which llguidance allows too much, or knows nothing. Leap days and leap seconds come in no answer."""

_BOUND = 10**15
"""Size of a number whose schema sets no bound; all whole ones up to it survive as floats."""

_COMPOSING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_OF_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties"),
)
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_PROBLEMS = {
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
"""Patterns in llguidance's messages, and the keyword that each is about; none where the pattern captures it.

Its messages repeat what the client sent, so nothing else of them is passed on.
"""


class _UnfitError(Exception):
    """A schema that no grammar is made of; holds the keyword at fault."""


def expressed(schema: Mapping[str, Any], *, exactly: bool, param: str, problem: Callable[[str], str]) -> str:
    """A term of a grammar that allows exactly what a schema allows, or less.

    Args:
        schema: The client's schema.
        exactly: Refuse what the grammar cannot express. Otherwise such keywords are left out, for that is all that a
            function without `strict` promises.
        param: The field that holds the schema, for errors.
        problem: Says what is wrong with a grammar, in llguidance's words; nothing where it works.

    Raises:
        UnsupportedParameter: The schema is malformed, too large, beyond what a grammar can express, or satisfied by
            nothing. The message names the keyword.
    """
    try:
        fitted = _fitted(schema)
        while True:
            term = "%json " + json.dumps({**fitted, "x-guidance": {**_LAYOUT, "lenient": not exactly}})
            found = problem(f"start: {term}") if _countable(fitted) else "multipleOf"
            if not found:
                return term
            keyword = _keyword(found)
            if exactly or not _dropped(fitted, keyword):
                raise _UnfitError(keyword)
    except _UnfitError as unfit:
        (keyword,) = unfit.args
        raise UnsupportedParameter(_refusal(keyword), param=param) from None


def _refusal(keyword: str) -> str:
    if not keyword:
        return "No value satisfies the schema, or it is too complex to hold a model to. Simplify it."
    if keyword.isalnum() or keyword.startswith("$"):
        return f"The schema uses `{keyword}` in a way that a model cannot be held to. Leave it out or say it otherwise."
    return f"The schema is {keyword}. Simplify it."


def _keyword(found: str) -> str:
    for pattern, keyword in _PROBLEMS.items():
        if match := re.search(pattern, found):
            return keyword or match[1]
    return "too large" if "too large" in found else ""


def _dropped(schema: dict[str, Any], keyword: str) -> bool:
    """Takes a keyword, and what belongs to it, out of a schema; whether it stood anywhere. Structure stays."""
    if keyword in ("type", "properties", "$ref"):
        return False
    group = next((group for group in (_OF_NUMBERS, ("minProperties", "maxProperties")) if keyword in group), (keyword,))
    held = [node for node in _each(schema) if any(one in node for one in group)]
    for node in held:
        for one in group:
            node.pop(one, None)
    return bool(held)


def _fitted(schema: Mapping[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > MAX_LENGTH:
        raise _UnfitError("too large")
    fitted = copy.deepcopy(dict(schema))
    nodes = list(_each(fitted))
    composed = any(_composed(node) for node in nodes)
    for node in nodes:
        node.pop("x-guidance", None)
        if "format" in node:
            _set_format(node)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if isinstance(node.get("oneOf"), list) and "anyOf" not in node and _told_apart(node, fitted):
            node["anyOf"] = node.pop("oneOf")
    if not composed:
        for node in nodes:
            _close(node)
            _bound(node)
    return fitted


def _each(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself included."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        raise _UnfitError("nested too deeply")
    yield schema
    for key, value in schema.items():
        inner: Any = ()
        if isinstance(value, dict):
            inner = value.values() if key in _MAPS else (value,) if key in _SINGLES else ()
        elif isinstance(value, list) and key in _LISTS:
            inner = value
        for child in inner:
            yield from _each(child, depth + 1)


def _composed(node: dict[str, Any]) -> bool:
    """Whether several schemas may have a say in one value, so that none of them can be narrowed by itself."""
    if "allOf" in node or "if" in node or "dependentSchemas" in node:
        return True
    return any(key in node for key in _COMPOSING) and any(key in node for key in (*_OF_OBJECTS, *_OF_NUMBERS))


def _close(node: dict[str, Any]) -> None:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    if any(key in node for key in (*_COMPOSING, *_OF_OBJECTS) if key not in ("properties", "required")):
        return
    if all(isinstance(name, str) and name in properties for name in required):
        node["additionalProperties"] = False


def _bound(node: dict[str, Any]) -> None:
    if not _types(node) & {"number"} or "enum" in node or "const" in node:
        return
    limits = {key: node[key] for key in _OF_NUMBERS[:4] if key in node}
    if any(
        isinstance(limit, bool) or not isinstance(limit, int | float) or abs(limit) > _BOUND
        for limit in limits.values()
    ):
        return
    if "minimum" not in limits and "exclusiveMinimum" not in limits:
        node["minimum"] = -_BOUND
    if "maximum" not in limits and "exclusiveMaximum" not in limits:
        node["maximum"] = _BOUND


def _set_format(node: dict[str, Any]) -> None:
    name = node.pop("format")
    if not isinstance(name, str) or "enum" in node or "const" in node:  # which say more
        return
    name = _NARROWER.get(name, name)
    if name in _FORMATS:
        node["format"] = name
    elif name in _PATTERNS and "pattern" not in node:
        node["pattern"] = _PATTERNS[name]
    elif name in _PATTERNS and isinstance(node.get("allOf", []), list):
        node["allOf"] = [*node.get("allOf", []), {"pattern": _PATTERNS[name]}]


def _countable(schema: dict[str, Any]) -> bool:
    """Whether every `multipleOf`, and all of them together where they may meet in one number, is within bounds."""
    nodes = list(_each(schema))
    values = [node["multipleOf"] for node in nodes if isinstance(node.get("multipleOf"), int | float)]
    decimals = [Decimal(repr(value)).normalize().as_tuple() for value in values if value and math.isfinite(value)]
    parts = [(int("".join(map(str, decimal.digits))), int(decimal.exponent)) for decimal in decimals]
    if len(parts) < len(values) or any(abs(exponent) > 6 for _, exponent in parts):
        return False
    least = min((exponent for _, exponent in parts), default=0)
    whole = [digits * 10 ** max(0, exponent) for digits, exponent in parts]
    if any(_composed(node) for node in nodes):
        whole.append(math.lcm(*(digits * 10 ** (exponent - least) for digits, exponent in parts)))
    return max(whole, default=0) <= MAX_MULTIPLE


def _told_apart(node: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether no value fits two branches of `oneOf`, so that `anyOf` says the same.

    Where a member tells objects apart, as the `discriminator` of a union does, it becomes required in each.
    """
    branches = [_target(branch, root) for branch in node["oneOf"]]
    if not all(isinstance(branch, dict) for branch in branches) or len(branches) > 100:
        return False
    telling: list[tuple[dict[str, Any], str]] = []
    for one, other in combinations(branches, 2):
        if not (_types(one) and _types(other)):
            return False
        if not _types(one) & _types(other):
            continue
        name = next((name for name in _values(one) if _differ(one, other, name)), None)
        if name is None or _types(one) != {"object"} or _types(other) != {"object"}:
            return False
        telling += [(one, name), (other, name)]
    for branch, name in telling:
        required = branch.setdefault("required", [])
        if not isinstance(required, list):
            return False
        if name not in required:
            required.append(name)
    return True


def _target(schema: Any, root: dict[str, Any]) -> Any:
    """What a schema that is only a reference refers to."""
    for _ in range(8):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/")):
            return schema
        found: Any = root
        for step in schema["$ref"][2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return None


def _types(schema: dict[str, Any]) -> set[str]:
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    names = {name for name in listed if isinstance(name, str)}
    return {"number" if name == "integer" else name for name in names}


def _values(schema: dict[str, Any]) -> dict[str, set[str]]:
    """Members whose values are listed, and the values."""
    listed: dict[str, set[str]] = {}
    properties = schema.get("properties")
    for name, member in properties.items() if isinstance(properties, dict) else ():
        values = (
            member.get("enum", [member["const"]] if "const" in member else None) if isinstance(member, dict) else None
        )
        if isinstance(values, list):
            listed[name] = {json.dumps(value, sort_keys=True) for value in values}
    return listed


def _differ(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    mine, others = _values(one).get(name), _values(other).get(name)
    return mine is not None and others is not None and not mine & others
