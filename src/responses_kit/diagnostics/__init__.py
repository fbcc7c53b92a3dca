"""A smoke check of a running server: whether what a client needs gets through all that stands before the API.

It asks as a client would, over the network, and so sees what no test of an app sees: proxies and middleware that hold
streams back, pages of the host's own where errors belong, processes that do not share a store. What it has the server
keep it deletes again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigurationError
from .answers import Failed, Skipped

try:
    from .server import Server
    from .steps import Steps
except ModuleNotFoundError as missing:
    raise ImportError('The check needs httpx: pip install "responses-kit[cli]"') from missing

__all__ = ["VERDICTS", "Finding", "check", "report"]

VERDICTS: Final[Mapping[bool | None, tuple[str, str]]] = {
    True: ("ok", "green"),
    False: ("failed", "red"),
    None: ("skipped", "yellow"),
}
"""What is said of a finding in a word, by its `ok`, and in which colour."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is about, in a word or two.
        ok: None where it was skipped or could not be judged.
        detail: What was seen and, where it is not as it should be, what to do. Never holds a key.
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
    """Looks at a running server, one thing after the other; each finding comes as soon as it is made.

    Where the API is not found, or refuses the key, the first finding is the only one. Whoever leaves early closes the
    generator, as by `contextlib.aclosing`.

    Args:
        url: The API's base, such as `http://127.0.0.1:8000/v1`.
        key: Sent as a bearer token.
        model: Which one to ask; by default the first that the server lists.
        headers: Sent with every request.
        timeout: Seconds that each request may take, up to the last byte of its answer.

    Raises:
        ConfigurationError: No request can be made of these.
    """
    server = Server(url, key, headers or {}, timeout)
    async with server.client:
        for name, step in Steps(server, key, model).all():
            ok: bool | None = True
            try:
                detail = await step()
            except Skipped as skipped:
                ok, detail = None, str(skipped)
            except Failed as failed:
                ok, detail = False, str(failed)
            yield Finding(name, ok, server.clean(detail))
            if name == "models" and not ok:
                return


async def report(url: str, tell: Callable[[Finding], None], *, headers: Sequence[str] = (), **options: Any) -> int:
    """Looks at a running server for a command line.

    Args:
        url: As for `check`.
        tell: Shows a finding.
        headers: As they are typed, such as "X-Tenant: shop".
        options: Others of `check`.

    Returns:
        How many things are not as they should be.

    Raises:
        ConfigurationError: No request can be made of these.
    """
    failed = 0
    async with aclosing(check(url, headers=dict(map(_header, headers)), **options)) as findings:
        async for finding in findings:
            tell(finding)
            failed += finding.ok is False
    return failed


def _header(given: str) -> tuple[str, str]:
    name, colon, value = given.partition(":")
    if not colon:
        raise ConfigurationError('A header is given as --header "Name: value".')
    return name.strip(), value.strip()
