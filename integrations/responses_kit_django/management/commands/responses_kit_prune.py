"""The command that prunes the store."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from responses_kit._concurrency import loop_thread
from responses_kit.engine.hooks import CompletionHook
from responses_kit.engine.repository import Repository
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import ResponseStore

from ...conf import Conf
from ...signals import send_response_signal


class Command(BaseCommand):
    """`manage.py responses_kit_prune`."""

    help = (
        "Deletes expired responses from the store of the setting RESPONSES_KIT, and ends orphaned responses, which have"
        " lost their worker. Run it regularly."
    )
    requires_system_checks = []  # pruning needs the store only, so the backend need not be installed

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "--max-records",
            type=int,
            metavar="N",
            help="Also delete the least recently used responses, until N are left.",
        )

    def handle(self, *, max_records: int | None = None, **options: Any) -> None:
        """Run the command."""
        if max_records is not None and max_records < 0:
            raise CommandError("--max-records must not be negative.")
        try:
            store = Conf().build_store(**({} if max_records is None else {"max_records": max_records}))
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if isinstance(store, MemoryStore):
            raise CommandError("A memory store needs no pruning: each web process limits its own.")
        try:
            deleted, ended = loop_thread.call(_prune, store)
        except Exception as error:
            raise CommandError(f"The store failed: {error.__cause__ or error}") from error
        self.stdout.write(self.style.SUCCESS(f"Deleted {deleted} responses, ended {ended} orphaned responses."))


async def _prune(store: ResponseStore) -> tuple[int, int]:
    """Return how many responses were deleted, and how many orphaned ones were ended."""
    try:
        return await Repository(store, completion_hook=CompletionHook(send_response_signal)).prune()
    finally:
        if hasattr(store, "aclose"):
            await store.aclose()
