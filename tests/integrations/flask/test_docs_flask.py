"""The Flask pages of the documentation: their blocks form an app that is served, called and tested as they describe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ...support.conformance import check_error, check_response
from ...support.servers import ROOT, free_port, running

TEXT = "\n".join((ROOT / "docs" / folder / "flask.md").read_text() for folder in ("get-started", "guides"))
BLOCKS = [code for _, code in re.findall(r"^( *)```python\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)]
FILES = ("app.py", "factory.py", "guarded.py", "test_app.py", "gunicorn.conf.py")
CLIENT = next(block for block in BLOCKS if block.startswith("# client.py"))
COMMANDS = [
    line for code in re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for line in code.split("\n")
]
TIMEOUT = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the pages."""
    folder = tmp_path_factory.mktemp("site")
    for name in FILES:
        blocks = [textwrap.dedent(block) for block in BLOCKS if block.strip().startswith(f"# {name}\n")]
        (folder / name).write_text("\n\n".join(blocks))
    return folder


def flask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `flask` command in the app's folder."""
    command = [sys.executable, "-m", "flask", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def events(text: str) -> list[dict[str, str]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Serve the app with the gunicorn options of the table of servers."""
    options = re.search(r"`gunicorn (-k gthread --threads \d+) app:app`", TEXT)
    assert options is not None
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "-b", f"127.0.0.1:{port}", *options[1].split(), "app:app"]
    with running(command, port, folder / "log", bound=TIMEOUT, path="/v1/models", cwd=folder) as address:
        yield address


def test_view_streams_each_yield(address: str) -> None:
    (body,) = {line.partition(" -d '")[2].rstrip("'") for line in COMMANDS if "/ask " in line}
    reply = httpx.post(f"{address}/ask", json=json.loads(body), timeout=TIMEOUT)
    deltas = [event["delta"] for event in events(reply.text) if event["type"] == "response.output_text.delta"]
    assert deltas == ["Hello ", "from ", "Flask "]


def test_sdk_calls_view_with_url_value(address: str, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT.replace("http://127.0.0.1:5000", address))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout.strip() == "anna received: Hello from Flask"


def test_api_under_prefix_uses_application_context(address: str) -> None:
    response = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, timeout=TIMEOUT).json()
    check_response(response)
    assert response["output"][0]["content"][0]["text"] == "app: Hi"


def test_anonymous_request_gets_401_in_api_format(address: str) -> None:
    for path in ("/notes/ask", "/keyed/responses"):
        reply = httpx.post(f"{address}{path}", json={"input": "Hi"}, timeout=TIMEOUT)
        assert reply.status_code == 401, path
        check_error(reply.json())


def test_request_with_key_is_answered(address: str) -> None:
    key = {"Authorization": "Bearer a key of anna's"}
    reply = httpx.post(f"{address}/keyed/responses", json={"input": "Hi"}, headers=key, timeout=TIMEOUT)
    assert reply.status_code == 200


def test_store_commands_set_up_and_prune_the_store(folder: Path, address: str) -> None:
    commands = [
        line.partition("  #")[0].split()[1:] for line in COMMANDS if re.match(r"flask responses (setup|prune)", line)
    ]
    assert len(commands) == 2
    for command in commands:
        done = flask(folder, *command)
        assert done.returncode == 0, done.stderr
    reply = httpx.post(f"{address}/stored/responses", json={"input": "Hi"}, timeout=TIMEOUT)
    assert httpx.get(f"{address}/stored/responses/{reply.json()['id']}", timeout=TIMEOUT).json() == reply.json()


def test_check_command_finds_no_failure(folder: Path, address: str) -> None:
    (command,) = (line.partition("  #")[0].split()[1:-1] for line in COMMANDS if "responses check" in line)
    done = flask(folder, *command, f"{address}/v1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "path", "status"),
    [
        ("factory", "/ask", 200),
        ("factory", "/v1/responses", 200),
        ("guarded", "/v1/responses", 403),
        ("app", "/ask", 200),
    ],
)
def test_app_of_each_module_answers(folder: Path, module: str, path: str, status: int) -> None:
    script = (
        f"import {module} as module; app = module.create_app() if hasattr(module, 'create_app') else module.app\n"
        f"reply = app.test_client().post({path!r}, json={{'input': 'Hi'}}, headers={{'X-Hour': '3'}})\n"
        "print(reply.status_code, reply.text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout.startswith(f"{status} {{")
    if module == "guarded":
        assert "The service is closed at night." in done.stdout


def test_tests_of_the_page_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert "2 passed" in done.stdout, done.stdout
