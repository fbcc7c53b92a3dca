"""Tests of the wire models: lenient validation of input and exact serialization."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from responses_kit import errors, outputs
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.state_machine import StateMachine
from responses_kit.protocol.validation import parse_compact_request, parse_request
from responses_kit.schema.events import Event as EventModel
from responses_kit.schema.items import ITEMS, InputItem
from responses_kit.schema.request import CreateRequest
from responses_kit.schema.response import Response

from ..protocol.test_state_machine import fresh_response, play
from ..support import conformance
from ..support.strategies import from_schema, legal_outputs

INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)
EVENT: TypeAdapter[Any] = TypeAdapter(EventModel)

MAX_TEXT = 10_485_760


def item(given_item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input item after validation and serialization."""
    echoed: dict[str, Any] = json.loads(INPUT_ITEM.dump_json(INPUT_ITEM.validate_python(given_item)))
    return echoed


def final_response(script: list[Any], ending: str = "close") -> dict[str, Any]:
    machine = StateMachine(fresh_response(), new_id=new_id)
    machine.start()
    for output in script:
        try:
            machine.feed(output)
        except errors.IllegalOutput:
            continue
    if ending == "close":
        machine.close(1)
    else:
        machine.fail(errors.ModelError("It broke."))
    return machine.response


# Emitted items, responses and events.


@given(script=st.lists(legal_outputs, max_size=8), ending=st.sampled_from(["close", "fail"]))
def test_emitted_items_are_accepted_back_unchanged(script: list[Any], ending: str) -> None:
    emitted = final_response(script, ending)["output"]
    accepted = parse_request({"input": emitted}).input
    assert not isinstance(accepted, str)
    assert json.loads(ITEMS.dump_json(accepted or [])) == emitted
    assert json.loads(ITEMS.dump_json(ITEMS.validate_python(emitted))) == emitted


@given(script=st.lists(legal_outputs, max_size=6), ending=st.sampled_from(["close", "fail"]))
def test_response_model_round_trips_every_response(script: list[Any], ending: str) -> None:
    response = final_response(script, ending)
    assert json.loads(Response.model_validate(response).model_dump_json(by_alias=True)) == response


@given(script=st.lists(legal_outputs, max_size=6))
def test_event_models_round_trip_every_event(script: list[Any]) -> None:
    accepted: list[Any] = []
    for output in script:
        try:
            play([*accepted, output])
        except errors.IllegalOutput:
            continue
        accepted.append(output)
    for event in play(accepted, "fail", stream_reasoning=True, stream_extensions=True):
        assert json.loads(EVENT.dump_json(EVENT.validate_python(event), by_alias=True)) == event


def test_output_text_joins_all_text() -> None:
    response = final_response(["Hello, ", outputs.Message(), "world."])
    assert Response.model_validate(response).output_text == "Hello, world."


# Variants that clients and other servers send.

TEXT = {"type": "output_text", "text": "Hi"}
ECHOED = TEXT | {"annotations": [], "logprobs": []}


@pytest.mark.parametrize(
    ("given_item", "expected"),
    [
        ({"role": "user", "content": "Hi"}, {"type": "message", "content": [{"type": "input_text", "text": "Hi"}]}),
        ({"type": None, "role": "user", "content": "Hi"}, {"type": "message", "role": "user"}),
        ({"id": None, "role": "user", "content": "Hi"}, {"id": ""}),
        ({"role": "user", "content": []}, {"content": []}),
        ({"role": "user", "content": None}, {"content": []}),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"content": [{"type": "input_text", "text": "Hi"}]},
        ),
        ({"role": "user", "content": [TEXT]}, {"content": [{"type": "input_text", "text": "Hi"}]}),
        ({"role": "system", "content": "Hi"}, {"role": "system", "content": [{"type": "input_text", "text": "Hi"}]}),
        ({"role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}, {"role": "developer"}),
        ({"role": "assistant", "content": "Hi"}, {"content": [ECHOED]}),
        ({"role": "assistant", "content": [{"type": "input_text", "text": "Hi"}]}, {"content": [ECHOED]}),
        ({"role": "assistant", "content": [TEXT | {"annotations": None, "logprobs": None}]}, {"content": [ECHOED]}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"content": [{"type": "refusal", "refusal": "No."}]},
        ),
        ({"role": "assistant", "phase": "commentary", "content": "Hi"}, {"phase": "commentary"}),
        ({"role": "assistant", "status": "incomplete", "content": "Hi"}, {"status": "incomplete"}),
        ({"role": "assistant", "status": None, "content": "Hi"}, {"status": "completed"}),
        ({"role": "assistant", "status": "in_progress", "content": "Hi"}, {"status": "in_progress"}),
        ({"type": "reasoning", "summary": []}, {"summary": [], "content": []}),
        (
            {"type": "reasoning", "summary": None, "content": None, "encrypted_content": None, "status": None},
            {"summary": [], "content": [], "status": "completed"},
        ),
        ({"type": "reasoning"}, {"summary": []}),
        ({"type": "reasoning", "encrypted_content": "gAAA", "summary": []}, {"encrypted_content": "gAAA"}),
        (
            {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "Hm."}]},
            {"content": [{"type": "reasoning_text", "text": "Hm."}]},
        ),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}, {"arguments": ""}),
        (
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"torn', "status": None, "id": None},
            {"arguments": '{"torn', "status": "completed"},
        ),
        ({"type": "function_call_output", "call_id": "1", "output": "42", "status": None}, {"output": "42"}),
        (
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "42"}]},
            {"output": [{"type": "input_text", "text": "42"}]},
        ),
        ({"type": "compaction", "encrypted_content": "payload", "id": None}, {"encrypted_content": "payload"}),
        ({"type": "acme:chart", "id": "x", "status": "completed", "points": [1, None]}, {"points": [1, None]}),
        ({"type": "acme:chart", "status": ""}, {"status": "completed"}),
        ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}),
        ({"id": "msg_1"}, {"type": "item_reference", "id": "msg_1"}),
        ({"type": None, "id": "msg_1"}, {"type": "item_reference", "id": "msg_1"}),
    ],
)
def test_items_of_other_servers_are_accepted(given_item: dict[str, Any], expected: dict[str, Any]) -> None:
    echoed = item(given_item)
    assert echoed == echoed | expected
    assert item(echoed) == echoed, "what was echoed once is taken back unchanged"


@pytest.mark.parametrize("member", ["phase", "encrypted_content"])
def test_optional_members_are_omitted_instead_of_null(member: str) -> None:
    base: dict[str, Any] = {
        "phase": {"role": "assistant", "content": "Hi"},
        "encrypted_content": {"type": "reasoning"},
    }[member]
    assert member not in item(base)
    assert member not in item(base | {member: None})


def test_unknown_annotations_are_dropped() -> None:
    cited = {"type": "url_citation", "url": "https://example.org", "title": "", "start_index": 0, "end_index": 2}
    part = TEXT | {"annotations": [{"type": "file_citation", "file_id": "f"}, cited, {"type": "file_path"}]}
    assert item({"role": "assistant", "content": [part]})["content"][0]["annotations"] == [cited]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "https://example.org/cat.png"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": None},
        {"type": "input_image", "image_url": "https://example.org/cat.png", "detail": "low"},
        {"type": "input_file", "filename": "a.txt", "file_data": "QQ=="},
        {"type": "input_file", "file_url": "https://example.org/a.pdf", "filename": None, "file_data": None},
        {"type": "input_video", "video_url": "https://example.org/a.mp4"},
    ],
)
def test_images_files_and_videos_are_accepted(part: dict[str, Any]) -> None:
    for echoed in (
        item({"role": "user", "content": [part]})["content"],
        item({"type": "function_call_output", "call_id": "1", "output": [part]})["output"],
    ):
        expected = {name: member for name, member in part.items() if member is not None}
        assert echoed[0] == echoed[0] | expected
        assert None not in echoed[0].values()


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "nobody", "content": "Hi"},
        {"role": "system", "content": [{"type": "input_image", "image_url": "https://example.org/cat.png"}]},
        {"role": "assistant", "content": [{"type": "input_image", "image_url": "https://example.org/cat.png"}]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": [{"type": "input_audio", "data": ""}]},
        {"role": "user", "content": 1},
        {"role": "user"},
        {"type": "function_call", "call_id": "", "name": "f", "arguments": ""},
        {"type": "function_call", "call_id": "1", "name": "f g", "arguments": ""},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": {}},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": 42},
        {"type": "item_reference", "id": ""},
        {"type": "item_reference"},
        {"type": "web_search_call", "id": "ws_1"},
        {"type": ":"},
        {"type": 1},
        {"type": "compaction"},
        {},
        None,
        [],
        "message",
        1,
    ],
)  # fmt: skip
def test_invalid_item_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        INPUT_ITEM.validate_python(wrong)


# Limits are inclusive.


def edges() -> list[tuple[str, Any, Any]]:
    def tool(name: str) -> dict[str, Any]:
        return {"tools": [{"type": "function", "name": name}]}

    def call(call_id: str) -> dict[str, Any]:
        return {"input": [{"type": "function_call", "call_id": call_id, "name": "f", "arguments": ""}]}

    def output(call_id: str) -> dict[str, Any]:
        return {"input": [{"type": "function_call_output", "call_id": call_id, "output": ""}]}

    def allowed(count: int) -> dict[str, Any]:
        return {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}] * count}}

    return [
        (
            "metadata pairs",
            {"metadata": {str(n): "" for n in range(16)}},
            {"metadata": {str(n): "" for n in range(17)}},
        ),
        ("metadata key", {"metadata": {"k" * 64: ""}}, {"metadata": {"k" * 65: ""}}),
        ("metadata value", {"metadata": {"k": "v" * 512}}, {"metadata": {"k": "v" * 513}}),
        (
            "metadata value in characters, not bytes",
            {"metadata": {"k": "\U0001f600" * 512}},
            {"metadata": {"k": "\U0001f600" * 513}},
        ),
        ("tool name", tool("n" * 64), tool("n" * 65)),
        ("tool name, shortest", tool("n"), tool("")),
        ("tool name, characters", tool("get_weather-2"), tool("get.weather")),
        ("tool name, line end", tool("n"), tool("n\n")),
        ("call_id", call("c" * 64), call("c" * 65)),
        ("call_id, shortest", call("c"), call("")),
        ("call_id of an output", output("c" * 64), output("c" * 65)),
        ("max_output_tokens", {"max_output_tokens": 16}, {"max_output_tokens": 15}),
        ("max_tool_calls", {"max_tool_calls": 1}, {"max_tool_calls": 0}),
        ("temperature, most", {"temperature": 2}, {"temperature": 2.000001}),
        ("temperature, least", {"temperature": 0}, {"temperature": -0.000001}),
        ("top_p, most", {"top_p": 1}, {"top_p": 1.000001}),
        ("top_p, least", {"top_p": 0.0}, {"top_p": -0.000001}),
        ("presence_penalty", {"presence_penalty": -2}, {"presence_penalty": -2.1}),
        ("frequency_penalty", {"frequency_penalty": 2}, {"frequency_penalty": 2.1}),
        ("top_logprobs, most", {"top_logprobs": 20}, {"top_logprobs": 21}),
        ("top_logprobs, least", {"top_logprobs": 0}, {"top_logprobs": -1}),
        ("safety_identifier", {"safety_identifier": "s" * 64}, {"safety_identifier": "s" * 65}),
        ("prompt_cache_key", {"prompt_cache_key": "s" * 64}, {"prompt_cache_key": "s" * 65}),
        ("allowed_tools, most", allowed(128), allowed(129)),
        ("allowed_tools, least", allowed(1), allowed(0)),
    ]


@pytest.mark.parametrize(("inside", "outside"), [edge[1:] for edge in edges()], ids=[edge[0] for edge in edges()])
def test_limits_are_inclusive(inside: dict[str, Any], outside: dict[str, Any]) -> None:
    parse_request(inside)
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_request(outside)
    assert caught.value.param
    assert caught.value.param.startswith(next(iter(outside)))
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "build_body",
    [
        lambda text: {"input": text},
        lambda text: {"instructions": text},
        lambda text: {"input": [{"role": "user", "content": text}]},
        lambda text: {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]},
        lambda text: {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": text}]}]},
        lambda text: {"input": [{"type": "function_call_output", "call_id": "1", "output": text}]},
        lambda text: {"input": [{"type": "compaction", "encrypted_content": text}]},
    ],
)
def test_text_limit_is_inclusive(build_body: Any) -> None:
    text = "é" + "x" * (MAX_TEXT - 1)
    parse_request(build_body(text))
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_request(build_body(text + "x"))
    assert str(MAX_TEXT) in caught.value.message
    assert len(caught.value.message) < 300


# The official documents.


def specifications() -> list[Path]:
    named = os.environ.get("RESPONSES_KIT_SPEC")
    folder = Path(named).parent if named else Path(__file__).resolve().parents[3] / "shared" / "spec"
    return sorted(folder.glob("openresponses-*.openapi.json"))


@pytest.mark.parametrize("path", specifications(), ids=lambda path: path.name[14:24])
def test_any_official_request_is_accepted(path: Path) -> None:
    components = json.loads(path.read_text())["components"]["schemas"]

    @given(body=from_schema(components["CreateResponseBody"], components))
    def check(body: dict[str, Any]) -> None:
        parse_request(body)

    check()


def test_any_official_compact_request_is_accepted() -> None:
    documents = [json.loads(path.read_text())["components"]["schemas"] for path in specifications()]
    for components in documents:
        if "CompactResponseMethodPublicBody" in components:  # the later revision has it
            official = from_schema(components["CompactResponseMethodPublicBody"], components)
            given(body=official)(lambda body: parse_compact_request(body) and None)()


@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "metadata": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=2),
        },
    )
)
def test_validated_request_validates_again(body: dict[str, Any]) -> None:
    request = parse_request(body)
    assert parse_request(request) == request


OFFICIAL_EXAMPLES: list[dict[str, Any]] = [
    {"model": "m", "input": [{"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}]},
    {"model": "m", "input": [{"type": "message", "role": "user", "content": "Count from 1 to 5."}], "stream": True},
    {
        "model": "m",
        "input": [
            {"type": "message", "role": "system", "content": "You are a pirate. Always respond in pirate speak."},
            {"type": "message", "role": "user", "content": "Say hello."},
        ],
    },
    {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "Get the current weather for a location",
                "parameters": {
                    "type": "object",
                    "properties": {"location": {"type": "string", "description": "The city and state"}},
                    "required": ["location"],
                },
            }
        ],
    },
    {
        "model": "m",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
                    {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
                ],
            }
        ],
    },
    {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice! Nice to meet you."},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ],
    },
    {
        "input": "Hi",
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        "tools": [{"type": "function", "name": "f", "parameters": None, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": None}},
        "reasoning": {"effort": "xhigh", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "stream_options": {"include_obfuscation": False},
        "service_tier": "flex",
        "truncation": "auto",
    },
]


@pytest.mark.parametrize("body", OFFICIAL_EXAMPLES)
def test_official_suite_requests_are_accepted(body: dict[str, Any]) -> None:
    assert parse_request(body).stream == body.get("stream", False)


def test_null_equals_missing_field() -> None:
    assert CreateRequest.model_validate(dict.fromkeys(CreateRequest.model_fields)) == CreateRequest.model_validate({})


def test_unknown_fields_are_ignored() -> None:
    body = {"input": "Hi", "client_metadata": {"a": 1}, "user": "x", "text": {"format": {"type": "text", "extra": 1}}}
    assert parse_request(body) == parse_request({"input": "Hi", "text": {"format": {"type": "text"}}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("max_output_tokens", 16.5),
        ("max_output_tokens", 16.0),
        ("max_output_tokens", "16"),
        ("max_output_tokens", True),
        ("max_output_tokens", 2**64),
        ("stream", 1),
        ("stream", "true"),
        ("store", "false"),
        ("model", 1),
        ("input", 1),
        ("input", {}),
        ("instructions", ["Hi"]),
        ("metadata", {"k": 1}),
        ("metadata", {"k": None}),
        ("metadata", []),
        ("tools", {}),
        ("tools", [1]),
        ("tools", [{}]),
        ("tool_choice", "always"),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", 1),
        ("include", ["everything"]),
        ("include", "message.output_text.logprobs"),
        ("truncation", "left"),
        ("service_tier", "gold"),
        ("reasoning", {"effort": "enormous"}),
        ("text", {"format": {"type": "yaml"}}),
        ("text", {"verbosity": "chatty"}),
        ("previous_response_id", 1),
    ],
)
def test_values_are_not_coerced_and_unknown_choices_are_refused(field: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_request({"input": "Hi", field: value})
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_echoed_response_validates_officially() -> None:
    conformance.check_response(final_response(["Hi", outputs.ToolCall("f"), outputs.Usage(1, 2)]))
