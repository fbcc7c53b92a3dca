"""Servers as users start them: in processes of their own, on a free port, stopped as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(ready: str, *command: str | os.PathLike[str]) -> Iterator[str]:
    """Runs a command with `--port` behind it until the block ends; gives its address.

    Args:
        ready: What its standard error says when it can be asked.
        command: The command.
    """
    port = free_port()
    server = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if ready in line:
                break
        else:
            pytest.fail(f"the server ended with {server.wait(5)}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()
            raise
    assert server.returncode in (0, -signal.SIGINT)
