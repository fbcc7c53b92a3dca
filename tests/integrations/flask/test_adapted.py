"""Flask behind an ASGI adapter, and Quart: what the documents promise of them."""

from __future__ import annotations

import json
import sys

import httpx
import pytest
from openai import OpenAI
from websockets.sync.client import connect

from ...support.conformance import check_error
from ...support.servers import process


@pytest.mark.parametrize(
    ("app", "base", "said"),
    [
        ("flask_app", "/v1", "Hello, Anna"),
        ("flask_app", "/ask", "Hello, Anna of ann"),
        ("quart_app", "/v1", "Hello, Anna"),
    ],
)
def test_it_answers_under_an_asgi_server(app: str, base: str, said: str) -> None:
    command = (sys.executable, "-m", "uvicorn", f"tests.integrations.flask.adapted:{app}")
    with process("Uvicorn running", *command) as address, OpenAI(base_url=address + base, api_key="unused") as client:
        assert client.responses.create(model="scripted", input="Anna").output_text == said
        with client.responses.create(model="scripted", input="Anna", stream=True) as events:
            told = list(events)
        assert [event.delta for event in told if event.type == "response.output_text.delta"] == [said[:7], said[7:]]
        assert told[-1].type == "response.completed"
        lost = httpx.get(f"{address}/v1/nothing")
        assert lost.status_code == 404
        check_error(lost.json())
        if app == "quart_app":
            assert httpx.get(address).text == "a page"
            with connect(f"ws{address[4:]}/v1/responses") as socket:
                socket.send('{"type": "response.create", "input": "Anna"}')
                while (event := json.loads(socket.recv(timeout=10)))["type"] != "response.completed":
                    pass
                assert event["response"]["output"][0]["content"][0]["text"] == said
