"""The default model behind a kit follows the tool choice and the text format of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from responses_kit import ResponsesKit, errors
from responses_kit.backends.local import LocalBackend
from responses_kit.backends.local.model_files import PreparedModel
from responses_kit.protocol.json_schema import Schema

pytestmark = pytest.mark.local

Create = Callable[..., dict[str, Any]]


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


WEATHER = function(
    "get_weather", "Weather of a city", city={"type": "string"}, unit={"enum": ["celsius", "fahrenheit"]}
)
NOW = function("now", "The time")
TOOLS = [WEATHER, NOW]
QUESTION = "What is the weather in Paris, and what time is it?"


@pytest.fixture(scope="module")
def create(smollm2: PreparedModel) -> Iterator[Create]:
    """Yield a function that creates a response and returns its JSON, with temperature 0 and one thread."""
    kit = ResponsesKit(LocalBackend(context_length=2048, threads=1))

    async def create(request: dict[str, Any]) -> Any:
        return await kit.create(request)

    def create_response(input: Any = QUESTION, **request: Any) -> dict[str, Any]:  # noqa: A002
        response: Any = anyio.run(create, {"input": input, "temperature": 0, "max_output_tokens": 160, **request})
        return response if isinstance(response, dict) else response.model_dump()

    yield create_response
    anyio.run(kit.aclose)


def calls(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of calls, and assert that the output consists of calls."""
    assert body["status"] == "completed"
    return [(item["name"], json.loads(item["arguments"])) for item in body["output"]]


def text(body: dict[str, Any]) -> str:
    (message,) = body["output"]
    assert message["type"] == "message"
    content: str = message["content"][0]["text"]
    return content


def json_schema(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": strict}}


def test_required_choice_calls_tool_with_valid_arguments(create: Create):
    pairs = calls(create(tools=TOOLS, tool_choice="required"))
    assert pairs
    schemas = {tool["name"]: Schema(tool["parameters"]) for tool in TOOLS}
    assert [schemas[name].validate(json.dumps(arguments)) for name, arguments in pairs] == [None] * len(pairs)


@pytest.mark.parametrize("name", ["get_weather", "now"])
def test_named_choice_calls_that_function(create: Create, name: str):
    pairs = calls(create(tools=TOOLS, tool_choice={"type": "function", "name": name}, parallel_tool_calls=False))
    assert [called for called, _ in pairs] == [name]


def test_allowed_tools_choice_calls_only_allowed(create: Create):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    assert {name for name, _ in calls(create(tools=TOOLS, tool_choice=allowed))} == {"now"}


def test_none_choice_calls_nothing(create: Create):
    body = create(tools=TOOLS, tool_choice="none", max_output_tokens=24)
    assert [item["type"] for item in body["output"]] == ["message"]


def test_without_parallel_calls_one_call_is_made(create: Create):
    assert len(calls(create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))) == 1


def test_auto_choice_gives_text_or_valid_call(create: Create):
    body = create(tools=TOOLS, max_output_tokens=60)
    for item in body["output"]:
        assert item["type"] == "message" or item["name"] in ("get_weather", "now")


def test_function_output_reaches_next_turn(create: Create):
    body = create(tools=TOOLS, tool_choice={"type": "function", "name": "now"}, parallel_tool_calls=False)
    (call,) = body["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is 12:41."}
    history = [{"role": "user", "content": "What time is it?"}, call, output]
    assert "12:41" in text(create(history, tools=TOOLS, tool_choice="none", max_output_tokens=40))


@pytest.mark.parametrize("strict", [True, False])
def test_answer_follows_nested_schema_with_enums(create: Create, strict: bool):
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string"},
            "facts": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"kind": {"enum": ["size", "history"]}, "text": {"type": "string"}},
                    "required": ["kind", "text"],
                },
            },
        },
        "required": ["capital", "facts"],
    }
    body = create("Tell me about France.", text=json_schema(schema, strict=strict))
    assert body["status"] == "completed"
    assert Schema(schema).validate(text(body)) is None
    assert "Paris" in text(body)


def test_answer_follows_recursive_schema_and_ends(create: Create):
    schema = {
        "$defs": {
            "person": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "parent": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/person"}},
                },
                "required": ["name", "parent", "children"],
            }
        },
        "$ref": "#/$defs/person",
    }
    body = create("Describe a large family.", text=json_schema(schema), max_output_tokens=120)
    assert body["status"] == "completed"
    assert Schema(schema).validate(text(body)) is None


def test_json_object_format_gives_object(create: Create):
    body = create("Describe a cat as JSON.", text={"format": {"type": "json_object"}}, max_output_tokens=80)
    assert body["status"] == "completed"
    assert isinstance(json.loads(text(body)), dict)


def test_unfinishable_answer_is_incomplete(create: Create):
    body = create("Hi", text=json_schema({"type": "string", "minLength": 500}), max_output_tokens=16)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["usage"]["output_tokens"] == 16


def test_answer_follows_format_despite_tools(create: Create):
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    body = create(tools=TOOLS, text=json_schema(schema))
    assert body["status"] == "completed"
    (item,) = body["output"]
    assert item["type"] == "message"  # with a grammar for JSON or a call, the model would call
    assert Schema(schema).validate(item["content"][0]["text"]) is None


@pytest.mark.parametrize("settings", [{}, {"text": json_schema({"enum": ["Paris", "Rome"]})}])
def test_logprobs_match_text_tokens(create: Create, settings: dict[str, Any]):
    body = create(
        "Name the capital of France. 😀",
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        max_output_tokens=24,
        **settings,
    )
    (part,) = body["output"][0]["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]) == part["text"].encode()
    for entry in part["logprobs"]:
        assert -9999 <= entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]


@pytest.mark.parametrize(
    ("settings", "param", "keyword"),
    [
        ({"text": json_schema({"type": "array", "uniqueItems": True})}, "text.format.schema", "uniqueItems"),
        (
            {"tools": [NOW, {**WEATHER, "parameters": {"type": "object", "not": {"required": ["x"]}}, "strict": True}]},
            "tools[1].parameters",
            "not",
        ),
    ],
)
def test_unenforceable_schema_is_refused_up_front(create: Create, settings: dict[str, Any], param: str, keyword: str):
    with pytest.raises(errors.UnsupportedParameter, match=keyword) as caught:
        create(**settings)
    assert (caught.value.status, caught.value.param) == (400, param)
