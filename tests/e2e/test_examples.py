"""Each example, run by a real server and called over HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager

import httpx
import pytest
from openai import OpenAI

from ..support.conformance import check_response
from ..support.servers import ROOT, process


def served(example: str) -> AbstractContextManager[str]:
    """Run the example under uvicorn and yield its address."""
    return process("Uvicorn running", sys.executable, "-m", "uvicorn", f"examples.{example}:app")


def test_parrot_repeats_input() -> None:
    with served("parrot") as address:
        answer = httpx.post(f"{address}/v1/responses", json={"input": "Polly wants a cracker"}).json()
        check_response(answer)
        assert answer["output"][0]["content"][0]["text"] == "Polly wants a cracker "


def test_scripted_app_supports_history_tools_and_schemas() -> None:
    with served("scripted_app") as address, OpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        introduction = client.responses.create(model="scripted", input="My name is Alice.")
        reply = client.responses.create(
            model="scripted", input="What is my name?", previous_response_id=introduction.id
        )
        assert reply.output_text == "Your name is Alice."
        tool = {
            "type": "function",
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        }
        call = client.responses.create(model="scripted", input="How is the weather?", tools=[tool]).output[0]
        assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "San Francisco"}')
        form = {
            "type": "json_schema",
            "name": "city",
            "schema": {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]},
        }
        filled = client.responses.create(model="scripted", input="Fill in.", text={"format": form})
        assert filled.output_text == '{"size": 1}'


@pytest.mark.local
def test_starlette_app_keeps_pages_and_separates_users() -> None:
    with served("starlette_app") as address, httpx.Client(base_url=address, timeout=50) as client:
        assert "Welcome" in client.get("/").text
        alice, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("alice", "bob"))
        question = {"input": "Say hello.", "max_output_tokens": 16}
        assert client.post("/v1/responses", json=question).status_code == 401
        answer = client.post("/v1/responses", json=question, headers=alice).json()
        check_response(answer)
        assert client.get(f"/v1/responses/{answer['id']}", headers=alice).status_code == 200
        assert client.get(f"/v1/responses/{answer['id']}", headers=bob).status_code == 404


@pytest.mark.timeout(180)  # the model is slow if other tests use the processor
@pytest.mark.local
def test_agent_uses_hosted_mcp_and_client_tools() -> None:
    command = [sys.executable, "-m", "examples.agent"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=160, check=True).stdout
    calls = re.findall(r"^\[(\S+): (\w+)\((\{.*\})\)\] ?(.*)$", printed, re.MULTILINE)
    assert [(kind, name) for kind, name, _, _ in calls] == [
        ("shop:stock", "stock"),
        ("shop:delivery", "delivery_date"),
        ("function_call", "confirm"),
    ]
    assert json.loads(calls[0][3])["pieces"] == 12
    assert calls[1][3].startswith("It arrives on ")
    assert printed.rpartition("]")[2].strip()  # and the model continues after the tool's output
