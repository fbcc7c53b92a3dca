"""The command that checks a running server from the outside."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from functools import partial
from typing import Any

import anyio
from django.core.management.base import BaseCommand, CommandError

from responses_kit.errors import ConfigurationError


class Command(BaseCommand):
    """`manage.py responses_kit_check`."""

    help = "Checks as a client that the API of a running server works, through its proxies and middleware."
    requires_system_checks = []  # the server may belong to another project

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("url", metavar="URL", help="The base URL of the API, such as http://127.0.0.1:8000/v1.")
        parser.add_argument(
            "--key",
            default=os.environ.get("RESPONSES_KIT_API_KEY"),
            help="The API key, sent as a bearer token; by default the environment variable RESPONSES_KIT_API_KEY.",
        )
        parser.add_argument("--model", help="The model to use; by default the first that the server lists.")
        parser.add_argument(
            "--header",
            action="append",
            default=[],
            metavar='"NAME: VALUE"',
            help="An additional header; may be repeated.",
        )
        parser.add_argument(
            "--timeout", type=float, default=60.0, metavar="SECONDS", help="The timeout of each request; 60 by default."
        )

    def handle(self, url: str, *, header: list[str], **options: Any) -> None:
        """Run the command."""
        arguments = {name: options[name] for name in ("key", "model", "timeout")}
        try:
            from responses_kit.diagnostics import Finding, report  # needs httpx, an optional dependency

            verdicts = {True: self.style.SUCCESS("ok     "), False: self.style.ERROR("failed "), None: "skipped"}

            def print_finding(finding: Finding) -> None:
                self.stdout.write(f"{verdicts[finding.ok]}  {finding.name:16}{finding.detail}")

            failed = anyio.run(partial(report, url, print_finding, headers=header, **arguments))
        except (ConfigurationError, ImportError) as error:  # the ImportError names the extra that is missing
            raise CommandError(str(error)) from error
        if failed:
            raise CommandError(f"{failed} of these checks failed.")
