"""Tests of untrusted JSON schemas: agreement with the reference library, bounded time and no network access."""

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


def violated_keyword(schema: Any, text: str) -> str | None:
    """Return the keyword that a text violates, or None if it matches the schema."""
    violation = Schema(schema).validate(text)
    return None if violation is None else violation.keyword


DRAFTS = "https://json-schema.org/draft"

# Agreement with the reference library.

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
    # Each definition refers to a smaller one, so that no schema contains itself.
    schema["$defs"] = {
        "d": draw(_keywords(st.booleans() | st.just({"$ref": "#/$defs/e"}))),
        "e": draw(_keywords(st.booleans())),
    }
    return schema


@given(schema=schemas(), values=st.lists(instances, min_size=1, max_size=6))
def test_validation_agrees_with_reference_library(schema: dict[str, Any], values: list[Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assume(json.dumps(schema).count("unevaluated") <= 8)  # more of them are refused
    reference, schema_under_test = jsonschema.Draft202012Validator(schema), Schema(schema)
    for value in values:
        violation = schema_under_test.validate(json.dumps(value))
        assert (violation is None) == reference.is_valid(value), (value, violation)
        if violation is not None:
            assert violation.keyword
            assert 0 < len(violation.message) <= 500


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
            '{"a": 1}',  # draft 7 ignores keywords beside a reference
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
def test_drafts_and_references_are_supported(schema: dict[str, Any], valid: str, invalid: str) -> None:
    assert violated_keyword(schema, valid) is None
    assert violated_keyword(schema, invalid) is not None
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
def test_known_formats_are_asserted(name: str, valid: str, invalid: str) -> None:
    assert violated_keyword({"format": name}, json.dumps(valid)) is None
    assert violated_keyword({"format": name}, json.dumps(invalid)) == "format"
    assert violated_keyword({"format": name}, "7") is None


def test_unknown_formats_are_annotations() -> None:
    assert violated_keyword({"format": "acme-number"}, '"anything"') is None


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
def test_invalid_json_fails_with_json_keyword(text: str) -> None:
    violation = Schema({}).validate(text)
    assert violation is not None
    assert violation.keyword == "json"
    assert len(violation.message) < 200


def test_lone_surrogates_are_replaced_before_validation() -> None:
    assert violated_keyword({"const": "\ufffd"}, '"\ud83d"') is None
    assert violated_keyword({"const": "\U0001f600"}, '"\ud83d\ude00"') is None
    assert violated_keyword({"type": "object"}, "\ud83d") == "json"


def test_violation_names_location_and_keyword() -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}}, "required": ["b"]}
    violation = Schema(schema).validate('{"b": 1, "a": [1, "x"]}')
    assert violation is not None
    assert violation.keyword == "type"
    assert violation.message.startswith("a[1]: ")
    violation = Schema(schema).validate("{}")
    assert violation is not None
    assert violation.keyword == "required"
    assert "b" in violation.message


def test_schema_is_thread_safe() -> None:
    schema = Schema({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}})
    good, bad = json.dumps([1] * 500), json.dumps([1] * 499 + ["x"])
    verdicts_of: list[bool] = []

    def validate() -> None:
        verdicts_of.extend((schema.validate(good) is None) and (schema.validate(bad) is not None) for _ in range(50))

    threads = [threading.Thread(target=validate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert verdicts_of == [True] * 200


# Invalid schemas.


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
        ({"$ref": "#/$defs/secretword"}, "reference"),
        ({"$ref": "#secretword"}, "reference"),
        ({"$ref": "secretword.json"}, "reference"),
        ({"$anchor": "##secretword"}, "`$anchor`"),
        ({"allOf": []}, "`allOf`"),
        ({"multipleOf": 0}, "`multipleOf`"),
    ],
)
def test_invalid_schema_is_refused_with_keyword_without_echo(schema: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|must) ") as caught:
        Schema(schema)
    assert named in str(caught.value)
    assert "secretword" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "its context quotes the schema"


@pytest.mark.parametrize("depth", [300, 3_000, 100_000])
@pytest.mark.parametrize("shape", ["properties", "items", "allOf", "not", "x-unknown", "const", "$defs"])
def test_deeply_nested_schema_is_refused_or_works(shape: str, depth: int) -> None:
    schema: Any = {"type": "object"}
    for _ in range(depth):
        inner = {"a": schema} if shape in ("properties", "$defs") else [schema] if shape == "allOf" else schema
        schema = {shape: inner}
    with pytest.raises(ValueError, match="nested too deeply"):
        Schema(schema)


def test_oversize_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        Schema({"enum": [1], "allOf": [{"minLength": number} for number in range(50_000)]})
    nested: dict[str, Any] = {"unevaluatedProperties": False}
    for _ in range(20):
        nested = {"allOf": [nested], "unevaluatedProperties": False}
    with pytest.raises(ValueError, match="unevaluated"):
        Schema(nested)
    Schema({"enum": [f"{number}" for number in range(10_000)]})


def test_expensive_validation_is_refused() -> None:
    doubled = {f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(40)}
    schema = Schema({"$defs": {**doubled, "a40": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/a0"}}})
    assert schema.validate("{}") is None
    with pytest.raises(InvalidRequest) as caught:
        schema.validate('{"a": "x"}')
    assert caught.value.code == "invalid_schema"


# No network.


@pytest.fixture
def schema_server() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server with a schema at every path, and the list of the requested paths."""
    requested_paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested_paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requested_paths
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
def test_remote_schemas_are_not_fetched(schema: dict[str, Any], schema_server: tuple[str, list[str]]) -> None:
    address, requested_paths = schema_server
    with pytest.raises(ValueError, match="not valid"):
        Schema(json.loads(json.dumps(schema).replace("{}", address)))
    assert requested_paths == []


def test_file_references_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "secret.json"
    file.write_text('{"type": "null"}')
    for reference in (file.as_uri(), str(file)):
        with pytest.raises(ValueError, match="not valid"):
            Schema({"$ref": reference})


# Bounded time. Validation does not return to the interpreter, so that only another process can stop it.


def output_of_program(code: str) -> str:
    """Return the standard output of a program that must finish within seconds."""
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
        violation = Schema(schema).validate(text)
    except (ValueError, InvalidRequest):
        return "refused"
    return "passes" if violation is None else "fails"
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
def test_multiplying_references_are_limited(way: str) -> None:
    name, refer = REFERENCES[way]
    code = f"{DOUBLED}\nfor levels in (5, 40):\n    print(verdict(double(levels, lambda n: {name}, lambda n: {refer})))"
    small, big = output_of_program(code).split()
    assert small == "passes"
    assert big in ("refused", "fails")


def test_multiplying_references_in_large_schema_are_limited() -> None:
    leaf = "allOf=[{'minLength': 0, 'maxLength': 5}] * 200_000"
    code = f"{DOUBLED}\nprint(verdict(double(14, lambda n: {{}}, lambda n: {{'$ref': f'#/$defs/a{{n}}'}}, {leaf})))"
    assert output_of_program(code).split() in (["refused"], ["fails"], ["passes"])


def test_references_to_definitions_named_like_keywords_are_limited() -> None:
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
    assert output_of_program(code).split() in (["refused"], ["fails"])


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


def verdicts_of(schemas: list[Any], texts: list[str]) -> list[str]:
    """Return the verdict on each text for each schema, from a process that must finish within seconds."""
    given_schemas, given_texts = repr(json.dumps(schemas)), repr(json.dumps(texts))
    return output_of_program(
        f"{DOUBLED}\nfor schema in json.loads({given_schemas}):\n    for text in json.loads({given_texts}):\n"
        "        print(verdict(schema, text), flush=True)"
    ).split()


def test_schemas_multiplying_with_text_depth_are_limited() -> None:
    verdicts = verdicts_of(DEEPENING, ["[" * 150 + inner + "]" * 150 for inner in ("", "1")])
    assert len(verdicts) == 2 * len(DEEPENING)


def test_recursive_schemas_terminate() -> None:
    assert len(verdicts_of(OWN_PARTS, ["1", '{"a": 1}', "[]"])) == 3 * len(OWN_PARTS)


def test_backtracking_patterns_terminate() -> None:
    texts = [json.dumps(["a" * 50 + "!"] * 2000), json.dumps({"a" * 50 + "!": 1})]
    schemas = [{"items": {"pattern": pattern}, "patternProperties": {pattern: False}} for pattern in PATTERNS]
    verdicts = verdicts_of(schemas, texts)
    assert len(verdicts) == 2 * len(PATTERNS)
    assert "passes" not in verdicts[::2], "a pattern that exceeds its limits must not match"


@pytest.mark.parametrize(
    "pattern", ["((a{1,1000}){1,1000}){1,1000}", "(" * 1000 + ")" * 1000, r"(\p{L}{1,1000}){1,1000}"]
)
def test_oversize_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="`pattern`"):
        Schema({"pattern": pattern})


def test_large_legitimate_schemas_and_texts_validate_quickly() -> None:
    code = f"""{DOUBLED}
wide = {{"properties": {{f"p{{n}}": {{"type": "string"}} for n in range(2000)}}, "additionalProperties": False}}
print(verdict(wide, json.dumps({{f"p{{n}}": "x" for n in range(2000)}})))
defs = {{"row": {{"properties": {{"a": {{"$ref": "#/$defs/cell"}}}}}}, "cell": {{"type": "integer"}}}}
print(verdict({{"$defs": defs, "items": {{"$ref": "#/$defs/row"}}}}, json.dumps([{{"a": n}} for n in range(10_000)])))
print(verdict({{"items": {{"enum": [f"choice {{n}}" for n in range(1000)]}}}}, json.dumps(["choice 999"] * 1000)))
"""
    assert output_of_program(code).split() == ["passes"] * 3
