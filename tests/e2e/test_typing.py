"""The public names under `mypy --strict`, in a project of a user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from flask import Flask
from starlette.applications import Starlette
from starlette.requests import Request

from responses_kit import (
    LMSP,
    APIError,
    Backend,
    HostedTool,
    Limits,
    MemoryStore,
    Model,
    ResponsesKit,
    Timeouts,
    Turn,
    errors,
    open_store,
    outputs,
)
from responses_kit.backends import LocalBackend
from responses_kit.runners import LocalRunner
from responses_kit.stores import RedisStore, ResponseStore, SqlStore
from responses_kit.testing import ScriptedBackend
from responses_kit_flask import Responses
from responses_kit_starlette import ResponsesApp, ResponsesMiddleware, responses_routes


class Parrot(Backend):
    models = [Model("parrot", tools=True)]

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        yield turn.text
        yield outputs.Usage(input_tokens=1, output_tokens=1)


def count(article: str) -> int:
    """Return the pieces of an article in stock."""
    return len(article)


def owner(request: Request) -> str | None:
    if "authorization" not in request.headers:
        raise errors.Unauthorized("Send a key.")
    return request.headers["authorization"]


async def on_response_end(owner: str, response: dict[str, Any]) -> None:
    print(owner, response["id"])


stores: list[ResponseStore] = [MemoryStore(), SqlStore("sqlite:///x.db"), RedisStore("redis://localhost")]
opened: ResponseStore = open_store("memory:")
backends: list[Backend] = [Parrot(), ScriptedBackend(["Hi"]), LocalBackend("smollm2")]

kit = ResponsesKit(
    Parrot(),
    store=stores[0],
    tools=[HostedTool.from_function("acme:count", count)],
    runner=LocalRunner(max_concurrent=2),
    secrets=["a secret of sixteen characters"],
    owner=owner,
    on_response_end=on_response_end,
    limits=Limits(max_body_bytes=1_000_000),
    timeouts=Timeouts(keep_alive=5.0),
    stream_reasoning=True,
    allowed_origins=["https://app.example"],
)


async def use() -> str:
    async with kit.lifespan(grace=1.0), kit.stream({"input": "Hi"}) as events:
        async for event in events:
            print(event["type"])
    try:
        response = await kit.create({"input": "Hi"}, owner="ann")
    except APIError as error:
        return error.code
    async for event in kit.events(response["id"], owner="ann", after=3):
        print(event["sequence_number"])
    tokens: int | None = await kit.count_tokens({"input": "Hi"})
    print(tokens, await kit.wait(response["id"], owner="ann"), await kit.prune())
    status: str = (await kit.cancel(response["id"], owner="ann"))["status"]
    return status


app = Starlette(routes=responses_routes(kit))
app.mount("/lmsp/v1", ResponsesApp(kit, dialect=LMSP))
asgi = ResponsesMiddleware(app, kit, prefix="/v2")
flask_app = Flask(__name__)
responses = Responses(flask_app, kit, url_prefix="/v1", dialect=LMSP)


@flask_app.post("/ask")
@responses.endpoint
def ask(turn: Turn) -> str:
    return turn.text
'''

MISTAKES = {
    "ResponsesKit(Parrot(), patience=5)": "Unexpected keyword argument",
    "Limits(max_body_bytes='1MB')": "Argument",
    "import responses_kit; responses_kit.Nothing": "no attribute",
}


def check(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run `mypy --strict` on a program as in an empty project."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache", "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(300)  # mypy reads the whole package, several times
def test_user_program_passes_mypy_strict(tmp_path: Path) -> None:
    checked = check(tmp_path, PROGRAM)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for mistake, message in MISTAKES.items():
        checked = check(tmp_path, f"{PROGRAM}\n{mistake}\n")
        assert checked.returncode == 1, f"{mistake}: {checked.stdout}"
        assert message in checked.stdout, checked.stdout
