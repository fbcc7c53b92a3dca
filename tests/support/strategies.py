"""Hypothesis strategies for backend outputs, legal and illegal, and for JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from responses_kit import outputs

NASTY = [
    "",
    " ",
    "\x00",
    "\r\n",
    "\n\ndata: [DONE]\n\n",
    "event: response.completed",
    "\u2028\u2029\x85\ufeff",
    "\ud83d",
    "\ude00",
    "\ud83d\ude00",
    "\U0001f600\u200d\U0001f525",
    'quote " and \\ backslash \\ud800',
    "e\u0301",
    "x" * 70_000,
]
"""Texts that have broken streams of other servers and clients."""

texts = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(NASTY),
)
"""Any Python string, including lone surrogates."""

garbage = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([10**400, 10**13]),
    st.floats(),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.integers(), st.integers(), max_size=2),
    st.builds(object),
    st.sampled_from([int, outputs.Text, outputs.Finish, ..., print]),
    texts,
)
"""Arbitrary objects, most of them of the wrong type."""

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
"""JSON values as Python objects."""

_tokens = st.builds(
    outputs.LogProb,
    token=texts,
    logprob=st.one_of(st.floats(), st.integers(-100, 0)),
    bytes=st.one_of(st.binary(max_size=4), st.lists(st.integers(0, 255), max_size=4)),
)
logprobs = st.lists(
    st.builds(
        outputs.LogProb,
        token=texts,
        logprob=st.floats(),
        bytes=st.lists(st.integers(0, 255), max_size=4),
        top=st.lists(_tokens, max_size=2),
    ),
    max_size=2,
)

call_ids = st.sampled_from(["a", "b", "c", "\U0001f600", "\ud83d", "x" * 64])
"""A small set, so that values repeat."""

keys = st.sampled_from(["k", "l", "m", "\ud83d", ""])
"""Keys of extension items that start and finish; a small set, so that keys repeat."""

_arguments = st.sampled_from(["", " ", "{}", '{"city": "', 'Paris"}', "[" * 20_000, "\ud83d", '{"a": NaN}'])
_slugs = st.sampled_from(["acme:thing", "acme:web.search/v2", "a:b:c"])
_members = st.dictionaries(
    st.sampled_from(["x", "content", "name", "model_config", "copy", "_private", "output_index", "role"]),
    json_values,
    max_size=3,
)


@st.composite
def _usages(draw: st.DrawFn) -> outputs.Usage:
    input_tokens, output_tokens = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
    cached, reasoning = draw(st.integers(0, input_tokens)), draw(st.integers(0, output_tokens))
    return outputs.Usage(input_tokens, output_tokens, cached, reasoning)


_LEGAL: dict[type, st.SearchStrategy[Any]] = {
    str: texts,
    outputs.Text: st.builds(outputs.Text, texts, logprobs),
    outputs.Refusal: st.builds(outputs.Refusal, texts),
    outputs.Annotation: st.builds(
        lambda url, title, start, length: outputs.Annotation(url, title, start, start + length),
        texts,
        texts,
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    outputs.Message: st.builds(outputs.Message, st.sampled_from([None, "commentary", "final_answer"])),
    outputs.Reasoning: st.builds(outputs.Reasoning, texts),
    outputs.ReasoningSummary: st.builds(outputs.ReasoningSummary, texts, st.booleans()),
    outputs.ToolCall: st.builds(
        outputs.ToolCall, st.sampled_from(["add", "a" * 64, "get_weather-2"]), _arguments, st.none() | call_ids
    ),
    outputs.ToolArguments: st.builds(outputs.ToolArguments, _arguments | texts, st.none() | call_ids),
    outputs.Item: st.builds(
        outputs.Item,
        _slugs,
        _members,
        st.sampled_from(["in_progress", "completed", "failed", "incomplete"]),
        st.none() | keys,
    ),
    outputs.Event: st.builds(outputs.Event, _slugs, _members),
    outputs.Usage: _usages(),
    outputs.Finish: st.builds(outputs.Finish, st.sampled_from(["stop", "max_output_tokens", "content_filter"])),
}

legal_outputs = st.one_of(*_LEGAL.values())
"""Outputs that are valid by themselves, in any order."""


class _Shout(str):
    """A subclass of `str` with its own `__str__`."""

    def __str__(self) -> str:
        return "different text"


_SUBCLASSES = {kind: type(f"My{kind.__name__}", (kind,), {}) for kind in _LEGAL if kind is not str}


def _as_subclass(output: Any) -> Any:
    if isinstance(output, str):
        return _Shout(output)
    kind = type(output)
    return _SUBCLASSES[kind](*(getattr(output, name) for name in kind.__dataclass_fields__))


_subclassed = legal_outputs.map(_as_subclass)


@st.composite
def _invalid(draw: st.DrawFn) -> Any:
    output = draw(legal_outputs.filter(lambda output: not isinstance(output, str)))
    name = draw(st.sampled_from(list(type(output).__dataclass_fields__)))
    setattr(output, name, draw(garbage | st.lists(garbage, max_size=2)))
    return output


any_outputs = st.one_of(legal_outputs, legal_outputs, legal_outputs, _subclassed, _invalid(), garbage)
"""Mostly legal outputs, with subclasses, outputs with an invalid member, and other objects."""

any_run: dict[str, Any] = {
    "script": st.lists(any_outputs, max_size=14),
    "ending": st.sampled_from(["close end", "close fail", "close cancel", "fail", "cancel"]),
    "queued": st.booleans(),
    "stream_reasoning": st.booleans(),
    "stream_extensions": st.booleans(),
    "error_events": st.booleans(),
}
"""Sequences of state machine operations, with settings."""


_LIMITS: dict[str, st.SearchStrategy[Any]] = {
    # Bounds that the OpenAPI document states only in prose.
    "temperature": st.floats(0, 2) | st.integers(0, 2) | st.none(),
    "top_p": st.floats(0, 1) | st.none(),
    "presence_penalty": st.floats(-2, 2) | st.none(),
    "frequency_penalty": st.floats(-2, 2) | st.none(),
    "metadata": st.dictionaries(st.text(max_size=64), st.text(max_size=512), max_size=3) | st.none(),
    "name": st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True),
    "max_output_tokens": st.integers(16, 2**31 - 1) | st.none(),
    "max_tool_calls": st.integers(1, 2**31 - 1) | st.none(),
    # The schema allows an image without an address and a reference with an empty id; the kit rejects both.
    "id": st.text(min_size=1, max_size=8),
    "image_url": st.just("https://example.org/cat.png"),
    "parameters": st.none() | st.fixed_dictionaries({"type": st.just("object")}),
    "schema": st.fixed_dictionaries({"type": st.just("object")}),
}


def from_schema(schema: Mapping[str, Any], components: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an OpenAPI schema, for the keywords that the specification uses."""
    if "$ref" in schema:
        return st.deferred(lambda: from_schema(components[schema["$ref"].rsplit("/", 1)[1]], components))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            choices = [choice for choice in schema[several] if set(choice) != {"description"}]
            return st.one_of(*(from_schema(choice, components) for choice in choices))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 8), 8))
    if kind == "integer":
        return st.integers(schema.get("minimum", 0), schema.get("maximum", 1000))
    if kind == "array":
        return st.lists(from_schema(schema["items"], components), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object":
        members = {
            name: _LIMITS[name] if name in _LIMITS else from_schema(member, components)
            for name, member in schema.get("properties", {}).items()
        }
        needed = set(schema.get("required", ())) | ({"image_url"} & members.keys())
        if "enum" in schema.get("properties", {}).get("type", ()):
            needed.add("type")  # the document fails to require it although only the type distinguishes the variants
        return st.fixed_dictionaries(
            {name: member for name, member in members.items() if name in needed},
            optional={name: member for name, member in members.items() if name not in needed},
        )
    return {"boolean": st.booleans(), "number": st.floats(allow_nan=False, allow_infinity=False), "null": st.none()}[
        kind
    ]
