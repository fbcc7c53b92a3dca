"""Django projects with `manage.py` and servers in their own processes."""

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
"""The arguments of each server after the interpreter."""


@dataclass(slots=True, kw_only=True)
class Project:
    """A project in a folder.

    Attributes:
        folder: The folder with `manage.py`.
        name: The package with the settings.
        environment: Additional environment variables of commands and servers.
    """

    folder: Path
    name: str
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run Python with arguments, and return the output."""
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
        """Run `manage.py`, and return the output."""
        return self.run("manage.py", *command, environment=environment)

    @contextmanager
    def served(self, server: str, tmp_path: Path, *options: str) -> Iterator[str]:
        """Run a server, yield its URL, and stop it with SIGTERM.

        Args:
            server: One of `SERVERS`.
            tmp_path: The folder for its log.
            options: Additional arguments of the server.
        """
        port = free_port()
        command = SERVERS[server].format(name=self.name, port=port).split()
        environment = {**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"}
        log = tmp_path / f"{server}.log"
        with running(
            [sys.executable, *command, *options], port, log, bound=BOUND, cwd=self.folder, env=environment
        ) as address:
            yield address
