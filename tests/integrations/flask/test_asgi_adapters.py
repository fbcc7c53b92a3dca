"""Flask behind an ASGI adapter, and Quart."""

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
    ("app", "base", "expected"),
    [
        ("flask_app", "/v1", "Hello, Anna"),
        ("flask_app", "/ask", "Hello, Anna of ann"),
        ("quart_app", "/v1", "Hello, Anna"),
    ],
)
def test_app_answers_under_asgi_server(app: str, base: str, expected: str) -> None:
    command = (sys.executable, "-m", "uvicorn", f"tests.integrations.flask.asgi_apps:{app}")
    with process("Uvicorn running", *command) as address, OpenAI(base_url=address + base, api_key="unused") as client:
        assert client.responses.create(model="scripted", input="Anna").output_text == expected
        with client.responses.create(model="scripted", input="Anna", stream=True) as events:
            event_list = list(events)
        assert [event.delta for event in event_list if event.type == "response.output_text.delta"] == [
            expected[:7],
            expected[7:],
        ]
        assert event_list[-1].type == "response.completed"
        not_found = httpx.get(f"{address}/v1/nothing")
        assert not_found.status_code == 404
        check_error(not_found.json())
        if app == "quart_app":
            assert httpx.get(address).text == "a page"
            with connect(f"ws{address[4:]}/v1/responses") as socket:
                socket.send('{"type": "response.create", "input": "Anna"}')
                while (event := json.loads(socket.recv(timeout=10)))["type"] != "response.completed":
                    pass
                assert event["response"]["output"][0]["content"][0]["text"] == expected
