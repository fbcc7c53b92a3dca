"""Tests of LMSP with the default local model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import jsonschema
import pytest

from responses_kit import ResponsesKit
from responses_kit.backends.local import LocalBackend
from responses_kit.backends.local.model_files import prepare
from responses_kit.http.lmsp import LMSP
from responses_kit.http.messages import Reply, Request

from .conformance import check_problem, check_response
from .test_lmsp_fuzz import read_stream

pytestmark = [pytest.mark.local, pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])]

BOUND = 50.0

Ask = Callable[..., dict[str, Any]]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def post() -> Iterator[Callable[[dict[str, Any]], tuple[Reply, str]]]:
    """Send a request, and return the reply with its whole stream. The model uses one thread."""
    prepare("smollm2")
    kit = ResponsesKit(LocalBackend("smollm2", context_length=2048, threads=1))

    async def sent(body: dict[str, Any]) -> tuple[Reply, str]:
        streamed: list[bytes] = []

        async def read() -> bytes:
            return json.dumps(body).encode()

        async def send(data: bytes) -> None:
            streamed.append(data)

        with anyio.fail_after(BOUND):
            reply = await LMSP(kit).handle(Request("POST", "/responses", read=read))
            if reply.stream is not None:
                await reply.stream(send)
        return reply, b"".join(streamed).decode()

    yield lambda body: anyio.run(sent, body)
    anyio.run(kit.aclose)


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def request_for(content: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a request with a temperature of zero."""
    items = [message("user", content)] if isinstance(content, str) else content
    return {"model": "smollm2", "input": items, "temperature": 0, "max_output_tokens": 120, **more}


@pytest.fixture
def ask(post: Callable[[dict[str, Any]], tuple[Reply, str]], stream: bool) -> Ask:
    """Send a request; return the status, the output and the usage in either mode."""

    def send_and_check(content: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        reply, streamed = post(request_for(content, stream=stream, **more))
        assert reply.status == 200, reply.body
        assert (reply.stream is not None) is stream
        if not stream:
            response: dict[str, Any] = json.loads(reply.body)
            check_response(response)
            assert response["model"] == "smollm2"
            return response
        items, last = read_stream(streamed)
        return {"output": items, "incomplete_details": None, **last.data}

    return send_and_check


def text(response: dict[str, Any]) -> str:
    """Return the text of the only message."""
    (item,) = response["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    (part,) = item["content"]
    content: str = part["text"]
    return content


def check_usage(response: dict[str, Any], max_tokens: int = 120) -> None:
    assert response["usage"]["input_tokens"] > 0
    assert 0 < response["usage"]["output_tokens"] <= max_tokens


def test_question_is_answered(ask: Ask) -> None:
    response = ask("What is the capital of France? Answer in one short sentence.")
    assert response["status"] == "completed"
    assert "Paris" in text(response)
    check_usage(response)


def test_roles_and_earlier_turns_are_read(ask: Ask) -> None:
    earlier = {"type": "output_text", "text": "Hello Rosalind, nice to meet you."}
    response = ask(
        [
            message("system", "You are a helpful assistant."),
            message("user", "Hi, my name is Rosalind."),
            {"type": "message", "id": "msg_" + "0" * 32, "role": "assistant", "content": [earlier]},
            message("user", "What is my name?"),
        ]
    )
    assert "Rosalind" in text(response)


def test_truncated_answer_is_incomplete_with_reason(ask: Ask) -> None:
    response = ask("Tell me a long story.", max_output_tokens=1)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_call_follows_schema_and_output_is_answered(ask: Ask, choice: Any) -> None:
    question = message("user", "What is the weather in Paris, in celsius?")
    response = ask([question], tools=[WEATHER], tool_choice=choice)
    assert response["status"] == "completed"
    calls = response["output"]
    assert {(item["type"], item["name"]) for item in calls} == {("function_call", "get_weather")}
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
    check_usage(response)

    outcomes = [
        {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": '{"temperature": 17, "sky": "light rain"}',
        }
        for call in calls
    ]
    response = ask([question, *calls, *outcomes], tools=[WEATHER], tool_choice="none")
    assert response["status"] == "completed"
    assert text(response)
    check_usage(response)


FORM = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 40},
        "language": {"enum": ["English", "French", "German"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 2},
    },
    "required": ["capital", "language", "rivers"],
    "additionalProperties": False,
}


def requested_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "country", "schema": schema}}


def test_answer_follows_response_format(ask: Ask) -> None:
    response = ask("Tell me about France.", response_format=requested_form(FORM))
    assert response["status"] == "completed"
    jsonschema.validate(json.loads(text(response)), FORM)
    check_usage(response)


def test_tool_choice_none_and_no_tools_give_text(ask: Ask) -> None:
    response = ask("Say hello.", tools=[WEATHER], tool_choice="none", max_output_tokens=24)
    assert text(response)


def test_unenforceable_format_is_problem_of_field(
    post: Callable[[dict[str, Any]], tuple[Reply, str]], stream: bool
) -> None:
    form = requested_form({"type": "array", "uniqueItems": True})
    reply, _ = post(request_for("Hi", stream=stream, response_format=form))
    problem = json.loads(reply.body)
    check_problem(problem)
    assert (problem["status"], problem["code"]) == (400, "unsupported_capability")
    assert problem["param"] == "response_format.json_schema.schema"
    assert "text.format" not in problem["detail"]
    assert "strict" not in problem["detail"], "not a term of LMSP"


def test_oversize_prompt_is_refused(post: Callable[[dict[str, Any]], tuple[Reply, str]], stream: bool) -> None:
    reply, _ = post(request_for("word " * 3000, stream=stream))
    problem = json.loads(reply.body)
    check_problem(problem)
    assert (problem["status"], problem["code"], problem["param"]) == (400, "context_length_exceeded", "input")
