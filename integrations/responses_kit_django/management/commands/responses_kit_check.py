"""Looks at a running server as its clients do."""

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

    help = "Checks a running server from outside: whether what clients need gets through all that stands before it."
    requires_system_checks = []  # it may be another server than this project's

    def add_arguments(self, parser: ArgumentParser) -> None:
        """As Django asks for it."""
        parser.add_argument("url", metavar="URL", help="The API's base, such as http://127.0.0.1:8000/v1.")
        parser.add_argument(
            "--key",
            default=os.environ.get("RESPONSES_KIT_API_KEY"),
            help="Sent as a bearer token; by default what the environment has as RESPONSES_KIT_API_KEY.",
        )
        parser.add_argument("--model", help="Which to ask; by default the first that the server lists.")
        parser.add_argument(
            "--header",
            action="append",
            default=[],
            metavar='"NAME: VALUE"',
            help="Sent as well; may be given several times.",
        )
        parser.add_argument(
            "--timeout", type=float, default=60.0, metavar="SECONDS", help="What each request may take; 60 by default."
        )

    def handle(self, url: str, *, header: list[str], **options: Any) -> None:
        """As Django asks for it."""
        asked = {name: options[name] for name in ("key", "model", "timeout")}
        try:
            from responses_kit.diagnostics import Finding, report  # which needs httpx

            verdicts = {True: self.style.SUCCESS("ok     "), False: self.style.ERROR("failed "), None: "skipped"}

            def tell(finding: Finding) -> None:
                self.stdout.write(f"{verdicts[finding.ok]}  {finding.name:16}{finding.detail}")

            failed = anyio.run(partial(report, url, tell, headers=header, **asked))
        except (ConfigurationError, ImportError) as error:  # an ImportError says which extra is missing
            raise CommandError(str(error)) from error
        if failed:
            raise CommandError(f"{failed} of these are not as they should be.")
