"""The kit does not affect the host's own app."""

from __future__ import annotations

import json

import pytest
from websockets.frames import Opcode

from . import hosts
from .client import Client, output_text, script
from .scripted import Control

pytestmark = pytest.mark.anyio

SERVED_BY = [*hosts.DEFAULT_HOSTS, hosts.DJANGO_WSGI, hosts.WAITRESS, *hosts.MOUNTS]


async def test_host_paths_are_unaffected(client):
    reply = await client.request("POST", "/host/echo?a=1&b=%20", b"some words", host_path=True)
    assert (reply.status, "x-host" in reply.headers) == (200, True)
    assert json.loads(reply.body) == {
        "method": "POST",
        "path": "/host/echo",
        "root_path": "",
        "query": "a=1&b=%20",
        "length": 10,
        "body": "some words",
    }


async def test_host_paths_have_no_body_limit(client):
    body = b"x" * (hosts.MAX_BODY_BYTES + 1)
    reply = await client.request("POST", "/host/echo", body, headers={"Content-Type": "text/plain"}, host_path=True)
    assert f'"length":{len(body)}'.encode() in reply.body.replace(b" ", b"")


@pytest.mark.parametrize(
    "path", ["/", "/v1x/responses", "/v1responses", "/v2/responses", "/responses", "/host/v1/responses", "/V1/models"]
)
async def test_similar_paths_belong_to_host(client, path):
    reply = await client.get(path, host_path=True)
    assert (reply.status, reply.body) == (404, hosts.HOST_404.encode())


async def test_host_startup_code_runs(client, server):
    if not server.host.has_lifespan:
        return
    assert b'"started":true' in (await client.get("/host/state", host_path=True)).body.replace(b" ", b"")
    assert output_text(await client.create(input=script("and so has ours"))) == "and so has ours"


@pytest.mark.parametrize(
    "path", ["/api/v1/models", "/v1/models"], ids=["path with root path", "path without root path"]
)
async def test_kit_is_mounted_below_root_path(path):
    # With some servers the path includes the root path, with some it does not.
    app = hosts.middleware(hosts.build_kit(Control(), "loop"))
    headers = [(b"authorization", b"Bearer alice")]
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "/api", "headers": headers}
    sent = await call(app, scope, {"type": "http.request"})
    assert sent[0]["status"] == 200


async def call(app, scope, *messages):
    """Call an ASGI app without a server, and return the messages that it sends."""
    waiting, sent = list(messages), []

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    await app({"asgi": {"version": "3.0"}, "headers": [], "query_string": b"", "root_path": "", **scope}, receive, send)
    return sent


@pytest.mark.websockets
async def test_host_websockets_are_unaffected(client):
    async with Client(client.port, prefix="/host").websocket(path="/socket") as socket:
        event = await socket.event()
        assert (event.opcode, event.data) == (Opcode.TEXT, b"host at /host/socket")
        assert await socket.next() is None
        assert socket.code == 1000


IN_THIS_PROCESS = {name: host for name, host in hosts.HOSTS.items() if host.has_lifespan and not host.is_process_wide}


@pytest.mark.parametrize("host", IN_THIS_PROCESS.values(), ids=IN_THIS_PROCESS)
async def test_host_lifespan_is_unaffected(host):
    app = host.app(hosts.build_kit(Control(), "loop"))
    scope = {"type": "lifespan", "state": {}}
    sent = await call(app, scope, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert scope["state"] == {"started": True}
