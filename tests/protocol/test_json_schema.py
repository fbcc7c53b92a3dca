"""Schemas of strangers: judged like the reference library judges them, in bounded time, without a network."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_kit.errors import InvalidRequest
from responses_kit.protocol.json_schema import Schema

ROOT = Path(__file__).resolve().parents[2]


def keyword(schema: Any, text: str) -> str | None:
    """The keyword that a text breaks, or None if it is what the schema says."""
    fault = Schema(schema).fault(text)
    return None if fault is None else fault.keyword


DRAFTS = "https://json-schema.org/draft"

# The same judgement as the reference library's.

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([0.5, 1.0, -2.5, 1e10]),
    st.sampled_from(["", "a", "ab", "é", "b" * 5]),
)
instances = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
_small = st.integers(0, 3)
_types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
_names = st.lists(st.sampled_from("abc"), max_size=2, unique=True)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": _types | st.lists(_types, min_size=1, max_size=3, unique=True),
            "enum": st.lists(instances, min_size=1, max_size=3),
            "const": instances,
            "minimum": st.integers(-3, 3),
            "exclusiveMaximum": st.integers(-3, 3),
            "multipleOf": st.sampled_from([1, 2, 0.5]),
            "minLength": _small,
            "maxLength": _small,
            "pattern": st.sampled_from(["^a", "b$", "^$", "[a-b]+", "é"]),
            "items": inner,
            "prefixItems": some,
            "contains": inner,
            "minItems": _small,
            "maxItems": _small,
            "uniqueItems": st.booleans(),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
            "additionalProperties": inner,
            "unevaluatedProperties": inner,
            "propertyNames": inner,
            "required": _names,
            "dependentRequired": st.dictionaries(st.sampled_from("abc"), _names, max_size=1),
            "minProperties": _small,
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
        },
    )


_inner = st.recursive(
    st.booleans() | _keywords(st.booleans()) | st.sampled_from([{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}]),
    lambda inner: _keywords(inner),
    max_leaves=4,
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    schema = draw(_keywords(_inner))
    # What `d` refers to is smaller, so that nothing is its own part.
    schema["$defs"] = {
        "d": draw(_keywords(st.booleans() | st.just({"$ref": "#/$defs/e"}))),
        "e": draw(_keywords(st.booleans())),
    }
    return schema


@given(schema=schemas(), values=st.lists(instances, min_size=1, max_size=6))
def test_a_schema_is_judged_as_the_reference_library_judges_it(schema: dict[str, Any], values: list[Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assume(json.dumps(schema).count("unevaluated") <= 8)  # more of them are refused
    reference, ours = jsonschema.Draft202012Validator(schema), Schema(schema)
    for value in values:
        fault = ours.fault(json.dumps(value))
        assert (fault is None) == reference.is_valid(value), (value, fault)
        if fault is not None:
            assert fault.keyword
            assert 0 < len(fault.message) <= 500


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"$schema": f"{DRAFTS}/2020-12/schema", "prefixItems": [{"type": "null"}]}, "[null]", "[1]"),
        ({"$schema": f"{DRAFTS}/2019-09/schema", "items": [{"type": "null"}]}, "[null]", "[1]"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}]}, "[null]", "[1]"),
        ({"$schema": "http://json-schema.org/draft-07/schema", "dependencies": {"a": ["b"]}}, "{}", '{"a": 1}'),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"n": {"type": "integer"}},
                "properties": {"a": {"$ref": "#/definitions/n", "minimum": 5, "description": "beside $ref"}},
            },
            '{"a": 1}',  # draft 7 ignores what stands beside a reference
            '{"a": "1"}',
        ),
        (
            {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n", "minimum": 5}}},
            '{"a": 5}',
            '{"a": 1}',
        ),
        ({"$defs": {"n": {"$anchor": "here", "type": "null"}}, "items": {"$ref": "#here"}}, "[null]", "[1]"),
        ({"$id": "https://x.org/s", "$defs": {"n": {"$id": "n", "type": "null"}}, "$ref": "n"}, "null", "1"),
        ({"$defs": {"a/b~c": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c"}, "null", "1"),
        ({"$defs": {"a b": {"type": "null"}}, "$ref": "#/$defs/a%20b"}, "null", "1"),
        (
            {"properties": {"$ref": {"type": "null"}, "enum": {"$ref": "#/properties/$ref"}}},
            '{"enum": null}',
            '{"enum": 1}',
        ),
        (
            {"properties": {"default": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "null"}}},
            '{"default": null}',
            '{"default": 1}',
        ),
        ({"enum": [{"$ref": "#/$defs/n"}]}, '{"$ref": "#/$defs/n"}', "null"),
        ({"const": {"$ref": "#", "properties": {"$ref": 1}}}, '{"$ref": "#", "properties": {"$ref": 1}}', "{}"),
        (
            {
                "$defs": {"base": {"properties": {"a": {"type": "null"}}}},
                "$ref": "#/$defs/base",
                "properties": {"b": True},
                "unevaluatedProperties": False,
            },
            '{"a": null, "b": 1}',
            '{"c": 1}',
        ),
        (
            {"properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}, "required": ["n"]},
            '{"n": 1, "next": {"n": 2, "next": {"n": 3}}}',
            '{"n": 1, "next": {"n": 2, "next": {"m": 3}}}',
        ),
        (
            {
                "$id": "https://x.org/tree",
                "$dynamicAnchor": "node",
                "properties": {"children": {"items": {"$dynamicRef": "#node"}}, "n": {"type": "integer"}},
            },
            '{"n": 1, "children": [{"n": 2}]}',
            '{"n": 1, "children": [{"n": "2"}]}',
        ),
    ],
)
def test_drafts_and_references_are_understood(schema: dict[str, Any], valid: str, invalid: str) -> None:
    assert keyword(schema, valid) is None
    assert keyword(schema, invalid) is not None
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    assert kind(schema).is_valid(json.loads(valid)), "or the reference library would not agree"
    assert not kind(schema).is_valid(json.loads(invalid))


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T12:00:00Z", "2024-02-29"),
        ("time", "12:00:00Z", "25:00:00Z"),
        ("email", "ann@example.org", "ann"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("uri", "https://example.org/", "no uri"),
    ],
)
def test_formats_that_are_known_are_asserted(name: str, valid: str, invalid: str) -> None:
    assert keyword({"format": name}, json.dumps(valid)) is None
    assert keyword({"format": name}, json.dumps(invalid)) == "format"
    assert keyword({"format": name}, "7") is None


def test_formats_that_are_not_known_are_notes() -> None:
    assert keyword({"format": "acme-number"}, '"anything"') is None


# Texts.


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "{'a': 1}",
        "NaN",
        "[Infinity]",
        "{} {}",
        "nul",
        '"\n"',
        "\ufeff{}",
        "[" * 5000,
        "1" + "0" * 5000 + "x",
    ],
)
def test_what_is_no_json_breaks_json(text: str) -> None:
    fault = Schema({}).fault(text)
    assert fault is not None
    assert fault.keyword == "json"
    assert len(fault.message) < 200


def test_lone_surrogates_are_judged_as_what_is_shown_for_them() -> None:
    assert keyword({"const": "\ufffd"}, '"\ud83d"') is None
    assert keyword({"const": "\U0001f600"}, '"\ud83d\ude00"') is None
    assert keyword({"type": "object"}, "\ud83d") == "json"


def test_a_fault_says_where_and_what() -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}}, "required": ["b"]}
    fault = Schema(schema).fault('{"b": 1, "a": [1, "x"]}')
    assert fault is not None
    assert fault.keyword == "type"
    assert fault.message.startswith("a[1]: ")
    fault = Schema(schema).fault("{}")
    assert fault is not None
    assert fault.keyword == "required"
    assert "b" in fault.message


def test_one_schema_serves_many_threads() -> None:
    schema = Schema({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}})
    good, bad = json.dumps([1] * 500), json.dumps([1] * 499 + ["x"])
    verdicts: list[bool] = []

    def judge() -> None:
        verdicts.extend((schema.fault(good) is None) and (schema.fault(bad) is not None) for _ in range(50))

    threads = [threading.Thread(target=judge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert verdicts == [True] * 200


# Schemas that are none.


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "secretword"}, "`type`"),
        ({"type": None}, "`type`"),
        ({"properties": {"secretword": {"type": "x"}}}, "`type`"),
        ({"properties": {"type": {"properties": {"secretword": 7}}}}, "`properties`"),
        ({"properties": []}, "`properties`"),
        ({"required": "secretword"}, "`required`"),
        ({"minLength": "secretword"}, "`minLength`"),
        ({"pattern": "(secretword"}, "`pattern`"),
        ({"patternProperties": {"(secretword": {}}}, "`patternProperties`"),
        ({"dependentRequired": {"secretword": 5}}, "`dependentRequired`"),
        ({"dependentSchemas": {"secretword": 5}}, "`dependentSchemas`"),
        ({"$vocabulary": {"secretword": 5}}, "`$vocabulary`"),
        ({"$defs": {"secretword": {"definitions": {"secretword": 7}}}}, ""),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"secretword": 7}}, "`dependencies`"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1}, "draft"),
        ({"$schema": 5}, "`$schema`"),
        ({"$ref": 7}, "`$ref`"),
        ({"$ref": "#/$defs/secretword"}, "refers"),
        ({"$ref": "#secretword"}, "refers"),
        ({"$ref": "secretword.json"}, "refers"),
        ({"$anchor": "##secretword"}, "`$anchor`"),
        ({"allOf": []}, "`allOf`"),
        ({"multipleOf": 0}, "`multipleOf`"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_the_keyword_and_none_of_its_words(schema: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|refers) ") as caught:
        Schema(schema)
    assert named in str(caught.value)
    assert "secretword" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "its context quotes the schema"


@pytest.mark.parametrize("depth", [300, 3_000, 100_000])
@pytest.mark.parametrize("shape", ["properties", "items", "allOf", "not", "x-unknown", "const", "$defs"])
def test_a_schema_that_is_nested_too_deeply_is_refused_or_does(shape: str, depth: int) -> None:
    schema: Any = {"type": "object"}
    for _ in range(depth):
        inner = {"a": schema} if shape in ("properties", "$defs") else [schema] if shape == "allOf" else schema
        schema = {shape: inner}
    with pytest.raises(ValueError, match="nested too deeply"):
        Schema(schema)


def test_a_schema_beyond_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        Schema({"enum": [1], "allOf": [{"minLength": number} for number in range(50_000)]})
    nested: dict[str, Any] = {"unevaluatedProperties": False}
    for _ in range(20):
        nested = {"allOf": [nested], "unevaluatedProperties": False}
    with pytest.raises(ValueError, match="unevaluated"):
        Schema(nested)
    Schema({"enum": [f"{number}" for number in range(10_000)]})


def test_a_judgement_beyond_measure_is_the_schemas_fault_and_says_so() -> None:
    doubled = {f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(40)}
    schema = Schema({"$defs": {**doubled, "a40": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/a0"}}})
    assert schema.fault("{}") is None
    with pytest.raises(InvalidRequest) as caught:
        schema.fault('{"a": "x"}')
    assert caught.value.code == "invalid_schema"


# No network.


@pytest.fixture
def listening() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that has a schema for everybody who asks, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join(5)
    server.server_close()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "{}/a.json"},
        {"$ref": "{}/a.json#/$defs/x"},
        {"$dynamicRef": "{}/a.json"},
        {"$schema": "{}/schema"},
        {"$id": "{}/root.json", "$ref": "other.json"},
        {"$id": "{}/root.json", "properties": {"a": {"$id": "sub/", "items": {"$ref": "b"}}}},
        {"properties": {"a": {"anyOf": [{"$ref": "{}/deep"}]}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "{}/a.json"},
    ],
)
def test_nothing_is_ever_fetched(schema: dict[str, Any], listening: tuple[str, list[str]]) -> None:
    address, asked = listening
    with pytest.raises(ValueError, match="not valid"):
        Schema(json.loads(json.dumps(schema).replace("{}", address)))
    assert asked == []


def test_no_file_is_ever_read(tmp_path: Path) -> None:
    file = tmp_path / "secret.json"
    file.write_text('{"type": "null"}')
    for reference in (file.as_uri(), str(file)):
        with pytest.raises(ValueError, match="not valid"):
            Schema({"$ref": reference})


# Bounded time. The judgement runs without the interpreter, so that only another process can stop it.


def ends(code: str) -> str:
    """What a program prints, which has to end within seconds."""
    imports = "import json\nfrom responses_kit.errors import InvalidRequest\n"
    imports += "from responses_kit.protocol.json_schema import Schema"
    program = f"{imports}\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-1000:]
    return result.stdout


DOUBLED = """
def double(levels, name, refer, **leaf):
    defs = {f"a{n}": {**name(n), "allOf": [refer(n + 1)] * 2} for n in range(levels)}
    return {"$defs": {**defs, f"a{levels}": {**name(levels), "type": "string", **leaf}}, **refer(0)}

def verdict(schema, text='"x"'):
    try:
        fault = Schema(schema).fault(text)
    except (ValueError, InvalidRequest):
        return "refused"
    return "passes" if fault is None else "fails"
"""
REFERENCES = {
    "pointer": ("{}", "{'$ref': f'#/$defs/a{n}'}"),
    "escaped pointer": ("{}", "{'$ref': f'#/%24defs/a{n}'}"),
    "anchor": ("{'$anchor': f'a{n}'}", "{'$ref': f'#a{n}'}"),
    "dynamic anchor": ("{'$dynamicAnchor': f'a{n}'}", "{'$dynamicRef': f'#a{n}'}"),
    "id": ("{'$id': f'https://x.org/a{n}'}", "{'$ref': f'https://x.org/a{n}'}"),
    "relative id": ("{'$id': f'a{n}'}", "{'$ref': f'a{n}'}"),
}


@pytest.mark.parametrize("way", REFERENCES)
def test_references_that_multiply_are_given_up_soon(way: str) -> None:
    name, refer = REFERENCES[way]
    code = f"{DOUBLED}\nfor levels in (5, 40):\n    print(verdict(double(levels, lambda n: {name}, lambda n: {refer})))"
    small, big = ends(code).split()
    assert small == "passes"
    assert big in ("refused", "fails")


def test_references_that_multiply_over_a_large_schema_are_given_up_as_soon() -> None:
    leaf = "allOf=[{'minLength': 0, 'maxLength': 5}] * 200_000"
    code = f"{DOUBLED}\nprint(verdict(double(14, lambda n: {{}}, lambda n: {{'$ref': f'#/$defs/a{{n}}'}}, {leaf})))"
    assert ends(code).split() in (["refused"], ["fails"], ["passes"])


def test_definitions_with_the_names_of_keywords_are_counted_like_others() -> None:
    code = f"""{DOUBLED}
def level(number, path):
    if number == 40:
        return {{"type": "string"}}
    below = path + "/$defs/default"
    return {{"$defs": {{"default": level(number + 1, below)}}, "allOf": [{{"$ref": below}}] * 2}}
properties = {{"default": {{"$ref": "#/$defs/default"}}}}
schema = {{"$defs": {{"default": level(0, "#/$defs/default")}}, "properties": properties}}
print(verdict(schema, '{{"default": "x"}}'))
"""
    assert ends(code).split() in (["refused"], ["fails"])


DEEPENING: list[Any] = [
    {"allOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}]},
    {"anyOf": [{"items": {"$ref": "#"}, "type": "array", "minItems": 1}] * 2},
    {"oneOf": [{"items": {"$ref": "#"}, "type": "array"}] * 3},
    {"if": {"items": {"$ref": "#"}}, "then": {"items": {"$ref": "#"}}, "else": {"items": {"$ref": "#"}}},
    {"not": {"not": {"items": {"$ref": "#"}}}, "items": {"$ref": "#"}},
    {"additionalProperties": {"$ref": "#"}, "anyOf": [{"items": {"$ref": "#"}}] * 9},
    {"contains": {"$ref": "#"}, "items": {"$ref": "#"}, "unevaluatedItems": False},
]
OWN_PARTS: list[Any] = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"not": {"$ref": "#"}},
    {"$dynamicRef": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"if": {"$ref": "#"}, "then": {"$ref": "#"}},
    {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"unevaluatedProperties": False, "allOf": [{"$ref": "#"}]},
    {"properties": {"a": {"$ref": "#/properties/a"}}},
]
PATTERNS = [
    "^(a+)+$",
    "^(?=(a+)+$)",
    r"(a*)*\1b",
    "^(?:(?=a)a+)+$",
    "(?<!x)(a|a)*c",
    "(?=(a|aa)+$)(a|aa)+b",
    "(?:a?){60}a{60}",
]


def verdicts(schemas: list[Any], texts: list[str]) -> list[str]:
    """What becomes of each text under each schema, in one process that has to end within seconds."""
    given_schemas, given_texts = repr(json.dumps(schemas)), repr(json.dumps(texts))
    return ends(
        f"{DOUBLED}\nfor schema in json.loads({given_schemas}):\n    for text in json.loads({given_texts}):\n"
        "        print(verdict(schema, text), flush=True)"
    ).split()


def test_schemas_that_multiply_with_the_depth_of_the_text_are_given_up_soon() -> None:
    judged = verdicts(DEEPENING, ["[" * 150 + inner + "]" * 150 for inner in ("", "1")])
    assert len(judged) == 2 * len(DEEPENING)


def test_schemas_that_are_their_own_parts_come_to_an_end() -> None:
    assert len(verdicts(OWN_PARTS, ["1", '{"a": 1}', "[]"])) == 3 * len(OWN_PARTS)


def test_patterns_that_backtrack_without_end_are_given_up() -> None:
    texts = [json.dumps(["a" * 50 + "!"] * 2000), json.dumps({"a" * 50 + "!": 1})]
    schemas = [{"items": {"pattern": pattern}, "patternProperties": {pattern: False}} for pattern in PATTERNS]
    judged = verdicts(schemas, texts)
    assert len(judged) == 2 * len(PATTERNS)
    assert "passes" not in judged[::2], "what could not be matched in time has not matched"


@pytest.mark.parametrize(
    "pattern", ["((a{1,1000}){1,1000}){1,1000}", "(" * 1000 + ")" * 1000, r"(\p{L}{1,1000}){1,1000}"]
)
def test_patterns_that_are_too_large_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="`pattern`"):
        Schema({"pattern": pattern})


def test_large_schemas_and_texts_of_honest_people_pass_quickly() -> None:
    code = f"""{DOUBLED}
wide = {{"properties": {{f"p{{n}}": {{"type": "string"}} for n in range(2000)}}, "additionalProperties": False}}
print(verdict(wide, json.dumps({{f"p{{n}}": "x" for n in range(2000)}})))
defs = {{"row": {{"properties": {{"a": {{"$ref": "#/$defs/cell"}}}}}}, "cell": {{"type": "integer"}}}}
print(verdict({{"$defs": defs, "items": {{"$ref": "#/$defs/row"}}}}, json.dumps([{{"a": n}} for n in range(10_000)])))
print(verdict({{"items": {{"enum": [f"choice {{n}}" for n in range(1000)]}}}}, json.dumps(["choice 999"] * 1000)))
"""
    assert ends(code).split() == ["passes"] * 3
