"""The command group `flask responses`: `check`, `setup` and `prune`."""

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

__all__ = ["responses_group"]


class _ErrorReportingGroup(AppGroup):
    """A command group that reports errors of configuration without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (ConfigurationError, ImportError) as error:  # an ImportError names the extra that is missing
            raise click.ClickException(str(error)) from error


responses_group = _ErrorReportingGroup("responses", help="The Open Responses API of this app.")


@responses_group.command(with_appcontext=False)  # the URL may belong to another app
@click.argument("url")
@click.option("--key", envvar="RESPONSES_KIT_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--model", help="The model to use; by default the first that the server lists.")
@click.option("--header", multiple=True, metavar='"NAME: VALUE"', help="An additional header; can be repeated.")
@click.option("--timeout", type=click.FloatRange(0.1), default=60.0, help="Seconds that each request may take.")
def check(url: str, key: str | None, model: str | None, header: tuple[str, ...], timeout: float) -> None:
    """Check a running server as a client.

    URL is the API's base URL, such as http://127.0.0.1:5000/v1.
    """
    from responses_kit.diagnostics import VERDICTS, Finding, report  # needs httpx, which is an extra

    def print_finding(finding: Finding) -> None:
        word, colour = VERDICTS[finding.ok]
        click.echo(f"{click.style(f'{word:8}', colour)}{finding.name:16}{finding.detail}")

    run_checks = functools.partial(report, url, print_finding, headers=header, key=key, model=model, timeout=timeout)
    if failed := anyio.run(run_checks):
        raise click.ClickException(f"{failed} of these checks failed.")


@responses_group.command()
def setup() -> None:
    """Create or update the tables of the app's stores. Can be repeated safely."""
    for kit in _persistent_kits():
        run_with_store(kit.store, set_up_store)
    click.echo("The stores are ready.")


@responses_group.command()
def prune() -> None:
    """Delete expired responses and end orphaned ones. Run this regularly."""
    for kit in _persistent_kits():
        removed, ended = run_with_store(kit.store, functools.partial(_prune_store, kit))
        click.echo(f"Deleted {removed} responses, ended {ended} orphaned responses.")


async def _prune_store(kit: ResponsesKit, store: Any) -> tuple[int, int]:
    return await kit.prune()


def _persistent_kits() -> list[ResponsesKit]:
    """Return the app's kits whose store outlives the process."""
    kits = current_app.extensions["responses_kit.kits"]
    persistent = [kit for _, kit in kits if not isinstance(kit.store, MemoryStore)]
    if not persistent:
        raise ConfigurationError("This app has memory stores only, which need neither setup nor pruning.")
    return persistent
