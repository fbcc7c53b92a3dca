"""docs/flask.md, followed to the letter: its blocks make an app, which is served, set up and asked as it says."""

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

TEXT = (ROOT / "docs" / "flask.md").read_text()
BLOCKS = [code for _, code in re.findall(r"^( *)```python\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)]
FILES = ("app.py", "factory.py", "guarded.py", "test_app.py", "gunicorn.conf.py")
CLIENT = next(block for block in BLOCKS if block.startswith("# client.py"))
COMMANDS = [
    line for code in re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for line in code.split("\n")
]
BOUND = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name in FILES:
        (folder / name).write_text(
            "\n\n".join(textwrap.dedent(one) for one in BLOCKS if one.strip().startswith(f"# {name}\n"))
        )
    return folder


def flask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flask", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BOUND, check=False)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The app on gunicorn, as the table of servers says."""
    said = re.search(r"`gunicorn (-k gthread --threads \d+) app:app`", TEXT)
    assert said is not None
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "-b", f"127.0.0.1:{port}", *said[1].split(), "app:app"]
    with running(command, port, folder / "log", bound=BOUND, path="/v1/models", cwd=folder) as address:
        yield address


def test_the_request_of_the_page_is_streamed_as_the_view_makes_it(address: str) -> None:
    (body,) = {line.partition(" -d '")[2].rstrip("'") for line in COMMANDS if "/ask " in line}
    reply = httpx.post(f"{address}/ask", json=json.loads(body), timeout=BOUND)
    assert [event["delta"] for event in events(reply.text) if event["type"] == "response.output_text.delta"] == [
        "Hello ",
        "from ",
        "Flask ",
    ]


def events(text: str) -> list[dict[str, str]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_sdk_talks_to_a_view_at_a_path_with_a_value(address: str, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT.replace("http://127.0.0.1:5000", address))
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=BOUND, check=True)
    assert told.stdout.strip() == "anna has read: Hello from Flask"


def test_the_api_under_a_prefix_is_there_and_finds_the_app(address: str) -> None:
    answer = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, timeout=BOUND).json()
    check_response(answer)
    assert answer["output"][0]["content"][0]["text"] == "app: Hi"


def test_who_is_not_logged_in_or_has_no_key_is_told_so_in_the_apis_shape(address: str) -> None:
    for path in ("/notes/ask", "/keyed/responses"):
        reply = httpx.post(f"{address}{path}", json={"input": "Hi"}, timeout=BOUND)
        assert reply.status_code == 401, path
        check_error(reply.json())
    key = {"Authorization": "Bearer a key of anna's"}
    reply = httpx.post(f"{address}/keyed/responses", json={"input": "Hi"}, headers=key, timeout=BOUND)
    assert reply.status_code == 200


def test_the_commands_make_the_store_ready_and_keep_it_small(folder: Path, address: str) -> None:
    commands = [
        line.partition("  #")[0].split()[1:] for line in COMMANDS if re.match(r"flask responses (setup|prune)", line)
    ]
    assert len(commands) == 2
    for command in commands:
        done = flask(folder, *command)
        assert done.returncode == 0, done.stderr
    reply = httpx.post(f"{address}/stored/responses", json={"input": "Hi"}, timeout=BOUND)
    assert httpx.get(f"{address}/stored/responses/{reply.json()['id']}", timeout=BOUND).json() == reply.json()


def test_the_check_finds_the_app_in_order(folder: Path, address: str) -> None:
    (command,) = (line.partition("  #")[0].split()[1:-1] for line in COMMANDS if "responses check" in line)
    done = flask(folder, *command, f"{address}/v1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("app", "path", "status"),
    [
        ("factory", "/ask", 200),
        ("factory", "/v1/responses", 200),
        ("guarded", "/v1/responses", 403),
        ("app", "/ask", 200),
    ],
)
def test_an_app_is_made_in_each_of_the_ways(folder: Path, app: str, path: str, status: int) -> None:
    script = (
        f"import {app} as made; app = made.create_app() if hasattr(made, 'create_app') else made.app\n"
        f"reply = app.test_client().post({path!r}, json={{'input': 'Hi'}}, headers={{'X-Hour': '3'}})\n"
        "print(reply.status_code, reply.text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=BOUND, check=True
    )
    assert done.stdout.startswith(f"{status} {{")
    if app == "guarded":
        assert "It is night." in done.stdout


def test_the_tests_of_the_page_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BOUND, check=False)
    assert "2 passed" in done.stdout, done.stdout
