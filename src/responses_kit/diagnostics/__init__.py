"""Smoke check of a running server, over the network and with everything in front of the API.

It finds faults that no test of an app can find: proxies and middleware that buffer streams, the host's own error pages,
processes without a shared store. It deletes the responses that it creates.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigurationError
from .answers import CheckFailed, CheckSkipped

try:
    from .checks import Checks
    from .server import Server
except ModuleNotFoundError as missing:
    raise ImportError('The check needs httpx: pip install "responses-kit[cli]"') from missing

__all__ = ["VERDICTS", "Finding", "check", "report"]

VERDICTS: Final[Mapping[bool | None, tuple[str, str]]] = {
    True: ("ok", "green"),
    False: ("failed", "red"),
    None: ("skipped", "yellow"),
}
"""Word and colour of a finding, by its `ok`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: The check, in a word or two.
        ok: Whether the check passed; None if it was skipped.
        detail: The observation and, for a failed check, the remedy. Never holds a key.
    """

    name: str
    ok: bool | None
    detail: str


async def check(
    url: str,
    *,
    key: str | None = None,
    model: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109  # of each of many requests, not of the call
) -> AsyncGenerator[Finding, None]:
    """Check a running server and yield each finding as soon as it is made.

    If the API is not found or refuses the key, the first finding is the only one. To stop early, close the generator,
    for example with `contextlib.aclosing`.

    Args:
        url: Base URL of the API, such as `http://127.0.0.1:8000/v1`.
        key: Sent as a bearer token.
        model: The model to ask; by default the first that the server lists.
        headers: Sent with every request.
        timeout: Seconds that each request may take, up to the last byte of its reply.

    Raises:
        ConfigurationError: The URL or a header is not valid.
    """
    server = Server(url, key, headers or {}, timeout)
    async with server.client:
        for name, step in Checks(server, key, model).all():
            ok: bool | None = True
            try:
                detail = await step()
            except CheckSkipped as skipped:
                ok, detail = None, str(skipped)
            except CheckFailed as failed:
                ok, detail = False, str(failed)
            yield Finding(name, ok, server.redact(detail))
            if name == "models" and not ok:
                return


async def report(url: str, show: Callable[[Finding], None], *, headers: Sequence[str] = (), **options: Any) -> int:
    """Check a running server for a command line.

    Args:
        url: See `check`.
        show: Prints a finding.
        headers: Headers as typed, such as "X-Tenant: shop".
        options: Other arguments of `check`.

    Returns:
        The number of failed checks.

    Raises:
        ConfigurationError: The URL or a header is not valid.
    """
    failed = 0
    async with aclosing(check(url, headers=dict(map(_header, headers)), **options)) as findings:
        async for finding in findings:
            show(finding)
            failed += finding.ok is False
    return failed


def _header(given: str) -> tuple[str, str]:
    name, colon, value = given.partition(":")
    if not colon:
        raise ConfigurationError('A header must have the form "Name: value".')
    return name.strip(), value.strip()
