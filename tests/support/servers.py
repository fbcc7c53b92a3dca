"""Servers in separate processes on free ports, stopped with SIGTERM."""

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
    """Run a server, yield its address when it answers, and stop it with SIGTERM.

    Args:
        command: The command.
        port: The port on which it listens.
        log: The file for its output, which must not contain a traceback.
        bound: The timeout for start and for stop, in seconds.
        path: The path of the request that checks whether it answers.
        more: Further arguments of `subprocess.Popen`.
    """
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **more)
    with ended(server, bound):
        until = time.monotonic() + bound
        while not _answers(f"{address}{path}", bound):
            if server.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the server does not answer:\n{log.read_text()}")
            time.sleep(0.05)  # a separate process can only be polled
        yield address
    assert "Traceback" not in log.read_text(), log.read_text()


@contextmanager
def ended(process: subprocess.Popen[bytes], bound: float) -> Iterator[None]:
    """Stop a process with SIGTERM at the end of the block."""
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
    """Run a command with a `--port` argument and yield the address of its server.

    Args:
        ready: The text in its standard error that signals readiness.
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
