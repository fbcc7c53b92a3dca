"""Django projects as their users run them: `manage.py`, and servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ..serving import free_port

__all__ = ["SERVERS", "Project", "ended"]

BOUND = 30.0

SERVERS: Mapping[str, str] = {
    "runserver": "manage.py runserver --noreload 127.0.0.1:{port}",
    "uvicorn": "-m uvicorn {name}.asgi:application --port {port}",
    "gunicorn": "-m gunicorn {name}.wsgi --bind 127.0.0.1:{port} --worker-class gthread --threads 8",
}
"""What each is started with, behind the interpreter."""


@dataclass(slots=True, kw_only=True)
class Project:
    """A project in a folder.

    Attributes:
        folder: Where `manage.py` is.
        name: Its package, which has the settings.
        environment: What its commands and servers find in their environment beside this process's own.
    """

    folder: Path
    name: str
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a Python command says, which has to succeed."""
        done = subprocess.run(
            [sys.executable, "-W", "error", *command],
            cwd=self.folder,
            env={**os.environ, **self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What `manage.py` says."""
        return self.run("manage.py", *command, environment=environment)

    @contextmanager
    def served(self, server: str, tmp_path: Path, *options: str) -> Iterator[str]:
        """Runs a server until the block ends, as SIGTERM ends it; gives its address.

        Args:
            server: One of `SERVERS`.
            tmp_path: Where its log goes.
            options: What it is started with, beside what it takes.
        """
        port = free_port()
        command = SERVERS[server].format(name=self.name, port=port).split()
        log = tmp_path / f"{server}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command, *options],
                cwd=self.folder,
                env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        with ended(process):
            address = f"http://127.0.0.1:{port}"
            until = time.monotonic() + BOUND
            while not _answers(address):
                if process.poll() is not None or time.monotonic() > until:
                    pytest.fail(f"{server} does not answer:\n{log.read_text()}")
                time.sleep(0.05)  # another process can only be polled
            yield address
        assert "Traceback" not in log.read_text(), log.read_text()


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a process with the block, as SIGTERM does it."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(BOUND)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _answers(address: str) -> bool:
    try:
        httpx.get(address, timeout=BOUND)
    except httpx.TransportError:
        return False
    return True
