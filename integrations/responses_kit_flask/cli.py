"""`flask responses check` and `flask responses prune`."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import click
from flask import current_app
from flask.cli import AppGroup

from responses_kit.errors import ConfigurationError
from responses_kit.kit import ResponsesKit
from responses_kit.stores.maintenance import run_with_store, set_up_store
from responses_kit.stores.memory import MemoryStore

__all__ = ["commands"]


class _Commands(AppGroup):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (ConfigurationError, ImportError) as error:  # an ImportError says which extra is missing
            raise click.ClickException(str(error)) from error


commands = _Commands("responses", help="The Open Responses API of this app.")


@commands.command(with_appcontext=False)  # it may be another server than this app's
@click.argument("url")
@click.option("--key", envvar="RESPONSES_KIT_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--model", help="Which one to ask; by default the first that the server lists.")
@click.option("--header", multiple=True, metavar='"NAME: VALUE"', help="Sent as well; may be given several times.")
@click.option("--timeout", type=click.FloatRange(0.1), default=60.0, help="Seconds that each request may take.")
def check(url: str, key: str | None, model: str | None, header: tuple[str, ...], timeout: float) -> None:
    """Checks a running server from outside, as its clients see it. URL is such as http://127.0.0.1:5000/v1."""
    from responses_kit.diagnostics import VERDICTS, Finding, report  # which needs httpx

    def tell(finding: Finding) -> None:
        word, colour = VERDICTS[finding.ok]
        click.echo(f"{click.style(f'{word:8}', colour)}{finding.name:16}{finding.detail}")

    asked = functools.partial(report, url, tell, headers=header, key=key, model=model, timeout=timeout)
    if failed := anyio.run(asked):
        raise click.ClickException(f"{failed} of these are not as they should be.")


@commands.command()
def setup() -> None:
    """Makes the stores ready: creates what is missing, or brings it up to this version. Does no harm when repeated."""
    for kit in _kits():
        run_with_store(kit.store, set_up_store)
    click.echo("The stores are ready.")


@commands.command()
def prune() -> None:
    """Removes what has outlived its time, and ends responses whose worker is gone. To be run now and then."""
    for kit in _kits():
        removed, ended = run_with_store(kit.store, functools.partial(_pruned, kit))
        click.echo(f"{removed} responses removed, {ended} ended whose worker was gone.")


async def _pruned(kit: ResponsesKit, store: Any) -> tuple[int, int]:
    return await kit.prune()


def _kits() -> list[ResponsesKit]:
    """Those that keep responses somewhere else than in memory."""
    kits = current_app.extensions["responses_kit.kits"]
    found = [kit for _, kit in kits if not isinstance(kit.store, MemoryStore)]
    if not found:
        raise ConfigurationError("This app keeps responses in the memory of each process, which bounds itself.")
    return found
