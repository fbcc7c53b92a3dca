"""Servers as users start them: in processes of their own, on a free port, stopped as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str | os.PathLike[str]], port: int, log: Path, *, bound: float, path: str = "", **more: Any
) -> Iterator[str]:
    """Runs a server until the block ends, as SIGTERM ends it; gives its address once it answers.

    Args:
        command: The command.
        port: Where it listens.
        log: What it says goes there, and is no traceback.
        bound: Seconds that its start, and its end, may take.
        path: What is asked for to see whether it answers.
        more: As for `subprocess.Popen`.
    """
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **more)
    with ended(server, bound):
        until = time.monotonic() + bound
        while not _answers(f"{address}{path}", bound):
            if server.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the server does not answer:\n{log.read_text()}")
            time.sleep(0.05)  # another process can only be polled
        yield address
    assert "Traceback" not in log.read_text(), log.read_text()


@contextmanager
def ended(process: subprocess.Popen[bytes], bound: float) -> Iterator[None]:
    """Ends a process with the block, as SIGTERM does it."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(bound)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _answers(address: str, bound: float) -> bool:
    try:
        httpx.get(address, timeout=bound)
    except httpx.TransportError:
        return False
    return True


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
