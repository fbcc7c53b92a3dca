"""Where chat templates run: they are programs of strangers.

Jinja's sandbox keeps a template from reaching Python. What it leaves open is to run for ever and to fill the memory, so
here loops and calls are counted, and the steps by which a string or list can grow are looked at before they are taken.
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

__all__ = ["BUDGET", "LIMIT", "Budget", "RefusedError", "Sandbox"]

BUDGET = "the budget"
"""Name under which a rendering is given its `Budget`. It is no name in Jinja: no template can reach or replace it."""

LIMIT = 16_000_000
"""Characters or members of anything that a template builds."""

SECONDS = 3.0
STEPS = 1_000_000
LONGEST_RANGE = 10_000

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
"""What templates may reach for in plain values; in Jinja's own objects it is what its sandbox allows."""


class RefusedError(Exception):
    """The template called `raise_exception`: it does not accept the conversation."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps = STEPS
        self._deadline = time.monotonic() + SECONDS

    def step(self) -> None:
        """Counts a turn of a loop or a call.

        Raises:
            SecurityError: There were too many, or the time is up.
        """
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise SecurityError("the template runs for too long")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that model makers write chat templates for, with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        allowed = {name: self.filters[name] for name in _FILTERS.split() if name in self.filters}
        self.filters = allowed | {
            "counted": _counted,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "tojson": _tojson,
        }
        self.globals.pop("lipsum", None)
        self.globals |= {"range": _range, "raise_exception": _refuse, "strftime_now": _strftime_now}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a macro or a block puts out."""
        return _join(list(parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]  # it returns the node it is called on

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may reach for this; see `_METHODS`."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The odd names are Jinja's: whatever a template names its keyword arguments, they do not clash.
        __context[BUDGET].step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ == "join":
            return _join(args[0], text)
        if isinstance(text, str) and __obj.__name__ == "replace":
            return _replace(text, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Does what may grow without bound only after a look at how far."""
        context[BUDGET].step()
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int):
                    _check(len(many) * times)
                elif isinstance(many, int) and isinstance(times, int):
                    _check(many.bit_length() * 1000)
        elif operator == "**" and not (abs(left) <= 1e6 and abs(right) <= 32):
            raise SecurityError("the template computes too large a number")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the template formats a string with %")
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Rewrites a parsed template so that loops are counted and `~` goes through `join`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


def _check(size: int) -> None:
    if size > LIMIT:
        raise SecurityError("the template builds too much")


@jinja2.pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = context[BUDGET]
    for value in values:
        budget.step()
        yield value


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(value if attribute is None else value[attribute]) for value in values]
    _check(sum(map(len, texts)) + len(texts) * len(separator))
    return str(separator).join(texts)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _check(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    _check(len(text) + width * (text.count("\n") + 1))
    lines = text.split("\n")
    return "\n".join(
        line if (index == 0 and not first) or (not line and not blank) else " " * width + line
        for index, line in enumerate(lines)
    )


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as model makers' templates expect it: not escaped for HTML, in the order given."""
    kept = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=min(indent, 8) if indent else indent, **kept)


def _range(*limits: int) -> range:
    numbers = range(*limits)
    if len(numbers) > LONGEST_RANGE:
        raise SecurityError("the template counts too far")
    return numbers


def _refuse(message: str = "") -> NoReturn:
    raise RefusedError


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
