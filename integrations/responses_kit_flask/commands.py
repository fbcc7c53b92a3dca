"""`flask responses check` and `flask responses prune`."""

from __future__ import annotations

import functools

import anyio
import click
from flask import current_app
from flask.cli import AppGroup

from responses_kit.errors import ConfigurationError, StoreError
from responses_kit.kit import ResponsesKit
from responses_kit.stores.memory import MemoryStore

__all__ = ["commands"]

commands = AppGroup("responses", help="The Open Responses API of this app.")


@commands.command(with_appcontext=False)  # it may be another server than this app's
@click.argument("url")
@click.option("--key", envvar="RESPONSES_KIT_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--model", help="Which one to ask; by default the first that the server lists.")
@click.option("--header", multiple=True, metavar='"NAME: VALUE"', help="Sent as well; may be given several times.")
@click.option("--timeout", type=click.FloatRange(0.1), default=60.0, help="Seconds that each request may take.")
def check(url: str, key: str | None, model: str | None, header: tuple[str, ...], timeout: float) -> None:
    """Checks a running server from outside, as its clients see it. URL is such as http://127.0.0.1:5000/v1."""
    try:
        from responses_kit.checking import Finding, report  # which needs httpx
    except ImportError as error:
        raise click.ClickException(str(error)) from error

    verdicts = {True: ("ok", "green"), False: ("failed", "red"), None: ("skipped", "yellow")}

    def tell(finding: Finding) -> None:
        word, colour = verdicts[finding.ok]
        click.echo(f"{click.style(f'{word:8}', colour)} {finding.name:16}{finding.detail}")

    try:
        asked = functools.partial(report, url, tell, headers=header, key=key, model=model, timeout=timeout)
        if failed := anyio.run(asked):
            raise click.ClickException(f"{failed} of these are not as they should be.")
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error


@commands.command()
def prune() -> None:
    """Removes what has outlived its time, and ends responses whose worker is gone. To be run now and then."""
    for kit in current_app.extensions["responses_kit"].values():
        if kit is None or isinstance(kit.store, MemoryStore):
            click.echo("A store in memory bounds itself, in each process that has one.")
            continue
        try:
            removed, ended = anyio.run(_pruned, kit)
        except StoreError as error:
            raise click.ClickException(f"The store failed: {error.__cause__ or error}") from error
        click.echo(f"{removed} responses removed, {ended} ended whose worker was gone.")


async def _pruned(kit: ResponsesKit) -> tuple[int, int]:
    try:
        return await kit.prune()
    finally:
        if hasattr(kit.store, "aclose"):
            await kit.store.aclose()
