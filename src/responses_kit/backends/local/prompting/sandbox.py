"""A sandbox for chat templates, which are untrusted programs.

Jinja's sandbox prevents access to Python. It does not limit time and memory, so this one counts loop iterations and
calls, and checks the size of each result before an operation creates it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["BUDGET_KEY", "MAX_OUTPUT_LENGTH", "ConversationRejectedError", "RenderBudget", "Sandbox"]

BUDGET_KEY = "the budget"
"""The context variable with a rendering's `RenderBudget`. It is no valid name in Jinja, so templates cannot use it."""

MAX_OUTPUT_LENGTH = 16_000_000
"""The maximum length of a string or sequence that a template creates, and of its output."""

RENDER_TIMEOUT = 3.0
"""Seconds after which a rendering fails."""

MAX_STEPS = 1_000_000
"""Loop iterations and calls after which a rendering fails."""

MAX_RANGE_LENGTH = 10_000
"""The maximum length of a `range`."""

_FILTERS = """
    abs attr bool capitalize count d default dictsort e escape first float groupby int items last length list lower map
    max min reject rejectattr reverse round safe select selectattr sort string title trim truncate unique upper
"""
_TEXT_METHODS = """
    capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace isupper join lower lstrip
    partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper
"""
_METHODS = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset[str](),
    float: frozenset[str](),
}
"""The attributes of plain values that templates may use. For Jinja's objects, Jinja's own sandbox decides."""


class ConversationRejectedError(Exception):
    """The template does not accept the conversation: it called `raise_exception`."""


class RenderBudget:
    """The remaining steps and time of one rendering."""

    def __init__(self) -> None:
        self._remaining_steps = MAX_STEPS
        self._deadline = time.monotonic() + RENDER_TIMEOUT

    def count_step(self) -> None:
        """Count a loop iteration or a call.

        Raises:
            SecurityError: The steps or the time are used up.
        """
        self._remaining_steps -= 1
        if self._remaining_steps < 0 or time.monotonic() > self._deadline:
            raise SecurityError("the template takes too long")


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment for which models' authors write chat templates, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        allowed = {name: self.filters[name] for name in _FILTERS.split() if name in self.filters}
        self.filters = allowed | {
            "counted": _count_iterations,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "tojson": _tojson,
        }
        self.globals.pop("lipsum", None)
        self.globals |= {"range": _range, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a macro or a block."""
        return _join(list(parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _BudgetTransformer().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]  # it returns the node it is called on

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute; see `_METHODS`."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Jinja's own parameter names, which no keyword argument in a template can equal.
        __context[BUDGET_KEY].count_step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ == "join":
            return _join(args[0], text)
        if isinstance(text, str) and __obj.__name__ == "replace":
            return _replace(text, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator if its result is not too large."""
        context[BUDGET_KEY].count_step()
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for value, factor in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(factor, int):
                    _check_size(len(value) * factor)
                elif isinstance(value, int) and isinstance(factor, int):
                    _check_size(value.bit_length() * 1000)
        elif operator == "**" and not (abs(left) <= 1e6 and abs(right) <= 32):
            raise SecurityError("the template computes too large a number")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the template formats a string with %")
        return super().call_binop(context, operator, left, right)


class _BudgetTransformer(NodeTransformer):
    """Rewrites a parsed template so that loops are counted and `~` is a call of `join`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_LENGTH:
        raise SecurityError("the template creates too large a value")


@jinja2.pass_context
def _count_iterations(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = context[BUDGET_KEY]
    for value in values:
        budget.count_step()
        yield value


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(value if attribute is None else value[attribute]) for value in values]
    _check_size(sum(map(len, texts)) + len(texts) * len(separator))
    return str(separator).join(texts)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    _check_size(len(text) + width * (text.count("\n") + 1))
    lines = text.split("\n")
    return "\n".join(
        line if (index == 0 and not first) or (not line and not blank) else " " * width + line
        for index, line in enumerate(lines)
    )


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Return a value as JSON, not escaped for HTML and with its keys in the given order."""
    supported = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=min(indent, 8) if indent else indent, **supported)


def _range(*limits: int) -> range:
    numbers = range(*limits)
    if len(numbers) > MAX_RANGE_LENGTH:
        raise SecurityError("the template creates too long a range")
    return numbers


def _raise_exception(message: str = "") -> NoReturn:
    raise ConversationRejectedError


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
