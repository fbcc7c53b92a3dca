"""Django projects as their users run them: `manage.py`, and servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...support.servers import free_port, running

__all__ = ["SERVERS", "Project"]

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
        environment = {**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"}
        log = tmp_path / f"{server}.log"
        with running(
            [sys.executable, *command, *options], port, log, bound=BOUND, cwd=self.folder, env=environment
        ) as address:
            yield address
