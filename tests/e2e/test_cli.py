"""The command line, run in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from responses_kit.cli import api_key_owner
from responses_kit.errors import Unauthorized

from ..local.tiny import write_tiny
from ..support.servers import ROOT, process
from .test_docs import blocks

COMMAND = Path(sys.executable).with_name("responses-kit")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=50, env=os.environ | environment, check=False
    )


def run_command(*command: str) -> str:
    """Run a command, which must succeed, and return its output."""
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout


def serve(*arguments: str) -> AbstractContextManager[str]:
    """Run `responses-kit serve` on a free port and yield its base URL."""
    return process("answers at", COMMAND, "serve", *arguments)


@pytest.mark.local
def test_readme_commands_start_working_server() -> None:
    with serve("--lmsp") as address:
        base = f"{address}/v1"
        curl = next(block for block in blocks(ROOT / "README.md", "sh") if block.startswith("curl"))
        streamed = run_command("bash", "-c", curl.replace("http://127.0.0.1:8000/v1", base))
        assert "Paris" in "".join(re.findall(r'"response.output_text.done".*?"text":"(.*?)"', streamed))
        assert streamed.endswith("data: [DONE]\n\n")
        sdk = next(
            block for block in blocks(ROOT / "docs" / "get-started" / "quickstart.md", "python") if "OpenAI(" in block
        )
        assert "Paris" in run_command(sys.executable, "-c", sdk.replace("http://127.0.0.1:8000/v1", base))
        second = blocks(ROOT / "docs" / "guides" / "lmsp.md", "sh")[-1].partition("\n")[2]
        streamed = run_command("bash", "-c", second.replace("http://127.0.0.1:8000", address))
        assert "Paris" in "".join(re.findall(r'"output_text","text":"(.*?)"', streamed))


@pytest.mark.local
def test_served_key_is_required_and_scopes_responses() -> None:
    with serve("--api-key", "alice-key", "--api-key", "bob-key") as address:
        base = f"{address}/v1"
        question = {"input": "Say hello.", "max_output_tokens": 16}
        alice, bob = ({"Authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
        assert httpx.post(f"{base}/responses", json=question).status_code == 401
        wrong = httpx.post(f"{base}/responses", json=question, headers={"Authorization": "Bearer eve-key"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        created = httpx.post(f"{base}/responses", json=question, headers=alice, timeout=30).json()
        assert httpx.get(f"{base}/responses/{created['id']}", headers=alice).status_code == 200
        assert httpx.get(f"{base}/responses/{created['id']}", headers=bob).status_code == 404


@pytest.mark.local
def test_pull_prints_file_and_list_shows_it() -> None:
    pulled = run("models", "pull")
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip().replace("\n", "")).exists()
    assert "SmolLM2" in run("models", "list").stdout


def test_empty_cache_prints_remedy(tmp_path: Path) -> None:
    listed = run("models", "list", RESPONSES_KIT_CACHE=str(tmp_path))
    assert listed.returncode == 0
    assert "responses-kit models pull" in listed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--model", "/no/such/model.gguf"), "no file"),
        (("serve", "--model", __file__), "GGUF"),
        (("models", "pull", "/no/such/model.gguf"), "no file"),
        (("models", "convert", __file__, "-o", "/tmp/never.gguf"), "GGUF"),
    ],
)
def test_invalid_model_is_refused_without_traceback(arguments: tuple[str, ...], message: str) -> None:
    refused = run(*arguments)
    assert refused.returncode == 1
    assert refused.stderr.count("Error: ") == 1
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.local
def test_convert_writes_loadable_file(tmp_path: Path) -> None:
    from responses_kit.backends.local import cache
    from responses_kit.backends.local.gguf.header import read_header

    run("models", "pull")
    source = next(file.path for file in cache.list_files() if not file.is_converted)
    target = tmp_path / "converted.gguf"
    converted = run("models", "convert", str(source), "-o", str(target))
    assert converted.returncode == 0, converted.stderr
    assert read_header(target).version == 2


def test_convert_refuses_unsupported_model_and_writes_nothing(tmp_path: Path) -> None:
    source, target = write_tiny(tmp_path / "gemma.gguf", arch="gemma"), tmp_path / "converted.gguf"
    refused = run("models", "convert", str(source), "-o", str(target))
    assert refused.returncode == 1
    assert "gemma" in refused.stderr.replace("\n", "")
    assert not target.exists()


def test_check_prints_findings_line_by_line() -> None:
    with process("Uvicorn running", sys.executable, "-m", "uvicorn", "examples.scripted_app:app") as address:
        good = run("check", f"{address}/v1")
        assert (good.returncode, good.stderr) == (0, "")
        verdicts = [line.split()[:2] for line in good.stdout.splitlines()]
        assert verdicts[:3] == [["ok", "models"], ["skipped", "key"], ["ok", "answer"]]
        assert {verdict for verdict, _ in verdicts} == {"ok", "skipped"}
        bad = run("check", address)
        assert bad.returncode == 1
        assert bad.stdout.startswith("failed")
        assert f"The API is at {address}/v1" in bad.stdout


def test_check_reads_key_from_environment_and_hides_it() -> None:
    with process("Uvicorn running", sys.executable, "-m", "uvicorn", "examples.scripted_app:app") as address:
        arguments = ("check", f"{address}/v1", "--header", "X-Token: tea-at-half-past-six", "--timeout", "20")
        open_to_all = run(*arguments, RESPONSES_KIT_API_KEY="alice-key bob-key")
    assert open_to_all.returncode == 1
    assert "A made-up key is accepted" in open_to_all.stdout
    for secret in ("alice-key", "bob-key", "tea-at-half"):
        assert secret not in open_to_all.stdout + open_to_all.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:8000/v1",), "http://127.0.0.1:8000/v1"),
        (("http://127.0.0.1:1/v1", "--header", "Token"), "Name: value"),
        (("http://127.0.0.1:1/v1", "--header", "To ken: secret"), "Header names must"),
    ],
)
def test_check_refuses_invalid_arguments_without_traceback(arguments: tuple[str, ...], message: str) -> None:
    refused = run("check", *arguments)
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: ")
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "secret" not in refused.stderr


class HostRequest:
    def __init__(self, authorization: str) -> None:
        self.headers = {"authorization": authorization}


def test_each_key_is_separate_owner_and_is_not_disclosed() -> None:
    owner = api_key_owner(["alice-key", "bob-key"])
    alice, bob = owner(HostRequest("Bearer alice-key")), owner(HostRequest("bearer bob-key"))
    assert alice
    assert bob
    assert alice != bob
    assert "key" not in alice


@pytest.mark.parametrize("header", ["Bearer ", "Bearer alice-ke", "Bearer alice-keyy", "Bearer ключ"])
def test_unknown_key_is_unauthorized(header: str) -> None:
    assert api_key_owner(["alice-key"])(HostRequest(header)) is None


@pytest.mark.parametrize("header", ["", "Basic alice-key", "alice-key"])
def test_missing_key_explains_header(header: str) -> None:
    with pytest.raises(Unauthorized, match="Bearer"):
        api_key_owner(["alice-key"])(HostRequest(header))
